// Rows whose LSE is far from 0, in the backward pass of calls with a bias. If a bias of -FLT_MAX masks all keys of a
// row, its scores and its LSE are -3.4e38, and the LSE has no digits left for the logarithm of the number of keys. Then
// exp(score - LSE) is 1 for each of n keys, where it should be 1 / n.
//
// One pass over LSE finds such rows. For each of them a warp computes the logarithm of the sum of these exponentials,
// which only the generic kernel uses (steps.hpp). The other kernels get an LSE of -inf for the row, which says that the
// row sees nothing, or of NaN, and then the generic kernel computes all gradients again. A row whose gradient is 0 from
// the start, as that of padding is, needs none of this.
#include <cfloat>

#include "cuda/attention/generic.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/attention/score.cuh"
#include "cuda/attention/key_range.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;

// Whether the gradient of a row's output is 0 and its output finite, so that the row adds 0 to every gradient. A whole
// warp calls it.
__device__ bool gives_nothing(const AttentionBackwardParams& p, std::int64_t b, std::int64_t h, std::int64_t i) {
  const AttentionParams& f = p.forward;
  const std::int64_t begin = f.is_varlen_q() ? f.q_begin(b) : 0;
  const std::int64_t out = f.out_offset(b, h, i);
  const std::int64_t grad_out = row_offset(f.is_varlen_q(), begin, b, h, i, p.stride_grad_out_batch,
                                           p.stride_grad_out_head, p.stride_grad_out_token);
  bool something = p.grad_lse && p.grad_lse[row_offset(f.is_varlen_q(), begin, b, h, i, p.stride_grad_lse_batch,
                                                       p.stride_grad_lse_head, p.stride_grad_lse_token)] != 0.0f;
#pragma unroll 1
  for (std::int64_t d = threadIdx.x % kWarp; d < f.head_dim_v; d += kWarp)
    something |= !(load_typed(p.grad_out, f.dtype, grad_out + d) == 0.0f) ||
                 !(load_typed(f.out, f.dtype, out + d) * 0.0f == 0.0f);
  return !__any_sync(kFullMask, something);
}

// log(sum exp(score - lse)) of a row. A whole warp calls it. Scores are rounded as in backward.cu.
__device__ float log_sum(const AttentionParams& f, std::int64_t b, std::int64_t h, std::int64_t i, float lse) {
  const ScoreContext at(f, b, h);
  const std::int64_t g = h * f.heads_kv / f.heads_q, q = f.q_offset(b, h, i);
  const std::int64_t last = f.last_key(i, at.q_len, at.k_len), k_begin = f.is_varlen_k() ? f.k_begin(b) : 0;
  float maximum = -INFINITY, sum = 0.0f;
  const auto join = [&](float x) {
    if (x == -INFINITY) return;  // hidden by the bias
    const float larger = Max{}(maximum, x);
    sum = sum * expf(maximum - larger) + expf(x - larger);
    maximum = larger;
  };
#pragma unroll 1
  for (std::int64_t j = f.first_key(i, at.q_len, at.k_len) + threadIdx.x % kWarp; j < last; j += kWarp) {
    const std::int64_t k =
        row_offset(f.is_varlen_k(), k_begin, b, g, j, f.stride_k_batch, f.stride_k_head, f.stride_k_token);
    float dot = 0.0f, capped;
#pragma unroll 1
    for (std::int64_t d = 0; d < f.head_dim; ++d)
      dot = fmaf(load_typed(f.q, f.dtype, q + d), load_typed(f.k, f.dtype, k + d), dot);
    join(modified_score(f, at, i, j, dot, &capped) - lse);
  }
  if (f.sinks && threadIdx.x % kWarp == 0) join(f.sinks[h] - lse);
  const float top = warp_reduce(maximum, Max{});
  return top + logf(warp_reduce(maximum == -INFINITY ? 0.0f : sum * expf(maximum - top), Sum{}));
}

__global__ void __launch_bounds__(kThreads)
    large_rows_kernel(const AttentionBackwardParams p, float* lse, float* rest, int* found, bool as_nan) {
  const AttentionParams& f = p.forward;
  const std::int64_t rows = f.batch * f.heads_q * f.seq_q, step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  bool any = false;
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kThreads; first < rows; first += step) {
    const auto lse_of = [&](std::int64_t row) {
      const std::int64_t b = row / f.seq_q / f.heads_q, i = row % f.seq_q;
      return i < f.q_length(b) ? f.lse[f.lse_offset(b, row / f.seq_q % f.heads_q, i)] : 0.0f;
    };
    const std::int64_t row = first + threadIdx.x, warp_row = first + threadIdx.x / kWarp * kWarp;
    const float own = row < rows ? lse_of(row) : 0.0f;
    const bool large = fabsf(own) >= kLargeLse && fabsf(own) < INFINITY;
    float value = 0.0f;
#pragma unroll 1
    for (unsigned left = __ballot_sync(kFullMask, large); left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const std::int64_t large_row = warp_row + lane, i = large_row % f.seq_q, h = large_row / f.seq_q % f.heads_q;
      const std::int64_t b = large_row / f.seq_q / f.heads_q;
      float result = INFINITY;
      if (!gives_nothing(p, b, h, i)) result = log_sum(f, b, h, i, __shfl_sync(kFullMask, own, lane));
      if (threadIdx.x % kWarp == static_cast<unsigned>(lane))
        value = result == 0.0f ? FLT_MIN : result;  // not 0: large
    }
    if (row >= rows) continue;
    const bool again = value != 0.0f && value != INFINITY;
    any |= again;
    rest[row] = value;
    lse[row] = value == 0.0f ? own : again && as_nan ? NAN : -INFINITY;
  }
  any = __syncthreads_or(any);
  if (threadIdx.x == 0) found[blockIdx.x] = any;
}

// There are few blocks, since each leaves a number that every block of the generic kernel reads.
constexpr std::int64_t kMostBlocks = 256;
std::int64_t num_blocks(std::int64_t rows) { return std::min(ceil_div(rows, kThreads), kMostBlocks); }
std::int64_t num_rows(const AttentionBackwardParams& p) {
  return p.forward.bias.data ? p.forward.batch * p.forward.heads_q * p.forward.seq_q : 0;
}

}  // namespace

std::size_t large_rows_workspace(const AttentionBackwardParams& p) {
  return sizeof(float) * static_cast<std::size_t>(2 * num_rows(p) + num_blocks(num_rows(p)));
}

LargeRows find_large_rows(const AttentionBackwardParams& p, void* workspace, bool as_nan, Stream stream) {
  const std::int64_t rows = num_rows(p);
  if (rows == 0) return {};
  auto* const lse = static_cast<float*>(workspace);
  auto* const found = reinterpret_cast<int*>(lse + 2 * rows);
  const CudaDeviceGuard guard(p.forward.device.index);
  launch("attention_bwd: large rows", large_rows_kernel,
         {static_cast<unsigned>(num_blocks(rows)), kThreads, 0, native(stream)}, p, lse, lse + rows, found, as_nan);
  return {lse, lse + rows, found, static_cast<int>(num_blocks(rows))};
}

}  // namespace flashkernel::cuda
