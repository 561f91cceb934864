// What a row of the table says about an instance of the Hopper backward kernel, and the tensor maps and the workspace
// that both `supports` and the launch use. kernel.cuh defines the instances, which are compiled in instances/.
#pragma once

#include <algorithm>

#include "cuda/host/device.hpp"
#include "cuda/attention/limits.hpp"
#include "cuda/attention/tensor_maps.hpp"
#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm90a {

/// Queries of a step and keys of a block. Either way a thread has 128 registers of dK and dV and 64 of scores or their
/// gradients.
constexpr int backward_block_m(int dim) { return dim <= 64 ? 128 : 64; }
/// Over 128 two warpgroups share the columns of 64 keys (wide.cuh).
constexpr bool backward_is_wide(int dim) { return dim > 128; }
/// With two head dims, one of them over 128, the code for scores that get more than a scale spills registers.
constexpr bool backward_takes_modifiers(int qk, int v) { return qk == v || !backward_is_wide(qk > v ? qk : v); }
constexpr int backward_block_n(int dim) { return backward_is_wide(dim) ? 64 : 128; }
inline constexpr int kBackwardBlockN = 128;  // of the shapes that may cut items

/// The layout of an array of gradients, which follows the array that it is the gradient of.
inline TensorMapSpec gradient_map(const TensorMapSpec& of, const void* data, std::int64_t stride_token,
                                  std::int64_t stride_head, std::int64_t stride_batch) {
  TensorMapSpec map = of;
  map.data = data;
  map.dims[1].stride = stride_token;
  map.dims[2].stride = stride_head;
  map.dims[3].stride = stride_batch;
  return map;
}

inline TensorMapSpec grad_out_map(const AttentionBackwardParams& p, std::uint32_t rows) {
  return gradient_map(out_map(p.forward, rows), p.grad_out, p.stride_grad_out_token, p.stride_grad_out_head,
                      p.stride_grad_out_batch);
}

/// What belongs to the queries of each of `tiles` tiles: block_m of -LSE in base 2 and block_m of -D.
inline TensorMapSpec rows_map(const float* rows, std::int64_t tiles, int block_m) {
  TensorMapSpec map;
  map.data = rows;
  map.dtype = DType::kFloat32;
  map.rank = 2;
  map.dims[0] = {2 * block_m, 1, static_cast<std::uint32_t>(2 * block_m)};
  map.dims[1] = {std::max<std::int64_t>(1, tiles), 2 * block_m, 1};
  map.swizzle_bytes = 0;
  return map;
}

/// Items are cut at head_dim 128 only. At 96 the code for it spills a register. At 64 it gains half a per cent to two
/// without a mask, but its mere presence costs long causal calls 3 % (in any order, 8192: 490 and 474 TFLOP/s).
constexpr bool backward_may_cut(int dim) { return dim > 96 && !backward_is_wide(dim); }

/// Where the last round of items would keep only part of the device busy, the items of the last two rounds are not
/// dealt out whole. Their tiles of queries stand in a row, which is cut into one range for each block, so that all
/// blocks end together (Stream-K: Osama et al., 2023). Two blocks then share most of these items, and one of them hands
/// its sums of dK and dV to the other. This is done only where all items have the same number of tiles, all tiles of
/// keys are whole, and no block waits for the order of keys.
struct BackwardCut {
  static constexpr std::int64_t kLeast = 4;  // steps that it must save
  std::int64_t items = 0;                    // that are cut, the last ones; 0: none
  std::int64_t ranges = 0, range_tiles = 0;  // tiles of queries of a range: more than an item has

  BackwardCut(const AttentionBackwardParams& p, HeadDims dims, std::int64_t num_sms) {
    const AttentionParams& f = p.forward;
    const int dim = dims.widest();
    if (!backward_may_cut(dim) || p.deterministic || f.window_left >= 0 || f.window_right >= 0 || f.has_lengths() ||
        f.seq_k % kBackwardBlockN != 0)
      return;
    const std::int64_t k_tiles = f.seq_k / kBackwardBlockN, heads = f.batch * f.heads_kv;
    const std::int64_t tiles = (f.seq_q + backward_block_m(dim) - 1) / backward_block_m(dim);
    const std::int64_t all = heads * k_tiles, last = num_sms > 0 ? all % num_sms : 0;
    if (k_tiles <= 8 || all <= num_sms || last == 0) return;
    if ((num_sms - last) * tiles * (f.heads_q / f.heads_kv) < kLeast * num_sms) return;
    // The first tile of keys of each head is not cut: the other blocks of the head may wait for it.
    if (heads * (k_tiles - 1) < last + num_sms) return;
    items = last + num_sms;
    range_tiles = (items * tiles + num_sms - 1) / num_sms;
    ranges = (items * tiles + range_tiles - 1) / range_tiles;
  }
};

/// How many lists of steps there are (sparse.cuh): a mask that broadcasts has one for all heads, or all sequences.
struct SparseLists {
  std::int64_t batches, heads_q, heads_kv;
  explicit SparseLists(const AttentionParams& f)
      : batches(f.mask.blocks.stride_batch == 0 ? 1 : f.batch),
        heads_q(f.mask.blocks.stride_head == 0 ? 1 : f.heads_q),
        heads_kv(f.mask.blocks.stride_head == 0 ? 1 : f.heads_kv) {}
};

/// The workspace: -D as [batch, heads_q, seq_q] in fp32 (for the repair), then per tile of queries block_m of -LSE in
/// base 2 and block_m of -D, the sums of dQ in fp32 tiles of block_m * dims.qk, one counter a tile, the ticket, the
/// flag, and for each range of cut items a counter and a block's sums of dK and dV. With a block mask, its lists of
/// steps (BackwardPlan).
struct BackwardWorkspace {
  std::int64_t tiles = 0;  // a head
  std::int64_t rows = 0, sums = 0, counters = 0, ticket = 0, not_finite = 0, given = 0, parts = 0, steps = 0,
               num_steps = 0, adders = 0, orders = 0, bytes = 0;  // byte offsets

  BackwardWorkspace(const AttentionBackwardParams& p, HeadDims dims) {
    const AttentionParams& f = p.forward;
    const std::int64_t block_m = backward_block_m(dims.widest()), heads = f.batch * f.heads_q;
    tiles = (f.seq_q + block_m - 1) / block_m;
    rows = (heads * f.seq_q * 4 + 255) / 256 * 256;
    sums = rows + heads * tiles * block_m * 8;
    counters = sums + heads * tiles * block_m * dims.qk * 4;
    ticket = counters + heads * tiles * 4;
    not_finite = ticket + 4;
    const std::int64_t ranges = BackwardCut(p, dims, cuda_device_properties(f.device.index).num_sms).ranges;
    given = not_finite + 4;
    parts = (given + ranges * 4 + 255) / 256 * 256;
    bytes = parts + ranges * kBackwardBlockN * (dims.qk + dims.v) * 4;
    if (!f.mask.blocks.data) return;
    const std::int64_t block_n = backward_block_n(dims.widest()), k_tiles = (f.seq_k + block_n - 1) / block_n;
    const SparseLists lists(f);
    const std::int64_t of_queries = lists.batches * lists.heads_q * tiles,
                       of_keys = lists.batches * lists.heads_kv * k_tiles;
    steps = (bytes + 255) / 256 * 256;
    num_steps = steps + lists.batches *
                            (lists.heads_q == 1 ? f.heads_q / std::max<std::int64_t>(1, f.heads_kv) : f.heads_q) *
                            tiles * k_tiles * 8;
    adders = num_steps + of_keys * 4;
    orders = adders + of_queries * 4;
    bytes = orders + of_queries * k_tiles * 2;
  }
};

/// Of a bias, the main kernel reads elements and bias.cuh sums gradients over whole sequences and heads.
template <DType kDtype>
Verdict takes_bias(const AttentionBackwardParams& p, HeadDims dims) {
  const AttentionParams& f = p.forward;
  if (!f.bias.data) return Verdict::ok();
  if (backward_is_wide(dims.widest())) return "it takes no additive bias over head_dim 128";
  if (f.softcap > 0.0f || f.alibi_slopes) return "it takes no additive bias beside a softcap or ALiBi";
  if (f.bias.dtype != kDtype) return "it takes a bias of q's dtype only";
  if (f.bias.stride_k != 1) return "keys of the bias must be contiguous";
  if (f.bias.stride_q < 0 || f.bias.stride_q * f.seq_q + f.seq_k > 0x7fffffff)
    return "a head of the bias has over 2^31 elements";
  if (!p.grad_bias) return Verdict::ok();
  if (f.mask.is_given()) return "it takes no gradient of a bias beside a packed mask";
  const std::int64_t sizes[4] = {f.batch, f.heads_q, f.seq_q, f.seq_k};
  const std::int64_t strides[4] = {f.bias.stride_batch, f.bias.stride_head, f.bias.stride_q, f.bias.stride_k};
  for (int d = 0; d < 4; ++d) {
    if (d >= 2 && p.grad_bias_shape[d] != sizes[d])
      return "it takes the gradient of a bias for all queries and keys only";
    if (p.grad_bias_shape[d] == 1 && sizes[d] > 1 && strides[d] != 0)
      return "the gradient of the bias must have the bias's own shape";
  }
  return Verdict::ok();
}

/// Of a block mask, sparse.cuh makes lists of the steps that are left.
constexpr bool backward_takes_block_mask(int qk, int v) { return qk == v && (qk == 64 || qk == 128); }
inline Verdict takes_block_mask(const AttentionBackwardParams& p, int qk, int v) {
  const AttentionParams& f = p.forward;
  if (!f.mask.blocks.data) return Verdict::ok();
  if (!backward_takes_block_mask(qk, v)) return "it takes a block mask up to head_dim 128 only";
  if (f.softcap > 0.0f || f.bias.data || f.alibi_slopes)
    return "it takes no softcap, bias or ALiBi beside a block mask";
  if (f.heads_q / std::max<std::int64_t>(1, f.heads_kv) > 512 || f.seq_k > (std::int64_t{1} << 22) ||
      f.seq_q > (std::int64_t{1} << 28))
    return "a block mask is over groups of 512 heads, 2^22 keys or 2^28 queries";
  if (f.mask.stride_q < 0 || f.mask.stride_q * f.seq_q > 0x7fffffff) return "a head of the mask has over 2^31 words";
  return Verdict::ok();
}

template <DType kDtype, int kQkDim, int kVDim>
Verdict attention_bwd_supports(const AttentionBackwardParams& p) {
  const AttentionParams& f = p.forward;
  if (f.dtype != kDtype) return "it is built for another dtype";
  if (!HeadDims{kQkDim, kVDim}.hold(f.head_dim, f.head_dim_v)) return kTooSmallHeadDims;
  if (f.is_paged()) return "it takes no paged keys and values";
  if (const Verdict blocks = takes_block_mask(p, kQkDim, kVDim); !blocks) return blocks;
  if (const Verdict bias = takes_bias<kDtype>(p, HeadDims{kQkDim, kVDim}); !bias) return bias;
  if (!f.mask.blocks.data && !backward_takes_modifiers(kQkDim, kVDim) && f.has_score_modifier())
    return "it takes no softcap, bias, ALiBi or packed mask";
  if (f.alibi_slopes && f.alibi == Alibi::kSqrt) return "it takes no ALiBi of square roots";
  if (f.alibi_slopes && f.softcap > 0.0f) return "it takes no ALiBi under a softcap";
  // Lengths are 32-bit in the kernel, with room for windows; so are coordinates and the number of tiles.
  if (f.seq_q > kMostTokens || f.seq_k > kMostTokens) return "seq_q or seq_k is over 2^29";
  if (f.total_q > 0x7fffffff || f.total_k > 0x7fffffff) return "there are over 2^31 rows";
  if (f.batch * f.heads_q * (std::max(f.seq_q, f.seq_k) / 64 + 1) > 0x7fffffff) return "too many tiles for 32 bits";
  const auto fits = [](const TensorMapSpec& like, const void* data, std::int64_t token, std::int64_t head,
                       std::int64_t batch) {
    return !data || fits_tensor_map(gradient_map(like, data, token, head, batch));
  };
  const TensorMapSpec q = q_map(f, 64), k = kv_map(f, false, 8), v = kv_map(f, true, 8);
  if (!fits_tensor_map(q) || !fits_tensor_map(k) || !fits_tensor_map(v) || !fits_tensor_map(out_map(f, 64)) ||
      !fits_tensor_map(grad_out_map(p, 64)) ||
      !fits(q, p.grad_q, p.stride_grad_q_token, p.stride_grad_q_head, p.stride_grad_q_batch) ||
      !fits(k, p.grad_k, p.stride_grad_k_token, p.stride_grad_k_head, p.stride_grad_k_batch) ||
      !fits(v, p.grad_v, p.stride_grad_v_token, p.stride_grad_v_head, p.stride_grad_v_batch))
    return "its copy engine and stores need data and rows at multiples of 16 bytes, and positive strides";
  return Verdict::ok();
}

template <int kQkDim, int kVDim>
std::size_t attention_bwd_workspace(const AttentionBackwardParams& p) {
  return static_cast<std::size_t>(BackwardWorkspace(p, HeadDims{kQkDim, kVDim}).bytes);
}

/// Launches the kernel for calls with a block mask.
template <DType kDtype, int kQkDim, int kVDim>
void attention_bwd_sparse(const AttentionBackwardParams& p, void* workspace, Stream stream);

/// Launches the kernel: an entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void attention_bwd(const AttentionBackwardParams& p, void* workspace, Stream stream);

}  // namespace flashkernel::cuda::sm90a
