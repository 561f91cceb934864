// See overlap.hpp. Views share a byte where first + sum(step_i * x_i) is an address of both, 0 <= x_i <= most_i for
// every dim and every byte of an element: one linear equation in bounded whole numbers. Ordinary views never get that
// far: their ranges of addresses are apart. Otherwise a search, largest step first: what the smaller steps can add up
// to, and their greatest common divisor, leave few values to try (one or two for slices of one tensor).
#include "ops/overlap.hpp"

#include <algorithm>

namespace flashkernel {
namespace {

// No memory is this large, and what the dims of two views add up to in bytes stays far below 64 bits.
constexpr std::int64_t kMostElements = std::int64_t{1} << 54;
// Values that a search tries before it gives up; some 10 ns each.
constexpr int kMostWork = 20000;

using Unsigned = std::uint64_t;  // wraps where a view is not sane, which is looked at in time

Unsigned unsigned_magnitude(std::int64_t value) {
  return value < 0 ? Unsigned{0} - static_cast<Unsigned>(value) : static_cast<Unsigned>(value);
}
/// The absolute value. Strides were checked before: none is the least int64, which has none.
std::int64_t magnitude(std::int64_t value) { return value < 0 ? -value : value; }

std::int64_t gcd(std::int64_t a, std::int64_t b) {
  while (b != 0) {
    const std::int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

/// Whether a dim's last index lies within kMostElements of its first.
bool is_sane(std::int64_t steps, std::int64_t stride) {
  if (stride <= -kMostElements || stride >= kMostElements) return false;
  return magnitude(stride) <= kMostElements / steps;
}

/// What collects the bits of all steps and strides says that every dim is sane.
bool all_sane(Unsigned bits) { return bits >> 27 == 0; }

/// Addresses from the first byte of a view's elements to behind the last one.
struct ByteRange {
  std::intptr_t begin = 0, end = 0;
  bool empty = false;  // or absent
  bool sane = true;
};

ByteRange byte_range(const TensorView& view) {
  Unsigned below = 0, above = 0, bits = 0;
  for (int d = 0; d < view.ndim; ++d) {
    const std::int64_t steps = view.shape[d] - 1, stride = view.strides[d];
    if (steps < 0) return {0, 0, true, true};
    const Unsigned far = unsigned_magnitude(stride), reach = static_cast<Unsigned>(steps) * far;
    bits |= static_cast<Unsigned>(steps) | far;
    (stride < 0 ? below : above) += reach;
  }
  if (!all_sane(bits))
    for (int d = 0; d < view.ndim; ++d)
      if (view.shape[d] > 1 && !is_sane(view.shape[d] - 1, view.strides[d])) return {0, 0, false, false};
  const auto bytes = static_cast<Unsigned>(dtype_bytes(view.dtype));
  const auto base = reinterpret_cast<Unsigned>(view.data);
  return {static_cast<std::intptr_t>(base - below * bytes), static_cast<std::intptr_t>(base + (above + 1) * bytes),
          !view.defined(), true};
}

/// Whether sum(step * x) can be a given number, x from 0 to `most` in each term.
class Equation {
 public:
  void add(std::int64_t step, std::int64_t most) {
    if (most == 0) return;
    int at = count_++;
    for (; at > 0 && terms_[at - 1].step > step; --at) terms_[at] = terms_[at - 1];
    terms_[at] = {step, most};
  }

  /// `work` is what is left of the values to try.
  Overlap solve(std::int64_t target, int* work) {
    merge();
    std::int64_t sum = 0, divisor = 0;
    for (int i = 0; i < count_; ++i) {
      sum_[i] = sum += terms_[i].step * terms_[i].most;
      divisor_[i] = divisor = gcd(terms_[i].step, divisor);
    }
    if (count_ == 0) return target == 0 ? Overlap::kYes : Overlap::kNo;
    if (target < 0 || target > sum || target % divisor != 0) return Overlap::kNo;
    return search(count_ - 1, target, work);
  }

 private:
  struct Term {
    std::int64_t step, most;
  };

  // A step that is a multiple of a smaller one, no further than that one reaches, only makes its run of values longer.
  void merge() {
    int kept = 0;
    for (int i = 0; i < count_; ++i) {
      const Term term = terms_[i];
      int j = 0;
      while (j < kept && (term.step % terms_[j].step != 0 || term.step / terms_[j].step > terms_[j].most + 1)) ++j;
      if (j < kept) {
        terms_[j].most += term.step / terms_[j].step * term.most;
      } else {
        terms_[kept++] = term;
      }
    }
    count_ = kept;
  }

  // Terms 0 to i; target is from 0 to their sum and a multiple of their divisor.
  Overlap search(int i, std::int64_t target, int* work) const {
    if (i == 0) return Overlap::kYes;
    const std::int64_t step = terms_[i].step, below = sum_[i - 1], divisor = divisor_[i - 1];
    const std::int64_t first = target > below ? (target - below + step - 1) / step : 0;
    const std::int64_t last = std::min(terms_[i].most, target / step);
    std::int64_t x = first, stride = 1;
    for (; x <= last; x += stride) {
      if (--*work < 0) return Overlap::kUnknown;
      const std::int64_t rest = target - step * x;
      if (rest % divisor != 0) continue;
      // Of the values that follow, only those with the same remainder leave a multiple of the divisor.
      stride = divisor / gcd(step, divisor);
      const Overlap found = search(i - 1, rest, work);
      if (found != Overlap::kNo) return found;
    }
    return Overlap::kNo;
  }

  Term terms_[2 * kMaxDims + 1];
  std::int64_t sum_[2 * kMaxDims + 1], divisor_[2 * kMaxDims + 1];
  int count_ = 0;
};

void add_dims(const TensorView& view, Equation& equation) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(view.dtype));
  for (int d = 0; d < view.ndim; ++d)
    if (view.strides[d] != 0) equation.add(magnitude(view.strides[d]) * bytes, view.shape[d] - 1);
}

struct Dim {
  std::int64_t steps, stride;
};

// As overlaps_itself, for a view with elements.
Overlap search_itself(const TensorView& view) noexcept {
  Dim dims[kMaxDims];
  int count = 0;
  for (int d = 0; d < view.ndim; ++d) {
    const std::int64_t steps = view.shape[d] - 1;
    if (steps == 0) continue;
    if (!is_sane(steps, view.strides[d])) return Overlap::kUnknown;
    int at = count++;
    const std::int64_t stride = magnitude(view.strides[d]);
    for (; at > 0 && dims[at - 1].stride > stride; --at) dims[at] = dims[at - 1];
    dims[at] = {steps, stride};
  }
  bool ordinary = true;
  std::int64_t reached = 0;
  for (int d = 0; d < count; ++d) {
    if (dims[d].stride == 0) return Overlap::kYes;
    ordinary = ordinary && dims[d].stride > reached;
    reached += dims[d].steps * dims[d].stride;
  }
  if (ordinary) return Overlap::kNo;
  // Two indices of one element differ by y, sum(stride * y) = 0, |y| <= steps. Of y and -y one has its first number
  // that is not 0 above 0: at dim d, y[d] = 1 + x, and y[e] = x - steps[e] for those after it.
  int work = kMostWork;
  for (int d = 0; d < count; ++d) {
    Equation equation;
    equation.add(dims[d].stride, dims[d].steps - 1);
    std::int64_t target = -dims[d].stride;
    for (int e = d + 1; e < count; ++e) {
      equation.add(dims[e].stride, 2 * dims[e].steps);
      target += dims[e].stride * dims[e].steps;
    }
    const Overlap found = equation.solve(target, &work);
    if (found != Overlap::kNo) return found;
  }
  return Overlap::kNo;
}

}  // namespace

Overlap shared_memory(const TensorView& a, const TensorView& b) noexcept {
  if (!a.defined() || !b.defined()) return Overlap::kNo;
  const ByteRange first = byte_range(a), second = byte_range(b);
  if (first.empty || second.empty) return Overlap::kNo;
  if (a.data == b.data) return Overlap::kYes;  // the first elements
  if (!first.sane || !second.sane) return Overlap::kUnknown;
  if (first.end <= second.begin || second.end <= first.begin) return Overlap::kNo;
  // begin of a + what a's dims and bytes add = end of b - 1 - what b's dims and bytes take away.
  Equation equation;
  add_dims(a, equation);
  add_dims(b, equation);
  equation.add(1, static_cast<std::int64_t>(dtype_bytes(a.dtype) + dtype_bytes(b.dtype)) - 2);
  int work = kMostWork;
  return equation.solve(second.end - 1 - first.begin, &work);
}

Overlap overlaps_itself(const TensorView& view) noexcept {
  // Ordinary views, row-major or with gaps: each stride leads past everything that the dims after it reach.
  Unsigned reached = 0, bits = 0;
  bool ordinary = true;
  for (int d = view.ndim - 1; d >= 0; --d) {
    const std::int64_t steps = view.shape[d] - 1;
    if (steps < 0) return Overlap::kNo;
    if (steps == 0) continue;
    const Unsigned far = unsigned_magnitude(view.strides[d]);
    ordinary = ordinary && far > reached;
    reached += static_cast<Unsigned>(steps) * far;
    bits |= static_cast<Unsigned>(steps) | far;
  }
  if (ordinary && all_sane(bits)) return Overlap::kNo;
  return search_itself(view);
}

bool is_same_tensor(const TensorView& a, const TensorView& b) noexcept {
  if (a.data != b.data || a.dtype != b.dtype || a.ndim != b.ndim) return false;
  for (int d = 0; d < a.ndim; ++d)
    if (a.shape[d] != b.shape[d] || (a.shape[d] > 1 && a.strides[d] != b.strides[d])) return false;
  return true;
}

}  // namespace flashkernel
