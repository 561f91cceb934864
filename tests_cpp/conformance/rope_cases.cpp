// Cases of rope: both pairings, partial rotation, every source of angles, far positions, strides.
#include <cmath>

#include "conformance/conformance.hpp"
#include "conformance/each_dtype.hpp"
#include "flashkernel/rope.hpp"

namespace flashkernel::conformance {
namespace {

enum class Angles { kTheta, kFrequencies, kTable, kTablePerToken };

struct Spec {
  DType dtype;
  std::int64_t batch, heads_q, heads_kv, seq, dim;
  std::int64_t rotary = -1;
  bool interleaved = false, inverse = false, in_place = false;
  Angles angles = Angles::kTheta;
  bool table_fp32 = true, sin_has_gaps = true;
  std::int64_t position_dims = 0, position_limit = 4096;  // 0 dims: absent
  Layout q = {}, k = {}, q_out = {};
};

TensorView view_of(const TestTensor* tensor) { return tensor ? tensor->view() : TensorView(); }

void build(Call& call, const Spec& s) {
  const Shape q_shape{s.batch, s.heads_q, s.seq, s.dim}, k_shape{s.batch, s.heads_kv, s.seq, s.dim};
  TestTensor& q = s.in_place ? call.in_out("q", s.dtype, q_shape, s.q) : call.input("q", s.dtype, q_shape, s.q);
  TestTensor* q_out = s.in_place ? &q : &call.output("q_out", s.dtype, q_shape, s.q_out);
  TestTensor *k = nullptr, *k_out = nullptr;
  if (s.heads_kv > 0) {
    k = s.in_place ? &call.in_out("k", s.dtype, k_shape, s.k) : &call.input("k", s.dtype, k_shape, s.k);
    k_out = s.in_place ? k : &call.output("k_out", s.dtype, k_shape);
  }
  TestTensor* positions = nullptr;
  if (s.position_dims > 0) {
    const Shape shape = s.position_dims == 1 ? Shape{s.seq} : Shape{s.batch, s.seq};
    std::vector<std::int64_t> values;
    for (std::int64_t i = 0; i < (s.position_dims == 1 ? 1 : s.batch) * s.seq; ++i)
      values.push_back(call.random.integer(0, s.position_limit - 1));
    positions = &call.indices("positions", s.dtype == DType::kFloat16 ? DType::kInt32 : DType::kInt64, shape, values);
  }
  RopeOptions options;
  options.rotary_dim = s.rotary;
  options.interleaved = s.interleaved;
  options.inverse = s.inverse;
  const std::int64_t half = (s.rotary < 0 ? s.dim : s.rotary) / 2;
  if (s.angles == Angles::kTable || s.angles == Angles::kTablePerToken) {
    const Shape shape = s.angles == Angles::kTable ? Shape{s.position_limit, half} : Shape{s.batch, s.seq, half};
    const DType dtype = s.table_fp32 ? DType::kFloat32 : s.dtype;
    TestTensor& cos = call.input("cos", dtype, shape);
    TestTensor& sin = call.input("sin", dtype, shape, {{}, {}, /*gap=*/s.sin_has_gaps ? 3 : 0});
    for (std::int64_t i = 0; i < cos.numel(); ++i) {
      const double angle =
          static_cast<double>(i / half) * std::pow(1e4, -static_cast<double>(i % half) / static_cast<double>(half));
      cos.set(i, std::cos(angle)), sin.set(i, std::sin(angle));
    }
    call.run = [=, &q, &cos, &sin](const ExecutionContext& context) {
      rope_table(q.view(), view_of(k), cos.view(), sin.view(), view_of(positions), q_out->view(), view_of(k_out),
                 options, context);
    };
    return;
  }
  TestTensor* frequencies = nullptr;
  if (s.angles == Angles::kFrequencies) {
    frequencies = &call.input("inv_freq", DType::kFloat32, {half});
    for (std::int64_t i = 0; i < half; ++i) frequencies->set(i, std::pow(0.9, static_cast<double>(i)));
  }
  call.run = [=, &q](const ExecutionContext& context) {
    RopeOptions with = options;
    if (frequencies) with.inv_freq = frequencies->view();
    rope(q.view(), view_of(k), view_of(positions), q_out->view(), view_of(k_out), with, context);
  };
}

void cases(CaseList& list) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    const auto add = [&](const std::string& name, const Spec& spec) {
      list.add(name + suffix, [=](Call& call) { build(call, spec); });
    };
    for (const bool interleaved : {false, true}) {
      const std::string form = interleaved ? "_interleaved" : "_halves";
      for (const std::int64_t dim : {2, 6, 16, 34, 64, 96, 128, 256}) {
        Spec spec{dtype, 2, 3, 1, 5, dim};
        spec.interleaved = interleaved;
        spec.position_dims = 2;
        add("dim" + std::to_string(dim) + form, spec);
      }
      Spec spec{dtype, 2, 4, 2, 9, 80};
      spec.interleaved = interleaved;
      add("no_positions" + form, spec);
      spec.inverse = true;
      add("inverse" + form, spec);
      spec.position_dims = 1;
      for (const std::int64_t rotary : {0, 2, 30, 32, 78}) {
        spec.rotary = rotary;
        add("rotary" + std::to_string(rotary) + form, spec);
      }
      spec.rotary = 64;
      spec.in_place = true;
      add("in_place" + form, spec);
      spec.in_place = false;
      spec.heads_kv = 0;
      add("q_only" + form, spec);
      spec.heads_kv = 2;
      spec.q = {{}, {0, 2, 1, 3}, 3, 1}, spec.k = {{}, {1, 0, 2, 3}, 5, 3}, spec.q_out = {{}, {2, 0, 1, 3}, 7, 1};
      add("strides" + form, spec);
      spec.angles = Angles::kFrequencies;
      add("frequencies" + form, spec);
      spec.angles = Angles::kTable;
      spec.position_limit = 300;
      add("table" + form, spec);
      spec.table_fp32 = false;
      add("table_of_own_dtype" + form, spec);
      spec.angles = Angles::kTablePerToken;
      spec.position_dims = 0;
      add("table_per_token" + form, spec);
      // Whole vectors in everything, tables too; then so many sequences that a thread takes several heads on any GPU.
      Spec whole{dtype, 2, 6, 2, 9, 64, 48};
      whole.interleaved = interleaved;
      whole.inverse = true;
      whole.position_limit = 20;
      whole.sin_has_gaps = false;
      Spec many = whole;
      many.batch = 600, many.seq = 1, many.dim = 24, many.rotary = 16;
      Spec turned = many;  // whole heads, of odd numbers
      turned.heads_q = 5, turned.heads_kv = 3, turned.dim = 32, turned.rotary = 32;
      for (const bool fp32 : {true, false}) {
        const std::string of = (fp32 ? "_fp32" : "_own") + form;
        whole.table_fp32 = many.table_fp32 = turned.table_fp32 = fp32;
        whole.angles = many.angles = turned.angles = Angles::kTable;
        add("whole_table" + of, whole);
        add("many_sequences_table" + of, many);
        add("many_whole_heads_table" + of, turned);
        whole.position_dims = 2;
        add("whole_table_positions" + of, whole);
        whole.position_dims = 0;
        whole.angles = Angles::kTablePerToken;
        add("whole_table_per_token" + of, whole);
      }
      many.position_dims = 2;
      many.in_place = true;
      add("many_sequences_table_in_place" + form, many);
      many.angles = Angles::kTheta;
      add("many_sequences" + form, many);
      turned.angles = Angles::kTheta;
      add("many_whole_heads" + form, turned);
      Spec far{dtype, 1, 2, 1, 6, 64};
      far.interleaved = interleaved;
      far.position_dims = 2;
      far.position_limit = std::int64_t{1} << 31;
      add("far_positions" + form, far);
      far.position_limit = 131072;
      far.heads_q = 2, far.batch = 2;
      far.q.strides = {kFarStride, 6 * 64, 64, 1};
      far.q_out.strides = {64, 128, kFarStride, 1};
      add("strides_past_2_31" + form, far);
    }
    add("odd_dim", {dtype, 1, 2, 1, 3, 33, 32});
    add("many_tokens", {dtype, 3, 8, 2, 130, 32});
    add("no_tokens", {dtype, 2, 3, 1, 0, 64});
  });
}

const OpCases registration("rope", cases);

}  // namespace
}  // namespace flashkernel::conformance
