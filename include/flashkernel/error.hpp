// The typed errors that every function of the library throws. Each message names the op, the value got and the value
// needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "flashkernel/export.hpp"

namespace flashkernel {

class FK_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A value that no backend could accept: shapes that disagree, a wrong dtype, an index out of range, a freed handle.
class FK_API InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// A page table that leads out of the pool: entry `slot` of `sequence` is the page id `page`. With slot -1 the length
/// `page` of the sequence is what is bad.
class FK_API BadBlockTable : public InvalidArgument {
 public:
  BadBlockTable(const std::string& message, std::int64_t sequence, std::int64_t slot, std::int64_t page)
      : InvalidArgument(message), sequence(sequence), slot(slot), page(page) {}
  std::int64_t sequence;
  std::int64_t slot;
  std::int64_t page;
};

/// A valid request that no kernel of this build serves on this device. The message lists each candidate's reason.
class FK_API Unsupported : public Error {
 public:
  using Error::Error;
};

/// A memory resource could not serve an allocation; nothing changed.
class FK_API OutOfMemory : public Error {
 public:
  OutOfMemory(const std::string& message, std::size_t requested_bytes, std::size_t free_bytes, std::size_t peak_bytes)
      : Error(message), requested_bytes(requested_bytes), free_bytes(free_bytes), peak_bytes(peak_bytes) {}
  std::size_t requested_bytes;
  std::size_t free_bytes;  ///< what the resource could still have served; 0 if it can't tell
  std::size_t peak_bytes;  ///< most bytes ever in use at once
};

/// A page pool ran dry; nothing changed.
class FK_API OutOfPages : public OutOfMemory {
 public:
  OutOfPages(const std::string& message, std::size_t requested_pages, std::size_t free_pages, std::size_t num_pages,
             std::size_t page_bytes)
      : OutOfMemory(message, requested_pages * page_bytes, free_pages * page_bytes, num_pages * page_bytes),
        requested_pages(requested_pages),
        free_pages(free_pages),
        num_pages(num_pages) {}
  std::size_t requested_pages;
  std::size_t free_pages;
  std::size_t num_pages;
};

/// A CUDA runtime call failed; `code` is its cudaError_t.
class FK_API CudaError : public Error {
 public:
  CudaError(const std::string& message, int code) : Error(message), code(code) {}
  int code;
};

}  // namespace flashkernel
