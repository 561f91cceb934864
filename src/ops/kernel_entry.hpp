// One row of the registry: what a kernel is called, what it needs, what it accepts, and how it is launched.
// Backends fill tables of these (src/cpu/kernels.cpp, src/cuda/kernels.cpp); `select.hpp` chooses from them.
// Invariant: `supports` looks at the params only, never at the data, and costs nanoseconds.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashkernel/stream.hpp"
#include "flashkernel/types.hpp"

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

template <class Params>
struct KernelEntry {
  const char* name;  // "attention_fwd/cpu/avx512": op / backend / arch [/ dtype [/ instance]]
  DeviceType device;
  int cc_min, cc_max;          // compute capability served, 75 = 7.5; 0, 0 on the CPU
  std::uint32_t cpu_features;  // CpuFeature bits needed
  int priority;                // the highest accepting entry runs; scalar is 0
  Verdict (*supports)(const Params&);
  std::size_t (*workspace_bytes)(const Params&);  // null: none
  void (*launch)(const Params&, void* workspace, Stream);
};

/// A backend's rows for one op.
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
