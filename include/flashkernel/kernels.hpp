// The registry seen from outside: list the ops and their kernels, force one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flashkernel/device.hpp"
#include "flashkernel/export.hpp"

namespace flashkernel {

struct OpInfo {
  std::string name;  ///< a public function: "attention_varlen"
  std::string op;    ///< the op whose kernels serve it, as their ids name it: "attention_fwd"
};

/// Every op of this build.
FK_API std::vector<OpInfo> ops();

struct KernelInfo {
  std::string id;  ///< "attention_fwd/cpu/avx512": op, then backend, arch and instance
  std::string op;
  DeviceType device = DeviceType::kCpu;
  int cc_min = 0, cc_max = 0;  ///< compute capabilities served (75 = 7.5); 0 on the CPU
  std::string cpu_features;    ///< features needed; empty if none
  /// The order in which it adds: kernels of one op with the same name here give the same bits for the same call.
  std::string arithmetic;
  bool available = false;   ///< this machine can run it
  std::uint64_t calls = 0;  ///< launches since the process started
};

/// Every kernel of this build, by op. Of an op's kernels that would take equally long, the first one listed runs.
FK_API std::vector<KernelInfo> kernels();

/// Restrict the choice to kernels whose id matches: "attention_fwd/cpu/scalar", a prefix of it ("attention_fwd/cpu"),
/// or with "*" for the op ("*/cpu/scalar"); several, comma-separated. Ops that no pattern names choose freely. Empty:
/// no restriction. A pattern with "?" at its end ("*/cuda/sm75?") restricts nothing: its kernels go before all others
/// where they accept the call. Starts as the environment variable FLASHKERNEL_FORCE. Process-wide. A pattern that
/// matches no kernel of this build is InvalidArgument; in the environment variable it makes every op and `kernels()`
/// throw that.
FK_API void force_kernels(const std::string& patterns);
FK_API std::string forced_kernels();

}  // namespace flashkernel
