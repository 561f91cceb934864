// LayerNorm and RMSNorm backward. grad_weight and grad_bias are column sums, first over fixed chunks of rows, then over
// the chunks in order, so that the result is the same bit for bit every time.
// Rows that fit registers: one kernel reads grad_out and h once; a team of threads walks a chunk of rows, writes grad_x
// and keeps its column sums in registers. Bound by memory: 3 tensors, 4 with a residual. Other rows: grad_x and the
// sums by separate kernels. Both end with combine_kernel.
#include "cuda/generic/kernels.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/row.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;

// x_hat of element i of a row.
template <class T>
__device__ float normalised(const NormBackwardParams& p, const T* h, std::int64_t row, std::int64_t i) {
  const float mean = p.mean ? p.mean[row] : 0.0f;
  return (to_float(h[i]) - mean) * p.rstd[row];
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
    const float g = to_float(grad_out[i]) * (p.weight ? load_typed(p.weight.data, p.weight.dtype, i) : 1.0f);
    sum += g;
    dot += g * normalised(p, h, row, i);
  }
  const float inverse_features = 1.0f / static_cast<float>(p.features);
  sum = block_reduce<kThreads>(sum, scratch, Sum{}) * inverse_features;
  dot = block_reduce<kThreads>(dot, scratch, Sum{}) * inverse_features;
  if (p.kind == NormKind::kRmsNorm) sum = 0.0f;
  for (std::int64_t i = threadIdx.x; i < p.features; i += kThreads) {
    const float g = to_float(grad_out[i]) * (p.weight ? load_typed(p.weight.data, p.weight.dtype, i) : 1.0f);
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
  if (threadIdx.y >= 2 || column >= p.features) return;
  float total = 0.0f;
#pragma unroll
  for (int lane = 0; lane < kRowLanes; ++lane) total += sums[threadIdx.y][lane][threadIdx.x];
  float* partial = threadIdx.y == 0 ? partial_weight : partial_bias;
  partial[blockIdx.y * p.features + column] = total;
}

/// A block takes kColumns columns; lane y of kCombineLanes adds a run of chunks, then the lanes are added in order.
constexpr int kCombineLanes = 32;

__global__ void __launch_bounds__(kColumns* kCombineLanes)
    combine_kernel(const NormBackwardParams p, int chunks, const float* partial_weight, const float* partial_bias) {
  __shared__ float sums[2][kCombineLanes][kColumns + 1];
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  const int run = (chunks + kCombineLanes - 1) / kCombineLanes;
  const int first = threadIdx.y * run, last = min(chunks, first + run);
  float weight = 0.0f, bias = 0.0f;
  if (column < p.features) {
#pragma unroll 4
    for (int chunk = first; chunk < last; ++chunk) {
      weight += partial_weight[chunk * p.features + column];
      bias += partial_bias[chunk * p.features + column];
    }
  }
  sums[0][threadIdx.y][threadIdx.x] = weight;
  sums[1][threadIdx.y][threadIdx.x] = bias;
  __syncthreads();
  if (threadIdx.y >= 2 || column >= p.features) return;
  float total = 0.0f;
#pragma unroll
  for (int lane = 0; lane < kCombineLanes; ++lane) total += sums[threadIdx.y][lane][threadIdx.x];
  if (threadIdx.y == 0 && p.grad_weight) store_typed(p.grad_weight, p.grad_weight_dtype, column, total);
  if (threadIdx.y == 1 && p.grad_bias) store_typed(p.grad_bias, p.grad_bias_dtype, column, total);
}

// Chunks depend on the shape only, so that the sums do not depend on the device. Their partial sums are 8 bytes a
// column against 12 a row: 32 rows a chunk keep them under 4 %, unless there are too few rows to keep a GPU busy.
int num_chunks(const NormBackwardParams& p) {
  const std::int64_t most = std::max<std::int64_t>(256, (std::int64_t{1} << 21) / p.features);
  const std::int64_t wanted = std::max(ceil_div(p.rows, 32), std::min<std::int64_t>(p.rows, 256));
  return static_cast<int>(std::max<std::int64_t>(1, std::min(wanted, most)));
}

// ---- Rows in registers ----

struct TwoSums {
  float sum, dot;
};

/// Both sums of a team at once.
template <int kTeam>
__device__ inline TwoSums team_reduce(TwoSums mine, TwoSums (&scratch)[kTeam / kWarp]) {
  mine.sum = warp_reduce(mine.sum, Sum{});
  mine.dot = warp_reduce(mine.dot, Sum{});
  if constexpr (kTeam > kWarp) {
    __syncthreads();  // the previous row's sums may still be read
    if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = mine;
    __syncthreads();
    mine = {0.0f, 0.0f};
#pragma unroll
    for (int warp = 0; warp < kTeam / kWarp; ++warp) {
      mine.sum += scratch[warp].sum;
      mine.dot += scratch[warp].dot;
    }
  }
  return mine;
}

template <class T, class W, int kTeam, int kTeams, int kVectors, int N>
__global__ void __launch_bounds__(kTeam* kTeams, kTeam* kTeams > 256    ? 1
                                                 : kTeam * kTeams > 128 ? 2
                                                                        : 3)
    rows_kernel(const NormBackwardParams p, std::int64_t rows_per_chunk, int chunks, float* partial_weight,
                float* partial_bias) {
  using Vector = Packed<T, N>;
  __shared__ TwoSums scratch[kTeams][kTeam / kWarp];
  const int chunk = blockIdx.x * kTeams + threadIdx.y;
  if (kTeams > 1 && chunk >= chunks) return;  // whole warps: several teams share a block only when they are warps
  const std::int64_t first_row = chunk * rows_per_chunk, last_row = min(p.rows, first_row + rows_per_chunk);
  const int features = static_cast<int>(p.features);
  const auto column = [&](int j) { return (j * kTeam + static_cast<int>(threadIdx.x)) * N; };
  const bool is_layer_norm = p.kind == NormKind::kLayerNorm;
  const float inverse_features = 1.0f / static_cast<float>(features);
  const W* const weights = static_cast<const W*>(p.weight.data);

  // The next row is under way while a row is reduced, where registers allow.
  constexpr bool kAhead = kTeam * kTeams <= 256;
  float weight_sums[kVectors][N] = {}, bias_sums[kVectors][N] = {};
  Vector grad[kVectors] = {}, h[kVectors] = {}, next_grad[kVectors] = {}, next_h[kVectors] = {};
  const auto load = [&](std::int64_t row, Vector(&to_grad)[kVectors], Vector(&to_h)[kVectors]) {
    const T* const from_grad = static_cast<const T*>(p.grad_out) + row * p.stride_grad_out_row;
    const T* const from_h = static_cast<const T*>(p.h) + row * p.stride_h_row;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (column(j) < features) to_grad[j] = load_vector<N>(from_grad + column(j));
      if (column(j) < features) to_h[j] = load_vector<N>(from_h + column(j));
    }
  };
  if (first_row < last_row) load(first_row, grad, h);
  for (std::int64_t row = first_row; row < last_row; ++row) {
    if (kAhead && row + 1 < last_row) load(row + 1, next_grad, next_h);
    const float mean = is_layer_norm ? p.mean[row] : 0.0f, rstd = p.rstd[row];
    // grad and grad * weight, and the normalised row, of vector j: worked out twice rather than held.
    const auto values = [&](int j, float(&g)[N], float(&gw)[N], float(&x_hat)[N]) {
      float weight[N];
#pragma unroll
      for (int i = 0; i < N; ++i) weight[i] = 1.0f;
      if (weights && column(j) < features) load_wide(weight, weights + column(j));
      unpack(g, grad[j]);
      unpack(x_hat, h[j]);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        x_hat[i] = (x_hat[i] - mean) * rstd;
        gw[i] = g[i] * weight[i];
      }
    };
    TwoSums sums{0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {  // columns past the end hold zeros of grad_out
      float g[N], gw[N], x_hat[N];
      values(j, g, gw, x_hat);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        weight_sums[j][i] = fmaf(g[i], x_hat[i], weight_sums[j][i]);
        bias_sums[j][i] += g[i];
        sums.sum += gw[i];
        sums.dot = fmaf(gw[i], x_hat[i], sums.dot);
      }
    }
    if (p.grad_x) {
      sums = team_reduce<kTeam>(sums, scratch[threadIdx.y]);
      const float shift = is_layer_norm ? sums.sum * inverse_features : 0.0f, slope = sums.dot * inverse_features;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (column(j) >= features) continue;
        float g[N], gw[N], x_hat[N], result[N];
        values(j, g, gw, x_hat);
#pragma unroll
        for (int i = 0; i < N; ++i) result[i] = rstd * (gw[i] - shift - x_hat[i] * slope);
        if (p.grad_residual_out) {
          float residual[N];
          load_floats(residual,
                      static_cast<const T*>(p.grad_residual_out) + row * p.stride_grad_residual_out_row + column(j));
#pragma unroll
          for (int i = 0; i < N; ++i) result[i] += residual[i];
        }
        store_floats(static_cast<T*>(p.grad_x) + row * p.stride_grad_x_row + column(j), result);
      }
    }
    if constexpr (kAhead) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        grad[j] = next_grad[j];
        h[j] = next_h[j];
      }
    } else if (row + 1 < last_row) {
      load(row + 1, grad, h);
    }
  }
  if (!partial_weight) return;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (column(j) >= features) continue;
    store_wide(partial_weight + static_cast<std::int64_t>(chunk) * features + column(j), weight_sums[j]);
    store_wide(partial_bias + static_cast<std::int64_t>(chunk) * features + column(j), bias_sums[j]);
  }
}

/// Threads of a team, teams of a block and vectors of a thread, for rows of up to 2048 vectors.
template <class F>
void with_team(std::int64_t vectors, F f) {
  if (vectors <= 128) return f(Constant<128>{}, Constant<1>{}, Constant<1>{});
  if (vectors <= 512) return f(Constant<256>{}, Constant<1>{}, Constant<2>{});
  if (vectors <= 1024) return f(Constant<512>{}, Constant<1>{}, Constant<2>{});
  return f(Constant<512>{}, Constant<1>{}, Constant<4>{});
}

bool rows_fit(const NormBackwardParams& p) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(p.dtype));
  const auto fits = [&](const void* data, std::int64_t stride) {
    return !data || (is_aligned(data, 16) && (p.rows == 1 || stride * bytes % 16 == 0));
  };
  const bool weights =
      !p.weight || ((p.weight.dtype == p.dtype || p.weight.dtype == DType::kFloat32) && is_aligned(p.weight.data, 16));
  return p.rows > 0 && p.features * bytes % 16 == 0 && p.features * bytes <= 2048 * 16 && weights &&
         fits(p.grad_out, p.stride_grad_out_row) && fits(p.h, p.stride_h_row) && fits(p.grad_x, p.stride_grad_x_row) &&
         fits(p.grad_residual_out, p.stride_grad_residual_out_row);
}

template <class T, class W>
void launch_rows(const NormBackwardParams& p, int chunks, float* partial_weight, float* partial_bias, cudaStream_t s) {
  constexpr int N = kVectorElements<T>;
  with_team(p.features / N, [&](auto team, auto teams, auto vectors) {
    launch("norm_bwd: rows", rows_kernel<T, W, team.value, teams.value, vectors.value, N>,
           {static_cast<unsigned>(ceil_div(chunks, teams.value)), dim3(team.value, teams.value), 0, s}, p,
           ceil_div(p.rows, chunks), chunks, partial_weight, partial_bias);
  });
}

}  // namespace

std::size_t norm_bwd_workspace(const NormBackwardParams& p) {
  if (!p.grad_weight && !p.grad_bias) return 0;
  return 2 * sizeof(float) * static_cast<std::size_t>(num_chunks(p) * p.features);
}

Verdict norm_bwd_supports(const NormBackwardParams& p) {
  return p.rows <= 0x7fffffff ? Verdict::ok() : Verdict("more rows than a grid has blocks");
}

void norm_bwd(const NormBackwardParams& p, void* workspace, Stream stream) {
  if (p.features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const cudaStream_t s = native(stream);
  const bool sums = p.grad_weight || p.grad_bias;
  const int chunks = num_chunks(p);
  float* partial_weight = sums ? static_cast<float*>(workspace) : nullptr;
  float* partial_bias = sums ? partial_weight + chunks * p.features : nullptr;
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (rows_fit(p)) {
      if (dtype_of<T> != DType::kFloat32 && p.weight && p.weight.dtype == DType::kFloat32) {
        launch_rows<T, float>(p, chunks, partial_weight, partial_bias, s);
      } else {
        launch_rows<T, T>(p, chunks, partial_weight, partial_bias, s);
      }
    } else {
      if (p.grad_x && p.rows > 0) {
        launch("norm_bwd: grad_x", grad_x_kernel<T>, {static_cast<unsigned>(p.rows), kThreads, 0, s}, p);
      }
      if (!sums) return;
      const dim3 grid(static_cast<unsigned>(ceil_div(p.features, kColumns)), static_cast<unsigned>(chunks));
      launch("norm_bwd: partial sums", partial_sums_kernel<T>, {grid, dim3(kColumns, kRowLanes), 0, s}, p,
             ceil_div(p.rows, chunks), partial_weight, partial_bias);
    }
  });
  if (!sums) return;
  launch("norm_bwd: combine", combine_kernel,
         {static_cast<unsigned>(ceil_div(p.features, kColumns)), dim3(kColumns, kCombineLanes), 0, s}, p, chunks,
         partial_weight, partial_bias);
}

}  // namespace flashkernel::cuda
