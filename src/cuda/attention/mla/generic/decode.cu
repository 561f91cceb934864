// attention_mla_decode in fp32 arithmetic, for any GPU, dtype, head dims and form of latent rows. A block has kRows
// query rows of a sequence and a part of its keys; eight latent rows at a time lie in shared memory, for the scores and
// for the results. A second kernel merges the parts by their maxima. Lengths and the page table are read on the device,
// so that a captured graph replays with other lengths.
//
// Invariant: tiles of keys lie at fixed places of a part. With one part, as in the invariant mode, what a row does not
// see changes no bit of it.
#include "cuda/attention/mla/mla.hpp"
#include "cuda/attention/score.cuh"
#include "cuda/host/launch.hpp"
#include "cuda/tile/latent_row.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kRows = 8, kKeys = kWarps;  // of a block, of a tile: a warp has a key
constexpr int kMaxDim = 576, kMaxValueDim = 512;
constexpr int kColumns = kMaxValueDim / kThreads;  // of the result, in a thread
constexpr int kLeastKeysPerPart = 64, kMostParts = 32;
constexpr float kHidden = -1.0f;  // instead of a weight: the query does not see the key

// A row's part of the result: numerators (head_dim_v of them), then maximum and sum.
__host__ __device__ inline std::int64_t partial_floats(const AttentionParams& p) { return p.head_dim_v + 2; }

// Row r of a sequence is query r / heads_q of head r % heads_q.
template <class T>
__global__ void __launch_bounds__(kThreads)
    mla_split_kernel(const MlaDecodeParams params, float* __restrict__ partials) {
  const AttentionParams& p = params.attention;
  __shared__ float query[kRows][kMaxDim], key[kKeys][kMaxDim];
  __shared__ float weights[kRows][kKeys], factors[kRows];
  const int parts = static_cast<int>(gridDim.x), part = static_cast<int>(blockIdx.x);
  const int first_row = static_cast<int>(blockIdx.y) * kRows, rows = static_cast<int>(p.heads_q * p.seq_q);
  const int heads = static_cast<int>(p.heads_q), dim = static_cast<int>(p.head_dim),
            dim_v = static_cast<int>(p.head_dim_v);
  const std::int64_t b = blockIdx.z, k_len = p.k_length(b);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;

  for (int r = warp; r < kRows; r += kWarps) {
    const int row = first_row + r;
    const T* const from =
        static_cast<const T*>(p.q) + (row < rows ? p.q_offset(b, row % heads, row / heads) : std::int64_t{0});
    for (int d = lane; d < dim; d += kWarp) query[r][d] = row < rows ? to_float(from[d]) : 0.0f;
  }

  // Keys [begin, end) of this part, of those that the block's last row sees.
  const std::int64_t seen = p.last_key((min(rows, first_row + kRows) - 1) / heads, p.seq_q, k_len);
  std::int64_t length = (k_len + parts - 1) / parts;
  length = max(static_cast<std::int64_t>(kLeastKeysPerPart), (length + kKeys - 1) / kKeys * kKeys);
  const std::int64_t begin = part * length, end = min(seen, begin + length);

  // The softmax of row r is thread r's.
  const int own_row = first_row + thread;
  const bool own = thread < kRows && own_row < rows;
  const std::int64_t own_last = own ? p.last_key(own_row / heads, p.seq_q, k_len) : 0;
  SoftmaxState state;
  float out[kRows][kColumns] = {};
  for (std::int64_t first = begin; first < end; first += kKeys) {
    __syncthreads();  // the last tile is used up
    const std::int64_t j = first + warp;
    const LatentRow<T> from(params, j < end ? p.k_offset(b, 0, j) : std::int64_t{0});
    float sums[kRows] = {};
    for (int d = lane; d < dim; d += kWarp) {
      const float x = j < end ? from[d] : 0.0f;
      key[warp][d] = x;
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = fmaf(query[r][d], x, sums[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r] = warp_reduce(sums[r], Sum{});
      if (lane == 0) weights[r][warp] = sums[r];
    }
    __syncthreads();
    if (thread < kRows) {
      float maximum = state.maximum, scores[kKeys];
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        const bool visible = first + k < min(end, own_last);
        scores[k] = visible ? weights[thread][k] * p.scale : -INFINITY;
        maximum = fmaxf(maximum, scores[k]);
      }
      const float shift = SoftmaxState::shift(maximum), factor = expf(state.maximum - shift);
      state.sum *= factor;
      state.maximum = maximum;
      factors[thread] = factor;
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        const bool visible = first + k < min(end, own_last);
        const float weight = expf(scores[k] - shift);
        if (visible) state.sum += weight;
        weights[thread][k] = visible ? weight : kHidden;
      }
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = c * kThreads + thread;
      if (column >= dim_v) break;
#pragma unroll
      for (int r = 0; r < kRows; ++r) out[r][c] *= factors[r];
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        const float value = key[k][column];
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          if (!(weights[r][k] < 0.0f)) out[r][c] = fmaf(weights[r][k], value, out[r][c]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t row = first_row + r;
    if (row >= rows) break;
    float* const to = partials + ((b * rows + row) * parts + part) * partial_floats(p);
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (c * kThreads + thread < dim_v) to[c * kThreads + thread] = out[r][c];
    if (thread == r) to[dim_v] = state.maximum, to[dim_v + 1] = state.sum;
  }
}

// One block for each row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    mla_merge_kernel(const AttentionParams p, int parts, const float* __restrict__ partials) {
  const std::int64_t row = blockIdx.x, b = blockIdx.z, rows = p.heads_q * p.seq_q, h = row % p.heads_q,
                     i = row / p.heads_q;
  const float* const from = partials + (b * rows + row) * parts * partial_floats(p);
  SoftmaxState state;
  for (int s = 0; s < parts; ++s) state.maximum = fmaxf(state.maximum, from[s * partial_floats(p) + p.head_dim_v]);
  const float shift = SoftmaxState::shift(state.maximum);
  for (int s = 0; s < parts; ++s) {
    const float* const part = from + s * partial_floats(p) + p.head_dim_v;
    state.sum += part[1] * expf(part[0] - shift);
  }
  float lse;
  const float factor = state.finish(nullptr, h, &lse);
  if (threadIdx.x == 0 && p.lse) p.lse[p.lse_offset(b, h, i)] = lse;
  T* const out = static_cast<T*>(p.out) + p.out_offset(b, h, i);
  for (std::int64_t d = threadIdx.x; d < p.head_dim_v; d += kThreads) {
    float value = 0.0f;
    for (int s = 0; s < parts; ++s) {
      const float* const part = from + s * partial_floats(p);
      value += part[d] * expf(part[p.head_dim_v] - shift);
    }
    out[d] = from_float<T>(factor == 0.0f ? 0.0f : value * factor);
  }
}

std::int64_t row_blocks_of(const AttentionParams& p) { return ceil_div(p.heads_q * p.seq_q, std::int64_t{kRows}); }

// Enough blocks for four a multiprocessor, but no part below kLeastKeysPerPart keys.
int parts_of(const AttentionParams& p, bool invariant) {
  if (invariant) return 1;
  const std::int64_t blocks = std::max<std::int64_t>(1, p.batch * row_blocks_of(p));
  const std::int64_t wanted = ceil_div(std::int64_t{4} * cuda_device_properties(p.device.index).num_sms, blocks);
  const std::int64_t most = std::max<std::int64_t>(1, p.seq_k / kLeastKeysPerPart);
  return static_cast<int>(std::min({wanted, most, std::int64_t{kMostParts}}));
}

}  // namespace

Verdict mla_decode_supports(const MlaDecodeParams& params) {
  const AttentionParams& p = params.attention;
  if (p.batch > 65535 || row_blocks_of(p) > 65535) return "batch or heads_q * seq_q is too large for one grid";
  return Verdict::ok();
}

std::size_t mla_decode_workspace(const MlaDecodeParams& params, bool invariant) {
  const AttentionParams& p = params.attention;
  return sizeof(float) *
         static_cast<std::size_t>(p.batch * p.heads_q * p.seq_q * parts_of(p, invariant) * partial_floats(p));
}

void mla_decode(const MlaDecodeParams& params, bool invariant, void* workspace, Stream stream) {
  const AttentionParams& p = params.attention;
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  auto* const partials = static_cast<float*>(workspace);
  const int parts = parts_of(p, invariant);
  const auto batch = static_cast<unsigned>(p.batch), row_blocks = static_cast<unsigned>(row_blocks_of(p));
  visit_floating(p.dtype_q, [&](auto zero) {
    using T = decltype(zero);
    launch("attention_mla_decode", mla_split_kernel<T>,
           {dim3(static_cast<unsigned>(parts), row_blocks, batch), kThreads, 0, native(stream)}, params, partials);
    launch("attention_mla_decode: merge", mla_merge_kernel<T>,
           {dim3(static_cast<unsigned>(p.heads_q * p.seq_q), 1, batch), kThreads, 0, native(stream)}, p, parts,
           static_cast<const float*>(partials));
  });
}

}  // namespace flashkernel::cuda
