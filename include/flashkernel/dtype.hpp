// Element types of tensors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashkernel {

/// kFloat8E4M3 (OCP E4M3FN: no infinity, largest 448, NaN 0x7f) and kInt8 are what the pages of an 8-bit KV-cache hold;
/// ops that say nothing of them refuse them. kInt4x2 and kFloat4E2M1x2 are bytes of two 4-bit elements, as the pages of
/// a 4-bit KV-cache hold them (kv_scales.hpp): the element of even index is in the low bits, and extents count bytes.
enum class DType : std::uint8_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt32,
  kInt64,
  kUInt8,
  kFloat8E4M3,
  kInt8,
  kInt4x2,
  kFloat4E2M1x2
};

/// Bytes of one element.
constexpr std::size_t dtype_bytes(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kInt64: return 8;
    case DType::kUInt8:
    case DType::kFloat8E4M3:
    case DType::kInt8:
    case DType::kInt4x2:
    case DType::kFloat4E2M1x2: return 1;
  }
  return 0;
}

/// "float32", "float16", "bfloat16", "int32", "int64", "uint8", "float8_e4m3fn", "int8", "int4",
/// "float4_e2m1fn_x2".
constexpr const char* dtype_name(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    case DType::kUInt8: return "uint8";
    case DType::kFloat8E4M3: return "float8_e4m3fn";
    case DType::kInt8: return "int8";
    case DType::kInt4x2: return "int4";
    case DType::kFloat4E2M1x2: return "float4_e2m1fn_x2";
  }
  return "?";
}

/// float32, float16 or bfloat16.
constexpr bool is_floating(DType dtype) noexcept {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

/// float8_e4m3fn or int8: elements of an 8-bit KV-cache, numbers only together with a scale (kv_scales.hpp).
constexpr bool is_quantized(DType dtype) noexcept { return dtype == DType::kFloat8E4M3 || dtype == DType::kInt8; }

/// int4 or float4_e2m1fn_x2: bytes of two elements each, of a 4-bit KV-cache.
constexpr bool is_packed(DType dtype) noexcept { return dtype == DType::kInt4x2 || dtype == DType::kFloat4E2M1x2; }

/// int32 or int64: the types of indices, lengths, positions and page tables.
constexpr bool is_index(DType dtype) noexcept { return dtype == DType::kInt32 || dtype == DType::kInt64; }

}  // namespace flashkernel
