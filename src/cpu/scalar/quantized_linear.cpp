// quantized_linear: one dot product per element, in double.
#include <algorithm>
#include <cstring>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/scalar/activation.hpp"
#include "cpu/scalar/element.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

double half_at(const std::uint8_t* from) {
  Half half;
  std::memcpy(&half, from, sizeof half);  // a block of 18 bytes need not be aligned
  return static_cast<double>(to_float(half));
}

/// Block `block` of an output's row of weights, copied to `to` where 16 of them lie side by side.
const std::uint8_t* block_at(const QuantizedLinearParams& p, std::int64_t out, std::int64_t block, std::uint8_t* to) {
  const std::int64_t size = quantized::block_bytes(p.format), head = quantized::head_bytes(p.format);
  if (!p.tiles) return p.weight + out * p.stride_weight_row + block * size;
  constexpr std::int64_t kRows = quantized::kTileRows;
  const std::uint8_t* const tile = p.weight + out / kRows * p.stride_weight_row + block * kRows * size;
  const std::int64_t row = out % kRows;
  for (std::int64_t i = 0; i < head; i += 2) std::memcpy(to + i, tile + i * kRows + 2 * row, 2);
  for (std::int64_t i = head; i < size; i += 4) std::memcpy(to + i, tile + i * kRows + 4 * row, 4);
  return to;
}

/// Element i of an output's row of weights.
double element(const QuantizedLinearParams& p, std::int64_t out, std::int64_t i) {
  const std::int64_t block = i / quantized::kBlock, at = i % quantized::kBlock;
  std::uint8_t own[34];
  const std::uint8_t* const from = block_at(p, out, block, own);
  const std::uint8_t* const elements = from + quantized::head_bytes(p.format);
  const double q = quantized::is_int8(p.format)
                       ? static_cast<double>(static_cast<std::int8_t>(elements[at]))
                       : static_cast<double>(at < 16 ? elements[at] & 15 : elements[at - 16] >> 4);
  if (p.format == WeightFormat::kQ4_1) return half_at(from) * q + half_at(from + 2);
  double scale, zero = static_cast<double>(quantized::plain_zero(p.format));
  if (quantized::is_gguf(p.format)) {
    scale = half_at(from);
  } else {
    const std::int64_t group = i / p.group;
    scale = load(p.scales, out * p.stride_scales_row + group);
    if (p.zeros) zero = load(p.zeros, out * p.stride_zeros_row + group);
  }
  return scale * (q - zero);
}

}  // namespace

void quantized_linear(const QuantizedLinearParams& p, void*, Stream) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      std::vector<double> weight(static_cast<std::size_t>(p.in_features));
      for (std::int64_t o = begin; o < end; ++o) {
        for (std::int64_t i = 0; i < p.in_features; ++i) weight[static_cast<std::size_t>(i)] = element(p, o, i);
        for (std::int64_t row = 0; row < p.rows; ++row) {
          double sum = 0;
          for (std::int64_t i = 0; i < p.in_features; ++i)
            sum += weight[static_cast<std::size_t>(i)] * load<T>(p.x, row * p.stride_x_row + i);
          if (p.bias) sum += load(p.bias, o);
          store<T>(p.out, row * p.stride_out_row + o, activate(p.activation, sum));
        }
      }
    };
    parallel_for(p.out_features, grain_for(p.in_features * (p.rows + 4)), task);
  });
}

}  // namespace flashkernel::cpu_scalar
