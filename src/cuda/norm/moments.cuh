// The mean and the sum of squares about it of a row in its threads' registers, in one exchange: each warp takes the sum
// about its own mean, and the warps' moments are joined (Chan, Golub and LeVeque, 1983). As by a second pass over the
// row, nothing is subtracted that is large beside the result, for one barrier instead of two. Called by the norms'
// kernels.
#pragma once

#include "cuda/tile/held_row.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda {

struct Moments {
  float mean = 0.0f, squares = 0.0f;
};

/// kCentred: about the mean; else about zero, the mean being zero. `of` gives the same to all threads of the row, each
/// of which calls it once. What the row holds past its end is zero. `scratch` is the row's own.
template <bool kCentred, class T, int kThreads, int kVectors>
class RowMoments {
  static constexpr int N = kVectorElements<T>, kWarps = kThreads / kWarp;
  static_assert((kWarps & (kWarps - 1)) == 0, "halved until one is left");
  using Held = HeldRow<T, kThreads, kVectors>;

 public:
  __device__ static Moments of(Held& row, int columns, float (&scratch)[2][kWarps]) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    Moments m;
    if constexpr (kCentred) {
      const float inverse = 1.0f / static_cast<float>(max(elements_of(warp, columns), 1));
      m.mean = warp_reduce(sum(row), Sum{}) * inverse;
    }
    m.squares = warp_reduce(squares(row, m.mean), Sum{});
    if constexpr (kWarps > 1) {
      if (lane == 0) scratch[0][warp] = m.mean, scratch[1][warp] = m.squares;
      __syncthreads();
      m.squares = scratch[1][lane % kWarps];  // a warp's in each lane; again from lane kWarps on
      if constexpr (kCentred) {
        const float mean = scratch[0][lane % kWarps],
                    elements = static_cast<float>(elements_of(lane % kWarps, columns));
        m.mean = over_warps(mean * (elements / static_cast<float>(columns)));
        m.squares = fmaf((mean - m.mean) * (mean - m.mean), elements, m.squares);
      }
      m.squares = over_warps(m.squares);
    }
    return m;
  }

 private:
  /// How many elements of the row this warp holds.
  __device__ static int elements_of(int warp, int columns) {
    int vectors = 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) vectors += min(max(columns / N - j * kThreads - warp * kWarp, 0), kWarp);
    return vectors * N;
  }
  /// Two sums side by side: each addition waits for the one before it.
  __device__ static float sum(Held& row) {
    float sums[2] = {};
    row.each([&](int, const float(&values)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) sums[i % 2] += values[i];
    });
    return sums[0] + sums[1];
  }
  __device__ static float squares(Held& row, float mean) {
    float sums[2] = {};
    row.each([&](int j, const float(&values)[N]) {
      const float centre = row.holds(j) ? mean : 0.0f;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float apart = kCentred ? values[i] - centre : values[i];
        sums[i % 2] = fmaf(apart, apart, sums[i % 2]);
      }
    });
    return sums[0] + sums[1];
  }
  __device__ static float over_warps(float value) {
#pragma unroll
    for (int lanes = kWarps / 2; lanes > 0; lanes /= 2) value += __shfl_xor_sync(kFullMask, value, lanes);
    return value;
  }
};

}  // namespace flashkernel::cuda
