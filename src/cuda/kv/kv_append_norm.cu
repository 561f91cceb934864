// KV append with RMSNorm of each head of k and q before RoPE, as Qwen3 and Gemma 3 have it; the part of kv_append that
// norms. Bound by memory. A block takes a token at a time: while its threads work out the token's angles, once, in
// shared memory, the first numbers are under way; then groups of lanes take a head each. A lane adds the squares of its
// vectors, the group adds its lanes, and each lane norms, rounds and turns the pairs that it alone reads and writes, so
// that q may be written where it lies. Weights lie in shared memory as fp32. RMSNorm: Zhang and Sennrich (2019); RoPE:
// Su et al. (2021).
#include "cuda/kv/append_angle.cuh"
#include "cuda/kv/append_vectors.hpp"
#include "cuda/kv/kv.hpp"
#include "cuda/kv/lengths_after.cuh"
#include "cuda/host/launch.hpp"
#include "cuda/pipeline/turn.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/rope.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 3;                      // an SM's
static_assert(kMostNormedDim / 2 <= kThreads);  // a thread a pair for the angles

/// A head's part that a lane norms: x * rstd * weight, rounded to T as rms_norm gives it. Absent weights: as it is.
template <class T, int N>
__device__ inline void norm_vector(Packed<T, N>& x, const float* weight, float rstd) {
  if (!weight) return;
  float values[N];
  unpack(values, x);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = values[i] * rstd * weight[i];
  x = pack_vector<T>(values);
}

/// kWidth: elements that a lane moves at once. lanes: a power of two, at most a warp, that share a head.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, kBlocks)
    append_norm_kernel(const __grid_constant__ KvAppendParams p, const __grid_constant__ RopeFrequencies frequencies,
                       int lanes) {
  using Vector = Packed<T, kWidth>;
  __shared__ float cosines[kMostNormedDim / 2], sines[kMostNormedDim / 2];
  __shared__ float weights[2][kMostNormedDim];  // of k, of q
  __shared__ T* places[2];                      // where the token's k and v go; null: nowhere
  take_turn();
  write_lengths_after(p);
  const int thread = static_cast<int>(threadIdx.x), dim = static_cast<int>(p.pages.head_dim);
  const int half = static_cast<int>(p.rope.rotary_dim / 2);
  const int heads_kv = static_cast<int>(p.pages.heads_kv), heads = heads_kv + static_cast<int>(p.heads_q);
  const int columns_v = static_cast<int>(p.pages.head_dim_v) / kWidth, vectors_v = heads_kv * columns_v;
  const int rows = kThreads / lanes, first_row = thread / lanes, lane = thread - first_row * lanes;
  const unsigned group = lanes == kWarp ? kFullMask : ((1u << lanes) - 1) << (thread % kWarp - lane);
  const int step = lanes * kWidth;

  for (int i = thread; i < 2 * dim; i += kThreads) {
    const TypedPointer& weight = i < dim ? p.k_norm : p.q_norm;
    if (weight) weights[i >= dim][i - (i < dim ? 0 : dim)] = load_typed(weight.data, weight.dtype, i % dim);
  }
  double half_turns = 0.0;
  if (thread < half && !p.table)
    half_turns = p.rope.inv_freq || thread < kMostFrequencies
                     ? half_turns_per_token(p.rope, frequencies, thread)
                     : exp2(-2.0 * thread / static_cast<double>(p.rope.rotary_dim) * log2(p.rope.theta)) * kInversePi;

  for (std::int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    if (thread < half) {
      float cosine, sine;
      append_angle(p, token, thread, half_turns, &cosine, &sine);
      cosines[thread] = cosine;
      sines[thread] = p.rope.inverse ? -sine : sine;
    }
    if (thread == kThreads - 1) {
      const std::int64_t slot = p.slot(token), page = slot / p.pages.page_size;
      const std::int64_t offset = slot - page * p.pages.page_size;
      const bool there = slot >= 0 && page < p.pages.num_pages;
      places[0] =
          there ? static_cast<T*>(p.pages.k) + page * p.pages.stride_k_page + offset * p.pages.stride_k_slot : nullptr;
      places[1] =
          there ? static_cast<T*>(p.pages.v) + page * p.pages.stride_v_page + offset * p.pages.stride_v_slot : nullptr;
    }
    __syncthreads();

    T *const k_to = places[0], *const v_to = places[1];
    if (v_to)
      for (int at = thread; at < vectors_v; at += kThreads) {
        const int head = at / columns_v, column = (at - head * columns_v) * kWidth;
        *reinterpret_cast<Vector*>(v_to + head * p.pages.stride_v_head + column) = load_vector<kWidth>(
            static_cast<const T*>(p.v) + token * p.stride_v_token + head * p.stride_v_head + column);
      }

    for (int head = first_row; head < heads; head += rows) {
      const bool is_q = head >= heads_kv;
      if (!is_q && !k_to) continue;
      const T* const from =
          is_q ? static_cast<const T*>(p.q) + token * p.stride_q_token + (head - heads_kv) * p.stride_q_head
               : static_cast<const T*>(p.k) + token * p.stride_k_token + head * p.stride_k_head;
      T* const to =
          is_q ? static_cast<T*>(p.q_out) + token * p.stride_q_out_token + (head - heads_kv) * p.stride_q_out_head
               : k_to + head * p.pages.stride_k_head;
      const bool is_normed = static_cast<bool>(is_q ? p.q_norm : p.k_norm);
      const float* const weight = is_normed ? weights[is_q] : nullptr;
      float squares = 0.0f;
      if (is_normed) {
        for (int column = lane * kWidth; column < dim; column += step) {
          float x[kWidth];
          load_floats<kWidth>(x, from + column);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) squares = fmaf(x[i], x[i], squares);
        }
        for (int over = lanes / 2; over > 0; over /= 2) squares += __shfl_xor_sync(group, squares, over);
      }
      const float rstd = rsqrtf(squares / static_cast<float>(dim) + p.norm_eps);
      for (int pair = lane * kWidth; pair < half; pair += step) {
        const int first = p.rope.interleaved ? 2 * pair : pair, second = first + (p.rope.interleaved ? kWidth : half);
        Vector x = load_vector<kWidth>(from + first), y = load_vector<kWidth>(from + second);
        norm_vector(x, is_normed ? weight + first : nullptr, rstd);
        norm_vector(y, is_normed ? weight + second : nullptr, rstd);
        float cosine[kWidth], sine[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) cosine[i] = cosines[pair + i], sine[i] = sines[pair + i];
        if (p.rope.interleaved)
          rotate_pairs<true>(x, y, cosine, sine);
        else
          rotate_pairs<false>(x, y, cosine, sine);
        *reinterpret_cast<Vector*>(to + first) = x;
        *reinterpret_cast<Vector*>(to + second) = y;
      }
      for (int column = 2 * half + lane * kWidth; column < dim; column += step) {
        Vector x = load_vector<kWidth>(from + column);
        norm_vector(x, is_normed ? weight + column : nullptr, rstd);
        *reinterpret_cast<Vector*>(to + column) = x;
      }
    }
    __syncthreads();  // angles and places are overwritten next
  }
}

template <class T>
void launch_for(const KvAppendParams& p, cudaStream_t stream) {
  constexpr int N = kVectorElements<T>;
  const std::int64_t half = p.rope.rotary_dim / 2;
  const bool vectors = append_in_vectors(p, N);
  const std::int64_t of_head = ceil_div(std::max<std::int64_t>(half, 1), vectors ? N : 1);
  int lanes = 1;
  while (lanes < kWarp && lanes < of_head) lanes *= 2;
  launch("kv_append", vectors ? append_norm_kernel<T, N> : append_norm_kernel<T, 1>,
         {grid_size(p.tokens, p.device.index, kBlocks), kThreads, 0, stream, true}, p, rope_frequencies(p.rope), lanes);
}

}  // namespace

void kv_append_norm(const KvAppendParams& p, Stream stream) {
  visit_floating(p.dtype, [&](auto zero) { launch_for<decltype(zero)>(p, native(stream)); });
}

}  // namespace flashkernel::cuda
