// Attention for few queries over a long cache: split-KV (Flash-Decoding). A block takes one chunk of the keys for kRows
// query heads that share a kv head, so K and V are streamed once for all of them; a second kernel merges the chunks by
// their LSE. Lengths and the page table are read on the device; the grid depends on the largest length only, so that a
// captured graph replays with other lengths. Bound by memory.
#include "cuda/attention/generic.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/packed.cuh"
#include "cuda/tile/quantized.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kLeastKeysPerSplit = 128;
constexpr int kMostSplits = 64;
constexpr float kHidden = -1.0f;  // instead of a probability: the query does not see the key

// A row's partial result: numerators (head_dim_v of them), then maximum and sum.
__host__ __device__ inline std::int64_t partial_floats(const AttentionParams& p) { return p.head_dim_v + 2; }

// Elements that a lane loads at once: 16 bytes, or 8 of 8-bit ones, since a lane holds no more of a short row.
template <class K>
inline constexpr int kPiece = kQuantized<K> ? 8 : kVectorElements<K>;

// In place of an element's type: 4-bit ones, whose scales belong to groups of a row.
struct FourBits {};
template <>
inline constexpr int kPiece<FourBits> = 8;
template <class K>
inline constexpr bool kNarrow = kQuantized<K> || std::is_same_v<K, FourBits>;

// K: elements of keys and values. kLanesPerKey lanes share a key's row and a value's, in pieces of N elements: piece c
// covers columns [(c * kLanesPerKey + lane) * N, +N).
template <class K, int kRows, int kQkDim, int kVDim>
__global__ void __launch_bounds__(kWarp* kWarps)
    split_kernel(const AttentionParams p, int splits, bool vectors, float* __restrict__ partials) {
  constexpr int N = kPiece<K>;
  constexpr int kLanesPerKey = kQkDim > 256 || kVDim > 256 ? 16 : 8, kKeysPerWarp = kWarp / kLanesPerKey;
  constexpr int kQkElements = kQkDim / kLanesPerKey, kVElements = kVDim / kLanesPerKey;
  constexpr int kQkPieces = kQkElements / N, kVPieces = kVElements / N;
  __shared__ float query[kRows][kQkDim];
  __shared__ float merged[kWarps][kRows][kVDim];
  __shared__ float merged_state[kWarps][kRows][2];
  // At most 16 rows a kv head: 32-bit numbers, whose division is short.
  const int group = static_cast<int>(p.heads_q / p.heads_kv);
  const int row_blocks = (group * static_cast<int>(p.seq_q) + kRows - 1) / kRows;
  const int split = blockIdx.x, block_row = static_cast<int>(blockIdx.y);
  const int first_row = block_row % row_blocks * kRows;
  const std::int64_t g = block_row / row_blocks, b = blockIdx.z;
  const std::int64_t q_len = p.q_length(b), k_len = p.k_length(b);
  const int q_rows = static_cast<int>(min(group * q_len, static_cast<std::int64_t>(row_blocks * kRows)));
  if (first_row >= q_rows) return;
  const int lane = threadIdx.x % kLanesPerKey, key_lane = threadIdx.x / kLanesPerKey;
  const int warp = static_cast<int>(threadIdx.y);

  // Row r is query i = r / group of head g * group + r % group.
  for (int at = threadIdx.y * kWarp + threadIdx.x; at < kRows * kQkDim; at += kWarp * kWarps) {
    const int r = at / kQkDim, d = at % kQkDim;
    const int row = first_row + r;
    query[r][d] = row < q_rows && d < p.head_dim
                      ? load_typed(p.q, p.dtype_q, p.q_offset(b, g * group + row % group, row / group) + d)
                      : 0.0f;
  }
  __syncthreads();

  const std::int64_t first_key = p.first_key(b, first_row / group, q_len, k_len);
  const std::int64_t last_key = p.last_key((min(q_rows, first_row + kRows) - 1) / group, q_len, k_len);
  // Chunks of whole warps' worth of keys, the same for every block of this sequence.
  const std::int64_t visible_keys = last_key > first_key ? last_key - first_key : 0;
  std::int64_t chunk = (visible_keys + splits - 1) / splits;
  chunk = max(static_cast<std::int64_t>(kLeastKeysPerSplit), (chunk + 15) / 16 * 16);
  const std::int64_t begin = first_key + split * chunk, end = min(last_key, begin + chunk);

  // The lanes of a key share its scores and each row's softmax: lane r has row r's (and so have those kRows further),
  // and hands round what the others need.
  const int own_row = min(first_row + lane % kRows, q_rows - 1);
  const bool own = first_row + lane % kRows < q_rows;
  const std::int64_t own_i = own_row / group, own_h = g * group + own_row % group;
  const ScoreContext own_at(p, b, own_h);
  const std::int64_t own_first = p.first_key(b, own_i, q_len, k_len), own_last = p.last_key(own_i, q_len, k_len);
  const auto of_row = [&](float of_lane, int r) {
    return __shfl_sync(kFullMask, of_lane, key_lane * kLanesPerKey + r);
  };
  SoftmaxState state;
  float out[kRows][kVElements] = {};
  [[maybe_unused]] const auto load_row = [&](const K* from, std::int64_t dim, auto& to) {
    if constexpr (!std::is_same_v<K, FourBits>) {
      constexpr int kPieces = static_cast<int>(sizeof(to) / sizeof(to[0])) / N;
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
        const int column = (c * kLanesPerKey + lane) * N;
        float piece[N];
        if (vectors && column + N <= dim) {
          load_floats(piece, from + column);
        } else {
#pragma unroll
          for (int e = 0; e < N; ++e) piece[e] = column + e < dim ? to_float(from[column + e]) : 0.0f;
        }
#pragma unroll
        for (int e = 0; e < N; ++e) to[c * N + e] = piece[e];
      }
    }
  };

  [[maybe_unused]] const auto load_four_bits = [&](const PackedRow& row, std::int64_t dim, auto& to) {
    constexpr int kPieces = static_cast<int>(sizeof(to) / sizeof(to[0])) / N;
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      float piece[8];
      load_packed(row, (c * kLanesPerKey + lane) * 8, static_cast<int>(dim), vectors, piece);
#pragma unroll
      for (int e = 0; e < 8; ++e) to[c * 8 + e] = piece[e];
    }
  };

  constexpr int kStep = kWarps * kKeysPerWarp;
  const std::int64_t warp_begin = begin + warp * kKeysPerWarp;
  const int turns = warp_uniform(static_cast<int>((max(begin, end) - warp_begin + kStep - 1) / kStep));
  for (int turn = 0; turn < turns; ++turn) {
    const std::int64_t j = warp_begin + static_cast<std::int64_t>(turn) * kStep + key_lane;
    const bool inside = j < end;
    float key[kQkElements], value[kVElements], key_scale = 1.0f;
    if (inside) {
      if constexpr (std::is_same_v<K, FourBits>) {
        load_four_bits(p.k_packed(b, g, j), p.head_dim, key);
        load_four_bits(p.v_packed(b, g, j), p.head_dim_v, value);
      } else {
        load_row(static_cast<const K*>(p.k) + p.k_offset(b, g, j), p.head_dim, key);
        load_row(static_cast<const K*>(p.v) + p.v_offset(b, g, j), p.head_dim_v, value);
      }
      if constexpr (kQuantized<K>) {
        key_scale = p.k_scale(b, g, j);
        const float value_scale = p.v_scale(b, g, j);
#pragma unroll
        for (int e = 0; e < kVElements; ++e) value[e] *= value_scale;
      }
    } else {
#pragma unroll
      for (int e = 0; e < kQkElements; ++e) key[e] = 0.0f;
#pragma unroll
      for (int e = 0; e < kVElements; ++e) value[e] = 0.0f;
    }
    float own_dot = 0.0f;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float dot = 0.0f;
#pragma unroll
      for (int c = 0; c < kQkPieces; ++c)
#pragma unroll
        for (int e = 0; e < N; ++e) dot = fmaf(query[r][(c * kLanesPerKey + lane) * N + e], key[c * N + e], dot);
#pragma unroll
      for (int step = kLanesPerKey / 2; step > 0; step /= 2) dot += __shfl_xor_sync(kFullMask, dot, step);
      if (lane % kRows == r) own_dot = dot;
    }
    if constexpr (kQuantized<K>) own_dot *= key_scale;
    const bool visible = inside && own && j >= own_first && j < own_last;
    const float score = visible ? modified_score(p, own_at, own_i, j, own_dot) : -INFINITY;
    const float maximum = fmaxf(state.maximum, score), shift = SoftmaxState::shift(maximum);
    const float correction = expf(state.maximum - shift);
    const float probability = visible ? expf(score - shift) : 0.0f;
    state.sum = state.sum * correction + probability;
    state.maximum = maximum;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float factor = of_row(correction, r), weight = of_row(visible ? probability : kHidden, r);
#pragma unroll
      for (int e = 0; e < kVElements; ++e) {
        out[r][e] *= factor;
        if (!(weight < 0.0f)) out[r][e] = fmaf(weight, value[e], out[r][e]);
      }
    }
  }

  // Merge the key lanes of a warp (shuffles), then the warps (shared memory), then hand the chunk's result over.
#pragma unroll
  for (int step = kLanesPerKey; step < kWarp; step *= 2) {
    const float other_maximum = __shfl_xor_sync(kFullMask, state.maximum, step);
    const float other_sum = __shfl_xor_sync(kFullMask, state.sum, step);
    const float maximum = fmaxf(state.maximum, other_maximum), shift = SoftmaxState::shift(maximum);
    const float mine = expf(state.maximum - shift), other = expf(other_maximum - shift);
    state.sum = state.sum * mine + other_sum * other;
    state.maximum = maximum;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float row_mine = of_row(mine, r), row_other = of_row(other, r);
#pragma unroll
      for (int e = 0; e < kVElements; ++e)
        out[r][e] = out[r][e] * row_mine + __shfl_xor_sync(kFullMask, out[r][e], step) * row_other;
    }
  }
  if (key_lane == 0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kVPieces; ++c)
#pragma unroll
        for (int e = 0; e < N; ++e) merged[warp][r][(c * kLanesPerKey + lane) * N + e] = out[r][c * N + e];
    if (lane < kRows) {
      merged_state[warp][lane][0] = state.maximum;
      merged_state[warp][lane][1] = state.sum;
    }
  }
  __syncthreads();
  for (int at = threadIdx.y * kWarp + threadIdx.x; at < kRows * kVDim; at += kWarp * kWarps) {
    const int r = at / kVDim, d = at % kVDim;
    if (first_row + r >= q_rows || d >= p.head_dim_v) continue;
    float maximum = -INFINITY, sum = 0.0f, value = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) maximum = fmaxf(maximum, merged_state[w][r][0]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float factor = expf(merged_state[w][r][0] - SoftmaxState::shift(maximum));
      sum += merged_state[w][r][1] * factor;
      value += merged[w][r][d] * factor;
    }
    const int row = first_row + r;
    float* partial = partials + (((b * p.heads_kv + g) * group * p.seq_q + row) * splits + split) * partial_floats(p);
    partial[d] = value;
    if (d == 0) {
      partial[p.head_dim_v] = maximum;
      partial[p.head_dim_v + 1] = sum;
    }
  }
}

// One block per query row.
template <class T>
__global__ void __launch_bounds__(128) combine_kernel(const AttentionParams p, int splits, const float* partials) {
  const std::int64_t group = p.heads_q / p.heads_kv;
  const std::int64_t row = blockIdx.x, g = blockIdx.y, b = blockIdx.z, i = row / group, h = g * group + row % group;
  if (i >= p.q_length(b)) return;
  const float* rows = partials + ((b * p.heads_kv + g) * group * p.seq_q + row) * splits * partial_floats(p);
  SoftmaxState state;
  for (int s = 0; s < splits; ++s) state.maximum = fmaxf(state.maximum, rows[s * partial_floats(p) + p.head_dim_v]);
  const float shift = SoftmaxState::shift(state.maximum);
  for (int s = 0; s < splits; ++s) {
    const float* partial = rows + s * partial_floats(p) + p.head_dim_v;
    state.sum += partial[1] * expf(partial[0] - shift);
  }
  float lse;
  const float factor = state.finish(p.sinks, h, &lse);
  if (threadIdx.x == 0 && p.lse) p.lse[p.lse_offset(b, h, i)] = lse;
  T* out = static_cast<T*>(p.out) + p.out_offset(b, h, i);
  for (std::int64_t d = threadIdx.x; d < p.head_dim_v; d += blockDim.x) {
    float value = 0.0f;
    for (int s = 0; s < splits; ++s) {
      const float* partial = rows + s * partial_floats(p);
      value += partial[d] * expf(partial[p.head_dim_v] - shift);
    }
    out[d] = from_float<T>(factor == 0.0f ? 0.0f : value * factor);
  }
}

// Enough blocks for two waves, but no chunk below kLeastKeysPerSplit keys.
int num_splits(const AttentionParams& p, int rows_per_block) {
  const std::int64_t blocks = p.batch * p.heads_kv * ceil_div(p.heads_q / p.heads_kv * p.seq_q, rows_per_block);
  const std::int64_t wanted =
      ceil_div(4 * cuda_device_properties(p.device.index).num_sms, std::max<std::int64_t>(1, blocks));
  const std::int64_t most = std::max<std::int64_t>(1, p.seq_k / kLeastKeysPerSplit);
  return static_cast<int>(std::min({wanted, most, static_cast<std::int64_t>(kMostSplits)}));
}

int rows_per_block(const AttentionParams& p) {
  const std::int64_t rows = p.heads_q / p.heads_kv * p.seq_q;
  const bool short_rows = std::max(p.head_dim, p.head_dim_v) <= 128;
  // Few calls over keys of 8 and 4 bits come here: they share one kernel for any number of rows.
  if (p.quantization) return short_rows ? 4 : 2;
  return rows >= 4 && short_rows ? 4 : (rows >= 2 ? 2 : 1);
}

template <class K, int kRows, int kQkDim, int kVDim>
void launch_instance(const AttentionParams& p, float* partials, cudaStream_t stream) {
  constexpr int N = kPiece<K>;
  const auto fits = [](const void* data, std::int64_t a, std::int64_t b, std::int64_t c) {
    if (std::is_same_v<K, FourBits>) return is_aligned(data, 4) && a % 4 == 0 && b % 4 == 0 && c % 4 == 0;
    return is_aligned(data, N * sizeof(K)) && a % N == 0 && b % N == 0 && c % N == 0;
  };
  const bool vectors = fits(p.k, p.stride_k_batch, p.stride_k_head, p.stride_k_token) &&
                       fits(p.v, p.stride_v_batch, p.stride_v_head, p.stride_v_token);
  const int splits = num_splits(p, kRows);
  const std::int64_t group = p.heads_q / p.heads_kv;
  const dim3 grid(static_cast<unsigned>(splits), static_cast<unsigned>(p.heads_kv * ceil_div(group * p.seq_q, kRows)),
                  static_cast<unsigned>(p.batch));
  launch("attention_fwd decode", split_kernel<K, kRows, kQkDim, kVDim>, {grid, dim3(kWarp, kWarps), 0, stream}, p,
         splits, vectors, partials);
}

template <class K, int kRows>
void launch_for_dim(const AttentionParams& p, float* partials, cudaStream_t stream) {
  const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
  if constexpr (!kNarrow<K> || kRows == 4) {
    if (dim <= 64) return launch_instance<K, kRows, 64, 64>(p, partials, stream);
    if (dim <= 128) return launch_instance<K, kRows, 128, 128>(p, partials, stream);
  }
  if constexpr (kRows <= 2) {
    if (dim <= 256) return launch_instance<K, kRows, 256, 256>(p, partials, stream);
    launch_instance<K, kRows, 512, 512>(p, partials, stream);
  }
}

}  // namespace

Verdict attention_fwd_decode_supports(const AttentionParams& p) {
  if (p.heads_q / p.heads_kv * p.seq_q > 16) return "it takes at most 16 query rows for each kv head";
  if (p.batch > 65535 || p.heads_kv * 16 > 65535) return "batch or heads_kv is too large for one grid";
  return Verdict::ok();
}

std::size_t attention_fwd_decode_workspace(const AttentionParams& p) {
  return sizeof(float) *
         static_cast<std::size_t>(p.batch * p.heads_q * p.seq_q * num_splits(p, rows_per_block(p)) * partial_floats(p));
}

void attention_fwd_decode(const AttentionParams& p, void* workspace, Stream stream) {
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  auto* partials = static_cast<float*>(workspace);
  const auto launch_split = [&](auto zero) {
    using K = decltype(zero);
    const int rows = rows_per_block(p);
    if (rows == 4) return launch_for_dim<K, 4>(p, partials, native(stream));
    if (rows == 2) return launch_for_dim<K, 2>(p, partials, native(stream));
    if constexpr (!kNarrow<K>) launch_for_dim<K, 1>(p, partials, native(stream));
  };
  if (p.quantization.packed)
    launch_split(FourBits{});
  else
    visit_cache(p.dtype, launch_split);
  const int splits = num_splits(p, rows_per_block(p));
  const auto rows = static_cast<unsigned>(p.heads_q / p.heads_kv * p.seq_q);
  visit_floating(p.dtype_q, [&](auto zero) {
    launch("attention_fwd decode: combine", combine_kernel<decltype(zero)>,
           {dim3(rows, static_cast<unsigned>(p.heads_kv), static_cast<unsigned>(p.batch)), 128, 0, native(stream)}, p,
           splits, partials);
  });
}

}  // namespace flashkernel::cuda
