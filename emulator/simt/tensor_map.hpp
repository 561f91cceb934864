// What the emulator writes into a CUtensorMap, and the copies that its engine makes.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda.h"
#include "simt/simt.hpp"

namespace simt {

struct TensorMap {
  unsigned char* data;
  std::uint64_t extents[5], strides[5];  // in elements and in bytes, the innermost first
  std::uint32_t box[5];
  std::uint16_t magic;
  std::uint8_t rank, element_bytes, swizzle_bytes, is_float;

  std::uint32_t box_elements() const {
    std::uint32_t count = 1;
    for (int d = 0; d < rank; ++d) count *= box[d];
    return count;
  }
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "fits");

/// The map behind the opaque bytes; a fault where they are no map.
TensorMap decode(const CUtensorMap* map);

enum class Move { kLoad, kStore, kReduceAdd };

/// A box to the same place of every block of the cluster whose bit is set; what lies outside of the tensor is zero.
void issue_load(std::uint32_t shared, const CUtensorMap& map, std::uint32_t barrier, std::uint32_t blocks,
                const std::vector<int>& coordinates, Where where);
/// A box to the tensor, but for what lies outside of it; in the current thread's open bulk group.
void issue_store(const CUtensorMap& map, std::uint32_t shared, Move move, const std::vector<int>& coordinates);

void issue_bulk_load(std::uint32_t shared, const void* global, std::uint32_t bytes, std::uint32_t barrier, Where where);
/// st.async: up to 16 bytes to a block of the cluster, both addresses from map_shared.
void issue_async_store(std::uint32_t cluster_address, const void* value, std::uint32_t bytes,
                       std::uint32_t cluster_barrier, Where where);
void issue_bulk_store(void* global, std::uint32_t shared, std::uint32_t bytes, Move move);

}  // namespace simt
