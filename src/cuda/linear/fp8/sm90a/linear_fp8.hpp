// linear_fp8 by wgmma of 8-bit floats and TMA, on 9.0: the functions that two rows of cuda/kernels.cpp name. The row
// "tiles" is for many rows of x and has large tiles of both operands. The row "few_rows" is for few rows of x: its
// tiles have more rows of the weight than of x, and the blocks of a cluster share k.
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
