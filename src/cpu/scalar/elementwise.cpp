// add, swiglu and its gradient, element by element.
#include "core/thread_pool.hpp"
#include "cpu/scalar/activation.hpp"
#include "cpu/scalar/element.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

std::int64_t count_of(int ndim, const std::int64_t* shape) {
  std::int64_t count = 1;
  for (int d = 0; d < ndim; ++d) count *= shape[d];
  return count;
}

}  // namespace

void add(const AddParams& p, void*, Stream) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for_each_offset<3>(p.ndim, p.shape, {p.stride_a, p.stride_b, p.stride_out}, begin, end,
                         [&](const auto& at) { store<T>(p.out, at[2], load<T>(p.a, at[0]) + load<T>(p.b, at[1])); });
    };
    parallel_for(count_of(p.ndim, p.shape), grain_for(1), task);
  });
}

void swiglu(const SwigluParams& p, void*, Stream) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for_each_offset<3>(p.ndim, p.shape, {p.stride_gate, p.stride_up, p.stride_out}, begin, end, [&](const auto& at) {
        store<T>(p.out, at[2], activate(Activation::kSilu, load<T>(p.gate, at[0])) * load<T>(p.up, at[1]));
      });
    };
    parallel_for(count_of(p.ndim, p.shape), grain_for(1), task);
  });
}

void swiglu_backward(const SwigluBackwardParams& p, void*, Stream) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for_each_offset<5>(p.ndim, p.shape,
                         {p.stride_grad_out, p.stride_gate, p.stride_up, p.stride_grad_gate, p.stride_grad_up}, begin,
                         end, [&](const auto& at) {
                           const double grad = load<T>(p.grad_out, at[0]);
                           const double gate = load<T>(p.gate, at[1]), up = load<T>(p.up, at[2]);
                           if (p.grad_gate)
                             store<T>(p.grad_gate, at[3], grad * up * activation_derivative(Activation::kSilu, gate));
                           if (p.grad_up) store<T>(p.grad_up, at[4], grad * activate(Activation::kSilu, gate));
                         });
    };
    parallel_for(count_of(p.ndim, p.shape), grain_for(1), task);
  });
}

}  // namespace flashkernel::cpu_scalar
