// Loops over one contiguous row and over the rows of a strided tensor, shared by the memory-bound ops.
// Included by <isa>/*.cpp through the op's *_impl.hpp. Invariant: a row's order of additions depends on its length
// only.
#pragma once

#include <math.h>  // the C functions: std:: overloads would be inline functions (see vec_common.hpp)
#include <string.h>

#include "cpu/simd/vec_math.hpp"

namespace flashkernel::cpu {
namespace {

constexpr float kInfinity = -kNegInf;

/// The first `lanes` elements at p; all of them where `lanes` is the constant Simd::kWidth.
template <class T>
inline Reg load_lanes(const T* p, int lanes) {
  return lanes == Simd::kWidth ? Simd::load(p) : Simd::load_first(p, lanes);
}
template <class T>
inline void save_lanes(T* p, Reg x, int lanes) {
  if (lanes == Simd::kWidth) {
    Simd::save(p, x);
  } else {
    Simd::store_first(p, x, lanes);
  }
}

/// f(c, lanes) for every vector of n columns; only the last has fewer lanes.
template <class F>
inline void for_vectors(std::int64_t n, F&& f) {
  std::int64_t c = 0;
  for (; c + Simd::kWidth <= n; c += Simd::kWidth) f(c, Simd::kWidth);
  if (c < n) f(c, static_cast<int>(n - c));
}

/// Sum of the lanes of f(c, lanes): four running vectors, then by halves. Lanes past `lanes` are not counted.
template <class F>
inline float sum_of(std::int64_t n, F&& f) {
  constexpr int kW = Simd::kWidth;
  Reg sum[4] = {Simd::zero(), Simd::zero(), Simd::zero(), Simd::zero()};
  std::int64_t c = 0;
  for (; c + 4 * kW <= n; c += 4 * kW)
    for (int v = 0; v < 4; ++v) sum[v] = Simd::add(sum[v], f(c + v * kW, kW));
  for (; c + kW <= n; c += kW) sum[0] = Simd::add(sum[0], f(c, kW));
  if (c < n) {
    const int lanes = static_cast<int>(n - c);
    sum[1] = Simd::add(sum[1], Simd::select(Simd::lanes(lanes), f(c, lanes), Simd::zero()));
  }
  return Simd::sum(Simd::add(Simd::add(sum[0], sum[1]), Simd::add(sum[2], sum[3])));
}

/// Maximum of a row; NaNs are passed over. -inf for an empty row.
template <class T>
inline float max_of(const T* x, std::int64_t n) {
  constexpr int kW = Simd::kWidth;
  Reg top[4];
  for (auto& t : top) t = Simd::set1(kNegInf);
  std::int64_t c = 0;
  for (; c + 4 * kW <= n; c += 4 * kW)
    for (int v = 0; v < 4; ++v)
      top[v] = Simd::max(Simd::load(x + c + v * kW), top[v]);  // the second operand wins over a NaN
  for (; c + kW <= n; c += kW) top[0] = Simd::max(Simd::load(x + c), top[0]);
  if (c < n) {
    const int lanes = static_cast<int>(n - c);
    top[1] = Simd::max(Simd::select(Simd::lanes(lanes), Simd::load_first(x + c, lanes), Simd::set1(kNegInf)), top[1]);
  }
  return Simd::max_lane(Simd::max(Simd::max(top[0], top[1]), Simd::max(top[2], top[3])));
}

template <class T>
inline bool has_nan(const T* x, std::int64_t n) {
  Simd::Mask found = Simd::none();
  for_vectors(n,
              [&](std::int64_t c, int lanes) { found = Simd::either(found, Simd::is_nan(load_lanes(x + c, lanes))); });
  return Simd::any(found);
}

/// Element offset of the row-major `index` in a shape.
inline std::int64_t offset_at(std::int64_t index, int ndim, const std::int64_t* shape, const std::int64_t* stride) {
  std::int64_t offset = 0;
  for (int d = ndim - 1; d >= 0; --d) {
    offset += index % shape[d] * stride[d];
    index /= shape[d];
  }
  return offset;
}

}  // namespace
}  // namespace flashkernel::cpu
