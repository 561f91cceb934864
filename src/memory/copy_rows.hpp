// A strided copy inside one device: the keys of one page in every layer are one such copy. Used by KvCache.
#pragma once

#include <cstddef>
#include <cstring>

#include "flashkernel/device.hpp"
#include "memory/device_resources.hpp"

namespace flashkernel::detail {

/// `num_rows` rows of `row_bytes`, `pitch_bytes` apart in both. On the host it's done on return, else queued on
/// `stream`.
inline void copy_rows(Device device, void* dst, const void* src, std::size_t pitch_bytes, std::size_t row_bytes,
                      std::size_t num_rows, Stream stream) {
  if (device.is_cuda()) return cuda_copy_rows(device.index, dst, src, pitch_bytes, row_bytes, num_rows, stream);
  for (std::size_t row = 0; row < num_rows; ++row) {
    std::memcpy(static_cast<std::byte*>(dst) + row * pitch_bytes,
                static_cast<const std::byte*>(src) + row * pitch_bytes, row_bytes);
  }
}

}  // namespace flashkernel::detail
