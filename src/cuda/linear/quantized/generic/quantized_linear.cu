// activation(x W^T + b) of a weight in few bits: the tiled FFMA product of linear, whose operand becomes fp32 as it is
// loaded, a byte at a time. It is what is right everywhere; the kernel of few_rows is what is fast.
#include "cuda/linear/quantized/generic/quantized_linear.hpp"

#include "cuda/host/launch.hpp"
#include "cuda/linear/generic/gemm.cuh"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/convert.cuh"

namespace flashkernel::cuda {
namespace {

/// Blocks of 18 and 34 bytes start at any even address, rows at any.
__device__ inline float half_at(const std::uint8_t* from) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(from[0] | from[1] << 8)));
}

/// Element k of an output's row of weights.
__device__ inline float element(const QuantizedLinearParams& p, std::int64_t out, std::int64_t k) {
  const std::int64_t block = k / quantized::kBlock;
  const int at = static_cast<int>(k - block * quantized::kBlock);
  const std::uint8_t* const from = p.weight + out * p.stride_weight_row + block * quantized::block_bytes(p.format);
  const std::uint8_t* const elements = from + quantized::head_bytes(p.format);
  const float q = quantized::is_int8(p.format)
                      ? static_cast<float>(static_cast<std::int8_t>(elements[at]))
                      : static_cast<float>(at < 16 ? elements[at] & 15 : elements[at - 16] >> 4);
  if (p.format == WeightFormat::kQ4_1) return fmaf(half_at(from), q, half_at(from + 2));
  if (quantized::is_gguf(p.format)) return half_at(from) * (q - quantized::plain_zero(p.format));
  const std::int64_t group = k / p.group;
  const float zero = p.zeros ? load_typed(p.zeros.data, p.zeros.dtype, out * p.stride_zeros_row + group)
                             : quantized::plain_zero(p.format);
  return load_typed(p.scales.data, p.scales.dtype, out * p.stride_scales_row + group) * (q - zero);
}

template <class T>
__global__ void __launch_bounds__(kGemmThreads) quantized_linear_kernel(const QuantizedLinearParams p) {
  const T* const x = static_cast<const T*>(p.x);
  gemm_tile<true, false>(
      p.rows, p.out_features, p.in_features,
      [&](std::int64_t m, std::int64_t k) { return to_float(x[m * p.stride_x_row + k]); },
      [&](std::int64_t k, std::int64_t n) { return element(p, n, k); },
      [&](std::int64_t m, std::int64_t n, float value) {
        if (p.bias) value += load_typed(p.bias.data, p.bias.dtype, n);
        static_cast<T*>(p.out)[m * p.stride_out_row + n] = from_float<T>(activate(p.activation, value));
      });
}

}  // namespace

Verdict quantized_linear_supports(const QuantizedLinearParams& p) {
  if (p.tiles) return "it takes no tiles of 16 rows";
  return p.rows <= 65535LL * kTileM ? Verdict::ok() : Verdict("more than 4194240 rows");
}

void quantized_linear(const QuantizedLinearParams& p, void*, Stream stream) {
  if (p.rows == 0 || p.out_features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) {
    const dim3 grid(static_cast<unsigned>(ceil_div(p.out_features, kTileN)),
                    static_cast<unsigned>(ceil_div(p.rows, kTileM)));
    launch("quantized_linear", quantized_linear_kernel<decltype(zero)>, {grid, kGemmThreads, 0, native(stream)}, p);
  });
}

}  // namespace flashkernel::cuda
