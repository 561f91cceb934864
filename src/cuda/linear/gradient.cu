// The first step of linear's gradient on every tensor-core path: g = grad_out * activation'(preactivation), rounded to
// the dtype once and kept in the workspace, and grad_bias = the sums of its columns, before that rounding. Without an
// activation g is grad_out itself. Partial sums of runs of rows are added in the rows' order.
#include "cuda/linear/gradient.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kLanes = 32, kRowLanes = 8;
constexpr int kBiasRuns = 32;

struct GradientPlan {
  std::int64_t stride = 0;  // of g's rows, in elements: a multiple of 16 bytes
  std::int64_t chunks = 0;  // runs of rows with a partial sum each
  std::size_t gradient_bytes = 0, partial_bytes = 0;
};

GradientPlan plan_of(const LinearBackwardParams& p) {
  const std::int64_t size = p.dtype == DType::kFloat32 ? 4 : 2, elements = 16 / size;
  GradientPlan plan;
  plan.stride = ceil_div(p.out_features, elements) * elements;
  const std::int64_t across = std::max<std::int64_t>(1, ceil_div(p.out_features, kLanes * elements));
  // Eight blocks a multiprocessor in flight, but runs of 4 rows a thread at least.
  const std::int64_t most = 8LL * cuda_device_properties(p.device.index).num_sms;
  plan.chunks = std::max<std::int64_t>(1, std::min(ceil_div(most, across), ceil_div(p.rows, 4 * kRowLanes)));
  const auto round_up = [](std::int64_t bytes) { return static_cast<std::size_t>(ceil_div(bytes, 256) * 256); };
  if (p.activation != Activation::kNone) plan.gradient_bytes = round_up(p.rows * plan.stride * size);
  if (p.grad_bias) plan.partial_bytes = round_up(plan.chunks * p.out_features * 4);
  return plan;
}

template <class T, Activation kActivation>
__device__ inline float gradient_for(float x) {
  if constexpr (sizeof(T) == 4) return activation_gradient(kActivation, x);
  return activation_gradient_fast<kActivation>(x);
}

/// One vector of columns a thread, kRowLanes rows at a time. `to` (g) and `partial` may be null.
template <class T, Activation kActivation, int N>
__global__ void __launch_bounds__(kLanes* kRowLanes)
    gradient_kernel(const LinearBackwardParams p, T* to, std::int64_t stride_to, float* partial,
                    std::int64_t rows_per_chunk) {
  __shared__ float sums[kRowLanes][kLanes * N];
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x) * kLanes + threadIdx.x) * N;
  const std::int64_t first = blockIdx.y * rows_per_chunk, end = min(p.rows, first + rows_per_chunk);
  float sum[N] = {};
  if (column < p.out_features) {
#pragma unroll 4
    for (std::int64_t row = first + threadIdx.y; row < end; row += kRowLanes) {
      float g[N];
      load_floats(g, static_cast<const T*>(p.grad_out) + row * p.stride_grad_out_row + column);
      if constexpr (kActivation != Activation::kNone) {
        float x[N];
        load_floats(x, static_cast<const T*>(p.preactivation) + row * p.stride_preactivation_row + column);
#pragma unroll
        for (int i = 0; i < N; ++i) g[i] *= gradient_for<T, kActivation>(x[i]);
        store_floats(to + row * stride_to + column, g);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += g[i];
    }
  }
  if (!partial) return;
#pragma unroll
  for (int i = 0; i < N; ++i) sums[threadIdx.y][threadIdx.x * N + i] = sum[i];
  __syncthreads();
  for (int i = threadIdx.y * kLanes + threadIdx.x; i < kLanes * N; i += kLanes * kRowLanes) {
    const std::int64_t feature = static_cast<std::int64_t>(blockIdx.x) * kLanes * N + i;
    if (feature >= p.out_features) continue;
    float total = 0.0f;
#pragma unroll
    for (int y = 0; y < kRowLanes; ++y) total += sums[y][i];
    partial[blockIdx.y * p.out_features + feature] = total;
  }
}

/// A block takes kLanes columns; row lane y adds a run of chunks, then the runs are added in order.
__global__ void __launch_bounds__(kLanes* kBiasRuns)
    bias_kernel(const LinearBackwardParams p, const float* partial, std::int64_t chunks) {
  __shared__ float sums[kBiasRuns][kLanes];
  const std::int64_t feature = static_cast<std::int64_t>(blockIdx.x) * kLanes + threadIdx.x;
  const std::int64_t run = (chunks + kBiasRuns - 1) / kBiasRuns;
  const std::int64_t first = threadIdx.y * run, end = min(chunks, first + run);
  float sum = 0.0f;
  if (feature < p.out_features) {
#pragma unroll 8
    for (std::int64_t chunk = first; chunk < end; ++chunk) sum += partial[chunk * p.out_features + feature];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || feature >= p.out_features) return;
  float total = 0.0f;
#pragma unroll
  for (int y = 0; y < kBiasRuns; ++y) total += sums[y][threadIdx.x];
  store_typed(p.grad_bias, p.grad_bias_dtype, feature, total);
}

template <class T, Activation kActivation>
void launch_gradient(const LinearBackwardParams& p, const GradientPlan& plan, T* to, float* partial, cudaStream_t s) {
  constexpr int N = kVectorElements<T>;
  const auto fits = [](const void* data, std::int64_t stride) { return is_aligned(data, 16) && stride % N == 0; };
  const bool vectors = p.out_features % N == 0 && fits(p.grad_out, p.stride_grad_out_row) &&
                       (kActivation == Activation::kNone || fits(p.preactivation, p.stride_preactivation_row));
  const auto run = [&](auto kernel, int n) {
    const dim3 grid(static_cast<unsigned>(ceil_div(p.out_features, kLanes * n)), static_cast<unsigned>(plan.chunks));
    launch("linear_bwd: gradient of the pre-activation", kernel, {grid, dim3(kLanes, kRowLanes), 0, s}, p, to,
           plan.stride, partial, ceil_div(p.rows, plan.chunks));
  };
  if (vectors)
    run(gradient_kernel<T, kActivation, N>, N);
  else
    run(gradient_kernel<T, kActivation, 1>, 1);
}

}  // namespace

std::size_t linear_gradient_workspace(const LinearBackwardParams& p) {
  const GradientPlan plan = plan_of(p);
  return plan.gradient_bytes + plan.partial_bytes;
}

LinearBackwardParams linear_gradient(const LinearBackwardParams& p, void* workspace, Stream stream) {
  LinearBackwardParams rest = p;
  rest.grad_bias = nullptr;
  rest.preactivation = nullptr;
  rest.activation = Activation::kNone;
  const bool products = (p.grad_x || p.grad_weight) && p.activation != Activation::kNone;
  if (p.out_features == 0 || (!p.grad_bias && !products)) return rest;
  const CudaDeviceGuard guard(p.device.index);
  const cudaStream_t s = native(stream);
  const GradientPlan plan = plan_of(p);
  float* const partial =
      p.grad_bias ? reinterpret_cast<float*>(static_cast<char*>(workspace) + plan.gradient_bytes) : nullptr;
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* const to = static_cast<T*>(workspace);
    switch (p.activation) {
      case Activation::kGeluTanh: launch_gradient<T, Activation::kGeluTanh>(p, plan, to, partial, s); break;
      case Activation::kGelu: launch_gradient<T, Activation::kGelu>(p, plan, to, partial, s); break;
      case Activation::kSilu: launch_gradient<T, Activation::kSilu>(p, plan, to, partial, s); break;
      default: launch_gradient<T, Activation::kNone>(p, plan, to, partial, s); break;
    }
  });
  if (p.grad_bias)
    launch("linear_bwd: grad_bias", bias_kernel,
           {static_cast<unsigned>(ceil_div(p.out_features, kLanes)), dim3(kLanes, kBiasRuns), 0, s}, p, partial,
           plan.chunks);
  if (p.activation != Activation::kNone) {
    rest.grad_out = workspace;
    rest.stride_grad_out_row = plan.stride;
  }
  return rest;
}

}  // namespace flashkernel::cuda
