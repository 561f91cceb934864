// Shared by the tiled attention kernels in plain FFMA: 16 x 16 threads over tiles of rows held in shared memory as
// fp32. Thread (ty, tx) owns rows ty + 16 r of the M side, columns tx + 16 c of the N side, and columns 64 c + 4 tx + e
// of a head.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/score.cuh"
#include "cuda/tile/quantized.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda {

inline constexpr int kTileThreads = 256;
/// Stands in a tile of probabilities for "this query does not see this key": a probability is never negative.
inline constexpr float kMasked = -1.0f;

/// Rows of one head dim in shared memory.
template <int kDim_>
struct HeadRows {
  static constexpr int kDim = kDim_, kColumns = kDim / 64;
  static constexpr int kLd = kDim + 4;  // rows 4 banks apart: 8 threads that read float4s of 8 rows touch all 32 banks
  static_assert(kDim % 64 == 0 && kTileThreads % (kDim / 4) == 0, "every thread has the same columns of each row");
};

/// Of Q and K, and of dQ and dK, rows are QkRows; of V and the output, and of their gradients, they are VRows. Longer
/// rows come in kSlices slices of kQkDim, or kVDim, columns: slice s begins at column s * kQkDim.
template <int kBlockM_, int kBlockN_, int kQkDim_, int kVDim_, int kSlices_ = 1>
struct Tile {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kQkDim = kQkDim_, kVDim = kVDim_, kSlices = kSlices_;
  using QkRows = HeadRows<kQkDim>;
  using VRows = HeadRows<kVDim>;
  static constexpr int kWidestLd = QkRows::kLd > VRows::kLd ? QkRows::kLd : VRows::kLd;  // of a place for both
  static constexpr int kRowsM = kBlockM / 16, kRowsN = kBlockN / 16;
  static constexpr int kLdP = kBlockN + 1;
};

/// In place of a scale: the numbers of a row are its elements.
struct NoScale {};

/// The scales of rows of a cache's keys or values, or those rows of 4-bit elements: tile row r is key `key(r)` of
/// sequence b and kv head g, from column `first` on.
template <class Key>
struct CacheRows {
  const AttentionParams& p;
  std::int64_t b, g, first;
  bool is_v;
  Key key;

  __device__ float operator()(int row) const { return is_v ? p.v_scale(b, g, key(row)) : p.k_scale(b, g, key(row)); }
  __device__ float number(int row, std::int64_t column) const {
    return is_v ? p.v_packed(b, g, key(row))[first + column] : p.k_packed(b, g, key(row))[first + column];
  }
};
template <class Key>
CacheRows(const AttentionParams&, std::int64_t, std::int64_t, std::int64_t, bool, Key) -> CacheRows<Key>;

/// Copies kRows rows of fp32, fp16 or bf16 (with a `scale_of`, CacheRows, also 8-bit and 4-bit) into shared
/// memory as fp32; row r lies `offset_of(r)` elements behind `data`. Columns from `dim` on and rows from `count` on
/// become 0. `vectors`: rows start at multiples of 16 bytes and are whole fours of elements. The dtype is a run-time
/// value here, and no template parameter of the kernels, because they are long and only this depends on it.
template <class Rows, int kRows, class OffsetOf, class ScaleOf = NoScale>
__device__ inline void load_rows(float* tile, const void* data, DType dtype, std::int64_t dim, bool vectors,
                                 std::int64_t count, OffsetOf offset_of, ScaleOf scale_of = {}) {
  constexpr bool kScales = !std::is_same_v<ScaleOf, NoScale>;
  const bool narrow = kScales && (dtype == DType::kFloat8E4M3 || dtype == DType::kInt8);
  const bool packed = kScales && is_packed(dtype);
  if (!vectors || packed) {
#pragma unroll 1
    for (int at = threadIdx.x; at < kRows * Rows::kDim; at += kTileThreads) {
      const int row = at / Rows::kDim, column = at % Rows::kDim;
      float value = 0.0f;
      if constexpr (kScales)
        if (packed && row < count && column < dim) value = scale_of.number(row, column);
      if (!packed && row < count && column < dim) {
        const std::int64_t from = offset_of(row) + column;
        if constexpr (kScales)
          value = narrow ? load_narrow(data, dtype, from) * scale_of(row) : load_typed(data, dtype, from);
        else
          value = load_typed(data, dtype, from);
      }
      tile[row * Rows::kLd + column] = value;
    }
    return;
  }
  // A thread's loads of a batch are under way together.
  constexpr int kAcross = Rows::kDim / 4, kAtOnce = kTileThreads / kAcross;
  constexpr int kBatch = kRows / kAtOnce < 4 ? kRows / kAtOnce : 4;
  static_assert(kRows % (kBatch * kAtOnce) == 0, "whole batches");
  const int bytes = dtype == DType::kFloat32 ? 4 : narrow ? 1 : 2, column = threadIdx.x % kAcross * 4;
#pragma unroll 1
  for (int first = threadIdx.x / kAcross; first < kRows; first += kBatch * kAtOnce) {
    uint4 raw[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      raw[i] = uint4{0, 0, 0, 0};
      const int row = first + i * kAtOnce;
      if (row >= count || column >= dim) continue;
      const char* const from = static_cast<const char*>(data) + (offset_of(row) + column) * bytes;
      if (bytes == 4) {
        raw[i] = *reinterpret_cast<const uint4*>(from);
      } else if (!kScales || bytes == 2) {
        const uint2 two = *reinterpret_cast<const uint2*>(from);
        raw[i].x = two.x;
        raw[i].y = two.y;
      } else {
        raw[i].x = *reinterpret_cast<const std::uint32_t*>(from);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * kAtOnce;
      const auto put = [&](const auto& packed, float scale) {
        *reinterpret_cast<float4*>(tile + row * Rows::kLd + column) =
            make_float4(to_float(packed.values[0]) * scale, to_float(packed.values[1]) * scale,
                        to_float(packed.values[2]) * scale, to_float(packed.values[3]) * scale);
      };
      if constexpr (kScales) {
        if (narrow) {
          const float scale = row < count ? scale_of(row) : 0.0f;
          if (dtype == DType::kInt8)
            put(reinterpret_cast<const Packed<Int8, 4>&>(raw[i]), scale);
          else
            put(reinterpret_cast<const Packed<Float8, 4>&>(raw[i]), scale);
          continue;
        }
      }
      if (dtype == DType::kFloat32)
        put(reinterpret_cast<const Packed<float, 4>&>(raw[i]), 1.0f);
      else if (dtype == DType::kFloat16)
        put(reinterpret_cast<const Packed<__half, 4>&>(raw[i]), 1.0f);
      else
        put(reinterpret_cast<const Packed<__nv_bfloat16, 4>&>(raw[i]), 1.0f);
    }
  }
}

/// sums[r][c] += <row ty + 16 r of a, row tx + 16 c of b> over the whole head.
template <class Rows, int kRowsA, int kRowsB>
__device__ inline void row_products(float (&sums)[kRowsA][kRowsB], const float* a, const float* b) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll 4
  for (int d = 0; d < Rows::kDim; d += 4) {
    float4 x[kRowsA], y[kRowsB];
#pragma unroll
    for (int r = 0; r < kRowsA; ++r) x[r] = *reinterpret_cast<const float4*>(a + (ty + 16 * r) * Rows::kLd + d);
#pragma unroll
    for (int c = 0; c < kRowsB; ++c) y[c] = *reinterpret_cast<const float4*>(b + (tx + 16 * c) * Rows::kLd + d);
#pragma unroll
    for (int r = 0; r < kRowsA; ++r)
#pragma unroll
      for (int c = 0; c < kRowsB; ++c) {
        sums[r][c] = fmaf(x[r].x, y[c].x, sums[r][c]);
        sums[r][c] = fmaf(x[r].y, y[c].y, sums[r][c]);
        sums[r][c] = fmaf(x[r].z, y[c].z, sums[r][c]);
        sums[r][c] = fmaf(x[r].w, y[c].w, sums[r][c]);
      }
  }
}

/// out[r] += sum over n of weight(r, n) * row n of b, skipping those for which `masked(r, n)`: a masked row may hold
/// NaN, and 0 * NaN is NaN. Each tile is summed by itself first, since one running sum over 131072 keys drifts by 2e-5.
template <class Rows, int kInner, int kRows, class Weight, class Masked>
__device__ inline void accumulate_rows(float (&out)[kRows][Rows::kColumns][4], const float* b, Weight weight,
                                       Masked masked) {
  const int tx = threadIdx.x % 16;
  float sum[kRows][Rows::kColumns][4] = {};
  [[maybe_unused]] constexpr int kAtOnce = Rows::kColumns > 2 ? 2 : 4;  // rows of 256 have no registers for more
#pragma unroll kAtOnce
  for (int n = 0; n < kInner; ++n) {
    float w[kRows];
    bool skip[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      skip[r] = masked(r, n);
      w[r] = weight(r, n);
    }
#pragma unroll
    for (int c = 0; c < Rows::kColumns; ++c) {
      const float4 value = *reinterpret_cast<const float4*>(b + n * Rows::kLd + 64 * c + 4 * tx);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (skip[r]) continue;
        sum[r][c][0] = fmaf(w[r], value.x, sum[r][c][0]);
        sum[r][c][1] = fmaf(w[r], value.y, sum[r][c][1]);
        sum[r][c][2] = fmaf(w[r], value.z, sum[r][c][2]);
        sum[r][c][3] = fmaf(w[r], value.w, sum[r][c][3]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < Rows::kColumns; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[r][c][e] += sum[r][c][e];
}

/// This thread's columns of one row, times `factor`, to memory from element `offset` on.
template <class Rows>
__device__ inline void store_row(void* data, DType dtype, std::int64_t offset, std::int64_t dim,
                                 const float (&values)[Rows::kColumns][4], float factor) {
  const int tx = threadIdx.x % 16;
#pragma unroll
  for (int c = 0; c < Rows::kColumns; ++c)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int d = 64 * c + 4 * tx + e;
      if (d < dim) store_typed(data, dtype, offset + d, factor == 0.0f ? 0.0f : values[c][e] * factor);
    }
}

/// Over the 16 threads of a row.
template <class Op>
__device__ inline float reduce_16(float value, Op op) {
#pragma unroll
  for (int lane = 8; lane > 0; lane /= 2) value = op(value, __shfl_xor_sync(kFullMask, value, lane));
  return value;
}

}  // namespace flashkernel::cuda
