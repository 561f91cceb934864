// The matrix instructions of the decode step: the rows of a matrix that come through the ring times up to 8 rows of x.
// See kernel.cuh.
//
// Two units of 8 rows of the matrix are the left operand of m16n8k16, rows of x are the right one. The 8 warps take
// lines of 64 k in turn, and leave their sums in shared memory for the warps that finish them (finish.cuh). The weights
// of the next two units are brought to registers while those do, and the weights of a phase's first two before the wait
// for the phase before.
//
// A lane loads 8 neighbouring elements of a row at once, and takes them for what it has of two steps: k is permuted
// within 32, in both operands alike. So rows of weights may lie at multiples of 128 bytes, where copies are fastest: of
// two rows that are loaded together one begins with the upper half of its line.
#pragma once

#include "cuda/decode_step/sm90a/block.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"

namespace flashkernel::cuda::decode_step {

inline constexpr int kStep = 16;                             // of k: a matrix instruction
inline constexpr int kWarpSteps = kPartK / kStep / kWarps;   // of a warp in a part: 16
inline constexpr int kWarpLines = kPartK / kLineK / kWarps;  // of a warp in a part: 4, of 4 steps each

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

  /// The right operand of this warp's steps, of the part of k that begins at `part`.
  __device__ void fragments(std::uint32_t (&b)[kWarpSteps][2], const Shared& shared, int part) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int first = whole_ ? part / kPartK * run_.g.rows : 0, line = (first + lane / 4) % kMostRows;
    const unsigned char* const from = shared.x + line * kXPitch + (warp * kLineK + lane % 4 * 8) * 2;
#pragma unroll
    for (int half = 0; half < kWarpLines * 2; ++half) {
      const uint4 eight = *reinterpret_cast<const uint4*>(from + (half / 2 * kWarps * 2 + half % 2) * kLineK);
      b[half * 2][0] = eight.x, b[half * 2][1] = eight.y, b[half * 2 + 1][0] = eight.z, b[half * 2 + 1][1] = eight.w;
    }
  }

 private:
  /// This thread's elements of a line.
  __device__ uint4& own(int line, Shared& shared) const {
    return reinterpret_cast<uint4&>(shared.x[line * kXPitch + own_ * 2]);
  }
  __device__ void bring(int part, Shared& shared) const {
    const int rows = run_.g.rows;
    if (op_ == Opcode::kOut && several_parts(shared)) return merge(part, shared);
#pragma unroll 1
    for (int line = 0, row = 0, k = part + own_; line < lines_ && k < k_; ++line) {
      ptx::cp_async_16(ptx::shared_address(&own(line, shared)), from_ + row * stride_ + k, 16);
      if (++row == rows) row = 0, k += kPartK;
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  }
  __device__ bool several_parts(const Shared& shared) const {
    bool several = false;
    for (int row = 0; row < run_.g.rows; ++row) several = several || shared.parts[row] > 1;
    return several;
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
  /// The results of attention, some of them of several parts of the keys, which are put together by the logarithms of
  /// their sums. Two loads at a time are under way, since each is a way to L2 and back: of two lines, or of two parts
  /// where there is one line.
  __device__ void merge(int part, Shared& shared) const {
    if (lines_ > 1) return merge<2, 1>(part, shared);
    merge<1, 2>(part, shared);
  }
  template <int kLines, int kParts>
  __device__ void merge(int part, Shared& shared) const {
    const int rows = run_.g.rows;
#pragma unroll 1
    for (int first = 0; first < lines_; first += kLines) {
      float sum[kLines][kParts][8] = {}, total[kLines][kParts] = {}, most[kLines][kParts];
      int heads[kLines], parts[kLines], longest = 0;
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
        const int line = first + i, row = line % rows, k = part + line / rows * kPartK + own_;
        const bool there = line < lines_ && k < k_;
        parts[i] = there ? shared.parts[row] : 0;
        heads[i] = there ? row * run_.g.heads_q + k / D : 0;
        longest = max(longest, parts[i]);
#pragma unroll
        for (int j = 0; j < kParts; ++j) most[i][j] = -INFINITY;
      }
#pragma unroll 1
      for (int p = 0; p < longest; p += kParts)
#pragma unroll
        for (int i = 0; i < kLines; ++i)
#pragma unroll
          for (int j = 0; j < kParts; ++j) {
            // Behind a line's last part that one is read again, and counts nothing.
            const std::int64_t at =
                static_cast<std::int64_t>(heads[i]) * run_.g.parts + max(min(p + j, parts[i] - 1), 0);
            const float* const values = run_.partial + at * D + own_ % D;
            const float4 a = *reinterpret_cast<const float4*>(values), b = *reinterpret_cast<const float4*>(values + 4);
            const float values_of[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
            const float lse = run_.lse[at];
            add(sum[i][j], total[i][j], most[i][j], p + j < parts[i] ? lse : -INFINITY, 1.0f, values_of);
          }
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
        const int line = first + i, row = line % rows, k = part + line / rows * kPartK + own_;
        if (line >= lines_ || k >= k_) continue;
#pragma unroll
        for (int j = 1; j < kParts; ++j) add(sum[i][0], total[i][0], most[i][0], most[i][j], total[i][j], sum[i][j]);
        const float factor = ptx::reciprocal_approx(total[i][0]);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[i][0][j] *= factor;
        own(line, shared) = parts[i] > 1 ? narrow<T>(sum[i][0]) : load_eight(from_ + row * stride_ + k);
      }
    }
  }
  /// To a sum of values by their weights, and the weights' total, relative to 2^most: another one of 2^point.
  static __device__ void add(float (&sum)[8], float& total, float& most, float point, float other_total,
                             const float (&other)[8]) {
    const float larger = fmaxf(most, point), base = larger == -INFINITY ? 0.0f : larger;
    const float before = ptx::exp2_approx(most - base), weight = ptx::exp2_approx(point - base);
    most = larger;
    total = total * before + weight * other_total;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] = sum[j] * before + weight * other[j];
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
    const int slots = place.units(ins) * 2, row = lane / 4;
    left_ = ins.k - place.part;
    if (const Ring<kSlots> own{ring.count + lane}; lane < slots)
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[own.slot()]), own.parity());
    __syncwarp();
    const unsigned char* from[kGroupUnits];
#pragma unroll
    for (int unit = 0; unit < kGroupUnits; ++unit)
      from[unit] = shared.ring +
                   (ring.count + (place.units(ins) > unit ? unit * 2 : 0) + row / kSlotRows) % kSlots * kSlotBytes +
                   (row % kSlotRows * kPartK + warp * kLineK + lane % 4 * 8) * 2;
#pragma unroll
    for (int line = 0; line < kWarpLines; ++line) {
      if (left_ < kPartK && !inside(line * 4)) continue;
#pragma unroll
      for (int unit = 0; unit < kGroupUnits; ++unit) {
        const unsigned char* const at = from[unit] + line * kWarps * kLineK * 2;
        const uint4 one = *reinterpret_cast<const uint4*>(at + row % 2 * kLineK);
        const uint4 other = *reinterpret_cast<const uint4*>(at + (row % 2 ^ 1) * kLineK);
        take(line * 4, unit, row % 2 ? other : one);
        take(line * 4 + 2, unit, row % 2 ? one : other);
      }
    }
    // A slot is given back after the last of them has come: its address needs it, if only as 0.
    std::uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kWarpSteps; ++i) all |= a_[i][3];
    __syncwarp();
    if (lane < slots)
      ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[(ring.count + lane) % kSlots]) + (all & ring.count >> 31));
    ring.count += slots;
  }
  /// sums += the weights times x. In kAtOnce chains, which wait for each other less than one.
  __device__ void multiply(float (&sums)[4], const std::uint32_t (&x)[kWarpSteps][2]) const {
    float chains[kAtOnce][4] = {};
    if (left_ >= kPartK) {
#pragma unroll
      for (int i = 0; i < kWarpSteps; ++i) ptx::mma_m16n8k16<T>(chains[i % kAtOnce], a_[i], x[i][0], x[i][1]);
    } else {
#pragma unroll
      for (int i = 0; i < kWarpSteps; ++i)
        if (inside(i)) ptx::mma_m16n8k16<T>(chains[i % kAtOnce], a_[i], x[i][0], x[i][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += (chains[0][i] + chains[1][i]) + (chains[2][i] + chains[3][i]);
  }

 private:
  static constexpr int kAtOnce = 4;

  /// Whether k reaches to this step; two neighbours of 16 are permuted together.
  __device__ bool inside(int step) const {
    return (step / 4 * kWarps + static_cast<int>(threadIdx.x) / kWarp) * kLineK + step % 4 / 2 * 2 * kStep < left_;
  }
  __device__ void take(int step, int unit, const uint4& eight) {
    a_[step][unit] = eight.x, a_[step][unit + 2] = eight.y;
    a_[step + 1][unit] = eight.z, a_[step + 1][unit + 2] = eight.w;
  }

  std::uint32_t a_[kWarpSteps][4] = {};
  int left_ = 0;
};

template <class T, int D>
__device__ inline void linear(const Run& run, const Instruction& ins, int phase, Ring<kSlots>& ring,
                              Ring<kMails>& mails, Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  Activations<T, D> x(run, ins);
  Weights<T> weights;
  std::uint32_t right[kWarpSteps][2];
  weights.load(ins, {}, ring, shared);
  wait_for(run, ins, phase);
  float sums[4] = {};
#pragma unroll 1
  for (Place at; !at.ended(ins);) {
    const bool begins = at.part == 0 && at.group == 0;
    if (ins.k > kPartK || begins) {
      if (begins || !x.whole()) {
        if (!begins) meet();  // all have taken what is there
        x.stage(at.part, shared);
      }
      if (begins) note(run, phase, 2);
      x.fragments(right, shared, at.part);
    }
    weights.multiply(sums, right);
    const int units = at.units(ins);
    const bool done = at.last_part(ins);
    at.advance(ins);
    if (done) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.mail_empty[mails.slot()]), mails.parity() ^ 1);
      auto& mail = shared.sums[mails.slot()];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane % 4 * 2 + i % 2;
        if (row < run.g.rows && i / 2 < units) mail[i / 2][warp][row * kUnitRows + lane / 4] = sums[i];
        sums[i] = 0;
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.mail_full[mails.slot()]));
      ++mails.count;
    }
    if (!at.ended(ins)) weights.load(ins, at, ring, shared);
  }
}

}  // namespace flashkernel::cuda::decode_step
