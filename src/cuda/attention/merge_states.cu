// merge_states: attention over two disjoint sets of keys from the results over each, weighted by exp(lse - max). One
// warp a row.
#include "cuda/attention/generic.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kWarpsPerBlock = 8;

template <class T>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) merge_kernel(const MergeStatesParams p) {
  const std::int64_t rows = p.shape[0] * p.shape[1] * p.shape[2];
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.y; row < rows;
       row += static_cast<std::int64_t>(gridDim.x) * kWarpsPerBlock) {
    const std::int64_t x2 = row % p.shape[2], x1 = row / p.shape[2] % p.shape[1], x0 = row / p.shape[2] / p.shape[1];
    const auto offset = [&](const std::int64_t(&s)[3]) { return x0 * s[0] + x1 * s[1] + x2 * s[2]; };
    const float lse_a = p.lse_a[offset(p.stride_lse_a)], lse_b = p.lse_b[offset(p.stride_lse_b)];
    const T* a = static_cast<const T*>(p.out_a) + offset(p.stride_out_a);
    const T* b = static_cast<const T*>(p.out_b) + offset(p.stride_out_b);
    T* out = static_cast<T*>(p.out) + offset(p.stride_out);
    const bool has_a = lse_a != -INFINITY, has_b = lse_b != -INFINITY;
    const float maximum = has_a && has_b ? Max{}(lse_a, lse_b) : (has_a ? lse_a : lse_b);
    const float weight_a = has_a ? expf(lse_a - maximum) : 0.0f, weight_b = has_b ? expf(lse_b - maximum) : 0.0f;
    const float sum = weight_a + weight_b;
    for (std::int64_t d = threadIdx.x; d < p.head_dim; d += kWarp) {
      float value = 0.0f;  // an empty part counts nothing, whatever its output holds
      if (has_a) value += to_float(a[d]) * (weight_a / sum);
      if (has_b) value += to_float(b[d]) * (weight_b / sum);
      out[d] = from_float<T>(value);
    }
    __syncwarp();  // out may be out_a, lse may be lse_a: both were read by every lane above
    if (threadIdx.x == 0 && p.lse) p.lse[offset(p.stride_lse)] = has_a || has_b ? maximum + logf(sum) : -INFINITY;
  }
}

}  // namespace

Verdict merge_states_supports(const MergeStatesParams&) { return Verdict::ok(); }

void merge_states(const MergeStatesParams& p, void*, Stream stream) {
  const std::int64_t rows = p.shape[0] * p.shape[1] * p.shape[2];
  if (rows == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) {
    launch(
        "merge_states", merge_kernel<decltype(zero)>,
        {grid_size(ceil_div(rows, kWarpsPerBlock), p.device.index, 32), dim3(kWarp, kWarpsPerBlock), 0, native(stream)},
        p);
  });
}

}  // namespace flashkernel::cuda
