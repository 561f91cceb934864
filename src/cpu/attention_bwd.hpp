// The fast attention backward kernels by name: defined under avx2/ and avx512/, launched through the table in
// kernels.cpp only.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"

namespace flashkernel::cpu {

namespace avx2 {
void attention_bwd(const AttentionBackwardParams& params, void* workspace, Stream stream);
std::size_t attention_bwd_workspace(const AttentionBackwardParams& params);
}  // namespace avx2
namespace avx512 {
void attention_bwd(const AttentionBackwardParams& params, void* workspace, Stream stream);
std::size_t attention_bwd_workspace(const AttentionBackwardParams& params);
}  // namespace avx512

}  // namespace flashkernel::cpu
