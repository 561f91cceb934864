// What the emulator writes into a CUtensorMap, and the boxes that its copy engine moves by it.
#pragma once

#include <cstdint>

#include "cuda.h"

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

/// Where a line of the box lies: byte `offset` of a tile at a shared-memory address, under the swizzle.
inline std::uint32_t swizzled(std::uint32_t address, std::uint32_t swizzle_bytes) {
  const std::uint32_t mask = swizzle_bytes / 16 - (swizzle_bytes ? 1 : 0);  // 7, 3, 1 or 0
  return address ^ ((address >> 7 & mask) << 4);
}

enum class Move { kLoad, kStore, kReduceAdd };

/// Moves the box at `coordinates`: what lies outside of the tensor is loaded as zero and never stored.
void move_box(const TensorMap& map, std::uint32_t shared, const int* coordinates, Move);

}  // namespace simt
