// Norms, linear, cross-entropy and their gradients as XLA FFI handlers.
#include "bindings/jax/call.hpp"
#include "flashkernel/linear.hpp"
#include "flashkernel/loss.hpp"
#include "flashkernel/norm.hpp"

namespace flashkernel::jax {
namespace {

void layer_norm_forward(const Call& call) {
  layer_norm(call("x"), call("residual"), call("weight"), call("bias"), call("out"),
             {call("residual_out"), call("mean"), call("rstd")}, call.get<float>("eps"), call.context());
}

void layer_norm_gradient(const Call& call) {
  layer_norm_backward(call("grad_out"), call("h"), call("weight"), call("mean"), call("rstd"),
                      call("grad_residual_out"), {call("grad_x"), call("grad_weight"), call("grad_bias")},
                      call.context());
}

void rms_norm_forward(const Call& call) {
  rms_norm(call("x"), call("residual"), call("weight"), call("out"), {call("residual_out"), {}, call("rstd")},
           call.get<float>("eps"), call.context());
}

void rms_norm_gradient(const Call& call) {
  rms_norm_backward(call("grad_out"), call("h"), call("weight"), call("rstd"), call("grad_residual_out"),
                    {call("grad_x"), call("grad_weight"), {}}, call.context());
}

Activation activation_of(const Call& call) { return static_cast<Activation>(call.get<std::int32_t>("activation")); }

void linear_forward(const Call& call) {
  linear(call("x"), call("weight"), call("bias"), call("out"), call("preactivation"), activation_of(call),
         call.context());
}

void linear_gradient(const Call& call) {
  linear_backward(call("grad_out"), call("x"), call("weight"), call("preactivation"),
                  {call("grad_x"), call("grad_weight"), call("grad_bias")}, activation_of(call), call.context());
}

CrossEntropyOptions loss_options(const Call& call) {
  return {call.get<std::int64_t>("ignore_index"), call.get<float>("label_smoothing"),
          static_cast<Reduction>(call.get<std::int32_t>("reduction"))};
}

void cross_entropy_forward(const Call& call) {
  cross_entropy(call("logits"), call("targets"), call("loss"), call("lse"), loss_options(call), call.context());
}

void cross_entropy_gradient(const Call& call) {
  cross_entropy_backward(call("grad_loss"), call("logits"), call("targets"), call("lse"), call("grad_logits"),
                         loss_options(call), call.context());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_layer_norm, handle<layer_norm_forward>, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_layer_norm_cuda, handle_cuda<layer_norm_forward>, cuda_binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_layer_norm_backward, handle<layer_norm_gradient>, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_layer_norm_backward_cuda, handle_cuda<layer_norm_gradient>,
                              cuda_binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_rms_norm, handle<rms_norm_forward>, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_rms_norm_cuda, handle_cuda<rms_norm_forward>, cuda_binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_rms_norm_backward, handle<rms_norm_gradient>, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_rms_norm_backward_cuda, handle_cuda<rms_norm_gradient>, cuda_binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_linear, handle<linear_forward>, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_linear_cuda, handle_cuda<linear_forward>, cuda_binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_linear_backward, handle<linear_gradient>, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_linear_backward_cuda, handle_cuda<linear_gradient>, cuda_binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_cross_entropy, handle<cross_entropy_forward>, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_cross_entropy_cuda, handle_cuda<cross_entropy_forward>, cuda_binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_cross_entropy_backward, handle<cross_entropy_gradient>, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_cross_entropy_backward_cuda, handle_cuda<cross_entropy_gradient>,
                              cuda_binding());

}  // namespace flashkernel::jax
