// The scalar oracle of attention's gradients against central differences of an independent forward pass in double:
// every feature, alone and together. What the fast kernels are compared with is thereby compared with the definition
// itself.
#include <gtest/gtest.h>

#include "flashkernel/attention.hpp"
#include "flashkernel/kernels.hpp"
#include "test_tensor.hpp"

namespace flashkernel {
namespace {

using namespace testing;

// One batch entry's worth of everything, in double: [heads, seq, dim].
struct Problem {
  std::int64_t heads_q = 4, heads_kv = 2, seq_q = 5, seq_k = 7, dim = 4, dim_v = 3;
  double scale = 0.5, softcap = 0;
  std::int64_t left = -1, right = -1;
  std::vector<double> q, k, v, bias, slopes, sinks;  // bias [heads_q or 1, seq_q or 1, seq_k]
  std::int64_t bias_heads = 0, bias_rows = 0;        // 0: no bias
  std::vector<double> weight_out, weight_lse;        // loss = <weight_out, out> + <weight_lse, lse>

  double loss() const {
    double total = 0;
    for (std::int64_t h = 0; h < heads_q; ++h) {
      const std::int64_t g = h / (heads_q / heads_kv);
      for (std::int64_t i = 0; i < seq_q; ++i) {
        const std::int64_t at = i + seq_k - seq_q;  // the query's position
        std::vector<double> numerator(static_cast<std::size_t>(dim_v), 0.0);
        double denominator = sinks.empty() ? 0.0 : std::exp(sinks[static_cast<std::size_t>(h)]);
        for (std::int64_t j = 0; j < seq_k; ++j) {
          if ((left >= 0 && j < at - left) || (right >= 0 && j > at + right)) continue;
          double s = 0;
          for (std::int64_t d = 0; d < dim; ++d)
            s += q[static_cast<std::size_t>((h * seq_q + i) * dim + d)] *
                 k[static_cast<std::size_t>((g * seq_k + j) * dim + d)];
          s *= scale;
          if (softcap > 0) s = softcap * std::tanh(s / softcap);
          if (bias_heads)
            s += bias[static_cast<std::size_t>(
                ((bias_heads == 1 ? 0 : h) * bias_rows + (bias_rows == 1 ? 0 : i)) * seq_k + j)];
          if (!slopes.empty()) s -= slopes[static_cast<std::size_t>(h)] * static_cast<double>(std::abs(at - j));
          const double e = std::exp(s);
          denominator += e;
          for (std::int64_t d = 0; d < dim_v; ++d)
            numerator[static_cast<std::size_t>(d)] += e * v[static_cast<std::size_t>((g * seq_k + j) * dim_v + d)];
        }
        if (denominator == 0) continue;  // sees nothing: output 0, LSE -inf, no gradient
        for (std::int64_t d = 0; d < dim_v; ++d)
          total += weight_out[static_cast<std::size_t>((h * seq_q + i) * dim_v + d)] *
                   numerator[static_cast<std::size_t>(d)] / denominator;
        total += weight_lse[static_cast<std::size_t>(h * seq_q + i)] * std::log(denominator);
      }
    }
    return total;
  }

  std::vector<double> gradient(std::vector<double> Problem::*of) {
    std::vector<double> result;
    for (double& x : this->*of) {
      const double value = x, step = 1e-5;
      x = value + step;
      const double above = loss();
      x = value - step;
      result.push_back((above - loss()) / (2 * step));
      x = value;
    }
    return result;
  }
};

struct Feature {
  std::string name;
  bool softcap, bias, alibi, sinks;
  std::int64_t bias_heads, bias_rows, left, right, seq_q, seq_k;
};

void check(const Feature& f) {
  SCOPED_TRACE(f.name);
  Problem p;
  p.seq_q = f.seq_q;
  p.seq_k = f.seq_k;
  p.left = f.left;
  p.right = f.right;
  p.softcap = f.softcap ? 1.25 : 0;
  TestTensor q(DType::kFloat32, {p.heads_q, p.seq_q, p.dim}), k(DType::kFloat32, {p.heads_kv, p.seq_k, p.dim}),
      v(DType::kFloat32, {p.heads_kv, p.seq_k, p.dim_v}), out(DType::kFloat32, {p.heads_q, p.seq_q, p.dim_v}),
      lse(DType::kFloat32, {p.heads_q, p.seq_q}), grad_out(DType::kFloat32, out.shape()),
      grad_lse(DType::kFloat32, lse.shape());
  p.q = q.random(1).values();
  p.k = k.random(2).values();
  p.v = v.random(3).values();
  p.weight_out = grad_out.random(4).values();
  p.weight_lse = grad_lse.random(5).values();
  AttentionOptions options;
  options.scale = static_cast<float>(p.scale);
  options.softcap = static_cast<float>(p.softcap);
  options.window_left = p.left;
  options.window_right = p.right;
  p.bias_heads = f.bias ? f.bias_heads : 0;
  p.bias_rows = f.bias_rows;
  TestTensor bias(DType::kFloat32, {f.bias_heads, f.bias_rows, p.seq_k}), slopes(DType::kFloat32, {p.heads_q}),
      sinks(DType::kFloat32, {p.heads_q});
  if (f.bias) p.bias = bias.random(6).values(), options.bias = bias;
  if (f.alibi) p.slopes = slopes.random(7, 0.3).values(), options.alibi_slopes = slopes;
  if (f.sinks) p.sinks = sinks.random(8).values(), options.sinks = sinks;

  TestTensor grad_q(DType::kFloat32, q.shape()), grad_k(DType::kFloat32, k.shape()), grad_v(DType::kFloat32, v.shape()),
      grad_bias(DType::kFloat32, bias.shape()), grad_sinks(DType::kFloat32, sinks.shape());
  AttentionGradients gradients;
  gradients.q = grad_q;
  gradients.k = grad_k;
  gradients.v = grad_v;
  if (f.bias) gradients.bias = grad_bias;
  if (f.sinks) gradients.sinks = grad_sinks;
  attention(q, k, v, out, lse, options);
  attention_backward(grad_out, q, k, v, out, lse, grad_lse, gradients, options);
  // fp32 out and lse (some 2^-24 each) enter sums of up to 10 terms: 5e-6 holds them; differences of 1e-5 in double add
  // 1e-9.
  expect_close(grad_q, p.gradient(&Problem::q), 5e-6, "grad_q");
  expect_close(grad_k, p.gradient(&Problem::k), 5e-6, "grad_k");
  expect_close(grad_v, p.gradient(&Problem::v), 5e-6, "grad_v");
  if (f.bias) expect_close(grad_bias, p.gradient(&Problem::bias), 5e-6, "grad_bias");
  if (f.sinks) expect_close(grad_sinks, p.gradient(&Problem::sinks), 5e-6, "grad_sinks");
}

class EachKernel : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { force_kernels("*/" + GetParam()); }
  void TearDown() override { force_kernels(""); }
};

TEST_P(EachKernel, GradientsEqualCentralDifferences) {
  const std::pair<std::int64_t, std::int64_t> windows[] = {{-1, -1}, {-1, 0}, {2, 1}, {0, 0}};
  for (int bits = 0; bits < 16; ++bits)
    for (const auto& [left, right] : windows)
      for (const auto& [seq_q, seq_k] : {std::pair<std::int64_t, std::int64_t>{5, 7}, {6, 3}}) {
        Feature f{"bits " + std::to_string(bits) + " window " + std::to_string(left) + "," + std::to_string(right) +
                      " seq " + std::to_string(seq_q) + "x" + std::to_string(seq_k),
                  (bits & 1) != 0,
                  (bits & 2) != 0,
                  (bits & 4) != 0,
                  (bits & 8) != 0,
                  4,
                  seq_q,
                  left,
                  right,
                  seq_q,
                  seq_k};
        check(f);
        if (f.bias) {
          f.name += " broadcast bias";
          f.bias_heads = bits & 4 ? 1 : 4;
          f.bias_rows = 1;
          check(f);
        }
      }
}

// The oracle's arch and, where the machine has them, the fast ones: `force` knows only those of this build.
std::vector<std::string> archs() {
  std::vector<std::string> found;
  for (const KernelInfo& kernel : kernels())
    if (kernel.available && kernel.op == "attention_bwd") found.push_back(kernel.id.substr(kernel.id.find('/') + 1));
  return found;
}
INSTANTIATE_TEST_SUITE_P(Attention, EachKernel, ::testing::ValuesIn(archs()), [](const auto& info) {
  std::string name = info.param;
  for (char& c : name)
    if (c == '/') c = '_';
  return name;
});

}  // namespace
}  // namespace flashkernel
