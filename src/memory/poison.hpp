// Under AddressSanitizer, cached memory is out of bounds until it is allocated again: a use after free is found
// although the system's allocator never saw the free. Nothing otherwise. Used by BlockCache on host memory.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define FK_HAS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FK_HAS_ASAN 1
#endif
#endif

#if defined(FK_HAS_ASAN)
#include <sanitizer/asan_interface.h>
#endif

namespace flashkernel::detail {

#if defined(FK_HAS_ASAN)
inline void poison_memory(const void* data, std::size_t bytes) noexcept { ASAN_POISON_MEMORY_REGION(data, bytes); }
inline void unpoison_memory(const void* data, std::size_t bytes) noexcept { ASAN_UNPOISON_MEMORY_REGION(data, bytes); }
#else
inline void poison_memory(const void*, std::size_t) noexcept {}
inline void unpoison_memory(const void*, std::size_t) noexcept {}
#endif

}  // namespace flashkernel::detail
