// C structs become those of the C++ API, checked for what their types alone cannot promise.
#include "c/call.hpp"

#include <limits>

#include "c/handles.hpp"

namespace flashkernel::c {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw InvalidArgument(message); }

/// Whether there are no more than 2^63 - 1 elements, where a dim of 0 counts as 1.
bool countable(const fk_tensor& tensor) noexcept {
  std::int64_t count = 1;
  for (int d = 0; d < tensor.ndim; ++d) {
    if (tensor.shape[d] > std::numeric_limits<std::int64_t>::max() / count) return false;
    if (tensor.shape[d] > 0) count *= tensor.shape[d];
  }
  return true;
}

/// The data may still be null. `what` is only called where the tensor is refused.
template <class What>
TensorView view_of(const fk_tensor& tensor, const What& what) {
  TensorView view;
  if (tensor.dtype < FK_FLOAT32 || tensor.dtype > FK_FLOAT4_E2M1X2) dtype_of(what().c_str(), tensor.dtype);  // throws
  view.dtype = static_cast<DType>(tensor.dtype);
  if (tensor.ndim < 0 || tensor.ndim > kMaxDims)
    refuse(what() + " has " + std::to_string(tensor.ndim) + " dims; there are 0 to " + std::to_string(kMaxDims));
  if (tensor.device.type == FK_CPU && tensor.device.index == 0)
    view.device = Device::cpu();
  else
    view.device = device_of(what().c_str(), tensor.device);
  for (int d = 0; d < tensor.ndim; ++d) {
    if (tensor.shape[d] < 0)
      refuse(what() + ".shape[" + std::to_string(d) + "]=" + std::to_string(tensor.shape[d]) +
             "; it must not be negative");
    view.shape[d] = tensor.shape[d];
    view.strides[d] = tensor.strides[d];
  }
  if (!countable(tensor)) refuse(what() + " has more than 2^63 - 1 elements");
  view.data = tensor.data;
  view.ndim = tensor.ndim;
  return view;
}

}  // namespace

Device device_of(const char* what, fk_device device) {
  if (device.type == FK_CPU) {
    if (device.index != 0)
      refuse(std::string(what) + ".device.index is " + std::to_string(device.index) + "; on the CPU it is 0");
    return Device::cpu();
  }
  if (device.type != FK_CUDA)
    refuse(std::string(what) + ".device.type is " + std::to_string(device.type) + "; it must be FK_CPU or FK_CUDA");
  if (device.index < 0)
    refuse(std::string(what) + ".device.index is " + std::to_string(device.index) + "; it must not be negative");
  return Device::cuda(device.index);
}

DType dtype_of(const char* what, fk_dtype dtype) {
  if (dtype < FK_FLOAT32 || dtype > FK_FLOAT4_E2M1X2)
    refuse(std::string(what) + ".dtype is " + std::to_string(dtype) +
           "; it must be FK_FLOAT32 (0) to FK_FLOAT4_E2M1X2 (9)");
  return static_cast<DType>(dtype);
}

bool flag_of(const char* what, std::int32_t flag) {
  if (flag != 0 && flag != 1) refuse(std::string(what) + " is " + std::to_string(flag) + "; it must be 0 or 1");
  return flag == 1;
}

fk_device device_in_c(Device device) { return {device.is_cpu() ? FK_CPU : FK_CUDA, device.index}; }

fk_tensor tensor_in_c(const TensorView& view) {
  fk_tensor tensor{};
  tensor.data = view.data;
  tensor.dtype = static_cast<fk_dtype>(view.dtype);
  tensor.ndim = view.ndim;
  tensor.device = device_in_c(view.device);
  for (int d = 0; d < view.ndim; ++d) {
    tensor.shape[d] = view.shape[d];
    tensor.strides[d] = view.strides[d];
  }
  return tensor;
}

TensorView Call::tensor(const char* name, const fk_tensor* tensor) const {
  if (!tensor) return {};
  return view_of(*tensor, [&] { return named(name); });
}

bool Call::flag(const char* name, std::int32_t flag) const {
  if (flag == 0 || flag == 1) return flag == 1;
  return flag_of(named(name).c_str(), flag);  // throws
}

ExecutionContext Call::context(const char* name, const fk_context* given) const {
  if (!given) return {};
  const fk_context c = take(name, *given, fk_context{sizeof(fk_context), nullptr, nullptr, nullptr});
  ExecutionContext context;
  context.stream.handle = c.stream;
  if (c.workspace) context.workspace = c.workspace->resource.get();
  if (c.explain) {
    c.explain->value = {};
    context.explain = &c.explain->value;
  }
  return context;
}

AttentionOptions Call::attention_options(const char* name, const fk_attention_options* given) const {
  if (!given) return {};
  const fk_attention_options c = take(name, *given, default_attention_options());
  AttentionOptions options;
  options.causal = flag("causal", c.causal);
  options.check_pages = flag("check_pages", c.check_pages);
  options.window_left = c.window_left;
  options.window_right = c.window_right;
  options.softcap = c.softcap;
  if (flag("has_scale", c.has_scale)) options.scale = c.scale;
  options.bias = tensor("bias", c.bias);
  options.alibi_slopes = tensor("alibi_slopes", c.alibi_slopes);
  options.sinks = tensor("sinks", c.sinks);
  options.kv_scales = kv_scales("kv_scales", c.kv_scales);
  options.mask = tensor("mask", c.mask);
  options.alibi = alibi("alibi", c.alibi);
  options.k_starts = tensor("k_starts", c.k_starts);
  options.seqused_q = tensor("seqused_q", c.seqused_q);
  options.seqused_k = tensor("seqused_k", c.seqused_k);
  options.block_mask = tensor("block_mask", c.block_mask);
  options.block_size_q = c.block_size_q;
  options.block_size_k = c.block_size_k;
  return options;
}

AttentionGradients Call::attention_gradients(const char* name, const fk_attention_gradients* given) const {
  if (!given) return {};
  const fk_attention_gradients c = take(name, *given, fk_attention_gradients{});
  return {tensor("grad_q", c.q), tensor("grad_k", c.k), tensor("grad_v", c.v), tensor("grad_bias", c.bias),
          tensor("grad_sinks", c.sinks)};
}

RopeOptions Call::rope_options(const char* name, const fk_rope_options* given) const {
  if (!given) return {};
  const fk_rope_options c = take(name, *given, default_rope_options());
  RopeOptions options;
  options.theta = c.theta;
  options.rotary_dim = c.rotary_dim;
  options.interleaved = flag("interleaved", c.interleaved);
  options.inverse = flag("inverse", c.inverse);
  options.inv_freq = tensor("inv_freq", c.inv_freq);
  return options;
}

std::optional<KvAppendRope> Call::kv_append_rope(const char* name, const fk_kv_append_rope* given) const {
  if (!given) return std::nullopt;
  const fk_kv_append_rope c = take(name, *given, default_kv_append_rope());
  return KvAppendRope{tensor("rope.positions", c.positions),
                      rope_options("rope.options", c.options),
                      tensor("rope.q", c.q),
                      tensor("rope.q_out", c.q_out),
                      tensor("rope.cos", c.cos),
                      tensor("rope.sin", c.sin),
                      tensor("rope.q_norm", c.q_norm),
                      tensor("rope.k_norm", c.k_norm),
                      c.norm_eps};
}

KvAppendPlaces Call::kv_append_places(const char* name, const fk_kv_append_places* given) const {
  check_pointer(named(name).c_str(), given);
  const fk_kv_append_places c = take(name, *given, fk_kv_append_places{});
  return {tensor("block_table", c.block_table), tensor("seq_lens", c.seq_lens), tensor("cu_seqlens", c.cu_seqlens),
          tensor("positions", c.positions), tensor("seq_lens_after", c.seq_lens_after)};
}

KvScales Call::kv_scales(const char* name, const fk_kv_scales* given) const {
  if (!given) return {};
  const fk_kv_scales c = take(name, *given, fk_kv_scales{});
  return {tensor("k_scales", c.k), tensor("v_scales", c.v), c.k_tensor == 0 ? 1 : c.k_tensor,
          c.v_tensor == 0 ? 1 : c.v_tensor};
}

NormSaved Call::norm_saved(const char* name, const fk_norm_saved* given) const {
  if (!given) return {};
  const fk_norm_saved c = take(name, *given, fk_norm_saved{});
  return {tensor("residual_out", c.residual_out), tensor("mean", c.mean), tensor("rstd", c.rstd), c.weight_offset};
}

NormGradients Call::norm_gradients(const char* name, const fk_norm_gradients* given) const {
  if (!given) return {};
  const fk_norm_gradients c = take(name, *given, fk_norm_gradients{});
  return {tensor("grad_x", c.x), tensor("grad_weight", c.weight), tensor("grad_bias", c.bias), c.weight_offset};
}

LinearGradients Call::linear_gradients(const char* name, const fk_linear_gradients* given) const {
  if (!given) return {};
  const fk_linear_gradients c = take(name, *given, fk_linear_gradients{});
  return {tensor("grad_x", c.x), tensor("grad_weight", c.weight), tensor("grad_bias", c.bias)};
}

CrossEntropyOptions Call::cross_entropy_options(const char* name, const fk_cross_entropy_options* given) const {
  if (!given) return {};
  const fk_cross_entropy_options c = take(name, *given, default_cross_entropy_options());
  if (c.reduction < FK_REDUCTION_NONE || c.reduction > FK_REDUCTION_MEAN)
    refuse(named("reduction") + " is " + std::to_string(c.reduction) +
           "; it must be FK_REDUCTION_NONE (0) to _MEAN (2)");
  return {c.ignore_index, c.label_smoothing, static_cast<Reduction>(c.reduction)};
}

Alibi Call::alibi(const char* name, fk_alibi alibi) const {
  if (alibi < FK_ALIBI_DISTANCE || alibi > FK_ALIBI_SQRT)
    refuse(named(name) + " is " + std::to_string(alibi) + "; it must be FK_ALIBI_DISTANCE (0) to _SQRT (2)");
  return static_cast<Alibi>(alibi);
}

LinearCrossEntropyOptions Call::linear_cross_entropy_options(const char* name,
                                                             const fk_linear_cross_entropy_options* given) const {
  if (!given) return {};
  const fk_linear_cross_entropy_options c = take(name, *given, default_linear_cross_entropy_options());
  if (c.reduction < FK_REDUCTION_NONE || c.reduction > FK_REDUCTION_MEAN)
    refuse(named("reduction") + " is " + std::to_string(c.reduction) +
           "; it must be FK_REDUCTION_NONE (0) to _MEAN (2)");
  return {c.ignore_index, c.label_smoothing, c.z_loss, c.softcap, static_cast<Reduction>(c.reduction)};
}

Activation Call::activation(const char* name, fk_activation activation) const {
  if (activation < FK_ACTIVATION_NONE || activation > FK_ACTIVATION_SILU)
    refuse(named(name) + " is " + std::to_string(activation) + "; it must be FK_ACTIVATION_NONE (0) to _SILU (3)");
  return static_cast<Activation>(activation);
}

WeightFormat Call::weight_format(const char* name, fk_weight_format format) const {
  if (format < FK_WEIGHT_INT4 || format > FK_WEIGHT_Q8_0)
    refuse(named(name) + " is " + std::to_string(format) + "; it must be FK_WEIGHT_INT4 (0) to _Q8_0 (4)");
  return static_cast<WeightFormat>(format);
}

}  // namespace flashkernel::c
