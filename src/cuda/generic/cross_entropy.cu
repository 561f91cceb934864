// Cross-entropy forward and backward, one block per row of logits; the probabilities are never written. The reduction
// over rows runs in one block, in an order of its own, so that the loss is the same bit for bit every time.
#include "cuda/generic/kernels.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/held_row.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/softmax_row.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;    // that walk a row
constexpr int kMostHeld = 8192;  // classes of rows in registers

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

// Thread 0's end of a row: its lse and loss; NaN for a target that does not exist. `total`: the sum of its logits.
template <class T>
__device__ inline void finish_row(const CrossEntropyParams& p, std::int64_t row, std::int64_t target, float lse,
                                  float total, float* losses) {
  if (p.lse) p.lse[row] = lse;
  float loss = 0.0f;
  if (target != p.ignore_index) {
    if (target < 0 || target >= p.classes) {
      loss = NAN;
    } else {
      loss = lse - to_float(static_cast<const T*>(p.logits)[row * p.stride_logits_row + target]);
      if (p.label_smoothing > 0.0f)
        loss = (1.0f - p.label_smoothing) * loss + p.label_smoothing * (lse - total / static_cast<float>(p.classes));
    }
  }
  losses[row] = loss;
}

// Rows in registers.
template <class T, int kRowThreads, int kRowsPerBlock, int kVectors>
__global__ void __launch_bounds__(kRowThreads* kRowsPerBlock) held_kernel(const CrossEntropyParams p, float* losses) {
  using Held = HeldRow<T, kRowThreads, kVectors>;
  constexpr int N = Held::N;
  [[maybe_unused]] __shared__ float2 scratch[kRowsPerBlock][kRowThreads / kWarp];
  [[maybe_unused]] __shared__ float total_scratch[kRowsPerBlock][kRowThreads / kWarp];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (kRowsPerBlock > 1 && row >= p.rows) return;
  Held logits(static_cast<int>(p.classes), kMinusInfinities<T>);
  logits.load(static_cast<const T*>(p.logits) + row * p.stride_logits_row);
  const std::int64_t target = p.targets[row];
  float maximum = -INFINITY, sum = 0.0f, total = 0.0f;
  logits.each([&](int, const float(&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) maximum = fmaxf(maximum, values[i]);
  });
  maximum = warp_reduce(maximum, Largest{});
  const float shift = maximum == -INFINITY ? 0.0f : maximum;
  logits.each([&](int, const float(&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum += exp_of_difference(values[i], shift);  // a NaN comes here and stays
  });
  const RowSum all = join_warps<kRowThreads>({maximum, warp_reduce(sum, Sum{})}, scratch[threadIdx.y]);
  if (p.label_smoothing > 0.0f) {
    logits.each([&](int j, const float(&values)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) total += logits.holds(j) ? values[i] : 0.0f;
    });
    total = block_reduce_once<kRowThreads>(total, total_scratch[threadIdx.y], Sum{});
  }
  if (threadIdx.x == 0) finish_row<T>(p, row, target, all.maximum + logf(all.sum), total, losses);
}

// Rows of any length, walked once with the maximum and sum so far.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) walked_kernel(const CrossEntropyParams p, float* losses) {
  __shared__ float scratch[kThreads / kWarp];
  const std::int64_t row = blockIdx.x;
  const std::int64_t target = p.targets[row];
  float maximum = -INFINITY, sum = 0.0f, total = 0.0f;
  each_class<T, N>(static_cast<const T*>(p.logits) + row * p.stride_logits_row, p.classes,
                   [&](std::int64_t, auto& values) {
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
  if (threadIdx.x == 0) finish_row<T>(p, row, target, row_maximum + logf(sum), total, losses);
}

// Of all rows, by one block: the sum of their losses (where there are any), and how many are not ignored. A thread asks
// for eight rows before it waits for the first.
constexpr int kSumThreads = 1024, kSumBatch = 8;
struct AllRows {
  float loss, counted;
};
__device__ inline AllRows add_rows(const float* losses, IndexArray targets, std::int64_t rows,
                                   std::int64_t ignore_index) {
  __shared__ float scratch[2][kSumThreads / kWarp];
  AllRows all{0.0f, 0.0f};
  for (std::int64_t first = threadIdx.x; first < rows; first += kSumBatch * kSumThreads) {
    float loss[kSumBatch];
    std::int64_t target[kSumBatch];
#pragma unroll
    for (int i = 0; i < kSumBatch; ++i) {
      const std::int64_t row = first + i * kSumThreads;
      loss[i] = losses && row < rows ? losses[row] : 0.0f;
      target[i] = row < rows ? targets[row] : ignore_index;
    }
#pragma unroll
    for (int i = 0; i < kSumBatch; ++i) {
      all.loss += loss[i];
      all.counted += target[i] != ignore_index ? 1.0f : 0.0f;
    }
  }
  return {block_reduce_once<kSumThreads>(all.loss, scratch[0], Sum{}),
          block_reduce_once<kSumThreads>(all.counted, scratch[1], Sum{})};
}

__global__ void __launch_bounds__(kSumThreads) add_rows_kernel(const CrossEntropyParams p, const float* losses) {
  ptx::wait_for_previous_kernel();
  const AllRows all = add_rows(losses, p.targets, p.rows, p.ignore_index);
  if (threadIdx.x == 0) p.loss[0] = p.reduction == Reduction::kMean ? all.loss / all.counted : all.loss;
}

// Factor of every row's gradient: grad_loss, over the rows counted for a mean.
__global__ void __launch_bounds__(kSumThreads) scale_kernel(const CrossEntropyBackwardParams p, float* scale) {
  const AllRows all = add_rows(nullptr, p.targets, p.rows, p.ignore_index);
  if (threadIdx.x == 0) scale[0] = p.reduction == Reduction::kMean ? p.grad_loss[0] / all.counted : p.grad_loss[0];
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
    constexpr int N = kVectorElements<T>;
    if (p.rows == 0) return;
    const auto run = [&](auto kernel, int threads, int rows) {
      launch("cross_entropy", kernel,
             {static_cast<unsigned>(ceil_div(p.rows, rows)),
              dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows)), 0, native(stream)},
             p, losses);
    };
    if (!is_vectorizable(p.dtype, p.rows, p.logits, p.stride_logits_row)) return run(walked_kernel<T, 1>, kThreads, 1);
    if (p.classes % N != 0) return run(walked_kernel<T, N>, kThreads, 1);
    with_held_shape<N>(p.classes / N, p.rows, cuda_device_properties(p.device.index).num_sms,
                       [&](auto threads, auto rows, auto held) {
                         if constexpr (held.value > 0 && held.value * threads.value * N <= kMostHeld) {
                           run(held_kernel<T, threads.value, rows.value, held.value>, threads.value, rows.value);
                         } else {
                           run(walked_kernel<T, N>, kThreads, 1);
                         }
                       });
  });
  if (p.reduction == Reduction::kNone) return;
  launch("cross_entropy: add", add_rows_kernel, {1, kSumThreads, 0, native(stream), true}, p, losses);
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
    launch("cross_entropy_bwd: scale", scale_kernel, {1, kSumThreads, 0, native(stream)}, p, scale);
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
