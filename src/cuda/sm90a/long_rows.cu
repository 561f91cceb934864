// Softmax, log-softmax and their gradients of long rows on 9.0: a cluster walks its rows and holds each in registers,
// the next ones on their way into shared memory (long_rows.cuh). So a row is read once and written once, where the
// generic kernels read it again. Called through the table of kernels.cpp; which rows: the supports functions.
// Invariant: the order of all additions follows from the shape.
#include "cuda/sm90a/long_rows.hpp"

#include "cuda/sm90a/long_rows.cuh"
#include "cuda/tile/softmax_row.cuh"

namespace flashkernel::cuda::sm90a {
namespace {

namespace lr = long_rows;

constexpr int kSlots = 2, kBackwardSlots = 3;  // stages of x; of out, and one of grad_out, which leaves for registers
constexpr int kGradSlot = 2;

template <class T, bool kLog>
__global__ void __launch_bounds__(lr::kThreads, 1) softmax_kernel(const SoftmaxParams p, int num_blocks) {
  constexpr int N = kVectorElements<T>, kHeld = lr::kHeld;
  __shared__ lr::Exchange::Shared exchange_shared;
  const auto slot = [](int i) { return lr::slot_of(i); };
  const lr::Part<T> part(p.columns, num_blocks);
  const lr::Walk walk(num_blocks);
  const auto fetch = [&](std::int64_t row, int stage) {
    if (row < p.rows)
      slot(stage).copy(static_cast<const T*>(p.x) + strided_offset(row, p.ndim, p.shape, p.stride_x), part);
    ptx::cp_async_commit();
  };
  fetch(walk.first, 0);
  fetch(walk.first + walk.step, 1);

  lr::Exchange exchange(exchange_shared, num_blocks);
  int stage = 0;
  for (std::int64_t row = walk.first; row < p.rows; row += walk.step) {
    ptx::cp_async_wait<1>();
    float values[kHeld][N];
    float maximum = -INFINITY;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      slot(stage).template read<T>(j).floats(values[j]);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (!part.holds(j)) values[j][i] = -INFINITY;
        maximum = fmaxf(maximum, values[j][i]);  // a NaN reaches the sum below
      }
    }
    fetch(row + 2 * walk.step, stage);
    stage ^= 1;

    // This part's exponentials are taken from its own maximum, and scaled once the others' are known.
    maximum = exchange.block(maximum, Largest{});
    const float part_shift = maximum == -INFINITY ? 0.0f : maximum;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float e = exp_of_difference(values[j][i], part_shift);
        sum += e;
        if (!kLog) values[j][i] = e;
      }
    }
    sum = exchange.block(sum, Sum{});
    const float2 of_block = exchange.all({maximum, sum}, {-INFINITY, 0.0f});
    const float row_maximum = warp_reduce(of_block.x, Largest{});
    const float shift = row_maximum == -INFINITY ? 0.0f : row_maximum;
    // A part of -inf only has no maximum; its sum is 0 or NaN and stays that.
    const auto rescale = [&](float from) { return from == -INFINITY ? 1.0f : exp_of_difference(from, shift); };
    const float row_sum = warp_reduce(of_block.y * rescale(of_block.x), Sum{});
    // An empty denominator means a row of -inf: 0 / 1, and -inf - 0.
    const float scale = row_sum == 0.0f ? 0.0f : rescale(maximum) / row_sum;
    const float log_sum = row_sum == 0.0f ? 0.0f : logf(row_sum);
    T* const out = static_cast<T*>(p.out) + strided_offset(row, p.ndim, p.shape, p.stride_out);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if (!part.holds(j)) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) values[j][i] = kLog ? values[j][i] - shift - log_sum : values[j][i] * scale;
      lr::Word<T> result;
      result.set(values[j]);
      *reinterpret_cast<uint4*>(out + part.column(j)) = result.word;
    }
  }
  ptx::cp_async_wait<0>();
  exchange.finish();
}

template <class T, bool kLog>
__global__ void __launch_bounds__(lr::kThreads, 1) softmax_bwd_kernel(const SoftmaxBackwardParams p, int num_blocks) {
  constexpr int N = kVectorElements<T>, kHeld = lr::kHeld;
  __shared__ lr::Exchange::Shared exchange_shared;
  const auto slot = [](int i) { return lr::slot_of(i); };
  const lr::Part<T> part(p.columns, num_blocks);
  const lr::Walk walk(num_blocks);
  const auto fetch = [&](std::int64_t row, int stage) {
    if (row < p.rows) {
      slot(kGradSlot).copy(static_cast<const T*>(p.grad_out) + strided_offset(row, p.ndim, p.shape, p.stride_grad_out),
                           part);
      slot(stage).copy(static_cast<const T*>(p.out) + strided_offset(row, p.ndim, p.shape, p.stride_out), part);
    }
    ptx::cp_async_commit();
  };
  fetch(walk.first, 0);

  lr::Exchange exchange(exchange_shared, num_blocks);
  int stage = 0;
  for (std::int64_t row = walk.first; row < p.rows; row += walk.step, stage ^= 1) {
    ptx::cp_async_wait<0>();
    lr::Word<T> g[kHeld];
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      float grad[N], out[N];
      g[j] = slot(kGradSlot).template read<T>(j);
      g[j].floats(grad);
      if constexpr (!kLog) slot(stage).template read<T>(j).floats(out);
#pragma unroll
      for (int i = 0; i < N; ++i) sum += kLog ? grad[i] : grad[i] * out[i];
    }
    fetch(row + walk.step, stage ^ 1);
    sum = exchange.block(sum, Sum{});
    sum = warp_reduce(exchange.all({sum, 0.0f}, {0.0f, 0.0f}).x, Sum{});
    T* const grad_x = static_cast<T*>(p.grad_x) + strided_offset(row, p.ndim, p.shape, p.stride_grad_x);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if (!part.holds(j)) continue;
      float grad[N], out[N];
      g[j].floats(grad);
      slot(stage).template read<T>(j).floats(out);
#pragma unroll
      for (int i = 0; i < N; ++i) grad[i] = kLog ? grad[i] - expf(out[i]) * sum : out[i] * (grad[i] - sum);
      lr::Word<T> result;
      result.set(grad);
      *reinterpret_cast<uint4*>(grad_x + part.column(j)) = result.word;
    }
  }
  exchange.finish();
}

template <class T>
void launch_softmax(const SoftmaxParams& p, Stream stream) {
  lr::launch_rows("softmax: long rows", p.log ? softmax_kernel<T, true> : softmax_kernel<T, false>, kSlots, p.rows,
                  p.columns / kVectorElements<T>, p.device.index, stream, p);
}
template <class T>
void launch_softmax_bwd(const SoftmaxBackwardParams& p, Stream stream) {
  lr::launch_rows("softmax_bwd: long rows", p.log ? softmax_bwd_kernel<T, true> : softmax_bwd_kernel<T, false>,
                  kBackwardSlots, p.rows, p.columns / kVectorElements<T>, p.device.index, stream, p);
}

}  // namespace

Verdict softmax_long_rows_supports(const SoftmaxParams& p) {
  return lr::serves(p.dtype, p.columns, rows_are_vectors(p));
}
Verdict softmax_bwd_long_rows_supports(const SoftmaxBackwardParams& p) {
  return lr::serves(p.dtype, p.columns, rows_are_vectors(p));
}

void softmax_long_rows(const SoftmaxParams& p, void*, Stream stream) {
  if (p.rows == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) { launch_softmax<decltype(zero)>(p, stream); });
}

void softmax_bwd_long_rows(const SoftmaxBackwardParams& p, void*, Stream stream) {
  if (p.rows == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) { launch_softmax_bwd<decltype(zero)>(p, stream); });
}

}  // namespace flashkernel::cuda::sm90a
