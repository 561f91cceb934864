// What a C function is made of: exceptions become status codes, C structs become those of the C++ API.
#pragma once

#include <cstddef>
#include <cstring>
#include <optional>
#include <string>

#include "flashkernel/attention.hpp"
#include "flashkernel/error.hpp"
#include "flashkernel/flashkernel_types.h"
#include "flashkernel/kv_ops.hpp"
#include "flashkernel/kv_scales.hpp"
#include "flashkernel/linear.hpp"
#include "flashkernel/loss.hpp"
#include "flashkernel/norm.hpp"
#include "flashkernel/rope.hpp"

namespace flashkernel::c {

/// Inside a handler: keeps the exception's message and numbers for this thread and returns its status.
fk_status status_of_exception() noexcept;

/// FK_OK, or the status of what `run` throws.
template <class Run>
fk_status guarded(const Run& run) noexcept {
  try {
    run();
    return FK_OK;
  } catch (...) {
    return status_of_exception();
  }
}

/// The size of the first version of a struct: what a caller has to know at least. A struct that grows gets a
/// specialisation with the size that it has today.
template <class Struct>
inline constexpr std::size_t kFirstSize = sizeof(Struct);
template <>
inline constexpr std::size_t kFirstSize<fk_attention_options> = offsetof(fk_attention_options, k_starts);
template <>
inline constexpr std::size_t kFirstSize<fk_norm_saved> = offsetof(fk_norm_saved, weight_offset);
template <>
inline constexpr std::size_t kFirstSize<fk_norm_gradients> = offsetof(fk_norm_gradients, weight_offset);

/// InvalidArgument unless `size` is that of a version of the struct that this library knows.
void check_size(const char* what, std::size_t size, std::size_t first, std::size_t known);

/// InvalidArgument "what is NULL; ..." for a null pointer.
void check_pointer(const char* what, const void* pointer);
/// The same for an array, which may be null where it is empty.
void check_array(const char* what, const void* pointer, std::int64_t count);

/// Writes as much of a result as the caller has room for; `size` becomes its first field.
template <class Struct>
void give(const char* what, Struct value, Struct* to, std::size_t size) {
  check_pointer(what, to);
  check_size(what, size, kFirstSize<Struct>, sizeof(Struct));
  value.size = size;
  std::memcpy(to, &value, size);
}

/// As much of the caller's struct as it has, over the defaults.
template <class Struct>
Struct take(const char* what, const Struct& given, const Struct& defaults) {
  check_size(what, given.size, kFirstSize<Struct>, sizeof(Struct));
  Struct value = defaults;
  std::memcpy(&value, &given, given.size);
  return value;
}

Device device_of(const char* what, fk_device device);
DType dtype_of(const char* what, fk_dtype dtype);
bool flag_of(const char* what, std::int32_t flag);
fk_device device_in_c(Device device);
fk_tensor tensor_in_c(const TensorView& view);

fk_attention_options default_attention_options() noexcept;
fk_rope_options default_rope_options() noexcept;
fk_kv_append_rope default_kv_append_rope() noexcept;
fk_cross_entropy_options default_cross_entropy_options() noexcept;
fk_linear_cross_entropy_options default_linear_cross_entropy_options() noexcept;

/// The arguments of one call. Each function takes an argument's name, for refusals, and the argument; null stands for
/// an absent tensor and for defaults.
class Call {
 public:
  explicit Call(const char* op) noexcept : op_(op) {}

  TensorView tensor(const char* name, const fk_tensor* tensor) const;
  ExecutionContext context(const char* name, const fk_context* context) const;
  AttentionOptions attention_options(const char* name, const fk_attention_options* options) const;
  AttentionGradients attention_gradients(const char* name, const fk_attention_gradients* gradients) const;
  RopeOptions rope_options(const char* name, const fk_rope_options* options) const;
  std::optional<KvAppendRope> kv_append_rope(const char* name, const fk_kv_append_rope* rope) const;
  KvAppendPlaces kv_append_places(const char* name, const fk_kv_append_places* places) const;
  KvScales kv_scales(const char* name, const fk_kv_scales* scales) const;
  NormSaved norm_saved(const char* name, const fk_norm_saved* saved) const;
  NormGradients norm_gradients(const char* name, const fk_norm_gradients* gradients) const;
  LinearGradients linear_gradients(const char* name, const fk_linear_gradients* gradients) const;
  CrossEntropyOptions cross_entropy_options(const char* name, const fk_cross_entropy_options* options) const;
  Alibi alibi(const char* name, fk_alibi alibi) const;
  LinearCrossEntropyOptions linear_cross_entropy_options(const char* name,
                                                         const fk_linear_cross_entropy_options* options) const;
  Activation activation(const char* name, fk_activation activation) const;
  WeightFormat weight_format(const char* name, fk_weight_format format) const;
  bool flag(const char* name, std::int32_t flag) const;

 private:
  std::string named(const char* name) const { return std::string(op_) + ": " + name; }

  const char* op_;
};

}  // namespace flashkernel::c
