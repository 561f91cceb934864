// Memory for counters that kernels leave as they found them: zero. No launch has to clear them first, also when a
// captured graph is replayed. Used by kernels whose blocks count each other's arrivals.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"

namespace flashkernel {
class MemoryResource;
}

namespace flashkernel::cuda {

/// Taken for one launch: zero before it, and zero again when its work has run (that is the kernel's duty). Nobody else
/// has it in between; what a captured launch takes stays with the graph, as any workspace does.
class ZeroedMemory {
 public:
  ZeroedMemory(int device, std::size_t bytes, Stream stream);
  ~ZeroedMemory();
  ZeroedMemory(const ZeroedMemory&) = delete;
  ZeroedMemory& operator=(const ZeroedMemory&) = delete;

  void* data() const noexcept { return data_; }

 private:
  MemoryResource& resource_;
  std::size_t bytes_;
  Stream stream_;
  void* data_;
};

}  // namespace flashkernel::cuda
