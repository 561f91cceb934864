// KV append with RoPE on k and q; the part of kv_append (kv_ops.cu) that rotates. Bound by memory. A block takes a few
// tokens at a time: it moves their values, works out the angles of all pairs once (in shared memory) and rotates every
// head of k and q with them, 16 bytes a lane where everything is aligned for it (else one element). A slot out of range
// moves nothing; q is rotated all the same. RoPE: Su et al. (2021).
#include <cmath>

#include "cuda/generic/kernels.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/rope.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostTokens = 8;  // that a block takes at a time

/// kWidth: elements that a lane moves at once. `frequency_step`: log2 of the ratio of neighbouring pairs' frequencies.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    append_rope_kernel(const __grid_constant__ KvAppendParams p, double frequency_step, int tokens_at_once) {
  using Vector = Packed<T, kWidth>;
  __shared__ float2 angles[kThreads];    // cosine and sine of pair a of token t at t * half + a
  __shared__ T* places[kMostTokens][2];  // where the token's k and v go; null: nowhere
  const int thread = static_cast<int>(threadIdx.x), rotary = static_cast<int>(p.rope.rotary_dim);
  const int half = max(rotary / 2, 1);
  const int dim = static_cast<int>(p.pages.head_dim), heads_kv = static_cast<int>(p.pages.heads_kv);
  const int pair = thread % half, pair_token = thread / half;
  double half_turns_per_token = 0.0;
  if (rotary > 0 && pair_token < tokens_at_once)
    half_turns_per_token =
        kInversePi * (p.rope.inv_freq ? static_cast<double>(p.rope.inv_freq[pair]) : exp2(frequency_step * pair));
  // Lanes of a row that is rotated: one a vector of its first half, or, interleaved, one a vector (of two elements at
  // least).
  constexpr int kInterleavedWidth = kWidth > 1 ? kWidth : 2;
  const int lanes = rotary == 0 ? kWarp : p.rope.interleaved ? rotary / kInterleavedWidth : half / kWidth;
  const int lane = thread % lanes, first_row = thread / lanes, row_step = kThreads / lanes;
  const int rows_per_token = heads_kv + static_cast<int>(p.heads_q);
  const int value_vectors = static_cast<int>(p.pages.head_dim_v) / kWidth;

  for (std::int64_t base = static_cast<std::int64_t>(blockIdx.x) * tokens_at_once; base < p.tokens;
       base += static_cast<std::int64_t>(gridDim.x) * tokens_at_once) {
    const int count = static_cast<int>(min(static_cast<std::int64_t>(tokens_at_once), p.tokens - base));
    if (pair_token < count) {
      float cosine, sine;
      rope_angle(p.positions[base + pair_token], half_turns_per_token, &cosine, &sine);
      angles[thread] = float2{cosine, p.rope.inverse ? -sine : sine};
    }
    if (thread < count) {
      const std::int64_t slot = p.slots[base + thread], page = slot / p.pages.page_size;
      const std::int64_t offset = slot - page * p.pages.page_size;
      const bool there = slot >= 0 && page < p.pages.num_pages;
      places[thread][0] =
          there ? static_cast<T*>(p.pages.k) + page * p.pages.stride_k_page + offset * p.pages.stride_k_slot : nullptr;
      places[thread][1] =
          there ? static_cast<T*>(p.pages.v) + page * p.pages.stride_v_page + offset * p.pages.stride_v_slot : nullptr;
    }
    __syncthreads();

    for (int t = 0; t < count; ++t) {
      T* const to = places[t][1];
      if (!to) continue;
      for (int at = thread; at < heads_kv * value_vectors; at += kThreads) {
        const int head = at / value_vectors, column = (at - head * value_vectors) * kWidth;
        *reinterpret_cast<Vector*>(to + head * p.pages.stride_v_head + column) = *reinterpret_cast<const Vector*>(
            static_cast<const T*>(p.v) + (base + t) * p.stride_v_token + head * p.stride_v_head + column);
      }
    }
    for (int row = first_row; first_row < row_step && row < count * rows_per_token; row += row_step) {
      const int t = row / rows_per_token, head = row - t * rows_per_token;
      const T* from;
      T* to;
      if (head < heads_kv) {
        if (!places[t][0]) continue;
        from = static_cast<const T*>(p.k) + (base + t) * p.stride_k_token + head * p.stride_k_head;
        to = places[t][0] + head * p.pages.stride_k_head;
      } else {
        from = static_cast<const T*>(p.q) + (base + t) * p.stride_q_token + (head - heads_kv) * p.stride_q_head;
        to = static_cast<T*>(p.q_out) + (base + t) * p.stride_q_out_token + (head - heads_kv) * p.stride_q_out_head;
      }
      const float2* of_token = angles + t * half;
      if (rotary == 0) {
        // All of the row is tail.
      } else if (p.rope.interleaved) {
        float values[kInterleavedWidth];
        if constexpr (kWidth > 1)
          load_floats(values, from + lane * kInterleavedWidth);
        else
          values[0] = to_float(from[2 * lane]), values[1] = to_float(from[2 * lane + 1]);
#pragma unroll
        for (int e = 0; e < kInterleavedWidth; e += 2) {
          const float2 turn = of_token[(lane * kInterleavedWidth + e) / 2];
          const float a = values[e], b = values[e + 1];
          values[e] = a * turn.x - b * turn.y;
          values[e + 1] = a * turn.y + b * turn.x;
        }
        if constexpr (kWidth > 1)
          store_floats(to + lane * kInterleavedWidth, values);
        else
          to[2 * lane] = from_float<T>(values[0]), to[2 * lane + 1] = from_float<T>(values[1]);
      } else {
        float a[kWidth], b[kWidth];
        load_floats(a, from + lane * kWidth);
        load_floats(b, from + half + lane * kWidth);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const float2 turn = of_token[lane * kWidth + e];
          const float first = a[e];
          a[e] = first * turn.x - b[e] * turn.y;
          b[e] = first * turn.y + b[e] * turn.x;
        }
        store_floats(to + lane * kWidth, a);
        store_floats(to + half + lane * kWidth, b);
      }
      for (int column = rotary + lane; column < dim; column += lanes) to[column] = from[column];
    }
    __syncthreads();  // angles and places are overwritten next
  }
}

template <class T>
void launch_for(const KvAppendParams& p, cudaStream_t stream) {
  constexpr int N = kVectorElements<T>;
  const auto fits = [](const void* data, std::initializer_list<std::int64_t> strides) {
    bool all = is_aligned(data, 16);
    for (const std::int64_t stride : strides) all = all && stride % N == 0;
    return all;
  };
  const bool vectors =
      (p.rope.interleaved ? p.rope.rotary_dim : p.rope.rotary_dim / 2) % N == 0 && p.pages.head_dim_v % N == 0 &&
      fits(p.k, {p.stride_k_token, p.stride_k_head}) && fits(p.v, {p.stride_v_token, p.stride_v_head}) &&
      fits(p.pages.k, {p.pages.stride_k_page, p.pages.stride_k_slot, p.pages.stride_k_head}) &&
      fits(p.pages.v, {p.pages.stride_v_page, p.pages.stride_v_slot, p.pages.stride_v_head}) &&
      (p.heads_q == 0 ||
       (fits(p.q, {p.stride_q_token, p.stride_q_head}) && fits(p.q_out, {p.stride_q_out_token, p.stride_q_out_head})));
  // Few tokens: one a block, for latency. Many: as many as have their angles worked out by all threads at once.
  const std::int64_t half = std::max<std::int64_t>(1, p.rope.rotary_dim / 2);
  const int sms = cuda_device_properties(p.device.index).num_sms;
  const int tokens_at_once =
      p.tokens <= 4 * sms
          ? 1
          : static_cast<int>(std::min<std::int64_t>(kMostTokens, std::max<std::int64_t>(1, kThreads / half)));
  const double step = p.rope.inv_freq || p.rope.rotary_dim == 0
                          ? 0.0
                          : -2.0 * std::log2(p.rope.theta) / static_cast<double>(p.rope.rotary_dim);
  const LaunchShape shape{grid_size(ceil_div(p.tokens, tokens_at_once), p.device.index, 8), kThreads, 0, stream};
  launch("kv_append", vectors ? append_rope_kernel<T, N> : append_rope_kernel<T, 1>, shape, p, step, tokens_at_once);
}

}  // namespace

void kv_append_rope(const KvAppendParams& p, Stream stream) {
  visit_floating(p.dtype, [&](auto zero) { launch_for<decltype(zero)>(p, native(stream)); });
}

}  // namespace flashkernel::cuda
