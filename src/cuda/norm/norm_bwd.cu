// LayerNorm and RMSNorm backward, by three rows of the table. grad_weight and grad_bias are column sums, first over
// fixed chunks of rows, then over the chunks in order (tile/norm_bwd_combine.cuh), so that the result is the same bit
// for bit every time. Rows that a block can hold: norm_bwd_rows.cuh. Bound by memory: 3 tensors, 4 with a residual.
// Longer ones: norm_bwd_long.cuh. What is not whole vectors: grad_x and the sums by separate kernels.
#include "cuda/norm/norm.hpp"
#include "cuda/norm/norm_bwd_long.cuh"
#include "cuda/norm/norm_bwd_rows.cuh"
#include "cuda/norm/norm_bwd_combine.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;

// x_hat of element i of a row.
template <class T>
__device__ float normalised(const NormBackwardParams& p, const T* h, std::int64_t row, std::int64_t i) {
  const float mean = p.mean ? p.mean[row] : 0.0f;
  return (to_float(h[i]) - mean) * p.rstd[row];
}

// weight + offset of element i, or 1.
__device__ float scale_at(const NormBackwardParams& p, std::int64_t i) {
  return p.weight ? load_typed(p.weight.data, p.weight.dtype, i) + p.weight_offset : 1.0f;
}

template <class T>
__global__ void __launch_bounds__(kThreads) grad_x_kernel(const NormBackwardParams p) {
  __shared__ float scratch[kThreads / kWarp];
  const std::int64_t row = blockIdx.x;
  const T* grad_out = static_cast<const T*>(p.grad_out) + row * p.stride_grad_out_row;
  const T* h = static_cast<const T*>(p.h) + row * p.stride_h_row;
  const T* grad_residual =
      p.grad_residual_out ? static_cast<const T*>(p.grad_residual_out) + row * p.stride_grad_residual_out_row : nullptr;
  T* grad_x = static_cast<T*>(p.grad_x) + row * p.stride_grad_x_row;

  float sum = 0.0f, dot = 0.0f;  // of g * w, and of g * w * x_hat
  for (std::int64_t i = threadIdx.x; i < p.features; i += kThreads) {
    const float g = to_float(grad_out[i]) * scale_at(p, i);
    sum += g;
    dot += g * normalised(p, h, row, i);
  }
  const float inverse_features = 1.0f / static_cast<float>(p.features);
  sum = block_reduce<kThreads>(sum, scratch, Sum{}) * inverse_features;
  dot = block_reduce<kThreads>(dot, scratch, Sum{}) * inverse_features;
  if (p.kind == NormKind::kRmsNorm) sum = 0.0f;
  for (std::int64_t i = threadIdx.x; i < p.features; i += kThreads) {
    const float g = to_float(grad_out[i]) * scale_at(p, i);
    float result = p.rstd[row] * (g - sum - normalised(p, h, row, i) * dot);
    if (grad_residual) result += to_float(grad_residual[i]);
    grad_x[i] = from_float<T>(result);
  }
}

// Column sums: a block takes kColumns columns of one chunk of rows; kRowLanes rows at a time.
constexpr int kColumns = 32, kRowLanes = 8;

template <class T>
__global__ void __launch_bounds__(kColumns* kRowLanes)
    partial_sums_kernel(const NormBackwardParams p, std::int64_t rows_per_chunk, float* partial_weight,
                        float* partial_bias) {
  __shared__ float sums[2][kRowLanes][kColumns];
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  const std::int64_t first = blockIdx.y * rows_per_chunk;
  const std::int64_t last = min(p.rows, first + rows_per_chunk);
  float weight = 0.0f, bias = 0.0f;
  if (column < p.features) {
    for (std::int64_t row = first + threadIdx.y; row < last; row += kRowLanes) {
      const float g = to_float(static_cast<const T*>(p.grad_out)[row * p.stride_grad_out_row + column]);
      weight += g * normalised(p, static_cast<const T*>(p.h) + row * p.stride_h_row, row, column);
      bias += g;
    }
  }
  sums[0][threadIdx.y][threadIdx.x] = weight;
  sums[1][threadIdx.y][threadIdx.x] = bias;
  __syncthreads();
  float* const partial = threadIdx.y == 0 ? partial_weight : partial_bias;
  if (threadIdx.y >= 2 || column >= p.features || !partial) return;
  float total = 0.0f;
#pragma unroll
  for (int lane = 0; lane < kRowLanes; ++lane) total += sums[threadIdx.y][lane][threadIdx.x];
  partial[blockIdx.y * p.features + column] = total;
}

// Chunks depend on the shape only, so that the sums do not depend on the device. Their partial sums are 8 bytes a
// column against 12 a row: 32 rows a chunk keep them under 4 %, unless there are too few rows to keep a GPU busy.
int num_chunks(const NormBackwardParams& p) {
  const std::int64_t most = std::max<std::int64_t>(256, (std::int64_t{1} << 21) / p.features);
  const std::int64_t wanted = std::max(ceil_div(p.rows, 32), std::min<std::int64_t>(p.rows, 256));
  return static_cast<int>(std::max<std::int64_t>(1, std::min(wanted, most)));
}

std::size_t sums_bytes(const NormBackwardParams& p, int chunks) {
  const int sums = (p.grad_weight ? 1 : 0) + (p.grad_bias ? 1 : 0);
  return sizeof(float) * static_cast<std::size_t>(sums * chunks * p.features);
}

/// Where the partial sums of `chunks` chunks lie; null where nobody asks for them.
struct PartialSums {
  int chunks;
  float *weight, *bias;
  PartialSums(const NormBackwardParams& p, int chunks, void* workspace)
      : chunks(chunks),
        weight(p.grad_weight ? static_cast<float*>(workspace) : nullptr),
        bias(p.grad_bias ? static_cast<float*>(workspace) + (p.grad_weight ? chunks * p.features : 0) : nullptr) {}
};

void combine(const NormBackwardParams& p, const PartialSums& sums, cudaStream_t s) {
  if (!p.grad_weight && !p.grad_bias) return;
  norm_bwd_combine::with_lanes(p.features, sums.chunks, [&](auto lanes) {
    launch("norm_bwd: combine", norm_bwd_combine::kernel<decltype(lanes)>,
           {norm_bwd_combine::grid(p, lanes), dim3(norm_bwd_combine::kThreads, lanes.kLanes), 0, s}, p, sums.chunks,
           sums.weight, sums.bias);
  });
}

constexpr const char* kManyRows = "more rows than a grid has blocks";

}  // namespace

Verdict norm_bwd_supports(const NormBackwardParams& p) {
  return p.rows <= 0x7fffffff ? Verdict::ok() : Verdict(kManyRows);
}
std::size_t norm_bwd_workspace(const NormBackwardParams& p) { return sums_bytes(p, num_chunks(p)); }

void norm_bwd(const NormBackwardParams& p, void* workspace, Stream stream) {
  if (p.features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const cudaStream_t s = native(stream);
  const PartialSums sums(p, num_chunks(p), workspace);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.grad_x && p.rows > 0)
      launch("norm_bwd: grad_x", grad_x_kernel<T>, {static_cast<unsigned>(p.rows), kThreads, 0, s}, p);
    if (!p.grad_weight && !p.grad_bias) return;
    const dim3 grid(static_cast<unsigned>(ceil_div(p.features, kColumns)), static_cast<unsigned>(sums.chunks));
    launch("norm_bwd: partial sums", partial_sums_kernel<T>, {grid, dim3(kColumns, kRowLanes), 0, s}, p,
           ceil_div(p.rows, sums.chunks), sums.weight, sums.bias);
  });
  combine(p, sums, s);
}

Verdict norm_bwd_held_supports(const NormBackwardParams& p) {
  if (p.rows > 0x7fffffff) return Verdict(kManyRows);
  return norm_rows::fit(p) ? Verdict::ok()
                           : Verdict("needs rows and weights on 16-byte boundaries, and rows that a block holds");
}

void norm_bwd_held(const NormBackwardParams& p, void* workspace, Stream stream) {
  if (p.features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const cudaStream_t s = native(stream);
  const PartialSums sums(p, num_chunks(p), workspace);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.kind == NormKind::kLayerNorm)
      norm_rows::launch_rows<T, true>(p, sums.chunks, sums.weight, sums.bias, s);
    else
      norm_rows::launch_rows<T, false>(p, sums.chunks, sums.weight, sums.bias, s);
  });
  combine(p, sums, s);
}

Verdict norm_bwd_walked_supports(const NormBackwardParams& p) {
  if (p.rows > 0x7fffffff) return Verdict(kManyRows);
  return norm_rows::are_vectors(p) ? Verdict::ok() : Verdict("needs rows and weights on 16-byte boundaries");
}
std::size_t norm_bwd_walked_workspace(const NormBackwardParams& p) {
  return p.features == 0 ? 0 : norm_long::stats_bytes(p) + sums_bytes(p, norm_long::num_chunks(p));
}

/// The workspace: statistics of rows, then the partial sums.
void norm_bwd_walked(const NormBackwardParams& p, void* workspace, Stream stream) {
  if (p.features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const cudaStream_t s = native(stream);
  const PartialSums sums(p, norm_long::num_chunks(p), static_cast<char*>(workspace) + norm_long::stats_bytes(p));
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    norm_long::launch_long<T>(p, sums.chunks, static_cast<norm_long::Stats*>(workspace), sums.weight, sums.bias, s);
  });
  combine(p, sums, s);
}

}  // namespace flashkernel::cuda
