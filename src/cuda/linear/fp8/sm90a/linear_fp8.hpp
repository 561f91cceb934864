// linear_fp8 on wgmma of 8-bit floats and TMA (9.0): what the rows of cuda/kernels.cpp name. One row has large tiles of
// both, for many rows of x; the other one few rows of x, beside which the weight is the larger side of a tile and k is
// shared by the blocks of a cluster.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/linear_fp8_params.hpp"

namespace flashkernel::cuda::sm90a {

Verdict linear_fp8_tiles_supports(const LinearFp8Params&);
float linear_fp8_tiles_cost_us(const LinearFp8Params&, const DeviceFacts&);
Plan plan_linear_fp8_tiles(const LinearFp8Params&, const DeviceFacts&);
void linear_fp8_tiles(const LinearFp8Params&, const Plan&, void* workspace, Stream);
/// Whether calls of its kind have the order of its sums in the invariant mode.
bool linear_fp8_tiles_is_invariant(const LinearFp8Params&);

Verdict linear_fp8_few_rows_supports(const LinearFp8Params&);
float linear_fp8_few_rows_cost_us(const LinearFp8Params&, const DeviceFacts&);
Plan plan_linear_fp8_few_rows(const LinearFp8Params&, const DeviceFacts&);
void linear_fp8_few_rows(const LinearFp8Params&, const Plan&, void* workspace, Stream);

}  // namespace flashkernel::cuda::sm90a
