// The second of a row of ever faster kernels: FlashAttention (Dao et al., 2022; Algorithm 1 with the loop order of
// FlashAttention-2) in plain FFMA. A block owns kBlockM queries of one head and walks the visible keys in tiles of
// kBlockN. Scores lie in registers and one shared tile, so memory does not grow with seq_q * seq_k. It takes any dtype,
// any head_dim, and every option.
#include "cuda/attention/generic_tile.cuh"
#include "cuda/attention/generic.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/quantized.cuh"

namespace flashkernel::cuda {
namespace {

// Shared memory in fp32: slices of Q [kSlices][kBlockM][QkRows::kLd], a slice of K and then of V [kBlockN][kWidestLd],
// P [kBlockM][kLdP].
template <class Tile>
constexpr int kSharedBytes = (Tile::kSlices * Tile::kBlockM * Tile::QkRows::kLd + Tile::kBlockN * Tile::kWidestLd +
                              Tile::kBlockM * Tile::kLdP) *
                             4;

/// One kernel for all dtypes: they differ in how tiles are loaded and rows are stored.
template <class Tile>
__global__ void __launch_bounds__(kTileThreads) attention_kernel(const AttentionParams p, bool vectors) {
  using QkRows = typename Tile::QkRows;
  using VRows = typename Tile::VRows;
  constexpr int kSliceOfQ = Tile::kBlockM * QkRows::kLd;
  extern __shared__ float4 shared[];
  float* tile_q = reinterpret_cast<float*>(shared);
  float* tile_kv = tile_q + Tile::kSlices * kSliceOfQ;
  float* tile_p = tile_kv + Tile::kBlockN * Tile::kWidestLd;
  const std::int64_t b = blockIdx.z, h = blockIdx.y, g = h * p.heads_kv / p.heads_q;
  const ScoreContext at(p, b, h);
  const std::int64_t first_query = static_cast<std::int64_t>(blockIdx.x) * Tile::kBlockM;
  if (first_query >= at.q_len) return;
  const std::int64_t last_query = min(at.q_len, first_query + Tile::kBlockM) - 1;
  const std::int64_t first_key = p.first_key(b, first_query, at.q_len, at.k_len);
  const std::int64_t last_key = p.last_key(last_query, at.q_len, at.k_len);
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;

#pragma unroll 1
  for (int s = 0; s < Tile::kSlices; ++s) {
    const std::int64_t column = s * Tile::kQkDim;
    load_rows<QkRows, Tile::kBlockM>(tile_q + s * kSliceOfQ, p.q, p.dtype_q, p.head_dim - column, vectors,
                                     at.q_len - first_query,
                                     [&](int row) { return p.q_offset(b, h, first_query + row) + column; });
  }

  SoftmaxState state[Tile::kRowsM];
  float out[Tile::kSlices][Tile::kRowsM][VRows::kColumns][4] = {};
  // Tiles are counted from key 0, so that a row's sums do not depend on which rows stand beside it under a window. Keys
  // before the first one that the block sees may be gone: the first one stands in for them, masked.
  for (std::int64_t tile = first_key / Tile::kBlockN * Tile::kBlockN; tile < last_key; tile += Tile::kBlockN) {
    const auto key = [&](int row) { return max(first_key, tile + row); };
    float score[Tile::kRowsM][Tile::kRowsN] = {};
#pragma unroll 1
    for (int s = 0; s < Tile::kSlices; ++s) {
      const std::int64_t column = s * Tile::kQkDim;
      __syncthreads();  // what was there is read
      load_rows<QkRows, Tile::kBlockN>(
          tile_kv, p.k, p.dtype, p.head_dim - column, vectors, last_key - tile,
          [&](int row) { return p.k_offset(b, g, key(row)) + column; }, CacheRows{p, b, g, column, false, key});
      __syncthreads();
      row_products<QkRows>(score, tile_q + s * kSliceOfQ, tile_kv);
    }

#pragma unroll
    for (int r = 0; r < Tile::kRowsM; ++r) {
      const std::int64_t i = first_query + ty + 16 * r;
      const std::int64_t first = p.first_key(b, i, at.q_len, at.k_len);
      const std::int64_t last = i < at.q_len ? p.last_key(i, at.q_len, at.k_len) : 0;
      bool visible[Tile::kRowsN];
      float maximum = state[r].maximum;
#pragma unroll
      for (int c = 0; c < Tile::kRowsN; ++c) {
        const std::int64_t j = tile + tx + 16 * c;
        visible[c] = j >= first && j < last;
        score[r][c] = visible[c] ? modified_score(p, at, i, j, score[r][c]) : -INFINITY;
        visible[c] = score[r][c] != -INFINITY;  // a bias of -inf hides a key like any mask
        maximum = fmaxf(maximum, score[r][c]);
      }
      maximum = reduce_16(maximum, [](float a, float b) { return fmaxf(a, b); });
      const float shift = SoftmaxState::shift(maximum);
      const float correction = expf(state[r].maximum - shift);
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < Tile::kRowsN; ++c) {
        const float probability = visible[c] ? expf(score[r][c] - shift) : kMasked;
        if (visible[c]) sum += probability;
        tile_p[(ty + 16 * r) * Tile::kLdP + tx + 16 * c] = probability;
      }
      state[r].sum = state[r].sum * correction + reduce_16(sum, Sum{});
      state[r].maximum = maximum;
#pragma unroll
      for (int s = 0; s < Tile::kSlices; ++s)
#pragma unroll
        for (int c = 0; c < VRows::kColumns; ++c)
#pragma unroll
          for (int e = 0; e < 4; ++e) out[s][r][c][e] *= correction;
    }
    const auto probability = [&](int r, int n) { return tile_p[(ty + 16 * r) * Tile::kLdP + n]; };
#pragma unroll
    for (int s = 0; s < Tile::kSlices; ++s) {
      const std::int64_t column = s * Tile::kVDim;
      __syncthreads();  // K, or the last slice, is read; P is written
      load_rows<VRows, Tile::kBlockN>(
          tile_kv, p.v, p.dtype, p.head_dim_v - column, vectors, last_key - tile,
          [&](int row) { return p.v_offset(b, g, key(row)) + column; }, CacheRows{p, b, g, column, true, key});
      __syncthreads();
      accumulate_rows<VRows, Tile::kBlockN>(out[s], tile_kv, probability,
                                            [&](int r, int n) { return probability(r, n) < 0.0f; });
    }
  }

#pragma unroll
  for (int r = 0; r < Tile::kRowsM; ++r) {
    const std::int64_t i = first_query + ty + 16 * r;
    if (i >= at.q_len) continue;
    float lse;
    const float factor = state[r].finish(p.sinks, h, &lse);
    if (tx == 0 && p.lse) p.lse[p.lse_offset(b, h, i)] = lse;
#pragma unroll
    for (int s = 0; s < Tile::kSlices; ++s)
      store_row<VRows>(p.out, p.dtype_q, p.out_offset(b, h, i) + s * Tile::kVDim, p.head_dim_v - s * Tile::kVDim,
                       out[s][r], factor);
  }
}

template <class Tile>
void launch_instance(const AttentionParams& p, cudaStream_t stream) {
  const auto fits = [](const void* data, DType dtype, std::int64_t a, std::int64_t b, std::int64_t c) {
    const auto n = static_cast<std::int64_t>(16 / dtype_bytes(dtype));
    return is_aligned(data, 16) && a % n == 0 && b % n == 0 && c % n == 0;
  };
  const bool vectors = p.head_dim % 4 == 0 && p.head_dim_v % 4 == 0 &&
                       fits(p.q, p.dtype_q, p.stride_q_batch, p.stride_q_head, p.stride_q_token) &&
                       fits(p.k, p.dtype, p.stride_k_batch, p.stride_k_head, p.stride_k_token) &&
                       fits(p.v, p.dtype, p.stride_v_batch, p.stride_v_head, p.stride_v_token);
  const auto kernel = attention_kernel<Tile>;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.seq_q, Tile::kBlockM)), static_cast<unsigned>(p.heads_q),
                  static_cast<unsigned>(p.batch));
  launch("attention_fwd tiled", kernel, {grid, kTileThreads, kSharedBytes<Tile>, stream}, p, vectors);
}

}  // namespace

Verdict attention_fwd_tiled_supports(const AttentionParams& p) {
  if (p.batch > 65535 || p.heads_q > 65535) return "batch or heads_q is over 65535";
  return Verdict::ok();
}

void attention_fwd_tiled(const AttentionParams& p, void*, Stream stream) {
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
  // Of the 64 KB of 7.5: 51, 59, 51 and 51 KB.
  if (dim <= 64) return launch_instance<Tile<64, 64, 64, 64>>(p, native(stream));
  if (dim <= 128) return launch_instance<Tile<64, 32, 128, 128>>(p, native(stream));
  if (dim <= 256) return launch_instance<Tile<32, 16, 256, 256>>(p, native(stream));
  return launch_instance<Tile<16, 16, 256, 256, 2>>(p, native(stream));
}

}  // namespace flashkernel::cuda
