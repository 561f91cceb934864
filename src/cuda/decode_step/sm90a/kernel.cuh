// A whole decode step in one launch, for up to 8 rows of a dense decoder of Llama's kind.
//
// One block a multiprocessor, all of them on the GPU at once, each with a list of instructions (cuda/decode_step/
// list.hpp). A list names what a block computes, which counter it waits for before that, and which one it raises
// afterwards. One warp copies weights and nothing else: it walks the same list without waiting for any counter, as far
// ahead as the ring lets it, so that memory is read while the others wait for each other. Eight warps multiply and
// attend; three make of the products what the phase leaves. A slot has 2048 elements of each of 4 rows of a matrix; two
// units of 8 rows are a tile, whose k the warps share.
//
// Launched without `chained`, a launch is one phase, its blocks wait for nobody, and the order of launches takes the
// counters' place: the same lists, one launch an instruction.
#pragma once

#include "cuda/decode_step/sm90a/attention.cuh"
#include "cuda/decode_step/sm90a/finish.cuh"
#include "cuda/decode_step/sm90a/linear.cuh"
#include "cuda/pipeline/departure.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/rope.cuh"

namespace flashkernel::cuda::decode_step {

/// The slots of a block in the order in which linear() takes them.
class Slots {
 public:
  __device__ explicit Slots(const Run& run) : run_(run), phase_(run.first_phase) { begin_phase(); }
  __device__ bool ended() const { return phase_ >= run_.last_phase; }
  /// Row `i` of the slot.
  template <class T>
  __device__ const T* row(int i) const {
    return matrix_row<T>(run_.p, ins_.op, ins_.layer,
                         run_.g.row_of(ins_.op, ins_.first + unit_, half_ * kSlotRows + i)) +
           part_;
  }
  __device__ std::uint32_t row_bytes() const { return static_cast<std::uint32_t>(min(kPartK, ins_.k - part_)) * 2; }
  __device__ void advance() {
    half_ ^= 1;
    if (half_ != 0) return;
    if (++unit_ < min(group_ + kGroupUnits, ins_.count)) return;
    unit_ = group_;
    part_ += kPartK;
    if (part_ < ins_.k) return;
    part_ = 0;
    unit_ = group_ += kGroupUnits;
    if (group_ < ins_.count) return;
    ++phase_;
    begin_phase();
  }

 private:
  __device__ void begin_phase() {
    for (; phase_ < run_.last_phase; ++phase_) {
      ins_ = instruction_of(run_.g, static_cast<int>(blockIdx.x), phase_);
      if (ins_.op != Opcode::kAttention && ins_.count > 0) break;
    }
    group_ = part_ = unit_ = half_ = 0;
  }

  const Run& run_;
  Instruction ins_;
  int phase_, group_ = 0, part_ = 0, unit_ = 0, half_ = 0;
};

/// The warp that copies. One warp asks for a slot in about the time in which memory brings it. Two warps ask faster:
/// blocks near memory then run ahead of the others, whom all wait for (lab/notebooks/decode_step.md).
template <class T>
__device__ inline void produce(const Run& run, Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  Slots slots(run);
  for (Ring<kSlots> ring; !slots.ended(); ++ring.count, slots.advance()) {
    const std::uint32_t slot = ring.slot(), full = ptx::shared_address(&shared.full[slot]);
    if (lane == 0) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[slot]), ring.parity() ^ 1);
      ptx::mbarrier_arrive_expect(full, kSlotRows * slots.row_bytes());
    }
    __syncwarp();
    if (lane < kSlotRows)
      ptx::bulk_load(ptx::shared_address(shared.ring + slot * kSlotBytes + lane * kPartK * 2), slots.row<T>(lane),
                     slots.row_bytes(), full, ptx::kL2EvictFirst);
  }
}

/// Embeddings of the tokens become the residual. Every block writes the same, and has done so before any of them adds
/// to it, which waits for attention.
template <class T>
__device__ inline void look_up(const Run& run) {
  for (int row = 0; row < run.g.rows; ++row) {
    const std::int64_t token = run.p.tokens[row];
    const bool there = token >= 0 && token < run.p.vocab;
    const T* const from = static_cast<const T*>(run.p.embedding) + (there ? token * run.p.stride_embedding_row : 0);
    uint4* const to = reinterpret_cast<uint4*>(static_cast<T*>(run.residual) + row * run.g.hidden);
    for (int at = static_cast<int>(threadIdx.x); at < run.g.hidden / 8; at += kConsumers)
      to[at] = there ? reinterpret_cast<const uint4*>(from)[at] : make_uint4(~0u, ~0u, ~0u, ~0u);  // NaN in any dtype
  }
  meet();
}

/// A row's length and parts, by a warp: -1 and none where the length, or a page that it needs, can't be.
static __device__ __noinline__ void look_at_row(const Run& run, Shared& shared, int row) {
  const DecodeStepParams& p = run.p;
  const std::int64_t length = p.seq_lens[row];
  bool good = length >= 0 && length <= p.max_pages * p.page_size;
  if (good)
    for (std::int64_t i = threadIdx.x % kWarp; i * p.page_size < length; i += kWarp) {
      const std::int32_t page = p.block_table[row * p.stride_block_table + i];
      good = good && page >= 0 && page < p.num_pages;
    }
  good = __all_sync(kFullMask, good);
  if (threadIdx.x % kWarp != 0) return;
  shared.lengths[row] = good ? static_cast<int>(length) : -1;
  shared.parts[row] = good ? parts_of(run.g, static_cast<int>(length)) : 0;
  const std::int64_t slot = p.slots[row];
  shared.slots[row] = slot < p.num_pages * p.page_size ? static_cast<int>(slot) : -1;
}

/// The warps that multiply and attend.
template <class T, int D>
__device__ inline void compute(const Run& run, Shared& shared) {
  if (run.first_phase == 0 && instruction_of(run.g, static_cast<int>(blockIdx.x), 0).count > 0) look_up<T>(run);
  Ring<kSlots> ring;
  Ring<kMails> mails;
  for (int phase = run.first_phase; phase < run.last_phase; ++phase) {
    const Instruction ins = instruction_of(run.g, static_cast<int>(blockIdx.x), phase);
    if (ins.count == 0) continue;
    if (ins.op != Opcode::kAttention) {
      linear<T, D>(run, ins, phase, ring, mails, shared);
      continue;
    }
    attention<T, D>(run, ins, phase, shared);
    meet();
    raise(run, ins, phase);
  }
  ptx::barrier_arrive(3, kConsumers + kFinishers);
}

/// The warps that finish what compute() multiplies. They leave the counters for the block, after all have used them.
template <class T, int D>
__device__ inline void finish(const Run& run, Shared& shared) {
  Ring<kMails> mails;
  for (int phase = run.first_phase; phase < run.last_phase; ++phase) {
    const Instruction ins = instruction_of(run.g, static_cast<int>(blockIdx.x), phase);
    if (ins.count == 0 || ins.op == Opcode::kAttention) continue;
    Finish<T, D> sums(run, ins, shared);
#pragma unroll 1
    for (int group = 0; group < ins.count; group += kGroupUnits) sums.take(group, mails, shared);
    finishers_meet();
    raise(run, ins, phase);
  }
  ptx::barrier_sync(3, kConsumers + kFinishers);
  if (!run.chained) return;
  Departure leaving(run.counters, run.g.phases() * kCounterStride, kFirstFinisher);
  leaving.announce();
  leaving.finish();
}

template <class T, int D>
__global__ void __launch_bounds__(kThreads, 1) decode_step_kernel(const __grid_constant__ Run run) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[slot]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[slot]), kWarps);
    }
    for (int mail = 0; mail < kMails; ++mail) {
      ptx::mbarrier_init(ptx::shared_address(&shared.mail_full[mail]), kWarps);
      ptx::mbarrier_init(ptx::shared_address(&shared.mail_empty[mail]), kFinishers / kWarp);
    }
    ptx::fence_mbarrier_init();
  }
  for (int at = static_cast<int>(threadIdx.x); at < run.g.rows * D / 2; at += kThreads) {
    const int row = at / (D / 2), pair = at % (D / 2);
    float2& turn = shared.turns[row][pair];
    rope_angle(run.p.positions[row], static_cast<double>(run.p.inv_freq[pair]) * kInversePi, &turn.x, &turn.y);
  }
  if (threadIdx.x / kWarp < static_cast<unsigned>(run.g.rows))
    look_at_row(run, shared, static_cast<int>(threadIdx.x) / kWarp);
  __syncthreads();
  const int warp = static_cast<int>(__shfl_sync(kFullMask, threadIdx.x / kWarp, 0));
  if (warp < kWarps) {
    ptx::increase_registers<kComputeRegisters>();
    compute<T, D>(run, shared);
    return;
  }
  ptx::decrease_registers<kOtherRegisters>();
  if (warp < kWarps + kFinishers / kWarp)
    finish<T, D>(run, shared);
  else
    produce<T>(run, shared);
}

}  // namespace flashkernel::cuda::decode_step
