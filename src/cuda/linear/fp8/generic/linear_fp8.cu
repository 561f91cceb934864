// activation(x W^T + b) of 8-bit floats: the tiled FFMA product of linear, whose operands become fp32 as they are
// loaded. It is what is right everywhere; the kernels of sm90a are what is fast.
#include "cuda/linear/fp8/generic/linear_fp8.hpp"

#include "cuda/host/launch.hpp"
#include "cuda/linear/generic/gemm.cuh"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/quantized.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kLogBlock = 7;
static_assert(1 << kLogBlock == fp8::kBlock);

template <class T>
__global__ void __launch_bounds__(kGemmThreads) linear_fp8_kernel(const LinearFp8Params p) {
  gemm_tile<true, false>(
      p.rows, p.out_features, p.in_features,
      [&](std::int64_t m, std::int64_t k) {
        return to_float(Float8{p.x[m * p.stride_x_row + k]}) *
               p.x_scale[m * p.stride_x_scale_row + (k >> kLogBlock) * p.stride_x_scale_block];
      },
      [&](std::int64_t k, std::int64_t n) {
        return to_float(Float8{p.weight[n * p.stride_weight_row + k]}) *
               p.weight_scale_of(n)[(k >> kLogBlock) * p.stride_weight_scale_block];
      },
      [&](std::int64_t m, std::int64_t n, float value) {
        if (p.bias) value += load_typed(p.bias.data, p.bias.dtype, n);
        static_cast<T*>(p.out)[m * p.stride_out_row + n] = from_float<T>(activate(p.activation, value));
      });
}

}  // namespace

Verdict linear_fp8_supports(const LinearFp8Params& p) {
  return p.rows <= 65535LL * kTileM ? Verdict::ok() : Verdict("more than 4194240 rows");
}

void linear_fp8(const LinearFp8Params& p, void*, Stream stream) {
  if (p.rows == 0 || p.out_features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) {
    const dim3 grid(static_cast<unsigned>(ceil_div(p.out_features, kTileN)),
                    static_cast<unsigned>(ceil_div(p.rows, kTileM)));
    launch("linear_fp8", linear_fp8_kernel<decltype(zero)>, {grid, kGemmThreads, 0, native(stream)}, p);
  });
}

}  // namespace flashkernel::cuda
