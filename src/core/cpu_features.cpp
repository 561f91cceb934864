// CPUID and XGETBV, read as the Intel SDM (volume 2, CPUID) lays them out.
#include "core/cpu_features.hpp"

#include <atomic>

#include "flashkernel/device.hpp"

#if defined(__x86_64__) || defined(_M_X64)
#define FK_X86 1
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#include <immintrin.h>
#endif
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flashkernel {
namespace {

#if defined(FK_X86)

struct Registers {
  std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(std::uint32_t leaf, std::uint32_t subleaf) {
  Registers r;
#if defined(_MSC_VER)
  int out[4];
  __cpuidex(out, static_cast<int>(leaf), static_cast<int>(subleaf));
  r = {static_cast<std::uint32_t>(out[0]), static_cast<std::uint32_t>(out[1]), static_cast<std::uint32_t>(out[2]),
       static_cast<std::uint32_t>(out[3])};
#else
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
#endif
  return r;
}

// Which register states the operating system saves (XCR0).
#if !defined(_MSC_VER)
__attribute__((target("xsave")))
#endif
std::uint64_t
saved_states() {
  return _xgetbv(0);
}

bool bit(std::uint32_t value, int index) { return (value >> index) & 1u; }

// Linux hands out the 8 KiB of tile state only to processes that ask (arch_prctl(2), ARCH_REQ_XCOMP_PERM).
bool request_amx() {
#if defined(__linux__)
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
#else
  return false;
#endif
}

std::uint32_t detect() {
  const Registers leaf1 = cpuid(1, 0);
  const bool osxsave = bit(leaf1.ecx, 27);
  if (!osxsave) return kCpuAny;
  const std::uint64_t states = saved_states();
  const Registers leaf7 = cpuid(7, 0), leaf7_1 = cpuid(7, 1);
  std::uint32_t features = kCpuAny;
  constexpr std::uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;
  const bool fma = bit(leaf1.ecx, 12), f16c = bit(leaf1.ecx, 29);
  if ((states & kYmm) == kYmm && bit(leaf7.ebx, 5) && fma && f16c) features |= kCpuAvx2;
  const bool avx512 =
      bit(leaf7.ebx, 16) && bit(leaf7.ebx, 17) && bit(leaf7.ebx, 28) && bit(leaf7.ebx, 30) && bit(leaf7.ebx, 31);
  if ((features & kCpuAvx2) && (states & kZmm) == kZmm && avx512) {
    features |= kCpuAvx512;
    if (bit(leaf7_1.eax, 5)) features |= kCpuAvx512Bf16;
    if (bit(leaf7.edx, 23)) features |= kCpuAvx512Fp16;
    if (bit(leaf7.ecx, 11)) features |= kCpuAvx512Vnni;
    if ((states & kTiles) == kTiles && bit(leaf7.edx, 24) && bit(leaf7.edx, 22) && request_amx()) {
      features |= kCpuAmxBf16;
      if (bit(leaf7_1.eax, 21)) features |= kCpuAmxFp16;
    }
  }
  return features;
}

#else

std::uint32_t detect() { return kCpuAny; }

#endif

}  // namespace

std::uint32_t available_cpu_features() noexcept {
  static std::atomic<std::int64_t> known{-1};  // threads that come first together find the same
  std::int64_t features = known.load(std::memory_order_relaxed);
  if (features < 0) known.store(features = detect(), std::memory_order_relaxed);
  return static_cast<std::uint32_t>(features);
}

std::string cpu_feature_names(std::uint32_t features) {
  static constexpr struct {
    std::uint32_t bit;
    const char* name;
  } kNames[] = {{kCpuAvx2, "avx2"},
                {kCpuAvx512, "avx512"},
                {kCpuAvx512Vnni, "avx512_vnni"},
                {kCpuAvx512Bf16, "avx512_bf16"},
                {kCpuAvx512Fp16, "avx512_fp16"},
                {kCpuAmxBf16, "amx_bf16"},
                {kCpuAmxFp16, "amx_fp16"}};
  std::string text;
  for (const auto& entry : kNames)
    if (features & entry.bit) text += (text.empty() ? "" : " ") + std::string(entry.name);
  return text;
}

std::string cpu_features() { return cpu_feature_names(available_cpu_features()); }

}  // namespace flashkernel
