// The registry's untyped half: every row of every op, forcing, and the texts of refusals.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <utility>

#include "core/cpu_features.hpp"
#include "core/cuda_devices.hpp"
#include "core/fork_safe.hpp"
#include "flashkernel/invariant.hpp"
#include "ops/op_list.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

// Rows that also serve what comes next say so by a largest compute capability from here on.
constexpr int kNewestCapability = 999;

struct Registry {
  ForkSafeMutex mutex;
  ForkSafeMutex tables;  // held while an op's table is made; younger than the other, which that takes
  std::vector<RowState*> rows;
  std::string patterns;
  bool patterns_known = false;  // FLASHKERNEL_FORCE read
};

Registry& registry() {
  static MadeOnce<Registry> instance;
  return instance.get();
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    part.erase(0, part.find_first_not_of(" \t"));
    part.erase(part.find_last_not_of(" \t") + 1);
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

// A pattern that ends with '?' only puts its kernels first; it restricts nothing.
bool only_prefers(const std::string& pattern) { return !pattern.empty() && pattern.back() == '?'; }

// "op/rest" or "*/rest", either with '?', against the id "op/rest/more": whole path segments only.
bool names_op(const std::string& pattern, const std::string& op) {
  const std::string head = pattern.substr(0, pattern.find('/'));
  return head == "*" || head == op;
}

bool matches(const std::string& pattern, const std::string& id) {
  const std::string op = id.substr(0, id.find('/'));
  if (!names_op(pattern, op)) return false;
  const auto slash = pattern.find('/');
  if (slash == std::string::npos) return true;
  const std::string prefix = op + pattern.substr(slash, pattern.size() - slash - (only_prefers(pattern) ? 1 : 0));
  return id.compare(0, prefix.size(), prefix) == 0 && (id.size() == prefix.size() || id[prefix.size()] == '/');
}

// "*/cpu/scalar" restricts an op only if the op has a kernel that matches: naming an arch must not break ops without
// it.
bool restricts(const std::string& pattern, const char* op, const std::vector<RowState*>& rows) {
  if (!names_op(pattern, op)) return false;
  if (pattern[0] != '*') return true;
  return std::any_of(rows.begin(), rows.end(),
                     [&](const RowState* row) { return std::string(row->op) == op && matches(pattern, row->name); });
}

void apply_patterns(Registry& registry) {
  const auto patterns = split(registry.patterns);
  bool any_before_others = false, any_left_out = false;
  for (RowState* row : registry.rows) {
    bool restricted = false, matched = false, preferred = false;
    for (const auto& pattern : patterns) {
      if (only_prefers(pattern)) {
        preferred = preferred || matches(pattern, row->name);
      } else if (restricts(pattern, row->op, registry.rows)) {
        restricted = true;
        matched = matched || matches(pattern, row->name);
      }
    }
    row->allowed.store(!restricted || matched, std::memory_order_relaxed);
    row->preferred.store(preferred, std::memory_order_relaxed);
    any_before_others = any_before_others || preferred;
    any_left_out = any_left_out || (restricted && !matched);
  }
  any_preferred.store(any_before_others, std::memory_order_relaxed);
  any_forced.store(any_left_out, std::memory_order_relaxed);
}

void read_environment(Registry& registry) {
  if (registry.patterns_known) return;
  registry.patterns_known = true;
  if (const char* patterns = std::getenv("FLASHKERNEL_FORCE")) registry.patterns = patterns;
}

template <class Params>
bool table_has(const KernelTable<Params>& table, const std::string& pattern) {
  return std::any_of(table.begin(), table.end(), [&](const auto& entry) { return matches(pattern, entry.name); });
}

/// Whether a row of any op matches; looks into the backends' tables, since not every op's is registered yet.
template <class... Params>
bool known(const std::string& pattern, const OpList<Params...>&) {
  return (... || (table_has(cpu_kernels<Params>(), pattern) || table_has(cuda_kernels<Params>(), pattern)));
}

template <class... Params>
void touch_tables(const OpList<Params...>&) {
  (OpTable<Params>::instance(), ...);
}

void register_all() { touch_tables(kOps); }

std::string invariant_variable() {
  const char* const value = std::getenv("FLASHKERNEL_INVARIANT");
  return value ? value : "";
}

}  // namespace

std::atomic<int> invariant_scopes{invariant_variable() == "1" ? 1 : 0};

bool is_invariant() noexcept { return invariant_scopes.load(std::memory_order_relaxed) > 0; }
InvariantScope::InvariantScope() noexcept { invariant_scopes.fetch_add(1, std::memory_order_relaxed); }
InvariantScope::~InvariantScope() { invariant_scopes.fetch_sub(1, std::memory_order_relaxed); }

void check_environment() {
  if (const std::string value = invariant_variable(); !value.empty() && value != "0" && value != "1")
    throw InvalidArgument("FLASHKERNEL_INVARIANT: it is \"" + value + "\"; needs 1, or 0 for the ordinary mode");
  const char* const patterns = std::getenv("FLASHKERNEL_FORCE");
  if (!patterns) return;
  for (const auto& pattern : split(patterns))
    if (!known(pattern, kOps))
      throw InvalidArgument("FLASHKERNEL_FORCE: no kernel of this build matches \"" + pattern +
                            "\"; needs ids or prefixes of them, as kernels() lists them once it is unset");
}

ForkSafeMutex& tables_mutex() { return registry().tables; }

void register_row(RowState& row) {
  Registry& all = registry();
  const ForkSafeLock lock(all.mutex);
  all.rows.push_back(&row);
  read_environment(all);
  if (!all.patterns.empty()) apply_patterns(all);
}

const DeviceFacts& processor_facts() {
  static MadeOnce<const DeviceFacts> facts;
  return facts.get([] {
    auto made = std::make_unique<DeviceFacts>();
    made->cpu_features = available_cpu_features();
    return std::unique_ptr<const DeviceFacts>(std::move(made));
  });
}

std::string why_unavailable(const RowState& row, Device device, const DeviceFacts& facts) {
  if (row.device == DeviceType::kCpu) return lacking_features(row.cpu_features, facts.cpu_features);
  return other_capability(row.cc_min, row.cc_max, facts.compute_capability, device);
}

std::string why_not_invariant(const RowState& row, const char* arithmetic) {
  if (!arithmetic) return "the invariant mode has no kernel for calls of this kind";
  return "its arithmetic is " + std::string(row.arithmetic) + "; calls of this kind have " + arithmetic +
         " in the invariant mode";
}

std::string lacking_features(std::uint32_t needed, std::uint32_t present) {
  const auto list = [](std::uint32_t features) {
    std::string text;
    for (const char c : cpu_feature_names(features)) text += c == ' ' ? ", " : std::string(1, c);
    return text;
  };
  return "needs " + list(needed) + "; this processor has " + (present == 0 ? "none of them" : list(present));
}

std::string other_capability(int least, int most, int present, Device device) {
  const auto text = [](int cc) { return std::to_string(cc / 10) + "." + std::to_string(cc % 10); };
  std::string needed = "needs compute capability " + text(least);
  if (most >= kNewestCapability) {
    needed += " or later";
  } else if (most != least) {
    needed += " to " + text(most);
  }
  return needed + "; " + to_string(device) + " has " + (present == 0 ? "none" : text(present));
}

void throw_no_kernel(const Explanation& explanation, Device device) {
  std::string text = explanation.op + ": no kernel for this call on " + to_string(device) +
                     (explanation.invariant ? " in the invariant mode:" : ":");
  for (const auto& candidate : explanation.candidates) text += "\n  " + candidate.kernel + ": " + candidate.reason;
  if (explanation.candidates.empty())
    text += device.is_cuda() ? " this build has no CUDA kernel for the op (configure with -DFLASHKERNEL_CUDA=ON, or "
                               "move the tensors to the CPU)"
                             : " this build has no CPU kernel for the op";
  throw Unsupported(text);
}

Workspace::Workspace(std::size_t bytes, Device device, const ExecutionContext& context)
    : bytes_(bytes), stream_(context.stream) {
  if (bytes == 0) return;
  resource_ = context.workspace ? context.workspace : &default_resource(device);
  data_ = resource_->allocate(bytes, kDefaultAlignment, stream_);
}

Workspace::~Workspace() {
  if (data_) resource_->deallocate(data_, bytes_, kDefaultAlignment, stream_);
}

std::vector<KernelInfo> kernels() {
  register_all();
  Registry& all = registry();
  const int num_cuda = num_cuda_devices();  // before the lock: the first look at a driver takes its time
  const ForkSafeLock lock(all.mutex);
  std::vector<KernelInfo> infos;
  for (const RowState* row : all.rows) {
    KernelInfo info;
    info.id = row->name;
    info.op = row->op;
    info.device = row->device;
    info.cc_min = row->cc_min;
    info.cc_max = row->cc_max;
    info.cpu_features = cpu_feature_names(row->cpu_features);
    info.arithmetic = row->arithmetic;
    info.calls = row->calls.load(std::memory_order_relaxed);
    if (row->device == DeviceType::kCpu) {
      info.available = is_available(*row, facts_of(Device::cpu()));
    } else {
      for (int i = 0; i < num_cuda; ++i)
        info.available = info.available || is_available(*row, facts_of(Device::cuda(i)));
    }
    infos.push_back(info);
  }
  std::stable_sort(infos.begin(), infos.end(), [](const KernelInfo& a, const KernelInfo& b) { return a.op < b.op; });
  return infos;
}

void force_kernels(const std::string& patterns) {
  register_all();
  Registry& all = registry();
  const ForkSafeLock lock(all.mutex);
  for (const auto& pattern : split(patterns)) {
    if (!known(pattern, kOps))
      throw InvalidArgument("force_kernels: no kernel matches \"" + pattern + "\"; kernels() lists the ids");
  }
  read_environment(all);
  all.patterns = patterns;
  apply_patterns(all);
}

std::string forced_kernels() {
  Registry& all = registry();
  const ForkSafeLock lock(all.mutex);
  read_environment(all);
  return all.patterns;
}

}  // namespace flashkernel
