// An upstream for tests: passes on to another resource, fails when told to, and checks that what comes back is what was
// given.
#pragma once

#include <cstddef>
#include <limits>
#include <map>
#include <mutex>

#include "flashkernel/error.hpp"
#include "flashkernel/memory_resource.hpp"

namespace flashkernel::testing {

class FailingResource final : public MemoryResource {
 public:
  static constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

  explicit FailingResource(MemoryResource& upstream) : upstream_(upstream) {}
  ~FailingResource() override { release_all(); }

  /// Fails allocations `first` .. `first + count - 1` from now on, counted from 0.
  void fail_at(std::size_t first, std::size_t count = kNever) {
    const std::lock_guard<std::mutex> lock(mutex_);
    num_calls_ = 0;
    first_failure_ = first;
    num_failures_ = count;
  }
  void never_fail() { fail_at(kNever); }

  void* allocate(std::size_t bytes, std::size_t alignment, Stream stream) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::size_t call = num_calls_++;
    if (call >= first_failure_ && call - first_failure_ < num_failures_) {
      throw OutOfMemory("FailingResource: told to fail", bytes, 0, 0);
    }
    void* pointer = upstream_.allocate(bytes, alignment, stream);
    try {
      given_[pointer] = {bytes, alignment};
    } catch (...) {
      upstream_.deallocate(pointer, bytes, alignment, stream);
      throw;
    }
    return pointer;
  }

  void deallocate(void* pointer, std::size_t bytes, std::size_t alignment, Stream stream) noexcept override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = given_.find(pointer);
    if (found == given_.end() || found->second.bytes != bytes || found->second.alignment != alignment) {
      ++num_mismatches_;
      return;
    }
    given_.erase(found);
    upstream_.deallocate(pointer, bytes, alignment, stream);
  }

  Device device() const noexcept override { return upstream_.device(); }
  MemoryStats stats() const override { return upstream_.stats(); }
  using MemoryResource::allocate;
  using MemoryResource::deallocate;

  std::size_t num_calls() const { return num_calls_; }
  std::size_t num_mismatches() const { return num_mismatches_; }
  std::size_t num_given() const { return given_.size(); }
  /// Gives everything back that its user leaked.
  void release_all() {
    for (const auto& [pointer, request] : given_) {
      upstream_.deallocate(pointer, request.bytes, request.alignment, Stream{});
    }
    given_.clear();
  }

 private:
  struct Request {
    std::size_t bytes = 0;
    std::size_t alignment = 0;
  };
  MemoryResource& upstream_;
  std::mutex mutex_;
  std::map<void*, Request> given_;
  std::size_t num_calls_ = 0;
  std::size_t first_failure_ = kNever;
  std::size_t num_failures_ = 0;
  std::size_t num_mismatches_ = 0;
};

}  // namespace flashkernel::testing
