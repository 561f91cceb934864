// The C API's view of the process: version, devices, threads, ops and kernels.
#include <new>
#include <string>
#include <utility>

#include "c/call.hpp"
#include "c/handles.hpp"
#include "flashkernel/device.hpp"
#include "flashkernel/flashkernel.h"
#include "flashkernel/version.hpp"

using namespace flashkernel::c;

int32_t fk_abi_version(void) { return FK_ABI_VERSION; }
const char* fk_version(void) { return FLASHKERNEL_VERSION_STRING; }

int32_t fk_num_cuda_devices(void) { return flashkernel::num_cuda_devices(); }
int32_t fk_num_threads(void) { return flashkernel::num_threads(); }
fk_status fk_set_num_threads(int32_t count) {
  return guarded([&] { flashkernel::set_num_threads(count); });
}

namespace {

/// A string that lives until this thread asks for the next one of its kind; null where the question throws.
template <class Ask>
const char* kept(std::string& last, const Ask& ask) noexcept {
  return guarded([&] { last = ask(); }) == FK_OK ? last.c_str() : nullptr;
}

const flashkernel::KernelVerdict& candidate_of(const fk_explanation* explanation, int64_t index) {
  check_pointer("explanation", explanation);
  const auto& candidates = explanation->value.candidates;
  if (index < 0 || index >= static_cast<int64_t>(candidates.size()))
    throw flashkernel::InvalidArgument("index is " + std::to_string(index) + "; there are " +
                                       std::to_string(candidates.size()) + " candidates");
  return candidates[static_cast<std::size_t>(index)];
}

}  // namespace

const char* fk_cpu_features(void) {
  thread_local std::string last;
  return kept(last, [] { return flashkernel::cpu_features(); });
}

const char* fk_op_name(int64_t index) {
  thread_local std::string last;
  if (index < 0) return nullptr;
  return kept(last, [&] {
    const auto ops = flashkernel::ops();
    if (index >= static_cast<int64_t>(ops.size()))
      throw flashkernel::InvalidArgument("index is " + std::to_string(index) + "; there are " +
                                         std::to_string(ops.size()) + " ops");
    return ops[static_cast<std::size_t>(index)].name;
  });
}

fk_status fk_force_kernels(const char* patterns) {
  return guarded([&] {
    check_pointer("patterns", patterns);
    flashkernel::force_kernels(patterns);
  });
}

const char* fk_forced_kernels(void) {
  thread_local std::string last;
  return kept(last, [] { return flashkernel::forced_kernels(); });
}

fk_status fk_kernel_list_create(fk_kernel_list** list) {
  return guarded([&] {
    check_pointer("list", list);
    *list = new fk_kernel_list{flashkernel::kernels()};
  });
}

void fk_kernel_list_destroy(fk_kernel_list* list) { delete list; }

int64_t fk_kernel_list_count(const fk_kernel_list* list) {
  return list ? static_cast<int64_t>(list->kernels.size()) : 0;
}

fk_status fk_kernel_list_get(const fk_kernel_list* list, int64_t index, fk_kernel_info* info, size_t size) {
  return guarded([&] {
    check_pointer("list", list);
    if (index < 0 || index >= fk_kernel_list_count(list))
      throw flashkernel::InvalidArgument("index is " + std::to_string(index) + "; the list has " +
                                         std::to_string(fk_kernel_list_count(list)) + " kernels");
    const flashkernel::KernelInfo& kernel = list->kernels[static_cast<std::size_t>(index)];
    fk_kernel_info c{};
    c.id = kernel.id.c_str();
    c.op = kernel.op.c_str();
    c.cpu_features = kernel.cpu_features.c_str();
    c.arithmetic = kernel.arithmetic.c_str();
    c.device = kernel.device == flashkernel::DeviceType::kCpu ? FK_CPU : FK_CUDA;
    c.cc_min = kernel.cc_min;
    c.cc_max = kernel.cc_max;
    c.available = kernel.available;
    c.calls = kernel.calls;
    give("kernel_info", c, info, size);
  });
}

fk_status fk_explanation_create(fk_explanation** explanation) {
  return guarded([&] {
    check_pointer("explanation", explanation);
    *explanation = new fk_explanation;
  });
}

void fk_explanation_destroy(fk_explanation* explanation) { delete explanation; }

const char* fk_explanation_kernel(const fk_explanation* explanation) {
  return explanation ? explanation->value.kernel.c_str() : nullptr;
}

uint64_t fk_explanation_workspace_bytes(const fk_explanation* explanation) {
  return explanation ? explanation->value.workspace_bytes : 0;
}

int64_t fk_explanation_num_candidates(const fk_explanation* explanation) {
  return explanation ? static_cast<int64_t>(explanation->value.candidates.size()) : 0;
}

fk_status fk_explanation_candidate(const fk_explanation* explanation, int64_t index, fk_candidate* candidate,
                                   size_t size) {
  return guarded([&] {
    const flashkernel::KernelVerdict& verdict = candidate_of(explanation, index);
    give("candidate",
         fk_candidate{0, verdict.kernel.c_str(), verdict.reason.c_str(), verdict.accepted, verdict.modelled_us},
         candidate, size);
  });
}
