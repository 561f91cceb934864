// attention and its gradient as XLA FFI handlers.
#include "flashkernel/attention.hpp"

#include "bindings/jax/call.hpp"

namespace flashkernel::jax {
namespace {

AttentionOptions options_of(const Call& call) {
  AttentionOptions options;
  options.causal = call.get<bool>("causal");
  options.window_left = call.get<std::int64_t>("window_left");
  options.window_right = call.get<std::int64_t>("window_right");
  options.softcap = call.get<float>("softcap");
  options.scale = call.get<float>("scale");
  options.bias = call("bias");
  options.mask = call("mask");
  options.alibi_slopes = call("alibi_slopes");
  options.alibi = static_cast<Alibi>(call.get<std::int64_t>("alibi"));  // flashkernel.jax has checked the name
  options.sinks = call("sinks");
  return options;
}

void forward(const Call& call) {
  attention(call("q"), call("k"), call("v"), call("out"), call("lse"), options_of(call), call.context());
}

void backward(const Call& call) {
  const AttentionGradients gradients{call("grad_q"), call("grad_k"), call("grad_v"), call("grad_bias"),
                                     call("grad_sinks")};
  attention_backward(call("grad_out"), call("q"), call("k"), call("v"), call("out"), call("lse"), call("grad_lse"),
                     gradients, options_of(call), true, call.context());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_attention, handle<forward>, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_attention_cuda, handle_cuda<forward>, cuda_binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_attention_backward, handle<backward>, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashkernel_jax_attention_backward_cuda, handle_cuda<backward>, cuda_binding());

}  // namespace flashkernel::jax
