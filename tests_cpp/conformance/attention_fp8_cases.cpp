// Cases of attention_fp8. Most scores are small integers times ln 2, so that the weights of keys are powers of two:
// a kernel that rounds weights to e4m3 then rounds nothing there. The tensor cores of 9.0 still add products of 8 bits
// with about 14 bits of mantissa: that shows in an output of fp16 (up to 1.2 times its tolerance on an H200), not in
// one of bf16. The rest have scores of any size, and the tolerance of a weight's rounding: 2^-4 of it; their LSE has
// that of scores with 14 bits.
#include <cmath>
#include <numeric>

#include "conformance/attention_spec.hpp"
#include "flashkernel/attention_fp8.hpp"

namespace flashkernel::conformance {
namespace {

enum class Scales { kNone, kNumbers, kOne, kHeads, kMixed };

struct Spec {
  AttentionSpec common;
  std::vector<std::int64_t> lengths_q, lengths_k;  // not empty: sequences side by side
  std::vector<std::int64_t> used_q, used_k;
  Scales scales = Scales::kHeads;
  bool exact = true;
};

std::vector<std::int64_t> starts_of(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int64_t> sums(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), sums.begin() + 1);
  return sums;
}

// Of 1, 0 and -1 so sparse that dot products are a few ones.
void fill_sparse(Call& call, TestTensor& tensor, std::int64_t head_dim) {
  const double share = std::min(1.0, 2.0 / std::sqrt(static_cast<double>(head_dim)));
  tensor.fill([&] {
    const double x = call.random.uniform();
    return x < share / 2 ? 1.0 : x < share ? -1.0 : 0.0;
  });
}

void build(Call& call, const Spec& spec) {
  const AttentionSpec& s = spec.common;
  const bool varlen = !spec.lengths_q.empty();
  const auto cu_q = starts_of(spec.lengths_q), cu_k = starts_of(spec.lengths_k);
  const std::int64_t batch = varlen ? static_cast<std::int64_t>(spec.lengths_q.size()) : s.batch;
  const auto shape = [&](std::int64_t heads, std::int64_t seq, std::int64_t total, std::int64_t dim) {
    return varlen ? Shape{total, heads, dim} : Shape{s.batch, heads, seq, dim};
  };
  constexpr DType kFloat8 = DType::kFloat8E4M3;
  TestTensor& q = call.input("q", kFloat8, shape(s.heads_q, s.seq_q, cu_q.back(), s.head_dim), s.layout_q);
  TestTensor& k = call.input("k", kFloat8, shape(s.heads_kv, s.seq_k, cu_k.back(), s.head_dim), s.layout_k);
  TestTensor& v = call.input("v", kFloat8, shape(s.heads_kv, s.seq_k, cu_k.back(), s.dim_v()), s.layout_v);
  if (spec.exact) {
    fill_sparse(call, q, s.head_dim);
    fill_sparse(call, k, s.head_dim);
  } else {
    q.fill([&] { return call.random.normal(); });
    k.fill([&] { return call.random.normal(); });
  }
  v.fill([&] { return call.random.normal(); });
  AttentionTensors tensors;
  tensors.q = &q, tensors.k = &k, tensors.v = &v;
  if (s.adjust) s.adjust(tensors);

  // Powers of two, so that exact scores stay so: a query's and a key's scale are inverse to each other, but for sign of
  // the exponent by head.
  TensorView scales[3];
  const auto scale = [&](int which, const Shape& of, auto&& value) {
    static constexpr const char* kNames[] = {"q_scale", "k_scale", "v_scale"};
    TestTensor& tensor = call.input(kNames[which], DType::kFloat32, of);
    std::int64_t at = 0;
    tensor.fill([&] { return value(at++); });
    scales[which] = tensor.view();
  };
  const auto power = [](int exponent) { return [=](std::int64_t) { return std::ldexp(1.0, exponent); }; };
  const auto by_place = [](int sign) {
    return [=](std::int64_t at) { return std::ldexp(1.0, sign * static_cast<int>(at % 3 - 1)); };
  };
  if (spec.scales == Scales::kNumbers) {
    scale(0, {}, power(2));
    scale(1, {1}, power(-2));
    scale(2, {1, 1}, power(-1));
  } else if (spec.scales == Scales::kOne) {
    scale(2, {1}, [](std::int64_t) { return 0.75; });
  } else if (spec.scales == Scales::kHeads) {
    for (int which = 0; which < 3; ++which) scale(which, {batch, s.heads_kv}, by_place(which == 1 ? -1 : 1));
  } else if (spec.scales == Scales::kMixed) {
    scale(0, {1, s.heads_kv}, by_place(1));
    scale(1, {s.heads_kv}, by_place(-1));
    scale(2, {batch, 1}, by_place(1));
  }

  AttentionOptions options;
  options.causal = s.mask.causal;
  options.window_left = s.mask.left;
  options.window_right = s.mask.right;
  options.softcap = s.softcap;
  options.scale = spec.exact && !s.scale ? std::optional<float>(std::log(2.0f)) : s.scale;
  if (s.sinks) {
    TestTensor& sinks = call.input("sinks", DType::kFloat32, {s.heads_q});
    options.sinks = sinks.view();
  }
  if (s.alibi_dims) {
    TestTensor& slopes = call.input("alibi_slopes", DType::kFloat32, {s.heads_q});
    slopes.fill([&] { return call.random.uniform(); });
    options.alibi_slopes = slopes.view();
  }
  const DType lengths_dtype = DType::kInt32;
  const TensorView starts_q =
      varlen ? call.indices("cu_seqlens_q", lengths_dtype, {batch + 1}, cu_q).view() : TensorView();
  const TensorView starts_k =
      varlen ? call.indices("cu_seqlens_k", lengths_dtype, {batch + 1}, cu_k).view() : TensorView();
  if (!spec.used_q.empty()) options.seqused_q = call.indices("seqused_q", lengths_dtype, {batch}, spec.used_q).view();
  if (!spec.used_k.empty()) options.seqused_k = call.indices("seqused_k", lengths_dtype, {batch}, spec.used_k).view();
  const auto longest = [](const std::vector<std::int64_t>& lengths) {
    return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  };
  const std::int64_t longest_q = longest(spec.lengths_q), longest_k = longest(spec.lengths_k);
  const double factor = spec.exact && s.dtype == DType::kFloat16 ? 2 * s.factor : s.factor;
  TestTensor& out =
      call.output("out", s.dtype, shape(s.heads_q, s.seq_q, cu_q.back(), s.dim_v()), s.layout_out, factor);
  TestTensor* lse = nullptr;
  if (s.lse)
    lse = &call.output("lse", DType::kFloat32,
                       varlen ? Shape{s.heads_q, cu_q.back()} : Shape{s.batch, s.heads_q, s.seq_q}, s.layout_lse,
                       spec.exact ? 1 : 16);  // 14 bits of each score: 12.3 times were seen on an H200
  call.repeats = s.repeats;
  const std::array<TensorView, 3> given = {scales[0], scales[1], scales[2]};
  call.run = [=, &q, &k, &v, &out](const ExecutionContext& context) {
    attention_fp8(q.view(), k.view(), v.view(), given[0], given[1], given[2], starts_q, starts_k, longest_q, longest_k,
                  out.view(), lse ? lse->view() : TensorView(), options, context);
  };
}

void cases(CaseList& list) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const std::string suffix = std::string("_") + short_name(dtype);
    const auto add = [&](const std::string& name, Spec spec) {
      spec.common.dtype = dtype;
      list.add(name + suffix, [=](Call& call) { build(call, spec); });
    };
    Spec base;
    base.common.heads_q = 4, base.common.heads_kv = 2, base.common.head_dim = 128;
    base.common.seq_q = 70, base.common.seq_k = 150;
    for (const std::int64_t dim : {64, 128, 256})
      for (const Mask& mask : kMasks) {
        Spec spec = base;
        spec.common.head_dim = dim, spec.common.mask = mask;
        spec.scales = dim == 64 ? Scales::kMixed : Scales::kHeads;
        add("dim" + std::to_string(dim) + "_" + mask.name, spec);
      }
    for (const std::int64_t dim : {8, 33, 48, 80, 192, 512}) {
      Spec spec = base;
      spec.common.head_dim = dim, spec.common.head_dim_v = dim == 80 ? 96 : dim == 33 ? 7 : 0;
      spec.common.mask = kCausal;
      add("dim" + std::to_string(dim), spec);
    }
    for (const Scales scales : {Scales::kNone, Scales::kNumbers, Scales::kOne, Scales::kMixed}) {
      Spec spec = base;
      spec.scales = scales;
      add("scales" + std::to_string(static_cast<int>(scales)), spec);
    }
    // Lengths round the tiles of kernels: of 64 rows and more, of 64 to 224 keys.
    for (const std::int64_t seq : {1, 63, 64, 65, 128, 129, 192, 257, 450}) {
      Spec spec = base;
      spec.common.batch = 1, spec.common.heads_q = 2, spec.common.heads_kv = 1;
      spec.common.seq_q = spec.common.seq_k = seq;
      add("seq" + std::to_string(seq), spec);
      spec.common.mask = kCausal, spec.common.lse = false;
      add("seq" + std::to_string(seq) + "_causal", spec);
    }
    Spec spec = base;
    spec.common.seq_k = 0;
    add("no_keys", spec);
    spec = base;
    spec.common.sinks = true, spec.common.mask = kCausal;
    add("sinks", spec);
    spec = base;
    mix_layouts(spec.common);
    add("layouts", spec);
    spec = base;  // rows at multiples of 16 bytes, tokens outside heads
    spec.common.layout_q = spec.common.layout_k = spec.common.layout_v = {{}, {0, 2, 1, 3}, 16};
    spec.common.layout_out = {{}, {0, 2, 1, 3}, 8};
    add("tokens_first", spec);
    spec = base;
    spec.lengths_q = {70, 0, 1, 33, 129}, spec.lengths_k = {70, 5, 200, 0, 300};
    add("lengths", spec);
    spec.common.mask = kCausal;
    add("lengths_causal", spec);
    spec.used_q = {60, 0, 1, 30, 129}, spec.used_k = {65, 5, 150, 0, 129};
    add("used", spec);
    // Weights of any size.
    Spec free = base;
    free.exact = false;
    free.common.factor = dtype == DType::kFloat16 ? 40 : 10;
    for (const std::int64_t dim : {64, 128, 256}) {
      free.common.head_dim = dim;
      add("any_scores_dim" + std::to_string(dim), free);
    }
    free.common.softcap = 3, free.common.head_dim = 128;
    add("softcap", free);
    free.common.softcap = 0, free.common.scale = -0.05f;
    add("negative_scale", free);
    free.common.scale = {}, free.common.alibi_dims = 1;
    add("alibi", free);
    // NaN that all queries see, that some see, that none sees.
    Spec special = base;
    special.common.mask = kCausal, special.common.seq_k = 70;
    special.common.adjust = [](AttentionTensors& t) {
      t.v->set_at({0, 0, 69, 5}, kNan);
      t.v->set_at({0, 1, 40, 7}, kNan);
      t.k->set_at({1, 0, 66, 3}, kNan);
    };
    add("hidden_nan", special);
    special.common.mask = {"right_none", false, kAll, 0}, special.common.seq_k = 200;
    special.common.adjust = [](AttentionTensors& t) { t.v->set_at({1, 0, 199, 5}, kNan); };
    add("hidden_nan_at_the_end", special);
  }
}

const OpCases registration("attention_fp8", cases);

}  // namespace
}  // namespace flashkernel::conformance
