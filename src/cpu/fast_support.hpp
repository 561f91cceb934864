// What the fast CPU rows accept and how much workspace they plan; included by kernels.cpp only, compiled for any
// processor.
#pragma once

#include "core/cpu_features.hpp"
#include "core/thread_pool.hpp"
#include "cpu/costs.hpp"
#include "cpu/fast_ops.hpp"
#include "cpu/simd/gemm_plan.hpp"
#include "cpu/simd/row_plan.hpp"
#include "cpu/simd/weight_tiles_plan.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cpu {
namespace {

enum class Isa { kAvx2, kAvx512, kAvx512Vnni, kAmx, kAmxFp16 };

constexpr std::uint32_t features_of(Isa isa) {
  return isa == Isa::kAvx2         ? kCpuAvx2
         : isa == Isa::kAvx512     ? kCpuAvx2 | kCpuAvx512
         : isa == Isa::kAvx512Vnni ? kCpuAvx2 | kCpuAvx512 | kCpuAvx512Vnni
         : isa == Isa::kAmx        ? kCpuAvx2 | kCpuAvx512 | kCpuAvx512Bf16 | kCpuAmxBf16
                                   : kCpuAvx2 | kCpuAvx512 | kCpuAvx512Bf16 | kCpuAmxBf16 | kCpuAmxFp16;
}
constexpr const char* arithmetic_of(Isa isa) {
  return isa == Isa::kAvx2         ? arithmetic::kAvx2
         : isa == Isa::kAvx512     ? arithmetic::kAvx512
         : isa == Isa::kAvx512Vnni ? arithmetic::kAvx512Vnni
         : isa == Isa::kAmx        ? arithmetic::kAmx
                                   : arithmetic::kAmxFp16;
}
constexpr const char* packed_arithmetic_of(Isa isa) {
  return isa == Isa::kAvx2     ? arithmetic::kAvx2Packed
         : isa == Isa::kAvx512 ? arithmetic::kAvx512Packed
         : isa == Isa::kAmx    ? arithmetic::kAmxPacked
                               : arithmetic::kAmxFp16Packed;
}
constexpr int rate_of(Isa isa) {
  return isa == Isa::kAvx2                                ? rates::kAvx2
         : isa == Isa::kAvx512 || isa == Isa::kAvx512Vnni ? rates::kAvx512
         : isa == Isa::kAmx                               ? rates::kAmx
                                                          : rates::kAmxFp16;
}

/// The calls that the fast rows of an op are for in the invariant mode.
template <class Params>
constexpr typename RowFunctions<Params>::InvariantFor kInvariantFor = every_call<Params>;

/// A row for one instruction set. The order of its sums depends on what is summed alone, so it is one for the
/// invariant mode; `one_of_two_orders` takes that back.
template <class Params, Isa kIsa, typename RowFunctions<Params>::PlainLaunch kLaunch>
constexpr KernelEntry<Params> fast_row(const char* name, typename RowFunctions<Params>::Supports supports,
                                       typename RowFunctions<Params>::MakePlan plan,
                                       typename RowFunctions<Params>::Cost cost = cost_us<Params, rate_of(kIsa)>) {
  return {name,
          DeviceType::kCpu,
          0,
          0,
          features_of(kIsa),
          arithmetic_of(kIsa),
          supports,
          cost,
          plan,
          launch_plain<Params, kLaunch>,
          nullptr,
          kInvariantFor<Params>};
}

/// A row that has two kernels, by the number of rows of its operands.
template <class Params>
constexpr KernelEntry<Params> one_of_two_orders(KernelEntry<Params> entry) {
  entry.invariant_for = nullptr;
  return entry;
}

/// The second of those two kernels alone, for operands of any number of rows.
template <class Params, Isa kIsa, typename RowFunctions<Params>::PlainLaunch kLaunch>
constexpr KernelEntry<Params> packed_row(const char* name, typename RowFunctions<Params>::Supports supports,
                                         typename RowFunctions<Params>::MakePlan plan) {
  KernelEntry<Params> entry =
      fast_row<Params, kIsa, kLaunch>(name, supports, plan, packed_cost_us<Params, rate_of(kIsa)>);
  entry.arithmetic = packed_arithmetic_of(kIsa);
  return entry;
}

template <class Params>
Verdict takes_all(const Params&) {
  return Verdict::ok();
}

/// The calls that a row whose `supports` asks for dtypes alone is for in the invariant mode.
template <class Params, Verdict (*kSupports)(const Params&)>
bool takes(const Params& p) {
  return static_cast<bool>(kSupports(p));
}

constexpr GemmBlocks blocks_of(Isa isa, DType dtype) {
  if (isa == Isa::kAvx2) return kAvx2Blocks;
  if (isa == Isa::kAvx512) return kAvx512Blocks;
  if (isa == Isa::kAmxFp16 || dtype == DType::kBFloat16) return kAmxBf16Blocks;
  return dtype == DType::kFloat16 ? kAmxSplitFp16Blocks : kAmxSplitFp32Blocks;
}

Verdict attention_supports(const AttentionParams& p) {
  return p.quantization.packed ? Verdict("takes no 4-bit pages") : Verdict::ok();
}
#if defined(FK_CPU_AMX)
Verdict amx_fp16_linear_supports(const LinearParams& p) {
  return p.dtype == DType::kFloat16 ? Verdict::ok() : Verdict("takes fp16");
}
Verdict amx_stream_supports(const LinearParams& p) {
  if (p.dtype != DType::kBFloat16) return "takes bf16";
  return p.stride_weight_in == 1 ? Verdict::ok() : Verdict("needs a weight whose in_features are contiguous");
}
std::size_t amx_stream_workspace(const LinearParams& p) {
  return static_cast<std::size_t>(stream_x_bytes(p.rows, p.in_features));
}
Verdict amx_attention_supports(const AttentionParams& p) {
  return p.quantization ? Verdict("takes no 8-bit or 4-bit pages") : Verdict::ok();
}
Verdict amx_fp16_attention_supports(const AttentionParams& p) {
  return p.dtype == DType::kFloat16 ? Verdict::ok() : Verdict("takes fp16");
}
Verdict amx_fp16_linear_backward_supports(const LinearBackwardParams& p) {
  return p.dtype == DType::kFloat16 ? Verdict::ok() : Verdict("takes fp16");
}
#endif

/// One scratch a thread.
template <Isa kIsa>
std::size_t linear_packed_workspace(const LinearParams& p) {
  return static_cast<std::size_t>(num_workers() * gemm_worker_bytes(blocks_of(kIsa, p.dtype)));
}
/// For few rows x in fp32.
template <Isa kIsa>
std::size_t linear_workspace(const LinearParams& p) {
  if (p.rows <= kGemvRows && (kIsa == Isa::kAvx2 || kIsa == Isa::kAvx512))
    return static_cast<std::size_t>(p.rows * gemv_pitch(p.in_features) * 4);
  return linear_packed_workspace<kIsa>(p);
}

/// As of `linear`: the blocks become numbers on their way into registers, or into the packed operand.
template <Isa kIsa>
std::size_t quantized_linear_packed_workspace(const QuantizedLinearParams& p) {
  return static_cast<std::size_t>(num_workers() * gemm_worker_bytes(blocks_of(kIsa, p.dtype)));
}
template <Isa kIsa>
std::size_t quantized_linear_workspace(const QuantizedLinearParams& p) {
  if (p.rows <= kGemvRows) return static_cast<std::size_t>(p.rows * gemv_pitch(p.in_features) * 4);
  return quantized_linear_packed_workspace<kIsa>(p);
}

/// x in fp32 beside what packs the weight.
template <Isa kIsa>
std::size_t linear_fp8_workspace(const LinearFp8Params& p) {
  return static_cast<std::size_t>(p.rows * gemv_pitch(p.in_features) * 4 +
                                  num_workers() * gemm_worker_bytes(blocks_of(kIsa, DType::kFloat32)));
}

Verdict rows_of_blocks(const QuantizedLinearParams& p) {
  return p.tiles ? Verdict("takes no tiles of 16 rows") : Verdict::ok();
}
Verdict tiles_of_rows(const QuantizedLinearParams& p) {
  return p.tiles ? Verdict::ok() : Verdict("takes tiles of 16 rows");
}
/// x as integers.
std::size_t vnni_tiles_workspace(const QuantizedLinearParams& p) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(p.dtype));
  return static_cast<std::size_t>(x_planes_bytes(p.rows, p.in_features / quantized::kBlock, x_planes(bytes)));
}
/// Some rows of x in bf16 parts, and for each thread some of the weight in bf16.
std::size_t amx_tiles_workspace(const QuantizedLinearParams& p) {
  const std::int64_t blocks = p.in_features / quantized::kBlock;
  const std::int64_t parts = x_parts(static_cast<std::int64_t>(dtype_bytes(p.dtype)), p.dtype == DType::kBFloat16);
  return static_cast<std::size_t>(gemm_round_up(tiled_x_bytes(p.rows, blocks, parts), 64) +
                                  num_workers() * gemm_round_up(tiled_worker_bytes(blocks), 64));
}

/// One scratch a thread, and grad_out * activation' when there is an activation.
template <Isa kIsa>
std::size_t linear_backward_workspace(const LinearBackwardParams& p) {
  const std::int64_t gz =
      p.activation == Activation::kNone ? 0 : p.rows * p.out_features * static_cast<std::int64_t>(dtype_bytes(p.dtype));
  return static_cast<std::size_t>(num_workers() * gemm_worker_bytes(blocks_of(kIsa, p.dtype)) + gz);
}

Verdict softmax_supports(const SoftmaxParams& p) {
  return p.stride_x_column == 1 && p.stride_out_column == 1 ? Verdict::ok() : Verdict("needs a contiguous softmax dim");
}
Verdict softmax_backward_supports(const SoftmaxBackwardParams& p) {
  return p.stride_grad_out_column == 1 && p.stride_out_column == 1 && p.stride_grad_x_column == 1
             ? Verdict::ok()
             : Verdict("needs a contiguous softmax dim");
}

Verdict reduce_supports(const ReduceParams& p) {
  if (p.num_reduced != 1 || p.reduced_count < 1) return "the reduced dims must merge into one dim that is not empty";
  if (p.stride_x_reduced[0] == 1) return Verdict::ok();
  if (p.op == ReduceOp::kArgmax) return "argmax needs a reduced dim that is contiguous";
  const bool columns = p.num_kept >= 1 && p.stride_x_kept[p.num_kept - 1] == 1 && p.stride_out[p.num_kept - 1] == 1;
  return columns ? Verdict::ok() : Verdict("needs a contiguous reduced dim, or contiguous innermost kept dims");
}
/// One fp32 for each piece of each output, when there are several pieces.
std::size_t reduce_workspace(const ReduceParams& p) {
  const std::int64_t piece = p.stride_x_reduced[0] == 1 ? kReducePiece : kReduceRows;
  const std::int64_t pieces = (p.reduced_count + piece - 1) / piece;
  return p.op == ReduceOp::kArgmax || pieces <= 1 ? 0 : static_cast<std::size_t>(p.kept_count * pieces * 4);
}

/// Sums of each chunk of rows for each parameter gradient.
std::size_t norm_backward_workspace(const NormBackwardParams& p) {
  const int sums = (p.grad_weight != nullptr) + (p.grad_bias != nullptr);
  return static_cast<std::size_t>(sums * norm_chunks(p.rows) * norm_sum_pitch(p.features) * 4);
}

constexpr const char* kNeedsContiguous = "needs a contiguous innermost dim in every tensor";
Verdict add_supports(const AddParams& p) {
  const int last = p.ndim - 1;
  return p.stride_a[last] == 1 && p.stride_b[last] == 1 && p.stride_out[last] == 1 ? Verdict::ok()
                                                                                   : Verdict(kNeedsContiguous);
}
Verdict swiglu_supports(const SwigluParams& p) {
  const int last = p.ndim - 1;
  return p.stride_gate[last] == 1 && p.stride_up[last] == 1 && p.stride_out[last] == 1 ? Verdict::ok()
                                                                                       : Verdict(kNeedsContiguous);
}
Verdict swiglu_backward_supports(const SwigluBackwardParams& p) {
  const int last = p.ndim - 1;
  return p.stride_grad_out[last] == 1 && p.stride_gate[last] == 1 && p.stride_up[last] == 1 &&
                 (!p.grad_gate || p.stride_grad_gate[last] == 1) && (!p.grad_up || p.stride_grad_up[last] == 1)
             ? Verdict::ok()
             : Verdict(kNeedsContiguous);
}

constexpr std::int64_t kMaxRotaryDim = 1024;  // the kernels keep a token's cosines on the stack
Verdict rope_supports(const RopeParams& p) {
  return p.spec.rotary_dim <= kMaxRotaryDim ? Verdict::ok() : Verdict("takes rotary_dim up to 1024");
}
Verdict kv_append_supports(const KvAppendParams& p) {
  if (p.pages.quantization) return "it takes no 8-bit or 4-bit pages";
  if (p.has_norm() && p.pages.head_dim > kMaxRotaryDim) return "norms heads of up to 1024 elements";
  return !p.has_rope || p.rope.rotary_dim <= kMaxRotaryDim ? Verdict::ok() : Verdict("takes rotary_dim up to 1024");
}

template <>
constexpr RowFunctions<RopeParams>::InvariantFor kInvariantFor<RopeParams> = takes<RopeParams, rope_supports>;
template <>
constexpr RowFunctions<KvAppendParams>::InvariantFor kInvariantFor<KvAppendParams> =
    takes<KvAppendParams, kv_append_supports>;

}  // namespace
}  // namespace flashkernel::cpu

/// The AVX-512 row, where the build has it, and the AVX2 row of an op whose workspace is the same for both.
#if defined(FK_CPU_AVX512)
#define FK_AVX512_ROW(Params, id, function, supports, plan) \
  cpu::fast_row<Params, cpu::Isa::kAvx512, cpu::avx512::function>(id "/cpu/avx512", cpu::supports, plan),
#else
#define FK_AVX512_ROW(Params, id, function, supports, plan)
#endif
#define FK_FAST_ROWS(Params, id, function, supports, plan) \
  FK_AVX512_ROW(Params, id, function, supports, plan)      \
  cpu::fast_row<Params, cpu::Isa::kAvx2, cpu::avx2::function>(id "/cpu/avx2", cpu::supports, plan),
