// Lets a program under AddressSanitizer fork while its threads allocate. Included by one source of a program.
// The runtime of GCC 12 takes no lock of its allocator at fork(). A child that was forked while another thread refilled
// its cache of a size class waits for ever in __sanitizer::SizeClassAllocator64::GetFromAllocator, below operator new.
// A program of four threads that call new and delete, and a fifth one that forks, hangs within ten forks. So here each
// new and delete of the program and of the library takes one mutex, and fork() takes that mutex last of all.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define FK_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FK_ADDRESS_SANITIZER 1
#endif
#endif

#if defined(FK_ADDRESS_SANITIZER) && !defined(_WIN32)

#include <pthread.h>

#include <cstdlib>
#include <mutex>
#include <new>

namespace flashkernel::testing {

inline std::mutex g_allocator;

// The handler that is registered first runs last before fork(): whoever holds a mutex of the library may allocate
// until then. The library registers its own when its first mutex is made, which is in main().
inline const int g_registered =
    pthread_atfork([] { g_allocator.lock(); }, [] { g_allocator.unlock(); }, [] { g_allocator.unlock(); });

inline void* allocate(std::size_t size, std::size_t alignment) noexcept {
  const std::lock_guard<std::mutex> lock(g_allocator);
  void* pointer = nullptr;
  return posix_memalign(&pointer, alignment < sizeof(void*) ? sizeof(void*) : alignment, size == 0 ? 1 : size) == 0
             ? pointer
             : nullptr;
}

inline void* allocate_or_throw(std::size_t size, std::size_t alignment) {
  void* const pointer = allocate(size, alignment);
  if (pointer == nullptr) throw std::bad_alloc();
  return pointer;
}

inline void deallocate(void* pointer) noexcept {
  const std::lock_guard<std::mutex> lock(g_allocator);
  std::free(pointer);
}

}  // namespace flashkernel::testing

// All forms are here: the runtime would supply a form that is left out.
void* operator new(std::size_t size) {
  return flashkernel::testing::allocate_or_throw(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return flashkernel::testing::allocate(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
void operator delete(void* pointer) noexcept { flashkernel::testing::deallocate(pointer); }
void operator delete(void* pointer, std::size_t) noexcept { flashkernel::testing::deallocate(pointer); }
void operator delete(void* pointer, const std::nothrow_t&) noexcept { flashkernel::testing::deallocate(pointer); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return flashkernel::testing::allocate_or_throw(size, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return flashkernel::testing::allocate(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* pointer, std::align_val_t) noexcept { flashkernel::testing::deallocate(pointer); }
void operator delete(void* pointer, std::size_t, std::align_val_t) noexcept {
  flashkernel::testing::deallocate(pointer);
}
void operator delete(void* pointer, std::align_val_t, const std::nothrow_t&) noexcept {
  flashkernel::testing::deallocate(pointer);
}
void* operator new[](std::size_t size) {
  return flashkernel::testing::allocate_or_throw(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
  return flashkernel::testing::allocate(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
void operator delete[](void* pointer) noexcept { flashkernel::testing::deallocate(pointer); }
void operator delete[](void* pointer, std::size_t) noexcept { flashkernel::testing::deallocate(pointer); }
void operator delete[](void* pointer, const std::nothrow_t&) noexcept { flashkernel::testing::deallocate(pointer); }
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return flashkernel::testing::allocate_or_throw(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return flashkernel::testing::allocate(size, static_cast<std::size_t>(alignment));
}
void operator delete[](void* pointer, std::align_val_t) noexcept { flashkernel::testing::deallocate(pointer); }
void operator delete[](void* pointer, std::size_t, std::align_val_t) noexcept {
  flashkernel::testing::deallocate(pointer);
}
void operator delete[](void* pointer, std::align_val_t, const std::nothrow_t&) noexcept {
  flashkernel::testing::deallocate(pointer);
}

#endif
