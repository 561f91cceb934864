// Copies of the index arrays of one call, made before they are checked: another thread may write the caller's arrays
// while an op runs, and a kernel must not follow an index that nobody has checked. On a GPU the arrays stay where they
// are; its kernels bound what they read.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "flashkernel/device.hpp"
#include "ops/params_common.hpp"

namespace flashkernel {

/// Lives in the front door until the kernel is done. Small arrays, which are most, cost no allocation.
class IndexCopies {
 public:
  explicit IndexCopies(Device device) : on_host_(device.is_cpu()) {}
  IndexCopies(const IndexCopies&) = delete;
  IndexCopies& operator=(const IndexCopies&) = delete;

  /// The first `count` values, copied on the host; the array itself on a GPU, or if there is none.
  IndexArray of(IndexArray array, std::int64_t count) {
    if (!on_host_ || !array || count == 0) return array;
    const std::size_t bytes = static_cast<std::size_t>(count) * (array.is_int64 ? 8 : 4);
    void* const to = room(bytes);
    std::memcpy(to, array.data, bytes);
    return {to, array.is_int64};
  }

  /// `count` numbers that the front door works out on the host: value(i).
  template <class Value>
  IndexArray made(std::int64_t count, Value&& value) {
    auto* const to = static_cast<std::int64_t*>(room(static_cast<std::size_t>(count) * sizeof(std::int64_t)));
    for (std::int64_t i = 0; i < count; ++i) to[i] = value(i);
    return {to, true};
  }

  /// Rows of a table that lie *stride apart, copied on the host without gaps: *stride becomes `columns`. Of each row
  /// the first count(row) entries, and 0 after them.
  template <class Count>
  IndexArray rows_of(IndexArray table, std::int64_t rows, std::int64_t columns, std::int64_t* stride, Count&& count) {
    if (!on_host_ || !table || rows * columns == 0) return table;
    const std::int64_t bytes = table.is_int64 ? 8 : 4, row_bytes = columns * bytes;
    auto* const to = static_cast<unsigned char*>(room(static_cast<std::size_t>(rows * row_bytes)));
    const auto* const from = static_cast<const unsigned char*>(table.data);
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t used = count(row) * bytes;
      std::memcpy(to + row * row_bytes, from + row * *stride * bytes, static_cast<std::size_t>(used));
      std::memset(to + row * row_bytes + used, 0, static_cast<std::size_t>(row_bytes - used));
    }
    *stride = columns;
    return {to, table.is_int64};
  }

 private:
  void* room(std::size_t bytes) {
    const std::size_t rounded = (bytes + 7) / 8 * 8;
    if (rounded <= sizeof small_ - used_) {
      void* const at = small_ + used_;
      used_ += rounded;
      return at;
    }
    large_.emplace_back(new unsigned char[bytes]);
    return large_.back().get();
  }

  bool on_host_;
  std::size_t used_ = 0;
  std::vector<std::unique_ptr<unsigned char[]>> large_;
  alignas(8) unsigned char small_[2048];
};

}  // namespace flashkernel
