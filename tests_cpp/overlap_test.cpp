// Whether views share memory, and whether a view overlaps itself: against the sets of their bytes, one by one.
#include "ops/overlap.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <string>

#include "flashkernel/elementwise.hpp"
#include "flashkernel/error.hpp"
#include "test_tensor.hpp"

namespace flashkernel {
namespace {

using namespace testing;

std::string text(const TensorView& view) {
  std::string result = to_string(view) + " strides";
  for (int d = 0; d < view.ndim; ++d) result += " " + std::to_string(view.strides[d]);
  return result + " at " + std::to_string(reinterpret_cast<std::uintptr_t>(view.data));
}

/// Calls f(offset in elements) for every index; stops when it returns false.
template <class F>
bool for_each_element(const TensorView& view, F&& f) {
  std::int64_t index[kMaxDims] = {};
  for (std::int64_t left = view.numel(); left > 0; --left) {
    std::int64_t offset = 0;
    for (int d = 0; d < view.ndim; ++d) offset += index[d] * view.strides[d];
    if (!f(offset)) return false;
    for (int d = view.ndim - 1; d >= 0 && ++index[d] == view.shape[d]; --d) index[d] = 0;
  }
  return true;
}

std::set<std::intptr_t> bytes_of(const TensorView& view) {
  std::set<std::intptr_t> bytes;
  const auto size = static_cast<std::intptr_t>(dtype_bytes(view.dtype));
  for_each_element(view, [&](std::int64_t offset) {
    for (std::intptr_t i = 0; i < size; ++i)
      bytes.insert(reinterpret_cast<std::intptr_t>(view.data) + offset * size + i);
    return true;
  });
  return bytes;
}

bool really_shared(const TensorView& a, const TensorView& b) {
  const std::set<std::intptr_t> first = bytes_of(a);
  for (const std::intptr_t byte : bytes_of(b))
    if (first.count(byte)) return true;
  return false;
}

bool really_overlaps_itself(const TensorView& view) {
  std::set<std::int64_t> seen;
  return !for_each_element(view, [&](std::int64_t offset) { return seen.insert(offset).second; });
}

/// Views of up to 4 dims about one place of memory, which is never touched: slices of tensors, and wild ones.
class Views {
 public:
  explicit Views(std::uint64_t seed) : engine_(seed) {}

  TensorView next() {
    constexpr DType kDtypes[] = {DType::kFloat32, DType::kFloat16, DType::kInt64, DType::kInt8};
    TensorView view;
    view.dtype = kDtypes[pick(0, 3)];
    const auto bytes = static_cast<std::int64_t>(dtype_bytes(view.dtype));
    view.ndim = static_cast<int>(pick(0, 4));
    const bool wild = pick(0, 2) == 0;
    std::int64_t stride = pick(0, 5) == 0 ? pick(1, 3) : 1;
    for (int d = view.ndim - 1; d >= 0; --d) {
      view.shape[d] = pick(0, 30) == 0 ? 0 : pick(1, 5);
      view.strides[d] = wild ? pick(-9, 9) : stride;
      if (!wild && pick(0, 7) == 0) view.strides[d] = -stride;
      stride = stride * (view.shape[d] + (pick(0, 1) ? pick(0, 3) : 0)) + (pick(0, 7) == 0 ? pick(-2, 2) : 0);
      if (stride == 0) stride = 1;
    }
    for (int d = 0; d + 1 < view.ndim; ++d)
      if (const int other = static_cast<int>(pick(d, view.ndim - 1)); pick(0, 1)) {
        std::swap(view.shape[d], view.shape[other]);
        std::swap(view.strides[d], view.strides[other]);
      }
    view.data = reinterpret_cast<void*>(static_cast<std::uintptr_t>(1 << 20) +
                                        static_cast<std::uintptr_t>(pick(0, 160) / bytes * bytes));
    return view;
  }

 private:
  std::int64_t pick(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(engine_);
  }

  std::mt19937_64 engine_;
};

TEST(Overlap, IsWhatTheBytesSay) {
  Views views(42);
  int shared = 0, itself = 0;
  for (int i = 0; i < 20000; ++i) {
    const TensorView a = views.next(), b = views.next();
    const bool together = really_shared(a, b), twice = really_overlaps_itself(a);
    ASSERT_EQ(shared_memory(a, b), together ? Overlap::kYes : Overlap::kNo) << text(a) << " and " << text(b);
    ASSERT_EQ(shared_memory(b, a), shared_memory(a, b)) << text(a) << " and " << text(b);
    ASSERT_EQ(overlaps_itself(a), twice ? Overlap::kYes : Overlap::kNo) << text(a);
    shared += together, itself += twice;
  }
  // Neither answer is rare, so neither goes untested.
  EXPECT_GT(shared, 4000);
  EXPECT_LT(shared, 16000);
  EXPECT_GT(itself, 2000);
  EXPECT_LT(itself, 16000);
}

TensorView floats(std::uintptr_t element, std::initializer_list<std::int64_t> shape,
                  std::initializer_list<std::int64_t> strides) {
  return TensorView(reinterpret_cast<void*>((std::uintptr_t{1} << 30) + element * 4), DType::kFloat32, shape, strides);
}

TEST(Overlap, SlicesOfOneTensorLieApart) {
  // q, k and v of a packed projection [tokens, 3, heads, head_dim], seen as [heads, tokens, head_dim].
  const auto packed = [](std::uintptr_t which) { return floats(which * 1024, {16, 4096, 64}, {64, 3072, 1}); };
  EXPECT_EQ(shared_memory(packed(0), packed(1)), Overlap::kNo);
  EXPECT_EQ(shared_memory(packed(2), packed(1)), Overlap::kNo);
  EXPECT_EQ(shared_memory(packed(2), packed(2)), Overlap::kYes);
  // Halves of the columns, even and odd rows, every third element.
  EXPECT_EQ(shared_memory(floats(0, {100000, 64}, {128, 1}), floats(64, {100000, 64}, {128, 1})), Overlap::kNo);
  EXPECT_EQ(shared_memory(floats(0, {100000, 64}, {128, 1}), floats(63, {100000, 64}, {128, 1})), Overlap::kYes);
  EXPECT_EQ(shared_memory(floats(0, {500, 128}, {256, 1}), floats(128, {500, 128}, {256, 1})), Overlap::kNo);
  EXPECT_EQ(shared_memory(floats(0, {1 << 20}, {3}), floats(2, {1 << 20}, {3})), Overlap::kNo);
  EXPECT_EQ(shared_memory(floats(0, {1 << 20}, {3}), floats(2, {1 << 20}, {4})), Overlap::kYes);
  // A half-precision view of the bytes of floats: by bytes, not by elements.
  TensorView halves(reinterpret_cast<void*>((std::uintptr_t{1} << 30) + 2), DType::kFloat16, {64}, {2});
  EXPECT_EQ(shared_memory(halves, floats(0, {64}, {1})), Overlap::kYes);
  TensorView other = halves;
  other.data = reinterpret_cast<void*>(std::uintptr_t{1} << 30);
  EXPECT_EQ(shared_memory(halves, other), Overlap::kNo);
  // A dense count of elements over a range with gaps: offsets 0, 1, 2, 5, 6, 7 of a view of 8 elements.
  EXPECT_EQ(shared_memory(floats(0, {2, 2, 2}, {1, 1, 5}), floats(3, {2}, {1})), Overlap::kNo);
}

TEST(Overlap, OfAViewWithItself) {
  EXPECT_EQ(overlaps_itself(floats(0, {4, 4}, {1, 1})), Overlap::kYes);
  EXPECT_EQ(overlaps_itself(floats(0, {4, 4}, {3, 1})), Overlap::kYes);
  EXPECT_EQ(overlaps_itself(floats(0, {4, 4}, {4, -1})), Overlap::kNo);
  EXPECT_EQ(overlaps_itself(floats(0, {8, 1024, 64}, {0, 64, 1})), Overlap::kYes);  // heads that share memory
  EXPECT_EQ(overlaps_itself(floats(0, {1, 1024, 64}, {0, 64, 1})), Overlap::kNo);
  EXPECT_EQ(overlaps_itself(floats(0, {1024, 64, 8}, {64, 1, 65536})), Overlap::kNo);
  EXPECT_EQ(overlaps_itself(floats(0, {2, 3}, {3, 2})), Overlap::kNo);   // 0 2 4 3 5 7: interleaved, none twice
  EXPECT_EQ(overlaps_itself(floats(0, {3, 4}, {3, 2})), Overlap::kYes);  // 6 by both
  EXPECT_EQ(overlaps_itself(floats(0, {0, 3}, {0, 0})), Overlap::kNo);
}

TEST(Overlap, WhatTakesTooLongIsNotGuessed) {
  // Strides without a common divisor, and long dims: any answer needs a search through millions.
  const TensorView a = floats(0, {1 << 20, 1 << 20, 1 << 20}, {1 << 22, (1 << 22) + 3, (1 << 23) + 11});
  EXPECT_EQ(overlaps_itself(a), Overlap::kUnknown);
  // Strides that lead out of any memory.
  const TensorView far = floats(0, {4, 4}, {std::int64_t{1} << 61, 1}), near = floats(1, {4}, {1});
  EXPECT_EQ(shared_memory(far, near), Overlap::kUnknown);
  EXPECT_EQ(overlaps_itself(far), Overlap::kUnknown);
  const TensorView lowest = floats(0, {4, 4}, {std::numeric_limits<std::int64_t>::min(), 1});
  EXPECT_EQ(shared_memory(lowest, near), Overlap::kUnknown);
  EXPECT_EQ(overlaps_itself(lowest), Overlap::kUnknown);
}

TEST(Overlap, OpsSayWhatTheyWereGiven) {
  TestTensor x(DType::kFloat32, {4, 4}), buffer(DType::kFloat32, {64});
  TensorView out = x.view(), shifted = x.view();
  out.data = buffer.view().data;
  out.strides[0] = out.strides[1] = 1;
  expect_refused<InvalidArgument>([&] { add(x, x, out); }, "add",
                                  {"out is float32[4, 4] on cpu with strides [1, 1]", "name an element twice"},
                                  {&buffer});
  out.strides[0] = std::int64_t{1} << 61;
  expect_refused<InvalidArgument>([&] { add(x, x, out); }, "add", {"strides [2305843009213693952, 1]", "simpler"},
                                  {&buffer});
  shifted.data = static_cast<float*>(shifted.data) + 1;
  shifted.shape[1] = 3;
  TensorView part = x.view();
  part.shape[1] = 3;
  expect_refused<InvalidArgument>([&] { add(part, part, shifted); }, "add", {"out shares part of its memory with a"},
                                  {&x});
  TensorView far = x.view();
  far.data = buffer.view().data;
  far.strides[0] = std::int64_t{1} << 61;
  expect_refused<InvalidArgument>([&] { add(x, far, x); }, "add",
                                  {"out and b lie between one another", "[2305843009213693952, 1]", "contiguous"},
                                  {&x});
}

}  // namespace
}  // namespace flashkernel
