// Rotary position embedding (Su et al., 2021): rotates pairs of a head's first `rotary_dim` elements by position *
// frequency.
#pragma once

#include <cstdint>

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

struct RopeOptions {
  double theta = 10000.0;        ///< frequency of pair p is theta^(-2p / rotary_dim)
  std::int64_t rotary_dim = -1;  ///< even, at most head_dim; -1: head_dim. The rest passes through.
  bool interleaved = false;      ///< pairs (2p, 2p+1) (GPT-J) instead of (p, p + rotary_dim/2) (NeoX)
  bool inverse = false;          ///< rotate back: also the gradient
  TensorView inv_freq;           ///< fp32 [rotary_dim / 2], replaces theta's frequencies (scaled RoPE); may be absent
};

/// In-kernel sin and cos. q [batch, heads_q, seq, head_dim], k [batch, heads_kv, seq, head_dim] or absent, positions
/// int32 or int64 [seq], [1, seq] or [batch, seq] (absent: 0, 1, 2, ...). q_out and k_out have the shapes of q and k
/// and may be the same tensors. Angles are exact to 1e-6 at any position that
/// int32 holds; another one is InvalidArgument where positions are on the host and NaN where they are on a GPU.
FK_API void rope(const TensorView& q, const TensorView& k, const TensorView& positions, const TensorView& q_out,
                 const TensorView& k_out, const RopeOptions& options = {}, const ExecutionContext& context = {});

/// The same from tables. cos, sin: fp32, fp16 or bf16, whatever q is: [max_positions, rotary_dim / 2] looked up by
/// position, or [batch or 1, seq, rotary_dim / 2] used as they are (then `positions` must be absent). `theta`,
/// `inv_freq` are not used and rotary_dim comes from the table. A position outside the table is InvalidArgument where
/// positions are on the host.
FK_API void rope_table(const TensorView& q, const TensorView& k, const TensorView& cos, const TensorView& sin,
                       const TensorView& positions, const TensorView& q_out, const TensorView& k_out,
                       const RopeOptions& options = {}, const ExecutionContext& context = {});

}  // namespace flashkernel
