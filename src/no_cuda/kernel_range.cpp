// No ranges in a build without CUDA.
#include "core/kernel_range.hpp"

namespace flashkernel {

const RangeHooks& range_hooks() noexcept {
  static const RangeHooks none;
  return none;
}

}  // namespace flashkernel
