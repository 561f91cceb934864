// What split-KV decode does with finished rows: it stores output and LSE, serves sequences without keys, and merges the
// parts of a row that several blocks have left, in the order of the blocks. Used by kernel.cuh.
#pragma once

#include <type_traits>

#include "cuda/ptx/atomic.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/attention/decode/sm80/schedule.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/pipeline/departure.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm80 {

/// Row of a query tile: query i of head h. Rows are ordered by query, then by head.
__device__ inline int query_of(int row, int group) { return row / group; }

/// Stands for the element type where a kernel's loop does not depend on it: fp16 or bf16, as the call says.
struct EitherHalf {};

/// Two numbers as elements of the output.
template <class T>
__device__ inline std::uint32_t pack_as(const AttentionParams& p, float low, float high) {
  if constexpr (!std::is_same_v<T, EitherHalf>)
    return pack<T>(low, high);
  else
    return p.dtype_q == DType::kFloat16 ? pack<__half>(low, high) : pack<__nv_bfloat16>(low, high);
}

/// A finished row, merged from its parts: sinks, LSE, and four columns of the output.
template <class T>
__device__ inline void store_row(const AttentionParams& p, bool vectors, int b, std::int64_t h, int i, int column,
                                 float maximum_log2, float sum, const float (&values)[4]) {
  constexpr float kLn2 = 0.69314718055994531f;
  SoftmaxState state;
  state.maximum = maximum_log2 * kLn2;  // -inf stays
  state.sum = sum;
  float lse;
  const float factor = state.finish(p.sinks, h, &lse);
  if (p.lse && column == 0) p.lse[p.lse_offset(b, h, i)] = lse;
  if (column >= p.head_dim_v) return;
  float scaled[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) scaled[e] = factor == 0.0f ? 0.0f : values[e] * factor;
  const uint2 packed{pack_as<T>(p, scaled[0], scaled[1]), pack_as<T>(p, scaled[2], scaled[3])};
  auto* const to = static_cast<unsigned short*>(p.out) + p.out_offset(b, h, i) + column;  // elements of 16 bits
  if (vectors && column + 4 <= p.head_dim_v) {
    *reinterpret_cast<uint2*>(to) = packed;
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (column + e < p.head_dim_v) to[e] = static_cast<unsigned short>((e < 2 ? packed.x : packed.y) >> (e % 2 * 16));
  }
}

/// Where a block leaves its part of a row. A block has two places: `begins` says whether the pair begins in this block
/// or in an earlier one.
template <int kVDim, class Float>
__device__ inline Float* partial_row(const DecodePlan& plan, Float* partials, int block, bool begins, int head,
                                     int row) {
  const std::int64_t place = 2 * block + (begins ? 1 : 0);
  return partials + ((place * plan.heads + head) * plan.rows + row) * (kVDim + 4);
}

/// The numerators of a row, four columns in each lane, with their maximum (base 2) and sum. A lane loads kInFlight
/// float4s before it uses the first.
template <int kVDim, int kInFlight>
struct Part {
  static constexpr int kPieces = (kVDim + 127) / 128;  // of 128 columns
  static constexpr int kBatch = kInFlight / kPieces;   // parts under way at a time

  float maximum = -INFINITY, sum = 0.0f, values[kPieces][4] = {};

  __device__ static int column(int piece) { return piece * 128 + static_cast<int>(threadIdx.x % kWarp) * 4; }

  /// The parts that blocks [begin, end) have left of a pair that begins in block `first`.
  __device__ void add(const DecodePlan& plan, const float* partials, int first, int begin, int end, int head, int row) {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    for (int base = begin; base < end; base += kBatch) {
      float4 loaded[kBatch][kPieces];
      const float* const from = partial_row<kVDim>(plan, partials, base, false, head, row) + column(0);
      const int place = plan.heads * plan.rows * (kVDim + 4);  // from one to the next; a block has two
      float2 state{-INFINITY, 0.0f};
      if (lane < kBatch && base + lane < end)
        state = *reinterpret_cast<const float2*>(
            partial_row<kVDim>(plan, partials, base + lane, base + lane == first, head, row) + kVDim);
#pragma unroll
      for (int k = 0; k < kBatch; ++k)
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          loaded[k][piece] = float4{};
          if (base + k < end && column(piece) < kVDim)
            loaded[k][piece] =
                *reinterpret_cast<const float4*>(from + (2 * k + (base + k == first ? 1 : 0)) * place + piece * 128);
        }
      const float highest = fmaxf(maximum, warp_reduce(state.x, [](float a, float b) { return fmaxf(a, b); }));
      const float factor = ptx::exp2_approx(state.x - SoftmaxState::shift(highest));
      const float mine = ptx::exp2_approx(maximum - SoftmaxState::shift(highest));
      maximum = highest;
      sum = sum * mine + warp_reduce(state.y * factor, Sum{});
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
        for (int e = 0; e < 4; ++e) values[piece][e] *= mine;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const float weight = __shfl_sync(kFullMask, factor, k);
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) accumulate(piece, loaded[k][piece], weight);
      }
    }
  }

  /// Hands the row over to another warp, through kVDim + 4 floats.
  __device__ void put(float* to) const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
      if (column(piece) < kVDim)
        *reinterpret_cast<float4*>(to + column(piece)) =
            float4{values[piece][0], values[piece][1], values[piece][2], values[piece][3]};
    if (threadIdx.x % kWarp == 0) to[kVDim] = maximum, to[kVDim + 1] = sum;
  }
  __device__ void join(const float* from) {
    const float highest = fmaxf(maximum, from[kVDim]);
    const float mine = ptx::exp2_approx(maximum - SoftmaxState::shift(highest));
    const float other = ptx::exp2_approx(from[kVDim] - SoftmaxState::shift(highest));
    maximum = highest;
    sum = sum * mine + from[kVDim + 1] * other;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
      for (int e = 0; e < 4; ++e) values[piece][e] *= mine;
      if (column(piece) < kVDim) accumulate(piece, *reinterpret_cast<const float4*>(from + column(piece)), other);
    }
  }

  template <class T>
  __device__ void store(const AttentionParams& p, const DecodePlan& plan, int b, std::int64_t h, int i) const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
      if (column(piece) < kVDim) store_row<T>(p, plan.vectors_out, b, h, i, column(piece), maximum, sum, values[piece]);
  }

 private:
  __device__ void accumulate(int piece, const float4& from, float weight) {
    values[piece][0] = fmaf(from.x, weight, values[piece][0]);
    values[piece][1] = fmaf(from.y, weight, values[piece][1]);
    values[piece][2] = fmaf(from.z, weight, values[piece][2]);
    values[piece][3] = fmaf(from.w, weight, values[piece][3]);
  }
};

/// Stores output 0 and LSE -inf (or the sink) for sequences without a visible key, which are dealt out over the grid.
/// One warp of a block calls it. It is not inlined: two copies in each kernel were a tenth of the machine code.
template <class T>
static __device__ __attribute__((noinline)) void store_empty_sequences(const AttentionParams& p, bool vectors) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const float zeros[4] = {};
  for (int b = static_cast<int>(blockIdx.x); b < p.batch; b += static_cast<int>(gridDim.x)) {
    if (granules_of(p, b) > 0) continue;
    const int heads = static_cast<int>(p.heads_q), rows = static_cast<int>(p.q_length(b)) * heads;
    const int columns = static_cast<int>((p.head_dim_v + 3) / 4);
    for (int at = lane; at < rows * columns; at += kWarp) {
      const int row = at / columns, i = row / heads;
      store_row<T>(p, vectors, b, row - i * heads, i, (at - row * columns) * 4, -INFINITY, 0.0f, zeros);
    }
  }
}

/// Merges one row of a pair that several blocks have worked on, where plan.combine_apart says so. Grid: (pairs that can
/// be cut, rows, heads of a group). It starts while the decode kernel runs, and finds its pair meanwhile.
constexpr int kCombineWarps = 4;
template <class T, int kVDim>
__global__ void __launch_bounds__(kCombineWarps* kWarp)
    attention_decode_combine_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ DecodePlan plan,
                                    const float* partials) {
  __shared__ float parts[kCombineWarps][kVDim + 4];
  const int warp = static_cast<int>(threadIdx.x / kWarp);
  const int row = static_cast<int>(blockIdx.y), head = static_cast<int>(blockIdx.z);
  const Schedule schedule(p, plan);
  // The pair: of this number, or, when there are more of them than borders between blocks, the one that the border
  // after this block cuts.
  Pair pair{};
  int first = 0, last = 0;
  if (plan.combine_by_pair) {
    pair = schedule.pair(p, blockIdx.x);
  } else if (static_cast<int>(blockIdx.x) + 1 < schedule.blocks()) {
    pair = schedule.pair_at(p, schedule.begin(blockIdx.x + 1) - 1);
  }
  if (pair.count > 0) {
    first = schedule.block_of(pair.start);
    last = schedule.block_of(pair.start + pair.count - 1);
  }
  bool cut = first < last && (plan.combine_by_pair || first == static_cast<int>(blockIdx.x));
  const int group = static_cast<int>(p.heads_q / p.heads_kv);
  cut = cut && row < group * static_cast<int>(p.q_length(pair.b));
  // One block waits in any case: this kernel must not end before the other one.
  if (cut || (blockIdx.x == 0 && row == 0 && head == 0)) ptx::wait_for_previous_kernel();
  if (!cut) return;

  const int count = last + 1 - first;
  Part<kVDim, 16> part;
  part.add(plan, partials, first, first + count * warp / kCombineWarps, first + count * (warp + 1) / kCombineWarps,
           head, row);
  part.put(parts[warp]);
  __syncthreads();
  if (warp != 0) return;
  for (int other = 1; other < kCombineWarps; ++other) part.join(parts[other]);
  const std::int64_t g = static_cast<std::int64_t>(pair.head_group) * plan.heads + head;
  part.template store<T>(p, plan, pair.b, g * group + row % group, query_of(row, group));
}

}  // namespace flashkernel::cuda::sm80
