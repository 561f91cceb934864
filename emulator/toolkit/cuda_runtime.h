// The emulator's cuda_runtime.h: the part of CUDA C++ and of the runtime that the kernels and their host code use, for
// a plain C++ compiler. See emulator/README.md. What is missing here is a compile error, never a silent difference.
#pragma once

#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "simt/race.hpp"
#include "simt/simt.hpp"

// The language.
#define __CUDACC__
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...) static_assert(false, "clusters are not emulated");
#define __grid_constant__
#define __constant__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
// thread_local: the launching host thread's; shared.cpp finds them all by their place. Dynamic shared memory
// (`extern __shared__`) is replaced when the sources are prepared.
#define __shared__ thread_local

inline constexpr int warpSize = 32;

#include "vector_types.h"

// Warps and blocks.

namespace simt {

template <class T>
struct ShuffleLane {
  T value, result;
  unsigned source;
};

template <class T>
inline T shuffle(const char* what, unsigned mask, T value, unsigned source, Where where) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "what a shuffle moves");
  ShuffleLane<T> mine{value, value, source};
  collective(what, mask, where, &mine, [](void* const* data, std::uint32_t lanes) {
    for (unsigned lane = 0; lane < 32; ++lane) {
      if (!(lanes >> lane & 1)) continue;
      auto* const to = static_cast<ShuffleLane<T>*>(data[lane]);
      if (!(lanes >> to->source & 1)) fault("a shuffle reads a lane that does not take part");
      to->result = static_cast<ShuffleLane<T>*>(data[to->source])->value;
    }
  });
  return mine.result;
}

struct VoteLane {
  bool predicate;
  unsigned ballot;
};

inline unsigned ballot(const char* what, unsigned mask, bool predicate, Where where) {
  VoteLane mine{predicate, 0};
  collective(what, mask, where, &mine, [](void* const* data, std::uint32_t lanes) {
    unsigned votes = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
      if (lanes >> lane & 1) votes |= static_cast<unsigned>(static_cast<VoteLane*>(data[lane])->predicate) << lane;
    for (unsigned lane = 0; lane < 32; ++lane)
      if (lanes >> lane & 1) static_cast<VoteLane*>(data[lane])->ballot = votes;
  });
  return mine.ballot;
}

inline unsigned lane_id() { return current->lane; }

}  // namespace simt

using SimtWhere = simt::Where;

template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, SimtWhere where = SimtWhere::here()) {
  const unsigned mine = simt::lane_id(), w = static_cast<unsigned>(width);
  return simt::shuffle("__shfl_sync", mask, value, (mine & ~(w - 1)) | (static_cast<unsigned>(lane) & (w - 1)), where);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, SimtWhere where = SimtWhere::here()) {
  const unsigned mine = simt::lane_id(), other = mine ^ static_cast<unsigned>(lanes);
  const unsigned last = mine | (static_cast<unsigned>(width) - 1);
  return simt::shuffle("__shfl_xor_sync", mask, value, other > last ? mine : other, where);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SimtWhere where = SimtWhere::here()) {
  const unsigned mine = simt::lane_id(), inside = mine & (static_cast<unsigned>(width) - 1);
  return simt::shuffle("__shfl_up_sync", mask, value, inside < delta ? mine : mine - delta, where);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SimtWhere where = SimtWhere::here()) {
  const unsigned mine = simt::lane_id(), inside = mine & (static_cast<unsigned>(width) - 1);
  return simt::shuffle("__shfl_down_sync", mask, value,
                       inside + delta >= static_cast<unsigned>(width) ? mine : mine + delta, where);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SimtWhere where = SimtWhere::here()) {
  return simt::ballot("__ballot_sync", mask, predicate != 0, where);
}
inline int __any_sync(unsigned mask, int predicate, SimtWhere where = SimtWhere::here()) {
  return simt::ballot("__any_sync", mask, predicate != 0, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SimtWhere where = SimtWhere::here()) {
  return simt::ballot("__all_sync", mask, predicate == 0, where) == 0;
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, SimtWhere where = SimtWhere::here()) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "what match.sync compares");
  struct Lane {
    T value;
    unsigned same;
  } mine{value, 0};
  simt::collective("__match_any_sync", mask, where, &mine, [](void* const* data, std::uint32_t lanes) {
    for (unsigned a = 0; a < 32; ++a)
      for (unsigned b = 0; (lanes >> a & 1) && b < 32; ++b)
        if ((lanes >> b & 1) && static_cast<Lane*>(data[a])->value == static_cast<Lane*>(data[b])->value)
          static_cast<Lane*>(data[a])->same |= 1u << b;
  });
  return mine.same;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, SimtWhere where = SimtWhere::here()) {
  simt::collective("__syncwarp", mask, where, nullptr,
                   [](void* const*, std::uint32_t lanes) { simt::race::sync_lanes(lanes); });
}
inline unsigned __activemask() {
  return simt::fault("__activemask has no emulation: its answer is up to the compiler"), 0u;
}

inline void __syncthreads(SimtWhere where = SimtWhere::here()) { simt::block_barrier("__syncthreads", false, where); }
inline int __syncthreads_or(int predicate, SimtWhere where = SimtWhere::here()) {
  return simt::block_barrier("__syncthreads_or", predicate != 0, where).any;
}
inline int __syncthreads_and(int predicate, SimtWhere where = SimtWhere::here()) {
  return simt::block_barrier("__syncthreads_and", predicate != 0, where).all;
}
inline int __syncthreads_count(int predicate, SimtWhere where = SimtWhere::here()) {
  return simt::block_barrier("__syncthreads_count", predicate != 0, where).count;
}

// One thread runs at a time: fences order nothing that is not in order already.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned, SimtWhere where = SimtWhere::here()) { simt::spin("__nanosleep", where); }

inline std::size_t __cvta_generic_to_shared(const void* pointer) { return simt::shared_address(pointer); }
inline void* __cvta_shared_to_generic(std::size_t address) {
  return simt::shared_pointer(static_cast<std::uint32_t>(address));
}
template <class T>
inline T __ldg(const T* pointer) {
  return *pointer;
}
template <class T>
inline T __ldcs(const T* pointer) {
  return *pointer;
}
template <class T>
inline T __ldcg(const T* pointer) {
  return *pointer;
}
template <class T>
inline void __stcs(T* pointer, T value) {
  *pointer = value;
}

// Atomics: one thread runs at a time.
namespace simt {
template <class T, class F>
inline T atomically(T* address, F next) {
  race::atomic(address, sizeof(T));
  const race::Pause pause;
  const T old = *address;
  *address = static_cast<T>(next(old));
  return old;
}
}  // namespace simt

template <class T>
inline T atomicExch(T* address, std::common_type_t<T> value) {
  return simt::atomically(address, [=](T) { return value; });
}
template <class T>
inline T atomicAdd(T* address, std::common_type_t<T> value) {
  return simt::atomically(address, [=](T old) { return old + value; });
}
template <class T>
inline T atomicSub(T* address, std::common_type_t<T> value) {
  return simt::atomically(address, [=](T old) { return old - value; });
}
template <class T>
inline T atomicMax(T* address, std::common_type_t<T> value) {
  return simt::atomically(address, [=](T old) { return old < value ? value : old; });
}
template <class T>
inline T atomicMin(T* address, std::common_type_t<T> value) {
  return simt::atomically(address, [=](T old) { return value < old ? value : old; });
}
template <class T>
inline T atomicOr(T* address, std::common_type_t<T> value) {
  return simt::atomically(address, [=](T old) { return old | value; });
}
template <class T>
inline T atomicAnd(T* address, std::common_type_t<T> value) {
  return simt::atomically(address, [=](T old) { return old & value; });
}
template <class T>
inline T atomicCAS(T* address, std::common_type_t<T> compare, std::common_type_t<T> value) {
  return simt::atomically(address, [=](T old) { return old == compare ? value : old; });
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  return simt::atomically(address, [=](unsigned old) { return old >= last ? 0u : old + 1; });
}

#include "device_functions.h"
#include "runtime_api.h"
