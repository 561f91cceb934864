// The matrix instructions of the decode step: the rows of a matrix that come through the ring times up to 8 rows of x,
// and what is made of the sums (RoPE and the append, SwiGLU, the residual, logits). See kernel.cuh.
//
// Two units of 8 rows of the matrix are the left operand of m16n8k16, rows of x are the right one; both come by
// ldmatrix. The 8 warps take steps of 16 k in turn, and add their sums through shared memory, in the order of the
// warps: then each thread has one sum to finish. The weights of the next two units lie in registers before that, and
// those of the first ones before the wait for the phase before.
#pragma once

#include "cuda/decode_step/sm90a/block.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"

namespace flashkernel::cuda::decode_step {

inline constexpr int kStep = 16;                            // of k: a matrix instruction
inline constexpr int kWarpSteps = kPartK / kStep / kWarps;  // of a warp in a part: 16
inline constexpr float kLog2E = 1.4426950408889634f;

/// How x comes to the products: all threads bring it into shared memory, 8 elements of a line each, where the norm is
/// taken and parts of attention are put together; from there each lane takes its fragments. A line is a part of k of a
/// row. Shared memory has kMostRows lines: all parts of all rows where they fit, else a part of all rows at a time.
template <class T, int D>
class Activations {
 public:
  __device__ Activations(const Run& run, const Instruction& ins)
      : run_(run),
        op_(ins.op),
        k_(ins.k),
        own_(static_cast<int>(threadIdx.x) * 8),
        normed_(op_ == Opcode::kQkv || op_ == Opcode::kGateUp || op_ == Opcode::kHead) {
    from_ = static_cast<const T*>(op_ == Opcode::kOut ? run.attended : op_ == Opcode::kDown ? run.inner : run.residual);
    stride_ = op_ == Opcode::kOut ? run.g.heads_q * D : ins.k;
    const int norm = op_ == Opcode::kHead ? 2 * run.g.layers : 2 * ins.layer + (op_ == Opcode::kGateUp);
    norm_ = static_cast<const T*>(run.p.norms) + norm * run.p.stride_norms_row + own_;
    if (normed_ && own_ < k_) weight_ = load_eight(norm_);  // before the wait: nobody writes it
    const int parts = (k_ + kPartK - 1) / kPartK;
    whole_ = run.g.rows * parts <= kMostRows;
    lines_ = whole_ ? run.g.rows * parts : run.g.rows;
  }
  /// Whether all of k is there after the first call of stage().
  __device__ bool whole() const { return whole_; }

  /// x from `part` of k on, to shared memory. Of the first part the factor of a norm is worked out, too. All lines are
  /// under way at once; a thread norms what it has brought itself.
  __device__ void stage(int part, Shared& shared) {
    const int rows = run_.g.rows;
    bring(part, shared);
    if (normed_) {
      if (part == 0) {
#pragma unroll 4
        for (int row = 0; row < rows; ++row) {
          const float squares = warp_reduce(squares_of_row(row, shared), Sum());
          if (threadIdx.x % kWarp == 0) shared.squares[row][threadIdx.x / kWarp] = squares;
        }
        meet();
      }
#pragma unroll 1
      for (int k = part, first = 0; first < lines_ && k + own_ < k_; k += kPartK, first += rows) {
        if (k_ > kPartK) weight_ = load_eight(norm_ + k);
#pragma unroll 4
        for (int row = 0; row < rows; ++row)
          own(first + row, shared) = normalised(own(first + row, shared), factor(row, shared));
      }
    }
    meet();
  }

  /// Where this lane's row of the right operand of its warp's steps lies, of the part of k that begins at `part`: lanes
  /// 0 to 7 have the rows, the others 8 elements on, and the same of the next step.
  __device__ std::uint32_t fragments(const Shared& shared, int part) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int first = whole_ ? part / kPartK * run_.g.rows : 0, line = (first + lane % 8) % kMostRows;
    return ptx::shared_address(shared.x) + line * kRowPitch +
           ((lane / 16 * kWarps + warp) * kStep + lane / 8 % 2 * 8) * 2;
  }

 private:
  /// This thread's elements of a line.
  __device__ uint4& own(int line, Shared& shared) const {
    return reinterpret_cast<uint4&>(shared.x[line * kRowPitch + own_ * 2]);
  }
  __device__ void bring(int part, Shared& shared) const {
    const int rows = run_.g.rows;
#pragma unroll 1
    for (int line = 0, row = 0, k = part + own_; line < lines_ && k < k_; ++line) {
      if (op_ == Opcode::kOut && shared.parts[row] > 1)
        own(line, shared) = merged(row, k, shared);
      else
        ptx::cp_async_16(ptx::shared_address(&own(line, shared)), from_ + row * stride_ + k, 16);
      if (++row == rows) row = 0, k += kPartK;
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  }
  static __device__ float squares_of(const uint4& eight) {
    float values[8], sum = 0;
    widen<T>(values, eight);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += values[i] * values[i];
    return sum;
  }
  __device__ float squares_of_row(int row, Shared& shared) const {
    float sum = own_ < k_ ? squares_of(own(row, shared)) : 0.0f;
    if (k_ <= kPartK) return sum;
#pragma unroll 1
    for (int k = own_ + kPartK; k < k_; k += kPartK) sum += squares_of(load_eight(from_ + row * stride_ + k));
    return sum;
  }
  __device__ float factor(int row, const Shared& shared) const {
    const float4 a = reinterpret_cast<const float4&>(shared.squares[row][0]);
    const float4 b = reinterpret_cast<const float4&>(shared.squares[row][4]);
    const float sum = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
    return rsqrtf(sum * run_.one_over_hidden + run_.p.eps);
  }
  __device__ uint4 normalised(const uint4& eight, float factor) const {
    float values[8], weights[8];
    widen<T>(values, eight);
    widen<T>(weights, weight_);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] *= factor * weights[i];
    return narrow<T>(values);
  }
  /// Eight elements of the result of attention, of several parts of the keys, by the logarithms of their sums.
  __device__ uint4 merged(int row, int k, const Shared& shared) const {
    const int most = run_.g.parts, parts = shared.parts[row];
    const int head = (row * run_.g.heads_q + k / D) * most;
    const float* const values = run_.partial + static_cast<std::int64_t>(head) * D + k % D;
    float sum[8] = {}, total = 0, largest = -INFINITY;
#pragma unroll 2
    for (int part = 0; part < parts; ++part) largest = fmaxf(largest, run_.lse[head + part]);
#pragma unroll 2
    for (int part = 0; part < parts; ++part) {
      const float weight = ptx::exp2_approx(run_.lse[head + part] - largest);
      const float4 a = *reinterpret_cast<const float4*>(values + part * D);
      const float4 b = *reinterpret_cast<const float4*>(values + part * D + 4);
      sum[0] += weight * a.x, sum[1] += weight * a.y, sum[2] += weight * a.z, sum[3] += weight * a.w;
      sum[4] += weight * b.x, sum[5] += weight * b.y, sum[6] += weight * b.z, sum[7] += weight * b.w;
      total += weight;
    }
    const float factor = ptx::reciprocal_approx(total);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] *= factor;
    return narrow<T>(sum);
  }

  const Run& run_;
  const Opcode op_;
  const int k_, own_;
  const bool normed_;
  bool whole_;
  const T *from_, *norm_;
  int stride_, lines_;
  uint4 weight_;
};

/// One sum of a unit and a row of x: what becomes of it.
template <class T, int D>
class Finish {
 public:
  __device__ Finish(const Run& run, const Instruction& ins, const Shared& shared)
      : run_(run), ins_(ins), shared_(shared) {}

  /// Of this thread's unit in the group that begins at `group`: what is needed and known before the sums are.
  __device__ void prepare(int group) {
    active_ = in_group() < kGroupUnits && group + in_group() < ins_.count && row() < run_.g.rows;
    unit_ = ins_.first + (group + in_group());
    if (!active_) return;
    at_ = run_.g.row_of(ins_.op, unit_, i());
    if (ins_.op == Opcode::kOut || ins_.op == Opcode::kDown) residual_ = to_float(*residual());
  }
  /// Every thread calls it.
  __device__ void store(float sum) {
    const float other = __shfl_xor_sync(kFullMask, sum, 4);
    if (!active_) return;
    switch (ins_.op) {
      case Opcode::kQkv: return store_qkv(sum, other);
      case Opcode::kGateUp:
        // As the ops one by one: gate and up are rounded first.
        if (i() < 4)
          static_cast<T*>(run_.inner)[static_cast<std::int64_t>(row()) * run_.g.inner + at_] =
              from_float<T>(silu(to_float(from_float<T>(sum))) * to_float(from_float<T>(other)));
        return;
      case Opcode::kHead:
        if (unit_ * kUnitRows + i() < run_.g.outputs)
          static_cast<T*>(run_.p.logits)[row() * run_.p.stride_logits_row + at_] = from_float<T>(sum);
        return;
      default: *residual() = from_float<T>(residual_ + to_float(from_float<T>(sum)));
    }
  }
  __device__ int in_group() const { return static_cast<int>(threadIdx.x) / 64; }
  __device__ bool active() const { return active_; }

 private:
  /// Of the sum that the thread finishes: the row of x, and that of the unit.
  static __device__ int row() { return static_cast<int>(threadIdx.x) % 64 / 8; }
  static __device__ int i() { return static_cast<int>(threadIdx.x) % 8; }
  static __device__ float silu(float x) { return x * ptx::reciprocal_approx(1.0f + ptx::exp2_approx(-kLog2E * x)); }
  __device__ T* residual() const {
    return static_cast<T*>(run_.residual) + static_cast<std::int64_t>(row()) * run_.g.hidden + at_;
  }
  __device__ void store_qkv(float sum, float other) {
    const DecodeStepParams& p = run_.p;
    const int head = at_ / D, within = at_ % D, heads_q = run_.g.heads_q, heads_kv = run_.g.heads_kv;
    const float own = to_float(from_float<T>(sum)), partner = to_float(from_float<T>(other));
    const float2 turn = shared_.turns[row()][within % (D / 2)];
    const float turned = own * turn.x + (i() < 4 ? -partner : partner) * turn.y;
    if (head < heads_q) {
      static_cast<T*>(run_.q)[static_cast<std::int64_t>(row()) * heads_q * D + at_] = from_float<T>(turned);
      return;
    }
    const std::int64_t slot = p.slots[row()];
    if (slot < 0 || slot >= p.num_pages * p.page_size) return;
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
  bool active_ = false;
  int unit_ = 0, at_ = 0;
  float residual_ = 0;
};

/// Which units of an instruction and which part of k are multiplied together.
struct Place {
  int group = 0, part = 0;

  __device__ int units(const Instruction& ins) const { return min(kGroupUnits, ins.count - group); }
  __device__ bool ended(const Instruction& ins) const { return group >= ins.count; }
  __device__ bool last_part(const Instruction& ins) const { return part + kPartK >= ins.k; }
  __device__ void advance(const Instruction& ins) {
    part += kPartK;
    if (part < ins.k) return;
    part = 0;
    group += kGroupUnits;
  }
};

/// The weights of a place in registers: of each of this warp's steps, the left operand. They leave the ring early, so
/// that it holds what comes behind them.
template <class T>
class Weights {
 public:
  /// Waits until they are there.
  __device__ void load(const Instruction& ins, const Place& place, Ring<kSlots>& ring, Shared& shared) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int slots = place.units(ins) * 2, unit = place.units(ins) > 1 ? lane / 8 % 2 : 0;
    left_ = ins.k - place.part;
    if (const Ring<kSlots> own{ring.count + lane}; lane < slots)
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[own.slot()]), own.parity());
    __syncwarp();
    // Lanes 0 to 15 have the rows of the tile, the others 8 elements on.
    const std::uint32_t from = ptx::shared_address(shared.ring) +
                               (ring.count + unit * 2 + lane % 8 / kSlotRows) % kSlots * kSlotBytes +
                               lane % kSlotRows * kRowPitch + (warp * kStep + lane / 16 * 8) * 2;
    if (left_ >= kPartK) {
#pragma unroll
      for (int i = 0; i < kWarpSteps; ++i) ptx::ldmatrix_x4(a_[i], from + i * kWarps * kStep * 2);
    } else {
#pragma unroll
      for (int i = 0; i < kWarpSteps; ++i)
        if (inside(i)) ptx::ldmatrix_x4(a_[i], from + i * kWarps * kStep * 2);
    }
    // A slot is given back after the last of them has come: its address needs it, if only as 0.
    std::uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kWarpSteps; ++i) all |= a_[i][3];
    if (lane < slots)
      ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[(ring.count + lane) % kSlots]) + (all & ring.count >> 31));
    ring.count += slots;
  }
  /// sums += the weights times x, whose fragments begin at `x`.
  __device__ void multiply(float (&sums)[4], std::uint32_t x) const {
    if (left_ >= kPartK) return multiply<true>(sums, x);
    multiply<false>(sums, x);
  }

 private:
  static constexpr int kAtOnce = 4;

  /// In kAtOnce chains, which wait for each other less than one.
  template <bool kWhole>
  __device__ void multiply(float (&sums)[4], std::uint32_t x) const {
    float chains[kAtOnce][4] = {};
#pragma unroll
    for (int base = 0; base < kWarpSteps; base += kAtOnce) {
      std::uint32_t b[kAtOnce / 2][4];
#pragma unroll
      for (int i = 0; i < kAtOnce / 2; ++i) ptx::ldmatrix_x4(b[i], x + (base + 2 * i) * kWarps * kStep * 2);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (kWhole || inside(base + i))
          ptx::mma_m16n8k16<T>(chains[i], a_[base + i], b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += (chains[0][i] + chains[1][i]) + (chains[2][i] + chains[3][i]);
  }
  __device__ bool inside(int step) const {
    return (step * kWarps + static_cast<int>(threadIdx.x) / kWarp) * kStep < left_;
  }

  std::uint32_t a_[kWarpSteps][4] = {};
  int left_ = 0;
};

template <class T, int D>
__device__ inline void linear(const Run& run, const Instruction& ins, int phase, Ring<kSlots>& ring, int& exchange,
                              Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  Activations<T, D> x(run, ins);
  Finish<T, D> finish(run, ins, shared);
  Weights<T> weights;
  weights.load(ins, {}, ring, shared);
  wait_for(run, ins, phase);
  float sums[4] = {};
#pragma unroll 1
  for (Place at; !at.ended(ins);) {
    const bool begins = at.part == 0 && at.group == 0;
    if (at.part == 0) {
      finish.prepare(at.group);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = 0;
    }
    if (ins.k > kPartK || begins) {
      if (begins || !x.whole()) {
        if (!begins) meet();  // all have taken what is there
        x.stage(at.part, shared);
      }
      if (begins) note(run, phase, 2);
    }
    weights.multiply(sums, x.fragments(shared, at.part));
    const int units = at.units(ins);
    const bool done = at.last_part(ins);
    at.advance(ins);
    if (!at.ended(ins)) weights.load(ins, at, ring, shared);
    if (!done) continue;
    auto& mail = shared.sums[exchange];
    exchange ^= 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane % 4 * 2 + i % 2;
      if (row < run.g.rows && i / 2 < units) mail[i / 2][warp][row * kUnitRows + lane / 4] = sums[i];
    }
    meet();
    float sum = 0;
    if (finish.active())
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += mail[finish.in_group()][w][thread % 64];
    finish.store(sum);
  }
}

}  // namespace flashkernel::cuda::decode_step
