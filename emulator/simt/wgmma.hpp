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

struct Wgmma {
  bool bf16, a_in_registers, transposed_a, transposed_b, accumulate;
  int columns;
  std::uint64_t a, b;  // descriptors
  std::uint32_t a_registers[32][4];
  float* d[32];
  Where where;
  unsigned warp_in_group;
  std::vector<float> before;    // the accumulators when they were handed over; empty behind another one on the same
  std::vector<float> operands;  // a [16, 16] and b [16, columns], once they are read
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
