// A row shared by kThreads threads, N neighbouring elements of it at a time. With kVectors > 0 the row is read once and
// lives in registers (kVectors vectors a thread); with kVectors == 0 it may be of any length and every walk reads it
// again.
#pragma once

#include <cstdint>

#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {

/// kGuarded: `load` is called only for what is there, for plain loads, which the compiler predicates; what is in asm it
/// would put behind a branch.
template <class T, int kThreads, int kVectors, int N, bool kGuarded = false>
class Row {
 public:
  static constexpr int kHeld = kVectors > 0 ? kVectors : 1;

  /// `load(first, there)` fetches elements [first, first + N) if they are there, by one instruction: what branches is
  /// not loaded in parallel. N divides `columns`.
  template <class Load>
  __device__ Row(std::int64_t columns, int thread, Load load)
      : Row(columns, thread, load, [](Packed<T, N> (&)[kHeld]) {}) {}

  /// `change(vectors)` is called once all loads are under way; not with kVectors == 0.
  template <class Load, class Change>
  __device__ Row(std::int64_t columns, int thread, Load load, Change change) : columns_(columns), thread_(thread) {
    if constexpr (kVectors > 0) {
      Packed<T, N> loaded[kVectors];
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if constexpr (kGuarded) {
          loaded[j] = {};
          if (holds(j)) loaded[j] = load(first(j), true);
        } else {
          loaded[j] = load(first(j), holds(j));
        }
      }
      change(loaded);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if constexpr (kFloats) {
          unpack(floats_[j], loaded[j]);
        } else {
          packed_[j] = loaded[j];
        }
      }
    }
  }

  /// f(first, values) over this thread's part. Where the row is kept as floats f may change them for the next walk.
  template <class Load, class F>
  __device__ void each(Load load, F f) {
    if constexpr (kVectors > 0) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (!holds(j)) continue;
        if constexpr (kFloats) {
          f(first(j), floats_[j]);
        } else {
          float values[N];
          unpack(values, packed_[j]);
          f(first(j), values);
        }
      }
    } else {
      for (std::int64_t at = static_cast<std::int64_t>(thread_) * N; at < columns_; at += kThreads * N) {
        float values[N];
        unpack(values, load(at, true));
        f(at, values);
      }
    }
  }

  /// Rows of up to 32 elements a thread are kept as floats, longer ones as they are in memory: half the registers.
  static constexpr bool kFloats = kVectors > 0 && kVectors* N <= 32;

 private:
  __device__ int first(int j) const { return (j * kThreads + thread_) * N; }
  __device__ bool holds(int j) const { return first(j) < static_cast<int>(columns_); }

  std::int64_t columns_;
  int thread_;
  float floats_[kFloats ? kVectors : 1][N];
  Packed<T, N> packed_[kVectors > 0 && !kFloats ? kVectors : 1];
};

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

/// Threads and vectors for rows of `vectors` vectors of N elements, as compile-time constants: f(threads,
/// rows_per_block, vectors_per_thread). Measured on an H200 (32768 x 4096 bf16 norms): 4 vectors a thread hide more
/// latency than 2, 16 leave too few warps. Few rows, which don't fill the GPU, take more threads for the shortest time.
/// Rows of more than 8192 vectors (128 KB) are walked from memory; of 16-bit elements from 4096 on, since 8 vectors a
/// thread of 1024 leave too few of its 64 registers (spilled, and five times slower than walked).
template <int N, class F>
void with_row_shape(std::int64_t vectors, std::int64_t rows, int num_sms, F f) {
  const bool few = rows < 4 * static_cast<std::int64_t>(num_sms);
  if (vectors <= 128 && few) return f(Constant<128>{}, Constant<1>{}, Constant<1>{});
  if (vectors <= 128) return f(Constant<32>{}, Constant<8>{}, Constant<4>{});
  if (vectors <= 256 && !few) return f(Constant<128>{}, Constant<1>{}, Constant<2>{});
  if (vectors <= 512 && few) return f(Constant<256>{}, Constant<1>{}, Constant<2>{});
  if (vectors <= 512) return f(Constant<128>{}, Constant<1>{}, Constant<4>{});
  if (vectors <= 1024) return f(Constant<256>{}, Constant<1>{}, Constant<4>{});
  if (vectors <= 2048 && !few) return f(Constant<512>{}, Constant<1>{}, Constant<4>{});
  if (vectors <= 4096) return f(Constant<1024>{}, Constant<1>{}, Constant<4>{});
  if constexpr (N == 4) {
    if (vectors <= 8192) return f(Constant<1024>{}, Constant<1>{}, Constant<8>{});
  }
  return f(Constant<1024>{}, Constant<1>{}, Constant<0>{});
}

}  // namespace flashkernel::cuda
