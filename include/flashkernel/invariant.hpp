// The invariant mode: the same tokens give the same bits, however they are batched, cut into chunks or cached.
// docs/invariance.md says what is promised; every op chooses its kernel by it.
#pragma once

#include "flashkernel/export.hpp"

namespace flashkernel {

/// Whether the process is in the mode: an InvariantScope lives, or the environment variable FLASHKERNEL_INVARIANT is 1.
FK_API bool is_invariant() noexcept;

/// While one lives, each call of the process runs a kernel whose sums have one order for all calls alike, and is
/// Unsupported where there is none. A process is in the mode, not a thread: autograd runs gradients in threads of its
/// own. Scopes may nest and overlap.
class FK_API InvariantScope {
 public:
  InvariantScope() noexcept;
  ~InvariantScope();
  InvariantScope(const InvariantScope&) = delete;
  InvariantScope& operator=(const InvariantScope&) = delete;
};

}  // namespace flashkernel
