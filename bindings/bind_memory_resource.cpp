// Binds memory_resource.hpp: memory_stats.
#include "flashkernel/memory_resource.hpp"

#include "bindings.hpp"

namespace flashkernel::python {

void bind_memory_resource(nb::module_& module) {
  nb::class_<MemoryStats>(module, "MemoryStats", "What a device's memory resource counts; see `memory_stats`.")
      .def_ro("allocated_bytes", &MemoryStats::allocated_bytes, "In use now.")
      .def_ro("reserved_bytes", &MemoryStats::reserved_bytes, "Taken from the system now: in use and cached.")
      .def_ro("peak_allocated_bytes", &MemoryStats::peak_allocated_bytes, "Most ever in use at once.")
      .def_ro("peak_reserved_bytes", &MemoryStats::peak_reserved_bytes, "Most ever reserved at once.")
      .def_ro("num_allocations", &MemoryStats::num_allocations, "Allocations that succeeded.")
      .def_ro("num_deallocations", &MemoryStats::num_deallocations, "Deallocations.")
      .def_ro("num_upstream_allocations", &MemoryStats::num_upstream_allocations,
              "Allocations that the cache had to pass on.")
      .def("__repr__", [](const MemoryStats& stats) {
        return "MemoryStats(allocated_bytes=" + std::to_string(stats.allocated_bytes) +
               ", reserved_bytes=" + std::to_string(stats.reserved_bytes) +
               ", peak_allocated_bytes=" + std::to_string(stats.peak_allocated_bytes) + ")";
      });
  module.def(
      "memory_stats", [](nb::handle device) { return default_resource(parse_device(device)).stats(); },
      "device"_a = "cpu", nb::sig("def memory_stats(device: typing.Any = 'cpu') -> MemoryStats"),
      R"doc(Bytes and counts of FlashKernel's own memory on a device: workspace of ops, pages of pools.

device: "cpu" or "cuda:<index>". NotImplementedError when this build has no such device.

Example:

>>> import flashkernel as fk
>>> before = fk.memory_stats().allocated_bytes
>>> pool = fk.KvPagePool(4, heads_kv=1, head_dim=8, page_size=16, dtype="float32")
>>> fk.memory_stats().allocated_bytes - before >= 2 * 4 * 16 * 8 * 4
True
)doc");
}

}  // namespace flashkernel::python
