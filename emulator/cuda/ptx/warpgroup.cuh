// Emulates src/cuda/ptx/warpgroup.cuh. Register counts do nothing here; fences are seen by the check for races alone.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/ptx/grid.cuh"
#include "simt/race.hpp"
#include "simt/tensor_map.hpp"
#include "simt/warp.hpp"

namespace flashkernel::cuda::ptx {

using simt::Where;

template <int kRegisters>
inline void increase_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "setmaxnreg");
}
template <int kRegisters>
inline void decrease_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "setmaxnreg");
}

inline void barrier_sync(std::uint32_t id, std::uint32_t threads, Where where = Where::here()) {
  simt::named_barrier(id, threads, true, where);
}
inline void barrier_arrive(std::uint32_t id, std::uint32_t threads, Where where = Where::here()) {
  simt::named_barrier(id, threads, false, where);
}

inline void fence_proxy_async_shared() { simt::race::proxy_fence(); }
inline void fence_proxy_async_global() {}

inline bool elect_one(Where where = Where::here()) {
  bool mine = false;
  simt::collective("elect.sync", 0xffffffffu, where, &mine, [](void* const* data, std::uint32_t lanes) {
    *static_cast<bool*>(data[__builtin_ctz(lanes)]) = true;
  });
  return mine;
}

namespace emulated {

struct StmatrixLane {
  std::uint32_t address, registers[4];
};

template <bool kTransposed>
inline void stmatrix(void* const* data, std::uint32_t lanes) {
  if (lanes != 0xffffffffu) simt::fault("stmatrix: some lanes of the warp are missing");
  for (int matrix = 0; matrix < 4; ++matrix) {
    std::uint16_t elements[8][8];
    for (int lane = 0; lane < 32; ++lane)
      for (int e = 0; e < 2; ++e) {
        const int row = lane / 4, column = 2 * (lane % 4) + e;
        (kTransposed ? elements[column][row] : elements[row][column]) =
            static_cast<std::uint16_t>(static_cast<const StmatrixLane*>(data[lane])->registers[matrix] >> 16 * e);
      }
    for (int row = 0; row < 8; ++row) {
      const std::uint32_t address = static_cast<const StmatrixLane*>(data[8 * matrix + row])->address;
      if (address % 16 != 0) simt::fault("stmatrix: the address of a row is not a multiple of 16");
      void* const to = simt::shared_pointer(address);
      simt::race::access(simt::lane(8 * matrix + row), to, 16, true);
      std::memcpy(to, elements[row], 16);
    }
  }
}

}  // namespace emulated

SIMT_INLINE void stmatrix_x4(std::uint32_t shared_address, std::uint32_t r0, std::uint32_t r1, std::uint32_t r2,
                             std::uint32_t r3, Where where = Where::here()) {
  emulated::StmatrixLane mine{shared_address, {r0, r1, r2, r3}};
  simt::collective("stmatrix.x4", 0xffffffffu, where, &mine, emulated::stmatrix<false>);
}
SIMT_INLINE void stmatrix_x4_trans(std::uint32_t shared_address, std::uint32_t r0, std::uint32_t r1, std::uint32_t r2,
                                   std::uint32_t r3, Where where = Where::here()) {
  emulated::StmatrixLane mine{shared_address, {r0, r1, r2, r3}};
  simt::collective("stmatrix.x4.trans", 0xffffffffu, where, &mine, emulated::stmatrix<true>);
}

inline std::uint32_t cluster_rank() { return simt::cluster_rank(); }
inline std::uint32_t map_shared(std::uint32_t shared_address, std::uint32_t rank) {
  return simt::map_in_cluster(shared_address, rank);
}
inline float4 load_cluster_4(std::uint32_t cluster_address) {
  return *static_cast<const float4*>(simt::shared_pointer(cluster_address));
}
inline void store_async_4(std::uint32_t cluster_address, const float4& v, std::uint32_t cluster_barrier,
                          Where where = Where::here()) {
  simt::issue_async_store(cluster_address, &v, sizeof(v), cluster_barrier, where);
}
inline void store_async(std::uint32_t cluster_address, float v, std::uint32_t cluster_barrier,
                        Where where = Where::here()) {
  simt::issue_async_store(cluster_address, &v, sizeof(v), cluster_barrier, where);
}
inline void store_async_2(std::uint32_t cluster_address, const float2& v, std::uint32_t cluster_barrier,
                          Where where = Where::here()) {
  simt::issue_async_store(cluster_address, &v, sizeof(v), cluster_barrier, where);
}
inline void cluster_arrive(Where where = Where::here()) { simt::cluster_arrive(where); }
inline void cluster_arrive_relaxed(Where where = Where::here()) { simt::cluster_arrive(where); }
inline void cluster_wait(Where where = Where::here()) { simt::cluster_wait(where); }

}  // namespace flashkernel::cuda::ptx
