// The C API against the C++ one: the same numbers from the same arguments, field by field of every struct; statuses,
// messages and sizes; handles in any order.
#include "flashkernel/flashkernel.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "c/call.hpp"
#include "flashkernel/flashkernel.hpp"

namespace {

namespace fk = flashkernel;
using Floats = std::vector<float>;
using Shape = std::vector<int64_t>;

constexpr fk_device kCpu = {FK_CPU, 0};

Floats random_floats(std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// A tensor as both APIs take it.
struct Both {
  fk_tensor c{};
  fk::TensorView cpp;
  Both() = default;
  Both(const void* data, fk_dtype dtype, const Shape& shape) {
    EXPECT_EQ(fk_tensor_init(&c, const_cast<void*>(data), dtype, kCpu, static_cast<int>(shape.size()), shape.data()),
              FK_OK)
        << fk_last_error_message();
    cpp = fk::c::Call("test").tensor("tensor", &c);
  }
  Both(const Floats& data, const Shape& shape) : Both(data.data(), FK_FLOAT32, shape) {}
};

#define EXPECT_OK(call) EXPECT_EQ(call, FK_OK) << fk_last_error_message()

// Runs the C call on one set of outputs and the C++ call on another one, and compares all bits. The outputs must have
// changed, and the C call without its options must differ: else a field that is not passed on would go unseen.
void expect_same(std::vector<Shape> shapes, const std::function<fk_status(std::vector<Both>&)>& in_c,
                 const std::function<void(std::vector<Both>&)>& in_cpp) {
  std::vector<Floats> first, second;
  std::vector<Both> first_views, second_views;
  for (const Shape& shape : shapes) {
    std::int64_t count = 1;
    for (const auto extent : shape) count *= extent;
    first.emplace_back(static_cast<std::size_t>(count), -77.0f);
    second.emplace_back(static_cast<std::size_t>(count), -77.0f);
  }
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    first_views.emplace_back(first[i], shapes[i]);
    second_views.emplace_back(second[i], shapes[i]);
  }
  EXPECT_OK(in_c(first_views));
  in_cpp(second_views);
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    EXPECT_EQ(std::memcmp(first[i].data(), second[i].data(), first[i].size() * sizeof(float)), 0) << "output " << i;
    EXPECT_NE(first[i].front(), -77.0f) << "output " << i << " was not written";
  }
}

template <class Struct>
Struct made(fk_status (*init)(Struct*, size_t)) {
  Struct value;
  std::memset(&value, 0xff, sizeof value);
  EXPECT_EQ(init(&value, sizeof value), FK_OK);
  EXPECT_EQ(value.size, sizeof value);
  return value;
}

struct AttentionInputs {
  Floats q = random_floats(2 * 4 * 5 * 8, 1), k = random_floats(2 * 2 * 7 * 8, 2), v = random_floats(2 * 2 * 7 * 8, 3),
         bias = random_floats(5 * 7, 4), slopes = {0.1f, 0.2f, 0.3f, 0.4f}, sinks = {0.5f, -1.0f, 0.0f, 2.0f};
  Both q_view{q, {2, 4, 5, 8}}, k_view{k, {2, 2, 7, 8}}, v_view{v, {2, 2, 7, 8}}, bias_view{bias, {5, 7}},
      slopes_view{slopes, {4}}, sinks_view{sinks, {4}};
};

TEST(CApi, AttentionPassesEachOption) {
  const AttentionInputs in;
  const std::vector<std::function<void(fk_attention_options&, fk::AttentionOptions&)>> settings = {
      [](auto&, auto&) {},
      [](auto& c, auto& cpp) { c.causal = cpp.causal = true; },
      [](auto& c, auto& cpp) { c.window_left = cpp.window_left = 1; },
      [](auto& c, auto& cpp) { c.window_right = cpp.window_right = 1; },
      [](auto& c, auto& cpp) { c.softcap = cpp.softcap = 0.5f; },
      [](auto& c, auto& cpp) { c.has_scale = 1, c.scale = 0.0f, cpp.scale = 0.0f; },
      [&](auto& c, auto& cpp) { c.bias = &in.bias_view.c, cpp.bias = in.bias_view.cpp; },
      [&](auto& c, auto& cpp) { c.alibi_slopes = &in.slopes_view.c, cpp.alibi_slopes = in.slopes_view.cpp; },
      [&](auto& c, auto& cpp) { c.sinks = &in.sinks_view.c, cpp.sinks = in.sinks_view.cpp; },
  };
  std::vector<Floats> results;
  for (const auto& set : settings) {
    auto c = made(fk_attention_options_init);
    fk::AttentionOptions cpp;
    set(c, cpp);
    expect_same(
        {{2, 4, 5, 8}, {2, 4, 5}},
        [&](auto& out) {
          const fk_status status = fk_attention(&in.q_view.c, &in.k_view.c, &in.v_view.c, &out[0].c, &out[1].c, &c, {});
          const float* const data = static_cast<const float*>(out[0].c.data);
          results.emplace_back(data, data + 2 * 4 * 5 * 8);
          return status;
        },
        [&](auto& out) { fk::attention(in.q_view.cpp, in.k_view.cpp, in.v_view.cpp, out[0].cpp, out[1].cpp, cpp); });
    for (std::size_t i = 0; i + 1 < results.size(); ++i) EXPECT_NE(results[i], results.back()) << "setting " << i;
  }
}

TEST(CApi, AttentionBackwardWritesEachGradient) {
  const AttentionInputs in;
  Floats out(in.q.size()), lse(2 * 4 * 5);
  const Floats grad = random_floats(2 * 4 * 5 * 8, 9);
  const Both out_view(out, {2, 4, 5, 8}), lse_view(lse, {2, 4, 5}), grad_view(grad, {2, 4, 5, 8});
  auto c = made(fk_attention_options_init);
  fk::AttentionOptions cpp;
  c.bias = &in.bias_view.c, cpp.bias = in.bias_view.cpp;
  c.sinks = &in.sinks_view.c, cpp.sinks = in.sinks_view.cpp;
  fk::attention(in.q_view.cpp, in.k_view.cpp, in.v_view.cpp, out_view.cpp, lse_view.cpp, cpp);
  expect_same(
      {{2, 4, 5, 8}, {2, 2, 7, 8}, {2, 2, 7, 8}, {5, 7}, {4}},
      [&](auto& g) {
        auto gradients = made(fk_attention_gradients_init);
        gradients.q = &g[0].c, gradients.k = &g[1].c, gradients.v = &g[2].c, gradients.bias = &g[3].c,
        gradients.sinks = &g[4].c;
        return fk_attention_backward(&grad_view.c, &in.q_view.c, &in.k_view.c, &in.v_view.c, &out_view.c, &lse_view.c,
                                     nullptr, &gradients, &c, 1, nullptr);
      },
      [&](auto& g) {
        fk::attention_backward(grad_view.cpp, in.q_view.cpp, in.k_view.cpp, in.v_view.cpp, out_view.cpp, lse_view.cpp,
                               {}, {g[0].cpp, g[1].cpp, g[2].cpp, g[3].cpp, g[4].cpp}, cpp);
      });
}

TEST(CApi, NormsAndLinearAndTheirGradients) {
  const Floats x = random_floats(3 * 8, 1), r = random_floats(3 * 8, 2), w = random_floats(8, 3),
               b = random_floats(8, 4), grad = random_floats(3 * 8, 5), mean = random_floats(3, 6), rstd = {1, 2, 3},
               m = random_floats(8 * 8, 7);
  const Both xv(x, {3, 8}), rv(r, {3, 8}), wv(w, {8}), bv(b, {8}), gv(grad, {3, 8}), mv(mean, {3}), sv(rstd, {3}),
      wm(m, {8, 8});
  expect_same(
      {{3, 8}, {3, 8}, {3}, {3}},
      [&](auto& out) {
        auto saved = made(fk_norm_saved_init);
        saved.residual_out = &out[1].c, saved.mean = &out[2].c, saved.rstd = &out[3].c;
        return fk_layer_norm(&xv.c, &rv.c, &wv.c, &bv.c, &out[0].c, &saved, 0.5f, nullptr);
      },
      [&](auto& out) {
        fk::layer_norm(xv.cpp, rv.cpp, wv.cpp, bv.cpp, out[0].cpp, {out[1].cpp, out[2].cpp, out[3].cpp}, 0.5f);
      });
  expect_same(
      {{3, 8}, {8}, {8}},
      [&](auto& g) {
        auto gradients = made(fk_norm_gradients_init);
        gradients.x = &g[0].c, gradients.weight = &g[1].c, gradients.bias = &g[2].c;
        return fk_layer_norm_backward(&gv.c, &xv.c, &wv.c, &mv.c, &sv.c, &rv.c, &gradients, nullptr);
      },
      [&](auto& g) {
        fk::layer_norm_backward(gv.cpp, xv.cpp, wv.cpp, mv.cpp, sv.cpp, rv.cpp, {g[0].cpp, g[1].cpp, g[2].cpp});
      });
  for (const fk_activation activation :
       {FK_ACTIVATION_NONE, FK_ACTIVATION_GELU_TANH, FK_ACTIVATION_GELU, FK_ACTIVATION_SILU})
    expect_same(
        {{3, 8}, {3, 8}},
        [&](auto& out) { return fk_linear(&xv.c, &wm.c, &bv.c, &out[0].c, &out[1].c, activation, nullptr); },
        [&](auto& out) {
          fk::linear(xv.cpp, wm.cpp, bv.cpp, out[0].cpp, out[1].cpp, static_cast<fk::Activation>(activation));
        });
  expect_same(
      {{3, 8}, {8, 8}, {8}},
      [&](auto& g) {
        auto gradients = made(fk_linear_gradients_init);
        gradients.x = &g[0].c, gradients.weight = &g[1].c, gradients.bias = &g[2].c;
        return fk_linear_backward(&gv.c, &xv.c, &wm.c, &rv.c, &gradients, FK_ACTIVATION_SILU, nullptr);
      },
      [&](auto& g) {
        fk::linear_backward(gv.cpp, xv.cpp, wm.cpp, rv.cpp, {g[0].cpp, g[1].cpp, g[2].cpp}, fk::Activation::kSilu);
      });
}

TEST(CApi, RopePassesEachOption) {
  const Floats q = random_floats(1 * 2 * 3 * 8, 1), k = random_floats(1 * 1 * 3 * 8, 2),
               freq = {0.5f, 0.25f, 0.1f, 0.3f};
  const std::vector<int64_t> positions = {4, 9, 70};
  const Both qv(q, {1, 2, 3, 8}), kv(k, {1, 1, 3, 8}), pv(positions.data(), FK_INT64, {3}), fv(freq, {4});
  const std::vector<std::function<void(fk_rope_options&, fk::RopeOptions&)>> settings = {
      [](auto&, auto&) {},
      [](auto& c, auto& cpp) { c.theta = cpp.theta = 100.0; },
      [](auto& c, auto& cpp) { c.rotary_dim = cpp.rotary_dim = 4; },
      [](auto& c, auto& cpp) { c.interleaved = cpp.interleaved = true; },
      [](auto& c, auto& cpp) { c.inverse = cpp.inverse = true; },
      [&](auto& c, auto& cpp) { c.inv_freq = &fv.c, cpp.inv_freq = fv.cpp; },
  };
  std::vector<Floats> results;
  for (const auto& set : settings) {
    auto c = made(fk_rope_options_init);
    fk::RopeOptions cpp;
    set(c, cpp);
    expect_same(
        {{1, 2, 3, 8}, {1, 1, 3, 8}},
        [&](auto& out) {
          const fk_status status = fk_rope(&qv.c, &kv.c, &pv.c, &out[0].c, &out[1].c, &c, nullptr);
          const float* const data = static_cast<const float*>(out[0].c.data);
          results.emplace_back(data, data + 2 * 3 * 8);
          return status;
        },
        [&](auto& out) { fk::rope(qv.cpp, kv.cpp, pv.cpp, out[0].cpp, out[1].cpp, cpp); });
    for (std::size_t i = 0; i + 1 < results.size(); ++i) EXPECT_NE(results[i], results.back()) << "setting " << i;
  }
}

TEST(CApi, CrossEntropyPassesEachOption) {
  const Floats logits = random_floats(4 * 6, 1);
  const std::vector<int64_t> targets = {0, 5, 2, 2};
  const Both lv(logits, {4, 6}), tv(targets.data(), FK_INT64, {4});
  for (const fk_reduction reduction : {FK_REDUCTION_NONE, FK_REDUCTION_SUM, FK_REDUCTION_MEAN}) {
    auto c = made(fk_cross_entropy_options_init);
    EXPECT_EQ(c.reduction, FK_REDUCTION_MEAN);
    EXPECT_EQ(c.ignore_index, -100);
    c.reduction = reduction, c.ignore_index = 2, c.label_smoothing = 0.25f;
    expect_same(
        {reduction == FK_REDUCTION_NONE ? Shape{4} : Shape{1}, {4}},
        [&](auto& out) { return fk_cross_entropy(&lv.c, &tv.c, &out[0].c, &out[1].c, &c, nullptr); },
        [&](auto& out) {
          fk::cross_entropy(lv.cpp, tv.cpp, out[0].cpp, out[1].cpp, {2, 0.25f, static_cast<fk::Reduction>(reduction)});
        });
  }
}

TEST(CApi, LinearCrossEntropyPassesEachOption) {
  const Floats x = random_floats(4 * 8, 1), weight = random_floats(6 * 8, 2), bias = random_floats(6, 3);
  const Floats classes = {0.5f, 1.0f, 1.5f, 2.0f, 2.5f, 3.0f}, ones = {1.0f, 1.0f, 1.0f, 1.0f};
  const std::vector<int64_t> targets = {0, 5, 2, 3};
  const Both xv(x, {4, 8}), wv(weight, {6, 8}), bv(bias, {6}), cv(classes, {6}), tv(targets.data(), FK_INT64, {4});
  for (const fk_reduction reduction : {FK_REDUCTION_NONE, FK_REDUCTION_SUM, FK_REDUCTION_MEAN}) {
    auto c = made(fk_linear_cross_entropy_options_init);
    EXPECT_EQ(c.reduction, FK_REDUCTION_MEAN);
    EXPECT_EQ(c.ignore_index, -100);
    c.reduction = reduction, c.ignore_index = 2, c.label_smoothing = 0.25f, c.z_loss = 0.5f, c.softcap = 3.0f;
    const fk::LinearCrossEntropyOptions cpp{2, 0.25f, 0.5f, 3.0f, static_cast<fk::Reduction>(reduction)};
    const Shape loss = reduction == FK_REDUCTION_NONE ? Shape{4} : Shape{1};
    const Both gv(ones, loss), lv(ones, {4});
    expect_same(
        {loss, loss, {4}},
        [&](auto& out) {
          return fk_linear_cross_entropy(&xv.c, &wv.c, &bv.c, &tv.c, &cv.c, &out[0].c, &out[1].c, &out[2].c, &c,
                                         nullptr);
        },
        [&](auto& out) {
          fk::linear_cross_entropy(xv.cpp, wv.cpp, bv.cpp, tv.cpp, cv.cpp, out[0].cpp, out[1].cpp, out[2].cpp, cpp);
        });
    expect_same(
        {{4, 8}, {6, 8}, {6}},
        [&](auto& out) {
          auto gradients = made(fk_linear_gradients_init);
          gradients.x = &out[0].c, gradients.weight = &out[1].c, gradients.bias = &out[2].c;
          return fk_linear_cross_entropy_backward(&gv.c, &xv.c, &wv.c, &bv.c, &tv.c, &cv.c, &lv.c, &gradients, &c,
                                                  nullptr);
        },
        [&](auto& out) {
          fk::linear_cross_entropy_backward(gv.cpp, xv.cpp, wv.cpp, bv.cpp, tv.cpp, cv.cpp, lv.cpp,
                                            {out[0].cpp, out[1].cpp, out[2].cpp}, cpp);
        });
  }
  const Both lv(ones, {4});
  expect_same(
      {{4}, {4}},
      [&](auto& out) {
        return fk_linear_selected_log_prob(&xv.c, &wv.c, nullptr, &tv.c, &out[0].c, &out[1].c, 3.0f, 0.5f, 2, nullptr);
      },
      [&](auto& out) {
        fk::linear_selected_log_prob(xv.cpp, wv.cpp, {}, tv.cpp, out[0].cpp, out[1].cpp, 3.0f, 0.5f, 2);
      });
  expect_same(
      {{4, 8}, {6, 8}},
      [&](auto& out) {
        auto gradients = made(fk_linear_gradients_init);
        gradients.x = &out[0].c, gradients.weight = &out[1].c;
        return fk_linear_selected_log_prob_backward(&lv.c, &xv.c, &wv.c, nullptr, &tv.c, &lv.c, &gradients, 3.0f, 0.5f,
                                                    2, nullptr);
      },
      [&](auto& out) {
        fk::linear_selected_log_prob_backward(lv.cpp, xv.cpp, wv.cpp, {}, tv.cpp, lv.cpp, {out[0].cpp, out[1].cpp, {}},
                                              3.0f, 0.5f, 2);
      });
}

TEST(CApi, EightBitPagesWithRopeAndScales) {
  const Floats k = random_floats(3 * 2 * 8, 1), v = random_floats(3 * 2 * 8, 2), q = random_floats(3 * 4 * 8, 3);
  Floats k_read[2], v_read[2], q_out[2];
  for (int api = 0; api < 2; ++api) {
    auto options = made(fk_kv_page_pool_options_init);
    options.num_pages = 2, options.heads_kv = 2, options.head_dim = 8, options.page_size = 16, options.dtype = FK_INT8;
    fk_kv_page_pool* pool = nullptr;
    ASSERT_EQ(fk_kv_page_pool_create(&options, nullptr, &pool), FK_OK) << fk_last_error_message();
    Both kp, vp, ks, vs;
    EXPECT_OK(fk_kv_page_pool_k_pages(pool, 0, &kp.c));
    EXPECT_OK(fk_kv_page_pool_v_pages(pool, 0, &vp.c));
    EXPECT_OK(fk_kv_page_pool_scales(pool, 0, &ks.c, &vs.c));
    for (Both* both : {&kp, &vp, &ks, &vs}) both->cpp = fk::c::Call("test").tensor("tensor", &both->c);
    const std::vector<int64_t> slots = {16, 17, 18}, positions = {3, 4, 5};
    const std::vector<int32_t> table = {1}, lengths = {3};
    k_read[api].resize(3 * 2 * 8), v_read[api].resize(3 * 2 * 8), q_out[api].resize(3 * 4 * 8);
    const Both kv(k, {3, 2, 8}), vv(v, {3, 2, 8}), qv(q, {3, 4, 8}), sv(slots.data(), FK_INT64, {3}),
        pv(positions.data(), FK_INT64, {3}), tv(table.data(), FK_INT32, {1, 1}), lv(lengths.data(), FK_INT32, {1}),
        kr(k_read[api], {1, 3, 2, 8}), vr(v_read[api], {1, 3, 2, 8}), qo(q_out[api], {3, 4, 8});
    if (api == 0) {
      auto rope_options = made(fk_rope_options_init);
      rope_options.theta = 50.0;
      auto rope = made(fk_kv_append_rope_init);
      rope.positions = &pv.c, rope.options = &rope_options, rope.q = &qv.c, rope.q_out = &qo.c;
      auto scales = made(fk_kv_scales_init);
      scales.k = &ks.c, scales.v = &vs.c;
      EXPECT_OK(fk_kv_append(&kv.c, &vv.c, &kp.c, &vp.c, &scales, &sv.c, &rope, nullptr));
      EXPECT_OK(fk_kv_read(&kp.c, &vp.c, &scales, &tv.c, &lv.c, &kr.c, &vr.c, nullptr));
    } else {
      fk::KvAppendRope rope{pv.cpp, {}, qv.cpp, qo.cpp, {}, {}};
      rope.options.theta = 50.0;
      fk::kv_append(kv.cpp, vv.cpp, kp.cpp, vp.cpp, {ks.cpp, vs.cpp}, sv.cpp, rope);
      fk::kv_read(kp.cpp, vp.cpp, {ks.cpp, vs.cpp}, tv.cpp, lv.cpp, kr.cpp, vr.cpp);
    }
    fk_kv_page_pool_destroy(pool);
  }
  EXPECT_EQ(k_read[0], k_read[1]);
  EXPECT_EQ(v_read[0], v_read[1]);
  EXPECT_EQ(q_out[0], q_out[1]);
  EXPECT_NE(q_out[0], q);
}

TEST(CApi, BoundsOfSequencesAndTokensThatFollowThem) {
  const Floats q = random_floats(5 * 2 * 8, 1), k = random_floats(5 * 1 * 8, 2),
               pages = random_floats(4 * 2 * 1 * 8, 3);
  const std::vector<int32_t> starts = {0, 2, 5}, used = {1, 2}, first = {1, 0}, table = {2, 0, 1, 3}, lengths = {1, 0};
  const Both qv(q, {5, 2, 8}), kv(k, {5, 1, 8}), pv(pages, {4, 2, 1, 8}), sv(starts.data(), FK_INT32, {3}),
      uv(used.data(), FK_INT32, {2}), fv(first.data(), FK_INT32, {2}), tv(table.data(), FK_INT32, {2, 2}),
      lv(lengths.data(), FK_INT32, {2});
  const std::vector<std::function<void(fk_attention_options&, fk::AttentionOptions&)>> settings = {
      [](auto&, auto&) {},
      [&](auto& c, auto& cpp) { c.seqused_q = &uv.c, cpp.seqused_q = uv.cpp; },
      [&](auto& c, auto& cpp) { c.seqused_k = &uv.c, cpp.seqused_k = uv.cpp; },
  };
  std::vector<Floats> results;
  for (const auto& set : settings) {
    auto c = made(fk_attention_options_init);
    fk::AttentionOptions cpp;
    set(c, cpp);
    expect_same(
        {{5, 2, 8}},
        [&](auto& out) {
          const fk_status status =
              fk_attention_varlen(&qv.c, &kv.c, &kv.c, &sv.c, &sv.c, 3, 3, &out[0].c, nullptr, &c, nullptr);
          const float* const data = static_cast<const float*>(out[0].c.data);
          results.emplace_back(data, data + 5 * 2 * 8);
          return status;
        },
        [&](auto& out) { fk::attention_varlen(qv.cpp, kv.cpp, kv.cpp, sv.cpp, sv.cpp, 3, 3, out[0].cpp, {}, cpp); });
    for (std::size_t i = 0; i + 1 < results.size(); ++i) EXPECT_NE(results[i], results.back()) << "setting " << i;
  }
  auto c = made(fk_attention_options_init);
  c.k_starts = &fv.c;
  fk::AttentionOptions cpp;
  cpp.k_starts = fv.cpp;
  const Both two(q, {2, 2, 1, 8}), counts(used.data(), FK_INT32, {2});
  expect_same(
      {{2, 2, 1, 8}},
      [&](auto& out) {
        return fk_attention_paged(&two.c, &pv.c, &pv.c, &tv.c, &counts.c, nullptr, 1, &out[0].c, nullptr, &c, nullptr);
      },
      [&](auto& out) { fk::attention_paged(two.cpp, pv.cpp, pv.cpp, tv.cpp, counts.cpp, {}, 1, out[0].cpp, {}, cpp); });

  Floats k_pages[2], v_pages[2];
  std::vector<int32_t> after[2];
  for (int api = 0; api < 2; ++api) {
    k_pages[api].resize(4 * 2 * 8), v_pages[api].resize(4 * 2 * 8), after[api].resize(2);
    const Both kp(k_pages[api], {4, 2, 1, 8}), vp(v_pages[api], {4, 2, 1, 8}), av(after[api].data(), FK_INT32, {2});
    if (api == 0) {
      auto places = made(fk_kv_append_places_init);
      places.block_table = &tv.c, places.seq_lens = &lv.c, places.cu_seqlens = &sv.c, places.positions = &fv.c,
      places.seq_lens_after = &av.c;
      auto rope = made(fk_kv_append_rope_init);
      EXPECT_OK(fk_kv_append_to_sequences(&kv.c, &kv.c, &kp.c, &vp.c, nullptr, &places, &rope, nullptr));
    } else {
      fk::kv_append_to_sequences(kv.cpp, kv.cpp, kp.cpp, vp.cpp, {}, {tv.cpp, lv.cpp, sv.cpp, fv.cpp, av.cpp},
                                 fk::KvAppendRope{});
    }
  }
  EXPECT_EQ(k_pages[0], k_pages[1]);
  EXPECT_EQ(v_pages[0], v_pages[1]);
  EXPECT_EQ(after[0], after[1]);
  EXPECT_EQ(after[0], (std::vector<int32_t>{3, 3}));
  EXPECT_EQ(fk_kv_append_to_sequences(&kv.c, &kv.c, &pv.c, &pv.c, nullptr, nullptr, nullptr, nullptr),
            FK_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(fk_last_error_message()).rfind("kv_append_to_sequences: places is NULL", 0), 0u)
      << fk_last_error_message();
}

TEST(CApi, ErrorsHaveAStatusAMessageAndNumbers) {
  Floats x(6), out(6);
  Both xv(x, {2, 3}), other(out, {3, 2});
  EXPECT_EQ(fk_add(&xv.c, &xv.c, &other.c, nullptr), FK_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(fk_last_error_message()).rfind("add: out is float32[3, 2]", 0), 0u) << fk_last_error_message();
  EXPECT_EQ(fk_add(nullptr, &xv.c, &xv.c, nullptr), FK_INVALID_ARGUMENT);
  const auto refused = [&](auto change) {
    fk_tensor bad = xv.c;
    change(bad);
    EXPECT_EQ(fk_add(&bad, &xv.c, &xv.c, nullptr), FK_INVALID_ARGUMENT);
    return std::string(fk_last_error_message());
  };
  EXPECT_EQ(refused([](auto& t) { t.dtype = 8; }), "add: a.dtype is 8; it must be FK_FLOAT32 (0) to FK_INT8 (7)");
  EXPECT_EQ(refused([](auto& t) { t.ndim = 9; }), "add: a has 9 dims; there are 0 to 8");
  EXPECT_EQ(refused([](auto& t) { t.ndim = -1; }), "add: a has -1 dims; there are 0 to 8");
  EXPECT_EQ(refused([](auto& t) { t.shape[1] = -3; }), "add: a.shape[1]=-3; it must not be negative");
  EXPECT_EQ(refused([](auto& t) { t.shape[0] = t.shape[1] = INT64_MAX; }), "add: a has more than 2^63 - 1 elements");
  EXPECT_EQ(refused([](auto& t) { t.device.type = 7; }), "add: a.device.type is 7; it must be FK_CPU or FK_CUDA");
  EXPECT_EQ(refused([](auto& t) { t.device.index = 1; }), "add: a.device.index is 1; on the CPU it is 0");
  EXPECT_EQ(refused([](auto& t) { t.device = {FK_CUDA, -1}; }), "add: a.device.index is -1; it must not be negative");
  EXPECT_NE(refused([](auto& t) { t.data = nullptr; }).find("null"), std::string::npos);

  auto options = made(fk_attention_options_init);
  options.causal = 2;
  EXPECT_EQ(fk_attention(&xv.c, &xv.c, &xv.c, &xv.c, nullptr, &options, nullptr), FK_INVALID_ARGUMENT);
  EXPECT_STREQ(fk_last_error_message(), "attention: causal is 2; it must be 0 or 1");
  EXPECT_EQ(fk_linear(&xv.c, &xv.c, nullptr, &xv.c, nullptr, 4, nullptr), FK_INVALID_ARGUMENT);
  EXPECT_EQ(fk_set_num_threads(0), FK_INVALID_ARGUMENT);
  EXPECT_EQ(fk_force_kernels("no_such_kernel"), FK_INVALID_ARGUMENT);
  EXPECT_EQ(fk_force_kernels(nullptr), FK_INVALID_ARGUMENT);

  auto pages = made(fk_kv_page_pool_options_init);
  pages.num_pages = 3, pages.heads_kv = 1, pages.head_dim = 8, pages.page_size = 16;
  fk_kv_page_pool* pool = nullptr;
  ASSERT_EQ(fk_kv_page_pool_create(&pages, nullptr, &pool), FK_OK);
  int32_t taken[4];
  EXPECT_EQ(fk_kv_page_pool_take(pool, 4, taken), FK_OUT_OF_PAGES);
  fk_error_details details;
  ASSERT_EQ(fk_last_error_details(&details, sizeof details), FK_OK);
  EXPECT_EQ(details.status, FK_OUT_OF_PAGES);
  EXPECT_EQ(details.requested_pages, 4u);
  EXPECT_EQ(details.free_pages, 3u);
  EXPECT_EQ(details.num_pages, 3u);
  EXPECT_EQ(details.requested_bytes, 4 * fk_kv_page_pool_page_bytes(pool));
  EXPECT_EQ(fk_kv_page_pool_give_back(pool, -1, taken), FK_INVALID_ARGUMENT);
  fk_kv_page_pool_destroy(pool);

  const std::vector<int32_t> table = {0, 7}, lengths = {16, 1};
  const Both tv(table.data(), FK_INT32, {2, 1}), lv(lengths.data(), FK_INT32, {2});
  EXPECT_EQ(fk_check_block_table(&tv.c, &lv.c, 4, 16, nullptr), FK_BAD_BLOCK_TABLE);
  ASSERT_EQ(fk_last_error_details(&details, sizeof details), FK_OK);
  EXPECT_EQ(details.sequence, 1);
  EXPECT_EQ(details.slot, 0);
  EXPECT_EQ(details.page, 7);
  EXPECT_EQ(details.requested_pages, 0u);
}

TEST(CApi, NoDeviceIsUnsupportedOrRefused) {
  if (fk_num_cuda_devices() > 0) GTEST_SKIP() << "this machine has one";
  fk_memory* memory = nullptr;
  EXPECT_EQ(fk_memory_default_create({FK_CUDA, 0}, &memory), FK_UNSUPPORTED);
  EXPECT_EQ(memory, nullptr);
}

TEST(CApi, EachThreadHasItsOwnError) {
  EXPECT_EQ(fk_set_num_threads(-5), FK_INVALID_ARGUMENT);
  const std::string mine = fk_last_error_message();
  std::thread([] {
    EXPECT_STREQ(fk_last_error_message(), "");
    EXPECT_EQ(fk_force_kernels("nothing/such"), FK_INVALID_ARGUMENT);
  }).join();
  EXPECT_EQ(fk_last_error_message(), mine);
}

// A struct of a later version, and a caller that was compiled with an earlier one.
struct Grown {
  size_t size;
  int32_t old_field;
  int32_t new_field;
};

}  // namespace

namespace flashkernel::c {
template <>
inline constexpr std::size_t kFirstSize<Grown> = offsetof(Grown, new_field);
}

namespace {

TEST(CApi, StructsMayGrow) {
  const Grown defaults{sizeof(Grown), 1, 2};
  Grown given{offsetof(Grown, new_field), 10, 20};
  Grown known = fk::c::take("grown", given, defaults);
  EXPECT_EQ(known.old_field, 10);
  EXPECT_EQ(known.new_field, 2) << "the caller does not know the field: its bytes are none of the library's";
  given.size = sizeof given;
  EXPECT_EQ(fk::c::take("grown", given, defaults).new_field, 20);
  given.size = sizeof given + 8;
  EXPECT_THROW(fk::c::take("grown", given, defaults), fk::InvalidArgument);
  given.size = 0;
  EXPECT_THROW(fk::c::take("grown", given, defaults), fk::InvalidArgument);
  Grown written{0, 0, 99};
  fk::c::give("grown", Grown{0, 5, 6}, &written, offsetof(Grown, new_field));
  EXPECT_EQ(written.size, offsetof(Grown, new_field));
  EXPECT_EQ(written.old_field, 5);
  EXPECT_EQ(written.new_field, 99) << "written past what the caller has";
}

TEST(CApi, UnknownSizesAreRefused) {
  Floats x(6);
  const Both xv(x, {2, 3});
  fk_context context{};
  EXPECT_EQ(fk_add(&xv.c, &xv.c, &xv.c, &context), FK_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fk_last_error_message()).find("size is 0"), std::string::npos) << fk_last_error_message();
  EXPECT_EQ(fk_context_init(&context, sizeof context + 1), FK_INVALID_ARGUMENT);
  EXPECT_EQ(fk_context_init(nullptr, sizeof context), FK_INVALID_ARGUMENT);
  EXPECT_OK(fk_context_init(&context, sizeof context));
  EXPECT_OK(fk_add(&xv.c, &xv.c, &xv.c, &context));
}

TEST(CApi, ExplainsAndForces) {
  const AttentionInputs in;
  Floats out(in.q.size(), 7.0f);
  const Both out_view(out, {2, 4, 5, 8});
  fk_explanation* explanation = nullptr;
  ASSERT_EQ(fk_explanation_create(&explanation), FK_OK);
  auto context = made(fk_context_init);
  context.explain = explanation;
  const std::string before = fk_forced_kernels();
  for (int repeat = 0; repeat < 2; ++repeat) {  // a second call writes it anew
    EXPECT_OK(fk_force_kernels("attention_fwd/cpu/scalar"));
    EXPECT_OK(fk_attention(&in.q_view.c, &in.k_view.c, &in.v_view.c, &out_view.c, nullptr, nullptr, &context));
    EXPECT_STREQ(fk_forced_kernels(), "attention_fwd/cpu/scalar");
    EXPECT_OK(fk_force_kernels(before.c_str()));
    EXPECT_STREQ(fk_explanation_kernel(explanation), "attention_fwd/cpu/scalar");
  }
  EXPECT_EQ(out.front(), 7.0f);
  const int64_t count = fk_explanation_num_candidates(explanation);
  ASSERT_GT(count, 0);
  bool accepted = false;
  for (int64_t i = 0; i < count; ++i) {
    fk_candidate candidate;
    ASSERT_EQ(fk_explanation_candidate(explanation, i, &candidate, sizeof candidate), FK_OK);
    accepted = accepted || (candidate.accepted == 1 && candidate.modelled_us > 0 &&
                            std::string(candidate.kernel) == "attention_fwd/cpu/scalar");
    EXPECT_EQ(candidate.accepted == 1, std::string(candidate.reason).empty());
  }
  EXPECT_TRUE(accepted);
  fk_candidate candidate;
  EXPECT_EQ(fk_explanation_candidate(explanation, count, &candidate, sizeof candidate), FK_INVALID_ARGUMENT);
  fk_explanation_destroy(explanation);

  fk_kernel_list* list = nullptr;
  ASSERT_EQ(fk_kernel_list_create(&list), FK_OK);
  const auto kernels = fk::kernels();
  ASSERT_EQ(fk_kernel_list_count(list), static_cast<int64_t>(kernels.size()));
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    fk_kernel_info info;
    ASSERT_EQ(fk_kernel_list_get(list, static_cast<int64_t>(i), &info, sizeof info), FK_OK);
    EXPECT_EQ(info.id, kernels[i].id);
    EXPECT_EQ(info.arithmetic, kernels[i].arithmetic);
    EXPECT_EQ(info.cpu_features, kernels[i].cpu_features);
    EXPECT_EQ(info.available == 1, kernels[i].available);
  }
  fk_kernel_list_destroy(list);
}

TEST(CApi, NamesEveryOp) {
  const auto ops = fk::ops();
  for (std::size_t i = 0; i < ops.size(); ++i) EXPECT_EQ(fk_op_name(static_cast<int64_t>(i)), ops[i].name);
  EXPECT_EQ(fk_op_name(static_cast<int64_t>(ops.size())), nullptr);
  EXPECT_EQ(fk_op_name(-1), nullptr);
}

struct Counted {
  std::size_t allocated = 0, live = 0;
  bool empty = false;
};

TEST(CApi, TheCallersAllocatorServesThePoolAndOutlivesItsHandle) {
  Counted counted;
  auto callbacks = fk_memory_callbacks{};
  callbacks.size = sizeof callbacks;
  callbacks.user = &counted;
  callbacks.allocate = [](void* user, size_t bytes, size_t alignment, void*) -> void* {
    auto& state = *static_cast<Counted*>(user);
    if (state.empty) return nullptr;
    state.allocated += bytes, ++state.live;
    return ::operator new(bytes, std::align_val_t(alignment));
  };
  callbacks.deallocate = [](void* user, void* pointer, size_t, size_t alignment, void*) {
    --static_cast<Counted*>(user)->live;
    ::operator delete(pointer, std::align_val_t(alignment));
  };
  fk_memory *memory = nullptr, *cached = nullptr;
  ASSERT_EQ(fk_memory_custom_create(&callbacks, &memory), FK_OK);
  ASSERT_EQ(fk_memory_caching_create(memory, 0, &cached), FK_OK);
  void* pointer = nullptr;
  EXPECT_OK(fk_memory_allocate(cached, 1000, 0, nullptr, &pointer));
  EXPECT_EQ(counted.live, 1u);
  fk_memory_stats stats;
  EXPECT_OK(fk_memory_get_stats(cached, &stats, sizeof stats));
  EXPECT_GE(stats.allocated_bytes, 1000u);
  EXPECT_OK(fk_memory_deallocate(cached, pointer, 1000, 0, nullptr));
  uint64_t trimmed = 0;
  EXPECT_OK(fk_memory_trim(cached, &trimmed));
  EXPECT_GE(trimmed, 1000u);
  EXPECT_EQ(counted.live, 0u);
  EXPECT_EQ(fk_memory_allocate(cached, 8, 3, nullptr, &pointer), FK_INVALID_ARGUMENT);

  auto options = made(fk_kv_page_pool_options_init);
  options.num_pages = 4, options.heads_kv = 1, options.head_dim = 8, options.page_size = 16, options.dtype = FK_FLOAT32;
  fk_kv_page_pool* pool = nullptr;
  fk_kv_cache* cache = nullptr;
  ASSERT_EQ(fk_kv_page_pool_create(&options, cached, &pool), FK_OK) << fk_last_error_message();
  ASSERT_EQ(fk_kv_cache_create(pool, &cache), FK_OK);
  fk_memory_destroy(memory);  // in the wrong order: each handle keeps what it was made from
  fk_memory_destroy(cached);
  fk_kv_page_pool_destroy(pool);
  EXPECT_GT(counted.live, 0u);
  fk_sequence sequence;
  EXPECT_OK(fk_kv_cache_create_sequence(cache, nullptr, 0, &sequence, nullptr));
  int64_t slots[20], length = 0, num_pages = 0;
  EXPECT_OK(fk_kv_cache_append(cache, sequence, 20, nullptr, slots));
  EXPECT_OK(fk_kv_cache_length(cache, sequence, &length));
  EXPECT_EQ(length, 20);
  int32_t pages[2];
  EXPECT_EQ(fk_kv_cache_pages(cache, sequence, 1, pages, &num_pages), FK_INVALID_ARGUMENT);
  EXPECT_EQ(num_pages, 2);
  EXPECT_OK(fk_kv_cache_pages(cache, sequence, 2, pages, &num_pages));
  EXPECT_EQ(slots[19], pages[1] * 16 + 3);
  EXPECT_EQ(fk_kv_cache_append(cache, sequence, 1000, nullptr, std::vector<int64_t>(1000).data()), FK_OUT_OF_PAGES);
  EXPECT_EQ(fk_kv_cache_append(cache, sequence, -1, nullptr, slots), FK_INVALID_ARGUMENT);
  EXPECT_EQ(fk_kv_cache_create_sequence(cache, nullptr, -1, &sequence, nullptr), FK_INVALID_ARGUMENT);
  fk_kv_cache_destroy(cache);
  EXPECT_EQ(counted.live, 0u);

  counted.empty = true;
  ASSERT_EQ(fk_memory_custom_create(&callbacks, &memory), FK_OK);
  EXPECT_EQ(fk_memory_allocate(memory, 5000, 0, nullptr, &pointer), FK_OUT_OF_MEMORY);
  fk_error_details details;
  EXPECT_EQ(fk_last_error_details(&details, sizeof details), FK_OK);
  EXPECT_EQ(details.requested_bytes, 5000u);
  fk_memory_destroy(memory);
  for (auto* destroy : {fk_memory_destroy}) destroy(nullptr);
  fk_kv_cache_destroy(nullptr);
  fk_kv_page_pool_destroy(nullptr);
}

TEST(CApi, SequencesShareAPublishedPrompt) {
  auto options = made(fk_kv_page_pool_options_init);
  options.num_pages = 8, options.heads_kv = 1, options.head_dim = 8, options.page_size = 16;
  fk_kv_page_pool* pool = nullptr;
  fk_kv_cache* cache = nullptr;
  ASSERT_EQ(fk_kv_page_pool_create(&options, nullptr, &pool), FK_OK);
  ASSERT_EQ(fk_kv_cache_create(pool, &cache), FK_OK);
  std::vector<int32_t> tokens(40, 5);
  std::vector<int64_t> slots(40);
  fk_sequence first, second, third;
  int64_t found = -1, dropped = 0, length = 0;
  EXPECT_OK(fk_kv_cache_create_sequence(cache, tokens.data(), 40, &first, &found));
  EXPECT_EQ(found, 0);
  EXPECT_OK(fk_kv_cache_append(cache, first, 40, nullptr, slots.data()));
  EXPECT_OK(fk_kv_cache_publish(cache, first, tokens.data(), 40));
  EXPECT_OK(fk_kv_cache_create_sequence(cache, tokens.data(), 40, &second, &found));
  EXPECT_EQ(found, 32);
  EXPECT_OK(fk_kv_cache_fork(cache, first, &third));
  EXPECT_OK(fk_kv_cache_truncate(cache, third, 20));
  EXPECT_OK(fk_kv_cache_length(cache, third, &length));
  EXPECT_EQ(length, 20);
  EXPECT_OK(fk_kv_cache_drop_before(cache, third, 16, &dropped));
  EXPECT_EQ(dropped, 1);
  fk_kv_cache_stats stats;
  EXPECT_OK(fk_kv_cache_get_stats(cache, &stats, sizeof stats));
  EXPECT_EQ(stats.num_sequences, 3);
  EXPECT_EQ(stats.num_prefix_hits, 2u);
  EXPECT_EQ(stats.num_pages_used + stats.num_pages_free + stats.num_pages_cached, 8);
  for (const fk_sequence sequence : {first, second, third}) EXPECT_OK(fk_kv_cache_free_sequence(cache, sequence));
  EXPECT_EQ(fk_kv_cache_free_sequence(cache, first), FK_INVALID_ARGUMENT);
  EXPECT_OK(fk_kv_cache_drop_cached(cache, &dropped));
  EXPECT_EQ(dropped, 2);
  EXPECT_EQ(fk_kv_page_pool_num_free(pool), 8);
  fk_kv_cache_destroy(cache);
  fk_kv_page_pool_destroy(pool);
}

}  // namespace
