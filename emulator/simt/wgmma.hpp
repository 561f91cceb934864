// Warpgroup matrix instructions of sm_90a: each warp computes its 16 rows of the 64. Operands are read when the first
// of the four warps waits for the batch, which needs all four to have committed it; a warp's accumulators change at its
// own wait. PTX ISA, asynchronous warpgroup level matrix instructions.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "simt/race.hpp"
#include "simt/simt.hpp"

namespace simt {

enum class WgmmaElement : std::uint8_t { kF16, kBf16, kE4m3, kE5m2 };

constexpr std::uint32_t bytes_of(WgmmaElement element) { return element < WgmmaElement::kE4m3 ? 2 : 1; }

struct Wgmma {
  WgmmaElement a_element, b_element;  // of the same size
  bool a_in_registers, transposed_a, transposed_b, accumulate;
  int columns;
  std::uint64_t a, b;  // descriptors
  std::uint32_t a_registers[32][4];
  float* d[32];
  Where where;
  unsigned warp_in_group;
  std::vector<float> before;    // the accumulators when they were handed over; empty behind another one on the same
  std::vector<float> operands;  // a [16, depth] and b [depth, columns], once they are read

  std::uint32_t depth() const { return 32 / bytes_of(a_element); }  // 16 of 16 bits, 32 of 8
};

struct WgmmaBatch {
  std::vector<Wgmma> products;
  bool fetched;
};

struct WgmmaQueue {
  std::vector<Wgmma> open;
  std::deque<WgmmaBatch> batches;  // the last of `committed`
  unsigned committed = 0;
  std::vector<Thread*> waiting;  // lanes, for the other warps to commit
  bool fenced = false;
  race::Agent agent = 0;  // that reads this warp's operands; 0: none yet
};

/// By the lane that completes the warp's meeting.
void wgmma_issue(Warp&, Wgmma&&);
void wgmma_fence(Where);
void wgmma_commit(Where);
void wgmma_wait(unsigned batches_left, Where);

}  // namespace simt
