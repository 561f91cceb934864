// Reductions over any set of axes, and softmax over one.
#pragma once

#include <cstdint>

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

/// Bit d stands for dim d; 0 means every dim.
using AxisMask = std::uint32_t;

/// x float32, float16 or bfloat16 with any strides; out: x's shape with the reduced dims of size 1 (kept) or left out,
/// x's dtype or fp32. Accumulates in fp32, in an order that does not depend on the number of threads. Sum over nothing
/// is 0.
FK_API void reduce_sum(const TensorView& x, const TensorView& out, AxisMask axes = 0,
                       const ExecutionContext& context = {});
/// As `reduce_sum`, divided by the number of elements reduced; over nothing: NaN.
FK_API void reduce_mean(const TensorView& x, const TensorView& out, AxisMask axes = 0,
                        const ExecutionContext& context = {});
/// A NaN wins. Over nothing: InvalidArgument.
FK_API void reduce_max(const TensorView& x, const TensorView& out, AxisMask axes = 0,
                       const ExecutionContext& context = {});
/// out int64: row-major index, within the reduced dims, of the first maximum (the first NaN if there is one).
FK_API void argmax(const TensorView& x, const TensorView& out, AxisMask axes = 0, const ExecutionContext& context = {});

/// softmax or log-softmax along `axis` (negative counts from the end); out has x's shape and dtype and may alias x.
/// A row of -inf only gives 0 (log-softmax: -inf), never NaN; a NaN in a row makes that row NaN.
FK_API void softmax(const TensorView& x, const TensorView& out, int axis = -1, const ExecutionContext& context = {});
FK_API void log_softmax(const TensorView& x, const TensorView& out, int axis = -1,
                        const ExecutionContext& context = {});

/// Gradients from the forward pass's output.
FK_API void softmax_backward(const TensorView& grad_out, const TensorView& out, const TensorView& grad_x, int axis = -1,
                             const ExecutionContext& context = {});
FK_API void log_softmax_backward(const TensorView& grad_out, const TensorView& out, const TensorView& grad_x,
                                 int axis = -1, const ExecutionContext& context = {});

}  // namespace flashkernel
