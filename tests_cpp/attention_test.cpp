// The front doors of attention: what they refuse, in which words, and that nothing is written; and what they promise of
// results: LSE in natural units, parts merged equal the whole, shapes of 2 and 3 dims, empty inputs.
#include "flashkernel/attention.hpp"

#include <gtest/gtest.h>

#include <optional>

#include "flashkernel/error.hpp"
#include "flashkernel/kernels.hpp"
#include "test_tensor.hpp"

namespace flashkernel {
namespace {

using namespace testing;

struct Dense {
  explicit Dense(DType dtype = DType::kFloat32)
      : q(dtype, {2, 4, 3, 8}),
        k(dtype, {2, 2, 5, 8}),
        v(dtype, {2, 2, 5, 6}),
        out(dtype, {2, 4, 3, 6}),
        lse(DType::kFloat32, {2, 4, 3}) {
    q.random(1);
    k.random(2);
    v.random(3);
    out.fill(kNaN);
    lse.fill(kNaN);
  }
  TestTensor q, k, v, out, lse;
};

TensorView with_shape(TensorView view, std::initializer_list<std::int64_t> shape) {
  return TensorView(view.data, view.dtype, shape);
}
TensorView as_dtype(TensorView view, DType dtype) {
  view.dtype = dtype;
  return view;
}

TEST(AttentionTest, RefusesTensorsThatDisagree) {
  Dense t;
  const auto refused = [&](const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
                           const TensorView& lse, const std::vector<std::string>& fragments) {
    expect_refused<InvalidArgument>([&] { attention(q, k, v, out, lse); }, "attention", fragments,
                                    {&t.q, &t.k, &t.v, &t.out, &t.lse});
  };
  refused({}, t.k, t.v, t.out, t.lse, {"q is absent", "required"});
  refused(t.q, {}, t.v, t.out, t.lse, {"k is absent"});
  refused(t.q, t.k, t.v, {}, t.lse, {"out is absent"});
  refused(as_dtype(t.q, DType::kInt32), t.k, t.v, t.out, t.lse, {"q is int32", "needs float32, float16 or bfloat16"});
  refused(t.q, as_dtype(t.k, DType::kFloat16), t.v, t.out, t.lse, {"k is float16 but q is float32", "match"});
  refused(t.q, t.k, t.v, as_dtype(t.out, DType::kBFloat16), t.lse, {"out is bfloat16 but q is float32"});
  refused(t.q, t.k, t.v, t.out, as_dtype(t.lse, DType::kFloat16), {"lse is float16", "needs float32"});
  refused(t.q, with_shape(t.k, {2, 2, 5, 7}), t.v, t.out, t.lse, {"k.shape[3]=7 but q.shape[3]=8", "head dims"});
  refused(t.q, with_shape(t.k, {2, 2, 4, 8}), t.v, t.out, t.lse, {"v.shape[2]=5 but k.shape[2]=4", "lengths"});
  refused(t.q, with_shape(t.k, {1, 2, 5, 8}), t.v, t.out, t.lse, {"k.shape[0]=1 but q.shape[0]=2"});
  refused(t.q, t.k, with_shape(t.v, {2, 1, 5, 6}), t.out, t.lse, {"v.shape[1]=1 but k.shape[1]=2"});
  refused(with_shape(t.q, {2, 3, 3, 8}), t.k, t.v, t.out, t.lse, {"k.shape[1]=2 but q.shape[1]=3", "multiple"});
  refused(t.q, with_shape(t.k, {2, 0, 5, 8}), with_shape(t.v, {2, 0, 5, 6}), t.out, t.lse,
          {"k.shape[1]=0", "multiple"});
  refused(with_shape(t.q, {4, 3, 8}), t.k, t.v, t.out, t.lse, {"k is float32[2, 2, 5, 8] on cpu; needs 3 dims"});
  refused(with_shape(t.q, {8}), t.k, t.v, t.out, t.lse, {"q is float32[8] on cpu; needs 2 to 4 dims"});
  refused(t.q, t.k, t.v, with_shape(t.out, {2, 4, 2, 6}), t.lse, {"out.shape[2]=2 but q.shape[2]=3"});
  refused(t.q, t.k, t.v, with_shape(t.out, {2, 4, 3, 5}), t.lse, {"out.shape[3]=5 but v.shape[3]=6"});
  refused(t.q, t.k, t.v, t.out, with_shape(t.lse, {2, 4, 2}), {"lse.shape[2]=2 but q.shape[2]=3"});
  refused(t.q, t.k, t.v, t.out, with_shape(t.lse, {2, 4, 3, 1}), {"lse is float32[2, 4, 3, 1] on cpu; needs 3 dims"});
  refused(with_shape(t.q, {2, 4, 3, 0}), with_shape(t.k, {2, 2, 5, 0}), t.v, t.out, t.lse,
          {"q.shape[3]=0", "1 to 512"});
  TensorView other = t.k;
  other.device = Device::cuda(1);
  refused(t.q, other, t.v, t.out, t.lse, {"k is on cuda:1", "needs cpu"});
  other = t.k;
  other.data = nullptr;
  refused(t.q, other, t.v, t.out, t.lse, {"k has 160 elements but a null pointer"});
  other = t.k;
  other.data = static_cast<char*>(other.data) + 1;
  refused(t.q, other, t.v, t.out, t.lse, {"k is not aligned"});
}

TEST(AttentionTest, RefusesHeadDimsOver512) {
  TestTensor q(DType::kFloat32, {1, 1, 2, 513}), v(DType::kFloat32, {1, 1, 2, 8}), out(DType::kFloat32, {1, 1, 2, 8});
  expect_refused<InvalidArgument>([&] { attention(q, q, v, out, {}); }, "attention", {"q.shape[3]=513", "1 to 512"},
                                  {&out});
  expect_refused<InvalidArgument>([&] { attention(v, v, q, q, {}); }, "attention", {"v.shape[3]=513", "1 to 512"},
                                  {&q});
}

TEST(AttentionTest, RefusesLayoutsItCannotReadOrWrite) {
  Dense t;
  TestTensor reversed(DType::kFloat32, {2, 2, 5, 8}, Layout::kReversed);
  expect_refused<InvalidArgument>([&] { attention(t.q, reversed, t.v, t.out, t.lse); }, "attention",
                                  {"k.stride[3]=", "contiguous"}, {&t.out, &t.lse});
  TensorView expanded = t.out;
  expanded.strides[1] = 0;
  expect_refused<InvalidArgument>([&] { attention(t.q, t.k, t.v, expanded, t.lse); }, "attention",
                                  {"out.stride[1]=0", "overlap"}, {&t.out, &t.lse});
  expanded = t.lse;
  expanded.strides[0] = 0;
  expect_refused<InvalidArgument>([&] { attention(t.q, t.k, t.v, t.out, expanded); }, "attention", {"lse.stride[0]=0"},
                                  {&t.out, &t.lse});
  TestTensor same(DType::kFloat32, {2, 4, 3, 8});
  TestTensor k(DType::kFloat32, {2, 2, 5, 8});
  expect_refused<InvalidArgument>([&] { attention(same, k, k, same, {}); }, "attention", {"out shares memory with q"},
                                  {&same});
  TensorView inside = with_shape(t.lse, {2, 4, 3});
  inside.data = static_cast<float*>(t.out.view().data) + 4;
  expect_refused<InvalidArgument>([&] { attention(t.q, t.k, t.v, t.out, inside); }, "attention",
                                  {"out shares memory with lse"}, {&t.out});
}

TEST(AttentionTest, RefusesOptionsOutOfRange) {
  Dense t;
  const auto refused = [&](const AttentionOptions& options, const std::vector<std::string>& fragments) {
    expect_refused<InvalidArgument>([&] { attention(t.q, t.k, t.v, t.out, t.lse, options); }, "attention", fragments,
                                    {&t.out, &t.lse});
  };
  AttentionOptions options;
  options.window_left = -2;
  refused(options, {"window_left=-2", "-1"});
  options = {};
  options.window_right = -7;
  refused(options, {"window_right=-7"});
  for (const double softcap : {-1.0, kNaN, kInf}) {
    options = {};
    options.softcap = static_cast<float>(softcap);
    refused(options, {"softcap=", "finite"});
  }
  for (const double scale : {kNaN, kInf}) {
    options = {};
    options.scale = static_cast<float>(scale);
    refused(options, {"scale=", "finite"});
  }
  TestTensor wide(DType::kFloat32, {2, 4, 3, 5}), half(DType::kFloat16, {2, 4, 3, 5}), odd(DType::kFloat32, {4}),
      five(DType::kFloat32, {1, 1, 1, 1, 5});
  options = {};
  options.bias = odd;
  refused(options, {"bias.shape[0]=4", "needs 1 or 5", "broadcast"});
  options.bias = half;
  refused(options, {"bias is float16", "needs float32 or q's dtype"});
  options.bias = five;
  refused(options, {"bias is float32[", "] on cpu; needs 0 to 4 dims"});
  options = {};
  TestTensor slopes(DType::kFloat32, {2, 3}), three(DType::kFloat32, {3});
  options.alibi_slopes = three;
  refused(options, {"alibi_slopes.shape[0]=3", "number of query heads=4"});
  options.alibi_slopes = slopes;
  refused(options, {"alibi_slopes.shape[1]=3"});
  options.alibi_slopes = wide;
  refused(options, {"alibi_slopes is float32[", "] on cpu; needs 1 to 2 dims"});
  options = {};
  options.sinks = three;
  refused(options, {"sinks.shape[0]=3", "4"});
  TestTensor half_sinks(DType::kFloat16, {4});
  options.sinks = half_sinks;
  refused(options, {"sinks is float16", "needs float32"});
}

struct Varlen {
  Varlen()
      : q(DType::kFloat32, {9, 2, 8}),
        k(DType::kFloat32, {7, 2, 8}),
        out(DType::kFloat32, {9, 2, 8}),
        lse(DType::kFloat32, {2, 9}) {
    q.random(1);
    k.random(2);
  }
  TestTensor q, k, out, lse;
};

TEST(AttentionTest, VarlenRefusesLengthsThatDisagree) {
  Varlen t;
  const auto refused = [&](const std::vector<double>& q, const std::vector<double>& k, std::int64_t max_q,
                           std::int64_t max_k, const std::vector<std::string>& fragments) {
    TestTensor cu_q(DType::kInt32, {static_cast<std::int64_t>(q.size())}),
        cu_k(DType::kInt64, {static_cast<std::int64_t>(k.size())});
    cu_q.fill(q);
    cu_k.fill(k);
    expect_refused<InvalidArgument>([&] { attention_varlen(t.q, t.k, t.k, cu_q, cu_k, max_q, max_k, t.out, t.lse); },
                                    "attention_varlen", fragments, {&t.out, &t.lse});
  };
  refused({1, 5, 9}, {0, 3, 7}, 5, 4, {"cu_seqlens_q[0]=1", "start at 0"});
  refused({0, 5, 3}, {0, 3, 7}, 5, 4, {"cu_seqlens_q[2]=3 but cu_seqlens_q[1]=5", "must not decrease"});
  refused({0, 5, 8}, {0, 3, 7}, 5, 4, {"cu_seqlens_q[2]=8 but q.shape[0]=9"});
  refused({0, 5, 10}, {0, 3, 7}, 5, 4, {"cu_seqlens_q[2]=10 but q.shape[0]=9"});
  refused({0, 5, 9}, {0, 3, 6}, 5, 4, {"cu_seqlens_k[2]=6 but k.shape[0]=7"});
  refused({0, 5, 9}, {0, 7}, 5, 7, {"cu_seqlens_k.shape[0]=2", "needs 3"});
  refused({0, 5, 9}, {0, 3, 7}, 4, 4, {"a length of 5 but max_seqlen_q=4", "bound"});
  refused({0, 5, 9}, {0, 3, 7}, 5, 3, {"a length of 4 but max_seqlen_k=3"});
  refused({0, 5, 9}, {0, 3, 7}, -1, 3, {"max_seqlen_q=-1", "negative"});
  refused({}, {}, 5, 4, {"cu_seqlens_q.shape[0]=0", "at least one"});

  TestTensor cu(DType::kInt32, {3}), cu_k(DType::kInt32, {3}), wrong(DType::kFloat32, {3}), bias(DType::kFloat32, {1});
  cu.fill({0, 5, 9});
  cu_k.fill({0, 3, 7});
  expect_refused<InvalidArgument>([&] { attention_varlen(t.q, t.k, t.k, wrong, cu_k, 5, 4, t.out, t.lse); },
                                  "attention_varlen", {"cu_seqlens_q is float32", "int32 or int64"}, {&t.out, &t.lse});
  AttentionOptions options;
  options.bias = bias;
  expect_refused<InvalidArgument>([&] { attention_varlen(t.q, t.k, t.k, cu, cu_k, 5, 4, t.out, t.lse, options); },
                                  "attention_varlen", {"bias is given", "dense attention only"}, {&t.out, &t.lse});
  expect_refused<InvalidArgument>(
      [&] {
        attention_varlen(t.q, t.k, t.k, cu, cu_k, 5, 4, t.out, with_shape(t.lse, {9, 2}));
      },
      "attention_varlen", {"lse.shape[0]=9 but q.shape[1]=2"}, {&t.out, &t.lse});
}

TEST(AttentionTest, PagedRefusesTablesThatLeadNowhere) {
  TestTensor q(DType::kFloat32, {2, 2, 1, 8}), pages(DType::kFloat32, {6, 16, 1, 8}),
      out(DType::kFloat32, {2, 2, 1, 8}), table(DType::kInt32, {2, 3}), lens(DType::kInt32, {2});
  q.random(1);
  pages.random(2);
  const auto refused = [&](const std::vector<double>& ids, const std::vector<double>& lengths,
                           const std::vector<std::string>& fragments) {
    table.fill(ids);
    lens.fill(lengths);
    expect_refused<InvalidArgument>([&] { attention_paged(q, pages, pages, table, lens, {}, 0, out, {}); },
                                    "attention_paged", fragments, {&out});
  };
  refused({0, 1, 6, 3, 4, 5}, {33, 48}, {"block_table[0, 2]=6", "0 to 5"});
  refused({0, 1, 2, -1, 4, 5}, {33, 48}, {"block_table[1, 0]=-1"});
  refused({0, 1, 2, 3, 4, 5}, {49, 48}, {"seq_lens[0]=49", "room for 0 to 48"});
  refused({0, 1, 2, 3, 4, 5}, {3, -1}, {"seq_lens[1]=-1"});
  table.fill({0, 99, -5, 3, 4, 99});  // past the lengths a table may hold anything
  lens.fill({16, 32});
  EXPECT_NO_THROW(attention_paged(q, pages, pages, table, lens, {}, 0, out, {}));

  TestTensor wide(DType::kInt64, {2, 3}), short_lens(DType::kInt32, {3}), one_row(DType::kInt32, {1, 3});
  expect_refused<InvalidArgument>([&] { attention_paged(q, pages, pages, wide, lens, {}, 0, out, {}); },
                                  "attention_paged", {"block_table is int64", "needs int32"}, {&out});
  expect_refused<InvalidArgument>([&] { attention_paged(q, pages, pages, table, short_lens, {}, 0, out, {}); },
                                  "attention_paged", {"seq_lens.shape[0]=3", "needs 2"}, {&out});
  expect_refused<InvalidArgument>([&] { attention_paged(q, pages, pages, one_row, lens, {}, 0, out, {}); },
                                  "attention_paged", {"block_table.shape[0]=1", "2 sequences"}, {&out});
  expect_refused<InvalidArgument>(
      [&] {
        attention_paged(q, with_shape(pages, {6, 0, 1, 8}), with_shape(pages, {6, 0, 1, 8}), table, lens, {}, 0, out,
                        {});
      },
      "attention_paged", {"k_pages.shape[1]=0", "at least one token"}, {&out});
  expect_refused<InvalidArgument>(
      [&] {
        attention_paged(q, pages, with_shape(pages, {6, 8, 2, 8}), table, lens, {}, 0, out, {});
      },
      "attention_paged", {"v_pages.shape[1]=8 but k_pages.shape[1]=16"}, {&out});
}

TEST(AttentionTest, RefusesBoundsOfSequencesThatDoNotFit) {
  Varlen t;
  TestTensor cu_q(DType::kInt32, {3}), cu_k(DType::kInt32, {3}), used(DType::kInt64, {2}), three(DType::kInt32, {3}),
      floats(DType::kFloat32, {2});
  cu_q.fill({0, 5, 9}), cu_k.fill({0, 3, 7}), used.fill({1, -2}), three.fill({1, 1, 1});
  const auto varlen = [&](const AttentionOptions& options, const std::vector<std::string>& fragments) {
    expect_refused<InvalidArgument>([&] { attention_varlen(t.q, t.k, t.k, cu_q, cu_k, 5, 4, t.out, t.lse, options); },
                                    "attention_varlen", fragments, {&t.out, &t.lse});
  };
  AttentionOptions options;
  options.seqused_q = used;
  varlen(options, {"seqused_q[1]=-2", "negative"});
  options.seqused_q = {}, options.seqused_k = three;
  varlen(options, {"seqused_k.shape[0]=3", "needs 2"});
  options.seqused_k = floats;
  varlen(options, {"seqused_k is float32", "int32 or int64"});
  options = {};
  options.k_starts = used;
  varlen(options, {"k_starts is given", "paged attention only"});
  options = {};
  options.seqused_q = with_shape(cu_q, {2});
  options.seqused_q.data = t.out.view().data;
  varlen(options, {"out shares memory with seqused_q"});

  Dense d;
  for (TensorView AttentionOptions::*bound : {&AttentionOptions::seqused_q, &AttentionOptions::seqused_k}) {
    options = {};
    options.*bound = used;
    expect_refused<InvalidArgument>([&] { attention(d.q, d.k, d.v, d.out, d.lse, options); }, "attention",
                                    {"seqused_", "is given", "variable lengths only"}, {&d.out, &d.lse});
  }
  TestTensor q(DType::kFloat32, {2, 2, 1, 8}), pages(DType::kFloat32, {6, 16, 1, 8}),
      out(DType::kFloat32, {2, 2, 1, 8}), table(DType::kInt32, {2, 3}), lens(DType::kInt32, {2});
  q.random(1), pages.random(2), table.fill({0, 1, 2, 3, 4, 5}), lens.fill({33, 48});
  options = {};
  options.k_starts = used;
  expect_refused<InvalidArgument>([&] { attention_paged(q, pages, pages, table, lens, {}, 0, out, {}, options); },
                                  "attention_paged", {"k_starts[1]=-2", "negative"}, {&out});
  used.fill({17, 99});                 // past the end of a sequence: no key is seen
  table.fill({-1, 1, 2, -1, -1, -1});  // and pages before the first key are not looked at
  attention_paged(q, pages, pages, table, lens, {}, 0, out, {}, options);
  for (std::int64_t i = 0; i < 16; ++i) EXPECT_NE(out[i], 0.0) << i;
  for (std::int64_t i = 16; i < 32; ++i) EXPECT_EQ(out[i], 0.0) << i;
  options = {};
  options.seqused_k = used;
  expect_refused<InvalidArgument>([&] { attention_paged(q, pages, pages, table, lens, {}, 0, out, {}, options); },
                                  "attention_paged", {"seqused_k is given", "variable lengths only"}, {&out});
}

TEST(AttentionTest, BackwardRefusesGradientsThatDisagree) {
  Dense t;
  attention(t.q, t.k, t.v, t.out, t.lse);
  TestTensor grad_out(DType::kFloat32, {2, 4, 3, 6}), grad_q(DType::kFloat32, {2, 4, 3, 8}),
      grad_k(DType::kFloat32, {2, 2, 5, 8});
  grad_out.random(4);
  const auto refused = [&](const TensorView& go, const TensorView& lse, const TensorView& grad_lse,
                           const AttentionGradients& gradients, const std::vector<std::string>& fragments) {
    expect_refused<InvalidArgument>([&] { attention_backward(go, t.q, t.k, t.v, t.out, lse, grad_lse, gradients); },
                                    "attention_backward", fragments, {&grad_q, &grad_k, &t.out, &t.lse});
  };
  AttentionGradients gradients;
  gradients.q = grad_q;
  gradients.k = grad_k;
  refused({}, t.lse, {}, gradients, {"grad_out is absent"});
  refused(grad_out, {}, {}, gradients, {"lse is absent"});
  refused(with_shape(grad_out, {2, 4, 2, 6}), t.lse, {}, gradients, {"grad_out.shape[2]=2 but out.shape[2]=3"});
  refused(as_dtype(grad_out, DType::kFloat16), t.lse, {}, gradients, {"grad_out is float16", "needs float32"});
  refused(grad_out, t.lse, with_shape(t.lse, {2, 4, 1}), gradients, {"grad_lse.shape[2]=1 but lse.shape[2]=3"});
  gradients.q = with_shape(grad_q, {2, 4, 3, 4});
  refused(grad_out, t.lse, {}, gradients, {"grad_q.shape[3]=4 but q.shape[3]=8"});
  gradients.q = t.q;
  refused(grad_out, t.lse, {}, gradients, {"grad_q shares memory with q"});
  gradients.q = grad_q;
  gradients.k = with_shape(grad_q, {2, 2, 5, 8});
  refused(grad_out, t.lse, {}, gradients, {"grad_k shares memory with grad_q"});
  gradients.k = grad_k;
  gradients.bias = t.lse;
  refused(grad_out, t.lse, {}, gradients, {"grad_bias is given but bias is absent"});
  gradients.bias = {};
  TestTensor grad_sinks(DType::kFloat32, {4});
  gradients.sinks = grad_sinks;
  refused(grad_out, t.lse, {}, gradients, {"grad_sinks is given but sinks is absent"});
}

TEST(AttentionTest, MergeRefusesPartsThatDisagree) {
  TestTensor a(DType::kFloat32, {3, 4}), b(DType::kFloat32, {3, 4}), out(DType::kFloat32, {3, 4}),
      lse_a(DType::kFloat32, {3}), lse_b(DType::kFloat32, {3}), lse(DType::kFloat32, {3});
  const auto refused = [&](const TensorView& oa, const TensorView& la, const TensorView& ob, const TensorView& lb,
                           const TensorView& o, const TensorView& l, const std::vector<std::string>& fragments) {
    expect_refused<InvalidArgument>([&] { merge_states(oa, la, ob, lb, o, l); }, "merge_states", fragments,
                                    {&out, &lse, &b, &lse_b});
  };
  refused({}, lse_a, b, lse_b, out, lse, {"out_a is absent"});
  refused(a, lse_a, with_shape(b, {2, 4}), lse_b, out, lse, {"out_b.shape[0]=2 but out_a.shape[0]=3"});
  refused(a, with_shape(lse_a, {2}), b, lse_b, out, lse, {"lse_a.shape[0]=2 but out_a.shape[0]=3"});
  refused(a, lse_a, b, lse_b, b, lse, {"out shares memory with out_b"});
  refused(a, lse_a, b, lse_b, out, lse_b, {"lse shares memory with lse_b"});
  TensorView shifted = with_shape(a, {2, 4});
  shifted.data = static_cast<float*>(shifted.data) + 4;
  refused(with_shape(a, {2, 4}), with_shape(lse_a, {2}), with_shape(b, {2, 4}), with_shape(lse_b, {2}), shifted,
          with_shape(lse, {2}), {"out shares memory with out_a"});
  // Parts in one tensor.
  refused(a, lse_a, {}, lse_b, out, lse, {"out_b is absent"});
  refused(lse_a, {}, {}, {}, out, lse, {"out_a is float32[3] on cpu", "needs 2 to 5 dims"});
  refused(a, lse_a, {}, {}, out, lse, {"out is float32[3, 4] on cpu", "needs 1 dim"});
  refused(a, lse_a, {}, {}, with_shape(out, {4}), lse, {"lse is float32[3] on cpu", "needs 0 dims"});
  refused(a, lse_a, {}, {}, with_shape(a, {4}), {}, {"out shares memory with out_a"});
  TestTensor half(DType::kFloat16, {3, 4});
  refused(half, lse_a, half, lse_b, out, lse, {"out is float32", "float16"});
}

TEST(AttentionTest, LseIsInNaturalUnits) {
  // One query, two keys with scores ln 1 and ln 3: LSE is ln 4, whatever base a kernel works in.
  TestTensor q(DType::kFloat32, {1, 1}), k(DType::kFloat32, {2, 1}), v(DType::kFloat32, {2, 1}),
      out(DType::kFloat32, {1, 1}), lse(DType::kFloat32, {1});
  q.fill(1);
  k.fill({0.0, std::log(3.0)});
  v.fill({4.0, 8.0});
  AttentionOptions options;
  options.scale = 1.0f;
  attention(q, k, v, out, lse, options);
  EXPECT_NEAR(lse[0], std::log(4.0), 1e-6);
  EXPECT_NEAR(out[0], 7.0, 1e-5);
}

TEST(AttentionTest, MergedPartsEqualTheWhole) {
  const std::int64_t n = 90;
  TestTensor q(DType::kFloat32, {2, 7, 16}), k(DType::kFloat32, {2, n, 16}), v(DType::kFloat32, {2, n, 16});
  q.random(1);
  k.random(2);
  v.random(3);
  TestTensor whole(DType::kFloat32, {2, 7, 16}), whole_lse(DType::kFloat32, {2, 7});
  attention(q, k, v, whole, whole_lse);
  const auto keys = [&](const TestTensor& all, std::int64_t begin, std::int64_t end) {
    TensorView part = all;
    part.data = static_cast<float*>(part.data) + begin * 16;
    part.shape[1] = end - begin;
    return part;
  };
  TestTensor sum(DType::kFloat32, {2, 7, 16}), sum_lse(DType::kFloat32, {2, 7}), part(DType::kFloat32, {2, 7, 16}),
      part_lse(DType::kFloat32, {2, 7});
  sum.fill(kNaN);
  sum_lse.fill(-kInf);  // nothing yet: what lies there is not read
  for (const auto& [begin, end] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 1}, {1, 40}, {40, 40}, {40, n}}) {
    attention(q, keys(k, begin, end), keys(v, begin, end), part, part_lse);
    merge_states(sum, sum_lse, part, part_lse, sum, sum_lse);
  }
  expect_close(sum, whole.values(), 1e-5, "out");
  expect_close(sum_lse, whole_lse.values(), 1e-5, "lse");
}

TEST(AttentionTest, FewerDimsMeanLeadingOnes) {
  TestTensor q(DType::kFloat32, {1, 1, 6, 8}), k(DType::kFloat32, {1, 1, 9, 8}), out(DType::kFloat32, {1, 1, 6, 8}),
      lse(DType::kFloat32, {1, 1, 6});
  q.random(1);
  k.random(2);
  attention(q, k, k, out, lse);
  TestTensor out2(DType::kFloat32, {6, 8}), lse2(DType::kFloat32, {6});
  attention(with_shape(q, {6, 8}), with_shape(k, {9, 8}), with_shape(k, {9, 8}), out2, lse2);
  EXPECT_EQ(out.values(), out2.values());
  EXPECT_EQ(lse.values(), lse2.values());
  attention(with_shape(q, {1, 6, 8}), with_shape(k, {1, 9, 8}), with_shape(k, {1, 9, 8}), with_shape(out2, {1, 6, 8}),
            with_shape(lse2, {1, 6}));
  EXPECT_EQ(out.values(), out2.values());
}

TEST(AttentionTest, NothingToDoWritesNothing) {
  TestTensor q(DType::kFloat32, {2, 2, 0, 8}), k(DType::kFloat32, {2, 2, 4, 8}), lse(DType::kFloat32, {2, 2, 0});
  EXPECT_NO_THROW(attention(q, k, k, q, lse));
  TestTensor none(DType::kFloat32, {0, 2, 4, 8});
  EXPECT_NO_THROW(attention(none, none, none, none, {}));
  AttentionGradients nothing_wanted;
  Dense t;
  attention(t.q, t.k, t.v, t.out, t.lse);
  EXPECT_NO_THROW(attention_backward(t.out, t.q, t.k, t.v, t.out, t.lse, {}, nothing_wanted));
}

TEST(AttentionTest, BackwardWithoutQueriesWritesZeros) {
  TestTensor q(DType::kFloat32, {1, 2, 0, 8}), k(DType::kFloat32, {1, 2, 4, 8}), lse(DType::kFloat32, {1, 2, 0}),
      grad_k(DType::kFloat32, {1, 2, 4, 8});
  k.random(1);
  grad_k.fill(kNaN);
  AttentionGradients gradients;
  gradients.k = grad_k;
  attention_backward(q, q, k, k, q, lse, {}, gradients);
  EXPECT_EQ(grad_k.values(), std::vector<double>(64, 0.0));
}

TEST(AttentionTest, WindowBoundsOfAnySizeAreSafe) {
  Dense t;
  AttentionOptions options;
  TestTensor expected(DType::kFloat32, {2, 4, 3, 6});
  attention(t.q, t.k, t.v, expected, {});
  options.window_left = options.window_right = std::numeric_limits<std::int64_t>::max();
  attention(t.q, t.k, t.v, t.out, t.lse, options);
  EXPECT_EQ(t.out.values(), expected.values());
}

TEST(AttentionTest, DecodingWithCausalIsNoMask) {
  TestTensor q(DType::kFloat32, {2, 1, 8}), k(DType::kFloat32, {2, 30, 8}), full(DType::kFloat32, {2, 1, 8}),
      causal(DType::kFloat32, {2, 1, 8});
  q.random(1);
  k.random(2);
  AttentionOptions options;
  attention(q, k, k, full, {});
  options.causal = true;
  attention(q, k, k, causal, {}, options);
  EXPECT_EQ(full.values(), causal.values());
}

// The same sequence gives the same bits whoever shares its batch.
TEST(AttentionTest, BatchMatesLeaveNoTrace) {
  for (const std::int64_t seq_q : {1, 40}) {
    TestTensor q(DType::kFloat32, {3, 2, seq_q, 64}), k(DType::kFloat32, {3, 2, 333, 64}),
        out(DType::kFloat32, {3, 2, seq_q, 64});
    std::vector<std::vector<double>> results;
    for (const std::uint64_t seed : {1, 7}) {
      q.random(seed);
      k.random(seed + 1);
      std::mt19937_64 engine(99);  // batch entry 1 is the same in both rounds
      std::normal_distribution<double> normal;
      for (std::int64_t i = 0; i < 2 * seq_q * 64; ++i) q.set(2 * seq_q * 64 + i, normal(engine));
      for (std::int64_t i = 0; i < 2 * 333 * 64; ++i) k.set(2 * 333 * 64 + i, normal(engine));
      attention(q, k, k, out, {});
      const auto all = out.values();
      results.emplace_back(all.begin() + 2 * seq_q * 64, all.begin() + 4 * seq_q * 64);
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

}  // namespace
}  // namespace flashkernel
