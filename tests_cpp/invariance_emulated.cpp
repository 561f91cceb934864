// The invariant mode on the emulated GPU: a row's bits among other rows, in chunks, in pages, decoded. Python's
// tests_py/test_invariant_property.py asks the same of real devices, of many more problems.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "conformance/test_tensor.hpp"
#include "flashkernel/attention.hpp"
#include "flashkernel/invariant.hpp"
#include "flashkernel/linear.hpp"
#include "flashkernel/loss.hpp"
#include "flashkernel/norm.hpp"
#include "flashkernel/reduce.hpp"

namespace flashkernel {
namespace {

using conformance::Random;
using conformance::Shape;
using conformance::TestTensor;

const Device kGpu = Device::cuda(0);
constexpr DType kFloats[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

TestTensor make(const char* name, DType dtype, const Shape& shape) {
  TestTensor tensor(name, dtype, shape, {}, kGpu);
  tensor.upload();
  return tensor;
}

/// Some runs of 16 numbers are twenty times as large: maxima of rows move as their keys are walked.
TestTensor random(const char* name, DType dtype, const Shape& shape, std::uint64_t seed, double large = 0.0) {
  TestTensor tensor(name, dtype, shape, {}, kGpu);
  Random numbers(seed);
  std::int64_t at = 0;
  double factor = 1.0;
  tensor.fill([&] {
    if (at++ % 16 == 0) factor = numbers.uniform() < large ? 20.0 : 1.0;
    return factor * numbers.normal();
  });
  tensor.upload();
  return tensor;
}

TestTensor integers(const char* name, const std::vector<std::int64_t>& values) {
  TestTensor tensor(name, DType::kInt32, {static_cast<std::int64_t>(values.size())}, {}, kGpu);
  for (std::size_t i = 0; i < values.size(); ++i)
    tensor.set(static_cast<std::int64_t>(i), static_cast<double>(values[i]));
  tensor.upload();
  return tensor;
}

/// Rows [first, first + count) of a matrix, or of [rows, ...].
TensorView rows_of(const TestTensor& tensor, std::int64_t first, std::int64_t count) {
  TensorView view = tensor.view();
  view.data =
      static_cast<char*>(view.data) + first * view.strides[0] * static_cast<std::int64_t>(dtype_bytes(view.dtype));
  view.shape[0] = count;
  return view;
}

/// [tokens, heads, dim] as [1, heads, tokens, dim].
TensorView heads_first(const TensorView& x) {
  return TensorView(x.data, x.dtype, {1, x.shape[1], x.shape[0], x.shape[2]},
                    {x.shape[0] * x.strides[0], x.strides[1], x.strides[0], 1}, kGpu);
}

void expect_same(TestTensor& got, std::int64_t got_row, TestTensor& want, std::int64_t want_row, std::int64_t rows,
                 const char* what) {
  got.download();
  want.download();
  const std::int64_t width = want.numel() / want.shape()[0];
  for (std::int64_t i = 0; i < rows * width; ++i)
    ASSERT_EQ(got.get(got_row * width + i), want.get(want_row * width + i))
        << what << ": row " << i / width << " of " << rows << ", element " << i % width;
}

struct Keys {
  DType dtype;
  std::int64_t dim;
  AttentionOptions options = {};
};

void check_attention(const Keys& call) {
  constexpr std::int64_t kHeads = 4, kHeadsKv = 2, kLength = 200, kOther = 37, kPage = 16;
  AttentionOptions options = call.options;
  options.causal = true;
  const Shape of_q{kOther + kLength, kHeads, call.dim}, of_k{kOther + kLength, kHeadsKv, call.dim};
  // Two sequences side by side; the second one is looked at.
  const TestTensor q = random("q", call.dtype, of_q, 1), k = random("k", call.dtype, of_k, 2, 0.05),
                   v = random("v", call.dtype, of_k, 3);
  TestTensor whole = make("whole", call.dtype, {kLength, kHeads, call.dim});
  TestTensor lse = make("lse", DType::kFloat32, {1, kHeads, kLength});
  const auto part = [&](std::int64_t begin, std::int64_t end, const TestTensor& out, const TensorView& to_lse) {
    attention(heads_first(rows_of(q, kOther + begin, end - begin)), heads_first(rows_of(k, kOther, end)),
              heads_first(rows_of(v, kOther, end)), heads_first(rows_of(out, 0, end - begin)), to_lse, options);
  };
  part(0, kLength, whole, lse.view());
  const auto expect_part = [&](std::int64_t begin, std::int64_t end) {
    TestTensor out = make("out", call.dtype, {end - begin, kHeads, call.dim});
    part(begin, end, out, {});
    expect_same(out, 0, whole, begin, end - begin, "a chunk");
  };
  expect_part(0, kLength);
  expect_part(kLength - 1, kLength);
  expect_part(65, 172);

  TestTensor packed = make("packed", call.dtype, of_q);
  const TestTensor starts = integers("starts", {0, kOther, kOther + kLength});
  attention_varlen(q.view(), k.view(), v.view(), starts.view(), starts.view(), kLength, kLength, packed.view(), {},
                   options);
  expect_same(packed, kOther, whole, 0, kLength, "among others");

  // Pages of the second sequence, last one first, and the last queries of it.
  const std::int64_t pages = (kLength + kPage - 1) / kPage;
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < pages; ++i) ids.push_back(pages - 1 - i);
  TestTensor paged_k("k_pages", call.dtype, {pages, kPage, kHeadsKv, call.dim}, {}, kGpu),
      paged_v("v_pages", call.dtype, paged_k.shape(), {}, kGpu);
  const std::int64_t width = kHeadsKv * call.dim;
  for (const auto& [to, from] : {std::pair{&paged_k, &k}, std::pair{&paged_v, &v}}) {
    for (std::int64_t j = 0; j < kLength; ++j)
      for (std::int64_t i = 0; i < width; ++i)
        to->set((ids[static_cast<std::size_t>(j / kPage)] * kPage + j % kPage) * width + i,
                from->get((kOther + j) * width + i));
    to->upload();
  }
  const TestTensor table = integers("table", ids), length = integers("lengths", {kLength});
  TensorView table_view = table.view();
  table_view.ndim = 2;
  table_view.shape[0] = 1, table_view.shape[1] = pages;
  table_view.strides[0] = pages, table_view.strides[1] = 1;
  for (const std::int64_t count : {1, 70}) {
    TestTensor out = make("out", call.dtype, {count, kHeads, call.dim});
    attention_paged(heads_first(rows_of(q, kOther + kLength - count, count)), paged_k.view(), paged_v.view(),
                    table_view, length.view(), {}, count, heads_first(out.view()), {}, options);
    expect_same(out, 0, whole, kLength - count, count, "in pages");
  }
}

TEST(Invariance, Attention) {
  const InvariantScope scope;
  check_attention({DType::kFloat16, 64});
  check_attention({DType::kBFloat16, 128});
  check_attention({DType::kFloat32, 64});
}

TEST(Invariance, AttentionWithOptions) {
  const InvariantScope scope;
  for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
    Keys call{dtype, 64};
    call.options.window_left = 77, call.options.window_right = 0;
    check_attention(call);
  }
  Keys capped{DType::kFloat16, 64};
  capped.options.softcap = 5.0f;
  check_attention(capped);
  const TestTensor slopes = random("slopes", DType::kFloat32, {4}, 9);
  Keys alibi{DType::kFloat16, 64};
  alibi.options.alibi_slopes = slopes.view();
  check_attention(alibi);
}

/// Keys of several chunks (forward/sm90a/chunks.hpp), of which queries side by side see different numbers: prefilled,
/// where one thread block folds the chunks of a tile, and in calls of few queries, where blocks share them in ways that
/// depend on the batch.
void check_chunks_of_keys(const Keys& call) {
  constexpr std::int64_t kHeads = 4, kHeadsKv = 2, kLength = 1205, kQueries = 210, kFirst = kLength - kQueries,
                         kPage = 8;
  constexpr std::int64_t kPages = (kLength + kPage - 1) / kPage;
  AttentionOptions options = call.options;
  options.causal = true;
  const TestTensor q = random("q", call.dtype, {kQueries, kHeads, call.dim}, 1);
  const TestTensor k = random("k", call.dtype, {kPages * kPage, kHeadsKv, call.dim}, 2, 0.05),
                   v = random("v", call.dtype, k.shape(), 3);
  TestTensor whole = make("whole", call.dtype, q.shape()), lse = make("lse", DType::kFloat32, {kQueries, kHeads});
  const auto lse_of = [&](const TestTensor& of, std::int64_t rows) {
    return TensorView(of.view().data, DType::kFloat32, {1, kHeads, rows}, {rows * kHeads, 1, kHeads}, kGpu);
  };
  const auto part = [&](std::int64_t begin, std::int64_t end, const TestTensor& out, const TestTensor& to_lse) {
    attention(heads_first(rows_of(q, begin, end - begin)), heads_first(rows_of(k, 0, kFirst + end)),
              heads_first(rows_of(v, 0, kFirst + end)), heads_first(rows_of(out, 0, end - begin)),
              lse_of(to_lse, end - begin), options);
  };
  part(0, kQueries, whole, lse);
  for (const auto& [begin, end] : {std::pair{0, 1}, std::pair{20, 50}, std::pair{29, 30}, std::pair{209, 210}}) {
    TestTensor out = make("out", call.dtype, {end - begin, kHeads, call.dim}),
               own = make("own", DType::kFloat32, {end - begin, kHeads});
    part(begin, end, out, own);
    expect_same(out, 0, whole, begin, end - begin, "few queries");
    expect_same(own, 0, lse, begin, end - begin, "LSE of few queries");
  }
  // The keys as pages: a batch of sequences that end at different queries.
  const std::vector<std::int64_t> ends{kLength, 700, kLength - 1, 1, kFirst + 3};
  std::vector<std::int64_t> ids;
  for (std::size_t b = 0; b < ends.size(); ++b)
    for (std::int64_t i = 0; i < kPages; ++i) ids.push_back(i);
  const TestTensor table = integers("table", ids), lengths = integers("lengths", ends);
  const auto pages = [&](const TestTensor& x) {
    return TensorView(x.view().data, call.dtype, {kPages, kPage, kHeadsKv, call.dim},
                      {kPage * kHeadsKv * call.dim, kHeadsKv * call.dim, call.dim, 1}, kGpu);
  };
  const auto batch = static_cast<std::int64_t>(ends.size());
  TestTensor last("last", call.dtype, {batch, kHeads, call.dim}, {}, kGpu);
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t row = std::max<std::int64_t>(0, ends[static_cast<std::size_t>(b)] - kFirst - 1);
    for (std::int64_t i = 0; i < kHeads * call.dim; ++i)
      last.set(b * kHeads * call.dim + i, q.get(row * kHeads * call.dim + i));
  }
  last.upload();
  TestTensor decoded = make("decoded", call.dtype, last.shape());
  const auto one_each = [&](const TensorView& x) {
    return TensorView(x.data, x.dtype, {batch, kHeads, 1, call.dim}, {x.strides[0], x.strides[1], x.strides[0], 1},
                      kGpu);
  };
  attention_paged(one_each(last.view()), pages(k), pages(v),
                  TensorView(table.view().data, DType::kInt32, {batch, kPages}, {kPages, 1}, kGpu), lengths.view(), {},
                  1, one_each(decoded.view()), {}, options);
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t end = ends[static_cast<std::size_t>(b)];
    if (end > kFirst) expect_same(decoded, b, whole, end - kFirst - 1, 1, "decoded in a batch");
  }
}

TEST(Invariance, AttentionInChunksOfKeys) {
  const InvariantScope scope;
  check_chunks_of_keys({DType::kFloat16, 64});
  Keys windowed{DType::kBFloat16, 128};
  windowed.options.window_left = 900, windowed.options.window_right = 0;
  check_chunks_of_keys(windowed);
  const TestTensor sinks = random("sinks", DType::kFloat32, {4}, 5);
  Keys with_sinks{DType::kBFloat16, 64};
  with_sinks.options.sinks = sinks.view();
  check_chunks_of_keys(with_sinks);
}

/// `run(first, rows, out)` computes rows of a problem of `all` rows.
template <class Run>
void check_rows(const char* what, DType dtype, std::int64_t all, std::int64_t columns, Run run) {
  TestTensor whole = make("whole", dtype, {all, columns});
  run(0, all, whole.view());
  for (const auto& [first, rows] :
       {std::pair{7, 1}, std::pair{0, 3}, std::pair{4, 1}, std::pair{2, 17}, std::pair{5, 35}}) {
    if (first + rows > all) continue;
    TestTensor out = make("out", dtype, {rows, columns});
    run(first, rows, out.view());
    expect_same(out, 0, whole, first, rows, what);
  }
}

TEST(Invariance, Linear) {
  const InvariantScope scope;
  for (const DType dtype : kFloats)
    for (const auto& [features, outputs] : {std::pair{776, 72}, std::pair{1032, 77}, std::pair{1088, 616}}) {
      const TestTensor x = random("x", dtype, {70, features}, 1),
                       weight = random("weight", dtype, {outputs, features}, 2),
                       bias = random("bias", dtype, {outputs}, 3);
      check_rows("linear", dtype, 70, outputs, [&](std::int64_t first, std::int64_t rows, const TensorView& out) {
        linear(rows_of(x, first, rows), weight.view(), bias.view(), out, {}, Activation::kGeluTanh);
      });
      const TestTensor grad = random("grad", dtype, {70, outputs}, 4);
      check_rows("linear_backward", dtype, 70, features,
                 [&](std::int64_t first, std::int64_t rows, const TensorView& out) {
                   LinearGradients gradients;
                   gradients.x = out;
                   linear_backward(rows_of(grad, first, rows), rows_of(x, first, rows), weight.view(), {}, gradients);
                 });
    }
}

std::string kernel_of_softmax(const TensorView& x, const TensorView& out) {
  Explanation explanation;
  ExecutionContext context;
  context.explain = &explanation;
  softmax(x, out, -1, context);
  return explanation.kernel;
}

/// Longer rows than a block holds. On 9.0 clusters hold them, and rows with a gap that leaves them off 16-byte
/// boundaries are refused: the first of them, alone, would begin at one.
TEST(Invariance, LongRowsOfSoftmax) {
  const InvariantScope scope;
  constexpr std::int64_t kRows = 6;
  for (const DType dtype : kFloats)
    for (const std::int64_t columns : {32776, 50008}) {
      const TestTensor x = random("x", dtype, {kRows, columns}, 1), y = random("y", dtype, {kRows, columns}, 2);
      const TestTensor padded = make("padded", dtype, {kRows, columns + 1}), out = make("out", dtype, {kRows, columns});
      TensorView all = padded.view();
      all.shape[1] = columns;
      const std::string kernel = kernel_of_softmax(x.view(), out.view());
      EXPECT_EQ(kernel, kernel_of_softmax(rows_of(x, 3, 1), rows_of(out, 3, 1)));
      EXPECT_EQ(kernel_of_softmax(all, out.view()), kernel == "softmax/cuda/sm90a/long_rows" ? "" : kernel);
      check_rows(
          "softmax of long rows", dtype, kRows, columns,
          [&](std::int64_t from, std::int64_t rows, const TensorView& to) { softmax(rows_of(x, from, rows), to); });
      check_rows("its gradient", dtype, kRows, columns,
                 [&](std::int64_t from, std::int64_t rows, const TensorView& to) {
                   softmax_backward(rows_of(x, from, rows), rows_of(y, from, rows), to);
                 });
    }
}

TEST(Invariance, Rows) {
  const InvariantScope scope;
  for (const DType dtype : kFloats)
    for (const std::int64_t columns : {768, 1000, 2056, 4096}) {
      const TestTensor x = random("x", dtype, {40, columns}, 1), more = random("more", dtype, {40, columns}, 2),
                       weight = random("weight", dtype, {columns}, 3), bias = random("bias", dtype, {columns}, 4);
      const auto check = [&](const char* what, auto run) { check_rows(what, dtype, 40, columns, run); };
      check("rms_norm", [&](std::int64_t first, std::int64_t rows, const TensorView& out) {
        rms_norm(rows_of(x, first, rows), {}, weight.view(), out);
      });
      check("layer_norm with a residual", [&](std::int64_t first, std::int64_t rows, const TensorView& out) {
        const TestTensor sums = make("sums", dtype, {rows, columns});
        NormSaved saved;
        saved.residual_out = sums.view();
        layer_norm(rows_of(x, first, rows), rows_of(more, first, rows), weight.view(), bias.view(), out, saved);
      });
      check("softmax", [&](std::int64_t first, std::int64_t rows, const TensorView& out) {
        softmax(rows_of(x, first, rows), out);
      });
      check("softmax_backward", [&](std::int64_t first, std::int64_t rows, const TensorView& out) {
        softmax_backward(rows_of(more, first, rows), rows_of(x, first, rows), out);
      });
      check_rows("cross_entropy", DType::kFloat32, 40, 1,
                 [&](std::int64_t first, std::int64_t rows, const TensorView& out) {
                   const TestTensor targets =
                       integers("targets", std::vector<std::int64_t>(static_cast<std::size_t>(rows), 5));
                   CrossEntropyOptions options;
                   options.reduction = Reduction::kNone;
                   TensorView loss = out;
                   loss.ndim = 1;
                   cross_entropy(rows_of(x, first, rows), targets.view(), loss, {}, options);
                 });
      check_rows("reduce_sum", dtype, 40, 1, [&](std::int64_t first, std::int64_t rows, const TensorView& out) {
        TensorView sums = out;
        sums.ndim = 1;
        reduce_sum(rows_of(x, first, rows), sums, AxisMask{2});
      });
    }
}

}  // namespace
}  // namespace flashkernel
