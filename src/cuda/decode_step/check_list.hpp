// The lists of a decode step, written down for all blocks, and what must hold of them before a kernel may run them: a
// wait for an arrival that never comes is a hang of the whole GPU. Host code; tests_cpp/decode_step_plan_test.cpp
// mutates lists, each of which must be refused.
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/decode_step/list.hpp"

namespace flashkernel::cuda::decode_step {

using Lists = std::vector<std::vector<Instruction>>;  // of each block

inline Lists lists_of(const Geometry& g) {
  Lists lists(static_cast<std::size_t>(g.blocks));
  for (int block = 0; block < g.blocks; ++block)
    for (int phase = 0; phase < g.phases(); ++phase) {
      const Instruction made = instruction_of(g, block, phase);
      if (made.count > 0) lists[static_cast<std::size_t>(block)].push_back(made);
    }
  return lists;
}

namespace detail {

/// The phase of an instruction, or -1 where it is none.
inline int phase_of(const Geometry& g, const Instruction& i) {
  const int within = i.op == Opcode::kHead ? 0 : static_cast<int>(i.op);
  const int phase = 5 * i.layer + within;
  return phase >= 0 && phase < g.phases() && g.opcode(phase) == i.op ? phase : -1;
}

/// Null, or why an instruction can't be run.
inline const char* check_instruction(const Geometry& g, const Instruction& i, const std::vector<int>& arrivals,
                                     std::vector<int>& done) {
  const int phase = phase_of(g, i);
  if (phase < 0) return "an instruction of no phase";
  if (i.count <= 0 || i.first < 0 || i.first + i.count > g.units(i.op)) return "units that the phase does not have";
  if (i.k != (i.op == Opcode::kAttention ? g.parts : g.k(i.op))) return "another k than the phase's";
  if (i.wait != phase - 1) return "it does not wait for the phase before";
  if (i.wait >= 0 && i.target != arrivals[static_cast<std::size_t>(i.wait)])
    return "it waits for another number of arrivals than there are";
  if (i.raise != (i.op == Opcode::kHead ? -1 : phase)) return "it does not raise its phase's counter";
  done[static_cast<std::size_t>(phase)] += i.count;
  return nullptr;
}

/// Null, or that the blocks, each in its list's order, don't come to their ends.
inline const char* check_ends(const Geometry& g, const Lists& lists) {
  std::vector<int> counters(static_cast<std::size_t>(g.phases()), 0);
  std::vector<std::size_t> at(lists.size(), 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t block = 0; block < lists.size(); ++block)
      for (; at[block] < lists[block].size(); ++at[block]) {
        const Instruction& i = lists[block][at[block]];
        if (i.wait >= 0 && counters[static_cast<std::size_t>(i.wait)] < i.target) break;
        if (i.raise >= 0) ++counters[static_cast<std::size_t>(i.raise)];
        moved = true;
      }
  }
  for (std::size_t block = 0; block < lists.size(); ++block)
    if (at[block] < lists[block].size()) return "blocks wait for each other";
  return nullptr;
}

}  // namespace detail

/// Null, or why the lists must not run. Each unit is done once and in no other phase's place; an instruction waits for
/// as many arrivals as the lists make at that counter; the blocks come to their ends; the ring fits.
inline const char* check_lists(const Geometry& g, const Lists& lists, std::size_t shared_bytes) {
  if (static_cast<int>(lists.size()) != g.blocks) return "another number of lists than of blocks";
  if (static_cast<std::size_t>(kSlots) * kSlotBytes > shared_bytes) return "the ring does not fit";
  std::vector<int> arrivals(static_cast<std::size_t>(g.phases()), 0), done(arrivals);
  for (const auto& list : lists)
    for (const Instruction& i : list) {
      if (i.raise >= g.phases() || i.wait >= g.phases()) return "a counter that there is not";
      if (i.raise >= 0) ++arrivals[static_cast<std::size_t>(i.raise)];
    }
  std::vector<std::vector<bool>> seen(static_cast<std::size_t>(g.phases()));
  for (const auto& list : lists)
    for (const Instruction& i : list) {
      if (const char* const why = detail::check_instruction(g, i, arrivals, done)) return why;
      auto& units = seen[static_cast<std::size_t>(detail::phase_of(g, i))];
      units.resize(static_cast<std::size_t>(g.units(i.op)));
      for (int unit = i.first; unit < i.first + i.count; ++unit) {
        if (units[static_cast<std::size_t>(unit)]) return "a unit is done twice";
        units[static_cast<std::size_t>(unit)] = true;
      }
    }
  for (int phase = 0; phase < g.phases(); ++phase)
    if (done[static_cast<std::size_t>(phase)] != g.units(g.opcode(phase))) return "a unit is not done";
  return detail::check_ends(g, lists);
}

}  // namespace flashkernel::cuda::decode_step
