// See attention_check.hpp.
#include "ops/attention_check.hpp"

#include <algorithm>
#include <cmath>

#include "ops/kv_scales.hpp"

namespace flashkernel {
namespace {

void match(const Checker& check, const char* name, const TensorView& view, int d, const char* other_name,
           const TensorView& other, int other_d, const char* what) {
  if (view.shape[d] != other.shape[other_d])
    check.fail(shape_text(name, view, d) + " but " + shape_text(other_name, other, other_d) + "; " + what +
               " must match");
}

// dtype, dims and layout that q, k, v and out share; out has another dtype where they have 8 bits.
void check_operand(const Checker& check, const char* name, const TensorView& view, const TensorView& q, int least,
                   int most, AttentionPass pass = AttentionPass::kForward) {
  if (pass == AttentionPass::kForwardFloat8) {
    check.tensor(name, view);
    if (view.dtype != DType::kFloat8E4M3)
      check.fail(std::string(name) + " is " + dtype_name(view.dtype) + "; needs float8_e4m3fn");
  } else {
    check.floating(name, view);
  }
  if (view.dtype != q.dtype)
    check.fail(std::string(name) + " is " + dtype_name(view.dtype) + " but q is " + dtype_name(q.dtype) +
               "; dtypes must match");
  check.ndim(name, view, least, most);
  check.last_dim_contiguous(name, view);
}

// Pages, which may hold elements of 8 and 4 bits too.
void check_pages_operand(const Checker& check, const char* name, const TensorView& view, const TensorView& q) {
  if (!has_scales(view.dtype)) return check_operand(check, name, view, q, 4, 4);
  check.tensor(name, view);
  check.ndim(name, view, 4, 4);
  check.last_dim_contiguous(name, view);
}

void check_head_dim(const Checker& check, const char* name, const TensorView& view) {
  const int d = view.ndim - 1;
  if (view.shape[d] < 1 || view.shape[d] > kMaxHeadDim)
    check.fail(shape_text(name, view, d) + "; a head dim must be 1 to " + std::to_string(kMaxHeadDim));
}

void check_heads(const Checker& check, const TensorView& q, int q_dim, const char* k_name, const TensorView& k,
                 int k_dim) {
  const std::int64_t heads_q = q.shape[q_dim], heads_kv = k.shape[k_dim];
  if (heads_q == 0 || (heads_kv > 0 && heads_q % heads_kv == 0)) return;
  check.fail(shape_text(k_name, k, k_dim) + " but " + shape_text("q", q, q_dim) +
             "; the number of query heads must be a multiple of that of the key heads");
}

void check_apart(const Checker& check, const TensorView& out, const TensorView& lse,
                 std::initializer_list<NamedView> inputs) {
  check.apart("out", out, inputs);
  check.apart("lse", lse, inputs);
}

// What every pass asks of out and lse besides their shapes.
void check_results(const Checker& check, const TensorView& out, const TensorView& lse, const TensorView& q,
                   const char* k_name, const TensorView& k, const char* v_name, const TensorView& v,
                   AttentionPass pass) {
  if (lse.defined() || pass == AttentionPass::kBackward) check.dtype("lse", lse, DType::kFloat32);
  if (pass == AttentionPass::kBackward) return;
  check.writable("out", out);
  if (lse.defined()) check.writable("lse", lse);
  check.no_overlap("out", out, "lse", lse);
  check_apart(check, out, lse, {{"q", q}, {k_name, k}, {v_name, v}});
}

void check_out(const Checker& check, const TensorView& out, const TensorView& q, int ndim, AttentionPass pass) {
  if (pass != AttentionPass::kForwardFloat8) return check_operand(check, "out", out, q, ndim, ndim);
  check.floating("out", out);
  if (out.dtype == DType::kFloat32) check.fail("out is float32; needs float16 or bfloat16");
  check.ndim("out", out, ndim, ndim);
  check.last_dim_contiguous("out", out);
}

// out is q's shape with v's head dim, lse q's shape without one: q [batch, heads, seq, head_dim] by 2 to 4 dims.
void check_dense_results(const Checker& check, const TensorView& q, const char* v_name, const TensorView& v,
                         const TensorView& out, const TensorView& lse, AttentionPass pass) {
  const int ndim = q.ndim;
  check_out(check, out, q, ndim, pass);
  for (int d = 0; d < ndim - 1; ++d) match(check, "out", out, d, "q", q, d, "shapes");
  match(check, "out", out, ndim - 1, v_name, v, v.ndim - 1, "head dims");
  if (!lse.defined() && pass != AttentionPass::kBackward) return;
  check.dtype("lse", lse, DType::kFloat32);
  check.ndim("lse", lse, ndim - 1, ndim - 1);
  for (int d = 0; d < ndim - 1; ++d) match(check, "lse", lse, d, "q", q, d, "shapes");
}

// q and out [total_q, heads, *], lse [heads, total_q].
void check_varlen_results(const Checker& check, const TensorView& q, const char* v_name, const TensorView& v,
                          const TensorView& out, const TensorView& lse, AttentionPass pass) {
  check_out(check, out, q, 3, pass);
  match(check, "out", out, 0, "q", q, 0, "rows");
  match(check, "out", out, 1, "q", q, 1, "heads");
  match(check, "out", out, 2, v_name, v, v.ndim - 1, "head dims");
  if (!lse.defined() && pass != AttentionPass::kBackward) return;
  check.dtype("lse", lse, DType::kFloat32);
  check.ndim("lse", lse, 2, 2);
  match(check, "lse", lse, 0, "q", q, 1, "heads");
  match(check, "lse", lse, 1, "q", q, 0, "rows");
}

// [batch, heads, seq, head_dim] strides of q, out and lse.
void set_dense_rows(const TensorView& q, const TensorView& out, const TensorView& lse, AttentionParams& p) {
  const TensorView q4 = with_leading_dims(q, 4), out4 = with_leading_dims(out, 4);
  p.batch = q4.shape[0];
  p.heads_q = q4.shape[1];
  p.seq_q = q4.shape[2];
  p.stride_q_batch = q4.strides[0];
  p.stride_q_head = q4.strides[1];
  p.stride_q_token = q4.strides[2];
  p.stride_out_batch = out4.strides[0];
  p.stride_out_head = out4.strides[1];
  p.stride_out_token = out4.strides[2];
  if (!lse.defined()) return;
  const TensorView lse3 = with_leading_dims(lse, 3);
  p.stride_lse_batch = lse3.strides[0];
  p.stride_lse_head = lse3.strides[1];
  p.stride_lse_token = lse3.strides[2];
}

void set_varlen_rows(const TensorView& q, const TensorView& out, const TensorView& lse, AttentionParams& p) {
  p.total_q = q.shape[0];
  p.heads_q = q.shape[1];
  p.stride_q_token = q.strides[0];
  p.stride_q_head = q.strides[1];
  p.stride_out_token = out.strides[0];
  p.stride_out_head = out.strides[1];
  if (!lse.defined()) return;
  p.stride_lse_head = lse.strides[0];
  p.stride_lse_token = lse.strides[1];
}

void set_pointers(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
                  const TensorView& lse, AttentionParams& p) {
  p.dtype = k.dtype;
  p.dtype_q = q.dtype;
  p.device = q.device;
  p.head_dim = q.shape[q.ndim - 1];
  p.head_dim_v = v.shape[v.ndim - 1];
  p.q = q.data;
  p.k = k.data;
  p.v = v.data;
  p.out = out.data;
  p.lse = lse.defined() ? static_cast<float*>(lse.data) : nullptr;
}

// Cumulative lengths that the host can read: 0 first, never decreasing, `total` last, no length over `max_length`.
// Returns the longest length; what the host can't read is taken at its word.
std::int64_t check_cumulative(const Checker& check, const char* name, const IndexArray& values, std::int64_t batch,
                              const char* q_name, std::int64_t total, const char* max_name, std::int64_t max_length) {
  if (max_length < 0) check.fail(std::string(max_name) + "=" + std::to_string(max_length) + "; must not be negative");
  if (!check.device().is_cpu()) return max_length;
  const auto at = [&](std::int64_t b) {
    return std::string(name) + "[" + std::to_string(b) + "]=" + std::to_string(values[b]);
  };
  if (values[0] != 0) check.fail(at(0) + "; cumulative lengths start at 0");
  std::int64_t longest = 0;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t begin = values[b], end = values[b + 1];
    if (end < begin) check.fail(at(b + 1) + " but " + at(b) + "; cumulative lengths must not decrease");
    if (end > total)
      check.fail(at(b + 1) + " but " + q_name + ".shape[0]=" + std::to_string(total) +
                 "; cumulative lengths end there");
    if (end - begin > max_length)
      check.fail(at(b + 1) + " and " + at(b) + ": a length of " + std::to_string(end - begin) + " but " + max_name +
                 "=" + std::to_string(max_length) + "; it must bound every length");
    longest = std::max(longest, end - begin);
  }
  if (values[batch] != total)
    check.fail(at(batch) + " but " + q_name + ".shape[0]=" + std::to_string(total) +
               "; the last cumulative length must be the number of rows");
  return longest;
}

std::int64_t batch_of(const Checker& check, const char* name, const TensorView& cu_seqlens) {
  check.index(name, cu_seqlens);
  check.ndim(name, cu_seqlens, 1, 1);
  if (cu_seqlens.shape[0] < 1)
    check.fail(shape_text(name, cu_seqlens, 0) + "; needs batch + 1 cumulative lengths, at least one");
  return cu_seqlens.shape[0] - 1;
}

void check_bias(const Checker& check, const TensorView& bias, AttentionParams& p) {
  if (p.has_lengths()) check.fail("bias is given; it is for dense attention only");
  check.floating("bias", bias);
  if (bias.dtype != DType::kFloat32 && bias.dtype != p.dtype)
    check.fail(std::string("bias is ") + dtype_name(bias.dtype) + "; needs float32 or q's dtype, " +
               dtype_name(p.dtype));
  check.ndim("bias", bias, 0, 4);
  const std::int64_t full[4] = {p.batch, p.heads_q, p.seq_q, p.seq_k};
  std::int64_t strides[4] = {0, 0, 0, 0};
  for (int d = 0; d < bias.ndim; ++d) {
    const int full_d = 4 - bias.ndim + d;
    if (bias.shape[d] != full[full_d] && bias.shape[d] != 1)
      check.fail(shape_text("bias", bias, d) + "; needs 1 or " + std::to_string(full[full_d]) +
                 " to broadcast to [batch, heads_q, seq_q, seq_k]");
    strides[full_d] = bias.shape[d] == 1 ? 0 : bias.strides[d];
  }
  p.bias = {bias.data, bias.dtype, strides[0], strides[1], strides[2], strides[3]};
}

// Bits of the last queries' keys: [batch, heads_q, seq_q, words], or [heads_q, total_q, words].
void check_mask_of_pages(const Checker& check, const TensorView& mask, AttentionParams& p) {
  const int full_dims = p.is_varlen_q() ? 3 : 4, last = mask.ndim - 1;
  check.ndim("mask", mask, p.is_varlen_q() ? 2 : 1, full_dims);
  const std::int64_t words = (p.seq_q + 31) / 32;
  const std::int64_t full[3] = {p.is_varlen_q() ? 1 : p.batch, p.heads_q, p.is_varlen_q() ? p.total_q : p.seq_q};
  const std::string shape =
      p.is_varlen_q() ? "[heads_q, total_q, (max_seqlen_q + 31) / 32]" : "[batch, heads_q, seq_q, (seq_q + 31) / 32]";
  std::int64_t strides[3] = {0, 0, 0};
  for (int d = 0; d < last; ++d) {
    const int full_d = 3 - last + d;
    const bool broadcasts = mask.shape[d] == 1 && !(p.is_varlen_q() && full_d == 2);
    if (mask.shape[d] != full[full_d] && !broadcasts)
      check.fail(shape_text("mask", mask, d) + "; needs " + (p.is_varlen_q() && full_d == 2 ? "" : "1 or ") +
                 std::to_string(full[full_d]) + " to broadcast to " + shape + ", the bits of the last queries' keys");
    strides[full_d] = mask.shape[d] == 1 ? 0 : mask.strides[d];
  }
  if (mask.shape[last] < words)
    check.fail(shape_text("mask", mask, last) + "; needs " + std::to_string(words) + " or more to hold the bits of " +
               std::to_string(p.seq_q) + " keys, as many as there are queries");
  check.last_dim_contiguous("mask", mask);
  if (mask.numel() > 0) p.mask = {static_cast<const std::uint32_t*>(mask.data), strides[0], strides[1], strides[2], {}};
}

void check_mask(const Checker& check, const TensorView& mask, AttentionParams& p) {
  if (p.has_lengths() && !p.is_paged()) check.fail("mask is given; it is for dense and paged attention only");
  check.dtype("mask", mask, DType::kInt32);
  if (p.is_paged()) return check_mask_of_pages(check, mask, p);
  check.ndim("mask", mask, 1, 4);
  const std::int64_t full[4] = {p.batch, p.heads_q, p.seq_q, (p.seq_k + 31) / 32};
  std::int64_t strides[4] = {0, 0, 0, 0};
  const int last = mask.ndim - 1;
  for (int d = 0; d < mask.ndim; ++d) {
    const int full_d = 4 - mask.ndim + d;
    if (mask.shape[d] != full[full_d] && (d == last || mask.shape[d] != 1))
      check.fail(shape_text("mask", mask, d) + "; needs " + (d == last ? "" : "1 or ") + std::to_string(full[full_d]) +
                 " to broadcast to [batch, heads_q, seq_q, (seq_k + 31) / 32], the bits of pack_mask");
    strides[full_d] = mask.shape[d] == 1 ? 0 : mask.strides[d];
  }
  check.last_dim_contiguous("mask", mask);
  if (mask.numel() > 0) p.mask = {static_cast<const std::uint32_t*>(mask.data), strides[0], strides[1], strides[2], {}};
}

// log2 of a block's size.
int block_shift(const Checker& check, const char* name, std::int64_t size) {
  int shift = 6;
  while (shift < 30 && std::int64_t{1} << shift < size) ++shift;
  if (std::int64_t{1} << shift != size)
    check.fail(std::string(name) + "=" + std::to_string(size) +
               "; blocks of a block mask are a power of two from 64 on, to 2^30");
  return shift;
}

void check_block_mask(const Checker& check, const AttentionOptions& options, AttentionParams& p) {
  const TensorView& blocks = options.block_mask;
  if (p.has_lengths()) check.fail("block_mask is given; it is for dense attention only");
  check.dtype("block_mask", blocks, DType::kUInt8);
  check.ndim("block_mask", blocks, 2, 4);
  AttentionBlocks to;
  to.data = static_cast<const std::uint8_t*>(blocks.data);
  to.shift_q = block_shift(check, "block_size_q", options.block_size_q);
  to.shift_k = block_shift(check, "block_size_k", options.block_size_k);
  const auto count = [](std::int64_t tokens, int shift) { return (tokens + (std::int64_t{1} << shift) - 1) >> shift; };
  const std::int64_t full[4] = {p.batch, p.heads_q, count(p.seq_q, to.shift_q), count(p.seq_k, to.shift_k)};
  std::int64_t strides[4] = {0, 0, 0, 0};
  for (int d = 0; d < blocks.ndim; ++d) {
    const int full_d = 4 - blocks.ndim + d;
    if (blocks.shape[d] != full[full_d] && (full_d >= 2 || blocks.shape[d] != 1))
      check.fail(shape_text("block_mask", blocks, d) + "; needs " + (full_d >= 2 ? "" : "1 or ") +
                 std::to_string(full[full_d]) +
                 " to broadcast to [batch, heads_q, blocks of queries, blocks of keys], in blocks of " +
                 std::to_string(options.block_size_q) + " by " + std::to_string(options.block_size_k));
    strides[full_d] = blocks.shape[d] == 1 ? 0 : blocks.strides[d];
  }
  to.stride_batch = strides[0], to.stride_head = strides[1], to.stride_q = strides[2], to.stride_k = strides[3];
  if (blocks.numel() > 0) p.mask.blocks = to;
}

}  // namespace

void check_mirror(const Checker& check, const char* name, const TensorView& view, const char* like_name,
                  const TensorView& like) {
  check.dtype(name, view, like.dtype);
  check.ndim(name, view, like.ndim, like.ndim);
  for (int d = 0; d < like.ndim; ++d) match(check, name, view, d, like_name, like, d, "shapes");
}

void check_dense(const Checker& check, const TensorView& q, const TensorView& k, const TensorView& v,
                 const TensorView& out, const TensorView& lse, AttentionPass pass, AttentionParams& p) {
  check_operand(check, "q", q, q, 2, 4, pass);
  check_operand(check, "k", k, q, q.ndim, q.ndim, pass);
  check_operand(check, "v", v, q, q.ndim, q.ndim, pass);
  const int head_dim = q.ndim - 1, seq = q.ndim - 2, heads = q.ndim - 3;
  check_head_dim(check, "q", q);
  check_head_dim(check, "v", v);
  match(check, "k", k, head_dim, "q", q, head_dim, "head dims");
  match(check, "v", v, seq, "k", k, seq, "lengths");
  if (heads >= 0) {
    check_heads(check, q, heads, "k", k, heads);
    match(check, "v", v, heads, "k", k, heads, "heads");
  }
  if (q.ndim == 4) {
    match(check, "k", k, 0, "q", q, 0, "batches");
    match(check, "v", v, 0, "q", q, 0, "batches");
  }
  check_dense_results(check, q, "v", v, out, lse, pass);
  check_results(check, out, lse, q, "k", k, "v", v, pass);

  set_pointers(q, k, v, out, lse, p);
  set_dense_rows(q, out, lse, p);
  const TensorView k4 = with_leading_dims(k, 4), v4 = with_leading_dims(v, 4);
  p.heads_kv = k4.shape[1];
  p.seq_k = k4.shape[2];
  p.stride_k_batch = k4.strides[0];
  p.stride_k_head = k4.strides[1];
  p.stride_k_token = k4.strides[2];
  p.stride_v_batch = v4.strides[0];
  p.stride_v_head = v4.strides[1];
  p.stride_v_token = v4.strides[2];
}

void check_varlen(const Checker& check, const TensorView& q, const TensorView& k, const TensorView& v,
                  const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k, std::int64_t max_seqlen_q,
                  std::int64_t max_seqlen_k, const TensorView& out, const TensorView& lse, AttentionPass pass,
                  IndexCopies& copies, AttentionParams& p) {
  check_operand(check, "q", q, q, 3, 3, pass);
  check_operand(check, "k", k, q, 3, 3, pass);
  check_operand(check, "v", v, q, 3, 3, pass);
  check_head_dim(check, "q", q);
  check_head_dim(check, "v", v);
  match(check, "k", k, 2, "q", q, 2, "head dims");
  match(check, "v", v, 0, "k", k, 0, "rows");
  check_heads(check, q, 1, "k", k, 1);
  match(check, "v", v, 1, "k", k, 1, "heads");
  check_varlen_results(check, q, "v", v, out, lse, pass);
  check_results(check, out, lse, q, "k", k, "v", v, pass);
  if (pass != AttentionPass::kBackward)
    check_apart(check, out, lse, {{"cu_seqlens_q", cu_seqlens_q}, {"cu_seqlens_k", cu_seqlens_k}});
  p.batch = batch_of(check, "cu_seqlens_q", cu_seqlens_q);
  p.cu_seqlens_q = check.index_array("cu_seqlens_q", cu_seqlens_q, p.batch + 1, copies);
  p.cu_seqlens_k = check.index_array("cu_seqlens_k", cu_seqlens_k, p.batch + 1, copies);
  p.seq_q =
      check_cumulative(check, "cu_seqlens_q", p.cu_seqlens_q, p.batch, "q", q.shape[0], "max_seqlen_q", max_seqlen_q);
  p.seq_k =
      check_cumulative(check, "cu_seqlens_k", p.cu_seqlens_k, p.batch, "k", k.shape[0], "max_seqlen_k", max_seqlen_k);

  set_pointers(q, k, v, out, lse, p);
  set_varlen_rows(q, out, lse, p);
  p.heads_kv = k.shape[1];
  p.total_k = k.shape[0];
  p.stride_k_token = k.strides[0];
  p.stride_k_head = k.strides[1];
  p.stride_v_token = v.strides[0];
  p.stride_v_head = v.strides[1];
}

void check_paged(const Checker& check, const TensorView& q, const TensorView& k_pages, const TensorView& v_pages,
                 const TensorView& block_table, const TensorView& seq_lens, const TensorView& cu_seqlens_q,
                 std::int64_t max_seqlen_q, const TensorView& out, const TensorView& lse, const KvScales& scales,
                 IndexCopies& copies, AttentionParams& p) {
  const bool varlen = cu_seqlens_q.defined();
  check_operand(check, "q", q, q, varlen ? 3 : 2, varlen ? 3 : 4);
  check_pages_operand(check, "k_pages", k_pages, q);
  check_pages_operand(check, "v_pages", v_pages, q);
  check_head_dim(check, "q", q);
  TensorView k_rows = k_pages, v_rows = v_pages;  // with as many columns as they have numbers
  k_rows.shape[3] = columns_of(k_pages);
  v_rows.shape[3] = columns_of(v_pages);
  const bool packed = is_packed(k_pages.dtype);
  const char* const k_name = packed ? "elements of k_pages" : "k_pages";
  const char* const v_name = packed ? "elements of v_pages" : "v_pages";
  check_head_dim(check, v_name, v_rows);
  match(check, k_name, k_rows, 3, "q", q, q.ndim - 1, "head dims");
  for (int d = 0; d < 3; ++d) match(check, "v_pages", v_pages, d, "k_pages", k_pages, d, "shapes");
  p.quantization = check_kv_scales(check, scales, k_pages, v_pages, false);
  if (k_pages.shape[1] < 1) check.fail(shape_text("k_pages", k_pages, 1) + "; a page holds at least one token");
  if (q.ndim >= 3) {
    check_heads(check, q, varlen ? 1 : q.ndim - 3, "k_pages", k_pages, 2);
  } else if (k_pages.shape[2] != 1) {
    check.fail(shape_text("k_pages", k_pages, 2) + " but q has no dim of heads; needs 1");
  }
  if (varlen) {
    check_varlen_results(check, q, v_name, v_rows, out, lse, AttentionPass::kForward);
  } else {
    check_dense_results(check, q, v_name, v_rows, out, lse, AttentionPass::kForward);
  }
  check_results(check, out, lse, q, "k_pages", k_pages, "v_pages", v_pages, AttentionPass::kForward);
  check_apart(check, out, lse, {{"block_table", block_table}, {"seq_lens", seq_lens}, {"cu_seqlens_q", cu_seqlens_q}});
  set_pointers(q, k_rows, v_rows, out, lse, p);
  if (varlen) {
    p.batch = batch_of(check, "cu_seqlens_q", cu_seqlens_q);
    p.cu_seqlens_q = check.index_array("cu_seqlens_q", cu_seqlens_q, p.batch + 1, copies);
    p.seq_q =
        check_cumulative(check, "cu_seqlens_q", p.cu_seqlens_q, p.batch, "q", q.shape[0], "max_seqlen_q", max_seqlen_q);
    set_varlen_rows(q, out, lse, p);
  } else {
    set_dense_rows(q, out, lse, p);
  }
  check.dtype("block_table", block_table, DType::kInt32);
  check.ndim("block_table", block_table, 2, 2);
  check.last_dim_contiguous("block_table", block_table);
  if (block_table.shape[0] != p.batch)
    check.fail(shape_text("block_table", block_table, 0) + "; needs a row for each of the " + std::to_string(p.batch) +
               " sequences");
  p.seq_lens = check.index_array("seq_lens", seq_lens, p.batch, copies);
  p.heads_kv = k_pages.shape[2];
  p.num_pages = k_pages.shape[0];
  p.page_size = k_pages.shape[1];
  set_block_table(block_table, p);
  p.stride_k_batch = k_pages.strides[0];
  p.stride_k_token = k_pages.strides[1];
  p.stride_k_head = k_pages.strides[2];
  p.stride_v_batch = v_pages.strides[0];
  p.stride_v_token = v_pages.strides[1];
  p.stride_v_head = v_pages.strides[2];
  check_lengths(check, p);
}

void set_block_table(const TensorView& block_table, AttentionParams& p) {
  p.max_pages = block_table.shape[1];
  // A table without columns (no sequence has a key) may have no memory; paged attention is told by a pointer that is
  // not null.
  static const std::int32_t no_pages = 0;
  p.block_table = block_table.data ? static_cast<const std::int32_t*>(block_table.data) : &no_pages;
  p.stride_block_table = block_table.strides[0];
}

void check_lengths(const Checker& check, AttentionParams& p, const PagedNames& names) {
  p.seq_k = p.max_pages * p.page_size;
  if (!check.device().is_cpu()) return;
  std::int64_t longest = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t length = p.seq_lens[b];
    if (length < 0 || length > p.max_pages * p.page_size)
      throw BadBlockTable(check.op() + ": " + names.lengths + "[" + std::to_string(b) + "]=" + std::to_string(length) +
                              "; " + names.table + " has room for 0 to " + std::to_string(p.max_pages * p.page_size) +
                              " tokens a sequence",
                          b, -1, length);
    longest = std::max(longest, length);
  }
  p.seq_k = longest;
}

void check_page_ids(const Checker& check, IndexCopies& copies, AttentionParams& p, const PagedNames& names) {
  if (!check.device().is_cpu()) return;
  const auto pages_of = [&](std::int64_t b) { return (p.k_length(b) + p.page_size - 1) / p.page_size; };
  const std::int64_t most = (p.seq_k + p.page_size - 1) / p.page_size;  // seq_k: the longest, by check_lengths
  const IndexArray table = copies.rows_of({p.block_table, false}, p.batch, most, &p.stride_block_table, pages_of);
  p.block_table = static_cast<const std::int32_t*>(table.data);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t length = p.k_length(b), used = pages_of(b);
    const std::int32_t* pages = p.block_table + b * p.stride_block_table;
    for (std::int64_t page = p.first_key(b, 0, p.q_length(b), length) / p.page_size; page < used; ++page)
      if (pages[page] < 0 || pages[page] >= p.num_pages)
        throw BadBlockTable(check.op() + ": " + names.table + "[" + std::to_string(b) + ", " + std::to_string(page) +
                                "]=" + std::to_string(pages[page]) + "; page ids are 0 to " +
                                std::to_string(p.num_pages - 1),
                            b, page, pages[page]);
  }
}

void check_bounds(const Checker& check, const AttentionOptions& options, IndexCopies& copies, AttentionParams& p) {
  const auto bounds = [&](const char* name, const TensorView& view) {
    if (!view.defined()) return IndexArray{};
    const IndexArray array = check.index_array(name, view, p.batch, copies);
    for (std::int64_t b = 0; check.device().is_cpu() && b < p.batch; ++b)
      if (array[b] < 0)
        check.fail(std::string(name) + "[" + std::to_string(b) + "]=" + std::to_string(array[b]) +
                   "; must not be negative");
    return array;
  };
  if (p.is_paged()) p.k_starts = bounds("k_starts", options.k_starts);
  if (!p.is_varlen_k()) return;
  p.seqused_q = bounds("seqused_q", options.seqused_q);
  p.seqused_k = bounds("seqused_k", options.seqused_k);
}

void check_options(const Checker& check, const AttentionOptions& options, AttentionParams& p) {
  if (!p.is_paged() && options.k_starts.defined()) check.fail("k_starts is given; it is for paged attention only");
  if (!p.is_varlen_k())
    for (const NamedView& used : {NamedView{"seqused_q", options.seqused_q}, NamedView{"seqused_k", options.seqused_k}})
      if (used.view.defined()) check.fail(std::string(used.name) + " is given; it is for variable lengths only");
  if (options.window_left < -1)
    check.fail("window_left=" + std::to_string(options.window_left) + "; needs -1 (all) or a number of keys");
  if (options.window_right < -1)
    check.fail("window_right=" + std::to_string(options.window_right) + "; needs -1 (all) or a number of keys");
  if (!std::isfinite(options.softcap) || options.softcap < 0)
    check.fail("softcap=" + std::to_string(options.softcap) + "; needs a finite number, 0 (off) or more");
  p.scale = options.scale ? *options.scale : 1.0f / std::sqrt(static_cast<float>(p.head_dim));
  if (!std::isfinite(p.scale)) check.fail("scale=" + std::to_string(p.scale) + "; needs a finite number");
  if (!p.is_paged() && (options.kv_scales.k.defined() || options.kv_scales.v.defined()))
    check.fail("kv_scales are given; they are for paged attention only");
  p.softcap = options.softcap;
  // Query i sees keys up to i + k_len - q_len + window_right: all of them, for every i, from window_right = q_len - 1
  // on. It sees keys from i + k_len - q_len - window_left: all of them from window_left = k_len - 1 on.
  const std::int64_t right = options.causal ? 0 : options.window_right;
  p.window_right = right >= p.seq_q - 1 ? -1 : right;
  p.window_left = options.window_left >= p.seq_k - 1 ? -1 : options.window_left;
  p.causal = p.window_right == 0;
  if (options.bias.defined()) check_bias(check, options.bias, p);
  if (options.mask.defined()) check_mask(check, options.mask, p);
  if (options.block_mask.defined()) check_block_mask(check, options, p);
  p.alibi = options.alibi;
  if (options.alibi_slopes.defined()) {
    const TensorView& slopes = options.alibi_slopes;
    check.dtype("alibi_slopes", slopes, DType::kFloat32);
    check.ndim("alibi_slopes", slopes, 1, 2);
    check.last_dim_contiguous("alibi_slopes", slopes);
    check.extent("alibi_slopes", slopes, slopes.ndim - 1, p.heads_q, "the number of query heads");
    if (slopes.ndim == 2) check.extent("alibi_slopes", slopes, 0, p.batch, "the batch");
    p.alibi_slopes = static_cast<const float*>(slopes.data);
    p.stride_alibi_batch = slopes.ndim == 2 ? slopes.strides[0] : 0;
  }
  if (options.sinks.defined()) {
    check.dtype("sinks", options.sinks, DType::kFloat32);
    check.ndim("sinks", options.sinks, 1, 1);
    check.extent("sinks", options.sinks, 0, p.heads_q, "the number of query heads");
    check.contiguous("sinks", options.sinks);
    p.sinks = static_cast<const float*>(options.sinks.data);
  }
}

}  // namespace flashkernel
