// Emulates src/cuda/ptx/atomic.cuh: one thread runs at a time, so that the plain accesses are atomic and in order. A
// load that others may wait with lets them run.
#pragma once

#include "simt/simt.hpp"

namespace flashkernel::cuda::ptx {

inline void reduce_add(float* address, float value) { *address += value; }

inline void reduce_add_4(float* address, float a, float b, float c, float d) {
  if (reinterpret_cast<std::uintptr_t>(address) % 16 != 0)
    simt::fault("red.v4.f32: the address is not a multiple of 16");
  address[0] += a;
  address[1] += b;
  address[2] += c;
  address[3] += d;
}

inline int load_relaxed(const int* address, simt::Where where = simt::Where::here()) {
  simt::spin("a load of what another thread may write", where);
  return *address;
}

inline int load_acquire(const int* address, simt::Where where = simt::Where::here()) {
  simt::spin("a load of what another thread may write", where);
  return *address;
}

inline void store_release(int* address, int value) { *address = value; }

inline int fetch_add_acq_rel(int* address, int value) {
  const int before = *address;
  *address += value;
  return before;
}

inline int fetch_add_release(int* address, int value) { return fetch_add_acq_rel(address, value); }
inline int fetch_add_relaxed(int* address, int value) { return fetch_add_acq_rel(address, value); }

}  // namespace flashkernel::cuda::ptx
