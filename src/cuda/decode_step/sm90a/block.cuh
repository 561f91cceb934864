// What the roles of a block of the decode step share: its part of shared memory, the run's arguments, and how a block
// waits for the others. See kernel.cuh.
#pragma once

#include <type_traits>

#include "cuda/decode_step/list.hpp"
#include "cuda/pipeline/ring.cuh"
#include "cuda/ptx/atomic.cuh"
#include "cuda/ptx/clock.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/divisor.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vector.cuh"
#include "ops/decode_step_params.hpp"

namespace flashkernel::cuda::decode_step {

inline constexpr int kWarps = 8, kConsumers = kWarps * kWarp;  // that multiply and attend
inline constexpr int kFirstFinisher = kConsumers, kFinishers = 3 * kWarp;
inline constexpr int kThreads = kConsumers + kFinishers + kWarp;     // the last warp copies
inline constexpr int kComputeRegisters = 208, kOtherRegisters = 88;  // of a thread: 64512 in all, as at 168 each
inline constexpr int kMails = 2;          // of sums between those who multiply and those who finish
inline constexpr int kCounterStride = 8;  // ints from counter to counter: each has a sector of L2 to itself
inline constexpr int kHeadsAtOnce = 8;    // of queries that share a kv head: the rows of half a tile
inline constexpr int kMostHeadDim = 128;
inline constexpr std::int64_t kMostWaitNs = 2'000'000'000;

/// What a launch is given beside the call: `chained` runs all phases and waits by counters; else a launch is a phase.
struct Run {
  DecodeStepParams p;
  Geometry g;
  Divisor page_size;
  float one_over_hidden;
  int first_phase, last_phase, chained;
  int* counters;
  void *residual, *q, *attended, *inner;
  float *partial, *lse;
};

struct Shared {
  alignas(128) unsigned char ring[kSlots * kSlotBytes];
  union {
    alignas(16) unsigned char x[kMostRows * kXPitch];  // lines of a part of k: see Activations
    union {
      alignas(16) unsigned char rows[32768];  // of keys, and behind them of values
      float values[4608];                     // sums of the warps
    } attention;
  };
  float2 most_and_sum[kWarps][kHeadsAtOnce];                                   // of the scores of a warp's keys
  alignas(16) float sums[kMails][kGroupUnits][kWarps][kUnitRows * kMostRows];  // of products, by the warps that split k
  float2 turns[kMostRows][kMostHeadDim / 2];                                   // cosine and sine of each row and pair
  alignas(16) float squares[kMostRows][kWarps];
  int lengths[kMostRows], parts[kMostRows];  // of each row's keys
  int slots[kMostRows];                      // where each row's new token goes; negative: nowhere
  alignas(8) std::uint64_t full[kSlots], empty[kSlots], mail_full[kMails], mail_empty[kMails];
};

/// All threads that multiply and attend, or all that finish.
__device__ inline void meet() { ptx::barrier_sync(1, kConsumers); }
__device__ inline void finishers_meet() { ptx::barrier_sync(2, kFinishers); }

/// By the first thread of those that multiply, or of those that finish.
__device__ inline void note(const Run& run, int phase, int what) {
  if (run.p.timeline && threadIdx.x % kFirstFinisher == 0 && blockIdx.x < run.p.timeline_blocks)
    run.p.timeline[(static_cast<std::int64_t>(blockIdx.x) * run.g.phases() + phase) * 4 + what] =
        ptx::global_nanoseconds();
}

/// Returns when all blocks have done what the instruction reads. One thread asks; whoever waits two seconds ends the
/// launch, since the lists have been checked and nothing takes so long.
__device__ inline void wait_for(const Run& run, const Instruction& ins, int phase) {
  note(run, phase, 0);
  if (!run.chained || ins.wait < 0) return;
  if (threadIdx.x == 0) {
    const int* const counter = run.counters + ins.wait * kCounterStride;
    if (ptx::load_acquire(counter) < ins.target) {
      const std::int64_t begin = ptx::global_nanoseconds();
      for (unsigned asked = 1; ptx::load_acquire(counter) < ins.target; ++asked)
        if (asked % 4096 == 0 && ptx::global_nanoseconds() - begin > kMostWaitNs) ptx::trap();
    }
  }
  meet();
  note(run, phase, 1);
}

/// Tells the others that this block's part is written, which all of its writers have said by meeting.
__device__ inline void raise(const Run& run, const Instruction& ins, int phase) {
  if (run.chained && ins.raise >= 0 && threadIdx.x % kFirstFinisher == 0)
    ptx::fetch_add_release(run.counters + ins.raise * kCounterStride, 1);
  note(run, phase, 3);
}

template <class T>
__device__ inline const T* matrix_row(const DecodeStepParams& p, Opcode op, int layer, int row) {
  const LayerMatrices& m = op == Opcode::kQkv      ? p.qkv
                           : op == Opcode::kOut    ? p.out
                           : op == Opcode::kGateUp ? p.gate_up
                           : op == Opcode::kDown   ? p.down
                                                   : p.head;
  const std::int64_t at = op == Opcode::kHead ? 0 : layer * m.stride_layer;
  return static_cast<const T*>(m.data) + at + row * m.stride_row;
}

/// Parts that the keys of a sequence of this length have.
__device__ inline int parts_of(const Geometry& g, int length) {
  const int keys = keys_of_part(length, g.parts);
  return length <= 0 ? 0 : (length + keys - 1) / keys;
}

// Eight neighbouring elements travel as a uint4: as eight numbers of 16 bits they would take twice the registers.

template <class T>
__device__ inline uint4 load_eight(const T* from) {
  return *reinterpret_cast<const uint4*>(from);
}

template <class T>
__device__ inline void widen_two(float& low, float& high, std::uint32_t two) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    low = __uint_as_float(two << 16);
    high = __uint_as_float(two & 0xffff0000u);
  } else {
    const Packed<T, 2> halves = reinterpret_cast<const Packed<T, 2>&>(two);
    low = to_float(halves.values[0]);
    high = to_float(halves.values[1]);
  }
}
template <class T>
__device__ inline std::uint32_t narrow_two(float low, float high) {
  const float values[2] = {low, high};
  const Packed<T, 2> two = pack_vector<T>(values);
  return reinterpret_cast<const std::uint32_t&>(two);
}
template <class T>
__device__ inline void widen(float (&values)[8], const uint4& eight) {
  widen_two<T>(values[0], values[1], eight.x);
  widen_two<T>(values[2], values[3], eight.y);
  widen_two<T>(values[4], values[5], eight.z);
  widen_two<T>(values[6], values[7], eight.w);
}
template <class T>
__device__ inline uint4 narrow(const float (&values)[8]) {
  uint4 eight;
  reinterpret_cast<Packed<T, 8>&>(eight) = pack_vector<T>(values);
  return eight;
}

}  // namespace flashkernel::cuda::decode_step
