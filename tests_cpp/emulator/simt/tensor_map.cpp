// See tensor_map.hpp and toolkit/cuda.h.
#include "simt/tensor_map.hpp"

#include <cstring>

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

void move_box(const TensorMap& map, std::uint32_t shared, const int* coordinates, Move move) {
  if (shared % 128 != 0) fault("TMA: the shared-memory address is not a multiple of 128");
  std::uint32_t at[5] = {};
  for (std::uint32_t n = 0; n < map.box_elements(); ++n) {
    unsigned char* global = map.data;
    bool inside = true;
    for (int d = 0; d < map.rank; ++d) {
      const std::int64_t index = static_cast<std::int64_t>(coordinates[d]) + at[d];
      inside = inside && index >= 0 && static_cast<std::uint64_t>(index) < map.extents[d];
      global += index * static_cast<std::int64_t>(map.strides[d]);
    }
    auto* const local =
        static_cast<unsigned char*>(shared_pointer(swizzled(shared + n * map.element_bytes, map.swizzle_bytes)));
    if (move == Move::kLoad) {
      if (inside)
        std::memcpy(local, global, map.element_bytes);
      else
        std::memset(local, 0, map.element_bytes);
    } else if (inside && move == Move::kStore) {
      std::memcpy(global, local, map.element_bytes);
    } else if (inside) {
      if (!map.is_float || map.element_bytes != 4) fault("TMA: the emulator reduces fp32 only");
      float a, b;
      std::memcpy(&a, global, 4);
      std::memcpy(&b, local, 4);
      a += b;
      std::memcpy(global, &a, 4);
    }
    for (int d = 0; d < map.rank && ++at[d] == map.box[d]; ++d) at[d] = 0;
  }
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
