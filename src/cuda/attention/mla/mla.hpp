// MLA decoding in plain device code: any GPU, any head dims and strides that the op allows. Rows are in
// cuda/kernels.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/attention_mla_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda {

Verdict mla_decode_supports(const MlaDecodeParams&);
/// `invariant`: keys are not split, so that a row's bits follow from what it sees alone.
std::size_t mla_decode_workspace(const MlaDecodeParams&, bool invariant);
void mla_decode(const MlaDecodeParams&, bool invariant, void* workspace, Stream);

}  // namespace flashkernel::cuda
