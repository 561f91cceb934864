// RoPE on q and k in one launch: a thread rotates the same pairs of a token for several heads, so sin and cos are
// computed once for all of them. Angles: position * frequency is reduced by whole turns in fp64 (one multiply and one
// round per pair), the rest in fp32, so that a position of 10^5 and more keeps fp32 accuracy.
// Bound by memory: two kernels, one that moves 16 bytes a lane and one for what is not aligned to that.
#include <cmath>

#include "cuda/rope/rope.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/divisor.cuh"
#include "cuda/tile/held_row.cuh"
#include "cuda/tile/rope.cuh"
#include "cuda/pipeline/turn.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) rope_kernel(const RopeParams p, int head_groups) {
  take_turn();
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

constexpr int kVectorThreads = 128;
constexpr int kManyHeads = 4;                    // of a thread, where there are enough threads
constexpr int kTableHeads = 2;                   // the same by a table: no sines to share, so more and shorter blocks
constexpr std::int64_t kLeavingFrom = 32 << 20;  // bytes of results: of 25 MB a reader after the call found most in L2

/// How blocks are numbered: (batch, token block, head group), tokens or heads fastest, as they are in memory. A group
/// is of q or of k. By divisors: a thread knows where its row of the table lies before anything else.
struct BlockOrder {
  Divisor inner, outer;  // token blocks and head groups, the fastest first
  Divisor columns;       // of a token: a thread takes one
  unsigned tokens;       // of a block
  unsigned head_groups_q;
  bool heads_fastest;
  bool results_leave;  // the L2 cache gives them up first: they are more than it would keep for who reads them next
};

/// As many neighbours of a table, of fp32 or of T, as a vector of T has elements, as the words that they are in memory:
/// asked for at one place, made floats at another.
template <class T>
struct TableRow {
  static constexpr int N = kVectorElements<T>;
  Words<float> words[N / 4] = {};

  /// Kept in the cache: every group of heads reads the same rows.
  __device__ void load(const void* table, bool is_fp32, std::int64_t at) {
    const char* const from =
        static_cast<const char*>(table) + at * static_cast<int>(is_fp32 ? sizeof(float) : sizeof(T));
#pragma unroll
    for (int i = 0; i < N / 4; ++i) ptx::load_16_kept(words[i].words, from + i * 16, i == 0 || is_fp32);
  }
  __device__ void floats(bool is_fp32, float (&out)[N]) const {
    if (!is_fp32) return reinterpret_cast<const Words<T>&>(words[0]).floats(out);
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = __uint_as_float(words[i / 4].words[i % 4]);
  }
};

/// A block takes a few tokens of kHeads heads and no loop: the blocks that run at a time lie side by side in memory. A
/// thread takes the same N pairs (or N elements that pass through) of its token in every head, with all loads under way
/// while it works out the sines. Of a large call the L2 cache is told to keep q and k until they are read. A small one,
/// of a head a thread, fits. kWhole: all of a head rotates, and both stores of a pair's neighbours stand side by side.
template <class T, bool kInterleaved, int kHeads, bool kWhole>
__global__ void __launch_bounds__(kVectorThreads, kHeads == kTableHeads ? 8 : 5)
    rope_vectors_kernel(const RopeParams p, const __grid_constant__ RopeFrequencies frequencies,
                        const BlockOrder order) {
  take_turn();
  constexpr int N = kVectorElements<T>;
  constexpr bool kIsSmall = kHeads == 1;
  using Vector = Packed<T, N>;
  const auto load = [](const T* from) { return kIsSmall ? load_vector<N>(from) : load_kept<N>(from, true); };
  const auto store = [&](T* to, const Vector& vector) {
    if (!kIsSmall && !kInterleaved && order.results_leave)  // interleaved: 2 to 5 % slower so
      store_leaving(to, vector);
    else
      *reinterpret_cast<Vector*>(to) = vector;
  };
  const int half = static_cast<int>(p.spec.rotary_dim / 2), rotating = half / N;
  const unsigned my_token = order.columns.divide(threadIdx.x);
  const int column = static_cast<int>(threadIdx.x - my_token * order.columns.value);
  const bool rotates = kWhole || column < rotating;
  const int first = !rotates       ? static_cast<int>(p.spec.rotary_dim) + (column - rotating) * N
                    : kInterleaved ? 2 * column * N
                                   : column * N;
  const int second = !rotates ? first : kInterleaved ? first + N : first + half;

  const unsigned outer_index = order.inner.divide(blockIdx.x);
  const unsigned inner = blockIdx.x - outer_index * order.inner.value;
  const unsigned batch = order.outer.divide(outer_index), outer = outer_index - batch * order.outer.value;
  const std::int64_t b = batch;
  const unsigned group = order.heads_fastest ? inner : outer;
  const bool is_q = group < order.head_groups_q;
  const int first_head = static_cast<int>(is_q ? group : group - order.head_groups_q) * kHeads;
  const int heads = static_cast<int>(is_q ? p.heads_q : p.heads_kv) - first_head;  // from there on
  // Who has no token reads the last one and stores nothing: no load stands after a branch.
  const unsigned at = (order.heads_fastest ? outer : inner) * order.tokens + my_token;
  const auto seq = static_cast<unsigned>(p.seq);
  const bool stores = my_token < order.tokens && at < seq;
  const std::int64_t token = min(at, seq - 1);

  // The row of the table first: it is on its way while the heads are asked for. Not where memory says which row: the
  // heads do not wait for that.
  const bool looks_up = rotates && p.cos, has_positions = p.positions && !p.table_is_per_token;
  const bool is_fp32 = p.table_dtype == DType::kFloat32;
  TableRow<T> cosines, sines;
  const auto load_row = [&](std::int64_t row) {
    cosines.load(p.cos, is_fp32, b * p.stride_table_batch + row * p.stride_table_row + column * N);
    sines.load(p.sin, is_fp32, b * p.stride_sin_batch + row * p.stride_sin_row + column * N);
  };
  if (looks_up && !has_positions) load_row(token);

  // Not one branch: a load after a branch waits for the one before it. Heads past the last are the last again, and what
  // does not rotate is loaded twice.
  const std::int64_t stride_head = is_q ? p.stride_q_head : p.stride_k_head;
  const T* const in = static_cast<const T*>(is_q ? p.q : p.k) + b * (is_q ? p.stride_q_batch : p.stride_k_batch) +
                      first_head * stride_head + token * (is_q ? p.stride_q_token : p.stride_k_token);
  Vector x[kHeads], y[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const T* const head = in + min(i, heads - 1) * stride_head;
    x[i] = load(head + first);
    y[i] = load(head + second);
  }

  std::int64_t position = token;
  if (has_positions) {
    position = p.position(b, token);
    if (looks_up) load_row(position);
  }
  float cosine[N], sine[N];
  if (looks_up) {
    cosines.floats(is_fp32, cosine);
    sines.floats(is_fp32, sine);
  } else if (rotates) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      rope_angle(position, half_turns_per_token(p.spec, frequencies, column * N + i), &cosine[i], &sine[i]);
  }
  if (rotates && p.spec.inverse) {
#pragma unroll
    for (int i = 0; i < N; ++i) sine[i] = -sine[i];
  }
  if (!stores) return;

  const std::int64_t stride_out_head = is_q ? p.stride_q_out_head : p.stride_k_out_head;
  T* const out = static_cast<T*>(is_q ? p.q_out : p.k_out) + b * (is_q ? p.stride_q_out_batch : p.stride_k_out_batch) +
                 first_head * stride_out_head + token * (is_q ? p.stride_q_out_token : p.stride_k_out_token);
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i >= heads) break;
    T* const head = out + i * stride_out_head;
    if (rotates) {
      rotate_pairs<kInterleaved>(x[i], y[i], cosine, sine);
      store(head + second, y[i]);
    }
    store(head + first, x[i]);
  }
}

bool vectorizable(const RopeParams& p) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(p.dtype)), elements = 16 / bytes;
  const auto fits = [&](const void* data, std::int64_t batch, std::int64_t head, std::int64_t token) {
    return is_aligned(data, 16) && (p.batch == 1 || batch % elements == 0) && head % elements == 0 &&
           (p.seq == 1 || token % elements == 0);
  };
  // From a table, of any dtype, a thread reads as many numbers at once as from x.
  const auto table_fits = [&](const void* data, std::int64_t batch, std::int64_t row) {
    const auto size = std::min<std::int64_t>(16, elements * static_cast<std::int64_t>(dtype_bytes(p.table_dtype)));
    const std::int64_t at_once = size / static_cast<std::int64_t>(dtype_bytes(p.table_dtype));
    return is_aligned(data, static_cast<std::size_t>(size)) && (p.batch == 1 || batch % at_once == 0) &&
           row % at_once == 0;
  };
  // A table of the other 16-bit dtype, or of 16 bits with q in fp32, is read number by number.
  if (p.cos && p.table_dtype != DType::kFloat32 && p.table_dtype != p.dtype) return false;
  if (p.cos && !(table_fits(p.cos, p.stride_table_batch, p.stride_table_row) &&
                 table_fits(p.sin, p.stride_sin_batch, p.stride_sin_row)))
    return false;
  return p.spec.rotary_dim % (2 * elements) == 0 && p.head_dim % elements == 0 &&
         p.head_dim <= kVectorThreads * elements && p.spec.rotary_dim <= 2 * kMostFrequencies &&
         p.batch * p.seq * (p.heads_q + p.heads_kv) <= 0x7fffffff &&
         fits(p.q, p.stride_q_batch, p.stride_q_head, p.stride_q_token) &&
         fits(p.q_out, p.stride_q_out_batch, p.stride_q_out_head, p.stride_q_out_token) &&
         (p.heads_kv == 0 || (fits(p.k, p.stride_k_batch, p.stride_k_head, p.stride_k_token) &&
                              fits(p.k_out, p.stride_k_out_batch, p.stride_k_out_head, p.stride_k_out_token)));
}

void rope_vectors(const RopeParams& p, cudaStream_t stream) {
  const RopeFrequencies frequencies = rope_frequencies(p.spec);
  const std::int64_t elements = 16 / static_cast<std::int64_t>(dtype_bytes(p.dtype));
  const std::int64_t columns = (p.head_dim - p.spec.rotary_dim / 2) / elements;
  const std::int64_t tokens = kVectorThreads / columns, token_blocks = ceil_div(p.seq, tokens);
  const std::int64_t heads = p.heads_q + p.heads_kv;
  // Few blocks: a head each, for latency.
  const bool is_few =
      p.batch * token_blocks * heads < std::int64_t{8} * kManyHeads * cuda_device_properties(p.device.index).num_sms;
  // Four heads wait together for a row of the table that memory names; a head's neighbours that turn in part are no
  // faster by twos (lab/notebooks/cuda_memory_bound.md).
  const bool whole = p.spec.rotary_dim == p.head_dim, names_row = p.positions && !p.table_is_per_token;
  const bool by_twos = p.cos && !names_row && (whole || !p.spec.interleaved);
  const std::int64_t group = is_few ? 1 : by_twos ? kTableHeads : kManyHeads, groups_q = ceil_div(p.heads_q, group);
  const std::int64_t head_groups = groups_q + ceil_div(p.heads_kv, group);
  const bool heads_fastest = p.heads_q > 0 ? p.stride_q_head < p.stride_q_token : p.stride_k_head < p.stride_k_token;
  const BlockOrder order{
      Divisor(heads_fastest ? head_groups : token_blocks),
      Divisor(heads_fastest ? token_blocks : head_groups),
      Divisor(columns),
      static_cast<unsigned>(tokens),
      static_cast<unsigned>(groups_q),
      heads_fastest,
      p.batch * p.seq * heads * p.head_dim * static_cast<std::int64_t>(dtype_bytes(p.dtype)) > kLeavingFrom};
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto launch_with = [&](auto kernel) {
      launch("rope", kernel,
             {static_cast<unsigned>(p.batch * token_blocks * head_groups), kVectorThreads, 0, stream, true}, p,
             frequencies, order);
    };
    if (is_few)
      return launch_with(p.spec.interleaved ? rope_vectors_kernel<T, true, 1, false>
                                            : rope_vectors_kernel<T, false, 1, false>);
    if (!p.spec.interleaved)
      return launch_with(by_twos ? rope_vectors_kernel<T, false, kTableHeads, false>
                                 : rope_vectors_kernel<T, false, kManyHeads, false>);
    if (!whole) return launch_with(rope_vectors_kernel<T, true, kManyHeads, false>);
    launch_with(by_twos ? rope_vectors_kernel<T, true, kTableHeads, true>
                        : rope_vectors_kernel<T, true, kManyHeads, true>);
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
           {grid_size(ceil_div(items, kThreads), p.device.index, 32), kThreads, 0, native(stream), true}, p,
           head_groups);
  });
}

}  // namespace flashkernel::cuda
