// Latent rows of 8 bits for MLA decoding on 9.0: a warpgroup of producers reads them from memory, widens them in
// registers and lays them into the ring's tiles as the copy engine lays rows of 16 bits. Used by kernel.cuh. A warp has
// 16 of a tile's 64 rows and reads a row's latent at once, 16 elements a lane. Rows come through L2, into which they
// are fetched kAhead tiles before.
//
// Rows past the end of a sequence are its last one again: kernel.cuh hides them.
#pragma once

#include "cuda/attention/mla/sm90a/schedule.cuh"
#include "cuda/attention/forward/sm90a/epilogue.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/latent_row.cuh"

namespace flashkernel::cuda::sm90a {

template <class T>
class NarrowRows {
 public:
  static constexpr int kWarps = 4, kRows = kMlaKeys / kWarps;  // of a warp
  static constexpr int kAhead = 3, kAtOnce = 4;  // tiles; rows that a lane loads before it stores the first
  static constexpr int kKeyAt = static_cast<int>(LatentFormat::bytes(kMlaValueDim, 0));

  /// The rows of a segment. `warp` of the producers' four.
  __device__ NarrowRows(const AttentionParams& p, const LatentFormat& format, const MlaSegment& segment, int warp)
      : p_(p),
        table_(p.block_table + segment.b * p.stride_block_table),
        keys_(segment.keys),
        warp_(warp),
        lane_(static_cast<int>(threadIdx.x % kWarp)),
        one_scale_(format.kind == LatentKind::kOneScale),
        scale_(one_scale_ ? format.scale.value() : 1.0f) {}

  /// Starts to bring a tile into L2.
  __device__ void prefetch(int tile) const {
    if (lane_ < kRows && tile * kMlaKeys + warp_ * kRows + lane_ < keys_)
      ptx::bulk_prefetch(row_of(tile, lane_), one_scale_ ? kMlaDim : static_cast<std::uint32_t>(kKeyAt + 128));
  }

  /// Widens the warp's rows into the tile at `to`.
  __device__ void widen(int tile, std::uint32_t to) const {
    const auto mine = reinterpret_cast<std::uint64_t>(row_of(tile, lane_ % kRows));
    const auto row = [&](int r) { return reinterpret_cast<const unsigned char*>(__shfl_sync(kFullMask, mine, r)); };
    const int first = (lane_ >> 2) & 1;  // half of the lanes begin with their second chunk: no bank is asked for twice
#pragma unroll 1
    for (int begin = 0; begin < kRows; begin += kAtOnce) {
      uint4 elements[kAtOnce];
      float scales[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const unsigned char* const from = row(begin + i);
        elements[i] = *reinterpret_cast<const uint4*>(from + lane_ * 16);
        scales[i] = one_scale_ ? scale_ : *reinterpret_cast<const float*>(from + kMlaValueDim + lane_ / 8 * 4);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        store_two(to, warp_ * kRows + begin + i, 2 * lane_, first, elements[i], scales[i]);
    }
    if (one_scale_) {
#pragma unroll 1
      for (int at = lane_; at < kRows * 4; at += kWarp) {
        const unsigned char* const from = row(at / 4) + kMlaValueDim + at % 4 * 16;
        store_two(to, warp_ * kRows + at / 4, kMlaValueDim / 8 + 2 * (at % 4), 0, *reinterpret_cast<const uint4*>(from),
                  scale_);
      }
    } else {
#pragma unroll 1
      for (int at = lane_; at < kRows * 8; at += kWarp) {
        const unsigned char* const from = row(at / 8) + kKeyAt + at % 8 * 16;
        store(to, warp_ * kRows + at / 8, kMlaValueDim / 8 + at % 8,
              round_bf16x8<T>(*reinterpret_cast<const uint4*>(from)));
      }
    }
  }

 private:
  __device__ const unsigned char* row_of(int tile, int r) const {
    const auto key = static_cast<unsigned>(min(tile * kMlaKeys + warp_ * kRows + r, keys_ - 1));
    const auto page_size = static_cast<unsigned>(p_.page_size);
    const int found = table_[key / page_size];
    const int page = found < 0 || found >= p_.num_pages ? 0 : found;  // a bad page id leads to no other memory
    return static_cast<const unsigned char*>(p_.k) + page * p_.stride_k_batch + key % page_size * p_.stride_k_token;
  }
  __device__ static void store(std::uint32_t to, int row, int chunk, uint4 numbers) {
    *static_cast<uint4*>(__cvta_shared_to_generic(to + row_chunk(row, chunk))) = numbers;
  }
  /// Sixteen elements: chunks `chunk` and the next, the second one before the first where `first` is 1.
  __device__ static void store_two(std::uint32_t to, int row, int chunk, int first, uint4 elements, float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool second = (i ^ first) != 0;
      const uint2 eight = second ? make_uint2(elements.z, elements.w) : make_uint2(elements.x, elements.y);
      store(to, row, chunk + second, widen_e4m3x8<T>(eight, scale));
    }
  }

  const AttentionParams& p_;
  const std::int32_t* table_;
  int keys_, warp_, lane_;
  bool one_scale_;
  float scale_;
};

}  // namespace flashkernel::cuda::sm90a
