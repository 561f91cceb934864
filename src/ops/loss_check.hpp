// Checks of what every loss has for each row: the loss itself, its logarithm of the sum, their gradients.
#pragma once

#include <string>

#include "flashkernel/loss.hpp"
#include "ops/check.hpp"

namespace flashkernel {

/// float32 [rows], by any stride. `counted`: what has as many rows, for the message: "logits.shape[0]".
inline void check_per_row(const Checker& check, const char* name, const TensorView& view, std::int64_t rows,
                          const char* counted) {
  check.dtype(name, view, DType::kFloat32);
  check.ndim(name, view, 1, 1);
  check.extent(name, view, 0, rows, counted);
}

/// A loss, or its gradient: one value per row, or one of all.
inline void check_loss(const Checker& check, const char* name, const TensorView& view, std::int64_t rows,
                       Reduction reduction, const char* counted) {
  if (reduction == Reduction::kNone) return check_per_row(check, name, view, rows, counted);
  check.dtype(name, view, DType::kFloat32);
  check.ndim(name, view, 0, 1);
  if (view.ndim == 1 && view.shape[0] != 1) check.fail(shape_text(name, view, 0) + "; a summed or mean loss needs 1");
}

}  // namespace flashkernel
