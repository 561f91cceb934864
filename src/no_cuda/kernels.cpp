// The CUDA tables of a build without CUDA: empty, so that nothing else needs to know.
#include "ops/op_list.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel {

template <class Params>
KernelTable<Params> cuda_kernels() {
  return {};
}

namespace {
using AnyFunction = void (*)();

template <class... Params>
AnyFunction address_of_table(const OpList<Params...>&, int i) {
  const AnyFunction tables[] = {reinterpret_cast<AnyFunction>(&cuda_kernels<Params>)...};
  return tables[i];
}
}  // namespace

// Never called. It takes the address of every specialisation, so that each is emitted here: one that is only called
// would be inlined and missing at the link.
AnyFunction no_cuda_table(int i) { return address_of_table(kOps, i); }

}  // namespace flashkernel
