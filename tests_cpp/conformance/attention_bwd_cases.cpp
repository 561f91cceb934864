// Cases of attention_bwd: the traps of the forward pass, those of its own, and every gradient alone.
#include "conformance/attention_spec.hpp"

namespace flashkernel::conformance {
namespace {

void add(CaseList& list, const std::string& name, const AttentionSpec& spec) {
  list.add(name + "_" + short_name(spec.dtype), [spec](Call& call) { build_attention_backward(call, spec); });
}

void mask_cases(CaseList& list, DType dtype) {
  constexpr std::int64_t kSizes[][2] = {{1, 1}, {1, 90}, {37, 37}, {65, 129}, {130, 70}, {3, 0}, {2, 1}};
  for (const Mask& mask : kMasks)
    for (const auto& [q, k] : kSizes) {
      AttentionSpec spec;
      spec.dtype = dtype;
      spec.mask = mask;
      spec.batch = 1;
      spec.seq_q = q;
      spec.seq_k = k;
      spec.head_dim = 24;
      add(list, std::string("mask_") + mask.name + "_q" + std::to_string(q) + "_k" + std::to_string(k), spec);
    }
  for (const Mask& mask : {kFull, kCausal, kMasks[3]}) {
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.mask = mask;
    spec.batch = 1;
    spec.heads_q = 2;
    spec.heads_kv = 1;
    spec.seq_q = 200;
    spec.seq_k = 300;
    spec.head_dim = 16;
    add(list, std::string("blocks_") + mask.name, spec);
  }
}

void shape_cases(CaseList& list, DType dtype) {
  for (const std::int64_t d : {1, 8, 33, 56, 64, 88, 96, 100, 120, 128, 160, 192, 200, 256}) {
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.batch = 1;
    spec.seq_q = 19;
    spec.seq_k = 35;
    spec.head_dim = d;
    spec.mask = kCausal;
    add(list, "head_dim_" + std::to_string(d), spec);
  }
  constexpr std::int64_t kPairs[][2] = {{64, 128}, {128, 64}, {192, 128}, {33, 100}, {1, 256}, {256, 1}};
  for (const auto& [d, dv] : kPairs) {
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.batch = 1;
    spec.seq_q = 21;
    spec.seq_k = 37;
    spec.head_dim = d;
    spec.head_dim_v = dv;
    add(list, "head_dims_" + std::to_string(d) + "_" + std::to_string(dv), spec);
  }
  for (const std::int64_t ratio : {3, 5, 6, 12, 20}) {
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.batch = 1;
    spec.heads_q = 2 * ratio;
    spec.heads_kv = 2;
    spec.seq_q = 13;
    spec.seq_k = 30;
    spec.mask = kCausal;
    add(list, "group_" + std::to_string(ratio), spec);
  }
}

void feature_cases(CaseList& list, DType dtype) {
  for (int bits = 1; bits < 32; ++bits)
    for (const Mask& mask : {kFull, kMasks[4]}) {
      AttentionSpec spec;
      spec.dtype = dtype;
      spec.heads_q = 4;
      spec.seq_q = 20;
      spec.seq_k = 35;
      spec.mask = mask;
      std::string name = "features";
      if (bits & 1) spec.softcap = 1.5f, name += "_softcap";
      if (bits & 2) spec.bias = BiasSpec{{2, 4, 20, 35}, DType::kFloat32}, name += "_bias";
      if (bits & 4) spec.alibi_dims = bits & 1 ? 1 : 2, name += "_alibi";
      if (bits & 8) spec.sinks = true, name += "_sinks";
      if (bits & 16) spec.grad_lse = true, name += "_grad_lse";
      add(list, name + "_" + mask.name, spec);
    }
}

void bias_cases(CaseList& list, DType dtype) {
  for (const auto& [shape_name, shape] : kBiasShapes)
    for (const bool same_dtype : {false, true}) {
      if (same_dtype && dtype == DType::kFloat32) continue;
      AttentionSpec spec;
      spec.dtype = dtype;
      spec.batch = 3;
      spec.seq_q = 17;
      spec.seq_k = 39;
      spec.mask = kCausal;
      spec.bias = BiasSpec{shape, same_dtype ? dtype : DType::kFloat32, {{}, {}, 0, 1, {}}};
      spec.grad_bias_dtype = spec.bias->dtype;
      add(list, std::string("bias_") + shape_name + (same_dtype ? "_same_dtype" : ""), spec);
    }
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.seq_q = 17;
  spec.seq_k = 39;
  spec.bias = BiasSpec{{2, 2, 17, 39}, DType::kFloat32, {}, hide_by_bias};
  add(list, "bias_minus_infinity", spec);
  spec.want_bias = false;
  add(list, "bias_without_its_gradient", spec);
}

// Rows whose LSE is so large that it holds nothing of the number of keys.
void lowest_bias_cases(CaseList& list, DType dtype) {
  for (const bool same_dtype : {false, true})
    for (const std::int64_t d : {32, 64, 96, 128, 192, 256}) {
      if (same_dtype && (dtype == DType::kFloat32 || d % 64 != 0)) continue;
      AttentionSpec spec;
      spec.dtype = dtype;
      spec.batch = 2;
      spec.heads_q = 2;
      spec.heads_kv = 1;
      spec.seq_q = 70;
      spec.seq_k = 140;
      spec.head_dim = d;
      const DType bias = same_dtype ? dtype : DType::kFloat32;
      spec.bias = BiasSpec{{70, 140}, bias, {}, hide_by_lowest(bias)};
      spec.grad_bias_dtype = bias;
      const std::string name = "lowest_bias_d" + std::to_string(d) + (same_dtype ? "_same_dtype" : "");
      add(list, name, spec);
      spec.want_bias = false;
      spec.adjust = [](AttentionTensors& t) {  // of padding: no gradient of its own
        for (std::int64_t i = 0; i < 70; ++i)
          for (std::int64_t n = 0; n < t.grad_out->numel() / 70 && i % 8 < 7; ++n) {
            const std::int64_t columns = t.grad_out->shape()[3], row = n / columns;
            t.grad_out->set_at({row / 2, row % 2, i, n % columns}, 0);
          }
      };
      add(list, name + "_of_padding", spec);
      spec.adjust = {};
      spec.want_bias = true;
      spec.sinks = spec.grad_lse = true;
      spec.softcap = 2.0f;
      spec.mask = kCausal;
      add(list, name + "_and_all", spec);
    }
}

void extreme_cases(CaseList& list, DType dtype) {
  // Very negative LSE: q along u, k against it. Every remainder of a tile, since padded rows are where exp(s - lse)
  // explodes.
  for (const std::int64_t q : {1, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 129, 192}) {
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.batch = 1;
    spec.heads_q = 1;
    spec.heads_kv = 1;
    spec.seq_q = q;
    spec.seq_k = q + 3;
    spec.head_dim = 16;
    // Scores of about -16 * 15 * 15 / 4 = -900, summed in fp32: off by some 16 * 2^-24 * 900 / 4 = 2e-4, the weights
    // with them, and dQ and dK by that times the 15 of K and Q.
    spec.factor = 300;
    spec.adjust = [](AttentionTensors& t) {
      t.q->transform([](double x) { return 15 + 0.2 * x; });
      t.k->transform([](double x) { return -15 + 0.2 * x; });
    };
    add(list, "very_negative_lse_q" + std::to_string(q), spec);
  }
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.seq_q = 20;
  spec.seq_k = 35;
  spec.factor = 5000;  // as in the forward pass: logits of 1e5 are off by up to 0.05
  spec.adjust = make_logits_huge;
  spec.want_q = spec.want_k = false;  // they carry q's and k's 320 too, and say nothing more
  add(list, "logits_1e5", spec);

  spec = {};
  spec.dtype = dtype;
  spec.seq_q = 5;
  spec.seq_k = 40;
  spec.mask = {"left3_right0", false, 3, 0};
  spec.adjust = [](AttentionTensors& t) {  // keys before 32 are seen by nobody
    for (std::int64_t j = 0; j < 32; ++j)
      for (std::int64_t d = 0; d < 32; ++d)
        t.k->set_at({j % 2, 0, j, d}, kNan), t.v->set_at({j % 2, 1, j, d}, kInfinity);
  };
  add(list, "nan_behind_window", spec);
  spec.seq_q = spec.seq_k = 40;
  spec.mask = kCausal;
  spec.adjust = [](AttentionTensors& t) { t.v->set_at({0, 1, 20, 3}, kNan); };
  add(list, "nan_value_seen_by_later_rows", spec);
  spec.adjust = [](AttentionTensors& t) { t.grad_out->set_at({0, 1, 20, 3}, kNan); };
  add(list, "nan_grad_out", spec);
  spec = {};
  spec.dtype = dtype;
  spec.seq_q = 30;  // rows 0..19 see no key
  spec.seq_k = 10;
  spec.mask = kCausal;
  spec.grad_lse = true;
  add(list, "fully_masked_rows", spec);
  spec.sinks = true;
  add(list, "fully_masked_rows_but_sinks", spec);
}

// Every bucket of head dims over several tiles of queries and keys: plain, with everything that changes scores, and
// with values that are not finite.
void bucket_cases(CaseList& list, DType dtype) {
  for (const std::int64_t d : {32, 64, 96, 128, 192, 256}) {
    const std::string suffix = "_d" + std::to_string(d);
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.batch = 1;
    spec.heads_q = 2;
    spec.heads_kv = 1;
    spec.seq_q = 100;
    spec.seq_k = 140;
    spec.head_dim = d;
    for (const Mask& mask : {kFull, kCausal, Mask{"left60_right20", false, 60, 20}}) {
      spec.mask = mask;
      add(list, std::string("bucket_") + mask.name + suffix, spec);
    }
    spec.mask = kCausal;
    spec.adjust = [](AttentionTensors& t) { t.k->set_at({0, 0, 70, 3}, kInfinity); };
    add(list, "infinite_key" + suffix, spec);
    spec.adjust = [](AttentionTensors& t) {
      t.k->set_at({0, 0, 90, 2}, -kInfinity), t.v->set_at({0, 0, 130, 2}, kNan);
    };
    add(list, "infinite_key_and_nan_value" + suffix, spec);
    spec.adjust = {};
    spec.seq_q = 70;
    spec.seq_k = 140;
    spec.softcap = 1.5f;
    spec.alibi_dims = 2;
    spec.sinks = spec.grad_lse = true;
    spec.bias = BiasSpec{{2, 70, 140}, DType::kFloat32};
    add(list, "bucket_everything" + suffix, spec);
    spec.softcap = 0;
    spec.alibi_dims = 0;
    spec.mask = kFull;
    spec.batch = 2;
    spec.bias = BiasSpec{{1, 1, 140}, DType::kFloat32};
    add(list, "bucket_bias_of_keys" + suffix, spec);
    spec.sinks = spec.grad_lse = false;
    spec.bias = BiasSpec{{70, 140}, DType::kFloat32, {}, [](TestTensor& bias) {
                           for (std::int64_t i = 0; i < 70; ++i)
                             for (const std::int64_t j : {3, 77}) bias.set_at({i, j}, -kInfinity);
                         }};
    spec.adjust = [d](AttentionTensors& t) {  // hidden by the bias
      for (std::int64_t c = 0; c < d; ++c) t.k->set_at({0, 0, 77, c}, 0), t.v->set_at({0, 0, 77, c}, kNan);
    };
    add(list, "bias_hides_nan_value" + suffix, spec);
  }
}

void layout_cases(CaseList& list, DType dtype) {
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.heads_q = 4;
  spec.seq_q = 18;
  spec.seq_k = 30;
  spec.head_dim = 24;
  spec.head_dim_v = 40;
  spec.mask = kCausal;
  spec.grad_lse = true;
  mix_layouts(spec);
  spec.layout_grad_out = {{}, {1, 0, 2, 3}, 11, 3};
  spec.layout_grad_q = {{}, {2, 0, 1, 3}, 1, 3};
  spec.layout_grad_k = {{}, {0, 2, 1, 3}, 2, 5};
  spec.layout_grad_v = {{}, {2, 1, 0, 3}, 5, 1};
  add(list, "strides_all_different", spec);
  spec.layout_k = {{}, {}, 0, 0, {0}};
  spec.layout_v = {{}, {}, 0, 0, {0, 1}};
  spec.layout_grad_out = {{}, {}, 0, 0, {0, 2}};
  add(list, "strides_expanded", spec);
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 96;
  spec = {};
  spec.dtype = dtype;
  spec.seq_q = 3;
  spec.seq_k = 4;
  spec.head_dim = 16;
  spec.layout_q = {{48, 96, kFar / 2, 1}};
  spec.layout_k = {{64, kFar, 16, 1}};
  spec.layout_v = {{32, 16, kFar / 2, 1}};
  spec.layout_grad_out = {{48, kFar, 16, 1}};
  spec.layout_grad_q = {{kFar, 48, 16, 1}};
  spec.layout_grad_k = {{64, kFar, 16, 1}};
  spec.layout_grad_v = {{32, 16, kFar / 2, 1}};
  add(list, "strides_past_2_31", spec);
  for (int wanted = 0; wanted < 3; ++wanted) {
    spec = {};
    spec.dtype = dtype;
    spec.mask = kCausal;
    spec.want_q = wanted == 0;
    spec.want_k = wanted == 1;
    spec.want_v = wanted == 2;
    add(list, wanted == 0 ? "only_grad_q" : wanted == 1 ? "only_grad_k" : "only_grad_v", spec);
  }
  spec.want_v = false;
  spec.sinks = true;
  spec.bias = BiasSpec{{33}, DType::kFloat32};
  add(list, "only_grad_bias_and_sinks", spec);
  spec = {};
  spec.dtype = dtype;
  spec.batch = 3;
  spec.heads_q = 6;
  spec.seq_q = 50;
  spec.seq_k = 70;
  spec.bias = BiasSpec{{1, 1, 50, 70}, DType::kFloat32};
  spec.repeats = 30;
  add(list, "deterministic_30_runs", spec);
}

/// The cases from the `first` one on are for the row of sm90a for a head dim, which must take them.
void are_for_hopper(CaseList& list, std::size_t first, DType dtype, std::int64_t dim) {
  for (std::size_t i = first; i < list.cases.size(); ++i)
    list.cases[i].is_for(hopper_id("attention_bwd", dtype) + "/d" + std::to_string(dim));
}

/// Several tiles of queries and of keys of the large kernels, at their own head dims, in layouts that all of them take.
void tile_cases(CaseList& list, DType dtype) {
  constexpr Mask kBand = {"left100_right20", false, 100, 20};
  for (const std::int64_t d : {64, 96, 128}) {
    const std::size_t first = list.cases.size();
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.batch = 1;
    spec.heads_q = 2;
    spec.heads_kv = 1;
    spec.seq_q = 150;
    spec.seq_k = 280;
    spec.head_dim = d;
    const std::string dim = "_d" + std::to_string(d);
    for (const Mask& mask : {kCausal, kBand}) {
      spec.mask = mask;
      add(list, std::string("tiles_") + mask.name + dim, spec);
    }
    VarlenSpec varlen;
    varlen.common = spec;
    varlen.lengths_q = {70, 0, 130};
    varlen.lengths_k = {30, 40, 150};
    for (const float softcap : {0.0f, 2.0f}) {
      varlen.common.mask = softcap > 0.0f ? kCausal : kFull;
      varlen.common.softcap = softcap;
      list.add(std::string("tiles_varlen") + (softcap > 0.0f ? "_softcap" : "") + dim + "_" + short_name(dtype),
               [varlen](Call& call) { build_attention_varlen_backward(call, varlen); });
    }
    spec.mask = kFull;
    spec.heads_q = 1;
    spec.seq_q = 70;
    spec.seq_k = 1100;  // so many keys that no kernel keeps an order that nobody asked for
    spec.repeats = 1;
    spec.any_order = true;
    add(list, "tiles_any_order" + dim, spec);
    spec.heads_q = spec.heads_kv = 3;
    spec.seq_k = 4200;  // so many that a head's first tile is taken a group of heads early
    add(list, "tiles_any_order_led" + dim, spec);
    spec.heads_q = spec.heads_kv = 2;  // a last round of items for half of the emulator's four multiprocessors
    spec.seq_q = d == 64 ? 1000 : 520;
    spec.seq_k = 9 * 128;
    add(list, "tiles_cut" + dim, spec);
    are_for_hopper(list, first, dtype, d);
  }
}

/// Calls so long that large head dims on sm90a take the kernel whose key warpgroups make dQ, too. Lengths straddle
/// tiles.
void long_cases(CaseList& list, DType dtype) {
  const std::size_t first = list.cases.size();
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.batch = 1;
  spec.heads_q = spec.heads_kv = 1;
  spec.head_dim = 128;
  spec.seq_q = 1030;
  spec.seq_k = 1090;
  for (const Mask& mask : {kFull, kCausal, Mask{"left300_right70", false, 300, 70}}) {
    spec.mask = mask;
    add(list, std::string("long_") + mask.name, spec);
  }
  spec.mask = kCausal;
  spec.heads_q = 2;
  spec.seq_q = 1060;  // 30 of them see nothing
  spec.seq_k = 1030;
  spec.head_dim = 100;  // rows at multiples of 16 bytes all the same
  spec.grad_lse = true;
  const Layout rows = {{}, {}, 4};
  spec.layout_q = spec.layout_k = spec.layout_v = spec.layout_out = rows;
  spec.layout_grad_out = spec.layout_grad_q = spec.layout_grad_k = spec.layout_grad_v = rows;
  add(list, "long_causal_grouped", spec);
  spec = {};
  spec.dtype = dtype;
  spec.batch = 2;  // several items a block
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.head_dim = 128;
  spec.seq_q = 530;
  spec.seq_k = 640;  // whole tiles of keys: nothing is hidden
  add(list, "long_whole_grouped", spec);
  spec.batch = 1;  // a head's first keys are seen by nobody, and come after another head's last
  spec.heads_q = spec.heads_kv = 6;
  spec.seq_q = 1030;
  spec.seq_k = 1500;
  spec.mask = Mask{"left100_right20", false, 100, 20};
  add(list, "long_unseen_keys", spec);
  spec = {};
  spec.dtype = dtype;
  spec.batch = 1;
  spec.heads_q = spec.heads_kv = 1;
  spec.head_dim = 128;
  spec.seq_q = spec.seq_k = 1024;
  spec.repeats = 1;
  spec.any_order = true;
  add(list, "long_any_order", spec);
  spec.seq_q = 1060;  // 36 of them see nothing
  spec.mask = kCausal;
  add(list, "long_any_order_causal", spec);
  spec.seq_k = 1500;
  spec.mask = Mask{"left100_right20", false, 100, 20};
  add(list, "long_any_order_window", spec);
  spec.seq_q = spec.seq_k = 1024;
  spec.mask = kFull;
  spec.any_order = spec.want_q = false;
  add(list, "long_without_grad_q", spec);
  spec.want_q = true;
  spec.head_dim = 120;
  VarlenSpec varlen;
  varlen.common = spec;
  varlen.lengths_q = {50, 0, 1040};
  varlen.lengths_k = {30, 40, 1030};
  for (const Mask& mask : {kFull, kCausal}) {
    varlen.common.mask = mask;
    list.add(std::string("long_varlen_") + mask.name + "_" + short_name(dtype),
             [varlen](Call& call) { build_attention_varlen_backward(call, varlen); });
  }
  // Enough keys for the first tiles to come early here too: six sequences in two groups on an H200, six in the
  // emulator.
  varlen.common.mask = kFull;
  varlen.common.any_order = true;
  varlen.common.repeats = 1;
  varlen.lengths_q = {520, 70, 10, 40, 30, 20};
  varlen.lengths_k = {8300, 0, 200, 8200, 30, 150};
  list.add(std::string("long_any_order_led_") + short_name(dtype),
           [varlen](Call& call) { build_attention_varlen_backward(call, varlen); });
  are_for_hopper(list, first, dtype, 128);
}

void varlen_cases(CaseList& list, DType dtype) {
  const struct {
    const char* name;
    std::vector<std::int64_t> q, k;
  } lengths[] = {{"plain", {5, 17, 64, 33}, {5, 17, 64, 33}},
                 {"q_shorter_and_longer", {1, 40, 3, 30}, {9, 20, 64, 71}},
                 {"zero_first", {0, 13, 20}, {0, 13, 20}},
                 {"zero_q_only", {13, 0, 20}, {13, 50, 20}},
                 {"zero_k_only", {13, 6, 20}, {13, 0, 20}},
                 {"zero_last", {13, 20, 0}, {13, 20, 0}},
                 {"zero_all", {0, 0}, {0, 0}},
                 {"zero_q_all", {0, 0}, {3, 4}}};
  for (const auto& [name, q, k] : lengths)
    for (const Mask& mask : {kFull, kCausal, kMasks[3]}) {
      VarlenSpec spec;
      spec.common.dtype = dtype;
      spec.common.heads_q = 4;
      spec.common.head_dim = 24;
      spec.common.head_dim_v = 40;
      spec.common.mask = mask;
      spec.common.grad_lse = mask.causal;
      spec.common.layout_q = {{}, {1, 0, 2}, 5, 1};
      spec.common.layout_grad_k = {{}, {1, 0, 2}, 3, 1};
      spec.lengths_q = q;
      spec.lengths_k = k;
      spec.slack = mask.causal ? 50 : 0;
      spec.index_dtype = mask.causal ? DType::kInt64 : DType::kInt32;
      if (mask.left == 7) {
        spec.common.softcap = 2;
        spec.common.alibi_dims = 2;
        spec.common.sinks = true;
      }
      list.add(std::string("varlen_") + name + "_" + mask.name + "_" + short_name(dtype),
               [spec](Call& call) { build_attention_varlen_backward(call, spec); });
    }
}

void cases(CaseList& list) {
  for (const DType dtype : kFloatTypes) {
    mask_cases(list, dtype);
    shape_cases(list, dtype);
    feature_cases(list, dtype);
    bias_cases(list, dtype);
    lowest_bias_cases(list, dtype);
    extreme_cases(list, dtype);
    bucket_cases(list, dtype);
    layout_cases(list, dtype);
    varlen_cases(list, dtype);
    if (dtype != DType::kFloat32) tile_cases(list, dtype), long_cases(list, dtype);
  }
}

const OpCases registration("attention_bwd", cases);

}  // namespace
}  // namespace flashkernel::conformance
