// A row shared by kThreads threads, N neighbouring elements of it at a time. With kVectors > 0 the row is read once and
// lives in registers (kVectors vectors a thread); with kVectors == 0 it may be of any length and every walk reads it
// again.
#pragma once

#include <cstdint>

namespace flashkernel::cuda {

template <int kThreads, int kVectors, int N>
class Row {
 public:
  /// `load(first, values)` fetches elements [first, first + N); N divides `columns`.
  template <class Load>
  __device__ Row(std::int64_t columns, int thread, Load load) : columns_(columns), thread_(thread) {
    if constexpr (kVectors > 0) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        if (first(j) < columns_) load(first(j), values_[j]);
    }
  }

  /// f(first, values) over this thread's part; f may change the values (which last only when kVectors > 0).
  template <class Load, class F>
  __device__ void each(Load load, F f) {
    if constexpr (kVectors > 0) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        if (first(j) < columns_) f(first(j), values_[j]);
    } else {
      for (std::int64_t at = static_cast<std::int64_t>(thread_) * N; at < columns_; at += kThreads * N) {
        load(at, values_[0]);
        f(at, values_[0]);
      }
    }
  }

 private:
  __device__ std::int64_t first(int j) const { return (static_cast<std::int64_t>(j) * kThreads + thread_) * N; }

  std::int64_t columns_;
  int thread_;
  float values_[kVectors > 0 ? kVectors : 1][N];
};

/// Threads and vectors for a row of `vectors` vectors, as compile-time constants: f(threads, rows_per_block,
/// vectors_per_thread). A thread holds at most 4 vectors (32 floats of 16-bit data); rows beyond 1024 threads are
/// walked from memory.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};
template <class F>
void with_row_shape(std::int64_t vectors, F f) {
  if (vectors <= 32) return f(Constant<32>{}, Constant<4>{}, Constant<1>{});
  if (vectors <= 128) return f(Constant<128>{}, Constant<1>{}, Constant<1>{});
  if (vectors <= 512) return f(Constant<256>{}, Constant<1>{}, Constant<2>{});
  if (vectors <= 1024) return f(Constant<256>{}, Constant<1>{}, Constant<4>{});
  if (vectors <= 4096) return f(Constant<1024>{}, Constant<1>{}, Constant<4>{});
  return f(Constant<1024>{}, Constant<1>{}, Constant<0>{});
}

}  // namespace flashkernel::cuda
