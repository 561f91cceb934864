// Matrix products of fp32 accuracy between operands that lie in shared memory or registers as two halves
// (tile/split_halves.cuh), for the warps of the fp32 attention kernels. Three matrix instructions a product; what the
// low halves alone give, 2^-24 of it, is left out.
#pragma once

#include "cuda/tile/shared_tile.cuh"
#include "cuda/tile/split_halves.cuh"

namespace flashkernel::cuda {

/// sums += a_high b_high, small += a_low b_high + a_high b_low, for kCount neighbouring accumulators; both may be the
/// same. The products of an accumulator lie kCount instructions apart.
template <int kCount>
__device__ inline void mma_split(float (&sums)[kCount][4], float (&small)[kCount][4], const std::uint32_t (&a_high)[4],
                                 const std::uint32_t (&a_low)[4], const std::uint32_t (&b_high)[kCount * 2],
                                 const std::uint32_t (&b_low)[kCount * 2]) {
#pragma unroll
  for (int c = 0; c < kCount; ++c) ptx::mma_m16n8k16<__half>(small[c], a_low, b_high[2 * c], b_high[2 * c + 1]);
#pragma unroll
  for (int c = 0; c < kCount; ++c) ptx::mma_m16n8k16<__half>(small[c], a_high, b_low[2 * c], b_low[2 * c + 1]);
#pragma unroll
  for (int c = 0; c < kCount; ++c) ptx::mma_m16n8k16<__half>(sums[c], a_high, b_high[2 * c], b_high[2 * c + 1]);
}

/// scores = A B^T of one warp: kSlices * 16 rows of A, kColumns rows of B, both kDim long. `a`, `b`: the lane's
/// addresses (LaneA, LaneB) in the tiles of the high halves; the low ones lie `low_a`, `low_b` bytes further. The
/// tensor core truncates its sums, so the small products have their own.
template <int kDim, int kSlices, int kColumns>
__device__ inline void split_scores(float (&scores)[kSlices][kColumns / 8][4], std::uint32_t a, std::uint32_t low_a,
                                    std::uint32_t b, std::uint32_t low_b) {
  using Tile = SharedTile<kDim>;
  float small[kSlices][kColumns / 8][4];
#pragma unroll
  for (int s = 0; s < kSlices; ++s)
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[s][n][e] = small[s][n][e] = 0.0f;
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
    std::uint32_t a_high[kSlices][4], a_low[kSlices][4];
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const std::uint32_t from = Tile::at_slice(a, d) + s * 16 * Tile::kPitch;
      ptx::ldmatrix_x4(a_high[s], from);
      ptx::ldmatrix_x4(a_low[s], from + low_a);
    }
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      std::uint32_t b_high[4], b_low[4];
      const std::uint32_t from = Tile::at_slice(b, d) + n * 16 * Tile::kPitch;
      ptx::ldmatrix_x4(b_high, from);
      ptx::ldmatrix_x4(b_low, from + low_b);
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
        mma_split<2>(reinterpret_cast<float(&)[2][4]>(scores[s][2 * n]),
                     reinterpret_cast<float(&)[2][4]>(small[s][2 * n]), a_high[s], a_low[s], b_high, b_low);
    }
  }
#pragma unroll
  for (int s = 0; s < kSlices; ++s)
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[s][n][e] += small[s][n][e];
}

/// An accumulator of kSlices * 16 rows x kInner columns as the A operand of the next product.
template <int kSlices, int kInner>
struct SplitOperand {
  std::uint32_t high[kSlices][kInner / 16][4], low[kSlices][kInner / 16][4];

  /// factor(n): of columns 8 n .. 8 n + 7 of this lane. Products stay below 2^16 in magnitude.
  template <class Factor>
  __device__ SplitOperand(const float (&x)[kSlices][kInner / 8][4], Factor factor) {
#pragma unroll
    for (int n = 0; n < kInner / 8; ++n) {
      const float f = factor(n);
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          split_pair(x[s][n][2 * half] * f, x[s][n][2 * half + 1] * f, high[s][n / 2][n % 2 * 2 + half],
                     low[s][n / 2][n % 2 * 2 + half]);
    }
  }
};

/// out += factor * A B for kInner rows of B. `b`: the lane's address (LaneA) in the tile of the high halves. The tensor
/// core truncates its sums, so they start from zero here and join `out` in plain fp32.
template <int kDim, int kSlices, int kInner>
__device__ inline void split_accumulate(float (&out)[kSlices][kDim / 8][4], const SplitOperand<kSlices, kInner>& a,
                                        std::uint32_t b, std::uint32_t low_b, float factor) {
  using Tile = SharedTile<kDim>;
  constexpr int kAtOnce = 4 / kSlices;  // columns / 8: four accumulators hide the matrix instruction's latency
#pragma unroll
  for (int c = 0; c < kDim / 8; c += kAtOnce) {
    float part[kSlices][kAtOnce][4] = {};
#pragma unroll
    for (int n = 0; n < kInner / 16; ++n) {
      std::uint32_t b_high[kAtOnce * 2], b_low[kAtOnce * 2];
#pragma unroll
      for (int two = 0; two < kAtOnce / 2; ++two) {
        const std::uint32_t from = Tile::at_slice(b, c / 2 + two) + n * 16 * Tile::kPitch;
        ptx::ldmatrix_x4_trans(reinterpret_cast<std::uint32_t(&)[4]>(b_high[4 * two]), from);
        ptx::ldmatrix_x4_trans(reinterpret_cast<std::uint32_t(&)[4]>(b_low[4 * two]), from + low_b);
      }
#pragma unroll
      for (int s = 0; s < kSlices; ++s) mma_split<kAtOnce>(part[s], part[s], a.high[s][n], a.low[s][n], b_high, b_low);
    }
#pragma unroll
    for (int s = 0; s < kSlices; ++s)
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[s][c + k][e] = fmaf(part[s][k][e], factor, out[s][c + k][e]);
  }
}

/// The largest of a tile's multipliers, kept as what turns numbers up to 2^(14 - kBits) times a group's multiplier into
/// halves and back. Multipliers are powers of two.
template <int kGroups>
struct SplitScale {
  float to, back;
  __device__ SplitScale(const float (&multipliers)[kGroups], int bits) {
    float largest = multipliers[0];
#pragma unroll
    for (int w = 1; w < kGroups; ++w) largest = fmaxf(largest, multipliers[w]);
    to = __uint_as_float(((127u + bits + 127) << 23) - __float_as_uint(largest));  // 2^bits / largest
    back = largest * __uint_as_float((127u - bits) << 23);
  }
};

}  // namespace flashkernel::cuda
