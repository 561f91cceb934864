// A warp as the scheduler and the matrix instructions see it. See simt.hpp for what kernels see.
#pragma once

#include <cstdint>
#include <vector>

#include "simt/simt.hpp"
#include "simt/wgmma.hpp"

namespace simt {

// Lanes that wait for each other at one collective.
struct Meeting {
  const char* what;
  Where where;
  std::uint32_t mask, arrived;
  CollectiveFunction run;
  void* data[32];
};

struct Warp {
  std::uint32_t lanes = 0, runnable = 0, exited = 0;
  Thread* threads[32] = {};
  std::vector<Meeting> meetings;
  WgmmaQueue wgmma;
};

/// A thread of the current thread's warp.
inline const Thread& lane(unsigned number) { return *current->warp->threads[number]; }

}  // namespace simt
