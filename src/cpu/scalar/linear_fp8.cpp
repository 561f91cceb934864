// linear_fp8: one dot product per element, in double. quantize_fp8_blocks: 128 neighbours at a time.
#include <cmath>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/scalar/activation.hpp"
#include "cpu/scalar/element.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

/// A row of elements, each times its scale; `scales` is of its first block.
void dequantize(const std::uint8_t* from, std::int64_t count, const float* scales, std::int64_t stride, double* to) {
  for (std::int64_t i = 0; i < count; ++i)
    to[i] = static_cast<double>(to_float(Float8E4M3{from[i]})) * static_cast<double>(scales[i / fp8::kBlock * stride]);
}

}  // namespace

void linear_fp8(const LinearFp8Params& p, void*, Stream) {
  auto task = [&](std::int64_t begin, std::int64_t end, int) {
    constexpr std::int64_t kRows = 16;  // of x, dequantised once for all outputs of the task
    const std::int64_t in = p.in_features;
    std::vector<double> weight(static_cast<std::size_t>(in)), x(static_cast<std::size_t>(in * kRows));
    for (std::int64_t first = 0; first < p.rows; first += kRows) {
      const std::int64_t rows = p.rows - first < kRows ? p.rows - first : kRows;
      for (std::int64_t row = 0; row < rows; ++row)
        dequantize(p.x + (first + row) * p.stride_x_row, in, p.x_scale + (first + row) * p.stride_x_scale_row,
                   p.stride_x_scale_block, x.data() + row * in);
      for (std::int64_t o = begin; o < end; ++o) {
        dequantize(p.weight + o * p.stride_weight_row, in, p.weight_scale_of(o), p.stride_weight_scale_block,
                   weight.data());
        for (std::int64_t row = 0; row < rows; ++row) {
          double sum = 0;
          for (std::int64_t i = 0; i < in; ++i)
            sum += weight[static_cast<std::size_t>(i)] * x[static_cast<std::size_t>(row * in + i)];
          if (p.bias) sum += load(p.bias, o);
          store_as(p.dtype, p.out, (first + row) * p.stride_out_row + o, activate(p.activation, sum));
        }
      }
    }
  };
  parallel_for(p.out_features, grain_for(p.in_features * (p.rows + 4)), task);
}

void quantize_fp8_blocks(const QuantizeFp8Params& p, void*, Stream) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t blocks = fp8::blocks_of(p.features);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t row = i / blocks, block = i % blocks, first = block * fp8::kBlock;
        const std::int64_t count = p.features - first < fp8::kBlock ? p.features - first : fp8::kBlock;
        const T* const x = static_cast<const T*>(p.x) + row * p.stride_x_row + first;
        float largest = 0;
        for (std::int64_t k = 0; k < count; ++k) {
          const float size = std::fabs(to_float(x[k]));
          if (size > largest) largest = size;  // a NaN stays out
        }
        const float scale = row_scale(largest, largest_element(DType::kFloat8E4M3)), inverse = 1.0f / scale;
        p.scales[row * p.stride_scales_row + block * p.stride_scales_block] = scale;
        for (std::int64_t k = 0; k < count; ++k)
          p.out[row * p.stride_out_row + first + k] = from_float<Float8E4M3>(to_float(x[k]) * inverse).bits;
      }
    };
    parallel_for(p.rows * blocks, grain_for(fp8::kBlock), task);
  });
}

}  // namespace flashkernel::cpu_scalar
