// Norms and their gradients in plain device code: any GPU, any shape and stride that the op allows. Rows are in
// cuda/kernels.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/norm_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda {

inline constexpr const char* kWrites8Bits = "writes no elements of 8 bits";
/// Any rows: each is read again for its results.
Verdict norm_walked_supports(const NormParams&);
Plan plan_norm_walked(const NormParams&, const DeviceFacts&);
/// Whether walked rows are added in an order that follows from their features alone: rows of whole vectors begin at
/// multiples of 16 bytes, as weight and bias do; others are walked element by element wherever they begin.
bool norm_walks_alike(const NormParams&);
/// Whole vectors, in rows that a block holds: each is read once.
Verdict norm_held_supports(const NormParams&);
Plan plan_norm_held(const NormParams&, const DeviceFacts&);
/// The same two for an output of 8 bits.
Verdict norm_quantized_walked_supports(const NormParams&);
Plan plan_norm_quantized_walked(const NormParams&, const DeviceFacts&);
Verdict norm_quantized_held_supports(const NormParams&);
Plan plan_norm_quantized_held(const NormParams&, const DeviceFacts&);
/// All four; the plan is a BlockRows.
void norm_fwd(const NormParams&, const Plan&, void* workspace, Stream);
/// Any rows, element by element.
Verdict norm_bwd_supports(const NormBackwardParams&);
std::size_t norm_bwd_workspace(const NormBackwardParams&);
void norm_bwd(const NormBackwardParams&, void* workspace, Stream);
/// Whole vectors, in rows that a block holds: each is read once. Its workspace: norm_bwd_workspace.
Verdict norm_bwd_held_supports(const NormBackwardParams&);
void norm_bwd_held(const NormBackwardParams&, void* workspace, Stream);
/// Whole vectors, in rows of any length: each is read twice.
Verdict norm_bwd_walked_supports(const NormBackwardParams&);
std::size_t norm_bwd_walked_workspace(const NormBackwardParams&);
void norm_bwd_walked(const NormBackwardParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
