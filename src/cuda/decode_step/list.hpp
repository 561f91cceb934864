// What each block does in a decode step of one launch: a list of instructions, worked out from the model's sizes, the
// rows and the number of blocks. The kernel works out its next instruction by the same function as the host, so that
// no list is kept in memory; the host writes all lists down and checks them (check_list.hpp).
//
// A step is 5 layers + 1 phases: of each layer q, k, v with RoPE and the append (kQkv), attention over parts of the
// keys (kAttention), the output matrix with the residual (kOut), gate and up with SwiGLU (kGateUp), down with the
// residual (kDown); at last the logits (kHead). A phase is units that are shared by the blocks, one after another:
// 8 rows of a matrix, or a part of the keys of a sequence and kv head. Each phase reads what all units of the phase
// before have written, so an instruction waits until that phase's counter has reached the number of blocks that have
// units there, and raises its own phase's by one. In between nothing is waited for: weights run ahead through a ring.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/params_common.hpp"

namespace flashkernel::cuda::decode_step {

enum class Opcode : std::int32_t { kQkv, kAttention, kOut, kGateUp, kDown, kHead };

inline constexpr int kMostRows = 8;    // of a step: the columns of a tile of m16n8k16
inline constexpr int kUnitRows = 8;    // rows of a matrix in a unit
inline constexpr int kPartK = 2048;    // of k: what a slot of the ring holds of a row, and x at a time
inline constexpr int kSlotRows = 4;    // of a matrix: half a unit
inline constexpr int kGroupUnits = 2;  // units that are multiplied together: the 16 rows of a tile
inline constexpr int kSlots = 11;      // of the ring
inline constexpr int kLineK = 64;      // of k: a line of shared memory, 128 bytes
inline constexpr int kSlotBytes = kSlotRows * kPartK * 2;
inline constexpr int kXPitch = kPartK * 2 + 64;  // bytes of a line of x; so that two of them meet no bank twice
inline constexpr int kMostParts = 16;            // of the keys of a sequence
inline constexpr int kLeastKeys = 256;           // of a part, unless the sequence has fewer

/// The sizes that lists are made of.
struct Geometry {
  std::int32_t rows = 0, layers = 0, hidden = 0, heads_q = 0, heads_kv = 0, head_dim = 0, inner = 0, outputs = 0;
  std::int32_t blocks = 0;
  std::int32_t parts = 1;  // that the keys of a sequence and kv head may have: `cut` says how many

  FK_HOST_DEVICE int phases() const { return 5 * layers + 1; }
  FK_HOST_DEVICE Opcode opcode(int phase) const {
    return phase == 5 * layers ? Opcode::kHead : static_cast<Opcode>(phase % 5);
  }
  FK_HOST_DEVICE int matrix_rows(Opcode op) const {
    switch (op) {
      case Opcode::kQkv: return (heads_q + 2 * heads_kv) * head_dim;
      case Opcode::kGateUp: return 2 * inner;
      case Opcode::kHead: return outputs;
      default: return hidden;
    }
  }
  FK_HOST_DEVICE int units(Opcode op) const {
    if (op == Opcode::kAttention) return rows * heads_kv * parts;
    return (matrix_rows(op) + kUnitRows - 1) / kUnitRows;
  }
  /// Terms of a row's sum.
  FK_HOST_DEVICE int k(Opcode op) const {
    return op == Opcode::kOut ? heads_q * head_dim : op == Opcode::kDown ? inner : hidden;
  }
  /// Row `i` (0 to 7) of a unit, as a row of its matrix. The upper four of what is joined in pairs lie apart: the two
  /// halves of a head, and gate and up.
  FK_HOST_DEVICE int row_of(Opcode op, int unit, int i) const {
    if (op == Opcode::kQkv) {
      const int of_head = head_dim / kUnitRows, half = head_dim / 2;
      return unit / of_head * head_dim + unit % of_head * 4 + i % 4 + i / 4 * half;
    }
    if (op == Opcode::kGateUp) return unit * 4 + i % 4 + i / 4 * inner;
    const int row = unit * kUnitRows + i, most = matrix_rows(op) - 1;
    return row < most ? row : most;
  }
};

/// The geometry for as many blocks, which rows and kv heads leave parts of the keys for.
inline Geometry cut(Geometry g, int blocks) {
  g.blocks = blocks;
  g.parts = g.rows * g.heads_kv > 0 ? blocks / (g.rows * g.heads_kv) : 1;
  g.parts = g.parts < 1 ? 1 : g.parts > kMostParts ? kMostParts : g.parts;
  return g;
}

/// One instruction of a block. 32 bytes.
struct Instruction {
  Opcode op = Opcode::kHead;
  std::int32_t layer = 0;
  std::int32_t first = 0, count = 0;   // units
  std::int32_t wait = -1, target = 0;  // the counter that is waited for, -1: none, and what it must have reached
  std::int32_t raise = -1;             // the counter that is raised by one afterwards, -1: none
  std::int32_t k = 0;                  // terms of a sum; attention: parts of the keys
};
static_assert(sizeof(Instruction) == 32);

/// Blocks that have units of a phase.
FK_HOST_DEVICE inline int blocks_of(const Geometry& g, int phase) {
  const int units = g.units(g.opcode(phase));
  return units < g.blocks ? units : g.blocks;
}

/// What `block` does in `phase`; of no units where others do it all.
FK_HOST_DEVICE inline Instruction instruction_of(const Geometry& g, int block, int phase) {
  Instruction made;
  made.op = g.opcode(phase);
  made.layer = phase / 5;
  const auto units = static_cast<std::uint32_t>(g.units(made.op)), blocks = static_cast<std::uint32_t>(g.blocks);
  const auto at = static_cast<std::uint32_t>(block);
  made.first = static_cast<std::int32_t>(units * at / blocks);
  made.count = static_cast<std::int32_t>(units * (at + 1) / blocks) - made.first;
  if (phase > 0) made.wait = phase - 1, made.target = blocks_of(g, phase - 1);
  if (made.op != Opcode::kHead) made.raise = phase;
  made.k = made.op == Opcode::kAttention ? g.parts : g.k(made.op);
  return made;
}

/// Keys of each part of a sequence.
FK_HOST_DEVICE inline int keys_of_part(int length, int parts) {
  const int even = (length + parts - 1) / parts;
  return even < kLeastKeys ? kLeastKeys : even;
}

/// Where a step's intermediate results lie in its workspace: bytes from its begin.
struct Workspace {
  std::size_t residual = 0, q = 0, attended = 0, inner = 0, partial = 0, lse = 0, bytes = 0;
};
FK_HOST_DEVICE inline Workspace workspace_of(const Geometry& g) {
  Workspace w;
  const auto take = [&](std::size_t bytes) {
    const std::size_t at = w.bytes;
    w.bytes += (bytes + 255) / 256 * 256;
    return at;
  };
  const auto rows = static_cast<std::size_t>(g.rows), q = static_cast<std::size_t>(g.heads_q) * g.head_dim;
  w.residual = take(rows * static_cast<std::size_t>(g.hidden) * 2);
  w.q = take(rows * q * 2);
  w.attended = take(rows * q * 2);
  w.inner = take(rows * static_cast<std::size_t>(g.inner) * 2);
  w.partial = take(rows * q * static_cast<std::size_t>(g.parts) * 4);
  w.lse = take(rows * static_cast<std::size_t>(g.heads_q * g.parts) * 4);
  return w;
}

}  // namespace flashkernel::cuda::decode_step
