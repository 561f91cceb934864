// Whether two strided views share memory, and whether one view names an element twice: exact, by bounded work.
// Called by the checks of every op, for each tensor that it writes.
#pragma once

#include <cstdint>

#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

enum class Overlap : std::uint8_t {
  kNo,
  kYes,
  kUnknown  ///< to tell would take too long, or the strides lead past any memory
};

/// Whether some byte belongs to an element of both. Absent and empty views share nothing.
Overlap shared_memory(const TensorView& a, const TensorView& b) noexcept;

/// Whether two different indices name one element.
Overlap overlaps_itself(const TensorView& view) noexcept;

/// The same elements in the same order: one dtype, shape and place, and the same strides where they matter.
bool is_same_tensor(const TensorView& a, const TensorView& b) noexcept;

}  // namespace flashkernel
