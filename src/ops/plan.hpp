// How one call is to run: what a row's `plan` hands to its launch.
// Invariant: a plan follows from the params' shapes, layouts and the device, never from the data, so that a captured
// graph replays with other data.
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>

namespace flashkernel {

/// Made once a call, for the row that runs.
class Plan {
 public:
  static constexpr std::size_t kDetailBytes = 64;

  float modelled_us = 0;  // the row's `cost_us`; the chooser fills it in
  std::size_t workspace_bytes = 0;

  /// The row's own part: the struct that its `plan` has put here. Only that row's launch may ask for it.
  template <class Detail>
  const Detail& as() const noexcept {
    check<Detail>();
    return *reinterpret_cast<const Detail*>(detail_);
  }
  template <class Detail>
  static Plan of(const Detail& detail, std::size_t workspace_bytes = 0) noexcept {
    check<Detail>();
    Plan plan;
    plan.workspace_bytes = workspace_bytes;
    std::memcpy(plan.detail_, &detail, sizeof(Detail));
    return plan;
  }

 private:
  template <class Detail>
  static constexpr void check() {
    static_assert(std::is_trivially_copyable_v<Detail>, "plans are copied byte by byte");
    static_assert(sizeof(Detail) <= kDetailBytes && alignof(Detail) <= alignof(std::max_align_t));
  }
  alignas(std::max_align_t) unsigned char detail_[kDetailBytes];
};
static_assert(std::is_trivially_copyable_v<Plan>);

}  // namespace flashkernel
