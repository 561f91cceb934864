// The angle by which kv_append turns a pair of a token: from its table, or from rope's frequencies.
#pragma once

#include "cuda/tile/rope.cuh"
#include "ops/kv_params.hpp"

namespace flashkernel::cuda {

/// Cosine and sine of pair `pair`. Its frequency `half_turns` is not used where there is a table. A position outside
/// the table makes NaN: the host reads no positions here.
__device__ inline void append_angle(const KvAppendParams& p, std::int64_t token, int pair, double half_turns,
                                    float* cosine, float* sine) {
  const std::int64_t position = p.position(token);
  if (!p.table) return rope_angle(position, half_turns, cosine, sine);
  *cosine = *sine = NAN;
  if (position < 0 || position >= p.table.rows) return;
  *cosine = load_typed(p.table.cos, p.table.dtype, position * p.table.stride_cos + pair);
  *sine = load_typed(p.table.sin, p.table.dtype, position * p.table.stride_sin + pair);
}

}  // namespace flashkernel::cuda
