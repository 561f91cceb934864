// RoPE on q and k in one launch: a thread rotates kPairs pairs of a token for every head, so sin and cos are computed
// once per token and pair. Angles: position * frequency is reduced by whole turns in fp64 (one multiply and one round
// per pair), the rest in fp32, so that a position of 10^5 and more keeps fp32 accuracy.
#include "cuda/generic/kernels.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/rope.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) rope_kernel(const RopeParams p, int head_groups) {
  // Work items: (batch, token, group of heads, pair or pass-through element), the last fastest.
  const std::int64_t half = p.spec.rotary_dim / 2;
  const std::int64_t columns = half + (p.head_dim - p.spec.rotary_dim);
  const std::int64_t items = p.batch * p.seq * head_groups * columns;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items; item += step) {
    std::int64_t rest = item / columns;
    const std::int64_t column = item - rest * columns;
    const int group = static_cast<int>(rest % head_groups);
    rest /= head_groups;
    const std::int64_t b = rest / p.seq, token = rest - b * p.seq;

    float cosine = 1.0f, sine = 0.0f;
    std::int64_t first = column, second = column;
    const bool rotates = column < half;
    if (rotates) {
      if (p.cos) {
        const std::int64_t row = p.table_is_per_token ? token : p.position(b, token);
        cosine = load_typed(p.cos, p.table_dtype, b * p.stride_table_batch + row * p.stride_table_row + column);
        sine = load_typed(p.sin, p.table_dtype, b * p.stride_sin_batch + row * p.stride_sin_row + column);
      } else {
        rope_angle(p.spec, p.position(b, token), column, &cosine, &sine);
      }
      if (p.spec.inverse) sine = -sine;
      first = p.spec.interleaved ? 2 * column : column;
      second = p.spec.interleaved ? 2 * column + 1 : column + half;
    } else {
      first = second = p.spec.rotary_dim + (column - half);
    }
    const auto apply = [&](const T* in, T* out) {
      if (rotates) {
        const float a = to_float(in[first]), c = to_float(in[second]);
        out[first] = from_float<T>(a * cosine - c * sine);
        out[second] = from_float<T>(a * sine + c * cosine);
      } else if (in != out) {
        out[first] = in[first];
      }
    };
    for (std::int64_t h = group; h < p.heads_q + p.heads_kv; h += head_groups) {
      if (h < p.heads_q) {
        apply(static_cast<const T*>(p.q) + b * p.stride_q_batch + h * p.stride_q_head + token * p.stride_q_token,
              static_cast<T*>(p.q_out) + b * p.stride_q_out_batch + h * p.stride_q_out_head +
                  token * p.stride_q_out_token);
      } else {
        const std::int64_t g = h - p.heads_q;
        apply(static_cast<const T*>(p.k) + b * p.stride_k_batch + g * p.stride_k_head + token * p.stride_k_token,
              static_cast<T*>(p.k_out) + b * p.stride_k_out_batch + g * p.stride_k_out_head +
                  token * p.stride_k_out_token);
      }
    }
  }
}

}  // namespace

Verdict rope_supports(const RopeParams&) { return Verdict::ok(); }

void rope(const RopeParams& p, void*, Stream stream) {
  const std::int64_t columns = p.head_dim - p.spec.rotary_dim / 2;
  if (p.batch * p.seq * columns == 0 || p.heads_q + p.heads_kv == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  // Few tokens: spread the heads over threads; many tokens: 8 heads share a thread's sin and cos.
  const std::int64_t heads = p.heads_q + p.heads_kv;
  const int head_groups = static_cast<int>(p.batch * p.seq * columns >= 1 << 16 ? ceil_div(heads, 8) : heads);
  const std::int64_t items = p.batch * p.seq * head_groups * columns;
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch("rope", rope_kernel<T>,
           {grid_size(ceil_div(items, kThreads), p.device.index, 32), kThreads, 0, native(stream)}, p, head_groups);
  });
}

}  // namespace flashkernel::cuda
