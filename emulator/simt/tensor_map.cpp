// See tensor_map.hpp and toolkit/cuda.h.
#include "simt/tensor_map.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "simt/mbarrier.hpp"
#include "simt/race.hpp"
#include "simt/simt.hpp"

namespace simt {
namespace {
constexpr std::uint16_t kMagic = 0x7a3d;
}

TensorMap decode(const CUtensorMap* map) {
  TensorMap decoded;
  std::memcpy(&decoded, map, sizeof(decoded));
  if (reinterpret_cast<std::uintptr_t>(map) % 64 != 0 || decoded.magic != kMagic)
    fault("TMA: this is no tensor map, or not at a multiple of 64 bytes");
  return decoded;
}

namespace {

void add_floats(void* to, const void* from, std::uint32_t bytes) {
  for (std::uint32_t at = 0; at < bytes; at += 4) {
    float a, b;
    std::memcpy(&a, static_cast<char*>(to) + at, 4);
    std::memcpy(&b, static_cast<const char*>(from) + at, 4);
    a += b;
    std::memcpy(static_cast<char*>(to) + at, &a, 4);
  }
}

// f(element's place in the tensor or null outside of it, its byte offset in the tile before the swizzle)
template <class F>
void each_element(const TensorMap& map, const std::vector<int>& coordinates, F f) {
  std::uint32_t at[5] = {};
  for (std::uint32_t n = 0; n < map.box_elements(); ++n) {
    unsigned char* global = map.data;
    bool inside = true;
    for (int d = 0; d < map.rank; ++d) {
      const std::int64_t index = static_cast<std::int64_t>(coordinates[static_cast<std::size_t>(d)]) + at[d];
      inside = inside && index >= 0 && static_cast<std::uint64_t>(index) < map.extents[d];
      global += index * static_cast<std::int64_t>(map.strides[d]);
    }
    f(inside ? global : nullptr, n * map.element_bytes);
    for (int d = 0; d < map.rank && ++at[d] == map.box[d]; ++d) at[d] = 0;
  }
}

// The swizzle works on address bits, which a tile's place shares with its shared-memory address: 16-byte chunks move
// within their line of 8 x 128 bytes.
std::uint32_t swizzled(std::uint32_t address, std::uint32_t swizzle_bytes) {
  const std::uint32_t mask = swizzle_bytes / 16 - (swizzle_bytes ? 1 : 0);  // 7, 3, 1 or 0
  return address ^ (address >> 7 & mask) << 4;
}

void check(const TensorMap& map, std::uint32_t shared, const std::vector<int>& coordinates) {
  if (shared % 128 != 0) fault("TMA: the shared-memory address is not a multiple of 128");
  if (coordinates.size() != map.rank)
    fault("TMA: " + std::to_string(coordinates.size()) + " coordinates for a map of " + std::to_string(map.rank) +
          " dimensions");
}

void check_bulk(std::uint32_t shared, const void* global, std::uint32_t bytes) {
  if (shared % 16 != 0 || reinterpret_cast<std::uintptr_t>(global) % 16 != 0 || bytes % 16 != 0)
    fault("bulk copy: addresses and size are not multiples of 16");
}

unsigned char* byte_at(std::uint32_t address) { return static_cast<unsigned char*>(shared_pointer(address)); }

}  // namespace

void issue_load(std::uint32_t shared, const CUtensorMap& encoded, std::uint32_t barrier, std::uint32_t blocks,
                const std::vector<int>& coordinates, Where where) {
  const void* const code = __builtin_return_address(0);
  const TensorMap map = decode(&encoded);
  check(map, shared, coordinates);
  for (unsigned rank = 0; rank < running_blocks(); ++rank) {
    if (!(blocks >> rank & 1)) continue;
    // From here on the box may be written at any time.
    const EnginePiece piece = mbarrier_piece(map_shared(barrier, rank), where);
    each_element(map, coordinates, [&](unsigned char*, std::uint32_t offset) {
      const std::uint32_t to = map_shared(swizzled(shared + offset, map.swizzle_bytes), rank);
      // Two bytes have one record (race.cpp): of 8-bit elements each second one writes it, for both.
      if (map.element_bytes > 1 || offset % 2 == 0)
        race::engine_write(to, std::max<std::uint32_t>(map.element_bytes, 2), piece.agent, piece.piece, code);
      std::memset(byte_at(to), kPoison, map.element_bytes);
    });
    defer([=] {
      each_element(map, coordinates, [&](const unsigned char* global, std::uint32_t offset) {
        unsigned char* const to = byte_at(map_shared(swizzled(shared + offset, map.swizzle_bytes), rank));
        if (global)
          std::memcpy(to, global, map.element_bytes);
        else
          std::memset(to, 0, map.element_bytes);
      });
      mbarrier_complete(map_shared(barrier, rank), map.box_elements() * map.element_bytes, where);
    });
  }
}

void issue_store(const CUtensorMap& encoded, std::uint32_t shared, Move move, const std::vector<int>& coordinates) {
  const TensorMap map = decode(&encoded);
  check(map, shared, coordinates);
  if (move == Move::kReduceAdd && !map.is_float) fault("TMA: the emulator reduces fp32 only");
  if (race::enabled) {
    const void* const code = __builtin_return_address(0);
    const BulkPiece piece = bulk_piece();
    each_element(map, coordinates, [&](const unsigned char* global, std::uint32_t offset) {
      if (global)
        race::engine_read(swizzled(shared + offset, map.swizzle_bytes), map.element_bytes, piece.agent, piece.piece,
                          code);
    });
  }
  bulk_add([=] {
    each_element(map, coordinates, [&](unsigned char* global, std::uint32_t offset) {
      if (!global) return;
      const unsigned char* const from = byte_at(swizzled(shared + offset, map.swizzle_bytes));
      if (move == Move::kStore)
        std::memcpy(global, from, map.element_bytes);
      else
        add_floats(global, from, map.element_bytes);
    });
  });
}

void issue_bulk_load(std::uint32_t shared, const void* global, std::uint32_t bytes, std::uint32_t barrier,
                     Where where) {
  check_bulk(shared, global, bytes);
  const std::uint32_t to = map_shared(shared, current->rank), counts_at = map_shared(barrier, current->rank);
  const EnginePiece piece = mbarrier_piece(counts_at, where);
  race::engine_write(to, bytes, piece.agent, piece.piece, __builtin_return_address(0));
  std::memset(byte_at(to), kPoison, bytes);
  defer([=] {
    std::memcpy(byte_at(to), global, bytes);
    mbarrier_complete(counts_at, bytes, where);
  });
}

void issue_async_store(std::uint32_t cluster_address, const void* value, std::uint32_t bytes,
                       std::uint32_t cluster_barrier, Where where) {
  if (blocks_of_cluster() < 2)
    fault("st.async: the launch has no cluster of two blocks or more; on a GPU that is an illegal instruction");
  const EnginePiece piece = mbarrier_piece(cluster_barrier, where);
  race::engine_write(cluster_address, bytes, piece.agent, piece.piece, __builtin_return_address(0));
  std::array<unsigned char, 16> copy{};
  std::memcpy(copy.data(), value, bytes);
  defer([=] {
    std::memcpy(byte_at(cluster_address), copy.data(), bytes);
    mbarrier_complete(cluster_barrier, bytes, where);
  });
}

void issue_bulk_store(void* global, std::uint32_t shared, std::uint32_t bytes, Move move) {
  check_bulk(shared, global, bytes);
  if (race::enabled) {
    const BulkPiece piece = bulk_piece();
    race::engine_read(shared, bytes, piece.agent, piece.piece, __builtin_return_address(0));
  }
  bulk_add([=] {
    if (move == Move::kStore)
      std::memcpy(global, byte_at(shared), bytes);
    else
      add_floats(global, byte_at(shared), bytes);
  });
}

}  // namespace simt

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                const cuuint64_t* extents, const cuuint64_t* strides_bytes, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (rank < 1 || rank > 5 || reinterpret_cast<std::uintptr_t>(data) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  simt::TensorMap encoded{};
  encoded.magic = simt::kMagic;
  encoded.data = static_cast<unsigned char*>(data);
  encoded.rank = static_cast<std::uint8_t>(rank);
  encoded.is_float = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: encoded.element_bytes = 1; break;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: encoded.element_bytes = 2; break;
    default: encoded.element_bytes = 4;
  }
  encoded.swizzle_bytes = static_cast<std::uint8_t>(swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                                                    : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                                                    : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                                                                           : 0);
  for (cuuint32_t d = 0; d < rank; ++d) {
    encoded.extents[d] = extents[d];
    encoded.box[d] = box[d];
    encoded.strides[d] = d == 0 ? encoded.element_bytes : strides_bytes[d - 1];
    if (extents[d] < 1 || extents[d] > std::uint64_t{1} << 32 || box[d] < 1 || box[d] > 256 || element_strides[d] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    if (d > 0 && (encoded.strides[d] % 16 != 0 || encoded.strides[d] >= std::uint64_t{1} << 40))
      return CUDA_ERROR_INVALID_VALUE;
  }
  const cuuint32_t line = box[0] * encoded.element_bytes;
  if (line % 16 != 0 || (encoded.swizzle_bytes > 0 && line > encoded.swizzle_bytes)) return CUDA_ERROR_INVALID_VALUE;
  std::memset(map, 0, sizeof(*map));
  std::memcpy(map, &encoded, sizeof(encoded));
  return CUDA_SUCCESS;
}
