// Cross-entropy forward and backward, one block per row of logits; the probabilities are never written. The reduction
// over rows runs in one block, in row order, so that the loss is the same bit for bit every time.
#include "cuda/generic/kernels.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;

// N > 1: rows start at 16-byte boundaries; the last classes % N are taken one by one.
template <class T, int N, class F>
__device__ inline void each_class(const T* row, std::int64_t classes, F f) {
  const std::int64_t whole = classes / N * N;
#pragma unroll 2
  for (std::int64_t i = threadIdx.x * N; i < whole; i += kThreads * N) {
    float values[N];
    load_floats(values, row + i);
    f(i, values);
  }
  if constexpr (N > 1) {
    const std::int64_t i = whole + threadIdx.x;
    if (i < classes) {
      float value[1] = {to_float(row[i])};
      f(i, value);
    }
  }
}

__device__ inline float exp_of(float x) { return ptx::exp2_approx(x * 1.4426950408889634f); }

// Loss of one row; NaN for a target that does not exist.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) rows_kernel(const CrossEntropyParams p, float* losses) {
  __shared__ float scratch[kThreads / kWarp];
  const std::int64_t row = blockIdx.x;
  const T* logits = static_cast<const T*>(p.logits) + row * p.stride_logits_row;
  const std::int64_t target = p.targets[row];

  // Online maximum and sum: one pass over the row.
  float maximum = -INFINITY, sum = 0.0f, total = 0.0f;
  each_class<T, N>(logits, p.classes, [&](std::int64_t, auto& values) {
    float highest = maximum;
    for (const float x : values) highest = fmaxf(highest, x);
    if (highest > maximum) {
      sum *= exp_of(maximum - highest);
      maximum = highest;
    }
    const float shift = maximum == -INFINITY ? 0.0f : maximum;
    for (const float x : values) {
      sum += exp_of(x - shift);  // a NaN comes here and stays
      total += x;
    }
  });
  const float row_maximum = block_reduce<kThreads>(maximum, scratch, Max{});
  sum = block_reduce<kThreads>(maximum == -INFINITY && sum == 0.0f ? 0.0f : sum * exp_of(maximum - row_maximum),
                               scratch, Sum{});
  if (p.label_smoothing > 0.0f) total = block_reduce<kThreads>(total, scratch, Sum{});
  if (threadIdx.x != 0) return;
  const float lse = row_maximum + logf(sum);
  if (p.lse) p.lse[row] = lse;
  float loss = 0.0f;
  if (target != p.ignore_index) {
    if (target < 0 || target >= p.classes) {
      loss = NAN;
    } else {
      loss = lse - to_float(logits[target]);
      if (p.label_smoothing > 0.0f)
        loss = (1.0f - p.label_smoothing) * loss + p.label_smoothing * (lse - total / static_cast<float>(p.classes));
    }
  }
  losses[row] = loss;
}

__device__ inline float counted_rows(IndexArray targets, std::int64_t rows, std::int64_t ignore_index, float* scratch) {
  float counted = 0.0f;
  for (std::int64_t row = threadIdx.x; row < rows; row += kThreads)
    counted += targets[row] != ignore_index ? 1.0f : 0.0f;
  return block_reduce<kThreads>(counted, scratch, Sum{});
}

__global__ void __launch_bounds__(kThreads) reduce_rows_kernel(const CrossEntropyParams p, const float* losses) {
  __shared__ float scratch[kThreads / kWarp];
  float sum = 0.0f;
  for (std::int64_t row = threadIdx.x; row < p.rows; row += kThreads) sum += losses[row];
  sum = block_reduce<kThreads>(sum, scratch, Sum{});
  if (p.reduction == Reduction::kMean) sum /= counted_rows(p.targets, p.rows, p.ignore_index, scratch);
  if (threadIdx.x == 0) p.loss[0] = sum;
}

// Factor of every row's gradient: grad_loss, over the rows counted for a mean.
__global__ void __launch_bounds__(kThreads) scale_kernel(const CrossEntropyBackwardParams p, float* scale) {
  __shared__ float scratch[kThreads / kWarp];
  const float counted =
      p.reduction == Reduction::kMean ? counted_rows(p.targets, p.rows, p.ignore_index, scratch) : 1.0f;
  if (threadIdx.x == 0) scale[0] = p.grad_loss[0] / counted;
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) bwd_kernel(const CrossEntropyBackwardParams p, const float* scale) {
  const std::int64_t row = blockIdx.x;
  const T* logits = static_cast<const T*>(p.logits) + row * p.stride_logits_row;
  T* grad = static_cast<T*>(p.grad_logits) + row * p.stride_grad_logits_row;
  const std::int64_t target = p.targets[row];
  const bool ignored = target == p.ignore_index, unknown = target < 0 || target >= p.classes;
  const float factor = scale ? scale[0] : p.grad_loss[row];
  const float lse = p.lse[row];
  const float smooth = p.label_smoothing / static_cast<float>(p.classes);
  each_class<T, N>(logits, p.classes, [&](std::int64_t first, auto& values) {
    constexpr int kCount = static_cast<int>(sizeof(values) / sizeof(float));
    float g[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      g[i] = exp_of(values[i] - lse) - smooth;
      if (first + i == target) g[i] -= 1.0f - p.label_smoothing;
      g[i] = ignored ? 0.0f : (unknown ? NAN : g[i] * factor);
    }
    store_floats(grad + first, g);
  });
}

bool is_vectorizable(DType dtype, std::int64_t rows, const void* data, std::int64_t stride) {
  return is_aligned(data, 16) && (rows == 1 || stride * static_cast<std::int64_t>(dtype_bytes(dtype)) % 16 == 0);
}

}  // namespace

Verdict cross_entropy_supports(const CrossEntropyParams& p) {
  return p.rows <= 0x7fffffff ? Verdict::ok() : Verdict("more rows than a grid has blocks");
}

std::size_t cross_entropy_workspace(const CrossEntropyParams& p) {
  return p.reduction == Reduction::kNone ? 0 : sizeof(float) * static_cast<std::size_t>(p.rows);
}

void cross_entropy(const CrossEntropyParams& p, void* workspace, Stream stream) {
  const CudaDeviceGuard guard(p.device.index);
  float* losses = p.reduction == Reduction::kNone ? p.loss : static_cast<float*>(workspace);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.rows == 0) return;
    const auto kernel = is_vectorizable(p.dtype, p.rows, p.logits, p.stride_logits_row)
                            ? rows_kernel<T, kVectorElements<T>>
                            : rows_kernel<T, 1>;
    launch("cross_entropy", kernel, {static_cast<unsigned>(p.rows), kThreads, 0, native(stream)}, p, losses);
  });
  if (p.reduction == Reduction::kNone) return;
  launch("cross_entropy: reduce", reduce_rows_kernel, {1, kThreads, 0, native(stream)}, p, losses);
}

Verdict cross_entropy_bwd_supports(const CrossEntropyBackwardParams& p) {
  return p.rows <= 0x7fffffff ? Verdict::ok() : Verdict("more rows than a grid has blocks");
}

std::size_t cross_entropy_bwd_workspace(const CrossEntropyBackwardParams& p) {
  return p.reduction == Reduction::kNone ? 0 : sizeof(float);
}

void cross_entropy_bwd(const CrossEntropyBackwardParams& p, void* workspace, Stream stream) {
  if (p.rows == 0 || p.classes == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  float* scale = p.reduction == Reduction::kNone ? nullptr : static_cast<float*>(workspace);
  if (scale) {
    launch("cross_entropy_bwd: scale", scale_kernel, {1, kThreads, 0, native(stream)}, p, scale);
  }
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = is_vectorizable(p.dtype, p.rows, p.logits, p.stride_logits_row) &&
                                is_vectorizable(p.dtype, p.rows, p.grad_logits, p.stride_grad_logits_row)
                            ? bwd_kernel<T, kVectorElements<T>>
                            : bwd_kernel<T, 1>;
    launch("cross_entropy_bwd", kernel, {static_cast<unsigned>(p.rows), kThreads, 0, native(stream)}, p, scale);
  });
}

}  // namespace flashkernel::cuda
