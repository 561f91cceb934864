// One row of the registry: what a kernel variant is called, what it needs, what it accepts, how long it takes by a
// model, how a call of it is cut, and how it is launched.
// Backends fill tables of these (src/cpu/kernels.cpp, src/cuda/kernels.cpp); `select.hpp` chooses from them.
// Invariants: `supports` is legality alone, so that a row can be forced wherever it says yes; what is faster is told by
// `cost_us`. Both look at the params only, never at the data, and cost nanoseconds.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/device_facts.hpp"
#include "flashkernel/stream.hpp"
#include "flashkernel/types.hpp"
#include "ops/plan.hpp"

namespace flashkernel {

/// Why a kernel refuses a call: a static sentence, or null when it accepts.
class Verdict {
 public:
  static constexpr Verdict ok() noexcept { return Verdict(nullptr); }
  constexpr Verdict(const char* reason) noexcept : reason_(reason) {}  // NOLINT: a reason is a refusal
  constexpr explicit operator bool() const noexcept { return reason_ == nullptr; }
  constexpr const char* reason() const noexcept { return reason_; }

 private:
  const char* reason_;
};

/// A row's functions. Names of their own, so that they take no part in the deduction of Params.
template <class Params>
struct RowFunctions {
  using Supports = Verdict (*)(const Params&);
  using Cost = float (*)(const Params&, const DeviceFacts&);
  using MakePlan = Plan (*)(const Params&, const DeviceFacts&);
  using Launch = void (*)(const Params&, const Plan&, void* workspace, Stream);
  using LeftToAnother = bool (*)(const Params&);
  using InvariantFor = bool (*)(const Params&);
  using WorkspaceBytes = std::size_t (*)(const Params&);
  using PlainLaunch = void (*)(const Params&, void* workspace, Stream);
};

template <class Params>
struct KernelEntry {
  const char* name;  // "attention_fwd/cpu/avx512": op / backend / arch [/ dtype [/ instance [/ variant]]]
  DeviceType device;
  int cc_min, cc_max;          // compute capability served, 75 = 7.5; 0, 0 on the CPU
  std::uint32_t cpu_features;  // CpuFeature bits needed
  const char* arithmetic;      // the order of its sums: rows of one op with the same id give the same bits for a call
  typename RowFunctions<Params>::Supports supports;
  typename RowFunctions<Params>::Cost cost_us;   // microseconds by a model; of the rows that accept, the least runs
  typename RowFunctions<Params>::MakePlan plan;  // null: no workspace, and nothing to decide
  typename RowFunctions<Params>::Launch launch;
  /// Whether another row, for the same devices, takes the call wherever this one does and costs less: `choose` then
  /// does not look at this one, unless kernels are forced. It saves time and changes no choice. Null: there is none.
  typename RowFunctions<Params>::LeftToAnother left_to_another = nullptr;
  /// Whether calls of this kind have the row's arithmetic in the invariant mode, if no row before it in the table says
  /// so. Two things are promised by a row that says yes. The bits of a token's result depend on that token and on what
  /// it sees alone: not on the batch, the number of queries or of keys behind it, pages, or threads. And the answer
  /// follows from dtypes, head dims, lengths of the rows that are summed, and options, never from any of those counts.
  /// Null: never, which is the default.
  typename RowFunctions<Params>::InvariantFor invariant_for = nullptr;
};

/// For a row that every call may have in the invariant mode.
template <class Params>
bool every_call(const Params&) {
  return true;
}

template <class Params>
constexpr KernelEntry<Params> invariant(KernelEntry<Params> entry,
                                        typename RowFunctions<Params>::InvariantFor which = every_call<Params>) {
  entry.invariant_for = which;
  return entry;
}

/// A plan of a row that needs workspace, and decides nothing else beforehand.
template <class Params, typename RowFunctions<Params>::WorkspaceBytes kBytes>
Plan plan_workspace(const Params& params, const DeviceFacts&) {
  Plan plan;
  plan.workspace_bytes = kBytes(params);
  return plan;
}

/// A launch that asks for nothing of its plan.
template <class Params, typename RowFunctions<Params>::PlainLaunch kLaunch>
void launch_plain(const Params& params, const Plan&, void* workspace, Stream stream) {
  kLaunch(params, workspace, stream);
}

/// A backend's rows for one op, the preferred ones first: of rows of equal cost the first one runs.
template <class Params>
struct KernelTable {
  const KernelEntry<Params>* rows = nullptr;
  std::size_t count = 0;
  const KernelEntry<Params>* begin() const noexcept { return rows; }
  const KernelEntry<Params>* end() const noexcept { return rows + count; }
};

// Each backend defines one specialisation per params struct: src/cpu/kernels.cpp, and src/cuda/kernels.cpp or
// src/no_cuda.
template <class Params>
KernelTable<Params> cpu_kernels();
template <class Params>
KernelTable<Params> cuda_kernels();

}  // namespace flashkernel
