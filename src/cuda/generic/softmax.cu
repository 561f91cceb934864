// Softmax and log-softmax along one dim, forward and backward: one block (or warp) per row, the row in registers where
// its elements are neighbours. A row of -inf only gives 0 (log: -inf); a NaN makes its row NaN.
#include "cuda/generic/kernels.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/row.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {
namespace {

// Element offset of a row whose index runs over `ndim` merged dims.
__device__ inline std::int64_t row_offset(std::int64_t row, int ndim, const std::int64_t* shape,
                                          const std::int64_t* strides) {
  std::int64_t offset = 0;
  for (int d = ndim - 1; d > 0; --d) {
    const std::int64_t rest = row / shape[d];
    offset += (row - rest * shape[d]) * strides[d];
    row = rest;
  }
  return ndim > 0 ? offset + row * strides[0] : offset;
}

// e^(x - shift) for x <= shift: the difference is rounded once, and its error weighs |x - shift| e^(x - shift), under
// 0.4 of 2^-23 for any x.
__device__ inline float exp_of_difference(float x, float shift) {
  constexpr float kLog2E = 1.4426950408889634f;
  return ptx::exp2_approx((x - shift) * kLog2E);
}

// N neighbouring columns, or one column at its stride.
template <int N, class T>
__device__ inline Packed<T, N> load_columns(const T* row, std::int64_t first, std::int64_t stride) {
  if constexpr (N > 1) {
    return load_vector<N>(row + first);
  } else {
    return {{row[first * stride]}};
  }
}
template <class T, int N>
__device__ inline void store_columns(T* row, std::int64_t first, std::int64_t stride, const float (&values)[N]) {
  if constexpr (N > 1) {
    store_floats(row + first, values);
  } else {
    row[first * stride] = from_float<T>(values[0]);
  }
}

template <class T, int kThreads, int kRowsPerBlock, int kVectors, int N>
__global__ void __launch_bounds__(kThreads* kRowsPerBlock) softmax_kernel(const SoftmaxParams p) {
  __shared__ float scratch[kRowsPerBlock][kThreads / kWarp];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (kRowsPerBlock > 1 && row >= p.rows) return;
  const T* x = static_cast<const T*>(p.x) + row_offset(row, p.ndim, p.shape, p.stride_x);
  T* out = static_cast<T*>(p.out) + row_offset(row, p.ndim, p.shape, p.stride_out);
  const auto load = [&](std::int64_t first) { return load_columns<N>(x, first, p.stride_x_column); };
  Row<T, kThreads, kVectors, N> values(p.columns, threadIdx.x, load);

  float maximum = -INFINITY;
  values.each(load, [&](std::int64_t, float(&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) maximum = fmaxf(maximum, v[i]);  // a NaN reaches the sum below
  });
  maximum = block_reduce<kThreads>(maximum, scratch[threadIdx.y], Largest{});
  const float shift = maximum == -INFINITY ? 0.0f : maximum;
  // The exponentials stay where the row stood, if it is kept as floats.
  constexpr bool kKeeps = Row<T, kThreads, kVectors, N>::kFloats;
  float sum = 0.0f;
  values.each(load, [&](std::int64_t, float(&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float e = exp_of_difference(v[i], shift);
      sum += e;
      if (kKeeps && !p.log) v[i] = e;
    }
  });
  sum = block_reduce<kThreads>(sum, scratch[threadIdx.y], Sum{});
  // An empty denominator means a row of -inf: 0 / 1, and -inf - 0.
  const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
  const float log_sum = sum == 0.0f ? 0.0f : logf(sum);
  values.each(load, [&](std::int64_t first, float(&v)[N]) {
    float result[N];
#pragma unroll
    for (int i = 0; i < N; ++i)
      result[i] = p.log ? v[i] - shift - log_sum : (kKeeps ? v[i] : exp_of_difference(v[i], shift)) * scale;
    store_columns(out, first, p.stride_out_column, result);
  });
}

// softmax: grad_x = out * (g - sum(g * out)); log-softmax: grad_x = g - exp(out) * sum(g).
template <class T, int kThreads, int kRowsPerBlock, int kVectors, int N>
__global__ void __launch_bounds__(kThreads* kRowsPerBlock) softmax_bwd_kernel(const SoftmaxBackwardParams p) {
  __shared__ float scratch[kRowsPerBlock][kThreads / kWarp];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (kRowsPerBlock > 1 && row >= p.rows) return;
  const T* grad_out = static_cast<const T*>(p.grad_out) + row_offset(row, p.ndim, p.shape, p.stride_grad_out);
  const T* out = static_cast<const T*>(p.out) + row_offset(row, p.ndim, p.shape, p.stride_out);
  T* grad_x = static_cast<T*>(p.grad_x) + row_offset(row, p.ndim, p.shape, p.stride_grad_x);
  const auto load_grad = [&](std::int64_t first) { return load_columns<N>(grad_out, first, p.stride_grad_out_column); };
  const auto load_out = [&](std::int64_t first) { return load_columns<N>(out, first, p.stride_out_column); };
  Row<T, kThreads, kVectors, N> grads(p.columns, threadIdx.x, load_grad);

  float sum = 0.0f;
  grads.each(load_grad, [&](std::int64_t first, float(&g)[N]) {
    float y[N];
    unpack(y, load_out(first));
#pragma unroll
    for (int i = 0; i < N; ++i) sum += p.log ? g[i] : g[i] * y[i];
  });
  sum = block_reduce<kThreads>(sum, scratch[threadIdx.y], Sum{});
  grads.each(load_grad, [&](std::int64_t first, float(&g)[N]) {
    float y[N], result[N];
    unpack(y, load_out(first));
#pragma unroll
    for (int i = 0; i < N; ++i) result[i] = p.log ? g[i] - expf(y[i]) * sum : y[i] * (g[i] - sum);
    store_columns(grad_x, first, p.stride_grad_x_column, result);
  });
}

// Neighbouring columns, and every row on a 16-byte boundary.
bool vectorizable(DType dtype, std::int64_t columns, int ndim, const std::int64_t* shape, const void* data,
                  const std::int64_t* strides, std::int64_t stride_column) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  bool fits = stride_column == 1 && columns * bytes % 16 == 0 && is_aligned(data, 16);
  for (int d = 0; d < ndim; ++d) fits = fits && (shape[d] == 1 || strides[d] * bytes % 16 == 0);
  return fits;
}

}  // namespace

Verdict softmax_supports(const SoftmaxParams& p) {
  return p.rows <= 0x7fffffff ? Verdict::ok() : Verdict("more rows than a grid has blocks");
}

void softmax(const SoftmaxParams& p, void*, Stream stream) {
  if (p.rows == 0 || p.columns == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const bool vectors = vectorizable(p.dtype, p.columns, p.ndim, p.shape, p.x, p.stride_x, p.stride_x_column) &&
                       vectorizable(p.dtype, p.columns, p.ndim, p.shape, p.out, p.stride_out, p.stride_out_column);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kVectorElements<T>;
    if (!vectors) {
      launch("softmax", softmax_kernel<T, 128, 1, 0, 1>, {static_cast<unsigned>(p.rows), 128, 0, native(stream)}, p);
    } else {
      with_row_shape(p.columns / N, p.rows, cuda_device_properties(p.device.index).num_sms,
                     [&](auto threads, auto rows, auto held) {
                       launch("softmax", softmax_kernel<T, threads.value, rows.value, held.value, N>,
                              {static_cast<unsigned>(ceil_div(p.rows, rows.value)), dim3(threads.value, rows.value), 0,
                               native(stream)},
                              p);
                     });
    }
  });
}

Verdict softmax_bwd_supports(const SoftmaxBackwardParams& p) {
  return p.rows <= 0x7fffffff ? Verdict::ok() : Verdict("more rows than a grid has blocks");
}

void softmax_bwd(const SoftmaxBackwardParams& p, void*, Stream stream) {
  if (p.rows == 0 || p.columns == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const bool vectors =
      vectorizable(p.dtype, p.columns, p.ndim, p.shape, p.grad_out, p.stride_grad_out, p.stride_grad_out_column) &&
      vectorizable(p.dtype, p.columns, p.ndim, p.shape, p.out, p.stride_out, p.stride_out_column) &&
      vectorizable(p.dtype, p.columns, p.ndim, p.shape, p.grad_x, p.stride_grad_x, p.stride_grad_x_column);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kVectorElements<T>;
    if (!vectors) {
      launch("softmax_bwd", softmax_bwd_kernel<T, 128, 1, 0, 1>,
             {static_cast<unsigned>(p.rows), 128, 0, native(stream)}, p);
    } else {
      with_row_shape(p.columns / N, p.rows, cuda_device_properties(p.device.index).num_sms,
                     [&](auto threads, auto rows, auto held) {
                       launch("softmax_bwd", softmax_bwd_kernel<T, threads.value, rows.value, held.value, N>,
                              {static_cast<unsigned>(ceil_div(p.rows, rows.value)), dim3(threads.value, rows.value), 0,
                               native(stream)},
                              p);
                     });
    }
  });
}

}  // namespace flashkernel::cuda
