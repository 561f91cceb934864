// Elementwise kernels of the block: residual add and the gated unit.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

/// out = a + b, same shape and dtype (float32, float16, bfloat16), any strides; out may alias a or b.
FK_API void add(const TensorView& a, const TensorView& b, const TensorView& out, const ExecutionContext& context = {});

/// SwiGLU (Shazeer, 2020): out = silu(gate) * up, computed in fp32; same shape and dtype; out may alias gate or up.
FK_API void swiglu(const TensorView& gate, const TensorView& up, const TensorView& out,
                   const ExecutionContext& context = {});

/// Gradients of `swiglu`; an absent gradient is not computed.
FK_API void swiglu_backward(const TensorView& grad_out, const TensorView& gate, const TensorView& up,
                            const TensorView& grad_gate, const TensorView& grad_up,
                            const ExecutionContext& context = {});

}  // namespace flashkernel
