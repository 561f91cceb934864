// sum, mean, max and argmax: each output walks its inputs in row-major order, so the result does not depend on the
// threads.
#include <cmath>
#include <limits>

#include "core/thread_pool.hpp"
#include "cpu/scalar/element.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

// A NaN wins over every number, and the first of equals stays.
struct Maximum {
  double value = -std::numeric_limits<double>::infinity();
  std::int64_t index = -1;

  void take(double candidate, std::int64_t i) {
    if (index >= 0 && (std::isnan(value) || !(candidate > value || std::isnan(candidate)))) return;
    value = candidate;
    index = i;
  }
};

template <class T>
void reduce_one(const ReduceParams& p, std::int64_t x_offset, std::int64_t out_offset) {
  const T* x = static_cast<const T*>(p.x) + x_offset;
  double sum = 0.0;
  Maximum maximum;
  std::int64_t i = 0;
  for_each_offset<1>(p.num_reduced, p.reduced_shape, {p.stride_x_reduced}, 0, p.reduced_count, [&](const auto& at) {
    const double value = load<T>(x, at[0]);
    sum += value;
    maximum.take(value, i++);
  });
  switch (p.op) {
    case ReduceOp::kSum: store_as(p.out_dtype, p.out, out_offset, sum); return;
    case ReduceOp::kMean:
      store_as(
          p.out_dtype, p.out, out_offset,
          p.reduced_count > 0 ? sum / static_cast<double>(p.reduced_count) : std::numeric_limits<double>::quiet_NaN());
      return;
    case ReduceOp::kMax: store_as(p.out_dtype, p.out, out_offset, maximum.value); return;
    case ReduceOp::kArgmax: static_cast<std::int64_t*>(p.out)[out_offset] = maximum.index; return;
  }
}

}  // namespace

void reduce(const ReduceParams& p, void*, Stream) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for_each_offset<2>(p.num_kept, p.kept_shape, {p.stride_x_kept, p.stride_out}, begin, end,
                         [&](const auto& at) { reduce_one<T>(p, at[0], at[1]); });
    };
    parallel_for(p.kept_count, grain_for(p.reduced_count), task);
  });
}

}  // namespace flashkernel::cpu_scalar
