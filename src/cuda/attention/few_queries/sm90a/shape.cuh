// Tiles and shared memory of the kernel for few queries (kernel.cuh).
#pragma once

#include <cstdint>

#include "cuda/attention/few_queries/sm90a/plan.hpp"
#include "cuda/attention/key_range.cuh"
#include "cuda/pipeline/register_pool.hpp"

namespace flashkernel::cuda::sm90a {

/// What threads of a block tell each other. One of them reads the lengths: if these changed meanwhile, two readers
/// might wait for each other forever.
struct FewQueriesNotes {
  KeyRange range;
  int is_last;  // the other clusters have left their parts of this block's rows, and it merges them
  int met_nan;  // a result is not finite
};

/// kConsumers warpgroups of 64 rows each, and behind them the producer, whose first warp loads keys, or all of whose
/// warps gather them. With one warpgroup two blocks share a multiprocessor: one of them computes while the other one
/// waits. With two the producer is a warpgroup as well, since only whole ones can hand over registers.
template <int kQkDim_, int kVDim_, int kConsumers_>
struct FewQueriesShape {
  static constexpr int kQkDim = kQkDim_, kVDim = kVDim_, kConsumers = kConsumers_;
  static constexpr int kBlockM = 64 * kConsumers, kBlockN = few_queries_block_keys(kConsumers);
  static constexpr bool kScored = false, kSparse = false;  // for redo.cuh and producer.cuh
  static constexpr bool kTakesBits = true;
  static constexpr bool kHandsOver = kConsumers > 1;
  static constexpr int kConsumerThreads = 128 * kConsumers, kGatherWarps = kHandsOver ? 4 : 2;
  static constexpr int kThreads = kConsumerThreads + 32 * kGatherWarps;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // with kHandsOver
  static_assert(!kHandsOver || kConsumers * kConsumerRegisters + kProducerRegisters <= registers_a_row(kThreads));
  static constexpr int kResidents = few_queries_residents(kConsumers);
  // A tile lies as blocks of 64 columns: lines of 128 bytes, swizzled.
  static constexpr int kQkBlocks = kQkDim / 64, kVBlocks = kVDim / 64;
  static constexpr int kQBlockBytes = 64 * 128, kKvBlockBytes = kBlockN * 128;
  static constexpr int kQBytes = kQkBlocks * kQBlockBytes;  // of a warpgroup; later its output
  static constexpr int kKBytes = kQkBlocks * kKvBlockBytes, kVBytes = kVBlocks * kKvBlockBytes;
  static constexpr int kStages = kQkDim == 64 ? 6 : 3;
  static constexpr int kTileBytes = kConsumers * kQBytes + kStages * (kKBytes + kVBytes);
  static constexpr int kBarriers = 4 * kStages;
  static constexpr int kBytes = kTileBytes + kBarriers * 8 + static_cast<int>(sizeof(FewQueriesNotes));
  static_assert(kVBlocks <= kQkBlocks, "the output takes the place of Q");
  // What a block leaves its cluster takes the place of keys: numerators, then a maximum and a sum for each row.
  static constexpr int kPartPitch = kVDim + 8;  // floats of a row; eight rows of one column lie in different banks
  static constexpr int kPartBytes = kBlockM * kPartPitch * 4;
  static_assert(kPartBytes + kBlockM * 8 <= kStages * (kKBytes + kVBytes), "keys leave room for a part");
  static_assert(kResidents * (kBytes + 1024) <= 228 * 1024, "a multiprocessor has 228 KB");

  std::uint32_t base;

  __device__ std::uint32_t q(int warpgroup) const { return base + warpgroup * kQBytes; }
  __device__ std::uint32_t k(int stage) const { return q(kConsumers) + stage * kKBytes; }
  __device__ std::uint32_t v(int stage) const { return k(kStages) + stage * kVBytes; }
  __device__ std::uint32_t k_full(int stage) const { return base + kTileBytes + 8 * stage; }
  __device__ std::uint32_t k_empty(int stage) const { return k_full(kStages + stage); }
  __device__ std::uint32_t v_full(int stage) const { return k_full(2 * kStages + stage); }
  __device__ std::uint32_t v_empty(int stage) const { return k_full(3 * kStages + stage); }
  __device__ std::uint32_t part_row(int row) const { return k(0) + row * kPartPitch * 4; }
  __device__ std::uint32_t part_state(int row) const { return k(0) + kPartBytes + row * 8; }
  __device__ FewQueriesNotes& notes() const {
    return *static_cast<FewQueriesNotes*>(__cvta_shared_to_generic(k_full(kBarriers)));
  }
};

}  // namespace flashkernel::cuda::sm90a
