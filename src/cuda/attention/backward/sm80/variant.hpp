// What a row of the table says about an instance of the sm80 backward kernel. kernel.cuh defines the instances,
// which are compiled in instances/.
#pragma once

#include <algorithm>

#include "cuda/attention/limits.hpp"
#include "cuda/host/device.hpp"
#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm80 {

/// Which tiles a kernel has. kWide: for the 163 KB of shared memory that a block has on 8.0, and the more that it has
/// on 9.0. kNarrow: for the 99 KB of 8.6 and 8.9. kModified: for 99 KB, in calls with softcap, bias or ALiBi.
enum class BackwardKind { kWide, kNarrow, kModified };

constexpr int backward_shared_limit(BackwardKind kind) { return (kind == BackwardKind::kWide ? 163 : 99) * 1024; }

/// Queries of a step. The sum of dQ lies in tiles of as many rows.
constexpr int backward_block_m(int dim, BackwardKind kind) {
  if (kind == BackwardKind::kWide) return dim <= 64 ? 128 : dim <= 128 ? 64 : 32;
  return dim <= 64 ? 64 : dim <= 96 ? 32 : 16;
}

/// Which tiles serve a call: the device decides, and whether the call modifies scores.
inline BackwardKind backward_kind(const AttentionParams& f) {
  if (f.has_score_modifier()) return BackwardKind::kModified;
  return cuda_device_properties(f.device.index).max_shared_bytes_per_block >= backward_shared_limit(BackwardKind::kWide)
             ? BackwardKind::kWide
             : BackwardKind::kNarrow;
}

inline constexpr int kBiasBlock = 64;  // queries and keys of a tile of the bias's gradient

/// How blocks share the work on the gradient of the bias. The gradient has own[0] x .. x own[3] tiles, and a block owns
/// one of them. It walks all[0] x .. x all[3] tiles of scores, along the dims that the bias broadcasts, or one of
/// `parts` equal parts of that walk.
struct BiasWalk {
  std::int64_t own[4] = {1, 1, 1, 1}, all[4] = {1, 1, 1, 1};
  std::int64_t elements = 0, parts = 1;

  BiasWalk(const AttentionBackwardParams& p) {
    if (!p.grad_bias) return;
    const AttentionParams& f = p.forward;
    const std::int64_t tiles[4] = {f.batch, f.heads_q, (f.seq_q + kBiasBlock - 1) / kBiasBlock,
                                   (f.seq_k + kBiasBlock - 1) / kBiasBlock};
    elements = 1;
    std::int64_t blocks = 1, steps = 1;
    for (int d = 0; d < 4; ++d) {
      const bool broadcast = p.grad_bias_shape[d] == 1;
      own[d] = broadcast ? 1 : tiles[d];
      all[d] = broadcast ? tiles[d] : 1;
      elements *= p.grad_bias_shape[d];
      blocks *= own[d];
      steps *= all[d];
    }
    // Four blocks for each multiprocessor, on which three or more fit. Their sums take at most 64 MB.
    constexpr std::int64_t kMostBytes = std::int64_t{64} << 20;
    if (blocks == 0 || steps == 0) return;
    const std::int64_t wanted = 4 * cuda_device_properties(f.device.index).num_sms / blocks;
    parts = std::max<std::int64_t>(1, std::min({wanted, steps, kMostBytes / 4 / elements}));
  }
  std::int64_t blocks() const { return own[0] * own[1] * own[2] * own[3] * parts; }
  std::int64_t partial_bytes() const { return parts > 1 ? parts * elements * 4 : 0; }
};

/// The workspace: -D and then -LSE in base 2, [batch, heads_q, seq_q] in fp32 each, then the sum of dQ in fp32 tiles
/// [batch, heads_q, tiles][block_m * dims.qk], the parts of the bias's gradient, one counter a tile, the ticket and the
/// flag.
struct BackwardWorkspace {
  std::int64_t tiles = 0;                                                                               // a head
  std::int64_t lse = 0, sums = 0, bias_parts = 0, counters = 0, ticket = 0, not_finite = 0, bytes = 0;  // byte offsets

  BackwardWorkspace(const AttentionBackwardParams& p, HeadDims dims) {
    const AttentionParams& f = p.forward;
    const std::int64_t block_m = backward_block_m(dims.widest(), backward_kind(f)), heads = f.batch * f.heads_q;
    tiles = (f.seq_q + block_m - 1) / block_m;
    lse = heads * f.seq_q * 4;
    sums = (2 * lse + 255) / 256 * 256;
    bias_parts = sums + heads * tiles * block_m * dims.qk * 4;
    counters = bias_parts + BiasWalk(p).partial_bytes();
    ticket = counters + heads * tiles * 4;
    not_finite = ticket + 4;
    bytes = not_finite + 4;
  }
};

template <DType kDtype, int kQkDim, int kVDim>
Verdict attention_bwd_supports(const AttentionBackwardParams& p) {
  const AttentionParams& f = p.forward;
  if (f.dtype != kDtype) return "it is built for another dtype";
  if (!HeadDims{kQkDim, kVDim}.hold(f.head_dim, f.head_dim_v)) return kTooSmallHeadDims;
  if (f.is_paged()) return "it takes no paged keys and values";
  if (f.seq_q > kMostTokens || f.seq_k > kMostTokens) return "seq_q or seq_k is over 2^29";
  if (f.batch > 65535 || f.heads_q > 65535) return "batch or heads_q is over 65535";
  if (f.batch * f.heads_q * (std::max(f.seq_q, f.seq_k) / 16 + 1) > 0x7fffffff) return "too many blocks for one grid";
  return Verdict::ok();
}

/// The workspace for head dims over 256 (wide.cuh): -D and then -LSE in base 2, [batch, heads_q, seq_q] in fp32 each,
/// and the flag.
struct WideBackwardWorkspace {
  std::int64_t lse = 0, not_finite = 0, bytes = 0;  // byte offsets

  WideBackwardWorkspace(const AttentionBackwardParams& p, HeadDims)
      : lse(p.forward.batch * p.forward.heads_q * p.forward.seq_q * 4), not_finite(2 * lse), bytes(not_finite + 4) {}
};

template <DType kDtype, int kDim>
Verdict attention_bwd_wide_supports(const AttentionBackwardParams& p) {
  if (const Verdict verdict = attention_bwd_supports<kDtype, kDim, kDim>(p); !verdict) return verdict;
  if (p.forward.has_score_modifier()) return "it takes no softcap, bias, packed mask or ALiBi slopes";
  return Verdict::ok();
}

template <int kDim>
std::size_t attention_bwd_wide_workspace(const AttentionBackwardParams& p) {
  return static_cast<std::size_t>(WideBackwardWorkspace(p, HeadDims{kDim, kDim}).bytes);
}

/// Launches the kernels for head dims over 256 (wide.cuh): an entry of the table.
template <DType kDtype, int kDim>
void attention_bwd_wide(const AttentionBackwardParams& p, void* workspace, Stream stream);

template <int kQkDim, int kVDim>
std::size_t attention_bwd_workspace(const AttentionBackwardParams& p) {
  return static_cast<std::size_t>(BackwardWorkspace(p, HeadDims{kQkDim, kVDim}).bytes);
}

/// Launches the kernel: an entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void attention_bwd(const AttentionBackwardParams& p, void* workspace, Stream stream);

}  // namespace flashkernel::cuda::sm80
