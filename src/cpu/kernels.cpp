// The CPU backend's table: one row per kernel, one section per op.
// A row here is dispatch, forcing, `flashkernel kernels`, bench and conformance test at once. Scalar rows accept any shape.
#include "ops/all_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel {
namespace {

template <class Params, std::size_t N>
constexpr KernelTable<Params> table(const KernelEntry<Params> (&rows)[N]) {
  return {rows, N};
}

}  // namespace

#define FK_EMPTY_TABLE(Params) \
  template <>                  \
  KernelTable<Params> cpu_kernels<Params>() { return {}; }

FK_EMPTY_TABLE(AttentionParams)

FK_EMPTY_TABLE(AttentionBackwardParams)

FK_EMPTY_TABLE(MergeStatesParams)

FK_EMPTY_TABLE(RopeParams)

FK_EMPTY_TABLE(LinearParams)

FK_EMPTY_TABLE(LinearBackwardParams)

FK_EMPTY_TABLE(AddParams)

FK_EMPTY_TABLE(SwigluParams)

FK_EMPTY_TABLE(SwigluBackwardParams)

FK_EMPTY_TABLE(ReduceParams)

FK_EMPTY_TABLE(SoftmaxParams)

FK_EMPTY_TABLE(SoftmaxBackwardParams)

FK_EMPTY_TABLE(NormParams)

FK_EMPTY_TABLE(NormBackwardParams)

FK_EMPTY_TABLE(CrossEntropyParams)

FK_EMPTY_TABLE(CrossEntropyBackwardParams)

FK_EMPTY_TABLE(KvAppendParams)

FK_EMPTY_TABLE(KvReadParams)

FK_EMPTY_TABLE(KvCopyParams)

#undef FK_EMPTY_TABLE

}  // namespace flashkernel
