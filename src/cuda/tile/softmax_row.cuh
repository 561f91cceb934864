// Softmax and log-softmax of one row and their gradient: held in registers, or walked from memory. Called by the
// softmax kernels; what a row's maximum and sum are made of, by cross-entropy too.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/tile/held_row.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/row.cuh"
#include "cuda/tile/strided.cuh"
#include "cuda/tile/vector.cuh"
#include "ops/reduce_params.hpp"

namespace flashkernel::cuda {

// e^(x - shift) for x <= shift: the difference is rounded once, and its error weighs |x - shift| e^(x - shift), under
// 0.4 of 2^-23 for any x.
__device__ inline float exp_of_difference(float x, float shift) {
  constexpr float kLog2E = 1.4426950408889634f;
  return ptx::exp2_approx((x - shift) * kLog2E);
}

// N neighbouring columns, or one column at its stride, if they are there. kOnce: nobody reads them again.
template <int N, bool kOnce, class T>
__device__ inline Packed<T, N> load_columns(const T* row, std::int64_t first, std::int64_t stride, bool there) {
  if constexpr (N == 1) return {{there ? row[first * stride] : T(0.0f)}};
  if constexpr (N > 1 && kOnce) return load_kept<N>(row + first, there);
  if constexpr (N > 1 && !kOnce) return there ? load_vector<N>(row + first) : Packed<T, N>{};
}
template <class T, int N>
__device__ inline void store_columns(T* row, std::int64_t first, std::int64_t stride, const float (&values)[N]) {
  if constexpr (N > 1) {
    store_floats(row + first, values);
  } else {
    row[first * stride] = from_float<T>(values[0]);
  }
}

/// The largest of a row and the sum of e^(x - largest), of what each warp found about its own largest: one barrier, and
/// `scratch` is used by no other reduction. A row of -inf has the sum 0, one with a NaN a NaN.
struct RowSum {
  float maximum, sum;
};
template <int kThreads>
__device__ inline RowSum join_warps(RowSum warp, float2* scratch) {
  if constexpr (kThreads == kWarp) return warp;
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = make_float2(warp.maximum, warp.sum);
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  const float2 one = lane < kThreads / kWarp ? scratch[lane] : make_float2(-INFINITY, 0.0f);
  const float maximum = warp_reduce(one.x, Largest{});
  const float sum = one.y * exp_of_difference(one.x, maximum == -INFINITY ? 0.0f : maximum);
  return {maximum, warp_reduce(sum, Sum{})};
}

/// By kThreads threads of kVectors vectors each; `scratch` is theirs.
template <class T, int kThreads, int kVectors>
__device__ inline void softmax_held_row(const SoftmaxParams& p, std::int64_t row, float2* scratch) {
  using Held = HeldRow<T, kThreads, kVectors>;
  constexpr int N = Held::N;
  const T* const x = static_cast<const T*>(p.x) + strided_offset(row, p.ndim, p.shape, p.stride_x);
  T* const out = static_cast<T*>(p.out) + strided_offset(row, p.ndim, p.shape, p.stride_out);
  Held held(static_cast<int>(p.columns), kMinusInfinities<T>);
  held.load(x);
  float values[kVectors][N];
  float maximum = -INFINITY;
  held.each([&](int j, const float(&loaded)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      values[j][i] = loaded[i];
      maximum = fmaxf(maximum, loaded[i]);  // a NaN reaches the sum below
    }
  });
  maximum = warp_reduce(maximum, Largest{});
  const float own = maximum == -INFINITY ? 0.0f : maximum;
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float e = exp_of_difference(values[j][i], own);
      sum += e;
      if (!p.log) values[j][i] = e;  // stays where the row stood
    }
  }
  const RowSum all = join_warps<kThreads>({maximum, warp_reduce(sum, Sum{})}, scratch);
  // An empty sum means a row of -inf: 0 / 1, and -inf - 0.
  const float shift = all.maximum == -INFINITY ? 0.0f : all.maximum;
  const float scale = all.sum == 0.0f ? 0.0f : exp_of_difference(maximum, shift) / all.sum;
  const float log_sum = all.sum == 0.0f ? 0.0f : logf(all.sum);
  held.change([&](int j, float(&result)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) result[i] = p.log ? values[j][i] - shift - log_sum : values[j][i] * scale;
  });
  held.store(out);
}

/// The same of 16-bit elements, whose exponentials are worked out a second time: a row takes half the registers from
/// its sum to its result. For long rows, whose blocks are many threads: three of 512 fit a multiprocessor instead of
/// two.
template <class T, int kThreads, int kVectors>
__device__ inline void softmax_held_row_again(const SoftmaxParams& p, std::int64_t row, float2* scratch) {
  using Held = HeldRow<T, kThreads, kVectors>;
  constexpr int N = Held::N;
  const T* const x = static_cast<const T*>(p.x) + strided_offset(row, p.ndim, p.shape, p.stride_x);
  T* const out = static_cast<T*>(p.out) + strided_offset(row, p.ndim, p.shape, p.stride_out);
  Held held(static_cast<int>(p.columns), kMinusInfinities<T>);
  held.load(x);
  const float maximum = warp_reduce(held.largest(), Largest{});  // a NaN reaches the sum below
  const float own = maximum == -INFINITY ? 0.0f : maximum;
  float sums[2] = {};  // side by side: each addition waits for the one before it
  held.each([&](int, const float(&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i % 2] += exp_of_difference(values[i], own);
  });
  const RowSum all = join_warps<kThreads>({maximum, warp_reduce(sums[0] + sums[1], Sum{})}, scratch);
  // An empty sum means a row of -inf: 0 / 1, and -inf - 0.
  const float shift = all.maximum == -INFINITY ? 0.0f : all.maximum;
  const auto write = [&](auto result_of) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float values[N];
      held.floats_again(j, values);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = result_of(values[i]);
      held.store(out, j, values);
    }
  };
  if (p.log) {
    const float log_sum = all.sum == 0.0f ? 0.0f : logf(all.sum);
    write([&](float value) { return value - shift - log_sum; });
  } else {
    const float scale = all.sum == 0.0f ? 0.0f : 1.0f / all.sum;
    write([&](float value) { return exp_of_difference(value, shift) * scale; });
  }
}

/// Rows that are walked (kVectors == 0) or longer: columns [column, column + columns) by kThreads threads.
/// `reduce(value, op)`: over all threads' values of the whole row, for all of them.
template <class T, int kThreads, int kVectors, int N, class Reduce>
__device__ inline void softmax_row(const SoftmaxParams& p, std::int64_t row, std::int64_t column, std::int64_t columns,
                                   Reduce reduce) {
  const T* x =
      static_cast<const T*>(p.x) + strided_offset(row, p.ndim, p.shape, p.stride_x) + column * p.stride_x_column;
  T* out = static_cast<T*>(p.out) + strided_offset(row, p.ndim, p.shape, p.stride_out) + column * p.stride_out_column;
  const auto load = [&](std::int64_t first, bool there) {
    return load_columns<N, (kVectors > 0)>(x, first, p.stride_x_column, there);
  };
  Row<T, kThreads, kVectors, N> values(columns, threadIdx.x, load);

  float maximum = -INFINITY;
  values.each(load, [&](std::int64_t, float(&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) maximum = fmaxf(maximum, v[i]);  // a NaN reaches the sum below
  });
  maximum = reduce(maximum, Largest{});
  const float shift = maximum == -INFINITY ? 0.0f : maximum;
  // The exponentials stay where the row stood, if it is kept as floats.
  constexpr bool kKeeps = Row<T, kThreads, kVectors, N>::kFloats;
  float sum = 0.0f;
  values.each(load, [&](std::int64_t, float(&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float e = exp_of_difference(v[i], shift);
      sum += e;
      if (kKeeps && !p.log) v[i] = e;
    }
  });
  sum = reduce(sum, Sum{});
  // An empty denominator means a row of -inf: 0 / 1, and -inf - 0.
  const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
  const float log_sum = sum == 0.0f ? 0.0f : logf(sum);
  values.each(load, [&](std::int64_t first, float(&v)[N]) {
    float result[N];
#pragma unroll
    for (int i = 0; i < N; ++i)
      result[i] = p.log ? v[i] - shift - log_sum : (kKeeps ? v[i] : exp_of_difference(v[i], shift)) * scale;
    store_columns(out, first, p.stride_out_column, result);
  });
}

/// How many elements stand before the first 16-byte boundary from `from` on.
template <class T>
__device__ inline int elements_to_boundary(const T* from) {
  return static_cast<int>(-static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(from)) % 16 / sizeof(T));
}

/// f(Constant<elements>, first) over a row, each element once by one of kThreads threads: vectors from the row's first
/// 16-byte boundary on, single elements before and behind them.
template <class T, int kThreads, class F>
__device__ inline void each_part_of_row(const T* row, int columns, F f) {
  constexpr int N = kVectorElements<T>;
  const int thread = static_cast<int>(threadIdx.x), before = min(columns, elements_to_boundary(row));
  const int vectors = (columns - before) / N, single = thread < before ? thread : thread + vectors * N;
#pragma unroll 2
  for (int at = thread; at < vectors; at += kThreads) f(Constant<N>{}, before + at * N);
  if (single < columns) f(Constant<1>{}, single);
}

/// Rows of neighbours that are on no 16-byte boundary, of any length. They are read by single elements for their sum,
/// kHeld of them under way in each thread, so that its order does not depend on where the row lies; then by vectors,
/// from the first boundary on, for the results.
template <class T, int kThreads>
__device__ inline void softmax_shifted_row(const SoftmaxParams& p, std::int64_t row, float2* scratch) {
  constexpr int kHeld = 8;
  const T* const x = static_cast<const T*>(p.x) + strided_offset(row, p.ndim, p.shape, p.stride_x);
  T* const out = static_cast<T*>(p.out) + strided_offset(row, p.ndim, p.shape, p.stride_out);
  const auto columns = static_cast<int>(p.columns), thread = static_cast<int>(threadIdx.x);
  float maximum = -INFINITY, sum = 0.0f;
#pragma unroll 1
  for (int first = thread; first < columns; first += kHeld * kThreads) {
    float values[kHeld];
#pragma unroll
    for (int j = 0; j < kHeld; ++j) values[j] = to_float(x[min(first + j * kThreads, columns - 1)]);
    float highest = maximum;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      values[j] = first + j * kThreads < columns ? values[j] : -INFINITY;
      highest = fmaxf(highest, values[j]);
    }
    const float shift = highest == -INFINITY ? 0.0f : highest;
    float sums[2] = {sum * exp_of_difference(maximum, shift), 0.0f};  // side by side
#pragma unroll
    for (int j = 0; j < kHeld; ++j) sums[j % 2] += exp_of_difference(values[j], shift);
    maximum = highest;
    sum = sums[0] + sums[1];
  }
  const float own = warp_reduce(maximum, Largest{});
  sum *= exp_of_difference(maximum, own == -INFINITY ? 0.0f : own);
  const RowSum all = join_warps<kThreads>({own, warp_reduce(sum, Sum{})}, scratch);
  // An empty sum means a row of -inf: 0 / 1, and -inf - 0.
  const float shift = all.maximum == -INFINITY ? 0.0f : all.maximum;
  const float scale = all.sum == 0.0f ? 0.0f : 1.0f / all.sum, log_sum = all.sum == 0.0f ? 0.0f : logf(all.sum);
  each_part_of_row<T, kThreads>(x, columns, [&](auto elements, int first) {
    constexpr int N = elements.value;
    float values[N];
    load_floats(values, x + first);
#pragma unroll
    for (int i = 0; i < N; ++i)
      values[i] = p.log ? values[i] - shift - log_sum : exp_of_difference(values[i], shift) * scale;
    store_floats(out + first, values);
  });
}

/// softmax: grad_x = out * (g - sum(g * out)); log-softmax: grad_x = g - exp(out) * sum(g).
__device__ inline float softmax_gradient(bool log, float g, float y, float sum) {
  return log ? g - expf(y) * sum : y * (g - sum);
}

/// grad_out and out both in the registers of kThreads threads, all their loads under way at once.
template <class T, int kThreads, int kVectors>
__device__ inline void softmax_bwd_held_row(const SoftmaxBackwardParams& p, std::int64_t row, float* scratch) {
  using Held = HeldRow<T, kThreads, kVectors>;
  constexpr int N = Held::N;
  const auto columns = static_cast<int>(p.columns);
  const T* const from_grad =
      static_cast<const T*>(p.grad_out) + strided_offset(row, p.ndim, p.shape, p.stride_grad_out);
  const T* const from_out = static_cast<const T*>(p.out) + strided_offset(row, p.ndim, p.shape, p.stride_out);
  T* const to = static_cast<T*>(p.grad_x) + strided_offset(row, p.ndim, p.shape, p.stride_grad_x);
  Held grad(columns), out(columns);
  grad.load(from_grad);
  out.load(from_out);
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float g[N], y[N];
    grad.floats(j, g);
    out.floats(j, y);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += p.log ? g[i] : g[i] * y[i];
  }
  sum = block_reduce_once<kThreads>(sum, scratch, Sum{});
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float g[N], y[N];
    grad.floats_again(j, g);
    out.floats_again(j, y);
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] = softmax_gradient(p.log, g[i], y[i], sum);
    grad.store(to, j, g);
  }
}

/// As softmax_shifted_row.
template <class T, int kThreads>
__device__ inline void softmax_bwd_shifted_row(const SoftmaxBackwardParams& p, std::int64_t row, float* scratch) {
  constexpr int kHeld = 4;
  const T* const grad_out = static_cast<const T*>(p.grad_out) + strided_offset(row, p.ndim, p.shape, p.stride_grad_out);
  const T* const out = static_cast<const T*>(p.out) + strided_offset(row, p.ndim, p.shape, p.stride_out);
  T* const grad_x = static_cast<T*>(p.grad_x) + strided_offset(row, p.ndim, p.shape, p.stride_grad_x);
  const auto columns = static_cast<int>(p.columns), thread = static_cast<int>(threadIdx.x);
  float sum = 0.0f;
#pragma unroll 1
  for (int first = thread; first < columns; first += kHeld * kThreads) {
    float g[kHeld], y[kHeld];
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int at = min(first + j * kThreads, columns - 1);
      g[j] = to_float(grad_out[at]);
      y[j] = p.log ? 1.0f : to_float(out[at]);
    }
#pragma unroll
    for (int j = 0; j < kHeld; ++j) sum += first + j * kThreads < columns ? g[j] * y[j] : 0.0f;
  }
  sum = block_reduce_once<kThreads>(sum, scratch, Sum{});
  each_part_of_row<T, kThreads>(out, columns, [&](auto elements, int first) {
    constexpr int N = elements.value;
    float g[N], y[N];
    load_floats(g, grad_out + first);
    load_floats(y, out + first);
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] = softmax_gradient(p.log, g[i], y[i], sum);
    store_floats(grad_x + first, g);
  });
}

/// Rows that are walked (kVectors == 0) or longer: columns [column, column + columns) by kThreads threads; out is read
/// twice, grad_out where it is walked. `reduce` as softmax_row's.
template <class T, int kThreads, int kVectors, int N, class Reduce>
__device__ inline void softmax_bwd_row(const SoftmaxBackwardParams& p, std::int64_t row, std::int64_t column,
                                       std::int64_t columns, Reduce reduce) {
  const T* grad_out = static_cast<const T*>(p.grad_out) + strided_offset(row, p.ndim, p.shape, p.stride_grad_out) +
                      column * p.stride_grad_out_column;
  const T* out =
      static_cast<const T*>(p.out) + strided_offset(row, p.ndim, p.shape, p.stride_out) + column * p.stride_out_column;
  T* grad_x = static_cast<T*>(p.grad_x) + strided_offset(row, p.ndim, p.shape, p.stride_grad_x) +
              column * p.stride_grad_x_column;
  const auto load_grad = [&](std::int64_t first, bool there) {
    return load_columns<N, (kVectors > 0)>(grad_out, first, p.stride_grad_out_column, there);
  };
  const auto load_out = [&](std::int64_t first) {
    return load_columns<N, false>(out, first, p.stride_out_column, true);
  };
  float sum = 0.0f;
  Row<T, kThreads, kVectors, N> grads(columns, threadIdx.x, load_grad);
  grads.each(load_grad, [&](std::int64_t first, float(&g)[N]) {
    float y[N];
    unpack(y, load_out(first));
#pragma unroll
    for (int i = 0; i < N; ++i) sum += p.log ? g[i] : g[i] * y[i];
  });
  sum = reduce(sum, Sum{});
  grads.each(load_grad, [&](std::int64_t first, float(&g)[N]) {
    float y[N], results[N];
    unpack(y, load_out(first));
#pragma unroll
    for (int i = 0; i < N; ++i) results[i] = softmax_gradient(p.log, g[i], y[i], sum);
    store_columns(grad_x, first, p.stride_grad_x_column, results);
  });
}

// Neighbouring columns, and every row on a 16-byte boundary; `any_count`: also if there were more rows.
inline bool softmax_rows_are_vectors(DType dtype, std::int64_t columns, int ndim, const std::int64_t* shape,
                                     const void* data, const std::int64_t* strides, std::int64_t stride_column,
                                     bool any_count) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  bool fits = stride_column == 1 && columns * bytes % 16 == 0 && reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
  for (int d = 0; d < ndim; ++d) fits = fits && ((shape[d] == 1 && !any_count) || strides[d] * bytes % 16 == 0);
  return fits;
}

/// Neighbouring columns, and rows of two arrays as far behind a 16-byte boundary as each other: what is a vector of one
/// is a vector of the other.
inline bool softmax_rows_begin_alike(DType dtype, int ndim, const std::int64_t* shape, const void* a,
                                     const std::int64_t* strides_a, std::int64_t column_a, const void* b,
                                     const std::int64_t* strides_b, std::int64_t column_b) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  bool alike = column_a == 1 && column_b == 1 &&
               (reinterpret_cast<std::uintptr_t>(a) - reinterpret_cast<std::uintptr_t>(b)) % 16 == 0;
  for (int d = 0; d < ndim; ++d) alike = alike && (shape[d] == 1 || (strides_a[d] - strides_b[d]) * bytes % 16 == 0);
  return alike;
}
inline bool rows_begin_alike(const SoftmaxParams& p) {
  return softmax_rows_begin_alike(p.dtype, p.ndim, p.shape, p.x, p.stride_x, p.stride_x_column, p.out, p.stride_out,
                                  p.stride_out_column);
}
inline bool rows_begin_alike(const SoftmaxBackwardParams& p) {
  const auto like_out = [&](const void* data, const std::int64_t* strides, std::int64_t column) {
    return softmax_rows_begin_alike(p.dtype, p.ndim, p.shape, data, strides, column, p.out, p.stride_out,
                                    p.stride_out_column);
  };
  return like_out(p.grad_out, p.stride_grad_out, p.stride_grad_out_column) &&
         like_out(p.grad_x, p.stride_grad_x, p.stride_grad_x_column);
}

inline bool rows_are_vectors(const SoftmaxParams& p, bool any_count = false) {
  return softmax_rows_are_vectors(p.dtype, p.columns, p.ndim, p.shape, p.x, p.stride_x, p.stride_x_column, any_count) &&
         softmax_rows_are_vectors(p.dtype, p.columns, p.ndim, p.shape, p.out, p.stride_out, p.stride_out_column,
                                  any_count);
}
inline bool rows_are_vectors(const SoftmaxBackwardParams& p, bool any_count = false) {
  const auto fits = [&](const void* data, const std::int64_t* strides, std::int64_t stride_column) {
    return softmax_rows_are_vectors(p.dtype, p.columns, p.ndim, p.shape, data, strides, stride_column, any_count);
  };
  return fits(p.grad_out, p.stride_grad_out, p.stride_grad_out_column) &&
         fits(p.out, p.stride_out, p.stride_out_column) && fits(p.grad_x, p.stride_grad_x, p.stride_grad_x_column);
}

}  // namespace flashkernel::cuda
