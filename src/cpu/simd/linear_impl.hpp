// linear forward and backward on top of simd/gemm.hpp and simd/gemv.hpp; included by <isa>/linear.cpp with its
// micro-kernel. Forward: C = x W^T, rows x out. Backward, with gz = grad_out * activation'(preactivation) (rounded once
// to the dtype when there is an activation): grad_x = gz W, grad_weight = gz^T x (or its transpose, after its strides),
// grad_bias = column sums of gz.
#pragma once

#include "cpu/simd/gemv.hpp"
#include "ops/linear_params.hpp"

namespace flashkernel::cpu {
namespace {

template <class Micro, class T, std::int64_t kFewRows = kGemvRows>
inline void linear_typed(const LinearParams& p, void* workspace) {
  const Epilogue<T> epilogue = epilogue_of<T>(p);
  if (p.rows <= kFewRows) return gemv<T>(p, epilogue, workspace);
  const Operand<T> x{static_cast<const T*>(p.x), p.stride_x_row, 1};
  const Operand<T> weight{static_cast<const T*>(p.weight), p.stride_weight_out, p.stride_weight_in};
  gemm<Micro>(p.rows, p.out_features, p.in_features, x, weight, epilogue, workspace);
}

/// gz = grad_out * activation'(preactivation), contiguous rows of out_features.
template <class T>
inline void activation_gradient(const LinearBackwardParams& p, T* gz) {
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) {
      const T* const grad = static_cast<const T*>(p.grad_out) + r * p.stride_grad_out_row;
      const T* const pre = static_cast<const T*>(p.preactivation) + r * p.stride_preactivation_row;
      for (std::int64_t c = 0; c < p.out_features; c += Simd::kWidth) {
        const Reg slope = vec_activation_gradient(p.activation, load_columns(pre, c, p.out_features));
        save_columns(gz + r * p.out_features, c, p.out_features,
                     Simd::mul(load_columns(grad, c, p.out_features), slope));
      }
    }
  };
  parallel_for(p.rows, rows_per_task(p.out_features * 3 * static_cast<std::int64_t>(sizeof(T))), run);
}

/// Column sums: strips of columns, rows in blocks of 32 whose sums are added in turn.
template <class T, class Out>
inline void column_sums(const T* gz, std::int64_t stride, std::int64_t rows, std::int64_t columns, Out* out) {
  constexpr std::int64_t kBlock = 32, kVectors = 4, kStrip = kVectors * Simd::kWidth;
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t strip = begin; strip < end; ++strip) {
      const std::int64_t c0 = strip * kStrip;
      Reg total[kVectors];
      for (auto& t : total) t = Simd::zero();
      for (std::int64_t r0 = 0; r0 < rows; r0 += kBlock) {
        Reg sum[kVectors];
        for (auto& s : sum) s = Simd::zero();
        for (std::int64_t r = r0; r < imin(rows, r0 + kBlock); ++r)
          for (std::int64_t v = 0; v < kVectors; ++v) {
            const std::int64_t c = c0 + v * Simd::kWidth;
            if (c < columns) sum[v] = Simd::add(sum[v], load_columns(gz + r * stride, c, columns));
          }
        for (std::int64_t v = 0; v < kVectors; ++v) total[v] = Simd::add(total[v], sum[v]);
      }
      for (std::int64_t v = 0; v < kVectors; ++v) {
        const std::int64_t c = c0 + v * Simd::kWidth;
        if (c < columns) save_columns(out, c, columns, total[v]);
      }
    }
  };
  const std::int64_t strips = ceil_div(columns, kStrip);
  parallel_for(strips, imax<std::int64_t>(1, ceil_div(strips, 4 * num_workers())), run);
}

template <class Micro, class T>
inline void linear_backward_typed(const LinearBackwardParams& p, void* workspace) {
  const T* gz = static_cast<const T*>(p.grad_out);
  std::int64_t stride_gz = p.stride_grad_out_row;
  if (p.activation != Activation::kNone) {
    T* const own =
        reinterpret_cast<T*>(static_cast<char*>(workspace) + num_workers() * gemm_worker_bytes(Micro::kBlocks));
    activation_gradient<T>(p, own);
    gz = own;
    stride_gz = p.out_features;
  }
  const T* const weight = static_cast<const T*>(p.weight);
  const T* const x = static_cast<const T*>(p.x);
  if (p.grad_x) {
    const Epilogue<T> plain{static_cast<T*>(p.grad_x), nullptr, p.stride_grad_x_row, 0, nullptr, p.dtype,
                            Activation::kNone};
    gemm<Micro>(p.rows, p.in_features, p.out_features, Operand<T>{gz, stride_gz, 1},
                Operand<T>{weight, p.stride_weight_in, p.stride_weight_out}, plain, workspace);
  }
  if (p.grad_weight) {
    const Operand<T> by_out{gz, 1, stride_gz}, by_in{x, 1, p.stride_x_row};
    if (p.stride_grad_weight_in == 1) {
      const Epilogue<T> plain{
          static_cast<T*>(p.grad_weight), nullptr, p.stride_grad_weight_out, 0, nullptr, p.dtype, Activation::kNone};
      gemm<Micro>(p.out_features, p.in_features, p.rows, by_out, by_in, plain, workspace);
    } else {
      const Epilogue<T> plain{
          static_cast<T*>(p.grad_weight), nullptr, p.stride_grad_weight_in, 0, nullptr, p.dtype, Activation::kNone};
      gemm<Micro>(p.in_features, p.out_features, p.rows, by_in, by_out, plain, workspace);
    }
  }
  if (p.grad_bias) {
    if (p.grad_bias_dtype == DType::kFloat32) {
      column_sums(gz, stride_gz, p.rows, p.out_features, static_cast<float*>(p.grad_bias));
    } else {
      column_sums(gz, stride_gz, p.rows, p.out_features, static_cast<T*>(p.grad_bias));
    }
  }
}

}  // namespace
}  // namespace flashkernel::cpu
