// Seeds and step counts of the random tests. FLASHKERNEL_TEST_SEED replaces the seed, FLASHKERNEL_TEST_STEPS the number
// of steps; sanitizers get a tenth of the steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>

namespace flashkernel::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kStepDivisor = 10;
#else
inline constexpr int kStepDivisor = 1;
#endif

inline int num_steps(int in_release) {
  const char* text = std::getenv("FLASHKERNEL_TEST_STEPS");
  return text != nullptr ? std::atoi(text) : in_release / kStepDivisor;
}

inline std::uint64_t seed_or(std::uint64_t seed) {
  const char* text = std::getenv("FLASHKERNEL_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : seed;
}

inline std::string replay(std::uint64_t seed) { return "replay with FLASHKERNEL_TEST_SEED=" + std::to_string(seed); }

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  /// 0 .. n - 1
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(engine_() % n); }
  bool one_in(std::size_t n) { return below(n) == 0; }
  /// 0 .. 2^max_log2 - 1, small ones as likely as large ones
  std::size_t log_uniform(std::size_t max_log2) { return below((std::size_t{1} << below(max_log2 + 1))); }

 private:
  std::mt19937_64 engine_;
};

}  // namespace flashkernel::testing
