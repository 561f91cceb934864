// Softmax, log-softmax and their gradients of long rows on 9.0: a cluster holds a row in registers
// (pipeline/long_rows.cuh). So a row is read once and written once, where the generic kernels read it again. Called
// through the table of kernels.cpp; which rows: the supports functions. Invariant: the order of all additions follows
// from the shape.
#include "cuda/softmax/sm90a/long_rows.hpp"

#include "cuda/pipeline/long_rows.cuh"
#include "cuda/row_costs.hpp"
#include "cuda/tile/softmax_row.cuh"
#include "cuda/pipeline/turn.cuh"

namespace flashkernel::cuda::sm90a {
namespace {

namespace lr = long_rows;

template <class T, class S, bool kLog>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSm)
    softmax_kernel(const SoftmaxParams p, int num_blocks, int share) {
  using Held = typename S::template Held<T>;
  using Mail = lr::Exchange<float2, S>;  // of each warp: its largest, and the sum of e^(x - that)
  constexpr int N = Held::N;
  constexpr bool kKeeps = !kLog && sizeof(T) == 4;  // exponentials take the row's place; rounded they would be others
  __shared__ typename Mail::Shared mail;
  take_turn();
  const lr::Part part(p.columns, share);
  const std::int64_t row = lr::number_of_cluster(num_blocks);
  Held h(part.count, kMinusInfinities<T>);
  h.load(static_cast<const T*>(p.x) + strided_offset(row, p.ndim, p.shape, p.stride_x) + part.first);

  Mail exchange(mail, num_blocks);
  // Two chains side by side, here and below: each operation waits for the one before it.
  float top[2] = {-INFINITY, -INFINITY};
  h.each([&](int, const float(&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) top[i % 2] = fmaxf(top[i % 2], values[i]);  // a NaN reaches the sum below
  });
  const float maximum = warp_reduce(fmaxf(top[0], top[1]), Largest{});
  const float own = maximum == -INFINITY ? 0.0f : maximum;
  float sums[2] = {};
#pragma unroll
  for (int j = 0; j < S::kVectors; ++j) {
    float values[N];
    h.floats_again(j, values);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      values[i] = exp_of_difference(values[i], own);
      sums[i % 2] += values[i];
    }
    if constexpr (kKeeps) h.set(j, values);
  }
  exchange.all(make_float2(maximum, warp_reduce(sums[0] + sums[1], Sum{})));

  float row_maximum = -INFINITY, sum = 0.0f;
  exchange.each([&](const float2& part) { row_maximum = fmaxf(row_maximum, part.x); });
  row_maximum = warp_reduce(row_maximum, Largest{});
  const float shift = row_maximum == -INFINITY ? 0.0f : row_maximum;
  // A warp of -inf only has the sum 0, or NaN, and that whatever it is multiplied by.
  exchange.each([&](const float2& part) { sum = fmaf(part.y, exp_of_difference(part.x, shift), sum); });
  sum = warp_reduce(sum, Sum{});
  // An empty sum means a row of -inf: 0 / 1, and -inf - 0.
  const float scale = sum == 0.0f ? 0.0f : (kKeeps ? exp_of_difference(maximum, shift) : 1.0f) / sum;
  const float log_sum = sum == 0.0f ? 0.0f : logf(sum);
  T* const out = static_cast<T*>(p.out) + strided_offset(row, p.ndim, p.shape, p.stride_out) + part.first;
#pragma unroll
  for (int j = 0; j < S::kVectors; ++j) {
    float values[N];
    h.floats(j, values);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (kLog)
        values[i] = values[i] - shift - log_sum;
      else
        values[i] = (kKeeps ? values[i] : exp_of_difference(values[i], shift)) * scale;
    }
    h.store(out, j, values);
  }
}

template <class T, class S, bool kLog>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSm)
    softmax_bwd_kernel(const SoftmaxBackwardParams p, int num_blocks, int share) {
  using Held = typename S::template Held<T>;
  using Mail = lr::Exchange<float, S>;
  constexpr int N = Held::N;
  __shared__ typename Mail::Shared mail;
  take_turn();
  const lr::Part part(p.columns, share);
  const std::int64_t row = lr::number_of_cluster(num_blocks);
  Held g(part.count), h(part.count);
  g.load(static_cast<const T*>(p.grad_out) + strided_offset(row, p.ndim, p.shape, p.stride_grad_out) + part.first);
  h.load(static_cast<const T*>(p.out) + strided_offset(row, p.ndim, p.shape, p.stride_out) + part.first);

  Mail exchange(mail, num_blocks);
  float sums[2] = {};
  g.each([&](int j, const float(&grad)[N]) {
    float out[N];
    if constexpr (!kLog) h.floats(j, out);
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i % 2] = kLog ? sums[i % 2] + grad[i] : fmaf(grad[i], out[i], sums[i % 2]);
  });
  exchange.all(warp_reduce(sums[0] + sums[1], Sum{}));
  float sum = 0.0f;
  exchange.each([&](float part) { sum += part; });
  sum = warp_reduce(sum, Sum{});

  T* const grad_x = static_cast<T*>(p.grad_x) + strided_offset(row, p.ndim, p.shape, p.stride_grad_x) + part.first;
#pragma unroll
  for (int j = 0; j < S::kVectors; ++j) {
    float grad[N], out[N];
    g.floats(j, grad);
    h.floats(j, out);
#pragma unroll
    for (int i = 0; i < N; ++i) grad[i] = kLog ? grad[i] - expf(out[i]) * sum : out[i] * (grad[i] - sum);
    g.store(grad_x, j, grad);
  }
}

using Backward = lr::Shape<256, 8, 768>;  // two rows in registers

/// f(the kernel that takes these rows).
template <class F>
void with_kernel(const SoftmaxParams& p, F f) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    f(lr::kernel_of<lr::Long, T>(p.log ? softmax_kernel<T, lr::Long, true> : softmax_kernel<T, lr::Long, false>, 0,
                                 "softmax: long rows"));
  });
}
template <class F>
void with_kernel(const SoftmaxBackwardParams& p, F f) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    f(lr::kernel_of<Backward, T>(p.log ? softmax_bwd_kernel<T, Backward, true> : softmax_bwd_kernel<T, Backward, false>,
                                 0, "softmax_bwd: long rows"));
  });
}

/// `vectors`: the rows are.
template <class Params>
Verdict supports(const Params& p, bool vectors) {
  Verdict verdict = lr::serves(p.dtype, p.columns, vectors);
  if (verdict)
    with_kernel(p, [&](const auto& kernel) { verdict = lr::cluster_fits(kernel, p.columns, p.device.index); });
  return verdict;
}
template <class Params>
bool are_invariant(const Params& p) {
  return is_for_clusters(p) && supports(p, row_bytes(p.dtype, p.columns) % 16 == 0);
}
template <class Params>
Plan plan(const Params& p) {
  const CudaDeviceGuard guard(p.device.index);
  ClusterRows rows;
  with_kernel(p, [&](const auto& kernel) { rows = lr::plan_rows(kernel, p.columns, p.rows, p.device.index); });
  return Plan::of(rows);
}
template <class Params>
void run(const Params& p, const Plan& plan, Stream stream) {
  if (p.rows == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  with_kernel(p, [&](const auto& kernel) { lr::launch_rows(kernel, plan.as<ClusterRows>(), p, stream); });
}

}  // namespace

Verdict softmax_long_rows_supports(const SoftmaxParams& p) { return supports(p, rows_are_vectors(p)); }
Verdict softmax_bwd_long_rows_supports(const SoftmaxBackwardParams& p) { return supports(p, rows_are_vectors(p)); }
bool softmax_long_rows_are_invariant(const SoftmaxParams& p) { return are_invariant(p); }
bool softmax_bwd_long_rows_are_invariant(const SoftmaxBackwardParams& p) { return are_invariant(p); }
Plan plan_softmax_long_rows(const SoftmaxParams& p, const DeviceFacts&) { return plan(p); }
Plan plan_softmax_bwd_long_rows(const SoftmaxBackwardParams& p, const DeviceFacts&) { return plan(p); }
void softmax_long_rows(const SoftmaxParams& p, const Plan& plan, void*, Stream stream) { run(p, plan, stream); }
void softmax_bwd_long_rows(const SoftmaxBackwardParams& p, const Plan& plan, void*, Stream stream) {
  run(p, plan, stream);
}

}  // namespace flashkernel::cuda::sm90a
