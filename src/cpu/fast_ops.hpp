// The fast CPU kernels by name: defined under avx2/, avx512/, amx/, launched through the table in kernels.cpp only.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/op_list.hpp"

namespace flashkernel::cpu {

#define FK_DECLARE_FAST_OPS                                                                   \
  void linear(const LinearParams&, void*, Stream);                                            \
  void linear_packed(const LinearParams&, void*, Stream);                                     \
  void linear_backward(const LinearBackwardParams&, void*, Stream);                           \
  void quantized_linear(const QuantizedLinearParams&, void*, Stream);                         \
  void quantized_linear_packed(const QuantizedLinearParams&, void*, Stream);                  \
  void linear_fp8(const LinearFp8Params&, void*, Stream);                                     \
  void norm(const NormParams&, void*, Stream);                                                \
  void norm_backward(const NormBackwardParams&, void*, Stream);                               \
  void softmax(const SoftmaxParams&, void*, Stream);                                          \
  void softmax_backward(const SoftmaxBackwardParams&, void*, Stream);                         \
  void cross_entropy(const CrossEntropyParams&, void*, Stream);                               \
  void cross_entropy_backward(const CrossEntropyBackwardParams&, void*, Stream);              \
  void linear_cross_entropy(const LinearCrossEntropyParams&, void*, Stream);                  \
  void linear_cross_entropy_backward(const LinearCrossEntropyBackwardParams&, void*, Stream); \
  void reduce(const ReduceParams&, void*, Stream);                                            \
  void add(const AddParams&, void*, Stream);                                                  \
  void swiglu(const SwigluParams&, void*, Stream);                                            \
  void swiglu_backward(const SwigluBackwardParams&, void*, Stream);                           \
  void rope(const RopeParams&, void*, Stream);                                                \
  void kv_append(const KvAppendParams&, void*, Stream);

namespace avx2 {
FK_DECLARE_FAST_OPS
}
namespace avx512 {
FK_DECLARE_FAST_OPS
}
#undef FK_DECLARE_FAST_OPS

namespace avx512_vnni {
void quantized_linear_tiles(const QuantizedLinearParams&, void*, Stream);
}

namespace amx {
void linear(const LinearParams&, void*, Stream);
void linear_stream(const LinearParams&, void*, Stream);
void linear_fp16(const LinearParams&, void*, Stream);
void linear_backward(const LinearBackwardParams&, void*, Stream);
void linear_backward_fp16(const LinearBackwardParams&, void*, Stream);
void quantized_linear_tiles(const QuantizedLinearParams&, void*, Stream);
}  // namespace amx

}  // namespace flashkernel::cpu
