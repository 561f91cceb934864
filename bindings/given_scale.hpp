// A scale that a caller gives as a number or as an array. Used by bind_attention_fp8.cpp and bind_attention_mla.cpp.
#pragma once

#include "op.hpp"

namespace flashkernel::python {

/// A scale: None, a number, which is kept here and is read during the call, or an array.
struct GivenScale {
  float number = 1.0f;
  TensorView view;

  void parse(Call& call, const char* name, nb::handle scale) {
    if (scale.is_none()) return;
    double value = 0;
    if (!PyFloat_Check(scale.ptr()) && !PyLong_Check(scale.ptr())) {
      view = call.input(name, scale);
      return;
    }
    if (!nb::try_cast(scale, value)) call.fail(std::string(name) + "=" + short_repr(scale) + "; needs a number");
    number = static_cast<float>(value);
    view.data = &number;
    view.dtype = DType::kFloat32;
    view.ndim = 0;
  }
};

}  // namespace flashkernel::python
