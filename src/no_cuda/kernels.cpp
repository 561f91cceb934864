// The CUDA tables of a build without CUDA: empty, so that nothing else needs to know.
#include "ops/all_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel {

template <class Params>
KernelTable<Params> cuda_kernels() {
  return {};
}

namespace {
template <class... Params>
void instantiate(ParamsList<Params...>) {
  (cuda_kernels<Params>(), ...);
}
}  // namespace

// Emits every specialisation; never called.
void instantiate_no_cuda_kernels() { instantiate(AllParams{}); }

}  // namespace flashkernel
