// Cases of pack_mask: rows of any length, bytes other than 0 and 1, strides, broadcast dims.
#include "conformance/conformance.hpp"
#include "flashkernel/attention.hpp"

namespace flashkernel::conformance {
namespace {

void cases(CaseList& list) {
  const auto add = [&](const std::string& name, const Shape& shape, const Layout& layout = {},
                       const Layout& layout_out = {}) {
    list.add(name, [=](Call& call) {
      std::vector<std::int64_t> values(1);
      for (const std::int64_t n : shape) values.resize(values.size() * static_cast<std::size_t>(n));
      for (std::int64_t& value : values)
        value = call.random.uniform() < 0.4 ? 0 : call.random.uniform() < 0.5 ? 1 : 128;
      TestTensor& mask = call.indices("mask", DType::kUInt8, shape, values, layout);
      Shape packed = shape;
      packed.back() = (packed.back() + 31) / 32;
      TestTensor& out = call.output("out", DType::kInt32, packed, layout_out);
      call.run = [&](const ExecutionContext& context) { pack_mask(mask.view(), out.view(), context); };
    });
  };
  for (const std::int64_t columns : {1, 31, 32, 33, 64, 255, 257, 1000})
    add("columns_" + std::to_string(columns), {3, columns});
  add("one_row", {77});
  add("no_rows", {0, 40});
  add("no_columns", {3, 0});
  add("four_dims", {2, 3, 5, 70});
  add("turned", {3, 4, 5, 70}, {{}, {3, 1, 0, 2}, 3});
  add("columns_apart", {9, 70}, {{}, {1, 0}});
  add("broadcast", {3, 2, 5, 70}, {{}, {}, 0, 0, {1, 2}});
  add("out_with_gaps", {4, 5, 70}, {}, {{}, {1, 0, 2}, 2, 1});
}

const OpCases registration("pack_mask", cases);

}  // namespace
}  // namespace flashkernel::conformance
