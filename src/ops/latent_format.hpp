// How the rows of an MLA cache lie in memory where they have 8 bits, and what their elements stand for. Plain C++ for
// both backends; used by the ops of attention_mla.hpp.
#pragma once

#include "ops/params_common.hpp"

namespace flashkernel {

inline constexpr std::int64_t kLatentGroup = 128;    // neighbours that share a scale
inline constexpr std::uint16_t kLatentNan = 0x7fc0;  // the bfloat16 that any NaN of a key becomes

/// What the rows of a cache are.
enum class LatentKind : std::uint8_t {
  kNumbers,  // in q's dtype
  kGroups,   // float8_e4m3fn latents, an fp32 scale for each 128 of them, then the rotated key in bfloat16
  kOneScale  // float8_e4m3fn throughout, with one scale
};

/// A scale that is a number here, or lies on the op's device.
struct LatentScale {
  float number = 1.0f;
  const float* data = nullptr;

  FK_HOST_DEVICE float value() const { return data ? *data : number; }
};

/// Of 8-bit rows strides count bytes, and `rank` columns are the latent.
struct LatentFormat {
  LatentKind kind = LatentKind::kNumbers;
  std::int64_t rank = 0, columns = 0;
  LatentScale scale;  // of kOneScale

  FK_HOST_DEVICE static constexpr std::int64_t groups(std::int64_t rank) {
    return (rank + kLatentGroup - 1) / kLatentGroup;
  }
  /// Bytes of a row of kGroups.
  FK_HOST_DEVICE static constexpr std::int64_t bytes(std::int64_t rank, std::int64_t turned) {
    return rank + 4 * groups(rank) + 2 * turned;
  }
  FK_HOST_DEVICE bool is_narrow() const { return kind != LatentKind::kNumbers; }
  /// Columns that are float8_e4m3fn; those behind them are bfloat16.
  FK_HOST_DEVICE std::int64_t narrow_columns() const { return kind == LatentKind::kGroups ? rank : columns; }
  /// Of a narrow column of the row.
  FK_HOST_DEVICE float scale_of(const std::uint8_t* row, std::int64_t column) const {
    if (kind == LatentKind::kOneScale) return scale.value();
    return reinterpret_cast<const float*>(row + rank)[column / kLatentGroup];
  }
  /// The bits of another column.
  FK_HOST_DEVICE std::uint16_t bits_of(const std::uint8_t* row, std::int64_t column) const {
    return reinterpret_cast<const std::uint16_t*>(row + bytes(rank, 0))[column - rank];
  }
};

/// The scale of a group whose largest magnitude is `largest`: at least the smallest normal number, never infinite.
FK_HOST_DEVICE static inline float latent_scale_of(float largest) {
  constexpr float kLeast = 1.1754943508222875e-38f, kMost = 3.4028234663852886e38f;
  const float scale = (largest > kMost ? kMost : largest) / 448.0f;
  return scale < kLeast ? kLeast : scale;
}

}  // namespace flashkernel
