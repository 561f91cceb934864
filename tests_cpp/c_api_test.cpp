// The ops of the C API against the C++ ones: the same numbers from the same arguments, field by field of every struct.
// Statuses, sizes and handles: c_api_handles_test.cpp.
#include <cstring>
#include <functional>
#include <vector>

#include "c_api/both.hpp"

namespace flashkernel::c_api_tests {
namespace {

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
        saved.residual_out = &out[1].c, saved.mean = &out[2].c, saved.rstd = &out[3].c, saved.weight_offset = 1;
        return fk_layer_norm(&xv.c, &rv.c, &wv.c, &bv.c, &out[0].c, &saved, 0.5f, nullptr);
      },
      [&](auto& out) {
        fk::layer_norm(xv.cpp, rv.cpp, wv.cpp, bv.cpp, out[0].cpp, {out[1].cpp, out[2].cpp, out[3].cpp, 1.0f}, 0.5f);
      });
  expect_same(  // of a program that was compiled before there was an offset
      {{3, 8}, {3}},
      [&](auto& out) {
        auto saved = made(fk_norm_saved_init);
        saved.rstd = &out[1].c, saved.weight_offset = 5, saved.size = offsetof(fk_norm_saved, weight_offset);
        return fk_rms_norm(&xv.c, nullptr, &wv.c, &out[0].c, &saved, 0.5f, nullptr);
      },
      [&](auto& out) {
        fk::rms_norm(xv.cpp, {}, wv.cpp, out[0].cpp, {{}, {}, out[1].cpp}, 0.5f);
      });
  expect_same(
      {{3, 8}, {8}, {8}},
      [&](auto& g) {
        auto gradients = made(fk_norm_gradients_init);
        gradients.x = &g[0].c, gradients.weight = &g[1].c, gradients.bias = &g[2].c, gradients.weight_offset = 1;
        return fk_layer_norm_backward(&gv.c, &xv.c, &wv.c, &mv.c, &sv.c, &rv.c, &gradients, nullptr);
      },
      [&](auto& g) {
        fk::layer_norm_backward(gv.cpp, xv.cpp, wv.cpp, mv.cpp, sv.cpp, rv.cpp, {g[0].cpp, g[1].cpp, g[2].cpp, 1.0f});
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
      fk::KvAppendRope rope{pv.cpp, {}, qv.cpp, qo.cpp, {}, {}, {}, {}};
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

  Floats k_pages[2], v_pages[2], weight = random_floats(8, 4);
  std::vector<int32_t> after[2];
  const Both wv(weight, {8});
  for (int api = 0; api < 2; ++api) {
    k_pages[api].resize(4 * 2 * 8), v_pages[api].resize(4 * 2 * 8), after[api].resize(2);
    const Both kp(k_pages[api], {4, 2, 1, 8}), vp(v_pages[api], {4, 2, 1, 8}), av(after[api].data(), FK_INT32, {2});
    if (api == 0) {
      auto places = made(fk_kv_append_places_init);
      places.block_table = &tv.c, places.seq_lens = &lv.c, places.cu_seqlens = &sv.c, places.positions = &fv.c,
      places.seq_lens_after = &av.c;
      auto rope = made(fk_kv_append_rope_init);
      EXPECT_EQ(rope.norm_eps, 1e-6f);
      rope.k_norm = &wv.c, rope.norm_eps = 0.5f;
      EXPECT_OK(fk_kv_append_to_sequences(&kv.c, &kv.c, &kp.c, &vp.c, nullptr, &places, &rope, nullptr));
    } else {
      fk::KvAppendRope rope;
      rope.k_norm = wv.cpp, rope.norm_eps = 0.5f;
      fk::kv_append_to_sequences(kv.cpp, kv.cpp, kp.cpp, vp.cpp, {}, {tv.cpp, lv.cpp, sv.cpp, fv.cpp, av.cpp}, rope);
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

}  // namespace
}  // namespace flashkernel::c_api_tests
