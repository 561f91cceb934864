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

/// What torch is recording. Only for calls with a torch tensor, as all that follows.
TorchModes torch_modes();
bool requires_gradient(nb::handle tensor);
/// Whether a forward-mode derivative travels with it.
bool has_tangent(nb::handle tensor);
/// Whether it is a view whose elements torch negates when they are read.
bool is_negated(nb::handle tensor);
/// Counts results that were written into tensors as torch counts its own, for autograd's check of what it saved.
void increment_versions(const nb::handle* tensors, int count);

/// RuntimeError, as torch's own: a derivative that this op would drop.
[[noreturn]] void raise_unrecorded(const char* op, const char* name, bool is_gradient, bool written);
/// "a tensor that vmap traces" and the like, for one that torch gives no memory; empty for others.
std::string traced_as(nb::handle tensor);
/// "flashkernel.torch.attention can be traced", or that nothing can be.
std::string where_traced(const std::string& op);

}  // namespace flashkernel::python
