// The matrix instructions of the decode step: up to 8 rows of x times the rows of a matrix that come through the ring,
// and what is made of the sums (RoPE and the append, SwiGLU, the residual, logits). See kernel.cuh.
//
// x is the left operand of m16n8k16 (its rows 8 to 15 are zero), a unit of 8 rows of the matrix is the right one. Lane
// l of a warp holds of a chunk of 32 k the elements 8 (l%4) .. + 7 of row l/4 of either: an order of k that both share.
// The 8 warps take the chunks in turn, and add their sums through shared memory, in the order of the warps, for two
// units at a time: then each thread has one sum to finish.
#pragma once

#include "cuda/decode_step/sm90a/block.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"

namespace flashkernel::cuda::decode_step {

inline constexpr int kChunk = 32;
inline constexpr int kSlotChunks = kSlotK / kChunk / kWarps;  // of a warp in a slot: 4
inline constexpr int kPartChunks = kPartK / kChunk / kWarps;  // and in a part: 8
inline constexpr float kLog2E = 1.4426950408889634f;

/// How x comes to the products: all threads bring a part of k of all rows into shared memory, 8 elements of a row each,
/// where the norm is taken and parts of attention are put together; from there each lane takes its fragments.
template <class T, int D>
class Activations {
  static constexpr int kRowsAtOnce = 4;

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
  }

  /// A part of k of all rows, to shared memory. Of the first part the factor of a norm is worked out, too.
  __device__ void stage(int part, Shared& shared) {
    const int rows = run_.g.rows;
    const bool inside = part + own_ < k_, first = normed_ && part == 0;
    uint4 raw[kRowsAtOnce];
    if (first) {
#pragma unroll 1
      for (int base = 0; base < rows; base += kRowsAtOnce) {
        load_rows(raw, base, part);
        leave_squares(raw, base, shared);
      }
      meet();
    }
    if (normed_ && k_ > kPartK && inside) weight_ = load_eight(norm_ + part);
#pragma unroll 1
    for (int base = 0; base < rows; base += kRowsAtOnce) {
      if (!first || rows > kRowsAtOnce) load_rows(raw, base, part);
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (base + i >= rows || !inside) break;
        if (normed_) raw[i] = normalised(raw[i], factor(base + i, shared));
        reinterpret_cast<uint4&>(shared.x[(base + i) * kXPitch + own_ * 2]) = raw[i];
      }
    }
    if (op_ == Opcode::kOut && inside)
#pragma unroll 1
      for (int row = 0; row < rows; ++row)
        if (shared.parts[row] > 1)
          reinterpret_cast<uint4&>(shared.x[row * kXPitch + own_ * 2]) = merged(row, part + own_, shared);
    meet();
  }

  /// What this lane multiplies with: 8 elements of its row in each of its warp's chunks of the part that is there.
  __device__ void take(const Shared& shared, int left) {
    const int row = static_cast<int>(threadIdx.x) % kWarp / 4;
    const int offset = static_cast<int>(threadIdx.x) / kWarp * kChunk + static_cast<int>(threadIdx.x) % 4 * 8;
#pragma unroll
    for (int i = 0; i < kPartChunks; ++i) {
      const int k = offset + i * kWarps * kChunk;
      x[i] = row < run_.g.rows && k < left ? *reinterpret_cast<const uint4*>(&shared.x[row * kXPitch + k * 2])
                                           : make_uint4(0, 0, 0, 0);
    }
  }

  uint4 x[kPartChunks];

 private:
  /// Of the result of attention in several parts: whatever lies there.
  __device__ uint4 load(int row, int k) const { return load_eight(from_ + row * stride_ + k); }
  static __device__ float squares_of(const uint4& eight) {
    float values[8], sum = 0;
    widen<T>(values, eight);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += values[i] * values[i];
    return sum;
  }
  __device__ void load_rows(uint4 (&raw)[kRowsAtOnce], int base, int part) const {
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i)
      raw[i] = base + i < run_.g.rows && part + own_ < k_ ? load(base + i, part + own_) : make_uint4(0, 0, 0, 0);
  }
  __device__ void leave_squares(const uint4 (&raw)[kRowsAtOnce], int base, Shared& shared) const {
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (base + i >= run_.g.rows) break;
      float squares = squares_of(raw[i]);
#pragma unroll 1
      for (int k = own_ + kPartK; k < k_; k += kPartK) squares += squares_of(load(base + i, k));
      squares = warp_reduce(squares, Sum());
      if (threadIdx.x % kWarp == 0) shared.squares[base + i][threadIdx.x / kWarp] = squares;
    }
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
  const T *from_, *norm_;
  int stride_;
  uint4 weight_;
};

/// One sum of a unit and a row of x: what becomes of it.
template <class T, int D>
class Finish {
 public:
  __device__ Finish(const Run& run, const Instruction& ins, const Shared& shared)
      : run_(run),
        ins_(ins),
        shared_(shared),
        row_(static_cast<int>(threadIdx.x) % 64 / 8),
        i_(static_cast<int>(threadIdx.x) % 8) {}

  /// Of this thread's unit in the group that begins at `group`: what is needed and known before the sums are.
  __device__ void prepare(int group) {
    active_ = in_group() < kGroupUnits && group + in_group() < ins_.count && row_ < run_.g.rows;
    unit_ = ins_.first + group + in_group();
    if (!active_) return;
    at_ = run_.g.row_of(ins_.op, unit_, i_);
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
        if (i_ < 4)
          static_cast<T*>(run_.inner)[static_cast<std::int64_t>(row_) * run_.g.inner + at_] =
              from_float<T>(silu(to_float(from_float<T>(sum))) * to_float(from_float<T>(other)));
        return;
      case Opcode::kHead:
        if (unit_ * kUnitRows + i_ < run_.g.outputs)
          static_cast<T*>(run_.p.logits)[row_ * run_.p.stride_logits_row + at_] = from_float<T>(sum);
        return;
      default: *residual() = from_float<T>(residual_ + to_float(from_float<T>(sum)));
    }
  }
  __device__ int in_group() const { return static_cast<int>(threadIdx.x) / 64; }
  __device__ bool active() const { return active_; }

 private:
  static __device__ float silu(float x) { return x * ptx::reciprocal_approx(1.0f + ptx::exp2_approx(-kLog2E * x)); }
  __device__ T* residual() const {
    return static_cast<T*>(run_.residual) + static_cast<std::int64_t>(row_) * run_.g.hidden + at_;
  }
  __device__ void store_qkv(float sum, float other) {
    const DecodeStepParams& p = run_.p;
    const int head = at_ / D, within = at_ % D, heads_q = run_.g.heads_q, heads_kv = run_.g.heads_kv;
    const float own = to_float(from_float<T>(sum)), partner = to_float(from_float<T>(other));
    const float2 turn = shared_.turns[row_][within % (D / 2)];
    const float turned = own * turn.x + (i_ < 4 ? -partner : partner) * turn.y;
    if (head < heads_q) {
      static_cast<T*>(run_.q)[static_cast<std::int64_t>(row_) * heads_q * D + at_] = from_float<T>(turned);
      return;
    }
    const std::int64_t slot = p.slots[row_];
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
  const int row_, i_;
  bool active_ = false;
  int unit_ = 0, at_ = 0;
  float residual_ = 0;
};

/// The products of a slot: this warp's chunks of 8 rows of the matrix. In two chains, which take half the time of one.
template <class T>
__device__ inline void multiply(float (&sums)[4], const uint4* x, const unsigned char* slot, int chunks) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  float others[4] = {};
  const unsigned char* const from = slot + lane / 4 * kRowPitch + (warp * kChunk + lane % 4 * 8) * 2;
#pragma unroll
  for (int i = 0; i < kSlotChunks; ++i) {
    if (warp + i * kWarps >= chunks) break;
    const uint4 w = *reinterpret_cast<const uint4*>(from + i * kWarps * kChunk * 2);
    const uint4 v = x[i];
    ptx::mma_m16n8k16<T>(sums, {v.x, 0, v.y, 0}, w.x, w.y);
    ptx::mma_m16n8k16<T>(others, {v.z, 0, v.w, 0}, w.z, w.w);
  }
  sums[0] += others[0], sums[1] += others[1];
}

template <class T, int D>
__device__ inline void linear(const Run& run, const Instruction& ins, int phase, Ring<kSlots>& ring, int& exchange,
                              Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  Activations<T, D> x(run, ins);
  Finish<T, D> finish(run, ins, shared);
  wait_for(run, ins, phase);
#pragma unroll 1
  for (int group = 0; group < ins.count; group += kGroupUnits) {
    finish.prepare(group);
    const int units = min(kGroupUnits, ins.count - group);
    auto& mail = shared.sums[exchange];
    exchange ^= 1;
#pragma unroll 1
    for (int part = 0; part < ins.k; part += kPartK) {
      if (ins.k > kPartK || group == 0) {
        if (part > 0 || group > 0) meet();  // all have taken what is there
        x.stage(part, shared);
        x.take(shared, ins.k - part);
        if (part == 0 && group == 0) note(run, phase, 2);
      }
#pragma unroll 1
      for (int unit = 0; unit < units; ++unit) {
        float sums[4] = {};
#pragma unroll
        for (int half = 0; half < kPartK / kSlotK; ++half) {
          const int left = ins.k - part - half * kSlotK;
          if (left <= 0) break;
          const std::uint32_t slot = ring.slot();
          ptx::mbarrier_wait(ptx::shared_address(&shared.full[slot]), ring.parity());
          multiply<T>(sums, x.x + half * kSlotChunks, shared.ring + slot * kSlotBytes, min(left, kSlotK) / kChunk);
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[slot]));
          ++ring.count;
        }
        if (lane / 4 < run.g.rows) {
          float2& own = reinterpret_cast<float2&>(mail[unit][warp][lane / 4 * kUnitRows + lane % 4 * 2]);
          own = part == 0 ? make_float2(sums[0], sums[1]) : make_float2(own.x + sums[0], own.y + sums[1]);
        }
      }
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
