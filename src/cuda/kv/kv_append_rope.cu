// KV append with RoPE on k and q; the part of kv_append (kv_ops.cu) that rotates. Bound by memory. A block takes a few
// tokens at a time, a thread one of them: its loads are under way while all threads work out the angles of the tokens'
// pairs, once, in shared memory; then it rotates its pairs of every head of k and q by the same sines, 16 bytes a lane
// where everything is aligned for it (else one element). A slot out of range moves nothing; q is rotated all the same.
// RoPE: Su et al. (2021).
#include "cuda/kv/append_angle.cuh"
#include "cuda/kv/append_vectors.hpp"
#include "cuda/kv/kv.hpp"
#include "cuda/kv/lengths_after.cuh"
#include "cuda/host/launch.hpp"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/rope.cuh"
#include "cuda/pipeline/turn.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 3;                    // an SM's
constexpr int kMostTokens = 8;                // that a block takes at a time
constexpr int kMostPairs = kMostFrequencies;  // of a launch; larger heads take several
constexpr int kInFlight = 2;                  // vectors of v that a thread loads before it stores the first

/// Pairs from `first_pair` on, and with the first what is not rotated. kWidth: elements that a lane moves at once.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, kBlocks)
    append_rope_kernel(const __grid_constant__ KvAppendParams p, const __grid_constant__ RopeFrequencies frequencies,
                       int first_pair, int tokens_at_once) {
  using Vector = Packed<T, kWidth>;
  __shared__ float cosines[kThreads], sines[kThreads];  // of pair a of token t at t * pairs + a
  __shared__ T* places[kMostTokens][2];                 // where the token's k and v go; null: nowhere
  take_turn();
  write_lengths_after(p);
  const int thread = static_cast<int>(threadIdx.x), half = static_cast<int>(p.rope.rotary_dim / 2);
  const int pairs = min(half - first_pair, kMostPairs);
  const int heads_kv = static_cast<int>(p.pages.heads_kv), heads = heads_kv + static_cast<int>(p.heads_q);
  const bool is_first = first_pair == 0;

  // This thread's part of a token: `lanes` threads take a row (kWidth pairs each), `rows` rows a time.
  const int lanes = pairs == 0 ? kWarp : pairs / kWidth;
  const int rows = kThreads / lanes / tokens_at_once;
  const int of_token = rows * lanes, token = thread / of_token, my_thread = thread - token * of_token;
  const int first_row = my_thread / lanes, lane = my_thread - first_row * lanes;
  const int first = p.rope.interleaved ? 2 * (first_pair + lane * kWidth) : first_pair + lane * kWidth;
  const int second = first + (p.rope.interleaved ? kWidth : half);

  // And of the angles.
  const int angle_token = pairs == 0 ? tokens_at_once : thread / pairs;
  const int angle_pair = pairs == 0 ? 0 : thread - angle_token * pairs;
  double half_turns = 0.0;
  if (angle_token < tokens_at_once) half_turns = half_turns_per_token(p.rope, frequencies, angle_pair, first_pair);

  const int columns_v = static_cast<int>(p.pages.head_dim_v) / kWidth, vectors_v = is_first ? heads_kv * columns_v : 0;
  for (std::int64_t base = static_cast<std::int64_t>(blockIdx.x) * tokens_at_once; base < p.tokens;
       base += static_cast<std::int64_t>(gridDim.x) * tokens_at_once) {
    const int count = static_cast<int>(min(static_cast<std::int64_t>(tokens_at_once), p.tokens - base));
    const bool is_mine = token < count;
    const std::int64_t my_token = base + token;

    Vector held[kInFlight], x, y;
    const auto load_v = [&](int at) {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i, at += of_token) {
        if (at >= vectors_v) break;
        const int head = at / columns_v, column = (at - head * columns_v) * kWidth;
        held[i] = load_vector<kWidth>(static_cast<const T*>(p.v) + my_token * p.stride_v_token +
                                      head * p.stride_v_head + column);
      }
    };
    const auto source = [&](int head) {
      return head < heads_kv
                 ? static_cast<const T*>(p.k) + my_token * p.stride_k_token + head * p.stride_k_head
                 : static_cast<const T*>(p.q) + my_token * p.stride_q_token + (head - heads_kv) * p.stride_q_head;
    };
    const auto load_row = [&](int head, Vector& to_x, Vector& to_y) {
      if (head >= heads || pairs == 0) return;
      const T* const from = source(head);
      to_x = load_vector<kWidth>(from + first);
      to_y = load_vector<kWidth>(from + second);
    };
    if (is_mine) {
      load_v(my_thread);
      load_row(first_row, x, y);
    }

    if (angle_token < count) {
      float cosine, sine;
      append_angle(p, base + angle_token, first_pair + angle_pair, half_turns, &cosine, &sine);
      cosines[thread] = cosine;
      sines[thread] = p.rope.inverse ? -sine : sine;
    }
    if (thread < count) {
      const std::int64_t slot = p.slot(base + thread), page = slot / p.pages.page_size;
      const std::int64_t offset = slot - page * p.pages.page_size;
      const bool there = slot >= 0 && page < p.pages.num_pages;
      places[thread][0] =
          there ? static_cast<T*>(p.pages.k) + page * p.pages.stride_k_page + offset * p.pages.stride_k_slot : nullptr;
      places[thread][1] =
          there ? static_cast<T*>(p.pages.v) + page * p.pages.stride_v_page + offset * p.pages.stride_v_slot : nullptr;
    }
    __syncthreads();

    if (is_mine) {
      T *const k_to = places[token][0], *const v_to = places[token][1];
      for (int at = my_thread; at < vectors_v; load_v(at)) {
#pragma unroll
        for (int i = 0; i < kInFlight; ++i, at += of_token) {
          if (at >= vectors_v || !v_to) continue;
          const int head = at / columns_v, column = (at - head * columns_v) * kWidth;
          *reinterpret_cast<Vector*>(v_to + head * p.pages.stride_v_head + column) = held[i];
        }
      }
      float cosine[kWidth], sine[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        cosine[i] = pairs == 0 ? 1.0f : cosines[token * pairs + lane * kWidth + i];
        sine[i] = pairs == 0 ? 0.0f : sines[token * pairs + lane * kWidth + i];
      }
      const auto store_row = [&](int head, Vector& of_x, Vector& of_y) {
        if (head < heads_kv && !k_to) return;
        T* const to = head < heads_kv ? k_to + head * p.pages.stride_k_head
                                      : static_cast<T*>(p.q_out) + my_token * p.stride_q_out_token +
                                            (head - heads_kv) * p.stride_q_out_head;
        if (pairs != 0) {
          if (p.rope.interleaved)
            rotate_pairs<true>(of_x, of_y, cosine, sine);
          else
            rotate_pairs<false>(of_x, of_y, cosine, sine);
          *reinterpret_cast<Vector*>(to + first) = of_x;
          *reinterpret_cast<Vector*>(to + second) = of_y;
        }
        if (!is_first) return;
        const T* const from = source(head);
        for (int column = 2 * half + lane * kWidth; column < p.pages.head_dim; column += lanes * kWidth)
          *reinterpret_cast<Vector*>(to + column) = load_vector<kWidth>(from + column);
      };
      for (int head = first_row; head < heads; head += rows) {
        Vector now_x = x, now_y = y;
        load_row(head + rows, x, y);  // under way while this one is turned
        store_row(head, now_x, now_y);
      }
    }
    __syncthreads();  // angles and places are overwritten next
  }
}

template <class T>
void launch_for(const KvAppendParams& p, cudaStream_t stream) {
  constexpr int N = kVectorElements<T>;
  const bool vectors = append_in_vectors(p, N);
  // Few tokens: one a block, for latency. Many: as many as have their angles worked out by all threads at once.
  const std::int64_t half = p.rope.rotary_dim / 2, pairs = std::min<std::int64_t>(half, kMostPairs);
  const bool is_few = p.tokens <= 4 * cuda_device_properties(p.device.index).num_sms;
  const auto covered = static_cast<int>(kThreads / std::max<std::int64_t>(pairs, kWarp));
  const int tokens_at_once = is_few ? 1 : std::min(kMostTokens, covered);
  const unsigned blocks = grid_size(ceil_div(p.tokens, tokens_at_once), p.device.index, is_few ? 4 : kBlocks);
  for (int first_pair = 0; first_pair == 0 || first_pair < half; first_pair += kMostPairs)
    launch("kv_append", vectors ? append_rope_kernel<T, N> : append_rope_kernel<T, 1>,
           {blocks, kThreads, 0, stream, true}, p, rope_frequencies(p.rope, first_pair), first_pair, tokens_at_once);
}

}  // namespace

void kv_append_rope(const KvAppendParams& p, Stream stream) {
  visit_floating(p.dtype, [&](auto zero) { launch_for<decltype(zero)>(p, native(stream)); });
}

}  // namespace flashkernel::cuda
