// The steps of linear_cross_entropy between its products. A block takes a row of a chunk of logits, a segment of its
// columns at a time, which it holds in registers: the chunk is read once, from the L2 that linear left it in. Segments
// join in their order, and rows are added by one block in an order of its own: the same bits every time.
#include "cuda/loss/linear_loss.hpp"

#include "cuda/host/launch.hpp"
#include "cuda/pipeline/turn.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256, kSumThreads = 1024;
constexpr std::int64_t kMostClasses = 0x40000000;

/// Elements that a thread reads at once: 16 bytes.
template <class T>
struct alignas(16) Pack {
  static constexpr int kCount = 16 / sizeof(T);
  T values[kCount];
};

/// A logit as the softmax sees it, and its derivative by the logit that linear wrote.
struct Capped {
  float value, slope;
};
template <class Params>
__device__ inline Capped capped(const Params& p, float logit) {
  if (!(p.softcap > 0.0f)) return {p.scale * logit, p.scale};
  const float t = tanhf(logit / p.softcap);
  return {p.scale * p.softcap * t, p.scale * (1.0f - t * t)};
}

/// kHeld: packs of a segment that a thread holds. Rows begin at multiples of 16 bytes, and the elements between a row's
/// end and the next row's beginning are the workspace's.
template <class T, int kHeld>
__global__ void __launch_bounds__(kThreads) update_kernel(const LinearCrossEntropyParams p) {
  constexpr int N = Pack<T>::kCount;
  __shared__ float scratch[4][kThreads / kWarp];
  take_turn();
  const std::int64_t row = blockIdx.x;
  const T* const logits = static_cast<const T*>(p.logits) + row * p.stride_logits_row;
  const int columns = static_cast<int>(p.columns), segment = static_cast<int>(p.segment);
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t target = p.targets[row] - p.first_column;
  const bool smooth = p.label_smoothing > 0.0f;
  LossState state{-INFINITY, 0.0f, 0.0f, 0.0f, 0.0f};
  if (thread == 0) {
    if (p.first_column > 0) state = p.state[row];
    if (target >= 0 && target < columns) state.hit = capped(p, to_float(logits[target])).value;
  }
#pragma unroll 1
  for (int begin = 0; begin < columns; begin += segment) {
    const int end = min(begin + segment, columns);
    float values[kHeld][N];
    float maximum = -INFINITY;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int first = begin + (j * kThreads + thread) * N;
      Pack<T> pack = {};
      if (first < end) pack = *reinterpret_cast<const Pack<T>*>(logits + first);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        values[j][i] = first + i < end ? capped(p, to_float(pack.values[i])).value : -INFINITY;
        maximum = fmaxf(maximum, values[j][i]);
      }
    }
    maximum = block_reduce<kThreads>(maximum, scratch[0], Largest{});
    const float origin = loss_origin(maximum);
    float sum = 0.0f, total = 0.0f, weight = 0.0f;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int first = begin + (j * kThreads + thread) * N;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (first + i >= end) continue;
        sum += expf(values[j][i] - origin);  // a NaN comes here and stays
        if (smooth) {
          const float w = p.class_weights ? p.class_weights[p.first_column + first + i] : 1.0f;
          total += w * (values[j][i] - origin);
          weight += w;
        }
      }
    }
    sum = block_reduce<kThreads>(sum, scratch[1], Sum{});
    if (smooth) {
      total = block_reduce<kThreads>(total, scratch[2], Sum{});
      weight = block_reduce<kThreads>(weight, scratch[3], Sum{});
    }
    if (thread == 0) join_columns(state, {maximum, sum, 0.0f, total, weight});
  }
  if (thread == 0) p.state[row] = state;
}

/// One row's part of the loss and of what means are divided by.
struct RowLoss {
  float loss, z, weight, counted;
};

__device__ inline bool is_known(std::int64_t target, std::int64_t classes) { return target >= 0 && target < classes; }

template <class Params>
__device__ inline float target_weight(const Params& p, std::int64_t target) {
  if (!is_known(target, p.classes)) return NAN;
  return p.class_weights ? p.class_weights[target] : 1.0f;
}

__device__ inline RowLoss finish_row(const LinearCrossEntropyParams& p, std::int64_t row) {
  const LossState state = p.state[row];
  const std::int64_t target = p.targets[row];
  const float lse = lse_of(state);
  if (p.lse) p.lse[row] = lse;
  if (target == p.ignore_index) return {0.0f, 0.0f, 0.0f, 0.0f};
  const float weight = target_weight(p, target);
  const float loss = loss_of(state, p.label_smoothing, weight, static_cast<float>(p.classes));
  return {p.is_log_prob ? -loss : loss, p.z_loss > 0.0f ? p.z_loss * lse * lse : 0.0f, weight, 1.0f};
}

__global__ void __launch_bounds__(kThreads) finish_rows_kernel(const LinearCrossEntropyParams p) {
  take_turn();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= p.rows) return;
  const RowLoss one = finish_row(p, row);
  p.loss[row] = one.loss + one.z;
  if (p.z_losses) p.z_losses[row] = one.z;
}

__global__ void __launch_bounds__(kSumThreads) finish_kernel(const LinearCrossEntropyParams p) {
  __shared__ float scratch[4][kSumThreads / kWarp];
  take_turn();
  RowLoss all{0.0f, 0.0f, 0.0f, 0.0f};
  for (std::int64_t row = threadIdx.x; row < p.rows; row += kSumThreads) {
    const RowLoss one = finish_row(p, row);
    all.loss += one.loss;
    all.z += one.z;
    all.weight += one.weight;
    all.counted += one.counted;
  }
  all.loss = block_reduce<kSumThreads>(all.loss, scratch[0], Sum{});
  all.z = block_reduce<kSumThreads>(all.z, scratch[1], Sum{});
  all.weight = block_reduce<kSumThreads>(all.weight, scratch[2], Sum{});
  all.counted = block_reduce<kSumThreads>(all.counted, scratch[3], Sum{});
  if (threadIdx.x > 0) return;
  if (p.reduction == Reduction::kMean) {
    all.loss /= all.weight;  // 0 / 0: NaN
    all.z /= all.counted;
  }
  p.loss[0] = p.z_loss > 0.0f ? all.loss + all.z : all.loss;
  if (p.z_losses) p.z_losses[0] = all.z;
}

__global__ void __launch_bounds__(kSumThreads) coefficients_kernel(const LinearCrossEntropyBackwardParams p) {
  __shared__ float scratch[3][kSumThreads / kWarp];
  take_turn();
  const float smoothing = p.label_smoothing, classes = static_cast<float>(p.classes);
  float weight = 1.0f, counted = 1.0f, all_weights = classes;
  if (p.reduction == Reduction::kMean) {
    weight = counted = 0.0f;
    for (std::int64_t row = threadIdx.x; row < p.rows; row += kSumThreads) {
      const std::int64_t target = p.targets[row];
      if (target == p.ignore_index) continue;
      weight += target_weight(p, target);
      counted += 1.0f;
    }
    weight = block_reduce<kSumThreads>(weight, scratch[0], Sum{});
    counted = block_reduce<kSumThreads>(counted, scratch[1], Sum{});
  }
  if (p.class_weights && smoothing > 0.0f) {
    all_weights = 0.0f;
    for (std::int64_t c = threadIdx.x; c < p.classes; c += kSumThreads) all_weights += p.class_weights[c];
    all_weights = block_reduce<kSumThreads>(all_weights, scratch[2], Sum{});
  }
  for (std::int64_t row = threadIdx.x; row < p.rows; row += kSumThreads) {
    const std::int64_t target = p.targets[row];
    LossCoefficients to{};
    if (target != p.ignore_index) {
      const float loss_grad = p.grad_loss[row * p.stride_grad_loss], given = p.is_log_prob ? -loss_grad : loss_grad;
      const float grad = given / weight;
      to.target = grad * (1.0f - smoothing) * target_weight(p, target);
      to.uniform = grad * smoothing / classes;
      to.probability = to.target + to.uniform * all_weights;
      to.shift = p.lse[row];
      if (p.z_loss > 0.0f) to.probability += 2.0f * p.z_loss * to.shift * given / counted;
    }
    p.coefficients[row] = to;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) gradient_kernel(const LinearCrossEntropyBackwardParams p) {
  constexpr int N = Pack<T>::kCount;
  __shared__ float scratch[kThreads / kWarp];
  take_turn();
  const std::int64_t row = blockIdx.x;
  T* const logits = static_cast<T*>(p.logits) + row * p.stride_logits_row;
  LossCoefficients k = p.coefficients[row];
  const bool none = k.probability == 0.0f && k.target == 0.0f && k.uniform == 0.0f;
  const std::int64_t target = p.targets[row] - p.first_column;
  const int columns = static_cast<int>(p.columns);
  if (is_large_lse(k.shift) && !none) {
    // A whole row is added up again. Of a part of one nothing more is known, and the host does not look at LSEs.
    if (p.columns == p.classes) {
      float sum = 0.0f;
#pragma unroll 1
      for (int c = static_cast<int>(threadIdx.x); c < columns; c += kThreads)
        sum += expf(capped(p, to_float(logits[c])).value - k.shift);
      k.rest = logf(block_reduce<kThreads>(sum, scratch, Sum{}));
    } else if (fabsf(k.shift) >= kLostLse) {
      k.probability = NAN;
    }
  }
  for (int first = static_cast<int>(threadIdx.x) * N; first < columns; first += kThreads * N) {
    Pack<T>& place = *reinterpret_cast<Pack<T>*>(logits + first);
    Pack<T> pack = place;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int c = first + i;
      const Capped logit = capped(p, to_float(pack.values[i]));
      float grad = k.probability * expf(logit.value - k.shift - k.rest);
      if (k.uniform != 0.0f && c < columns)
        grad -= k.uniform * (p.class_weights ? p.class_weights[p.first_column + c] : 1.0f);
      if (c == target) grad -= k.target;
      pack.values[i] = from_float<T>(none ? 0.0f : grad * logit.slope);
    }
    place = pack;
  }
}

/// Elements of a part that a thread adds at once.
constexpr int kAdded = 8;

template <class T>
struct alignas(sizeof(T) * kAdded < 16 ? sizeof(T) * kAdded : 16) Added {
  T values[kAdded];
};

/// A block adds a row. kPacked: every row begins at a multiple of 16 bytes and is whole packs long.
template <class Part, class Out, bool kPacked>
__global__ void __launch_bounds__(kThreads) accumulate_kernel(const LinearCrossEntropyBackwardParams p) {
  constexpr int N = kPacked ? kAdded : 1;
  take_turn();
  const std::int64_t row = blockIdx.x;
  const Part* const parts = static_cast<const Part*>(p.part.data) + row * p.columns;
  float* const sums = p.sum + row * p.stride_sum_row;
  Out* const out = p.out ? static_cast<Out*>(p.out) + row * p.stride_out_row : nullptr;
  for (std::int64_t c = static_cast<std::int64_t>(threadIdx.x) * N; c < p.columns; c += kThreads * N) {
    if constexpr (kPacked) {
      const auto part = *reinterpret_cast<const Added<Part>*>(parts + c);
      Added<float> sum{};
      if (!p.is_first) sum = *reinterpret_cast<const Added<float>*>(sums + c);
      Added<Out> rounded;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float value = to_float(part.values[i]);
        sum.values[i] = p.is_first ? value : value + sum.values[i];
        rounded.values[i] = from_float<Out>(sum.values[i]);
      }
      if (out)
        *reinterpret_cast<Added<Out>*>(out + c) = rounded;
      else
        *reinterpret_cast<Added<float>*>(sums + c) = sum;
    } else {
      float sum = to_float(parts[c]);
      if (!p.is_first) sum += sums[c];
      if (out)
        out[c] = from_float<Out>(sum);
      else
        sums[c] = sum;
    }
  }
}

/// Whether rows of `bytes` an element begin at multiples of 16 bytes.
bool in_vectors(const void* data, std::int64_t stride, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride * static_cast<std::int64_t>(bytes) % 16 == 0;
}

}  // namespace

Verdict linear_cross_entropy_supports(const LinearCrossEntropyParams& p) {
  if (p.classes > kMostClasses) return Verdict("more than 2^30 classes");
  return p.rows <= 0x7fffffff ? Verdict::ok() : Verdict("more rows than a grid has blocks");
}

void linear_cross_entropy(const LinearCrossEntropyParams& p, void*, Stream stream) {
  const CudaDeviceGuard guard(p.device.index);
  if (p.step == LinearCrossEntropyParams::Step::kFinish) {
    if (p.reduction == Reduction::kNone)
      launch("linear_cross_entropy: rows", finish_rows_kernel,
             {static_cast<unsigned>(ceil_div(p.rows, kThreads)), kThreads, 0, native(stream), true}, p);
    else
      launch("linear_cross_entropy: add", finish_kernel, {1, kSumThreads, 0, native(stream), true}, p);
    return;
  }
  if (p.rows == 0) return;
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kMost = 16 / Pack<T>::kCount;  // packs of a whole segment of 4096
    const auto run = [&](auto kernel) {
      launch("linear_cross_entropy", kernel, {static_cast<unsigned>(p.rows), kThreads, 0, native(stream), true}, p);
    };
    if (p.segment <= kThreads * Pack<T>::kCount) return run(update_kernel<T, 1>);
    run(update_kernel<T, kMost>);
  });
}

Verdict linear_cross_entropy_bwd_supports(const LinearCrossEntropyBackwardParams& p) {
  if (p.classes > kMostClasses) return Verdict("more than 2^30 classes");
  return p.rows <= 0x7fffffff ? Verdict::ok() : Verdict("more rows than a grid has blocks");
}

void linear_cross_entropy_bwd(const LinearCrossEntropyBackwardParams& p, void*, Stream stream) {
  using Step = LinearCrossEntropyBackwardParams::Step;
  if (p.rows == 0 || p.columns == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  if (p.step == Step::kCoefficients)
    return launch("linear_cross_entropy_bwd: rows", coefficients_kernel, {1, kSumThreads, 0, native(stream), true}, p);
  if (p.step == Step::kGradient)
    return visit_floating(p.dtype, [&](auto zero) {
      launch("linear_cross_entropy_bwd", gradient_kernel<decltype(zero)>,
             {static_cast<unsigned>(p.rows), kThreads, 0, native(stream), true}, p);
    });
  const bool packed = p.columns % kAdded == 0 && in_vectors(p.part.data, p.columns, dtype_bytes(p.part.dtype)) &&
                      in_vectors(p.sum, p.stride_sum_row, sizeof(float)) &&
                      in_vectors(p.out, p.stride_out_row, dtype_bytes(p.out_dtype));
  visit_floating(p.part.dtype, [&](auto part) {
    visit_floating(p.out_dtype, [&](auto out) {
      const auto run = [&](auto kernel) {
        launch("linear_cross_entropy_bwd: add", kernel,
               {static_cast<unsigned>(p.rows), kThreads, 0, native(stream), true}, p);
      };
      if (packed) return run(accumulate_kernel<decltype(part), decltype(out), true>);
      run(accumulate_kernel<decltype(part), decltype(out), false>);
    });
  });
}

}  // namespace flashkernel::cuda
