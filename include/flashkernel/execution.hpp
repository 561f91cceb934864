// What travels beside the tensors of every op: the stream, where workspace comes from, and whether to explain instead
// of run.
#pragma once

#include <string>
#include <vector>

#include "flashkernel/memory_resource.hpp"
#include "flashkernel/stream.hpp"

namespace flashkernel {

/// One kernel's verdict on a call: `reason` is empty when it accepts.
struct KernelVerdict {
  std::string kernel;
  bool accepted = false;
  std::string reason;
  /// Microseconds by the model that the choice follows; 0 when it refuses. A model, not a measurement: it is right
  /// about which kernel is faster, and may be far from how long one takes.
  float modelled_us = 0;
};

/// Filled instead of running when `ExecutionContext::explain` points to it: which kernel would run, and what each one
/// said.
struct Explanation {
  std::string op;
  std::string kernel;               ///< the kernel that would run; empty if none
  std::size_t workspace_bytes = 0;  ///< of its plan
  float modelled_us = 0;            ///< the least of what the candidates say, unless a kernel is preferred
  std::string arithmetic;           ///< the order in which the kernel adds, as `kernels` names it
  bool invariant = false;           ///< the call is made in the invariant mode
  std::vector<KernelVerdict> candidates;
};

struct ExecutionContext {
  Stream stream{};
  MemoryResource* workspace = nullptr;  ///< null: the device's default_resource
  Explanation* explain = nullptr;       ///< non-null: validate and select, but run nothing and write nothing
  bool invariant = false;               ///< this call in the invariant mode (invariant.hpp), whatever the process is in
};

}  // namespace flashkernel
