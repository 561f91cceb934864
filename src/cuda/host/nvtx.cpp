// NVTX ranges for core/kernel_range.hpp. NVTX 3 is headers only: it finds the profiler by itself and does nothing when
// there is none. The toolkit has it; one without the header gives a library without ranges.
#include "core/kernel_range.hpp"

#include <cstdlib>

#include "core/fork_safe.hpp"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define FK_NVTX 1
#else
#define FK_NVTX 0
#endif

namespace flashkernel {
namespace {

#if FK_NVTX
void begin(const char* name) { nvtxRangePushA(name); }
void end() { nvtxRangePop(); }
constexpr RangeHooks kNvtx{begin, end};
#else
constexpr RangeHooks kNvtx{};
#endif

bool requested() {
  const char* const value = std::getenv("FLASHKERNEL_NVTX");
  return value && *value && *value != '0';
}

}  // namespace

const RangeHooks& range_hooks() noexcept {
  static MadeOnce<const RangeHooks> hooks;
  return hooks.get([] { return std::make_unique<const RangeHooks>(requested() ? kNvtx : RangeHooks{}); });
}

}  // namespace flashkernel
