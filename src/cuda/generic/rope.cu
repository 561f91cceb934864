// RoPE on q and k in one launch: a thread rotates the same pairs of a token for several heads, so sin and cos are
// computed once for all of them. Angles: position * frequency is reduced by whole turns in fp64 (one multiply and one
// round per pair), the rest in fp32, so that a position of 10^5 and more keeps fp32 accuracy.
// Bound by memory: two kernels, one that moves 16 bytes a lane and one for what is not aligned to that.
#include <cmath>

#include "cuda/generic/kernels.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/rope.cuh"
#include "cuda/tile/vector.cuh"

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

constexpr int kBlocks = 3;  // an SM's

/// A block takes an even share of all (block of tokens, head) pairs, heads fastest: no last wave of blocks is part
/// empty, and sines are worked out once for all heads of a share. A thread takes N pairs (or N elements that pass
/// through) of a token; the loads of the next head are under way while one is rotated.
template <class T, bool kInterleaved>
__global__ void __launch_bounds__(kThreads, kBlocks)
    rope_vectors_kernel(const RopeParams p, const __grid_constant__ RopeFrequencies frequencies, int token_blocks,
                        std::int64_t units) {
  constexpr int N = kVectorElements<T>;
  using Vector = Packed<T, N>;
  const int half = static_cast<int>(p.spec.rotary_dim / 2), rotating = half / N;
  const int columns = rotating + static_cast<int>(p.head_dim - p.spec.rotary_dim) / N;
  const int tokens = kThreads / columns, my_token = static_cast<int>(threadIdx.x) / columns;
  const int column = static_cast<int>(threadIdx.x) - my_token * columns;
  const bool rotates = column < rotating;
  const int first = !rotates       ? static_cast<int>(p.spec.rotary_dim) + (column - rotating) * N
                    : kInterleaved ? 2 * column * N
                                   : column * N;
  const int second = !rotates ? first : kInterleaved ? first + N : first + half;
  const int heads_q = static_cast<int>(p.heads_q), heads = heads_q + static_cast<int>(p.heads_kv);

  // A place among the units, and this thread's token there.
  struct Place {
    std::int64_t b, token;
    int block, head;
    bool inside;
  };
  const auto set_token = [&](Place& place) {
    place.token = static_cast<std::int64_t>(place.block) * tokens + my_token;
    place.inside = my_token < tokens && place.token < p.seq;
  };
  const auto next = [&](Place& place) {
    if (++place.head < heads) return;
    place.head = 0;
    if (++place.block == token_blocks) place.block = 0, ++place.b;
    set_token(place);
  };
  const std::int64_t first_unit = units * blockIdx.x / gridDim.x, last_unit = units * (blockIdx.x + 1) / gridDim.x;
  Place ahead{};
  ahead.head = static_cast<int>(first_unit % heads);
  ahead.block = static_cast<int>(first_unit / heads % token_blocks);
  ahead.b = first_unit / heads / token_blocks;
  set_token(ahead);
  Place now = ahead;

  const auto load = [&](std::int64_t unit, Vector& x, Vector& y) {
    if (unit < last_unit && ahead.inside) {
      const int h = ahead.head;
      const T* const in = h < heads_q ? static_cast<const T*>(p.q) + ahead.b * p.stride_q_batch + h * p.stride_q_head +
                                            ahead.token * p.stride_q_token
                                      : static_cast<const T*>(p.k) + ahead.b * p.stride_k_batch +
                                            (h - heads_q) * p.stride_k_head + ahead.token * p.stride_k_token;
      x = *reinterpret_cast<const Vector*>(in + first);
      if (rotates) y = *reinterpret_cast<const Vector*>(in + second);
    }
    next(ahead);
  };

  float cosine[N], sine[N];
  const auto set_angles = [&] {
    if (!rotates || !now.inside) return;
    if (p.cos) {
      const std::int64_t row = p.table_is_per_token ? now.token : p.position(now.b, now.token);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int pair = column * N + i;
        cosine[i] = load_typed(p.cos, p.table_dtype, now.b * p.stride_table_batch + row * p.stride_table_row + pair);
        sine[i] = load_typed(p.sin, p.table_dtype, now.b * p.stride_sin_batch + row * p.stride_sin_row + pair);
      }
    } else {
      const std::int64_t position = p.position(now.b, now.token);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        rope_angle(position, half_turns_per_token(p.spec, frequencies, column * N + i), &cosine[i], &sine[i]);
      }
    }
    if (p.spec.inverse) {
#pragma unroll
      for (int i = 0; i < N; ++i) sine[i] = -sine[i];
    }
  };

  const auto store = [&](std::int64_t unit, Vector& x, Vector& y) {
    if (unit >= last_unit) return;
    if (unit == first_unit || now.head == 0) set_angles();
    if (now.inside) {
      const int h = now.head;
      T* const out = h < heads_q ? static_cast<T*>(p.q_out) + now.b * p.stride_q_out_batch + h * p.stride_q_out_head +
                                       now.token * p.stride_q_out_token
                                 : static_cast<T*>(p.k_out) + now.b * p.stride_k_out_batch +
                                       (h - heads_q) * p.stride_k_out_head + now.token * p.stride_k_out_token;
      if (rotates) {
        rotate_pairs<kInterleaved>(x, y, cosine, sine);
        *reinterpret_cast<Vector*>(out + second) = y;
      }
      *reinterpret_cast<Vector*>(out + first) = x;
    }
    next(now);
  };

  Vector x[2], y[2];
  load(first_unit, x[0], y[0]);  // under way while the angles are worked out
  for (std::int64_t unit = first_unit; unit < last_unit; unit += 2) {
    load(unit + 1, x[1], y[1]);
    store(unit, x[0], y[0]);
    load(unit + 2, x[0], y[0]);
    store(unit + 1, x[1], y[1]);
  }
}

bool vectorizable(const RopeParams& p) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(p.dtype)), elements = 16 / bytes;
  const auto fits = [&](const void* data, std::int64_t batch, std::int64_t head, std::int64_t token) {
    return is_aligned(data, 16) && (p.batch == 1 || batch % elements == 0) && head % elements == 0 &&
           (p.seq == 1 || token % elements == 0);
  };
  return p.spec.rotary_dim % (2 * elements) == 0 && p.head_dim % elements == 0 && p.head_dim <= kThreads * elements &&
         p.spec.rotary_dim <= 2 * kMostFrequencies && fits(p.q, p.stride_q_batch, p.stride_q_head, p.stride_q_token) &&
         fits(p.q_out, p.stride_q_out_batch, p.stride_q_out_head, p.stride_q_out_token) &&
         (p.heads_kv == 0 || (fits(p.k, p.stride_k_batch, p.stride_k_head, p.stride_k_token) &&
                              fits(p.k_out, p.stride_k_out_batch, p.stride_k_out_head, p.stride_k_out_token)));
}

void rope_vectors(const RopeParams& p, cudaStream_t stream) {
  const RopeFrequencies frequencies = rope_frequencies(p.spec);
  const std::int64_t elements = 16 / static_cast<std::int64_t>(dtype_bytes(p.dtype));
  const std::int64_t columns = (p.head_dim - p.spec.rotary_dim / 2) / elements;
  const std::int64_t token_blocks = ceil_div(p.seq, kThreads / columns);
  const std::int64_t units = p.batch * token_blocks * (p.heads_q + p.heads_kv);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = p.spec.interleaved ? rope_vectors_kernel<T, true> : rope_vectors_kernel<T, false>;
    launch("rope", kernel, {grid_size(units, p.device.index, kBlocks), kThreads, 0, stream}, p, frequencies,
           static_cast<int>(token_blocks), units);
  });
}

}  // namespace

Verdict rope_supports(const RopeParams&) { return Verdict::ok(); }

void rope(const RopeParams& p, void*, Stream stream) {
  const std::int64_t columns = p.head_dim - p.spec.rotary_dim / 2;
  if (p.batch * p.seq * columns == 0 || p.heads_q + p.heads_kv == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  if (vectorizable(p)) return rope_vectors(p, native(stream));
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
