// Emulates src/cuda/ptx/clock.cuh: the clock counts how often it was asked.
#pragma once

#include "simt/simt.hpp"

namespace flashkernel::cuda::ptx {

inline std::int64_t global_nanoseconds() {
  static std::int64_t ns = 0;
  return ++ns;
}

inline void trap() { simt::fault("trap"); }

}  // namespace flashkernel::cuda::ptx
