// merge_states: attention over disjoint sets of keys from the results over each, weighted by exp(lse - max). Bound by
// memory: as many lanes as 16-byte pieces make a row (at most a warp) take a row each, and every lane works out the
// row's weights for itself, from LSEs that the row's lanes read in one access. Pairs whose rows are at most a warp's
// pieces have a kernel without a loop.
#include <cstdlib>
#include <type_traits>

#include "cuda/attention/generic.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/pipeline/turn.cuh"
#include "cuda/tile/divisor.cuh"
#include "cuda/tile/held_row.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;

/// How a row's number becomes its three indices.
struct RowIndices {
  bool one_dim, few;  // all rows one stride apart; fewer than 2^31 of them
  Divisor by_last, by_middle;
};

/// kPair: parts a and b; else p.parts of them in a. kWidth: elements that a lane moves at once. 2^lanes_log2 lanes take
/// a row.
template <class T, class Out, int kWidth, bool kPair>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ MergeStatesParams p, const RowIndices indices, int lanes_log2) {
  const std::int64_t rows = p.shape[0] * p.shape[1] * p.shape[2];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int rows_of_warp = kWarp >> lanes_log2, my_row = lane >> lanes_log2, my_lane = lane & ((1 << lanes_log2) - 1);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * (kThreads / kWarp) * rows_of_warp;
  for (std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * (kThreads / kWarp) + warp) * rows_of_warp;
       first < rows; first += step) {
    const std::int64_t row = first + my_row;
    float maximum = -INFINITY, sum = 0.0f;
    std::int64_t lse_to = 0;
    if (row < rows) {
      std::int64_t x0 = 0, x1 = 0, x2 = row;
      if (!indices.one_dim) {
        if (indices.few) {
          const auto small = static_cast<std::uint32_t>(row), above = indices.by_last.divide(small);
          const std::uint32_t top = indices.by_middle.divide(above);
          x2 = small - above * indices.by_last.value;
          x1 = above - top * indices.by_middle.value;
          x0 = top;
        } else {
          const std::int64_t above = row / p.shape[2];
          x2 = row - above * p.shape[2];
          x0 = above / p.shape[1];
          x1 = above - x0 * p.shape[1];
        }
      }
      const auto offset = [&](const std::int64_t(&s)[3]) {
        return indices.one_dim ? x2 * s[2] : x0 * s[0] + x1 * s[1] + x2 * s[2];
      };
      const T* const a = static_cast<const T*>(p.out_a) + offset(p.stride_out_a);
      const float* const lses = p.lse_a + offset(p.stride_lse_a);
      Out* const out = static_cast<Out*>(p.out) + offset(p.stride_out);
      lse_to = p.lse ? offset(p.stride_lse) : 0;
      const int first_column = my_lane * kWidth, columns = static_cast<int>(p.head_dim), stride = kWidth << lanes_log2;
      const auto weight_of = [&](float lse) { return lse == -INFINITY ? 0.0f : expf(lse - maximum); };

      if constexpr (kPair) {
        const T* const b = static_cast<const T*>(p.out_b) + offset(p.stride_out_b);
        const float lse_a = *lses, lse_b = p.lse_b[offset(p.stride_lse_b)];
        maximum = Max{}(lse_a, lse_b);
        const float weight_a = weight_of(lse_a), weight_b = weight_of(lse_b);
        sum = weight_a + weight_b;
        const float scale = 1.0f / sum, share_a = weight_a * scale, share_b = weight_b * scale;
        // The rows are loaded without waiting for the LSEs; an empty part counts nothing, whatever its output holds.
        for (int column = first_column; column < columns; column += stride) {
          const auto from_a = load_vector<kWidth>(a + column), from_b = load_vector<kWidth>(b + column);
          float x[kWidth], y[kWidth];
          unpack(x, from_a);
          unpack(y, from_b);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            const float of_a = lse_a == -INFINITY ? 0.0f : x[i] * share_a;
            x[i] = lse_b == -INFINITY ? of_a : fmaf(y[i], share_b, of_a);
          }
          store_floats<kWidth>(out + column, x);
        }
      } else {
        const int parts = static_cast<int>(p.parts);
        for (int i = 0; i < parts; ++i) maximum = Max{}(maximum, lses[i * p.stride_lse_part]);
        for (int i = 0; i < parts; ++i) sum += weight_of(lses[i * p.stride_lse_part]);
        const float scale = 1.0f / sum;
        for (int column = first_column; column < columns; column += stride) {
          float total[kWidth] = {};
#pragma unroll 4
          for (int i = 0; i < parts; ++i) {
            const float lse = lses[i * p.stride_lse_part];
            if (lse == -INFINITY) continue;  // an empty part is not read
            const float share = expf(lse - maximum) * scale;
            float x[kWidth];
            unpack(x, load_vector<kWidth>(a + i * p.stride_out_part + column));
#pragma unroll
            for (int j = 0; j < kWidth; ++j) total[j] = fmaf(x[j], share, total[j]);
          }
          store_floats<kWidth>(out + column, total);
        }
      }
    }
    __syncwarp();  // out may be out_a, lse may be lse_a: all lanes of the row have read them
    if (row < rows && my_lane == 0 && p.lse) p.lse[lse_to] = maximum == -INFINITY ? -INFINITY : maximum + logf(sum);
  }
}

constexpr int kPairThreads = 128;  // of a block without a loop: small, so that a multiprocessor is refilled in steps

/// Strides of a pair whose offsets have 31 bits.
struct NarrowStrides {
  int out_a[3], out_b[3], out[3], lse_a[3], lse_b[3], lse[3];
};

/// The same of a pair, for rows of at most kWarp vectors: one vector of each part a thread, and no loop. The offsets
/// are most of the kernel's instructions, and have half as many in 32 bits. All loads start before the first is used.
template <class T>
__global__ void __launch_bounds__(kPairThreads, blocks_of(2048, kPairThreads))
    merge_pairs_kernel(const __grid_constant__ MergeStatesParams p, const __grid_constant__ NarrowStrides strides,
                       const RowIndices indices, int rows, int lanes_log2) {
  constexpr int N = kVectorElements<T>;
  take_turn();
  const int lane = static_cast<int>(threadIdx.x) & ((1 << lanes_log2) - 1), column = lane * N;
  const int row = static_cast<int>((blockIdx.x * kPairThreads + threadIdx.x) >> lanes_log2);
  float maximum = -INFINITY, sum = 0.0f;
  int lse_to = 0;
  if (row < rows) {
    const std::uint32_t above = indices.by_last.divide(static_cast<std::uint32_t>(row));
    const auto x0 = static_cast<int>(indices.by_middle.divide(above));
    const int x1 = static_cast<int>(above) - x0 * static_cast<int>(indices.by_middle.value);
    const int x2 = row - static_cast<int>(above * indices.by_last.value);
    const auto offset = [&](const int(&s)[3]) { return x0 * s[0] + x1 * s[1] + x2 * s[2]; };
    const bool there = column < static_cast<int>(p.head_dim);
    const auto words_at = [&](const void* data, const int(&s)[3]) {
      return reinterpret_cast<const Words<T>*>(static_cast<const T*>(data) + offset(s) + column);
    };
    Words<T> from_a{}, from_b{};
    if (there) from_a = *words_at(p.out_a, strides.out_a);
    if (there) from_b = *words_at(p.out_b, strides.out_b);
    const float lse_a = p.lse_a[offset(strides.lse_a)], lse_b = p.lse_b[offset(strides.lse_b)];
    lse_to = offset(strides.lse);
    maximum = Max{}(lse_a, lse_b);
    const auto weight_of = [&](float lse) { return lse == -INFINITY ? 0.0f : expf(lse - maximum); };
    const float weight_a = weight_of(lse_a), weight_b = weight_of(lse_b);
    sum = weight_a + weight_b;
    const float scale = 1.0f / sum, share_a = weight_a * scale, share_b = weight_b * scale;
    float x[N], y[N];
    from_a.floats(x);
    from_b.floats(y);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float of_a = lse_a == -INFINITY ? 0.0f : x[i] * share_a;
      x[i] = lse_b == -INFINITY ? of_a : fmaf(y[i], share_b, of_a);
    }
    from_a.set(x);
    if (there) *reinterpret_cast<Words<T>*>(static_cast<T*>(p.out) + offset(strides.out) + column) = from_a;
  }
  __syncwarp();  // lse may be lse_a: all lanes of the row have read it
  if (row < rows && lane == 0 && p.lse) p.lse[lse_to] = maximum == -INFINITY ? -INFINITY : maximum + logf(sum);
}

/// Copies strides; returns whether all offsets of a row of `columns` have 31 bits.
bool narrow(const MergeStatesParams& p, std::int64_t columns, const std::int64_t (&strides)[3], int (&to)[3]) {
  std::int64_t reach = columns;
  for (int d = 0; d < 3; ++d) {
    if (p.shape[d] > 1) reach += (p.shape[d] - 1) * std::abs(strides[d]);
    to[d] = p.shape[d] > 1 ? static_cast<int>(strides[d]) : 0;
  }
  return reach < std::int64_t{1} << 31;
}

template <class T>
bool launch_pairs(const MergeStatesParams& p, const RowIndices& indices, std::int64_t rows, int lanes_log2,
                  Stream stream) {
  NarrowStrides strides{};
  const bool fits = narrow(p, p.head_dim, p.stride_out_a, strides.out_a) &&
                    narrow(p, p.head_dim, p.stride_out_b, strides.out_b) &&
                    narrow(p, p.head_dim, p.stride_out, strides.out) && narrow(p, 1, p.stride_lse_a, strides.lse_a) &&
                    narrow(p, 1, p.stride_lse_b, strides.lse_b) && (!p.lse || narrow(p, 1, p.stride_lse, strides.lse));
  if (!fits || rows << lanes_log2 >= std::int64_t{1} << 31) return false;
  launch("merge_states", merge_pairs_kernel<T>,
         {static_cast<unsigned>(ceil_div(rows << lanes_log2, kPairThreads)), kPairThreads, 0, native(stream), true}, p,
         strides, indices, static_cast<int>(rows), lanes_log2);
  return true;
}

template <class T, class Out>
void launch_for(const MergeStatesParams& p, Stream stream) {
  constexpr int N = kVectorElements<T>;
  const auto fits = [](const void* data, std::size_t bytes, const std::int64_t(&strides)[3], std::int64_t part) {
    bool all = is_aligned(data, bytes) && part % N == 0;
    for (const std::int64_t stride : strides) all = all && stride % N == 0;
    return all;
  };
  const bool vectors = p.head_dim % N == 0 && fits(p.out_a, N * sizeof(T), p.stride_out_a, p.stride_out_part) &&
                       (!p.is_pair || fits(p.out_b, N * sizeof(T), p.stride_out_b, 0)) &&
                       fits(p.out, N * sizeof(Out), p.stride_out, 0);
  const std::int64_t rows = p.shape[0] * p.shape[1] * p.shape[2], pieces = p.head_dim / (vectors ? N : 1);
  int lanes_log2 = 0;
  while (lanes_log2 < 5 && (std::int64_t{1} << lanes_log2) < pieces) ++lanes_log2;
  RowIndices indices{};
  indices.one_dim = p.shape[0] * p.shape[1] == 1;
  indices.few = rows < std::int64_t{1} << 31;
  if (indices.few) {
    indices.by_last = Divisor(p.shape[2]);
    indices.by_middle = Divisor(p.shape[1]);
  }
  if constexpr (std::is_same_v<T, Out>) {
    if (p.is_pair && vectors && pieces <= kWarp && indices.few && launch_pairs<T>(p, indices, rows, lanes_log2, stream))
      return;
  }
  const std::int64_t blocks = ceil_div(rows << lanes_log2, kThreads);
  auto* const kernel = p.is_pair ? (vectors ? merge_kernel<T, Out, N, true> : merge_kernel<T, Out, 1, true>)
                                 : (vectors ? merge_kernel<T, Out, N, false> : merge_kernel<T, Out, 1, false>);
  // A block for each of a GPU's places many times over: short blocks keep more loads under way than a loop does.
  launch("merge_states", kernel, {grid_size(blocks, p.device.index, 1024), kThreads, 0, native(stream)}, p, indices,
         lanes_log2);
}

}  // namespace

Verdict merge_states_supports(const MergeStatesParams&) { return Verdict::ok(); }

void merge_states(const MergeStatesParams& p, void*, Stream stream) {
  if (p.shape[0] * p.shape[1] * p.shape[2] == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  if (p.dtype == p.out_dtype) {
    visit_floating(p.dtype, [&](auto zero) { launch_for<decltype(zero), decltype(zero)>(p, stream); });
  } else if (p.out_dtype == DType::kFloat16) {
    launch_for<float, __half>(p, stream);
  } else {
    launch_for<float, __nv_bfloat16>(p, stream);
  }
}

}  // namespace flashkernel::cuda
