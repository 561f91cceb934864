// Global memory of the emulated device: each allocation alone among unreadable pages, ending where one begins, so that
// an access past its end or after its release is seen without a sanitizer; AddressSanitizer watches it to the byte.
#pragma once

#include <cstddef>
#include <string>

namespace simt {

/// At a multiple of 256 as cudaMalloc's; null when there is no memory. Poisoned.
void* device_allocate(std::size_t bytes);
void device_free(void* pointer);

/// Empty, or what lies at an address in the device's address range.
std::string describe_device_address(const void* address);

}  // namespace simt
