// What the compiler calls at the kernels' memory accesses under -fsanitize=thread, in the place of ThreadSanitizer's
// own library: plain accesses to shared memory go to race.hpp, all others are none of its business.
#include <cstddef>
#include <cstdint>

#include "simt/race.hpp"
#include "simt/simt.hpp"

namespace {

inline void plain_access(const void* address, std::size_t bytes, bool write, const void* from) {
  if (simt::current && !simt::race::paused) simt::race::access(*simt::current, address, bytes, write, from);
}

}  // namespace

#define HOOKS(bytes)                                                                                           \
  void __tsan_read##bytes(void* at) { plain_access(at, bytes, false, __builtin_return_address(0)); }           \
  void __tsan_write##bytes(void* at) { plain_access(at, bytes, true, __builtin_return_address(0)); }           \
  void __tsan_unaligned_read##bytes(void* at) { plain_access(at, bytes, false, __builtin_return_address(0)); } \
  void __tsan_unaligned_write##bytes(void* at) { plain_access(at, bytes, true, __builtin_return_address(0)); } \
  void __tsan_volatile_read##bytes(void* at) { plain_access(at, bytes, false, __builtin_return_address(0)); }  \
  void __tsan_volatile_write##bytes(void* at) { plain_access(at, bytes, true, __builtin_return_address(0)); }

extern "C" {

HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

void __tsan_read_range(void* at, std::size_t bytes) { plain_access(at, bytes, false, __builtin_return_address(0)); }
void __tsan_write_range(void* at, std::size_t bytes) { plain_access(at, bytes, true, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// Atomics of C++, not of CUDA: guards of static variables.
std::uint8_t __tsan_atomic8_load(const volatile std::uint8_t* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
std::uint64_t __tsan_atomic64_load(const volatile std::uint64_t* at, int) {
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
int __tsan_atomic64_compare_exchange_strong(volatile std::uint64_t* at, std::uint64_t* expected, std::uint64_t value,
                                            int, int) {
  return __atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

}  // extern "C"
