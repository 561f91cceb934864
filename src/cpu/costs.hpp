// How long the CPU rows take, by a model: the work of a call (`work_of`) over a rate of the instruction set. And
// the names of the orders in which they add.
#pragma once

#include "cpu/simd/gemm_plan.hpp"
#include "cpu/simd/weight_tiles_plan.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/linear_params.hpp"
#include "ops/quantized_linear_params.hpp"

namespace flashkernel::cpu {

/// Terms or elements in a microsecond, of one core, in round numbers: that one instruction set is faster than another
/// decides, not by how much.
namespace rates {
inline constexpr int kScalar = 500, kAvx2 = 15000, kAvx512 = 30000, kAmx = 100000, kAmxFp16 = 200000;
/// AMX where the weight is rearranged for a few rows: slower than a stream through vector registers.
inline constexpr int kAmxFewRows = 10000;
/// AMX over a weight as it lies.
inline constexpr int kAmxStream = 200000;
}  // namespace rates

/// One for each instruction set: vectors are as long as its registers, and so are the sums side by side.
namespace arithmetic {
inline constexpr const char* kScalar = "scalar";
inline constexpr const char* kAvx2 = "avx2";
inline constexpr const char* kAvx512 = "avx512";
inline constexpr const char* kAvx512Vnni = "avx512_vnni";
inline constexpr const char* kAmx = "amx";
inline constexpr const char* kAmxFp16 = "amx_fp16";
/// Operands are packed into panels, whatever the number of rows: linear and attention, which without that take fewer
/// rows by another kernel.
inline constexpr const char* kAvx2Packed = "avx2_packed";
inline constexpr const char* kAvx512Packed = "avx512_packed";
inline constexpr const char* kAmxPacked = "amx_packed";
inline constexpr const char* kAmxFp16Packed = "amx_fp16_packed";
/// That of the ops which a call is composed of.
inline constexpr const char* kComposed = "composed";
}  // namespace arithmetic

template <class Params, int kRate>
float cost_us(const Params& params, const DeviceFacts&) {
  return static_cast<float>(work_of(params) * (1.0 / kRate));
}

/// A row that is there for the invariant mode, or to be forced: it takes what another one takes in less time.
inline constexpr double kOutsideItsRange = 2;

/// Rows of linear from which on the tile unit pays: its work outweighs rearranging the weight. Below, the product is a
/// stream through vector registers.
constexpr std::int64_t amx_pays_from(DType dtype, bool has_fp16) {
  return dtype == DType::kBFloat16 || (has_fp16 && dtype == DType::kFloat16) ? kAmxMinRows : kAmxSplitMinRows;
}

/// The cost of a row that packs its operands however few they are.
template <class Params, int kRate>
float packed_cost_us(const Params& params, const DeviceFacts& facts) {
  return static_cast<float>(kOutsideItsRange * cost_us<Params, kRate>(params, facts));
}

/// linear by AMX; `kHasFp16`: on processors whose tile unit multiplies fp16.
template <bool kHasFp16>
float amx_linear_cost_us(const LinearParams& p, const DeviceFacts& facts) {
  constexpr int kRate = kHasFp16 ? rates::kAmxFp16 : rates::kAmx;
  // A weight contiguous along out is rearranged pair by pair: eight rows stream it through vectors in half the time.
  const bool streams = p.stride_weight_in != 1 && p.rows <= kGemvRows;
  if (streams || p.rows < amx_pays_from(p.dtype, kHasFp16)) return cost_us<LinearParams, rates::kAmxFewRows>(p, facts);
  return cost_us<LinearParams, kRate>(p, facts);
}

/// linear in bf16 by AMX, the weight read as it lies once for so many rows.
inline float amx_stream_cost_us(const LinearParams& p, const DeviceFacts& facts) {
  if (p.rows > kStreamRows) return packed_cost_us<LinearParams, rates::kAmx>(p, facts);
  return cost_us<LinearParams, rates::kAmxStream>(p, facts);
}

/// quantized_linear over tiles by AMX: the weight becomes bf16 for so many rows at a time.
inline float amx_tiles_cost_us(const QuantizedLinearParams& p, const DeviceFacts& facts) {
  if (p.rows < kTiledMinRows) return cost_us<QuantizedLinearParams, rates::kAmxFewRows>(p, facts);
  return cost_us<QuantizedLinearParams, rates::kAmx>(p, facts);
}

}  // namespace flashkernel::cpu
