// A row of columns in the registers of kThreads threads: kVectors vectors of 16 bytes each, as the words that they are
// in memory. Called by the kernels of norms, softmax and cross-entropy for rows that a block (or a warp) can hold.
// Invariant: no branch stands between two loads or two stores, so all of a row's loads are under way before the first
// is waited for, and what is past the row's end holds the word that the caller gave.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/tile/row.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {

/// 16 bytes of elements. Of an array of 16-bit elements whose load is predicated the compiler makes a register and
/// three instructions an element; of words, half a register and one.
template <class T>
struct alignas(16) Words {
  static constexpr int N = kVectorElements<T>;
  std::uint32_t words[4];

  __device__ void floats(float (&out)[N]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, float>) {
        out[i] = __uint_as_float(words[i]);
      } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        out[2 * i] = __uint_as_float(words[i] << 16);
        out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      } else {
        const float2 two = __half22float2(reinterpret_cast<const __half2&>(words[i]));
        out[2 * i] = two.x;
        out[2 * i + 1] = two.y;
      }
    }
  }
  /// `word` in every place, but if `there`.
  __device__ void keep_if(bool there, std::uint32_t word) {
#pragma unroll
    for (auto& own : words) own = there ? own : word;
  }
  __device__ void set(const float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, float>) {
        words[i] = __float_as_uint(values[i]);
      } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const __nv_bfloat162 two = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
        words[i] = reinterpret_cast<const std::uint32_t&>(two);
      } else {
        const __half2 two = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
        words[i] = reinterpret_cast<const std::uint32_t&>(two);
      }
    }
  }
};

/// All loads of these are under way before anything is made of one.
template <class T, int kCount>
__device__ inline void settle(Words<T> (&vectors)[kCount]) {
#pragma unroll
  for (auto& vector : vectors)
#pragma unroll
    for (auto& word : vector.words) ptx::settle(word);
}

/// Words of one number: fp32, or the same 16 bits twice.
template <class T>
inline constexpr std::uint32_t kOnes = std::is_same_v<T, float>    ? 0x3f800000u
                                       : std::is_same_v<T, __half> ? 0x3c003c00u
                                                                   : 0x3f803f80u;
template <class T>
inline constexpr std::uint32_t kMinusInfinities = std::is_same_v<T, float>    ? 0xff800000u
                                                  : std::is_same_v<T, __half> ? 0xfc00fc00u
                                                                              : 0xff80ff80u;

template <class T, int kThreads, int kVectors>
class HeldRow {
 public:
  static constexpr int N = kVectorElements<T>;

  /// `missing`: the word that stands where nothing is loaded.
  __device__ explicit HeldRow(int columns, std::uint32_t missing = 0) : columns_(columns) {
#pragma unroll
    for (auto& vector : vectors_)
#pragma unroll
      for (auto& word : vector.words) word = missing;
  }
  /// Vector j, if `there`.
  __device__ void load(const T* row, int j, bool there = true) {
    if (there && holds(j)) vectors_[j] = *reinterpret_cast<const Words<T>*>(row + first(j));
  }
  /// All of it, which nobody reads again.
  __device__ void load(const T* row) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) ptx::load_16_kept(vectors_[j].words, row + first(j), holds(j));
  }
  /// Vector j of another row, if there is one, in the place of this one's.
  __device__ void load_next(const T* row, int j, bool there) {
    ptx::load_16_kept(vectors_[j].words, row + first(j), there && holds(j));
  }
  __device__ void set(int j, const float (&values)[N]) { vectors_[j].set(values); }
  __device__ void store(T* row) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (holds(j)) *reinterpret_cast<Words<T>*>(row + first(j)) = vectors_[j];
  }
  /// `values`, rounded to T, where vector j is in `row`.
  __device__ void store(T* row, int j, const float (&values)[N]) const {
    Words<T> words;
    words.set(values);
#pragma unroll
    for (auto& word : words.words) ptx::settle(word);  // else all that makes them stands behind a branch
    if (holds(j)) *reinterpret_cast<Words<T>*>(row + first(j)) = words;
  }
  /// f(j, values): of each vector j of this thread.
  template <class F>
  __device__ void each(F f) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float values[N];
      floats(j, values);
      f(j, values);
    }
  }
  /// The same; what f makes of the values stays, rounded to T.
  template <class F>
  __device__ void change(F f) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float values[N];
      floats(j, values);
      f(j, values);
      vectors_[j].set(values);
    }
  }
  /// Made of the words each time: as floats a row of 16-bit elements would take twice the registers from one use to the
  /// next.
  __device__ void floats(int j, float (&values)[N]) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (auto& word : vectors_[j].words) ptx::settle(word);
    }
    vectors_[j].floats(values);
  }
  /// The same floats by other instructions, for a second use: of equal ones the compiler would keep the first's results
  /// in twice the registers.
  __device__ void floats_again(int j, float (&values)[N]) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[2 * i] = ptx::widen_low_bf16(vectors_[j].words[i]);
        values[2 * i + 1] = ptx::widen_high_bf16(vectors_[j].words[i]);
      }
    } else if constexpr (std::is_same_v<T, __half>) {  // of the negated halves, and negated, which costs nothing
      Words<T> negated;
#pragma unroll
      for (int i = 0; i < 4; ++i) negated.words[i] = vectors_[j].words[i] ^ 0x80008000u;
      negated.floats(values);
#pragma unroll
      for (float& value : values) value = -value;
    } else {
      floats(j, values);
    }
  }
  /// The largest of this thread's elements, which are of 16 bits, by two at a time; a NaN loses.
  __device__ float largest() const {
    using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    std::uint32_t most = vectors_[0].words[0];
#pragma unroll
    for (const auto& vector : vectors_)
#pragma unroll
      for (const std::uint32_t word : vector.words) {
        const Two two = __hmax2(reinterpret_cast<const Two&>(most), reinterpret_cast<const Two&>(word));
        most = reinterpret_cast<const std::uint32_t&>(two);
      }
    const auto& two = reinterpret_cast<const Two&>(most);
    return fmaxf(__low2float(two), __high2float(two));
  }
  __device__ static int first(int j) { return (j * kThreads + static_cast<int>(threadIdx.x)) * N; }
  __device__ bool holds(int j) const { return first(j) < columns_; }

 private:
  int columns_;
  Words<T> vectors_[kVectors];
};

/// Blocks of `threads` threads for __launch_bounds__, of which a multiprocessor shall hold `resident` threads; Turing
/// holds 1024; 8.0, 9.0 and 10.x hold 2048; others 1536.
constexpr int blocks_of(int resident, int threads) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  constexpr int kMost = 1024;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 800 && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1100)
  constexpr int kMost = 1536;
#else
  constexpr int kMost = 2048;
#endif
  const int held = resident < kMost ? resident : kMost;
  return held < threads ? 1 : held / threads;
}

/// Threads, rows a block and vectors a thread of rows that are read and not normed, as with_row_shape: for softmax and
/// cross-entropy an H200 found others faster at these lengths.
template <int N, class F>
void with_held_shape(std::int64_t vectors, std::int64_t rows, int num_sms, F f) {
  if (rows >= 4 * static_cast<std::int64_t>(num_sms)) {
    if (vectors > 64 && vectors <= 96) return f(Constant<32>{}, Constant<4>{}, Constant<3>{});
    if (vectors > 128 && vectors <= 192) return f(Constant<64>{}, Constant<1>{}, Constant<3>{});
    if (vectors > 192 && vectors <= 256) return f(Constant<64>{}, Constant<1>{}, Constant<4>{});
    if constexpr (N == 4) {
      if (vectors > 2048 && vectors <= 4096) return f(Constant<512>{}, Constant<1>{}, Constant<8>{});
    }
  }
  with_row_shape<N>(vectors, rows, num_sms, f);
}

}  // namespace flashkernel::cuda
