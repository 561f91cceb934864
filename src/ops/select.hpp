// From params to one running kernel: the only place where a choice is made.
// The rule: of the rows that are allowed, run on the device and accept the params, the one with the least modelled cost
// runs; of rows of equal cost, the first one of the table. Preferred rows (patterns with '?') go before all others.
// In the invariant mode rows of one arithmetic are allowed: that of the first available row of the table whose
// `invariant_for` takes the call. It looks at nothing that the number of tokens beside a token could change.
// Called by every front door in ops/. Reads the backends' tables once per op; a call costs a short loop over the rows.
#pragma once

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "core/call_workers.hpp"
#include "core/cuda_devices.hpp"
#include "core/fork_safe.hpp"
#include "core/kernel_range.hpp"
#include "flashkernel/error.hpp"
#include "flashkernel/execution.hpp"
#include "flashkernel/kernels.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel {

/// What the registry knows of one row, whatever its params.
struct RowState {
  const char* name = nullptr;
  const char* op = nullptr;
  DeviceType device = DeviceType::kCpu;
  int cc_min = 0, cc_max = 0;
  std::uint32_t cpu_features = 0;
  const char* arithmetic = nullptr;
  std::atomic<bool> allowed{true};     // false while another kernel of the op is forced
  std::atomic<bool> preferred{false};  // chosen before others wherever it accepts, whatever it costs
  std::atomic<std::uint64_t> calls{0};
};

/// Whether any row is preferred: no choice needs a look at that otherwise.
inline std::atomic<bool> any_preferred{false};

/// Whether any row is not allowed.
inline std::atomic<bool> any_forced{false};

/// How many scopes of the invariant mode live; FLASHKERNEL_INVARIANT=1 counts as one.
extern std::atomic<int> invariant_scopes;

inline bool is_invariant_call(const ExecutionContext& context) noexcept {
  return context.invariant || invariant_scopes.load(std::memory_order_relaxed) > 0;
}

/// The facts of the processor: its CPU features alone.
const DeviceFacts& processor_facts();

/// The facts of the processor or of a GPU. A GPU that does not exist has the compute capability 0.
inline const DeviceFacts& facts_of(Device device) {
  return device.is_cuda() ? cuda_device_facts(device.index) : processor_facts();
}

/// Whether a device of the row's kind can run it: by CPU features, or by compute capability.
inline bool is_available(const RowState& row, const DeviceFacts& facts) noexcept {
  if (row.device == DeviceType::kCpu) return (row.cpu_features & ~facts.cpu_features) == 0;
  return row.cc_min <= facts.compute_capability && facts.compute_capability <= row.cc_max;
}

/// Why a row is not available: what it needs and what the device has, by name.
std::string why_unavailable(const RowState& row, Device device, const DeviceFacts& facts);
/// Why a row that accepts a call is not used in the invariant mode: its arithmetic is not the one of such calls
/// (`arithmetic`; null: no row has it).
std::string why_not_invariant(const RowState& row, const char* arithmetic);
std::string lacking_features(std::uint32_t needed, std::uint32_t present);      // bits of CpuFeature
std::string other_capability(int least, int most, int present, Device device);  // 75 = 7.5

/// Throws InvalidArgument if FLASHKERNEL_FORCE holds a pattern that matches no kernel, or FLASHKERNEL_INVARIANT neither
/// 0 nor 1: a misspelt id must not mean "any".
void check_environment();

/// Held while the table of an op is made, which registers its rows: one thread does that.
ForkSafeMutex& tables_mutex();

/// Adds a row to the registry (`kernels()`, forcing); rows live as long as the process.
void register_row(RowState& row);

/// Throws Unsupported: "attention_fwd: no kernel for cuda:0: ..." with each candidate's reason.
[[noreturn]] void throw_no_kernel(const Explanation& explanation, Device device);

/// Workspace for one launch, given back in stream order.
class Workspace {
 public:
  Workspace(std::size_t bytes, Device device, const ExecutionContext& context);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* data() const noexcept { return data_; }

 private:
  MemoryResource* resource_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_;
  Stream stream_;
};

template <class Params>
class OpTable {
 public:
  struct Row {
    const KernelEntry<Params>* entry = nullptr;
    RowState state;
  };

  /// Rows as the backends' tables list them. Made once; never destroyed, so that a call at exit is safe.
  static OpTable& instance() {
    static std::atomic<OpTable*> made{nullptr};
    OpTable* table = made.load(std::memory_order_acquire);
    return table ? *table : make(made);
  }

  Row* begin() noexcept { return rows_; }
  Row* end() noexcept { return rows_ + count_; }

 private:
  static OpTable& make(std::atomic<OpTable*>& made) {
    const ForkSafeLock lock(tables_mutex());
    if (!made.load(std::memory_order_relaxed)) made.store(new OpTable, std::memory_order_release);
    return *made.load(std::memory_order_relaxed);
  }

  OpTable() {
    check_environment();
    const KernelTable<Params> tables[] = {cpu_kernels<Params>(), cuda_kernels<Params>()};
    std::vector<const KernelEntry<Params>*> entries;
    for (const auto& table : tables)
      for (const auto& entry : table) entries.push_back(&entry);
    count_ = entries.size();
    rows_ = new Row[count_];
    for (std::size_t i = 0; i < count_; ++i) {
      const KernelEntry<Params>& entry = *entries[i];
      RowState& state = rows_[i].state;
      rows_[i].entry = &entry;
      state.name = entry.name;
      state.op = Params::kOp;
      state.device = entry.device;
      state.cc_min = entry.cc_min;
      state.cc_max = entry.cc_max;
      state.cpu_features = entry.cpu_features;
      state.arithmetic = entry.arithmetic;
      register_row(state);
    }
  }

  Row* rows_ = nullptr;
  std::size_t count_ = 0;
};

/// Stands for `why_unavailable`, whose text only an explanation needs.
inline constexpr const char* kUnavailable = "it is not available here";

/// Null when this row may serve the call, else why not. The device's type must match before anything is said.
template <class Params>
const char* refusal(const typename OpTable<Params>::Row& row, const Params& params, const DeviceFacts& facts) {
  if (!row.state.allowed.load(std::memory_order_relaxed)) return "another kernel is forced";
  if (!is_available(row.state, facts)) return kUnavailable;
  const Verdict verdict = row.entry->supports(params);
  return verdict ? nullptr : verdict.reason();
}

template <class Params>
struct Choice {
  typename OpTable<Params>::Row* row = nullptr;  // null: none accepts
  float modelled_us = 0;
};

/// The arithmetic that calls of this kind have in the invariant mode on the device; null: none.
template <class Params>
const char* invariant_arithmetic(const Params& params, DeviceType device, const DeviceFacts& facts) {
  for (const auto& row : OpTable<Params>::instance())
    if (row.state.device == device && row.entry->invariant_for && is_available(row.state, facts) &&
        row.entry->invariant_for(params))
      return row.state.arithmetic;
  return nullptr;
}

/// The row that serves the call, by the rule at the top; `arithmetic`: of those of this one, null: of all.
template <class Params>
Choice<Params> choose(const Params& params, DeviceType device, const DeviceFacts& facts,
                      const char* arithmetic = nullptr) {
  auto& table = OpTable<Params>::instance();
  const auto cheapest = [&](bool preferred) {
    const bool all = !preferred && !any_forced.load(std::memory_order_relaxed);
    Choice<Params> best;
    for (auto& row : table) {
      if (all && row.entry->left_to_another && row.entry->left_to_another(params)) continue;
      if (row.state.device != device || (preferred && !row.state.preferred.load(std::memory_order_relaxed))) continue;
      if (arithmetic && std::strcmp(arithmetic, row.state.arithmetic) != 0) continue;
      if (refusal<Params>(row, params, facts)) continue;
      const float cost = row.entry->cost_us(params, facts);
      if (!best.row || cost < best.modelled_us) best = {&row, cost};
    }
    return best;
  };
  if (any_preferred.load(std::memory_order_relaxed))
    if (const Choice<Params> best = cheapest(true); best.row) return best;
  return cheapest(false);
}

/// The row that serves the call in the invariant mode; `facts` are those that in_mode returned.
template <class Params>
Choice<Params> choose_invariant(const Params& params, DeviceType device, const DeviceFacts& facts) {
  const char* const arithmetic = invariant_arithmetic(params, device, facts);
  return arithmetic ? choose(params, device, facts, arithmetic) : Choice<Params>{};
}

/// What costs and plans of a call in the invariant mode ask of the device.
inline DeviceFacts in_mode(DeviceFacts facts) {
  facts.invariant = true;
  return facts;
}

/// How the chosen row runs the call.
template <class Params>
Plan make_plan(const Choice<Params>& choice, const Params& params, const DeviceFacts& facts) {
  Plan plan = choice.row->entry->plan ? choice.row->entry->plan(params, facts) : Plan();
  plan.modelled_us = choice.modelled_us;
  return plan;
}

/// Steps of a call, by which its threads are counted (workers_for). Ops whose unit of work is more than one step have
/// an overload.
template <class Params>
double steps_of(const Params& params) {
  return work_of(params);
}

template <class Params>
Explanation explain_call(const Params& params, Device device, bool invariant) {
  const CallWorkers workers(steps_of(params));
  Explanation explanation;
  explanation.op = Params::kOp;
  explanation.invariant = invariant;
  const DeviceFacts facts = invariant ? in_mode(facts_of(device)) : facts_of(device);
  const char* const arithmetic = invariant ? invariant_arithmetic(params, device.type, facts) : nullptr;
  for (auto& row : OpTable<Params>::instance()) {
    if (row.state.device != device.type) continue;
    const char* reason = refusal<Params>(row, params, facts);
    std::string text = reason == kUnavailable ? why_unavailable(row.state, device, facts) : reason ? reason : "";
    if (!reason && invariant && (!arithmetic || std::strcmp(arithmetic, row.state.arithmetic) != 0)) {
      text = why_not_invariant(row.state, arithmetic);
      reason = text.c_str();
    }
    const float cost = reason ? 0.0f : row.entry->cost_us(params, facts);
    explanation.candidates.push_back({row.state.name, reason == nullptr, text, cost});
  }
  const Choice<Params> choice =
      invariant ? choose_invariant(params, device.type, facts) : choose(params, device.type, facts);
  if (choice.row) {
    const Plan plan = make_plan(choice, params, facts);
    explanation.kernel = choice.row->state.name;
    explanation.arithmetic = choice.row->state.arithmetic;
    explanation.workspace_bytes = plan.workspace_bytes;
    explanation.modelled_us = plan.modelled_us;
  }
  return explanation;
}

/// Runs the best kernel for `params`, or explains the choice when the context asks for that.
template <class Params>
void dispatch(const Params& params, Device device, const ExecutionContext& context) {
  const bool invariant = is_invariant_call(context);
  if (context.explain) {
    *context.explain = explain_call(params, device, invariant);
    return;
  }
  const CallWorkers workers(steps_of(params));
  const DeviceFacts facts = invariant ? in_mode(facts_of(device)) : facts_of(device);
  const Choice<Params> choice =
      invariant ? choose_invariant(params, device.type, facts) : choose(params, device.type, facts);
  if (!choice.row) throw_no_kernel(explain_call(params, device, invariant), device);
  auto& row = *choice.row;
  row.state.calls.fetch_add(1, std::memory_order_relaxed);
  const Plan plan = make_plan(choice, params, facts);
  const Workspace workspace(plan.workspace_bytes, device, context);
  const KernelRange range(row.state.name);
  row.entry->launch(params, plan, workspace.data(), context.stream);
}

}  // namespace flashkernel
