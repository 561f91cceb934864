// flashkernel._C: the compiled module. Order matters only for classes, which must be bound before they are used in
// signatures.
#include "array.hpp"
#include "bindings.hpp"
#include "flashkernel/version.hpp"

NB_MODULE(_C, module) {
  using namespace flashkernel::python;
  module.doc() = "FlashKernel's compiled ops; use them as flashkernel.<name>.";
  module.attr("__version__") = FLASHKERNEL_VERSION_STRING;
  bind_errors(module);
  bind_array(module);
  bind_device(module);
  bind_kernels(module);
  bind_memory_resource(module);
  bind_ops(module);
  bind_kv_page_pool(module);
  bind_kv_cache(module);
}
