// See mma.hpp.
#include "simt/mma.hpp"

#include <cmath>

#include "half_bits.h"
#include "simt/simt.hpp"

namespace simt {
namespace {

void whole(std::uint32_t lanes) {
  if (lanes != 0xffffffffu) fault("mma: some lanes of the warp are missing");
}

float fp16_or_bf16(bool bf16, std::uint32_t two, int which) {
  const auto bits = static_cast<std::uint16_t>(two >> 16 * which);
  return bf16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

// To fp32, towards zero: the nearest, or its neighbour. (No call of nextafter: a loop over this becomes vectors.)
float truncated(double x) {
  const auto nearest = static_cast<float>(x);
  return float_from_bits(bits_from_float(nearest) - (std::abs(static_cast<double>(nearest)) > std::abs(x) ? 1 : 0));
}

// Products are exact, summed with the accumulator, and the sum is truncated, as tensor cores do (Fasi et al., 2021).
// D (16 x 8) += A (16 x 8 per slice) B (8 x 8 per slice): register pairs a[2 s], a[2 s + 1] and b[s] hold slice s of k.
template <bool kBf16, int kSlices>
void mma(void* const* data, std::uint32_t lanes) {
  whole(lanes);
  constexpr int kDepth = 8 * kSlices;
  double a[16][kDepth], b[kDepth][8];
  float d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& registers = *static_cast<const MmaLane*>(data[lane]);
    const int row = lane / 4, pair = 2 * (lane % 4);
    for (int slice = 0; slice < kSlices; ++slice)
      for (int e = 0; e < 2; ++e) {
        a[row][8 * slice + pair + e] = fp16_or_bf16(kBf16, registers.a[2 * slice], e);
        a[row + 8][8 * slice + pair + e] = fp16_or_bf16(kBf16, registers.a[2 * slice + 1], e);
        b[8 * slice + pair + e][row] = fp16_or_bf16(kBf16, registers.b[slice], e);
      }
    for (int e = 0; e < 2; ++e) {
      d[row][pair + e] = registers.d[e];
      d[row + 8][pair + e] = registers.d[2 + e];
    }
  }
  for (int m = 0; m < 16; ++m) {
    double sums[8];
    for (int n = 0; n < 8; ++n) sums[n] = d[m][n];
    for (int k = 0; k < kDepth; ++k)
      for (int n = 0; n < 8; ++n) sums[n] += a[m][k] * b[k][n];
    for (int n = 0; n < 8; ++n) d[m][n] = truncated(sums[n]);
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* const to = static_cast<const MmaLane*>(data[lane])->d;
    const int row = lane / 4, pair = 2 * (lane % 4);
    for (int e = 0; e < 2; ++e) {
      to[e] = d[row][pair + e];
      to[2 + e] = d[row + 8][pair + e];
    }
  }
}

}  // namespace

void mma_f16_k8(void* const* data, std::uint32_t lanes) { mma<false, 1>(data, lanes); }
void mma_f16_k16(void* const* data, std::uint32_t lanes) { mma<false, 2>(data, lanes); }
void mma_bf16_k16(void* const* data, std::uint32_t lanes) { mma<true, 2>(data, lanes); }

// Lane l of A (16 x 8): rows l / 4 and + 8 of column l % 4 (a[0], a[1]), and of column l % 4 + 4 (a[2], a[3]); of B (8
// x 8): rows l % 4 and + 4 of column l / 4.
void mma_tf32_k8(void* const* data, std::uint32_t lanes) {
  whole(lanes);
  const auto tf32 = [](std::uint32_t bits) { return float_from_bits(bits & 0xffffe000u); };
  float a[16][8], b[8][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& registers = *static_cast<const MmaLane*>(data[lane]);
    const int group = lane / 4, in_group = lane % 4;
    for (int r = 0; r < 4; ++r) a[group + 8 * (r % 2)][in_group + 4 * (r / 2)] = tf32(registers.a[r]);
    for (int r = 0; r < 2; ++r) b[in_group + 4 * r][group] = tf32(registers.b[r]);
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* const d = static_cast<const MmaLane*>(data[lane])->d;
    for (int e = 0; e < 4; ++e)
      for (int k = 0; k < 8; ++k) d[e] += a[lane / 4 + 8 * (e / 2)][k] * b[k][2 * (lane % 4) + e % 2];
  }
}

}  // namespace simt
