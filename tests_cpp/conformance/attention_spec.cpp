// See attention_spec.hpp: from a spec to tensors and a call of the public API.
#include "conformance/attention_spec.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "flashkernel/kernels.hpp"

namespace flashkernel::conformance {
namespace {

AttentionOptions make_options(Call& call, const AttentionSpec& spec) {
  AttentionOptions options;
  options.causal = spec.mask.causal;
  options.window_left = spec.mask.left;
  options.window_right = spec.mask.right;
  options.softcap = spec.softcap;
  options.scale = spec.scale;
  if (spec.bias) {
    TestTensor& bias = call.input("bias", spec.bias->dtype, spec.bias->shape, spec.bias->layout);
    if (spec.bias->adjust) spec.bias->adjust(bias);
    options.bias = bias.view();
  }
  if (spec.bits) {
    Shape shape = spec.bits->rows;
    const std::int64_t words = (spec.seq_k + 31) / 32;
    shape.push_back(words);
    Shape rows = spec.bits->rows;
    rows.insert(rows.begin(), 3 - rows.size(), 1);
    std::vector<std::int64_t> values;
    for (std::int64_t b = 0; b < rows[0]; ++b)
      for (std::int64_t h = 0; h < rows[1]; ++h)
        for (std::int64_t i = 0; i < rows[2]; ++i)
          for (std::int64_t word = 0; word < words; ++word) {
            std::uint32_t bits = 0;  // those behind the last key count nothing, whatever they are
            for (std::int64_t j = 32 * word; j < 32 * word + 32; ++j)
              bits |= static_cast<std::uint32_t>(j >= spec.seq_k || spec.bits->shows(b, h, i, j)) << (j % 32);
            values.push_back(static_cast<std::int32_t>(bits));
          }
    const TestTensor& mask = call.indices("mask", DType::kInt32, shape, values, spec.bits->layout);
    options.mask = mask.view();
  }
  if (spec.blocks) {
    const BlocksSpec& blocks = *spec.blocks;
    const std::int64_t rows = (spec.seq_q + blocks.size_q - 1) / blocks.size_q,
                       columns = (spec.seq_k + blocks.size_k - 1) / blocks.size_k;
    std::vector<std::int64_t> values;
    for (std::int64_t b = 0; b < blocks.batch; ++b)
      for (std::int64_t h = 0; h < blocks.heads; ++h)
        for (std::int64_t row = 0; row < rows; ++row)
          for (std::int64_t column = 0; column < columns; ++column) values.push_back(blocks.entry(b, h, row, column));
    options.block_mask =
        call.indices("block_mask", DType::kUInt8, {blocks.batch, blocks.heads, rows, columns}, values, blocks.layout)
            .view();
    options.block_size_q = blocks.size_q;
    options.block_size_k = blocks.size_k;
  }
  options.alibi = spec.alibi;
  if (spec.alibi_dims) {
    const Shape shape = spec.alibi_dims == 1 ? Shape{spec.heads_q} : Shape{spec.batch, spec.heads_q};
    TestTensor& slopes = call.input("alibi_slopes", DType::kFloat32, shape);
    slopes.fill([&] { return call.random.uniform(); });
    options.alibi_slopes = slopes.view();
  }
  if (spec.sinks) options.sinks = call.input("sinks", DType::kFloat32, {spec.heads_q}).view();
  return options;
}

std::vector<std::int64_t> cumulative(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int64_t> sums(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), sums.begin() + 1);
  return sums;
}

std::int64_t longest(const std::vector<std::int64_t>& lengths) {
  return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
}

void set_used(Call& call, const VarlenSpec& spec, AttentionOptions& options) {
  const auto batch = static_cast<std::int64_t>(spec.lengths_q.size());
  if (!spec.used_q.empty())
    options.seqused_q = call.indices("seqused_q", spec.index_dtype, {batch}, spec.used_q).view();
  if (!spec.used_k.empty())
    options.seqused_k = call.indices("seqused_k", spec.index_dtype, {batch}, spec.used_k).view();
}

// Fills `out` and `lse` by `forward` on the host images with the oracle, whatever device and kernel of the backward
// pass the call is for.
template <class Forward>
void run_oracle(const Call& call, const AttentionOptions& options, TestTensor& out, TestTensor& lse,
                Forward&& forward) {
  call.compute_once({&out, &lse}, [&] {
    AttentionOptions host = options;
    for (TensorView* view :
         {&host.bias, &host.mask, &host.block_mask, &host.alibi_slopes, &host.sinks, &host.seqused_q, &host.seqused_k})
      *view = call.on_host(*view);
    const std::string before = forced_kernels();
    force_kernels("attention_fwd/cpu/scalar");
    forward([&](const TestTensor& tensor) { return call.on_host(tensor.view()); }, host);
    force_kernels(before);
  });
}

TensorView optional_view(TestTensor* tensor) { return tensor ? tensor->view() : TensorView(); }

// The backward pass's outputs and the rest of its inputs, once q, k, v, out and lse exist.
struct Backward {
  TestTensor* grad_out;
  TestTensor* grad_lse = nullptr;
  AttentionGradients gradients;
};

Backward make_backward(Call& call, const AttentionSpec& spec, const AttentionOptions& options, TestTensor& grad_out,
                       const TestTensor& q, const TestTensor& k, const TestTensor& v, const TestTensor& lse) {
  Backward backward;
  backward.grad_out = &grad_out;
  if (spec.grad_lse) backward.grad_lse = &call.input("grad_lse", DType::kFloat32, lse.shape());
  const auto gradient = [&](bool wanted, const char* name, const TestTensor& of, const Layout& layout) {
    return wanted ? call.output(name, of.dtype(), of.shape(), layout, spec.factor).view() : TensorView();
  };
  backward.gradients.q = gradient(spec.want_q, "grad_q", q, spec.layout_grad_q);
  backward.gradients.k = gradient(spec.want_k, "grad_k", k, spec.layout_grad_k);
  backward.gradients.v = gradient(spec.want_v, "grad_v", v, spec.layout_grad_v);
  if (spec.bias && spec.want_bias)
    backward.gradients.bias = call.output("grad_bias", spec.grad_bias_dtype, spec.bias->shape, {}, spec.factor).view();
  if (spec.sinks && spec.want_sinks)
    backward.gradients.sinks = call.output("grad_sinks", DType::kFloat32, {spec.heads_q}, {}, spec.factor).view();
  (void)options;
  call.bitwise_across_threads = !spec.any_order;  // gradients are deterministic on any number of threads
  call.repeats = spec.repeats;
  return backward;
}

}  // namespace

void build_attention(Call& call, const AttentionSpec& s) {
  AttentionTensors t;
  t.q = &call.input("q", s.dtype, {s.batch, s.heads_q, s.seq_q, s.head_dim}, s.layout_q);
  t.k = &call.input("k", s.dtype, {s.batch, s.heads_kv, s.seq_k, s.head_dim}, s.layout_k);
  t.v = &call.input("v", s.dtype, {s.batch, s.heads_kv, s.seq_k, s.dim_v()}, s.layout_v);
  if (s.adjust) s.adjust(t);
  const AttentionOptions options = make_options(call, s);
  TestTensor& out = call.output("out", s.dtype, {s.batch, s.heads_q, s.seq_q, s.dim_v()}, s.layout_out, s.factor);
  TestTensor* lse =
      s.lse ? &call.output("lse", DType::kFloat32, {s.batch, s.heads_q, s.seq_q}, s.layout_lse, s.factor) : nullptr;
  call.repeats = s.repeats;
  call.run = [=, &out](const ExecutionContext& context) {
    attention(t.q->view(), t.k->view(), t.v->view(), out.view(), optional_view(lse), options, context);
  };
}

void build_attention_varlen(Call& call, const VarlenSpec& spec) {
  AttentionSpec s = spec.common;
  s.batch = static_cast<std::int64_t>(spec.lengths_q.size());
  const auto cu_q = cumulative(spec.lengths_q), cu_k = cumulative(spec.lengths_k);
  AttentionTensors t;
  t.q = &call.input("q", s.dtype, {cu_q.back(), s.heads_q, s.head_dim}, s.layout_q);
  t.k = &call.input("k", s.dtype, {cu_k.back(), s.heads_kv, s.head_dim}, s.layout_k);
  t.v = &call.input("v", s.dtype, {cu_k.back(), s.heads_kv, s.dim_v()}, s.layout_v);
  if (s.adjust) s.adjust(t);
  AttentionOptions options = make_options(call, s);
  const Shape index_shape = {s.batch + 1};
  TestTensor& starts_q = call.indices("cu_seqlens_q", spec.index_dtype, index_shape, cu_q);
  TestTensor& starts_k = call.indices("cu_seqlens_k", spec.index_dtype, index_shape, cu_k);
  set_used(call, spec, options);
  // Rows that do not count stay as they are.
  const auto result = [&](const char* name, DType dtype, const Shape& shape, const Layout& layout) {
    return spec.used_q.empty() ? &call.output(name, dtype, shape, layout, s.factor)
                               : &call.in_out(name, dtype, shape, layout, s.factor);
  };
  TestTensor& out = *result("out", s.dtype, {cu_q.back(), s.heads_q, s.dim_v()}, s.layout_out);
  TestTensor* lse = s.lse ? result("lse", DType::kFloat32, {s.heads_q, cu_q.back()}, s.layout_lse) : nullptr;
  call.repeats = s.repeats;
  const std::int64_t max_q = longest(spec.lengths_q) + spec.slack, max_k = longest(spec.lengths_k) + spec.slack;
  call.run = [=, &out, &starts_q, &starts_k](const ExecutionContext& context) {
    attention_varlen(t.q->view(), t.k->view(), t.v->view(), starts_q.view(), starts_k.view(), max_q, max_k, out.view(),
                     optional_view(lse), options, context);
  };
}

void build_attention_paged(Call& call, const PagedSpec& spec) {
  AttentionSpec s = spec.common;
  s.batch = static_cast<std::int64_t>(spec.lengths.size());
  const bool varlen = !spec.lengths_q.empty();
  const auto cu_q = cumulative(spec.lengths_q);
  const std::int64_t page_size = spec.page_size;
  const auto pages_of = [&](std::int64_t length) { return (length + page_size - 1) / page_size; };
  const bool packed = is_packed(spec.pages_dtype), quantized = is_quantized(spec.pages_dtype);
  const bool int4 = spec.pages_dtype == DType::kInt4x2;
  std::int64_t used = 0;
  for (const std::int64_t length : spec.lengths) used += pages_of(length);
  const std::int64_t num_pages = used + 2;  // two belong to nobody

  AttentionTensors t;
  t.q = varlen ? &call.input("q", s.dtype, {cu_q.back(), s.heads_q, s.head_dim}, s.layout_q)
               : &call.input("q", s.dtype, {s.batch, s.heads_q, s.seq_q, s.head_dim}, s.layout_q);
  const auto pages = [&](const char* name, std::int64_t dim) -> TestTensor* {
    Layout layout = spec.layout_pages;
    if (packed) dim /= 2;                                             // bytes
    layout.offset += spec.first_page * page_size * s.heads_kv * dim;  // room for the pages before, which stay empty
    return &call.input(name, quantized || packed ? spec.pages_dtype : s.dtype, {num_pages, page_size, s.heads_kv, dim},
                       layout);
  };
  t.k = pages("k_pages", s.head_dim);
  t.v = pages("v_pages", s.dim_v());
  if (quantized) {
    const auto scales = [&](const char* name) {
      const Shape shape = spec.token_scales ? Shape{num_pages, s.heads_kv, page_size} : Shape{s.heads_kv};
      TestTensor& tensor = call.input(name, DType::kFloat32, shape, spec.token_scales ? spec.layout_scales : Layout{});
      tensor.fill([&] { return (0.5 + call.random.uniform()) / 40; });
      return &tensor;
    };
    t.k_scales = scales("k_scales");
    t.v_scales = scales("v_scales");
  }

  if (packed) {
    const auto scales = [&](const char* name, std::int64_t dim) {
      const std::int64_t group = int4 ? kInt4Group : kNvfp4Group, groups = (dim + group - 1) / group;
      const Shape shape =
          int4 ? Shape{num_pages, s.heads_kv, page_size, groups, 2} : Shape{num_pages, s.heads_kv, page_size, groups};
      TestTensor& tensor = call.input(name, int4 ? DType::kFloat16 : DType::kFloat8E4M3, shape, spec.layout_scales);
      std::int64_t at = 0;  // of int4 scales and zeros in turn
      tensor.fill([&] {
        const double x = call.random.uniform();
        return !int4 ? 0.12 + 0.25 * x : at++ % 2 == 0 ? (0.5 + x) / 8 : 0.25 - 1.5 * x;
      });
      return &tensor;
    };
    t.k_scales = scales("k_scales", s.head_dim);
    t.v_scales = scales("v_scales", s.dim_v());
  }

  // Pages in random order; columns past a sequence's last page lead nowhere, and neither do those before its window.
  std::vector<std::int64_t> free_pages(static_cast<std::size_t>(num_pages));
  std::iota(free_pages.begin(), free_pages.end(), 0);
  call.random.shuffle(free_pages);
  const std::int64_t columns = pages_of(longest(spec.lengths)) + spec.spare_columns;
  std::vector<std::int64_t> table(static_cast<std::size_t>(s.batch * columns), 0x7f000000);
  std::vector<std::int64_t> owned_tokens(static_cast<std::size_t>(num_pages), 0);
  std::int64_t shared = -1;
  for (std::int64_t b = 0; b < s.batch; ++b) {
    const std::int64_t length = spec.lengths[static_cast<std::size_t>(b)];
    const std::int64_t queries = varlen ? spec.lengths_q[static_cast<std::size_t>(b)] : s.seq_q;
    const std::int64_t start = spec.starts.empty() ? 0 : spec.starts[static_cast<std::size_t>(b)];
    const std::int64_t seen = std::max(start, s.mask.left < 0 ? 0 : length - queries - s.mask.left);  // of any query
    for (std::int64_t column = 0; column < pages_of(length); ++column) {
      std::int64_t page;
      if ((column + 1) * page_size <= seen && !spec.shared_first_page) {
        table[static_cast<std::size_t>(b * columns + column)] = column % 2 ? -1 : 0x7f000000;
        continue;
      }
      if (spec.shared_first_page && column == 0 && shared >= 0) {
        page = shared;
      } else {
        page = free_pages.back();
        free_pages.pop_back();
        if (column == 0) shared = page;
      }
      table[static_cast<std::size_t>(b * columns + column)] = page + spec.first_page;
      std::int64_t& tokens = owned_tokens[static_cast<std::size_t>(page)];
      tokens = std::max(tokens, std::min(page_size, length - column * page_size));
    }
  }
  // What no sequence owns holds NaN (even pages) or infinity (odd ones).
  for (std::int64_t page = 0; page < num_pages && !t.k->blank(); ++page)
    for (std::int64_t token = owned_tokens[static_cast<std::size_t>(page)]; token < page_size; ++token)
      for (std::int64_t h = 0; h < s.heads_kv; ++h) {
        const double poison =
            page % 2 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
        if (packed) {
          const auto spoil = [&](TestTensor& scales, std::int64_t dim) {
            const std::int64_t group = int4 ? kInt4Group : kNvfp4Group;
            for (std::int64_t g = 0; g < (dim + group - 1) / group; ++g) {
              if (int4)
                for (const int which : {0, 1}) scales.set_at({page, h, token, g, which}, poison);
              else
                scales.set_at({page, h, token, g}, std::numeric_limits<double>::quiet_NaN());
            }
          };
          spoil(*t.k_scales, s.head_dim);
          spoil(*t.v_scales, s.dim_v());
          continue;
        }
        for (std::int64_t d = 0; d < s.head_dim; ++d) t.k->set_at({page, token, h, d}, poison);
        for (std::int64_t d = 0; d < s.dim_v(); ++d) t.v->set_at({page, token, h, d}, poison);
        if (!spec.token_scales) continue;
        t.k_scales->set_at({page, h, token}, poison);
        t.v_scales->set_at({page, h, token}, poison);
      }
  // So do the keys before a sequence's first one.
  for (std::int64_t b = 0; b < s.batch && !spec.starts.empty() && !t.k->blank(); ++b)
    for (std::int64_t j = 0;
         j < std::min(spec.starts[static_cast<std::size_t>(b)], spec.lengths[static_cast<std::size_t>(b)]); ++j) {
      const std::int64_t page = table[static_cast<std::size_t>(b * columns + j / page_size)] - spec.first_page;
      if (page < 0 || page >= num_pages) continue;
      if (packed) {
        for (TestTensor* const scales : {t.k_scales, t.v_scales}) {
          if (int4)
            scales->set_at({page, 0, j % page_size, 0, 1}, std::numeric_limits<double>::infinity());
          else
            scales->set_at({page, 0, j % page_size, 0}, std::numeric_limits<double>::quiet_NaN());
        }
        continue;
      }
      t.k->set_at({page, j % page_size, 0, 0}, std::numeric_limits<double>::quiet_NaN());
      t.v->set_at({page, j % page_size, 0, 0}, std::numeric_limits<double>::infinity());
    }
  if (s.adjust) s.adjust(t);

  s.seq_k = varlen ? longest(spec.lengths_q) : s.seq_q;  // the keys that a packed mask has bits for
  AttentionOptions options = make_options(call, s);
  options.check_pages = spec.check_pages;
  if (!spec.starts.empty())
    options.k_starts = call.indices("k_starts", spec.index_dtype, {s.batch}, spec.starts).view();
  if (quantized || packed) options.kv_scales = {t.k_scales->view(), t.v_scales->view()};
  if (packed && !int4) options.kv_scales.k_tensor = 0.5f, options.kv_scales.v_tensor = 1.5f;
  const TensorView block_table =
      call.indices("block_table", DType::kInt32, {s.batch, columns}, table, {{}, {}, 3, 0, {}}).view();
  const TensorView seq_lens = call.indices("seq_lens", spec.index_dtype, {s.batch}, spec.lengths).view();
  const TensorView starts_q =
      varlen ? call.indices("cu_seqlens_q", spec.index_dtype, {s.batch + 1}, cu_q).view() : TensorView();
  const Shape out_shape =
      varlen ? Shape{cu_q.back(), s.heads_q, s.dim_v()} : Shape{s.batch, s.heads_q, s.seq_q, s.dim_v()};
  const Shape lse_shape = varlen ? Shape{s.heads_q, cu_q.back()} : Shape{s.batch, s.heads_q, s.seq_q};
  TestTensor& out = call.output("out", s.dtype, out_shape, s.layout_out, s.factor);
  TestTensor* lse = s.lse ? &call.output("lse", DType::kFloat32, lse_shape, s.layout_lse, s.factor) : nullptr;
  call.repeats = s.repeats;
  const std::int64_t max_q = varlen ? longest(spec.lengths_q) : s.seq_q;

  // The pool from page 0 on: those before first_page have addresses of their own, but are never read.
  const auto pool = [&](const TestTensor& pages) {
    TensorView view = pages.view();
    view.shape[0] += spec.first_page;
    const std::int64_t skipped = spec.first_page * view.strides[0] * static_cast<std::int64_t>(dtype_bytes(view.dtype));
    view.data = reinterpret_cast<void*>(reinterpret_cast<std::intptr_t>(view.data) - skipped);
    return view;
  };
  const TensorView k_pages = pool(*t.k), v_pages = pool(*t.v);
  call.run = [=, &out](const ExecutionContext& context) {
    attention_paged(t.q->view(), k_pages, v_pages, block_table, seq_lens, starts_q, max_q, out.view(),
                    optional_view(lse), options, context);
  };
}

void build_attention_backward(Call& call, const AttentionSpec& s) {
  AttentionTensors t;
  t.q = &call.input("q", s.dtype, {s.batch, s.heads_q, s.seq_q, s.head_dim}, s.layout_q);
  t.k = &call.input("k", s.dtype, {s.batch, s.heads_kv, s.seq_k, s.head_dim}, s.layout_k);
  t.v = &call.input("v", s.dtype, {s.batch, s.heads_kv, s.seq_k, s.dim_v()}, s.layout_v);
  TestTensor& out = call.input("out", s.dtype, {s.batch, s.heads_q, s.seq_q, s.dim_v()}, s.layout_out);
  TestTensor& lse = call.input("lse", DType::kFloat32, {s.batch, s.heads_q, s.seq_q}, s.layout_lse);
  t.grad_out = &call.input("grad_out", s.dtype, {s.batch, s.heads_q, s.seq_q, s.dim_v()}, s.layout_grad_out);
  if (s.adjust) s.adjust(t);
  const AttentionOptions options = make_options(call, s);
  run_oracle(call, options, out, lse, [&](const auto& host, const AttentionOptions& host_options) {
    attention(host(*t.q), host(*t.k), host(*t.v), host(out), host(lse), host_options);
  });
  const Backward backward = make_backward(call, s, options, *t.grad_out, *t.q, *t.k, *t.v, lse);
  call.run = [=, &out, &lse](const ExecutionContext& context) {
    attention_backward(backward.grad_out->view(), t.q->view(), t.k->view(), t.v->view(), out.view(), lse.view(),
                       optional_view(backward.grad_lse), backward.gradients, options, !s.any_order, context);
  };
}

void build_attention_varlen_backward(Call& call, const VarlenSpec& spec) {
  AttentionSpec s = spec.common;
  s.batch = static_cast<std::int64_t>(spec.lengths_q.size());
  const auto cu_q = cumulative(spec.lengths_q), cu_k = cumulative(spec.lengths_k);
  AttentionTensors t;
  t.q = &call.input("q", s.dtype, {cu_q.back(), s.heads_q, s.head_dim}, s.layout_q);
  t.k = &call.input("k", s.dtype, {cu_k.back(), s.heads_kv, s.head_dim}, s.layout_k);
  t.v = &call.input("v", s.dtype, {cu_k.back(), s.heads_kv, s.dim_v()}, s.layout_v);
  TestTensor& out = call.input("out", s.dtype, {cu_q.back(), s.heads_q, s.dim_v()}, s.layout_out);
  TestTensor& lse = call.input("lse", DType::kFloat32, {s.heads_q, cu_q.back()}, s.layout_lse);
  t.grad_out = &call.input("grad_out", s.dtype, {cu_q.back(), s.heads_q, s.dim_v()}, s.layout_grad_out);
  if (s.adjust) s.adjust(t);
  AttentionOptions options = make_options(call, s);
  const TensorView starts_q = call.indices("cu_seqlens_q", spec.index_dtype, {s.batch + 1}, cu_q).view();
  const TensorView starts_k = call.indices("cu_seqlens_k", spec.index_dtype, {s.batch + 1}, cu_k).view();
  set_used(call, spec, options);
  const std::int64_t max_q = longest(spec.lengths_q) + spec.slack, max_k = longest(spec.lengths_k) + spec.slack;
  run_oracle(call, options, out, lse, [&](const auto& host, const AttentionOptions& host_options) {
    attention_varlen(host(*t.q), host(*t.k), host(*t.v), call.on_host(starts_q), call.on_host(starts_k), max_q, max_k,
                     host(out), host(lse), host_options);
  });
  const Backward backward = make_backward(call, s, options, *t.grad_out, *t.q, *t.k, *t.v, lse);
  call.run = [=, &out, &lse](const ExecutionContext& context) {
    attention_varlen_backward(backward.grad_out->view(), t.q->view(), t.k->view(), t.v->view(), out.view(), lse.view(),
                              optional_view(backward.grad_lse), starts_q, starts_k, max_q, max_k, backward.gradients,
                              options, !s.any_order, context);
  };
}

void paged_variants(const PagedSpec& base, const std::vector<std::int64_t>& queries,
                    const std::function<void(const std::string&, const PagedSpec&)>& add) {
  for (const std::int64_t count : queries) {
    PagedSpec spec = base;
    spec.common.seq_q = count;
    for (const Mask& mask : {kFull, kCausal, Mask{"left40_right1", false, 40, 1}}) {
      spec.common.mask = mask;
      add("queries" + std::to_string(count) + "_" + mask.name, spec);
    }
  }
  // One sequence cut by every border between blocks; many in one block; more than 32 (a warp reads 32 lengths at a
  // time).
  PagedSpec spec = base;
  spec.lengths = {5000};
  add("one_long", spec);
  spec.lengths.clear();
  for (int b = 0; b < 70; ++b) spec.lengths.push_back(b % 7 == 3 ? 90 + b : b % 5);
  add("70_sequences", spec);
  spec = base;
  spec.common.softcap = 3;
  spec.common.alibi_dims = 2;
  spec.common.sinks = true;
  spec.common.seq_q = 2;
  spec.common.mask = kCausal;
  add("features", spec);
  spec = base;
  spec.common.scale = -0.3f;  // the largest product is not the largest score
  add("negative_scale", spec);
  spec.common.scale = 30.0f;  // a row's sum is one term
  add("large_scores", spec);
}

}  // namespace flashkernel::conformance
