// flashkernel.Array: a tensor in FlashKernel's own memory, seen by Python through DLPack and NumPy's array interface.
// Made for the pages of a pool and for callers whose framework offers no allocator.
// Invariant: the memory lives as long as any Array, NumPy view or DLPack capsule of it; freeing it needs no Python.
#pragma once

#include <memory>

#include "dlpack.hpp"

namespace flashkernel::python {

struct Array {
  TensorView view;
  std::shared_ptr<void> owner;
  Stream stream{};  ///< the stream that writes it (CUDA)
  /// Its memory goes back to the device's cache with it, which gives it to the stream's next calls.
  bool is_cached = false;

  /// Memory of the device's default resource, row-major, not initialised.
  static Array allocate(DType dtype, const Shape& shape, Device device, Stream stream);
};

/// Waits for the stream, and for all streams of the devices of arrays that have gone after others than their own were
/// given them: only then does their memory go back. The GIL is let go meanwhile.
void wait_for(Device device, Stream stream);

/// A NumPy view that keeps the memory alive (bfloat16 as uint16); the Array itself when the memory is on a GPU.
nb::object to_numpy(Array array);

void bind_array(nb::module_& module);

}  // namespace flashkernel::python
