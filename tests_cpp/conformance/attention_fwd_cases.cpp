// Cases of attention_fwd, dense: the CPU-testable traps of kernels of this kind, one block each.
#include "conformance/attention_spec.hpp"

namespace flashkernel::conformance {
namespace {

void add(CaseList& list, const std::string& name, const AttentionSpec& spec) {
  list.add(name, [spec](Call& call) { build_attention(call, spec); });
}

// Also without LSE, where kernels may make the row sums in another way: of weights as they were rounded.
void add_both(CaseList& list, const std::string& name, AttentionSpec spec) {
  add(list, name, spec);
  if (spec.dtype == DType::kFloat32 || (spec.head_dim != 64 && spec.head_dim != 128)) return;
  spec.lse = false;
  add(list, name + "_without_lse", spec);
}

// The same for a head dim of sm90a, which must take it in half precision.
void add_for_hopper(CaseList& list, const std::string& name, const AttentionSpec& spec) {
  const std::size_t first = list.cases.size();
  add_both(list, name, spec);
  if (spec.dtype == DType::kFloat32) return;
  for (std::size_t i = first; i < list.cases.size(); ++i)
    list.cases[i].is_for(hopper_id("attention_fwd", spec.dtype) + "/d" + std::to_string(spec.head_dim));
}

std::string sizes(std::int64_t q, std::int64_t k) { return "q" + std::to_string(q) + "_k" + std::to_string(k); }

// Every row of one kv head of one batch entry.
void set_row(TestTensor& tensor, std::int64_t b, std::int64_t h, std::int64_t row, double value) {
  for (std::int64_t d = 0; d < tensor.shape()[3]; ++d) tensor.set_at({b, h, row, d}, value);
}

void mask_cases(CaseList& list) {
  constexpr std::int64_t kSizes[][2] = {{1, 1},    {1, 300},  {37, 37}, {64, 64}, {65, 129},
                                        {130, 70}, {70, 130}, {3, 0},   {2, 1}};
  for (const DType dtype : kFloatTypes)
    for (const Mask& mask : kMasks)
      for (const auto& [q, k] : kSizes) {
        AttentionSpec spec;
        spec.dtype = dtype;
        spec.mask = mask;
        spec.seq_q = q;
        spec.seq_k = k;
        add(list, std::string("mask_") + mask.name + "_" + sizes(q, k) + "_" + short_name(dtype), spec);
      }
  for (const DType dtype : kFloatTypes)
    for (const Mask& mask : {kFull, kCausal, kMasks[3]}) {
      AttentionSpec spec;  // several blocks of queries and of keys, whatever a kernel's block is
      spec.dtype = dtype;
      spec.mask = mask;
      spec.batch = 1;
      spec.seq_q = 259;
      spec.seq_k = 1037;
      spec.head_dim = 64;
      add_both(list, std::string("blocks_") + mask.name + "_" + short_name(dtype), spec);
    }
  // Warpgroups of 64 queries that come in threes: rows that fill no tile, one group or two of them, before the first or
  // behind the last one, where keys are few and where they are many.
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16})
    for (const Mask& mask : {kFull, kCausal, kMasks[3]})
      for (const auto& [q, k] :
           {std::pair<std::int64_t, std::int64_t>{130, 130}, {320, 320}, {449, 449}, {257, 1000}, {450, 300}}) {
        AttentionSpec spec;
        spec.dtype = dtype;
        spec.mask = mask;
        spec.batch = 1;
        spec.seq_q = q;
        spec.seq_k = k;
        spec.head_dim = 128;
        add_both(list, std::string("threes_") + mask.name + "_" + sizes(q, k) + "_" + short_name(dtype), spec);
      }
  // More heads than the groups whose tiles alternate have, on a GPU of few multiprocessors, and a number that fills no
  // last group.
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16})
    for (const auto& [heads, seq] : {std::pair<std::int64_t, std::int64_t>{83, 140}, {43, 260}}) {
      AttentionSpec spec;
      spec.dtype = dtype;
      spec.batch = 1;
      spec.heads_q = heads;
      spec.heads_kv = 1;
      spec.seq_q = spec.seq_k = seq;
      spec.head_dim = 128;
      spec.mask = kCausal;
      add(list, "groups_of_heads_" + std::to_string(seq) + "_" + short_name(dtype), spec);
    }
  // Heads whose tiles of 128 or 256 queries come in twos: kernels that pair a heavy tile with a light one do it here.
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16})
    for (const std::int64_t d : {64, 128, 192, 256}) {
      AttentionSpec spec;
      spec.dtype = dtype;
      spec.heads_q = spec.heads_kv = 4;
      spec.seq_q = spec.seq_k = d == 64 ? 264 : 250;
      spec.head_dim = d;
      spec.mask = kCausal;
      add_both(list, "pairs_of_tiles_" + std::to_string(d) + "_" + short_name(dtype), spec);
    }
}

void head_dim_cases(CaseList& list) {
  std::vector<std::int64_t> dims = {1, 33, 100};
  for (std::int64_t d = 8; d <= 256; d += 8) dims.push_back(d);
  for (const DType dtype : kFloatTypes)
    for (const std::int64_t d : dims) {
      AttentionSpec spec;
      spec.dtype = dtype;
      spec.batch = 1;
      spec.seq_q = 19;
      spec.seq_k = 45;
      spec.head_dim = d;
      spec.mask = kCausal;
      add(list, "head_dim_" + std::to_string(d) + "_" + short_name(dtype), spec);
    }
  constexpr std::int64_t kPairs[][2] = {{64, 128}, {128, 64}, {192, 128}, {33, 100}, {1, 256}, {256, 1}, {96, 80}};
  for (const DType dtype : kFloatTypes)
    for (const auto& [d, dv] : kPairs) {
      AttentionSpec spec;
      spec.dtype = dtype;
      spec.seq_q = 21;
      spec.seq_k = 37;
      spec.head_dim = d;
      spec.head_dim_v = dv;
      add(list, "head_dims_" + std::to_string(d) + "_" + std::to_string(dv) + "_" + short_name(dtype), spec);
    }
}

void group_cases(CaseList& list) {
  for (const DType dtype : kFloatTypes)
    for (const std::int64_t ratio : {1, 3, 5, 6, 12, 20})
      for (const std::int64_t q : {1, 19}) {
        AttentionSpec spec;
        spec.dtype = dtype;
        spec.heads_q = 2 * ratio;
        spec.heads_kv = 2;
        spec.seq_q = q;
        spec.seq_k = 70;
        spec.head_dim = 40;
        spec.mask = kCausal;
        add(list, "group_" + std::to_string(ratio) + "_q" + std::to_string(q) + "_" + short_name(dtype), spec);
      }
}

// softcap x bias x alibi x sinks x mask.
void feature_cases(CaseList& list) {
  for (const DType dtype : kFloatTypes)
    for (int bits = 1; bits < 16; ++bits)
      for (const Mask& mask : {kFull, kCausal, kMasks[3]}) {
        AttentionSpec spec;
        spec.dtype = dtype;
        spec.heads_q = 4;
        spec.seq_q = 40;
        spec.seq_k = 75;
        spec.mask = mask;
        std::string name = "features";
        if (bits & 1) spec.softcap = 1.5f, name += "_softcap";
        if (bits & 2) spec.bias = BiasSpec{{2, 4, 40, 75}, DType::kFloat32}, name += "_bias";
        if (bits & 4) spec.alibi_dims = bits & 1 ? 1 : 2, name += "_alibi";
        if (bits & 8) spec.sinks = true, name += "_sinks";
        add(list, name + "_" + mask.name + "_" + short_name(dtype), spec);
      }
}

void bias_cases(CaseList& list) {
  for (const DType dtype : kFloatTypes)
    for (const auto& [shape_name, shape] : kBiasShapes)
      for (const bool same_dtype : {false, true}) {
        if (same_dtype && dtype == DType::kFloat32) continue;
        AttentionSpec spec;
        spec.dtype = dtype;
        spec.batch = 3;
        spec.seq_q = 17;
        spec.seq_k = 39;
        spec.bias = BiasSpec{shape, same_dtype ? dtype : DType::kFloat32, {{}, {}, 0, 1, {}}};  // offset by one element
        add(list, std::string("bias_") + shape_name + (same_dtype ? "_same_dtype_" : "_") + short_name(dtype), spec);
      }
  for (const DType dtype : kFloatTypes) {
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.seq_q = 17;
    spec.seq_k = 39;
    const auto with_bias = [&](const char* name, const BiasSpec& bias) {
      spec.bias = bias;
      add(list, std::string("bias_") + name + "_" + short_name(dtype), spec);
    };
    with_bias("transposed", {{2, 2, 17, 39}, dtype, {{}, {0, 1, 3, 2}}});
    with_bias("expanded", {{2, 2, 17, 39}, dtype, {{}, {}, 0, 0, {0, 2}}});
    with_bias("odd_rows", {{2, 2, 17, 39}, dtype, {{}, {}, 2, 3, {}}});
    with_bias("minus_infinity", {{2, 2, 17, 39}, dtype, {}, hide_by_bias});
    // The mask of frameworks that know no -inf: the dtype's lowest number.
    with_bias("lowest_number",
              {{1, 1, 1, 39}, dtype, {}, [dtype](TestTensor& bias) {
                 for (std::int64_t j = 20; j < 39; ++j)
                   bias.set_at({0, 0, 0, j}, dtype == DType::kFloat16 ? -65504.0 : -3.3895313892515355e38);
               }});
  }
}

// A bias of q's dtype whose rows a copy engine can load, and one row for all queries: several blocks of queries and
// keys, broadcast dims, keys past the last whole block, and -inf in some blocks of a row only.
void loaded_bias_cases(CaseList& list) {
  struct Call {
    const char* name;
    std::vector<std::int64_t> bias;  // of [2, 4, 200, 344]
    const Mask& mask;
    std::int64_t d;
  };
  const auto hide_some = [](TestTensor& bias) {
    const auto& shape = bias.shape();
    const std::int64_t rows = shape[shape.size() - 2], keys = shape.back();
    for (std::int64_t i = 0; i < rows; i += 3)
      for (std::int64_t j = 0; j < keys; ++j)
        if (j / 48 % 2 == i % 2) {
          if (shape.size() == 2)
            bias.set_at({i, j}, -kInfinity);
          else
            bias.set_at({0, shape[1] - 1, i, j}, -kInfinity);
        }
  };
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16})
    for (const auto& [name, shape, mask, d] :
         {Call{"whole", {2, 4, 200, 344}, kFull, 64}, Call{"of_heads", {1, 4, 200, 344}, kCausal, 64},
          Call{"of_batches", {2, 1, 200, 344}, kMasks[3], 40}, Call{"of_all", {200, 344}, kFull, 128},
          Call{"causal", {2, 4, 200, 344}, kCausal, 128}, Call{"of_keys", {2, 1, 1, 344}, kFull, 64},
          Call{"of_keys_and_heads", {1, 4, 1, 344}, kCausal, 128}}) {
      AttentionSpec spec;
      spec.dtype = dtype;
      spec.heads_q = 4;
      spec.seq_q = 200;
      spec.seq_k = 344;
      spec.head_dim = d;
      spec.mask = mask;
      spec.bias = BiasSpec{shape, dtype};
      const std::string suffix = std::string(name) + "_" + short_name(dtype);
      const std::size_t first = list.cases.size();
      add(list, "loaded_bias_" + suffix, spec);
      spec.bias = BiasSpec{shape, dtype, {}, hide_some};
      spec.alibi_dims = 1;
      spec.softcap = d == 64 ? 3.0f : 0.0f;
      spec.sinks = true;
      if (d == 128)
        spec.bits = BitsSpec{{2, 1, 200}, [](std::int64_t, std::int64_t, std::int64_t i, std::int64_t j) {
                               return (i + 2 * j) % 5 > 0;
                             }};
      add(list, "loaded_bias_and_all_" + suffix, spec);
      spec.bits = {};
      spec.adjust = [](AttentionTensors& t) {  // hidden from some queries in part of the heads; NaN for the others
        t.v->set_at({0, 1, 100, 5}, kNan);
        t.k->set_at({1, 0, 343, 3}, kInfinity);
      };
      add(list, "loaded_bias_not_finite_" + suffix, spec);
      for (std::size_t i = first; i < list.cases.size(); ++i)
        list.cases[i].is_for("attention_fwd/cuda/sm90a/scored/" +
                             std::string(dtype == DType::kFloat16 ? "f16" : "bf16") + (d <= 64 ? "/d64" : "/d128"));
    }
}

// Rows all of whose keys a finite bias hides: the mean of the values that no -inf hides.
void lowest_bias_cases(CaseList& list) {
  struct Size {
    std::int64_t group, q, k, d;
  };
  for (const DType dtype : kFloatTypes)
    for (const bool same_dtype : {false, true})
      for (const auto& [group, q, k, d] : {Size{1, 1, 70, 64},
                                           {4, 3, 1300, 64},
                                           {1, 70, 140, 32},
                                           {2, 70, 140, 64},
                                           {1, 70, 140, 96},
                                           {1, 70, 300, 128},
                                           {1, 40, 140, 192},
                                           {1, 40, 140, 256}}) {
        if (same_dtype && dtype == DType::kFloat32) continue;
        AttentionSpec spec;
        spec.dtype = dtype;
        spec.heads_q = 2 * group;
        spec.heads_kv = 2;
        spec.seq_q = q;
        spec.seq_k = k;
        spec.head_dim = d;
        const DType bias = same_dtype ? dtype : DType::kFloat32;
        spec.bias = BiasSpec{{q, k}, bias, {}, hide_by_lowest(bias)};
        const std::string name = "lowest_bias_" + sizes(q, k) + "_d" + std::to_string(d) +
                                 (same_dtype ? "_same_dtype_" : "_") + short_name(dtype);
        add(list, name, spec);
        spec.sinks = true;
        spec.softcap = 2.0f;
        spec.mask = kCausal;
        add(list, name + "_and_all", spec);
      }
}

void extreme_cases(CaseList& list) {
  for (const DType dtype : kFloatTypes) {
    const std::string suffix = std::string("_") + short_name(dtype);
    for (const Mask& mask : {kFull, kCausal}) {
      AttentionSpec spec;  // logits of about +-1e5
      spec.dtype = dtype;
      spec.seq_q = 40;
      spec.seq_k = 70;
      spec.head_dim = 64;
      spec.mask = mask;
      // A logit of 1e5 summed in fp32 is off by up to 64 * 2^-24 * 1e5 / 8 = 0.05, and the weights of near ties with
      // it.
      spec.factor = 5000;
      spec.adjust = make_logits_huge;
      add_both(list, std::string("logits_1e5_") + mask.name + suffix, spec);
    }
    {
      AttentionSpec spec;  // all scores equal and far below any finite stand-in for -inf: the mean of v
      spec.dtype = dtype;
      spec.bias = BiasSpec{{1, 1, 1, 1}, DType::kFloat32, {}, [](TestTensor& bias) { bias.set(0, -2e38); }};
      spec.adjust = [](AttentionTensors& t) { t.q->fill([] { return 0.0; }); };
      add(list, "scores_below_stand_ins" + suffix, spec);
    }
    {
      AttentionSpec spec;  // scores falling along the row, and rising: the running maximum moves in every block
      spec.dtype = dtype;
      spec.seq_k = 600;
      spec.factor = 40;  // scores of some 300 in fp32: 300 * 2^-24 * a few = 1e-4
      spec.adjust = [](AttentionTensors& t) {
        for (std::int64_t j = 0; j < 600; ++j)
          for (std::int64_t b = 0; b < 2; ++b)
            for (std::int64_t h = 0; h < 2; ++h)
              t.k->set_at({b, h, j, 0}, (b == 0 ? 0.5 : -0.5) * static_cast<double>(j));
      };
      add(list, "moving_maximum" + suffix, spec);
    }
    {
      AttentionSpec spec;  // NaN in the value of a key that a bias of -inf hides from every second query
      spec.dtype = dtype;
      spec.seq_q = 70;
      spec.seq_k = 140;
      spec.head_dim = 64;
      spec.bias = BiasSpec{{70, 140}, DType::kFloat32, {}, [](TestTensor& bias) {
                             for (std::int64_t i = 0; i < 70; i += 2) bias.set_at({i, 77}, -kInfinity);
                           }};
      spec.adjust = [](AttentionTensors& t) { t.v->set_at({0, 0, 77, 5}, kNan); };
      add(list, "bias_hides_nan_value" + suffix, spec);
    }
    // NaN and infinity in values that most queries don't see, in tiles that follow one another. All in one column: a
    // kernel may look for them in other columns with other warps.
    struct ColumnOf {
      std::int64_t head_dim, column;
    };
    for (const Mask& mask : {kCausal, kMasks[3]})
      for (const auto [d, column] : {ColumnOf{64, 5}, {64, 13}, {64, 18}, {64, 31}, {96, 93}, {256, 140}}) {
        if (dtype == DType::kFloat32 && d != 64) continue;
        AttentionSpec spec;
        spec.dtype = dtype;
        spec.heads_q = spec.heads_kv = 5;
        spec.seq_q = spec.seq_k = 300;
        spec.head_dim = d;
        spec.mask = mask;
        spec.adjust = [column = column](AttentionTensors& t) {
          t.v->set_at({0, 1, 290, column}, kNan);
          t.v->set_at({1, 4, 70, column}, kInfinity);
        };
        add_for_hopper(list,
                       std::string("masks_hide_nan_values_") + mask.name + "_" + std::to_string(d) + "_" +
                           std::to_string(column) + suffix,
                       spec);
      }
    {
      AttentionSpec spec;
      spec.dtype = dtype;
      spec.scale = 0.0f;
      add(list, "scale_zero" + suffix, spec);
      spec.scale = -0.7f;
      spec.mask = kCausal;
      add(list, "scale_negative" + suffix, spec);
    }
  }
}

// Kernels that take a block's exponentials with the shift of the blocks before: scores that outgrow it, a little, past
// fp16's numbers and past fp32's, in every third row, so that rows that do and rows that don't lie side by side.
void shift_cases(CaseList& list) {
  constexpr std::int64_t kKeys = 640;  // whole blocks: where there is no mask, no kernel has rows computed once more
  // The score of key j gets `bump(j)` in rows 0, 3, 6, and loses it in rows 1, 4, 7.
  const auto bumped = [](DType dtype, std::int64_t queries, std::int64_t head_dim, const Mask& mask,
                         std::function<double(std::int64_t)> bump) {
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.batch = 1;
    spec.seq_q = queries;
    spec.seq_k = kKeys;
    spec.head_dim = head_dim;
    spec.scale = 0.125f;
    spec.mask = mask;
    spec.factor = dtype == DType::kFloat32 ? 40 : 2;  // scores of some 300 in fp32: 300 * 2^-24 * a few = 1e-4
    spec.adjust = [queries, bump = std::move(bump)](AttentionTensors& t) {
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t i = 0; i < queries; ++i) t.q->set_at({0, h, i, 0}, i % 3 == 0 ? 4 : i % 3 == 1 ? -4 : 0);
        for (std::int64_t j = 0; j < kKeys; ++j) t.k->set_at({0, h, j, 0}, 2 * bump(j));
      }
    };
    return spec;
  };
  constexpr Mask kWindow = {"causal_left90", true, 90, kAll};
  for (const DType dtype : kFloatTypes)
    for (const std::int64_t d : {64, 96, 128, 192, 256}) {
      if (dtype == DType::kFloat32 && d != 64) continue;
      const std::string suffix = "_" + std::to_string(d) + "_" + short_name(dtype);
      // By 8 to 16 in each block, whichever end a kernel starts from; under the window also behind blocks that a row
      // doesn't see.
      for (const Mask& mask : {kFull, kCausal, kWindow})
        add_for_hopper(list, std::string("scores_rise_") + mask.name + suffix,
                       bumped(dtype, 150, d, mask, [](std::int64_t j) { return static_cast<double>(kKeys - j) / 8; }));
      // exp(20) = 2^29, exp(200) is infinite. Some rows of the window see them.
      for (const Mask& mask : {kFull, kWindow})
        for (const double jump : {20.0, 200.0})
          add_for_hopper(
              list, "scores_jump_" + std::to_string(static_cast<int>(jump)) + "_" + mask.name + suffix,
              bumped(dtype, 260, d, mask, [jump](std::int64_t j) { return j >= 450 && j < 457 ? jump : 0.0; }));
      for (const double number : {kNan, kInfinity}) {
        AttentionSpec spec = bumped(dtype, 150, d, kCausal, [](std::int64_t j) { return j < 150 ? 20.0 : 0.0; });
        spec.adjust = [rise = spec.adjust, number](AttentionTensors& t) {
          rise(t);
          t.k->set_at({0, 0, 530, 0}, number);  // of one head; rows 2, 5, 8 make 0 * infinity = NaN of it
          t.v->set_at({0, 1, 540, 3}, number);  // of the other; two rows in three see them
        };
        add_for_hopper(list, std::string("scores_rise_past_") + (number == kInfinity ? "infinity" : "nan") + suffix,
                       spec);
      }
    }
}

void nan_cases(CaseList& list) {
  for (const DType dtype : kFloatTypes) {
    const std::string suffix = std::string("_") + short_name(dtype);
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.seq_q = 5;
    spec.seq_k = 70;
    spec.mask = {"left3_right0", false, 3, 0};
    spec.adjust = [](AttentionTensors& t) {  // keys that no query sees: before 62
      for (std::int64_t j = 0; j < 62; ++j) {
        set_row(*t.k, j % 2, 0, j, j % 3 ? kNan : kInfinity);
        set_row(*t.v, j % 2, 1, j, j % 3 ? kNan : -kInfinity);
      }
    };
    add(list, "nan_behind_window" + suffix, spec);

    spec = {};
    spec.dtype = dtype;
    spec.seq_q = spec.seq_k = 70;
    spec.mask = kCausal;
    spec.adjust = [](AttentionTensors& t) { set_row(*t.k, 0, 1, 20, kNan); };
    add(list, "nan_key_seen_by_later_rows" + suffix, spec);  // rows 0..19 stay clean
    spec.adjust = [](AttentionTensors& t) { set_row(*t.v, 0, 1, 20, kNan); };
    add(list, "nan_value_seen_by_later_rows" + suffix, spec);
    spec.adjust = [](AttentionTensors& t) { t.v->set_at({1, 0, 33, 7}, kInfinity); };
    add(list, "infinite_value_in_one_column" + suffix, spec);
    spec.mask = kFull;
    spec.adjust = [](AttentionTensors& t) { set_row(*t.q, 1, 0, 11, kNan); };
    add(list, "nan_query" + suffix, spec);
  }
}

void layout_cases(CaseList& list) {
  for (const DType dtype : kFloatTypes) {
    const std::string suffix = std::string("_") + short_name(dtype);
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.batch = 2;
    spec.heads_q = 4;
    spec.heads_kv = 2;
    spec.seq_q = 18;
    spec.seq_k = 45;
    spec.head_dim = 24;
    spec.head_dim_v = 40;
    spec.mask = kCausal;
    mix_layouts(spec);
    add(list, "strides_all_different" + suffix, spec);
    spec.layout_k = {{}, {}, 0, 0, {0}};     // one batch's keys for all
    spec.layout_v = {{}, {}, 0, 0, {0, 1}};  // one head's values for all
    spec.layout_q = {{}, {}, 0, 0, {2}};     // one query for all positions
    add(list, "strides_expanded" + suffix, spec);
    spec.layout_q = {{-4 * 18 * 24, 18 * 24, -24, 1}};
    spec.layout_k = {{2 * 45 * 24, -45 * 24, -24, 1}};
    spec.layout_v = {{-2 * 45 * 40, 45 * 40, -40, 1}};
    spec.layout_out = {{4 * 18 * 40, -18 * 40, -40, 1}};
    spec.layout_lse = {{4 * 18, 18, -1}};
    add(list, "strides_negative" + suffix, spec);
  }
  // Offsets past 2^31 elements on tensors of a few rows. Memory is reserved, not committed.
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 96;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    const std::string suffix = std::string("_") + short_name(dtype);
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.seq_q = 3;
    spec.seq_k = 4;
    spec.head_dim = 16;
    spec.mask = kCausal;
    spec.layout_q = {{48, 96, kFar / 2, 1}};
    spec.layout_k = {{64, kFar, 16, 1}};
    spec.layout_v = {{32, 16, kFar, 1}};
    spec.layout_out = {{kFar, 64, 16, 1}};
    spec.layout_lse = {{3, kFar, 1}};
    add(list, "strides_past_2_31" + suffix, spec);
  }
}

void other_cases(CaseList& list) {
  for (const DType dtype : kFloatTypes) {
    const std::string suffix = std::string("_") + short_name(dtype);
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.lse = false;
    add(list, "without_lse" + suffix, spec);
    for (const std::int64_t d : {64, 128}) {
      spec = {};
      spec.dtype = dtype;
      spec.seq_q = spec.seq_k = 270;
      spec.head_dim = d;
      spec.mask = kCausal;
      spec.sinks = true;
      add_both(list, "sinks_" + std::to_string(d) + suffix, spec);
    }
    spec = {};
    spec.dtype = dtype;
    spec.seq_k = 0;
    add(list, "no_keys" + suffix, spec);
    spec.sinks = true;
    add(list, "no_keys_but_sinks" + suffix, spec);
    spec = {};
    spec.dtype = dtype;
    spec.heads_q = 8;
    spec.heads_kv = 2;
    spec.batch = 3;
    spec.seq_q = 1;
    spec.seq_k = 1500;
    spec.head_dim = 64;
    add(list, "decode" + suffix, spec);  // one query a head: split over keys where a kernel does that
    spec.batch = 1;
    spec.heads_q = spec.heads_kv = 1;
    spec.seq_k = 5000;
    add(list, "decode_one_head" + suffix, spec);
    spec.sinks = true;
    spec.alibi_dims = 1;
    spec.softcap = 3;
    spec.seq_k = 1111;
    spec.mask = {"left700", false, 700, 0};
    add(list, "decode_features" + suffix, spec);
    spec = {};
    spec.dtype = dtype;
    spec.batch = 3;
    spec.heads_q = 6;
    spec.seq_q = 97;
    spec.seq_k = 333;
    spec.head_dim = 64;
    spec.mask = kCausal;
    spec.repeats = 30;
    add(list, "deterministic_30_runs" + suffix, spec);
    spec.seq_q = 1;
    add(list, "deterministic_30_runs_decode" + suffix, spec);
  }
}

void cases(CaseList& list) {
  mask_cases(list);
  head_dim_cases(list);
  group_cases(list);
  feature_cases(list);
  bias_cases(list);
  loaded_bias_cases(list);
  lowest_bias_cases(list);
  extreme_cases(list);
  shift_cases(list);
  nan_cases(list);
  layout_cases(list);
  other_cases(list);
}

const OpCases registration("attention_fwd", cases);

}  // namespace
}  // namespace flashkernel::conformance
