// Queries, keys and values of 8 bits as numbers of the output's dtype, for attention_fp8 without 8-bit tensor cores
// (float8.hpp). Bound by memory: eight elements a thread.
#include "cuda/attention/widened/float8.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/quantized.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 8;  // elements of a thread

/// One of q, k and v.
struct Operand {
  const Float8* from;
  void* to;
  HeadScale scale;
  IndexArray starts;  // of sequences side by side
  std::int64_t stride_batch, stride_token, stride_head, tokens, heads, rows;
  int dim, pitch, group;  // heads that share a scale
  bool vectors;
};
struct Operands {
  Operand of[3];
};

/// The sequence of a row of sequences side by side: the last one that starts at it or before, among those that have
/// tokens.
__device__ inline std::int64_t sequence_of(const IndexArray& starts, std::int64_t batch, std::int64_t row) {
  std::int64_t low = 0, high = batch - 1;
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    if (starts[middle] <= row)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

/// Grid: (parts, q, k or v).
template <class T>
__global__ void __launch_bounds__(kThreads)
    widen_float8_kernel(const __grid_constant__ Operands all, std::int64_t batch) {
  const Operand& x = all.of[blockIdx.y];
  const std::int64_t per_row = (x.pitch + kWidth - 1) / kWidth;
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < x.rows * per_row;
       at += threads) {
    const std::int64_t row = at / per_row;
    const int column = static_cast<int>(at - row * per_row) * kWidth;
    const std::int64_t token = row / x.heads, head = row - token * x.heads;
    std::int64_t b = 0, offset = token * x.stride_token;
    if (!x.starts) {
      b = token / x.tokens;
      offset = b * x.stride_batch + (token - b * x.tokens) * x.stride_token;
    } else if (x.scale.data && x.scale.stride_batch) {
      b = sequence_of(x.starts, batch, token);
    }
    const Float8* const from = x.from + offset + head * x.stride_head + column;
    const float scale = x.scale.at(b, head / x.group);
    float numbers[kWidth] = {};
    if (x.vectors && column + kWidth <= x.dim) {
      const auto eight = load_vector<kWidth>(from);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) numbers[i] = to_float(eight.values[i]) * scale;
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (column + i < x.dim) numbers[i] = to_float(from[i]) * scale;
    }
    store_floats(static_cast<T*>(x.to) + row * x.pitch + column, numbers);
  }
}

}  // namespace

void widen_float8(const Float8AttentionParams& params, const Float8Workspace& to, Stream stream) {
  const AttentionParams& p = params.attention;
  const CudaDeviceGuard guard(p.device.index);
  const auto operand = [&](const void* from, void* into, const HeadScale& scale, const IndexArray& starts,
                           std::int64_t stride_batch, std::int64_t stride_token, std::int64_t stride_head,
                           std::int64_t tokens, std::int64_t heads, std::int64_t rows, std::int64_t dim,
                           std::int64_t pitch, std::int64_t group) {
    const bool vectors = is_aligned(from, kWidth) && stride_batch % kWidth == 0 && stride_token % kWidth == 0 &&
                         stride_head % kWidth == 0;
    return Operand{static_cast<const Float8*>(from),
                   into,
                   scale,
                   starts,
                   stride_batch,
                   stride_token,
                   stride_head,
                   tokens,
                   heads,
                   rows,
                   static_cast<int>(dim),
                   static_cast<int>(pitch),
                   static_cast<int>(group),
                   vectors};
  };
  const WidenedOperands& w = to.widened;
  const Operands all{{
      operand(p.q, to.q, params.q, p.cu_seqlens_q, p.is_varlen_q() ? 0 : p.stride_q_batch, p.stride_q_token,
              p.stride_q_head, p.seq_q, p.heads_q, w.rows_q, p.head_dim, w.pitch, p.heads_q / p.heads_kv),
      operand(p.k, to.k, params.k, p.cu_seqlens_k, p.is_varlen_k() ? 0 : p.stride_k_batch, p.stride_k_token,
              p.stride_k_head, p.seq_k, p.heads_kv, w.rows_k, p.head_dim, w.pitch, 1),
      operand(p.v, to.v, params.v, p.cu_seqlens_k, p.is_varlen_k() ? 0 : p.stride_v_batch, p.stride_v_token,
              p.stride_v_head, p.seq_k, p.heads_kv, w.rows_k, p.head_dim_v, w.pitch_v, 1),
  }};
  const std::int64_t most = std::max(w.rows_q, w.rows_k) * (std::max(w.pitch, w.pitch_v) / kWidth);
  if (most == 0) return;
  const std::int64_t wave = 16 * std::int64_t{cuda_device_properties(p.device.index).num_sms};
  const dim3 grid(static_cast<unsigned>(std::min(ceil_div(most, std::int64_t{kThreads}), wave)), 3);
  visit_floating(params.dtype_out, [&](auto zero) {
    using T = decltype(zero);
    launch("attention_fp8 widen", widen_float8_kernel<T>, {grid, kThreads, 0, native(stream)}, all, p.batch);
  });
}

}  // namespace flashkernel::cuda
