// torch.Tensor where the bindings treat it apart from what DLPack offers of it.
#pragma once

#include <nanobind/nanobind.h>

#include "dlpack.hpp"

namespace flashkernel::python {

/// torch.Tensor and what is derived from it; false where torch is not imported.
bool is_torch(PyTypeObject* type);

/// A new row-major tensor of torch's own. Through DLPack's allocator its memory would be torch's, too, but not its
/// storage: Tensor.record_stream passes foreign storages over in silence, and the memory could be given to somebody
/// else while another stream still reads it. It also takes longer.
nb::object torch_empty(DType dtype, const Shape& shape, flashkernel::Device device);

}  // namespace flashkernel::python
