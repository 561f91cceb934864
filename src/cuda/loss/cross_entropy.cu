// Cross-entropy forward, one block per row of logits (or a warp), and backward, a block per piece of a row; the
// probabilities are never written. The reduction over rows runs in one block, in an order of its own, so that the loss
// is the same bit for bit every time. All kernels start early, and begin by taking their turn.
#include "cuda/loss/cross_entropy.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/host/row_plan.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/held_row.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/softmax_row.cuh"
#include "cuda/pipeline/turn.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kMostHeld = 8192;                    // classes of rows in registers
constexpr std::int64_t kMostClasses = 0x40000000;  // of a row: 32 bits count them, and a batch more

__device__ inline float exp_of(float x) { return ptx::exp2_approx(x * 1.4426950408889634f); }

/// A row's target, of 32 or 64 bits: asked for here, waited for where its value is wanted.
class Target {
 public:
  __device__ Target(const IndexArray& all, std::int64_t row) : is_wide_(all.is_int64) {
    const auto* const words = static_cast<const std::uint32_t*>(all.data);
    low_ = words[is_wide_ ? 2 * row : row];
    if (is_wide_) high_ = words[2 * row + 1];
  }
  __device__ std::int64_t value() const {
    const auto low = static_cast<std::int32_t>(low_);
    return is_wide_ ? static_cast<std::int64_t>(static_cast<std::uint64_t>(high_) << 32 | low_) : low;
  }

 private:
  bool is_wide_;
  std::uint32_t low_, high_ = 0;
};

/// The target's logit; NaN for a target that does not exist.
template <class T>
__device__ inline T logit_of(const T* logits, std::int64_t target, std::int64_t classes) {
  return target >= 0 && target < classes ? logits[target] : from_float<T>(NAN);
}

/// What a row's logits are counted from where their sum is wanted: 0, or their maximum where it is large. A sum of
/// logits of -1e9 keeps nothing of their differences, and one of -3.4e38 is -inf.
__device__ inline float origin_of(float maximum) { return fabsf(maximum) >= kLargeLse ? maximum : 0.0f; }

// Thread 0's end of a row: its lse and loss. `hit`: its target's logit, `total`: the sum of its logits, from origin_of
// its maximum. LSE comes in two parts, since next to a maximum of 1e6 or -3.4e38 little or nothing is left of the
// other.
__device__ inline void finish_row(const CrossEntropyParams& p, std::int64_t row, std::int64_t target, float hit,
                                  float maximum, float log_sum, float total, float* losses) {
  if (p.lse) p.lse[row] = maximum + log_sum;
  float loss = log_sum + (maximum - hit);
  if (p.label_smoothing > 0.0f)
    loss = (1.0f - p.label_smoothing) * loss +
           p.label_smoothing * (log_sum + (maximum - origin_of(maximum) - total / static_cast<float>(p.classes)));
  losses[row] = target == p.ignore_index ? 0.0f : loss;
}

// Rows in registers. Blocks of 512 threads take 32 of them a thread, which lets a multiprocessor have all its threads.
template <class T, int kRowThreads, int kRowsPerBlock, int kVectors>
__global__ void __launch_bounds__(kRowThreads* kRowsPerBlock, kRowThreads < 512 ? 0 : blocks_of(2048, kRowThreads))
    held_kernel(const CrossEntropyParams p, float* losses) {
  using Held = HeldRow<T, kRowThreads, kVectors>;
  constexpr int N = Held::N;
  [[maybe_unused]] __shared__ float2 scratch[kRowsPerBlock][kRowThreads / kWarp];
  [[maybe_unused]] __shared__ float total_scratch[kRowsPerBlock][kRowThreads / kWarp];
  take_turn();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (kRowsPerBlock > 1 && row >= p.rows) return;
  const T* const from = static_cast<const T*>(p.logits) + row * p.stride_logits_row;
  Held logits(static_cast<int>(p.classes), kMinusInfinities<T>);
  logits.load(from);
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
    const float origin = origin_of(all.maximum);
    logits.each([&](int j, const float(&values)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) total += logits.holds(j) ? values[i] - origin : 0.0f;
    });
    total = block_reduce_once<kRowThreads>(total, total_scratch[threadIdx.y], Sum{});
  }
  if (threadIdx.x > 0) return;
  finish_row(p, row, target, to_float(logit_of(from, target, p.classes)), all.maximum, logf(all.sum), total, losses);
}

/// What a thread has seen of a row so far: the largest, and the sum of e^(x - largest). -inf alone has the sum 0, and a
/// NaN reaches it.
struct Running {
  float maximum = -INFINITY, sum = 0.0f;

  template <int kCount, int N>
  __device__ void take(const float (&values)[kCount][N]) {
    float highest = maximum;
#pragma unroll
    for (int at = 0; at < kCount * N; ++at) highest = fmaxf(highest, values[at / N][at % N]);
    const float shift = highest == -INFINITY ? 0.0f : highest;
    float sums[2] = {sum * exp_of(maximum - shift), 0.0f};  // side by side: an addition waits for the one before it
#pragma unroll
    for (int at = 0; at < kCount * N; ++at) sums[at % 2] += exp_of(values[at / N][at % N] - shift);
    maximum = highest;
    sum = sums[0] + sums[1];
  }
};

/// Rows of any length, walked once. A thread has kHeld loads under way (vectors, or with N = 1 single classes, where
/// rows are on no 16-byte boundary), in the 32 registers that let a multiprocessor have all its threads.
constexpr int kWalkThreads = 256;
template <class T, int N>
__global__ void __launch_bounds__(kWalkThreads, blocks_of(2048, kWalkThreads))
    walked_kernel(const CrossEntropyParams p, float* losses) {
  constexpr int kHeld = N > 1 ? 2 : 8, kStep = kHeld * kWalkThreads;
  __shared__ float2 scratch[kWalkThreads / kWarp];
  __shared__ float total_scratch[kWalkThreads / kWarp];
  take_turn();
  const std::int64_t row = blockIdx.x;
  const T* const logits = static_cast<const T*>(p.logits) + row * p.stride_logits_row;
  const int thread = static_cast<int>(threadIdx.x), classes = static_cast<int>(p.classes), vectors = classes / N;
  const Target asked(p.targets, row);
  const bool smooth = p.label_smoothing > 0.0f;
  Running seen;
  float total = 0.0f;
  if (const int at = vectors * N + thread; at < classes) {  // what fills no vector
    const float value[1][1] = {{to_float(logits[at])}};
    seen.take(value);
    total = value[0][0];
  }
  // kWhole: all loads of all threads are in the row. Past its end its last vector is loaded again: loads under a
  // predicate would wait for each other.
  const auto batch = [&](int first, auto whole) {
    const auto is_inside = [&](int j) { return whole.value || first + j * kWalkThreads + thread < vectors; };
    const auto place = [&](int j) {
      const int at = first + j * kWalkThreads + thread;
      return whole.value ? at : min(at, vectors - 1);
    };
    float values[kHeld][N];
    if constexpr (N > 1) {
      Words<T> held[kHeld];
#pragma unroll
      for (int j = 0; j < kHeld; ++j) held[j] = reinterpret_cast<const Words<T>*>(logits)[place(j)];
      settle(held);
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        held[j].keep_if(is_inside(j), kMinusInfinities<T>);
        held[j].floats(values[j]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kHeld; ++j) values[j][0] = to_float(logits[place(j)]);
#pragma unroll
      for (int j = 0; j < kHeld; ++j) values[j][0] = is_inside(j) ? values[j][0] : -INFINITY;
    }
    if (smooth) {
#pragma unroll
      for (int at = 0; at < kHeld * N; ++at) total += is_inside(at / N) ? values[at / N][at % N] : 0.0f;
    }
    seen.take(values);
  };
  int first = 0;
#pragma unroll 1
  for (; first + kStep <= vectors; first += kStep) batch(first, Constant<1>{});
  const std::int64_t target = asked.value();
  T hit = from_float<T>(0.0f);
  if (thread == 0) hit = logit_of(logits, target, p.classes);  // on its way meanwhile
  if (first < vectors) batch(first, Constant<0>{});
  const float maximum = warp_reduce(seen.maximum, Largest{});
  const float sum = warp_reduce(seen.sum * exp_of(seen.maximum - (maximum == -INFINITY ? 0.0f : maximum)), Sum{});
  const RowSum all = join_warps<kWalkThreads>({maximum, sum}, scratch);
  if (smooth) {
    if (const float origin = origin_of(all.maximum); origin != 0.0f) {  // known only now: once more
      total = 0.0f;
#pragma unroll 1
      for (int at = thread; at < classes; at += kWalkThreads) total += to_float(logits[at]) - origin;
    }
    total = block_reduce_once<kWalkThreads>(total, total_scratch, Sum{});
  }
  if (thread == 0) finish_row(p, row, target, to_float(hit), all.maximum, logf(all.sum), total, losses);
}

// One block sums the losses of all rows (where they were written) and counts the rows that are not ignored. A thread
// asks for eight rows before it waits for the first.
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
  return {losses ? block_reduce_once<kSumThreads>(all.loss, scratch[0], Sum{}) : 0.0f,
          block_reduce_once<kSumThreads>(all.counted, scratch[1], Sum{})};
}

__global__ void __launch_bounds__(kSumThreads) add_rows_kernel(const CrossEntropyParams p, const float* losses) {
  take_turn();
  const AllRows all = add_rows(losses, p.targets, p.rows, p.ignore_index);
  if (threadIdx.x == 0) p.loss[0] = p.reduction == Reduction::kMean ? all.loss / all.counted : all.loss;
}

// Factor of every row's gradient: grad_loss, over the rows counted for a mean.
__global__ void __launch_bounds__(kSumThreads) scale_kernel(const CrossEntropyBackwardParams p, float* scale) {
  take_turn();
  const AllRows all = add_rows(nullptr, p.targets, p.rows, p.ignore_index);
  if (threadIdx.x == 0) scale[0] = p.reduction == Reduction::kMean ? p.grad_loss[0] / all.counted : p.grad_loss[0];
}

/// A block takes a piece of a row, kPieceHeld vectors of each thread (single classes with N = 1): blocks in order walk
/// the logits from begin to end, and more of them are under way than rows would be. The pieces begin at the row's first
/// 16-byte boundary; what stands before that is the first block's as well.
constexpr int kPieceThreads = 128, kPieceHeld = 2;
template <int N>
inline constexpr int kPiece = kPieceThreads* kPieceHeld* N;  // classes

template <class T, int N>
__global__ void __launch_bounds__(kPieceThreads) bwd_kernel(const CrossEntropyBackwardParams p, const float* scale) {
  __shared__ float scratch[kPieceThreads / kWarp];
  take_turn();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  if (row >= p.rows) return;
  const T* const whole = static_cast<const T*>(p.logits) + row * p.stride_logits_row;
  const int before = N > 1 ? static_cast<int>(min(p.classes, std::int64_t{elements_to_boundary(whole)})) : 0;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kPiece<N> + before;
  const std::int64_t rest = p.classes - begin;  // none, or below none, where only `before` makes up the last piece
  const int classes = static_cast<int>(max(std::int64_t{0}, min(rest, std::int64_t{kPiece<N>})));  // of the piece
  const int vectors = N > 1 ? classes / N : 0, thread = static_cast<int>(threadIdx.x);
  const T* const logits = whole + begin;
  T* const grad = static_cast<T*>(p.grad_logits) + row * p.stride_grad_logits_row + begin;
  Words<T> held[N > 1 ? kPieceHeld : 1] = {};
  if constexpr (N > 1) {
#pragma unroll
    for (int j = 0; j < kPieceHeld; ++j) {
      const int at = j * kPieceThreads + thread;
      ptx::load_16_kept(held[j].words, logits + at * N, at < vectors);
    }
  }
  const Target asked(p.targets, row);
  const float lse = p.lse[row], given = scale ? scale[0] : p.grad_loss[row * p.stride_grad_loss];
  const std::int64_t target = asked.value();
  const bool ignored = target == p.ignore_index, unknown = target < 0 || target >= p.classes;
  const float factor = unknown ? NAN : given, smooth = p.label_smoothing / static_cast<float>(p.classes);
  const std::int64_t apart = target - begin;
  const int hit = apart >= 0 && apart < classes ? static_cast<int>(apart) : -1;
  const auto gradient = [&](float log_probability, bool is_target) {
    float g = exp_of(log_probability) - smooth;
    if (is_target) g -= 1.0f - p.label_smoothing;
    return ignored ? 0.0f : g * factor;
  };
  // LSE is without digits that e^(x - LSE) needs, so that is added up again. One block takes all of such a row: where
  // the gradient is written over the logits, another block could no longer read them.
  if (!ignored && fabsf(lse) >= kLargeLse && fabsf(lse) < INFINITY) {
    if (blockIdx.x > 0) return;
    const int all = static_cast<int>(p.classes);
    float sum = 0.0f;
#pragma unroll 1
    for (int at = thread; at < all; at += kPieceThreads) sum += exp_of(to_float(whole[at]) - lse);
    const float log_rest = logf(block_reduce_once<kPieceThreads>(sum, scratch, Sum{}));
#pragma unroll 1
    for (int at = thread; at < all; at += kPieceThreads)
      grad[at - before] = from_float<T>(gradient(to_float(whole[at]) - lse - log_rest, at == target));
    return;
  }
  if constexpr (N > 1) {
#pragma unroll
    for (int j = 0; j < kPieceHeld; ++j) {
      const int at = j * kPieceThreads + thread;
      float values[N];
#pragma unroll
      for (auto& word : held[j].words) ptx::settle(word);
      held[j].floats(values);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = gradient(values[i] - lse, at * N + i == hit);
      Words<T> words;
      words.set(values);
#pragma unroll
      for (auto& word : words.words) ptx::settle(word);  // else all that makes them stands behind a branch
      if (at < vectors) reinterpret_cast<Words<T>*>(grad)[at] = words;
    }
  }
#pragma unroll 1
  for (int at = vectors * N + thread; at < classes; at += kPieceThreads)  // what fills no vector
    grad[at] = from_float<T>(gradient(to_float(logits[at]) - lse, at == hit));
  if (blockIdx.x == 0 && thread < before)
    grad[thread - before] = from_float<T>(gradient(to_float(whole[thread]) - lse, thread == target));
}

/// Whether all rows of both arrays begin equally far behind a 16-byte boundary, so that vectors of one are vectors of
/// the other.
bool begin_alike(DType dtype, std::int64_t rows, const void* a, std::int64_t stride_a, const void* b,
                 std::int64_t stride_b) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  return (reinterpret_cast<std::uintptr_t>(a) - reinterpret_cast<std::uintptr_t>(b)) % 16 == 0 &&
         (rows == 1 || (stride_a - stride_b) * bytes % 16 == 0);
}

bool is_vectorizable(DType dtype, std::int64_t rows, const void* data, std::int64_t stride) {
  return is_aligned(data, 16) && (rows == 1 || stride * static_cast<std::int64_t>(dtype_bytes(dtype)) % 16 == 0);
}

}  // namespace

Verdict cross_entropy_supports(const CrossEntropyParams& p) {
  if (p.classes > kMostClasses) return Verdict("more than 2^30 classes");
  return p.rows <= 0x7fffffff ? Verdict::ok() : Verdict("more rows than a grid has blocks");
}

Plan plan_cross_entropy(const CrossEntropyParams& p, const DeviceFacts& facts) {
  const std::size_t losses = p.reduction == Reduction::kNone ? 0 : sizeof(float) * static_cast<std::size_t>(p.rows);
  return Plan::of(rows_planned_for(p.rows, facts), losses);
}

void cross_entropy(const CrossEntropyParams& p, const Plan& plan, void* workspace, Stream stream) {
  const CudaDeviceGuard guard(p.device.index);
  const auto planned_for = plan.as<std::int64_t>();
  float* losses = p.reduction == Reduction::kNone ? p.loss : static_cast<float*>(workspace);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kVectorElements<T>;
    if (p.rows == 0) return;
    const auto run = [&](auto kernel, int threads, int rows) {
      launch("cross_entropy", kernel,
             {static_cast<unsigned>(ceil_div(p.rows, rows)),
              dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows)), 0, native(stream), true},
             p, losses);
    };
    if (!is_vectorizable(p.dtype, planned_for, p.logits, p.stride_logits_row))
      return run(walked_kernel<T, 1>, kWalkThreads, 1);
    if (p.classes % N != 0) return run(walked_kernel<T, N>, kWalkThreads, 1);
    with_held_shape<N>(p.classes / N, planned_for, cuda_device_properties(p.device.index).num_sms,
                       [&](auto threads, auto rows, auto held) {
                         if constexpr (held.value > 0 && held.value * threads.value * N <= kMostHeld) {
                           run(held_kernel<T, threads.value, rows.value, held.value>, threads.value, rows.value);
                         } else {
                           run(walked_kernel<T, N>, kWalkThreads, 1);
                         }
                       });
  });
  if (p.reduction == Reduction::kNone) return;
  launch("cross_entropy: add", add_rows_kernel, {1, kSumThreads, 0, native(stream), true}, p, losses);
}

Verdict cross_entropy_bwd_supports(const CrossEntropyBackwardParams& p) {
  if (p.classes > kMostClasses) return Verdict("more than 2^30 classes");
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
    launch("cross_entropy_bwd: scale", scale_kernel, {1, kSumThreads, 0, native(stream), true}, p, scale);
  }
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kVectorElements<T>;
    const bool vectors =
        begin_alike(p.dtype, p.rows, p.logits, p.stride_logits_row, p.grad_logits, p.stride_grad_logits_row);
    const auto pieces = static_cast<unsigned>(ceil_div(p.classes, vectors ? kPiece<N> : kPiece<1>));
    const std::int64_t most = 65535;  // blocks of a grid's y
    const dim3 grid(pieces, static_cast<unsigned>(std::min(p.rows, most)),
                    static_cast<unsigned>(ceil_div(p.rows, most)));
    launch("cross_entropy_bwd", vectors ? bwd_kernel<T, N> : bwd_kernel<T, 1>,
           {grid, kPieceThreads, 0, native(stream), true}, p, scale);
  });
}

}  // namespace flashkernel::cuda
