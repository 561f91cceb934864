// The warps that finish the sums of the decode step's matrix instructions: RoPE and the append, SwiGLU, the residual,
// logits. The warps that multiply (linear.cuh) leave sums in one of two mails and go on. See kernel.cuh.
#pragma once

#include "cuda/decode_step/sm90a/block.cuh"
#include "cuda/ptx/math.cuh"

namespace flashkernel::cuda::decode_step {

/// The sums of a mail: kUnitRows of each row of x and unit, a thread each, of more than there are threads in turn.
template <class T, int D>
class Finish {
 public:
  __device__ Finish(const Run& run, const Instruction& ins, const Shared& shared)
      : run_(run), ins_(ins), shared_(shared), thread_(static_cast<int>(threadIdx.x) - kFirstFinisher) {}

  /// The units from `group` on, whose sums are in this mail.
  __device__ void take(int group, Ring<kMails>& mails, Shared& shared) {
    const int rows = run_.g.rows, count = min(kGroupUnits, ins_.count - group) * rows * kUnitRows;
    constexpr int kMost = (kGroupUnits * kMostRows * kUnitRows + kFinishers - 1) / kFinishers;
    const auto& mail = shared.sums[mails.slot()];
    T residual[kMost]{};
    // Of the first layer, other threads have written it; later on this one has, at the same place.
    if (ins_.layer == 0) wait_for_mail(mails, shared);
    if (ins_.op == Opcode::kOut || ins_.op == Opcode::kDown)
#pragma unroll
      for (int turn = 0; turn < kMost; ++turn)
        if (const int at = thread_ + turn * kFinishers; at < count) residual[turn] = *residual_of(place(group, at));
    wait_for_mail(mails, shared);
#pragma unroll
    for (int turn = 0; turn < kMost; ++turn) {
      const int at = thread_ + turn * kFinishers;
      if (turn * kFinishers >= count) break;
      const Place here = place(group, at);
      float sum = 0;
      if (at < count)
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += mail[here.in_group][w][here.row * kUnitRows + here.i];
      const float other = __shfl_xor_sync(kFullMask, sum, 4);
      if (at < count) store(here, sum, other, residual[turn]);
    }
    __syncwarp();
    if (thread_ % kWarp == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.mail_empty[mails.slot()]));
    ++mails.count;
  }

 private:
  /// A sum: of a row of x and row `i` of a unit, which is row `at` of the matrix.
  struct Place {
    int in_group, row, i, unit, at;
  };
  __device__ Place place(int group, int at) const {
    const int rows = run_.g.rows, i = at % kUnitRows, line = at / kUnitRows, in_group = line >= rows;
    const int unit = ins_.first + group + in_group;
    return {in_group, line - in_group * rows, i, unit, run_.g.row_of(ins_.op, unit, i)};
  }
  static __device__ void wait_for_mail(const Ring<kMails>& mails, const Shared& shared) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.mail_full[mails.slot()]), mails.parity());
  }
  __device__ T* residual_of(const Place& here) const {
    return static_cast<T*>(run_.residual) + static_cast<std::int64_t>(here.row) * run_.g.hidden + here.at;
  }
  static __device__ float silu(float x) {
    constexpr float kLog2E = 1.4426950408889634f;
    return x * ptx::reciprocal_approx(1.0f + ptx::exp2_approx(-kLog2E * x));
  }
  __device__ void store(const Place& here, float sum, float other, T residual) const {
    switch (ins_.op) {
      case Opcode::kQkv: return store_qkv(here, sum, other);
      case Opcode::kGateUp:
        // As the ops one by one: gate and up are rounded first.
        if (here.i < 4)
          static_cast<T*>(run_.inner)[static_cast<std::int64_t>(here.row) * run_.g.inner + here.at] =
              from_float<T>(silu(to_float(from_float<T>(sum))) * to_float(from_float<T>(other)));
        return;
      case Opcode::kHead:
        if (here.unit * kUnitRows + here.i < run_.g.outputs)
          static_cast<T*>(run_.p.logits)[here.row * run_.p.stride_logits_row + here.at] = from_float<T>(sum);
        return;
      default: *residual_of(here) = from_float<T>(to_float(residual) + to_float(from_float<T>(sum)));
    }
  }
  __device__ void store_qkv(const Place& here, float sum, float other) const {
    const DecodeStepParams& p = run_.p;
    const int head = here.at / D, within = here.at % D, heads_q = run_.g.heads_q, heads_kv = run_.g.heads_kv;
    const float own = to_float(from_float<T>(sum)), partner = to_float(from_float<T>(other));
    const float2 turn = shared_.turns[here.row][within % (D / 2)];
    const float turned = own * turn.x + (here.i < 4 ? -partner : partner) * turn.y;
    if (head < heads_q) {
      static_cast<T*>(run_.q)[static_cast<std::int64_t>(here.row) * heads_q * D + here.at] = from_float<T>(turned);
      return;
    }
    const int slot = shared_.slots[here.row];
    if (slot < 0) return;
    const std::int64_t page = run_.page_size.divide(static_cast<std::uint32_t>(slot)),
                       offset = slot - page * p.page_size;
    if (head < heads_q + heads_kv)
      static_cast<T*>(p.k_pages)[ins_.layer * p.stride_k_layer + page * p.stride_k_page + offset * p.stride_k_slot +
                                 (head - heads_q) * p.stride_k_head + within] = from_float<T>(turned);
    else
      static_cast<T*>(p.v_pages)[ins_.layer * p.stride_v_layer + page * p.stride_v_page + offset * p.stride_v_slot +
                                 (head - heads_q - heads_kv) * p.stride_v_head + within] = from_float<T>(own);
  }

  const Run& run_;
  const Instruction& ins_;
  const Shared& shared_;
  const int thread_;
};

}  // namespace flashkernel::cuda::decode_step
