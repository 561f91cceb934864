// Front doors of the kernels that move keys and values: shapes everywhere, and on the host every index, before a page
// is touched.
#include "flashkernel/kv_ops.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "ops/check.hpp"
#include "ops/kv_append_check.hpp"
#include "ops/kv_params.hpp"
#include "ops/kv_scales.hpp"
#include "ops/page_table.hpp"
#include "ops/rope_spec.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

constexpr std::int64_t kNoLowerBound = std::numeric_limits<std::int64_t>::min();

/// What a row of numbers must be as wide as.
const char* k_columns(const KvPages& pages) {
  return pages.quantization.packed ? "twice k_pages.shape[3]" : "k_pages.shape[3]";
}
const char* v_columns(const KvPages& pages) {
  return pages.quantization.packed ? "twice v_pages.shape[3]" : "v_pages.shape[3]";
}

KvPages check_pages(const Checker& check, const TensorView& k_pages, const TensorView& v_pages, const KvScales& scales,
                    bool written) {
  check.tensor("k_pages", k_pages);
  if (!has_scales(k_pages.dtype)) check.floating("k_pages", k_pages);
  check.ndim("k_pages", k_pages, 4, 4);
  check.last_dim_contiguous("k_pages", k_pages);
  check.tensor("v_pages", v_pages);
  check.ndim("v_pages", v_pages, 4, 4);
  check.last_dim_contiguous("v_pages", v_pages);
  for (int d = 0; d < 3; ++d)
    check.extent("v_pages", v_pages, d, k_pages.shape[d], ("k_pages.shape[" + std::to_string(d) + "]").c_str());
  if (k_pages.shape[1] == 0) check.fail("k_pages.shape[1]=0; needs a page size of at least 1");
  if (written) {
    check.writable("k_pages", k_pages);
    check.writable("v_pages", v_pages);
    check.no_overlap("k_pages", k_pages, "v_pages", v_pages);
  }
  KvPages pages;
  pages.dtype = k_pages.dtype;
  pages.quantization = check_kv_scales(check, scales, k_pages, v_pages, written);
  pages.k = k_pages.data;
  pages.v = v_pages.data;
  pages.num_pages = k_pages.shape[0];
  pages.page_size = k_pages.shape[1];
  pages.heads_kv = k_pages.shape[2];
  pages.head_dim = columns_of(k_pages);
  pages.head_dim_v = columns_of(v_pages);
  pages.stride_k_page = k_pages.strides[0];
  pages.stride_k_slot = k_pages.strides[1];
  pages.stride_k_head = k_pages.strides[2];
  pages.stride_v_page = v_pages.strides[0];
  pages.stride_v_slot = v_pages.strides[1];
  pages.stride_v_head = v_pages.strides[2];
  return pages;
}

/// [tokens, heads, head_dim], last dim contiguous.
void check_tokens(const Checker& check, const char* name, const TensorView& view, DType dtype, std::int64_t tokens,
                  std::int64_t head_dim, const char* head_dim_name) {
  check.dtype(name, view, dtype);
  check.ndim(name, view, 3, 3);
  check.extent(name, view, 0, tokens, "the number of tokens");
  check.extent(name, view, 2, head_dim, head_dim_name);
  check.last_dim_contiguous(name, view);
}

/// The table that `rope` brings; rotary_dim is its.
void set_table(const Checker& check, const KvAppendRope& rope, KvAppendParams& params) {
  check.floating("rope.cos", rope.cos);
  check.ndim("rope.cos", rope.cos, 2, 2);
  check.dtype("rope.sin", rope.sin, rope.cos.dtype);
  check.same_shape("rope.sin", rope.sin, "rope.cos", rope.cos);
  check.last_dim_contiguous("rope.cos", rope.cos);
  check.last_dim_contiguous("rope.sin", rope.sin);
  const std::int64_t half = rope.cos.shape[1], rotary_dim = rope.options.rotary_dim;
  if (half > params.pages.head_dim / 2)
    check.fail(shape_text("rope.cos", rope.cos, 1) +
               "; needs at most half of head_dim=" + std::to_string(params.pages.head_dim));
  if (rotary_dim != -1 && rotary_dim != 2 * half)
    check.fail("rotary_dim=" + std::to_string(rotary_dim) + " but rope.cos has " + std::to_string(half) +
               " columns; needs twice as many, or -1");
  check.require(!rope.options.inv_freq.defined(),
                "rope.inv_freq and rope.cos are given; frequencies or tables are needed, not both");
  if (rope.cos.shape[0] == 0 && params.tokens > 0) check.fail("rope.cos.shape[0]=0; needs a row per position");
  params.rope.rotary_dim = 2 * half;
  params.rope.interleaved = rope.options.interleaved;
  params.rope.inverse = rope.options.inverse;
  params.table = {rope.cos.data,     rope.sin.data,       rope.cos.dtype,
                  rope.cos.shape[0], rope.cos.strides[0], rope.sin.strides[0]};
}

/// Checks where tokens go, and works it out where the host can read it.
KvPlaces set_places(const Checker& check, const KvAppendPlaces& given, bool has_rope, IndexCopies& copies,
                    KvAppendParams& params) {
  KvPlaces places;
  check.dtype("block_table", given.block_table, DType::kInt32);
  check.ndim("block_table", given.block_table, 2, 2);
  check.last_dim_contiguous("block_table", given.block_table);
  const std::int64_t batch = places.batch = given.block_table.shape[0], tokens = params.tokens;
  places.max_pages = given.block_table.shape[1];
  places.stride_block_table = given.block_table.strides[0];
  if (tokens == 0 || batch == 0 || places.max_pages == 0)
    check.fail("k.shape[0]=" + std::to_string(tokens) + ", " + shape_text("block_table", given.block_table, 0) + ", " +
               shape_text("block_table", given.block_table, 1) + "; needs at least one token, sequence and page");
  places.block_table = static_cast<const std::int32_t*>(given.block_table.data);
  places.seq_lens = check.index_array("seq_lens", given.seq_lens, batch, copies);
  if (given.cu_seqlens.defined()) {
    places.cu_seqlens = check.index_array("cu_seqlens", given.cu_seqlens, batch + 1, copies);
  } else if (tokens % batch != 0) {
    check.fail("k.shape[0]=" + std::to_string(tokens) + "; without cu_seqlens it must be a multiple of the " +
               std::to_string(batch) + " sequences");
  }
  places.tokens_each = tokens / batch;
  if (given.positions.defined()) places.positions = check.index_array("positions", given.positions, batch, copies);
  if (given.seq_lens_after.defined()) {
    check.dtype("seq_lens_after", given.seq_lens_after, DType::kInt32);
    check.ndim("seq_lens_after", given.seq_lens_after, 1, 1);
    check.extent("seq_lens_after", given.seq_lens_after, 0, batch, "block_table.shape[0]");
    check.contiguous("seq_lens_after", given.seq_lens_after);
    places.seq_lens_after = static_cast<std::int32_t*>(given.seq_lens_after.data);
  }
  if (!params.device.is_cpu()) {
    params.places = places;
    return places;
  }
  if (places.cu_seqlens) {
    std::int64_t begin = places.cu_seqlens[0];
    for (std::int64_t b = 0; b < batch; ++b) {
      const std::int64_t end = places.cu_seqlens[b + 1];
      if (end < begin || (b == 0 && begin != 0) || (b + 1 == batch && end != tokens))
        check.fail("cu_seqlens[" + std::to_string(b) + "]=" + std::to_string(begin) + ", cu_seqlens[" +
                   std::to_string(b + 1) + "]=" + std::to_string(end) +
                   "; cumulative lengths start at 0, never decrease and end at " + std::to_string(tokens));
      begin = end;
    }
  }
  const std::int64_t page_size = params.pages.page_size, capacity = places.max_pages * page_size;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t added = places.begin(b + 1) - places.begin(b), before = places.seq_lens[b];
    if (before < 0)
      check.fail("seq_lens[" + std::to_string(b) + "]=" + std::to_string(before) + "; must not be negative");
    if (before > capacity - added)
      check.fail("seq_lens[" + std::to_string(b) + "]=" + std::to_string(before) +
                 ": a token is appended at position " + std::to_string(std::max(before, capacity)) + " of a cache of " +
                 std::to_string(capacity) + " tokens");
  }
  // Read once: what is checked next is what the kernel uses.
  params.slots = copies.made(tokens, [&](std::int64_t token) { return places.slot(token, page_size); });
  check.indices_in_range("slots by block_table", params.slots, tokens, 0, params.pages.num_pages * page_size,
                         "num_pages * page_size");
  if (has_rope) params.positions = copies.made(tokens, [&](std::int64_t token) { return places.position(token); });
  return places;
}

void set_rope(const Checker& check, const KvAppendRope& rope, const TensorView& k_pages, const TensorView& v_pages,
              const KvAppendPlaces* places, IndexCopies& copies, KvAppendParams& params) {
  params.has_rope = true;
  const bool by_table = rope.cos.defined() || rope.sin.defined();
  if (by_table)
    set_table(check, rope, params);
  else
    params.rope = rope_spec(check, rope.options, params.pages.head_dim);
  if (!places)
    params.positions = check.index_array("rope.positions", rope.positions, params.tokens, copies);
  else if (rope.positions.defined())
    check.fail("rope.positions are given; places say where tokens stand");
  if (by_table)
    check.indices_in_range("rope.positions", params.positions, params.tokens, 0, params.table.rows,
                           "rows of the table");
  else
    check_positions(check, "rope.positions", params.positions, params.tokens);
  params.k_norm = check.optional_floating_vector("rope.k_norm", rope.k_norm, params.pages.head_dim);
  params.q_norm = check.optional_floating_vector("rope.q_norm", rope.q_norm, params.pages.head_dim);
  params.norm_eps = rope.norm_eps;
  check.require(rope.norm_eps >= 0.0f, "rope.norm_eps=" + std::to_string(rope.norm_eps) + "; must not be negative");
  check.require(!rope.q_norm.defined() || rope.q.defined(), "rope.q_norm is given without rope.q");
  if (params.has_norm() && params.pages.quantization)
    throw Unsupported(
        "kv_append: rope.q_norm and rope.k_norm with pages of 8 bits; norm q and k before, or use wider pages");
  if (rope.q.defined() != rope.q_out.defined())
    check.fail(std::string(rope.q.defined() ? "rope.q_out" : "rope.q") +
               " is absent; give both rope.q and rope.q_out, or neither");
  if (!rope.q.defined()) return;
  check_tokens(check, "rope.q", rope.q, params.dtype, params.tokens, params.pages.head_dim, k_columns(params.pages));
  check.dtype("rope.q_out", rope.q_out, params.dtype);
  check.same_shape("rope.q_out", rope.q_out, "rope.q", rope.q);
  check.last_dim_contiguous("rope.q_out", rope.q_out);
  check.writable("rope.q_out", rope.q_out);
  check.same_or_apart("rope.q_out", rope.q_out, "rope.q", rope.q);
  check.apart("rope.q_out", rope.q_out,
              {{"k_pages", k_pages},
               {"v_pages", v_pages},
               {"rope.positions", rope.positions},
               {"rope.inv_freq", rope.options.inv_freq},
               {"rope.cos", rope.cos},
               {"rope.sin", rope.sin},
               {"rope.q_norm", rope.q_norm},
               {"rope.k_norm", rope.k_norm}});
  params.heads_q = rope.q.shape[1];
  params.q = rope.q.data;
  params.q_out = rope.q_out.data;
  params.stride_q_token = rope.q.strides[0];
  params.stride_q_head = rope.q.strides[1];
  params.stride_q_out_token = rope.q_out.strides[0];
  params.stride_q_out_head = rope.q_out.strides[1];
}

/// All that a call asks for. places: null: by slots; `known`: what the host knows of them.
KvAppendParams check_append(const Checker& check, const TensorView& k, const TensorView& v, const TensorView& k_pages,
                            const TensorView& v_pages, const KvScales& scales, const TensorView& slots,
                            const KvAppendPlaces* places, const std::optional<KvAppendRope>& rope, IndexCopies& copies,
                            KvPlaces& known) {
  KvAppendParams params;
  params.pages = check_pages(check, k_pages, v_pages, scales, true);
  if (k_pages.dtype == DType::kFloat4E2M1x2)
    check.fail("k_pages is float4_e2m1fn_x2, which is read and copied, not written; needs int4 or pages of more bits");
  if (params.pages.quantization) check.floating("k", k);
  params.dtype = params.pages.quantization ? k.dtype : k_pages.dtype;
  params.device = check.device();
  check.dtype("k", k, params.dtype);
  check.ndim("k", k, 3, 3);
  params.tokens = k.shape[0];
  check_tokens(check, "k", k, params.dtype, params.tokens, params.pages.head_dim, k_columns(params.pages));
  check_tokens(check, "v", v, params.dtype, params.tokens, params.pages.head_dim_v, v_columns(params.pages));
  check.extent("k", k, 1, params.pages.heads_kv, "k_pages.shape[2]");
  check.extent("v", v, 1, params.pages.heads_kv, "v_pages.shape[2]");
  const auto check_written = [&](const char* name, const TensorView& written) {
    check.apart(name, written, {{"k", k}, {"v", v}, {"slots", slots}});
    if (places)
      check.apart(name, written,
                  {{"block_table", places->block_table},
                   {"seq_lens", places->seq_lens},
                   {"cu_seqlens", places->cu_seqlens},
                   {"positions", places->positions}});
    if (!rope) return;
    check.apart(name, written,
                {{"rope.positions", rope->positions},
                 {"rope.q", rope->q},
                 {"rope.inv_freq", rope->options.inv_freq},
                 {"rope.cos", rope->cos},
                 {"rope.sin", rope->sin},
                 {"rope.q_norm", rope->q_norm},
                 {"rope.k_norm", rope->k_norm}});
  };
  check_written("k_pages", k_pages);
  check_written("v_pages", v_pages);
  if (params.pages.quantization.per_token) {
    check_written("k_scales", scales.k);
    check_written("v_scales", scales.v);
  }
  params.k = k.data;
  params.v = v.data;
  params.stride_k_token = k.strides[0];
  params.stride_k_head = k.strides[1];
  params.stride_v_token = v.strides[0];
  params.stride_v_head = v.strides[1];
  if (places) {
    known = set_places(check, *places, rope.has_value(), copies, params);
    if (places->seq_lens_after.defined()) {
      check_written("seq_lens_after", places->seq_lens_after);
      check.apart("seq_lens_after", places->seq_lens_after,
                  {{"k_pages", k_pages}, {"v_pages", v_pages}, {"k_scales", scales.k}, {"v_scales", scales.v}});
    }
  } else {
    params.slots = check.index_array("slots", slots, params.tokens, copies);
    check.indices_in_range("slots", params.slots, params.tokens, kNoLowerBound,
                           params.pages.num_pages * params.pages.page_size, "num_pages * page_size");
  }
  if (rope) {
    set_rope(check, *rope, k_pages, v_pages, places, copies, params);
    if (places)
      check.apart("rope.q_out", rope->q_out,
                  {{"block_table", places->block_table},
                   {"seq_lens", places->seq_lens},
                   {"cu_seqlens", places->cu_seqlens},
                   {"positions", places->positions},
                   {"seq_lens_after", places->seq_lens_after}});
    check.apart("rope.q_out", rope->q_out,
                {{"k", k}, {"v", v}, {"slots", slots}, {"k_scales", scales.k}, {"v_scales", scales.v}});
  }
  return params;
}

void append(const TensorView& k, const TensorView& v, const TensorView& k_pages, const TensorView& v_pages,
            const KvScales& scales, const TensorView& slots, const KvAppendPlaces* places,
            const std::optional<KvAppendRope>& rope, const ExecutionContext& context) {
  const Checker check("kv_append", k_pages.device);
  IndexCopies copies(check.device());
  KvPlaces known;
  const KvAppendParams params = check_append(check, k, v, k_pages, v_pages, scales, slots, places, rope, copies, known);
  if (params.tokens == 0 && !context.explain) return;
  dispatch(params, params.device, context);
  if (params.device.is_cpu() && known.seq_lens_after && !context.explain)
    for (std::int64_t b = 0; b < known.batch; ++b)
      known.seq_lens_after[b] = static_cast<std::int32_t>(known.seq_lens[b] + known.begin(b + 1) - known.begin(b));
}

}  // namespace

KvAppendParams check_kv_append(const Checker& check, const TensorView& k, const TensorView& v,
                               const TensorView& k_pages, const TensorView& v_pages, const KvScales& scales,
                               const TensorView& slots, const std::optional<KvAppendRope>& rope, IndexCopies& copies) {
  KvPlaces known;
  return check_append(check, k, v, k_pages, v_pages, scales, slots, nullptr, rope, copies, known);
}

void kv_append(const TensorView& k, const TensorView& v, const TensorView& k_pages, const TensorView& v_pages,
               const TensorView& slots, const std::optional<KvAppendRope>& rope, const ExecutionContext& context) {
  kv_append(k, v, k_pages, v_pages, KvScales{}, slots, rope, context);
}

void kv_append(const TensorView& k, const TensorView& v, const TensorView& k_pages, const TensorView& v_pages,
               const KvScales& scales, const TensorView& slots, const std::optional<KvAppendRope>& rope,
               const ExecutionContext& context) {
  append(k, v, k_pages, v_pages, scales, slots, nullptr, rope, context);
}

void kv_append_to_sequences(const TensorView& k, const TensorView& v, const TensorView& k_pages,
                            const TensorView& v_pages, const KvScales& scales, const KvAppendPlaces& places,
                            const std::optional<KvAppendRope>& rope, const ExecutionContext& context) {
  append(k, v, k_pages, v_pages, scales, TensorView(), &places, rope, context);
}

void kv_read(const TensorView& k_pages, const TensorView& v_pages, const TensorView& block_table,
             const TensorView& seq_lens, const TensorView& k_out, const TensorView& v_out,
             const ExecutionContext& context) {
  kv_read(k_pages, v_pages, KvScales{}, block_table, seq_lens, k_out, v_out, context);
}

void kv_read(const TensorView& k_pages, const TensorView& v_pages, const KvScales& scales,
             const TensorView& block_table, const TensorView& seq_lens, const TensorView& k_out,
             const TensorView& v_out, const ExecutionContext& context) {
  const Checker check("kv_read", k_pages.device);
  KvReadParams params;
  params.pages = check_pages(check, k_pages, v_pages, scales, false);
  if (params.pages.quantization) check.floating("k_out", k_out);
  params.dtype = params.pages.quantization ? k_out.dtype : k_pages.dtype;
  params.device = check.device();
  check.dtype("block_table", block_table, DType::kInt32);
  check.ndim("block_table", block_table, 2, 2);
  check.last_dim_contiguous("block_table", block_table);
  params.batch = block_table.shape[0];
  params.max_pages = block_table.shape[1];
  params.block_table = static_cast<const std::int32_t*>(block_table.data);
  params.stride_block_table = block_table.strides[0];
  IndexCopies copies(check.device());
  params.seq_lens = check.index_array("seq_lens", seq_lens, params.batch, copies);

  const TensorView* const outs[] = {&k_out, &v_out};
  const char* const names[] = {"k_out", "v_out"};
  for (int i = 0; i < 2; ++i) {
    const TensorView& out = *outs[i];
    check.dtype(names[i], out, params.dtype);
    check.ndim(names[i], out, 4, 4);
    check.extent(names[i], out, 0, params.batch, "block_table.shape[0]");
    if (i == 1) check.extent(names[i], out, 1, k_out.shape[1], "k_out.shape[1]");
    check.extent(names[i], out, 2, params.pages.heads_kv, "k_pages.shape[2]");
    check.extent(names[i], out, 3, i == 0 ? params.pages.head_dim : params.pages.head_dim_v,
                 i == 0 ? k_columns(params.pages) : v_columns(params.pages));
    check.last_dim_contiguous(names[i], out);
    check.writable(names[i], out);
    check.apart(names[i], out,
                {{"k_pages", k_pages},
                 {"v_pages", v_pages},
                 {"k_scales", scales.k},
                 {"v_scales", scales.v},
                 {"block_table", block_table},
                 {"seq_lens", seq_lens}});
  }
  check.no_overlap("v_out", v_out, "k_out", k_out);
  params.max_seq = k_out.shape[1];
  params.k_out = k_out.data;
  params.v_out = v_out.data;
  params.stride_k_out_batch = k_out.strides[0];
  params.stride_k_out_token = k_out.strides[1];
  params.stride_k_out_head = k_out.strides[2];
  params.stride_v_out_batch = v_out.strides[0];
  params.stride_v_out_token = v_out.strides[1];
  params.stride_v_out_head = v_out.strides[2];

  const std::int64_t in_table = params.max_pages * params.pages.page_size;
  check.indices_in_range("seq_lens", params.seq_lens, params.batch, 0, std::min(params.max_seq, in_table) + 1,
                         params.max_seq <= in_table ? "k_out.shape[1] + 1" : "block_table.shape[1] * page_size + 1");
  if (params.device.is_cpu()) {
    const auto pages_of = [&](std::int64_t b) {
      return (params.seq_lens[b] + params.pages.page_size - 1) / params.pages.page_size;
    };
    std::int64_t most = 0;
    for (std::int64_t b = 0; b < params.batch; ++b) most = std::max(most, pages_of(b));
    const IndexArray table =
        copies.rows_of({params.block_table, false}, params.batch, most, &params.stride_block_table, pages_of);
    params.block_table = static_cast<const std::int32_t*>(table.data);
    for (std::int64_t b = 0; b < params.batch; ++b) {
      const IndexArray row{params.block_table + b * params.stride_block_table, false};
      check.indices_in_range(("block_table[" + std::to_string(b) + "]").c_str(), row, pages_of(b), 0,
                             params.pages.num_pages, "num_pages");
    }
  }
  if (k_out.numel() == 0 && v_out.numel() == 0 && !context.explain) return;
  dispatch(params, params.device, context);
}

FindBadPageParams page_table_params(const Checker& check, const TensorView& block_table, const TensorView& seq_lens,
                                    std::int64_t num_pages, std::int64_t page_size, IndexCopies& copies) {
  check.dtype("block_table", block_table, DType::kInt32);
  check.ndim("block_table", block_table, 2, 2);
  check.last_dim_contiguous("block_table", block_table);
  check.require(num_pages >= 0, "num_pages=" + std::to_string(num_pages) + "; must not be negative");
  check.require(page_size >= 1, "page_size=" + std::to_string(page_size) + "; a page holds at least one token");
  FindBadPageParams params;
  params.device = check.device();
  params.batch = block_table.shape[0];
  params.max_pages = block_table.shape[1];
  params.block_table = static_cast<const std::int32_t*>(block_table.data);
  params.stride_block_table = block_table.strides[0];
  params.num_pages = num_pages;
  params.page_size = page_size;
  params.seq_lens = check.index_array("seq_lens", seq_lens, params.batch, copies);
  return params;
}

void find_bad_page(const TensorView& block_table, const TensorView& seq_lens, std::int64_t num_pages,
                   std::int64_t page_size, const TensorView& fault, const ExecutionContext& context) {
  const Checker check("find_bad_page", block_table.device);
  IndexCopies copies(check.device());
  FindBadPageParams params = page_table_params(check, block_table, seq_lens, num_pages, page_size, copies);
  check.dtype("fault", fault, DType::kInt64);
  check.ndim("fault", fault, 1, 1);
  check.extent("fault", fault, 0, 3, "the numbers of a fault");
  check.contiguous("fault", fault);
  check.apart("fault", fault, {{"block_table", block_table}, {"seq_lens", seq_lens}});
  params.fault = static_cast<std::int64_t*>(fault.data);
  dispatch(params, params.device, context);
}

void check_block_table(const TensorView& block_table, const TensorView& seq_lens, std::int64_t num_pages,
                       std::int64_t page_size, const ExecutionContext& context) {
  const Checker check("check_block_table", block_table.device);
  IndexCopies copies(check.device());
  check_page_table(page_table_params(check, block_table, seq_lens, num_pages, page_size, copies), context);
}

void check_page_table(FindBadPageParams params, const ExecutionContext& context) {
  std::int64_t found[3] = {-1, -1, -1};
  params.host_fault = found;
  dispatch(params, params.device, context);
  if (context.explain || found[0] < 0) return;
  const std::string of = std::to_string(found[0]), value = std::to_string(found[2]);
  throw BadBlockTable(found[1] < 0
                          ? "check_block_table: seq_lens[" + of + "]=" + value + "; block_table has room for 0 to " +
                                std::to_string(params.max_pages * params.page_size) + " tokens a sequence"
                          : "check_block_table: block_table[" + of + ", " + std::to_string(found[1]) + "]=" + value +
                                "; page ids are 0 to " + std::to_string(params.num_pages - 1),
                      found[0], found[1], found[2]);
}

void kv_copy_pages(const TensorView& k_pages, const TensorView& v_pages, const TensorView& src, const TensorView& dst,
                   const ExecutionContext& context) {
  kv_copy_pages(k_pages, v_pages, KvScales{}, src, dst, context);
}

void kv_copy_pages(const TensorView& k_pages, const TensorView& v_pages, const KvScales& scales, const TensorView& src,
                   const TensorView& dst, const ExecutionContext& context) {
  const Checker check("kv_copy_pages", k_pages.device);
  KvCopyParams params;
  params.pages = check_pages(check, k_pages, v_pages, scales, true);
  params.dtype = k_pages.dtype;
  if (params.pages.quantization.packed) {  // bytes
    params.pages.head_dim = k_pages.shape[3];
    params.pages.head_dim_v = v_pages.shape[3];
  }
  params.device = check.device();
  check.index("src", src);
  check.ndim("src", src, 1, 1);
  params.count = src.shape[0];
  IndexCopies copies(check.device());
  params.src = check.index_array("src", src, params.count, copies);
  params.dst = check.index_array("dst", dst, params.count, copies);
  const std::initializer_list<NamedView> lists = {{"src", src}, {"dst", dst}};
  check.apart("k_pages", k_pages, lists);
  check.apart("v_pages", v_pages, lists);
  if (params.pages.quantization.per_token) {
    check.apart("k_scales", scales.k, lists);
    check.apart("v_scales", scales.v, lists);
  }
  check.indices_in_range("src", params.src, params.count, 0, params.pages.num_pages, "num_pages");
  check.indices_in_range("dst", params.dst, params.count, 0, params.pages.num_pages, "num_pages");
  if (params.device.is_cpu()) {
    std::vector<std::int64_t> written(static_cast<std::size_t>(params.count));
    for (std::size_t i = 0; i < written.size(); ++i) written[i] = params.dst[static_cast<std::int64_t>(i)];
    std::sort(written.begin(), written.end());
    const auto twice = std::adjacent_find(written.begin(), written.end());
    if (twice != written.end()) check.fail("dst names page " + std::to_string(*twice) + " twice; needs each page once");
    for (std::int64_t i = 0; i < params.count; ++i)
      if (std::binary_search(written.begin(), written.end(), params.src[i]))
        check.fail("src[" + std::to_string(i) + "]=" + std::to_string(params.src[i]) +
                   " is in dst too; no page may be read and written");
  }
  if (params.count == 0 && !context.explain) return;
  dispatch(params, params.device, context);
}

}  // namespace flashkernel
