// Which tiles of the Hopper forward kernel serve which call.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/host/ceil_div.hpp"
#include "cuda/attention/forward/sm90a/chunks.hpp"
#include "cuda/attention/forward/sm90a/shape.cuh"
#include "ops/attention_params.hpp"

namespace flashkernel::cuda::sm90a {

/// Whether three warpgroups lose less than 5 % of the work to rows that fill no tile, beyond what two lose. Those rows
/// stand before the first one and cost the keys that it sees: few under a causal mask, all without.
inline bool fills_three(const AttentionParams& p) {
  const auto keys_of = [&](std::int64_t row) {
    return std::max(std::int64_t{1}, p.last_key(row, p.seq_q, p.seq_k) - p.first_key(row, p.seq_q, p.seq_k));
  };
  const std::int64_t row_groups = ceil_div(p.seq_q, 64), first = keys_of(std::min<std::int64_t>(32, p.seq_q / 2));
  const auto lost = [&](std::int64_t consumers) { return (consumers - row_groups % consumers) % consumers * first; };
  return 20 * (lost(3) - lost(2)) <= row_groups * keys_of(p.seq_q / 2);
}

/// The tile sizes for a pair of head dims. The comments add up their shared memory, at most 227 KB: kQSlots places for
/// Q, kStages for K and as many for V, and those for the output. `choose` picks the tile that was the fastest for a
/// call of this size (lab/notebooks/attention_hopper.md). Modified is the tile for calls with a softcap, which needs
/// registers, Scored for those with a bias, ALiBi or a packed mask, Sparse for those with a block mask. Invariant is
/// that of every other call in the invariant mode: the bits of a row depend on kBlockN. Where keys come in chunks
/// (chunks.cuh), FewRows is that of calls with up to 64 queries of a head, two of whose thread blocks share a
/// multiprocessor.
template <int kQkDim, int kVDim>
struct ForwardTiles;
template <>
struct ForwardTiles<64, 64> {
  struct Long : ForwardTile<64> {  // 2 x 24 + 6 x 16 KB
    static constexpr int kConsumers = 3, kBlockN = 128, kQSlots = 2, kStages = 3;
  };
  struct Short : ForwardTile<64> {  // 2 x 32 + 8 x 8 KB
    static constexpr int kConsumers = 4, kBlockN = 64, kQSlots = 2, kStages = 4;
  };
  struct ShortCausal : ForwardTile<64> {  // 2 x 32 + 10 x 8 KB
    static constexpr int kConsumers = 4, kBlockN = 64, kQSlots = 2, kStages = 5;
    static constexpr bool kTurns = false;
  };
  struct Modified : ForwardTile<64> {  // 2 x 24 + 4 x 12 KB
    static constexpr int kConsumers = 3, kBlockN = 96, kQSlots = 2;
  };
  struct Scored : ForwardTile<64> {  // 2 x 16 + 4 x 16 KB, and 2 x 32 KB of bias; three warpgroups lack registers
    static constexpr int kConsumers = 2, kBlockN = 128, kQSlots = 2;
  };
  struct Sparse : ForwardTile<64> {  // 2 x 16 + 6 x 16 KB: blocks of 128 queries are whole tiles
    static constexpr int kConsumers = 2, kBlockN = 128, kQSlots = 2, kStages = 3;
  };
  struct Invariant : ForwardTile<64> {  // 2 x 24 + 4 x 16 KB, and 3 x 18 KB of totals
    static constexpr int kConsumers = 3, kBlockN = kKeysOfBlock<64>, kQSlots = 2, kChunkBlocks = kBlocksOfChunk;
    static constexpr bool kTotalShared = true;
  };
  struct FewRows : ForwardTile<64> {  // 8 + 6 x 16 KB
    static constexpr int kConsumers = 1, kBlockN = kKeysOfBlock<64>, kQSlots = 1, kStages = 3;
    static constexpr int kChunkBlocks = kBlocksOfChunk;
    static constexpr int kResident = 2;
    static constexpr bool kTurns = false, kParts = true;
  };
  template <class F>
  static void choose(const AttentionParams& p, F&& launch_with) {
    // With 192 queries or fewer, at least a quarter of a tile of four warpgroups would be padding.
    const bool is_masked = p.window_right >= 0;
    if (p.seq_q <= 192 || p.seq_q > (is_masked ? 4096 : 1536)) return launch_with(Long{});
    if (is_masked && p.seq_q <= 2048) return launch_with(ShortCausal{});
    launch_with(Short{});
  }
};
template <>
struct ForwardTiles<96, 96> {
  struct Long : ForwardTile<96> {  // 48 + 6 x 24 + 24 KB
    static constexpr int kConsumers = 3, kBlockN = 96, kQSlots = 1, kStages = 3, kOutSlots = 1, kHeld = 3;
  };
  struct ShortCausal : ForwardTile<96> {  // 48 + 8 x 16 + 48 KB
    static constexpr int kConsumers = 3, kBlockN = 64, kQSlots = 1, kStages = 4, kOutSlots = 2, kHeld = 3;
    static constexpr bool kTurns = false;
  };
  struct Two : ForwardTile<96> {  // 2 x 32 + 4 x 32 KB
    static constexpr int kConsumers = 2, kBlockN = 128, kQSlots = 2, kHeld = 6;
  };
  using Modified = Two;
  using Invariant = Two;
  template <class F>
  static void choose(const AttentionParams& p, F&& launch_with) {
    const bool is_masked = p.window_right >= 0;
    if (!fills_three(p) || (!is_masked && p.seq_q <= 1024)) return launch_with(Two{});
    if (is_masked && p.seq_q <= 2048) return launch_with(ShortCausal{});
    launch_with(Long{});
  }
};
template <>
struct ForwardTiles<128, 128> {
  struct Three : ForwardTile<128> {  // 48 + 8 x 16 + 48 KB
    static constexpr int kConsumers = 3, kBlockN = 64, kQSlots = 1, kStages = 4, kOutSlots = 2, kHeld = 5;
    static constexpr bool kTurns = false;
  };
  struct Two : ForwardTile<128> {  // 2 x 32 + 4 x 32 KB
    static constexpr int kConsumers = 2, kBlockN = 128, kQSlots = 2;
  };
  using Modified = Two;
  using Sparse = Two;
  struct Scored : ForwardTile<128> {  // 2 x 32 + 4 x 24 KB, and 2 x 24 KB of bias
    static constexpr int kConsumers = 2, kBlockN = 96, kQSlots = 2;
  };
  struct Invariant : ForwardTile<128> {  // 2 x 32 + 6 x 24 KB, and 2 x 2 KB of totals
    static constexpr int kConsumers = 2, kBlockN = kKeysOfBlock<128>, kQSlots = 2, kStages = 3;
    static constexpr int kChunkBlocks = kBlocksOfChunk;
  };
  struct FewRows : ForwardTile<128> {  // 16 + 4 x 24 KB
    static constexpr int kConsumers = 1, kBlockN = kKeysOfBlock<128>, kQSlots = 1, kChunkBlocks = kBlocksOfChunk;
    static constexpr int kResident = 2;
    static constexpr bool kTurns = false, kParts = true;
  };
  template <class F>
  static void choose(const AttentionParams& p, F&& launch_with) {
    if (fills_three(p)) return launch_with(Three{});
    launch_with(Two{});
  }
};
template <>
struct ForwardTiles<192, 128> {
  struct Only : ForwardTile<192, 128> {  // 48 + 2 x 48 + 2 x 32 + 16 KB
    static constexpr int kConsumers = 2, kBlockN = 128, kQSlots = 1, kOutSlots = 1;
  };
  struct Modified : ForwardTile<192, 128> {  // 48 + 2 x 30 + 2 x 20 + 32 KB
    static constexpr int kConsumers = 2, kBlockN = 80, kQSlots = 1, kOutSlots = 2;
  };
  using Invariant = Only;
  template <class F>
  static void choose(const AttentionParams&, F&& launch_with) {
    launch_with(Only{});
  }
};
template <>
struct ForwardTiles<192, 192> {
  struct Long : ForwardTile<192> {  // 48 + 4 x 30 + 48 KB
    static constexpr int kConsumers = 2, kBlockN = 80, kQSlots = 1, kOutSlots = 3, kHeld = 10;
  };
  struct Short : ForwardTile<192> {  // 48 + 6 x 24 + 32 KB
    static constexpr int kConsumers = 2, kBlockN = 64, kQSlots = 1, kStages = 3, kOutSlots = 2, kHeld = 12;
    static constexpr bool kTurns = false;
  };
  struct Modified : ForwardTile<192> {
    static constexpr int kConsumers = 2, kBlockN = 80, kQSlots = 1, kOutSlots = 3;
  };
  using Invariant = Long;
  template <class F>
  static void choose(const AttentionParams& p, F&& launch_with) {
    if (p.seq_q <= (p.window_right >= 0 ? 1024 : 512)) return launch_with(Short{});
    launch_with(Long{});
  }
};
template <>
struct ForwardTiles<256, 256> {
  struct Only : ForwardTile<256> {  // 64 + 4 x 32 + 32 KB
    static constexpr int kConsumers = 2, kBlockN = 64, kQSlots = 1, kOutSlots = 2, kHeld = 7;
  };
  struct Modified : ForwardTile<256> {  // 64 + 4 x 24 + 48 KB
    static constexpr int kConsumers = 2, kBlockN = 48, kQSlots = 1, kOutSlots = 3;
  };
  using Invariant = Only;
  template <class F>
  static void choose(const AttentionParams&, F&& launch_with) {
    launch_with(Only{});
  }
};

/// The tile for e4m3 operands of a head dim. A place of Q also holds the output, of 16 bits. Comments as above.
template <int kDim>
struct Float8Tile;
template <>
struct Float8Tile<64> : ForwardTile<64> {  // 2 x 24 + 4 x (16 + 8) KB
  static constexpr int kConsumers = 3, kBlockN = 128, kQSlots = 2, kStages = 4;
  static constexpr bool kEightBits = true;
};
template <>
struct Float8Tile<128> : ForwardTile<128> {  // 2 x 32 + 8 x 16 KB
  static constexpr int kConsumers = 2, kBlockN = 128, kQSlots = 2, kStages = 4;
  static constexpr bool kEightBits = true;
};
template <>
struct Float8Tile<256> : ForwardTile<256> {  // 32 + 4 x 24 + 64 KB
  static constexpr int kConsumers = 2, kBlockN = 96, kQSlots = 1, kOutSlots = 4;
  static constexpr bool kEightBits = true;
};

/// Whether the tensor cores should also compute the row sums, in a call without LSE. Measured: d64 gains 2 to 5 %; d128
/// gains 1 to 4 % with two consumers and loses 3 % with three.
template <class Shape>
constexpr bool sums_pay() {
  return Shape::kVDim == 64 || (Shape::kQkDim == 128 && Shape::kVDim == 128 && Shape::kConsumers == 2);
}

}  // namespace flashkernel::cuda::sm90a
