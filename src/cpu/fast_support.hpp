// What the fast CPU rows accept and how much workspace they plan; included by kernels.cpp only, compiled for any processor.
#pragma once

#include "core/thread_pool.hpp"
#include "cpu/fast_ops.hpp"
#include "cpu/simd/gemm_plan.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cpu {
namespace {

enum class Isa { kAvx2, kAvx512, kAmx };

constexpr std::uint32_t features_of(Isa isa) {
  return isa == Isa::kAvx2     ? kCpuAvx2
         : isa == Isa::kAvx512 ? kCpuAvx2 | kCpuAvx512
                               : kCpuAvx2 | kCpuAvx512 | kCpuAvx512Bf16 | kCpuAmxBf16;
}
constexpr int priority_of(Isa isa) { return isa == Isa::kAvx2 ? 10 : isa == Isa::kAvx512 ? 20 : 30; }

/// A row for one instruction set.
template <class Params>
constexpr KernelEntry<Params> fast_row(const char* name, Isa isa, void (*launch)(const Params&, void*, Stream),
                                       Verdict (*supports)(const Params&),
                                       std::size_t (*workspace_bytes)(const Params&) = nullptr) {
  return {name, DeviceType::kCpu, 0, 0, features_of(isa), priority_of(isa), supports, workspace_bytes, launch};
}

template <class Params>
Verdict takes_all(const Params&) {
  return Verdict::ok();
}

constexpr GemmBlocks blocks_of(Isa isa, DType dtype) {
  if (isa == Isa::kAvx2) return kAvx2Blocks;
  if (isa == Isa::kAvx512) return kAvx512Blocks;
  return dtype == DType::kFloat32 ? kAmxFp32Blocks : dtype == DType::kFloat16 ? kAmxFp16Blocks : kAmxBf16Blocks;
}

/// One scratch a thread; for few rows x in fp32.
template <Isa kIsa>
std::size_t linear_workspace(const LinearParams& p) {
  if (p.rows <= kGemvRows)
    return static_cast<std::size_t>(p.rows * gemv_pitch(p.in_features) * 4);
  return static_cast<std::size_t>(num_workers() * gemm_worker_bytes(blocks_of(kIsa, p.dtype)));
}

/// One scratch a thread, and grad_out * activation' when there is an activation.
template <Isa kIsa>
std::size_t linear_backward_workspace(const LinearBackwardParams& p) {
  const std::int64_t gz = p.activation == Activation::kNone ? 0 : p.rows * p.out_features * static_cast<std::int64_t>(dtype_bytes(p.dtype));
  return static_cast<std::size_t>(num_workers() * gemm_worker_bytes(blocks_of(kIsa, p.dtype)) + gz);
}

}  // namespace
}  // namespace flashkernel::cpu
