// Every CPU attention kernel where sequences are long (33 000, 66 000 and 131 072 tokens), cut into any number of
// parts, and beside other sequences: what a short dense call can't show.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "flashkernel/attention.hpp"
#include "flashkernel/kernels.hpp"
#include "test_tensor.hpp"

namespace flashkernel {
namespace {

using namespace testing;

TensorView slice(TensorView view, int dim, std::int64_t begin, std::int64_t count) {
  view.data =
      static_cast<char*>(view.data) + begin * view.strides[dim] * static_cast<std::int64_t>(dtype_bytes(view.dtype));
  view.shape[dim] = count;
  return view;
}

std::vector<std::string> cpu_kernels_of(const std::string& op) {
  std::vector<std::string> ids;
  for (const KernelInfo& kernel : kernels())
    if (kernel.available && kernel.op == op && kernel.device == DeviceType::kCpu &&
        kernel.id.find("widened") == std::string::npos)  // those take pages of 4 bits alone
      ids.push_back(kernel.id);
  return ids;
}

std::string test_name(const ::testing::TestParamInfo<std::string>& info) {
  return info.param.substr(info.param.rfind('/') + 1);
}

/// Runs with one kernel forced, in each dtype that it takes.
class EachKernel : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { force_kernels(GetParam()); }
  void TearDown() override { force_kernels(""); }

  bool takes(DType dtype) const {
    TestTensor q(dtype, {1, 8, 16}), lse(DType::kFloat32, {1, 8});
    Explanation explanation;
    ExecutionContext context;
    context.explain = &explanation;
    AttentionGradients gradients;
    TestTensor grad(dtype, {1, 8, 16});
    gradients.q = grad;
    if (GetParam().rfind("attention_bwd", 0) == 0)
      attention_backward(q, q, q, q, q, lse, {}, gradients, {}, true, context);
    else
      attention(q, q, q, grad, lse, {}, context);
    return explanation.kernel == GetParam();
  }

  std::vector<DType> dtypes() const {
    std::vector<DType> taken;
    for (const DType dtype : floating_dtypes())
      if (takes(dtype)) taken.push_back(dtype);
    EXPECT_FALSE(taken.empty());
    return taken;
  }
};
class Forward : public EachKernel {};
class Backward : public EachKernel {};

/// Longer than 2^15, 2^16 and as long as 2^17.
std::int64_t long_length(DType dtype) {
  return dtype == DType::kFloat32 ? 131072 : dtype == DType::kFloat16 ? 33000 : 66000;
}

double tolerance(DType dtype) { return dtype == DType::kFloat32 ? 1e-5 : dtype == DType::kFloat16 ? 1e-3 : 1.0 / 256; }

/// `part` agrees with rows [at + skip, at + rows - skip) of the whole, where neither is cut off by a window.
void expect_same_rows(const TestTensor& whole, const TestTensor& part, std::int64_t at, std::int64_t skip_first,
                      std::int64_t skip_last, double tolerance) {
  const std::int64_t heads = part.shape()[0], rows = part.shape()[1], dim = part.shape()[2];
  for (std::int64_t h = 0; h < heads; ++h)
    for (std::int64_t i = skip_first; i < rows - skip_last; ++i)
      for (std::int64_t d = 0; d < dim; ++d) {
        const double a = whole.get_at({h, at + i, d}), b = part.get_at({h, i, d});
        ASSERT_NEAR(a, b, tolerance * std::max(1.0, std::abs(b)))
            << "head " << h << ", row " << at + i << ", dim " << d;
      }
}

std::int64_t count_nan(const TestTensor& tensor) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < tensor.numel(); ++i) count += std::isnan(tensor[i]);
  return count;
}

// With a window, a stretch of a long sequence is the same problem as that stretch alone.
constexpr std::int64_t kWindow = 40, kStretch = 200, kDim = 8;

std::vector<std::int64_t> stretches(std::int64_t n) {
  std::vector<std::int64_t> starts{0, n - kStretch};
  for (const std::int64_t edge : {1 << 14, 1 << 15, 1 << 16})  // across what 15, 16 and 17 bits count
    if (edge + kStretch < n) starts.push_back(edge - kStretch / 2);
  return starts;
}

AttentionOptions windowed() {
  AttentionOptions options;
  options.causal = true;
  options.window_left = kWindow;
  return options;
}

TEST_P(Forward, LongSequencesOfQueriesAndKeys) {
  for (const DType dtype : dtypes()) {
    const std::int64_t n = long_length(dtype);
    SCOPED_TRACE(std::string(dtype_name(dtype)) + ", " + std::to_string(n));
    TestTensor q(dtype, {2, n, kDim}), k(dtype, {1, n, kDim}), v(dtype, {1, n, kDim}), out(dtype, {2, n, kDim}),
        lse(DType::kFloat32, {2, n, 1});
    q.random(1), k.random(2), v.random(3), out.fill(kNaN), lse.fill(kNaN);
    const auto flat = [](TensorView view) { return view.ndim = 2, view; };
    attention(q, k, v, out, flat(lse), windowed());
    EXPECT_EQ(count_nan(out), 0);
    for (const std::int64_t at : stretches(n)) {
      TestTensor part(dtype, {2, kStretch, kDim}), part_lse(DType::kFloat32, {2, kStretch, 1});
      attention(slice(q, 1, at, kStretch), slice(k, 1, at, kStretch), slice(v, 1, at, kStretch), part, flat(part_lse),
                windowed());
      const std::int64_t skip = at == 0 ? 0 : kWindow;
      expect_same_rows(out, part, at, skip, 0, tolerance(dtype));
      expect_same_rows(lse, part_lse, at, skip, 0, 1e-5);
      if (HasFatalFailure()) return;
    }
  }
}

// One query over the whole cache against float64: a sum of 131 072 terms that do not cancel, from pages in any order.
TEST_P(Forward, DecodingOverALongCache) {
  constexpr std::int64_t kPage = 64;
  for (const DType dtype : dtypes()) {
    const std::int64_t n = long_length(dtype);
    SCOPED_TRACE(std::string(dtype_name(dtype)) + ", " + std::to_string(n));
    const std::int64_t num_pages = (n + kPage - 1) / kPage;
    TestTensor q(dtype, {1, 2, 1, kDim}), k(dtype, {num_pages, kPage, 1, kDim}), v(dtype, {num_pages, kPage, 1, kDim}),
        out(dtype, {1, 2, 1, kDim}), lse(DType::kFloat32, {1, 2, 1}), table(DType::kInt32, {1, num_pages}),
        lens(DType::kInt64, {1});
    q.random(1), k.random(2), v.random(3, 1.0, 1.0);
    std::vector<std::int64_t> order(static_cast<std::size_t>(num_pages));
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
    std::shuffle(order.begin(), order.end(), std::mt19937_64(4));
    for (std::int64_t i = 0; i < num_pages; ++i) table.set(i, static_cast<double>(order[static_cast<std::size_t>(i)]));
    lens.fill(static_cast<double>(n));
    const auto at = [&](std::int64_t token, std::int64_t d) {
      return (order[static_cast<std::size_t>(token / kPage)] * kPage + token % kPage) * kDim + d;
    };
    for (std::int64_t token = n; token < num_pages * kPage; ++token)  // past the end
      for (std::int64_t d = 0; d < kDim; ++d) k.set(at(token, d), kNaN), v.set(at(token, d), kNaN);
    attention_paged(q, k, v, table, lens, {}, 0, out, lse);
    for (std::int64_t h = 0; h < 2; ++h) {
      std::vector<double> sums(kDim, 0.0);
      double total = 0;
      for (std::int64_t token = 0; token < n; ++token) {
        double score = 0;
        for (std::int64_t d = 0; d < kDim; ++d) score += q[h * kDim + d] * k[at(token, d)];
        const double weight = std::exp(score / std::sqrt(1.0 * kDim));
        total += weight;
        for (std::int64_t d = 0; d < kDim; ++d) sums[static_cast<std::size_t>(d)] += weight * v[at(token, d)];
      }
      for (std::int64_t d = 0; d < kDim; ++d) {
        const double expected = sums[static_cast<std::size_t>(d)] / total;
        ASSERT_NEAR(out[h * kDim + d], expected, tolerance(dtype) * std::max(1.0, std::abs(expected)));
      }
      ASSERT_NEAR(lse[h], std::log(total), 1e-5 * std::log(total));
    }
  }
}

TEST_P(Backward, LongSequencesOfQueriesAndKeys) {
  const bool oracle = GetParam() == "attention_bwd/cpu/scalar";  // looks at each pair of positions, window or not
  for (const DType dtype : dtypes()) {
    const std::int64_t n = oracle ? 1000 : long_length(dtype);
    SCOPED_TRACE(std::string(dtype_name(dtype)) + ", " + std::to_string(n));
    struct Sides {
      Sides(DType dtype, std::int64_t n)
          : out(dtype, {2, n, kDim}),
            q(dtype, {2, n, kDim}),
            k(dtype, {1, n, kDim}),
            v(dtype, {1, n, kDim}),
            lse(DType::kFloat32, {2, n}) {
        q.fill(kNaN), k.fill(kNaN), v.fill(kNaN);
      }
      void run(const TensorView& grad_out, const TensorView& q_in, const TensorView& k_in, const TensorView& v_in) {
        attention(q_in, k_in, v_in, out, lse, windowed());
        AttentionGradients gradients;
        gradients.q = q, gradients.k = k, gradients.v = v;
        attention_backward(grad_out, q_in, k_in, v_in, out, lse, {}, gradients, windowed());
      }
      TestTensor out, q, k, v, lse;
    };
    TestTensor q(dtype, {2, n, kDim}), k(dtype, {1, n, kDim}), v(dtype, {1, n, kDim}), grad_out(dtype, {2, n, kDim});
    q.random(1), k.random(2), v.random(3), grad_out.random(4);
    Sides whole(dtype, n);
    whole.run(grad_out, q, k, v);
    for (const TestTensor* grad : {&whole.q, &whole.k, &whole.v}) EXPECT_EQ(count_nan(*grad), 0);
    for (const std::int64_t at : stretches(n)) {
      Sides part(dtype, kStretch);
      part.run(slice(grad_out, 1, at, kStretch), slice(q, 1, at, kStretch), slice(k, 1, at, kStretch),
               slice(v, 1, at, kStretch));
      // Rows at the ends lack keys, and keys lack queries that stand outside of the stretch; out is rounded, and in
      // half precision enters the gradients of q and k.
      const std::int64_t first = at == 0 ? 0 : kWindow, last = at + kStretch == n ? 0 : kWindow;
      const double allowed = 4 * tolerance(dtype);
      expect_same_rows(whole.q, part.q, at, first, 0, allowed);
      expect_same_rows(whole.k, part.k, at, first, last, allowed);
      expect_same_rows(whole.v, part.v, at, first, last, allowed);
      if (HasFatalFailure()) return;
    }
  }
}

// Cut into 1 to 9 parts, empty ones among them, merged one by one into strided results: the whole.
TEST_P(Forward, AnyNumberOfPartsMergesToTheWhole) {
  std::mt19937_64 engine(5);
  for (const DType dtype : dtypes()) {
    constexpr std::int64_t kKeys = 150;
    TestTensor q(dtype, {2, 4, 7, kDim}), k(dtype, {2, 2, kKeys, kDim}), v(dtype, {2, 2, kKeys, kDim}),
        whole(dtype, {2, 4, 7, kDim}), whole_lse(DType::kFloat32, {2, 4, 7});
    q.random(1), k.random(2), v.random(3);
    attention(q, k, v, whole, whole_lse);
    for (int parts = 1; parts <= 9; ++parts) {
      std::vector<std::int64_t> cuts{0, kKeys};
      for (int i = 1; i < parts; ++i)
        cuts.push_back(i % 3 == 0 ? cuts.back() : static_cast<std::int64_t>(engine() % (kKeys + 1)));
      std::sort(cuts.begin(), cuts.end());
      TestTensor sum(dtype, {2, 4, 7, kDim}, Layout::kSwapped), sum_lse(DType::kFloat32, {2, 4, 7}, Layout::kPadded);
      sum.fill(kNaN), sum_lse.fill(-kInf);
      for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        TestTensor part(dtype, {2, 4, 7, kDim}, Layout::kPadded), lse(DType::kFloat32, {2, 4, 7}, Layout::kSwapped);
        const std::int64_t count = cuts[i + 1] - cuts[i];
        attention(q, slice(k, 2, cuts[i], count), slice(v, 2, cuts[i], count), part, lse);
        merge_states(sum, sum_lse, part, lse, sum, sum_lse);
      }
      // A rounding of each part and of each merge.
      expect_close(sum, whole.values(), tolerance(dtype) * (1 + parts), "out");
      expect_close(sum_lse, whole_lse.values(), 1e-5, "lse");
    }
  }
}

// A sequence's results, bit for bit, are those of the sequence alone: variable-length, paged, and its gradients.
constexpr std::int64_t kLens[] = {33, 90, 7};

struct Batch {
  explicit Batch(DType dtype)
      : q(dtype, {130, 4, kDim}), k(dtype, {130, 2, kDim}), v(dtype, {130, 2, kDim}), grad_out(dtype, {130, 4, kDim}) {
    q.random(1), k.random(2), v.random(3), grad_out.random(4);
  }
  TestTensor q, k, v, grad_out;
};

/// Sequence `first` to `first + count` of the batch: outputs, LSE and gradients as bytes of the middle sequence.
std::vector<std::vector<double>> middle_of(const Batch& batch, DType dtype, std::size_t first, std::size_t count,
                                           bool gradients_too) {
  TestTensor cu(DType::kInt32, {static_cast<std::int64_t>(count) + 1});
  std::int64_t begin = 0, total = 0, mine = 0;
  for (std::size_t i = 0; i < first; ++i) begin += kLens[i];
  for (std::size_t i = 0; i < count; ++i) {
    cu.set(static_cast<std::int64_t>(i), static_cast<double>(total));
    if (first + i < 1) mine += kLens[first + i];
    total += kLens[first + i];
  }
  cu.set(static_cast<std::int64_t>(count), static_cast<double>(total));
  AttentionOptions options;
  options.causal = true;
  TestTensor out(dtype, {total, 4, kDim}), lse(DType::kFloat32, {total, 4}), grad_q(dtype, {total, 4, kDim}),
      grad_k(dtype, {total, 2, kDim}), grad_v(dtype, {total, 2, kDim});
  const TensorView lse_view = lse.view().transpose(0, 1);
  const TensorView q = slice(batch.q, 0, begin, total), k = slice(batch.k, 0, begin, total),
                   v = slice(batch.v, 0, begin, total);
  attention_varlen(q, k, v, cu, cu, 90, 90, out, lse_view, options);
  std::vector<const TestTensor*> results{&out, &lse};
  if (gradients_too) {
    AttentionGradients gradients;
    gradients.q = grad_q, gradients.k = grad_k, gradients.v = grad_v;
    attention_varlen_backward(slice(batch.grad_out, 0, begin, total), q, k, v, out, lse_view, {}, cu, cu, 90, 90,
                              gradients, options);
    results.insert(results.end(), {&grad_q, &grad_k, &grad_v});
  }
  std::vector<std::vector<double>> values;
  for (const TestTensor* result : results) {
    const std::int64_t row = result->numel() / total;
    auto& of_result = values.emplace_back();
    for (std::int64_t i = mine * row; i < (mine + kLens[1]) * row; ++i) of_result.push_back((*result)[i]);
  }
  return values;
}

TEST_P(Forward, VariableLengthBatchMatesLeaveNoTrace) {
  for (const DType dtype : dtypes()) {
    const Batch batch(dtype);
    EXPECT_EQ(middle_of(batch, dtype, 0, 3, false), middle_of(batch, dtype, 1, 1, false)) << dtype_name(dtype);
  }
}

TEST_P(Backward, VariableLengthBatchMatesLeaveNoTrace) {
  for (const DType dtype : dtypes()) {
    const Batch batch(dtype);
    EXPECT_EQ(middle_of(batch, dtype, 0, 3, true), middle_of(batch, dtype, 1, 1, true)) << dtype_name(dtype);
  }
}

TEST_P(Forward, PagedBatchMatesLeaveNoTrace) {
  for (const DType dtype : dtypes())
    for (const std::int64_t seq_q : {1, 5}) {
      TestTensor q(dtype, {3, 4, seq_q, kDim}), pages(dtype, {64, 16, 2, kDim}), out(dtype, {3, 4, seq_q, kDim}),
          alone(dtype, {1, 4, seq_q, kDim}), table(DType::kInt32, {3, 20}), lens(DType::kInt32, {3});
      q.random(1), pages.random(2), lens.fill({300, 77, 5});
      for (std::int64_t i = 0; i < 60; ++i) table.set(i, static_cast<double>((i * 7) % 64));
      attention_paged(q, pages, pages, table, lens, {}, 0, out, {});
      attention_paged(slice(q, 0, 1, 1), pages, pages, slice(table, 0, 1, 1), slice(lens, 0, 1, 1), {}, 0, alone, {});
      const auto all = out.values();
      const auto size = static_cast<std::ptrdiff_t>(alone.numel());
      EXPECT_EQ(alone.values(), std::vector<double>(all.begin() + size, all.begin() + 2 * size)) << dtype_name(dtype);
    }
}

INSTANTIATE_TEST_SUITE_P(Attention, Forward, ::testing::ValuesIn(cpu_kernels_of("attention_fwd")), test_name);
INSTANTIATE_TEST_SUITE_P(AttentionGradients, Backward, ::testing::ValuesIn(cpu_kernels_of("attention_bwd")), test_name);

}  // namespace
}  // namespace flashkernel
