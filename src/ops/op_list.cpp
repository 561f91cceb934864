// The list of ops, as the public header `kernels.hpp` gives it.
#include "ops/op_list.hpp"

#include "flashkernel/kernels.hpp"

namespace flashkernel {
namespace {

template <class Params>
void append(std::vector<OpInfo>& infos, const Op<Params>& op) {
  for (const char* const function : op.functions)
    if (function) infos.push_back({function, Params::kOp});
}

template <class... Params>
std::vector<OpInfo> infos_of(const OpList<Params...>& list) {
  std::vector<OpInfo> infos;
  (append<Params>(infos, list), ...);
  return infos;
}

}  // namespace

std::vector<OpInfo> ops() { return infos_of(kOps); }

}  // namespace flashkernel
