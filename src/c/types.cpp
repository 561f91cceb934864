// Defaults of the C structs, from those of the C++ ones, and contiguous tensors.
#include "c/call.hpp"
#include "flashkernel/flashkernel.h"

namespace flashkernel::c {

fk_attention_options default_attention_options() noexcept {
  const AttentionOptions options;
  fk_attention_options c{};
  c.size = sizeof c;
  c.causal = options.causal;
  c.check_pages = options.check_pages;
  c.window_left = options.window_left;
  c.window_right = options.window_right;
  c.softcap = options.softcap;
  c.block_size_q = options.block_size_q;
  c.block_size_k = options.block_size_k;
  return c;
}

fk_rope_options default_rope_options() noexcept {
  const RopeOptions options;
  return {sizeof(fk_rope_options), options.theta,   options.rotary_dim,
          options.interleaved,     options.inverse, /*inv_freq=*/nullptr};
}

fk_kv_append_rope default_kv_append_rope() noexcept {
  fk_kv_append_rope c{};
  c.size = sizeof c;
  c.norm_eps = KvAppendRope().norm_eps;
  return c;
}

fk_cross_entropy_options default_cross_entropy_options() noexcept {
  const CrossEntropyOptions options;
  return {sizeof(fk_cross_entropy_options), options.ignore_index, options.label_smoothing,
          static_cast<fk_reduction>(options.reduction)};
}

fk_linear_cross_entropy_options default_linear_cross_entropy_options() noexcept {
  const LinearCrossEntropyOptions options;
  return {sizeof(fk_linear_cross_entropy_options),
          options.ignore_index,
          options.label_smoothing,
          options.z_loss,
          options.softcap,
          static_cast<fk_reduction>(options.reduction)};
}

}  // namespace flashkernel::c

using namespace flashkernel::c;

fk_status fk_context_init(fk_context* context, size_t size) {
  return guarded([&] { give("context", fk_context{}, context, size); });
}
fk_status fk_kv_scales_init(fk_kv_scales* scales, size_t size) {
  return guarded([&] { give("kv_scales", fk_kv_scales{}, scales, size); });
}
fk_status fk_attention_options_init(fk_attention_options* options, size_t size) {
  return guarded([&] { give("attention_options", default_attention_options(), options, size); });
}
fk_status fk_attention_gradients_init(fk_attention_gradients* gradients, size_t size) {
  return guarded([&] { give("attention_gradients", fk_attention_gradients{}, gradients, size); });
}
fk_status fk_rope_options_init(fk_rope_options* options, size_t size) {
  return guarded([&] { give("rope_options", default_rope_options(), options, size); });
}
fk_status fk_kv_append_rope_init(fk_kv_append_rope* rope, size_t size) {
  return guarded([&] { give("kv_append_rope", default_kv_append_rope(), rope, size); });
}
fk_status fk_kv_append_places_init(fk_kv_append_places* places, size_t size) {
  return guarded([&] { give("kv_append_places", fk_kv_append_places{}, places, size); });
}
fk_status fk_norm_saved_init(fk_norm_saved* saved, size_t size) {
  return guarded([&] { give("norm_saved", fk_norm_saved{}, saved, size); });
}
fk_status fk_norm_gradients_init(fk_norm_gradients* gradients, size_t size) {
  return guarded([&] { give("norm_gradients", fk_norm_gradients{}, gradients, size); });
}
fk_status fk_linear_gradients_init(fk_linear_gradients* gradients, size_t size) {
  return guarded([&] { give("linear_gradients", fk_linear_gradients{}, gradients, size); });
}
fk_status fk_cross_entropy_options_init(fk_cross_entropy_options* options, size_t size) {
  return guarded([&] { give("cross_entropy_options", default_cross_entropy_options(), options, size); });
}

fk_status fk_linear_cross_entropy_options_init(fk_linear_cross_entropy_options* options, size_t size) {
  return guarded([&] { give("linear_cross_entropy_options", default_linear_cross_entropy_options(), options, size); });
}

fk_status fk_tensor_init(fk_tensor* tensor, void* data, fk_dtype dtype, fk_device device, int32_t ndim,
                         const int64_t* shape) {
  return guarded([&] {
    check_pointer("tensor", tensor);
    check_array("shape", shape, ndim);
    fk_tensor made{};
    made.data = data;
    made.dtype = dtype;
    made.ndim = ndim;
    made.device = device;
    for (int d = 0; d < ndim && d < FK_MAX_DIMS; ++d) made.shape[d] = shape[d];
    Call("fk_tensor_init").tensor("tensor", &made);  // refuses what is no tensor
    std::int64_t stride = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      made.strides[d] = stride;
      if (shape[d] > 0) stride *= shape[d];
    }
    *tensor = made;
  });
}
