// FlashAttention backward (Dao et al., 2022; Algorithm 4) in plain FFMA, split so that no sum is shared by two blocks.
// One block owns a tile of queries and sums dQ over the keys. Another one owns a tile of keys and sums dK and dV over
// the queries of its head group. Both compute the scores again. Every sum has a fixed order, so the gradients are the
// same bit for bit every time. One kernel serves all dtypes, which differ in how tiles are loaded and rows are stored.
//
//   D = rowsum(dO * O) - dLSE    P = exp(S - LSE)    dV = P^T dO    dP = dO V^T    dS = P * (dP - D)
//   dQ = dS K    dK = dS^T Q
#include <algorithm>

#include "cuda/attention/generic_tile.cuh"
#include "cuda/attention/generic.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/ptx/grid.cuh"

namespace flashkernel::cuda {
namespace {

// D of every query, laid out [batch, heads_q, seq_q].
__device__ inline std::int64_t delta_index(const AttentionParams& p, std::int64_t b, std::int64_t h, std::int64_t i) {
  return (b * p.heads_q + h) * p.seq_q + i;
}

// A dense or variable-length offset by a gradient's own strides; `begin` is the sequence's first row.
__device__ inline std::int64_t grad_offset(bool varlen, std::int64_t begin, std::int64_t b, std::int64_t h,
                                           std::int64_t i, std::int64_t stride_batch, std::int64_t stride_head,
                                           std::int64_t stride_token) {
  return (varlen ? (begin + i) * stride_token : b * stride_batch + i * stride_token) + h * stride_head;
}

__device__ inline std::int64_t grad_out_offset(const AttentionBackwardParams& p, std::int64_t b, std::int64_t h,
                                               std::int64_t i) {
  return grad_offset(p.forward.is_varlen_q(), p.forward.q_begin(b), b, h, i, p.stride_grad_out_batch,
                     p.stride_grad_out_head, p.stride_grad_out_token);
}

// Rows of keys and values, which are never in pages here: AttentionParams' own offsets would divide by the page size.
__device__ inline std::int64_t k_offset(const AttentionParams& p, std::int64_t b, std::int64_t g, std::int64_t j) {
  return grad_offset(p.is_varlen_k(), p.k_begin(b), b, g, j, p.stride_k_batch, p.stride_k_head, p.stride_k_token);
}
__device__ inline std::int64_t v_offset(const AttentionParams& p, std::int64_t b, std::int64_t g, std::int64_t j) {
  return grad_offset(p.is_varlen_k(), p.k_begin(b), b, g, j, p.stride_v_batch, p.stride_v_head, p.stride_v_token);
}

constexpr int kDeltaThreads = 128;

template <class T>
__global__ void __launch_bounds__(kDeltaThreads) delta_kernel(const AttentionBackwardParams p, float* delta) {
  const AttentionParams& f = p.forward;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kDeltaThreads / kWarp) + threadIdx.x / kWarp;
  const std::int64_t i = row % f.seq_q, h = row / f.seq_q % f.heads_q, b = row / f.seq_q / f.heads_q;
  if (b >= f.batch || i >= f.q_length(b)) return;
  const T* out = static_cast<const T*>(f.out) + f.out_offset(b, h, i);
  const T* grad_out = static_cast<const T*>(p.grad_out) + grad_out_offset(p, b, h, i);
  float sum = 0.0f;
  for (std::int64_t d = threadIdx.x % kWarp; d < f.head_dim_v; d += kWarp)
    sum = fmaf(to_float(out[d]), to_float(grad_out[d]), sum);
  sum = warp_reduce(sum, Sum{});
  if (p.grad_lse)
    sum -= p.grad_lse[grad_offset(f.is_varlen_q(), f.q_begin(b), b, h, i, p.stride_grad_lse_batch,
                                  p.stride_grad_lse_head, p.stride_grad_lse_token)];
  if (threadIdx.x % kWarp == 0) delta[delta_index(f, b, h, i)] = sum;
}

// What a pair (query, key) gives: its probability (kMasked when the pair gives nothing, whatever the operands hold),
// and the gradients of the modified score (bias) and of the dot product.
struct PairGradient {
  float probability, score, dot;
};

__device__ inline PairGradient pair_gradient(const AttentionParams& p, const ScoreContext& at, std::int64_t i,
                                             std::int64_t j, float dot, float grad_probability, float lse,
                                             float lse_rest, float delta) {
  PairGradient pair{kMasked, 0.0f, 0.0f};
  if (lse == -INFINITY) return pair;  // a row that sees nothing: exp(s + inf) must not be formed
  float capped;
  const float s = modified_score(p, at, i, j, dot, &capped);
  if (s == -INFINITY) return pair;  // a bias of -inf masks like any other mask
  pair.probability = expf((s - lse) - lse_rest);
  pair.score = pair.probability * (grad_probability - delta);
  pair.dot = pair.score * p.scale;
  if (p.softcap > 0.0f) {
    const float t = capped / p.softcap;
    pair.dot *= 1.0f - t * t;
  }
  return pair;
}

// What a block knows of rows of queries, and where D lies. The kernels of an architecture leave -D; `sign` is -1 then.
struct Tiles {
  const float* delta;  // [batch, heads_q, pitch]
  std::int64_t pitch;
  float sign;
  bool vectors;           // rows start at multiples of 16 bytes
  const float* lse_rest;  // [batch, heads_q, seq_q]; null: all 0

  __device__ float delta_of(const AttentionParams& p, std::int64_t b, std::int64_t h, std::int64_t i) const {
    return sign * delta[(b * p.heads_q + h) * pitch + i];
  }
  __device__ float rest_of(const AttentionParams& p, std::int64_t b, std::int64_t h, std::int64_t i) const {
    return lse_rest ? lse_rest[(b * p.heads_q + h) * p.seq_q + i] : 0.0f;
  }
};

// The number of tiles of queries, or of keys, in all sequences and heads. attention_bwd_supports makes sure that both
// fit 32 bits.
template <class Tile>
FK_HOST_DEVICE inline unsigned num_query_tiles(const AttentionBackwardParams& p) {
  const AttentionParams& f = p.forward;
  return p.grad_q ? static_cast<unsigned>((f.seq_q + Tile::kBlockM - 1) / Tile::kBlockM * f.heads_q * f.batch) : 0;
}
template <class Tile>
FK_HOST_DEVICE inline unsigned num_key_tiles(const AttentionBackwardParams& p) {
  const AttentionParams& f = p.forward;
  if (!p.grad_k && !p.grad_v) return 0;
  return static_cast<unsigned>((f.seq_k + Tile::kBlockM - 1) / Tile::kBlockM * f.heads_kv * f.batch);
}

// Shared memory in fp32: the block's own two operands [kBlockM][QkRows::kLd] and [kBlockM][VRows::kLd], one operand of
// the other side [kBlockN][kWidestLd], and two tiles [kBlockM][kLdP]. Of rows in slices there is one slice of each at a
// time, and those of the block's own are loaded again for each tile of the other side.
template <class Tile>
constexpr int kSharedBytes = (Tile::kBlockM * (Tile::QkRows::kLd + Tile::VRows::kLd) + Tile::kBlockN * Tile::kWidestLd +
                              2 * Tile::kBlockM * Tile::kLdP) *
                             4;

template <class Tile>
__device__ void grad_q_tile(const AttentionBackwardParams& p, const Tiles& tiles, unsigned x, unsigned y, unsigned z,
                            float* tile_q) {
  using QkRows = typename Tile::QkRows;
  using VRows = typename Tile::VRows;
  constexpr bool kStays = Tile::kSlices == 1;  // the own rows, in shared memory
  float* tile_do = tile_q + Tile::kBlockM * QkRows::kLd;
  float* tile_kv = tile_do + Tile::kBlockM * VRows::kLd;
  float* tile_ds = tile_kv + Tile::kBlockN * Tile::kWidestLd;
  float* tile_p = tile_ds + Tile::kBlockM * Tile::kLdP;
  const AttentionParams& f = p.forward;
  const bool vectors = tiles.vectors;
  const std::int64_t b = z, h = y, g = h * f.heads_kv / f.heads_q;
  const ScoreContext at(f, b, h);
  const std::int64_t first_query = static_cast<std::int64_t>(x) * Tile::kBlockM;
  if (first_query >= at.q_len) return;
  const std::int64_t last_query = min(at.q_len, first_query + Tile::kBlockM) - 1;
  const std::int64_t first_key = f.first_key(first_query, at.q_len, at.k_len);
  const std::int64_t last_key = f.last_key(last_query, at.q_len, at.k_len);
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;

  const auto load_q = [&](int s) {
    load_rows<QkRows, Tile::kBlockM>(tile_q, f.q, f.dtype, f.head_dim - s * Tile::kQkDim, vectors,
                                     at.q_len - first_query,
                                     [&](int row) { return f.q_offset(b, h, first_query + row) + s * Tile::kQkDim; });
  };
  const auto load_do = [&](int s) {
    load_rows<VRows, Tile::kBlockM>(
        tile_do, p.grad_out, f.dtype, f.head_dim_v - s * Tile::kVDim, vectors, at.q_len - first_query,
        [&](int row) { return grad_out_offset(p, b, h, first_query + row) + s * Tile::kVDim; });
  };
  if constexpr (kStays) load_q(0), load_do(0);

  float grad_q[Tile::kSlices][Tile::kRowsM][QkRows::kColumns][4] = {};
  for (std::int64_t tile = first_key; tile < last_key; tile += Tile::kBlockN) {
    const auto load_k = [&](int s) {
      load_rows<QkRows, Tile::kBlockN>(tile_kv, f.k, f.dtype, f.head_dim - s * Tile::kQkDim, vectors, last_key - tile,
                                       [&](int row) { return k_offset(f, b, g, tile + row) + s * Tile::kQkDim; });
    };
    float grad_p[Tile::kRowsM][Tile::kRowsN] = {}, dot[Tile::kRowsM][Tile::kRowsN] = {};
#pragma unroll 1
    for (int s = 0; s < Tile::kSlices; ++s) {
      __syncthreads();
      if constexpr (!kStays) load_do(s);
      load_rows<VRows, Tile::kBlockN>(tile_kv, f.v, f.dtype, f.head_dim_v - s * Tile::kVDim, vectors, last_key - tile,
                                      [&](int row) { return v_offset(f, b, g, tile + row) + s * Tile::kVDim; });
      __syncthreads();
      row_products<VRows>(grad_p, tile_do, tile_kv);
    }
#pragma unroll 1
    for (int s = 0; s < Tile::kSlices; ++s) {
      __syncthreads();
      if constexpr (!kStays) load_q(s);
      load_k(s);
      __syncthreads();
      row_products<QkRows>(dot, tile_q, tile_kv);
    }
#pragma unroll
    for (int r = 0; r < Tile::kRowsM; ++r) {
      const std::int64_t i = first_query + ty + 16 * r;
      const bool inside = i < at.q_len;
      const float lse = inside ? f.lse[f.lse_offset(b, h, i)] : -INFINITY;
      const float rest = inside ? tiles.rest_of(f, b, h, i) : 0.0f;
      const float d = inside ? tiles.delta_of(f, b, h, i) : 0.0f;
#pragma unroll
      for (int c = 0; c < Tile::kRowsN; ++c) {
        const std::int64_t j = tile + tx + 16 * c;
        const bool visible = inside && j >= f.first_key(i, at.q_len, at.k_len) && j < f.last_key(i, at.q_len, at.k_len);
        const int index = (ty + 16 * r) * Tile::kLdP + tx + 16 * c;
        PairGradient pair{kMasked, 0.0f, 0.0f};
        if (visible) pair = pair_gradient(f, at, i, j, dot[r][c], grad_p[r][c], lse, rest, d);
        tile_p[index] = pair.probability;
        tile_ds[index] = pair.dot;
      }
    }
    __syncthreads();
#pragma unroll
    for (int s = Tile::kSlices - 1; s >= 0; --s) {  // the last one is there
      if (s < Tile::kSlices - 1) {
        __syncthreads();
        load_k(s);
        __syncthreads();
      }
      accumulate_rows<QkRows, Tile::kBlockN>(
          grad_q[s], tile_kv, [&](int r, int n) { return tile_ds[(ty + 16 * r) * Tile::kLdP + n]; },
          [&](int r, int n) { return tile_p[(ty + 16 * r) * Tile::kLdP + n] < 0.0f; });
    }
  }
#pragma unroll
  for (int r = 0; r < Tile::kRowsM; ++r) {
    const std::int64_t i = first_query + ty + 16 * r;
    if (i >= at.q_len) continue;
    const std::int64_t row = grad_offset(f.is_varlen_q(), f.q_begin(b), b, h, i, p.stride_grad_q_batch,
                                         p.stride_grad_q_head, p.stride_grad_q_token);
#pragma unroll
    for (int s = 0; s < Tile::kSlices; ++s)
      store_row<QkRows>(p.grad_q, f.dtype, row + s * Tile::kQkDim, f.head_dim - s * Tile::kQkDim, grad_q[s][r], 1.0f);
  }
}

template <class Tile>
__device__ void grad_kv_tile(const AttentionBackwardParams& p, const Tiles& tiles, unsigned x, unsigned y, unsigned z,
                             float* tile_k) {
  using QkRows = typename Tile::QkRows;
  using VRows = typename Tile::VRows;
  constexpr bool kStays = Tile::kSlices == 1;  // the own rows, in shared memory
  float* tile_v = tile_k + Tile::kBlockM * QkRows::kLd;
  float* tile_query = tile_v + Tile::kBlockM * VRows::kLd;  // Q, then dO, then Q
  float* tile_ds = tile_query + Tile::kBlockN * Tile::kWidestLd;
  float* tile_p = tile_ds + Tile::kBlockM * Tile::kLdP;
  const AttentionParams& f = p.forward;
  const bool vectors = tiles.vectors;
  const std::int64_t b = z, g = y;
  const std::int64_t q_len = f.q_length(b), k_len = f.k_length(b), group = f.heads_q / f.heads_kv;
  const std::int64_t first_key = static_cast<std::int64_t>(x) * Tile::kBlockM;
  if (first_key >= k_len) return;
  const std::int64_t last_key = min(k_len, first_key + Tile::kBlockM) - 1;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;

  // Queries that see any key of the tile: i + k_len - q_len within the window of the first or the last key.
  const std::int64_t shift = k_len - q_len;
  const std::int64_t first_query =
      f.window_right < 0 ? 0 : max(static_cast<std::int64_t>(0), first_key - f.window_right - shift);
  const std::int64_t last_query = f.window_left < 0 ? q_len : min(q_len, last_key + f.window_left - shift + 1);

  const auto load_k = [&](int s) {
    load_rows<QkRows, Tile::kBlockM>(tile_k, f.k, f.dtype, f.head_dim - s * Tile::kQkDim, vectors, k_len - first_key,
                                     [&](int row) { return k_offset(f, b, g, first_key + row) + s * Tile::kQkDim; });
  };
  const auto load_v = [&](int s) {
    load_rows<VRows, Tile::kBlockM>(tile_v, f.v, f.dtype, f.head_dim_v - s * Tile::kVDim, vectors, k_len - first_key,
                                    [&](int row) { return v_offset(f, b, g, first_key + row) + s * Tile::kVDim; });
  };
  if constexpr (kStays) load_k(0), load_v(0);

  float grad_k[Tile::kSlices][Tile::kRowsM][QkRows::kColumns][4] = {};
  float grad_v[Tile::kSlices][Tile::kRowsM][VRows::kColumns][4] = {};
  for (std::int64_t h = g * group; h < (g + 1) * group; ++h) {
    const ScoreContext at(f, b, h);
    for (std::int64_t tile = first_query; tile < last_query; tile += Tile::kBlockN) {
      const auto load_queries = [&](int s) {
        load_rows<QkRows, Tile::kBlockN>(tile_query, f.q, f.dtype, f.head_dim - s * Tile::kQkDim, vectors,
                                         last_query - tile,
                                         [&](int row) { return f.q_offset(b, h, tile + row) + s * Tile::kQkDim; });
      };
      const auto load_grad_out = [&](int s) {
        load_rows<VRows, Tile::kBlockN>(
            tile_query, p.grad_out, f.dtype, f.head_dim_v - s * Tile::kVDim, vectors, last_query - tile,
            [&](int row) { return grad_out_offset(p, b, h, tile + row) + s * Tile::kVDim; });
      };
      float dot[Tile::kRowsM][Tile::kRowsN] = {}, grad_p[Tile::kRowsM][Tile::kRowsN] = {};
#pragma unroll 1
      for (int s = 0; s < Tile::kSlices; ++s) {
        __syncthreads();
        if constexpr (!kStays) load_k(s);
        load_queries(s);
        __syncthreads();
        row_products<QkRows>(dot, tile_k, tile_query);
      }
#pragma unroll 1
      for (int s = 0; s < Tile::kSlices; ++s) {
        __syncthreads();
        if constexpr (!kStays) load_v(s);
        load_grad_out(s);
        __syncthreads();
        row_products<VRows>(grad_p, tile_v, tile_query);
      }
#pragma unroll
      for (int c = 0; c < Tile::kRowsN; ++c) {
        const std::int64_t i = tile + tx + 16 * c;
        const bool inside = i < last_query;
        const float lse = inside ? f.lse[f.lse_offset(b, h, i)] : -INFINITY;
        const float rest = inside ? tiles.rest_of(f, b, h, i) : 0.0f;
        const float d = inside ? tiles.delta_of(f, b, h, i) : 0.0f;
#pragma unroll
        for (int r = 0; r < Tile::kRowsM; ++r) {
          const std::int64_t j = first_key + ty + 16 * r;
          const bool visible = inside && j >= f.first_key(i, q_len, k_len) && j < f.last_key(i, q_len, k_len);
          const int index = (ty + 16 * r) * Tile::kLdP + tx + 16 * c;
          PairGradient pair{kMasked, 0.0f, 0.0f};
          if (visible) pair = pair_gradient(f, at, i, j, dot[r][c], grad_p[r][c], lse, rest, d);
          tile_p[index] = pair.probability;
          tile_ds[index] = pair.dot;
        }
      }
      __syncthreads();
      const auto masked = [&](int r, int n) { return tile_p[(ty + 16 * r) * Tile::kLdP + n] < 0.0f; };
#pragma unroll
      for (int s = Tile::kSlices - 1; s >= 0; --s) {  // the last one is there
        if (s < Tile::kSlices - 1) {
          __syncthreads();
          load_grad_out(s);
          __syncthreads();
        }
        accumulate_rows<VRows, Tile::kBlockN>(
            grad_v[s], tile_query, [&](int r, int n) { return tile_p[(ty + 16 * r) * Tile::kLdP + n]; }, masked);
      }
#pragma unroll
      for (int s = 0; s < Tile::kSlices; ++s) {
        __syncthreads();
        load_queries(s);
        __syncthreads();
        accumulate_rows<QkRows, Tile::kBlockN>(
            grad_k[s], tile_query, [&](int r, int n) { return tile_ds[(ty + 16 * r) * Tile::kLdP + n]; }, masked);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < Tile::kRowsM; ++r) {
    const std::int64_t j = first_key + ty + 16 * r;
    if (j >= k_len) continue;
    const std::int64_t row_k = grad_offset(f.is_varlen_k(), f.k_begin(b), b, g, j, p.stride_grad_k_batch,
                                           p.stride_grad_k_head, p.stride_grad_k_token);
    const std::int64_t row_v = grad_offset(f.is_varlen_k(), f.k_begin(b), b, g, j, p.stride_grad_v_batch,
                                           p.stride_grad_v_head, p.stride_grad_v_token);
#pragma unroll
    for (int s = 0; s < Tile::kSlices; ++s) {
      if (p.grad_k)
        store_row<QkRows>(p.grad_k, f.dtype, row_k + s * Tile::kQkDim, f.head_dim - s * Tile::kQkDim, grad_k[s][r],
                          1.0f);
      if (p.grad_v)
        store_row<VRows>(p.grad_v, f.dtype, row_v + s * Tile::kVDim, f.head_dim_v - s * Tile::kVDim, grad_v[s][r],
                         1.0f);
    }
  }
}

// One thread per element of the bias's gradient; it walks the dims over which the bias is broadcast.
__device__ inline void grad_bias_elements(const AttentionBackwardParams& p, const Tiles& tiles) {
  const AttentionParams& f = p.forward;
  const std::int64_t* shape = p.grad_bias_shape;
  const std::int64_t count = shape[0] * shape[1] * shape[2] * shape[3];
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kTileThreads;
  for (std::int64_t e = static_cast<std::int64_t>(blockIdx.x) * kTileThreads + threadIdx.x; e < count; e += step) {
    const std::int64_t x3 = e % shape[3], x2 = e / shape[3] % shape[2], x1 = e / shape[3] / shape[2] % shape[1];
    const std::int64_t x0 = e / shape[3] / shape[2] / shape[1];
    float sum = 0.0f;
    for (std::int64_t b = x0; b < (shape[0] == 1 ? f.batch : x0 + 1); ++b) {
      for (std::int64_t h = x1; h < (shape[1] == 1 ? f.heads_q : x1 + 1); ++h) {
        const ScoreContext at(f, b, h);
        const std::int64_t g = h * f.heads_kv / f.heads_q;
        for (std::int64_t i = x2; i < (shape[2] == 1 ? at.q_len : x2 + 1); ++i) {
          if (i >= at.q_len) break;
          const std::int64_t first = f.first_key(i, at.q_len, at.k_len), last = f.last_key(i, at.q_len, at.k_len);
          const std::int64_t from = shape[3] == 1 ? first : max(x3, first),
                             to = shape[3] == 1 ? last : min(x3 + 1, last);
          for (std::int64_t j = from; j < to; ++j) {
            float dot = 0.0f, grad_p = 0.0f;
            const std::int64_t q = f.q_offset(b, h, i), k = k_offset(f, b, g, j);
            const std::int64_t grad_out = grad_out_offset(p, b, h, i), v = v_offset(f, b, g, j);
            for (std::int64_t d = 0; d < f.head_dim; ++d)
              dot = fmaf(load_typed(f.q, f.dtype, q + d), load_typed(f.k, f.dtype, k + d), dot);
            for (std::int64_t d = 0; d < f.head_dim_v; ++d)
              grad_p = fmaf(load_typed(p.grad_out, f.dtype, grad_out + d), load_typed(f.v, f.dtype, v + d), grad_p);
            sum += pair_gradient(f, at, i, j, dot, grad_p, f.lse[f.lse_offset(b, h, i)], tiles.rest_of(f, b, h, i),
                                 tiles.delta_of(f, b, h, i))
                       .score;
          }
        }
      }
    }
    store_typed(p.grad_bias, p.grad_bias_dtype,
                x0 * p.stride_grad_bias[0] + x1 * p.stride_grad_bias[1] + x2 * p.stride_grad_bias[2] +
                    x3 * p.stride_grad_bias[3],
                sum);
  }
}

__global__ void __launch_bounds__(kTileThreads) grad_bias_kernel(const AttentionBackwardParams p, const Tiles tiles) {
  grad_bias_elements(p, tiles);
}

// Computes dQ of all tiles of queries, then dK and dV of all tiles of keys, which are dealt out over the blocks. With
// flags, it computes all of them again, and the gradient of the bias, if a tensor-core kernel has found that some
// gradient is not finite: that kernel cannot tell a masked NaN from a visible one, this kernel can. It then has few
// blocks, so that it costs little when there is nothing to do.
template <class Tile>
__global__ void __launch_bounds__(kTileThreads, Tile::kSlices > 1                           ? 1
                                                : std::max(Tile::kQkDim, Tile::kVDim) > 128 ? 3
                                                                                            : 2)
    gradients_kernel(const AttentionBackwardParams p, const Tiles tiles, const int* flags, int num_flags) {
  extern __shared__ float4 shared[];
  ptx::wait_for_previous_kernel();
  if (flags) {
    int any = 0;
    for (int at = threadIdx.x; at < num_flags; at += kTileThreads) any |= flags[at];
    if (!__syncthreads_or(any)) return;
  }
  float* const memory = reinterpret_cast<float*>(shared);
  const AttentionParams& f = p.forward;
  const unsigned of_queries = num_query_tiles<Tile>(p), all = of_queries + num_key_tiles<Tile>(p);
  for (unsigned at = blockIdx.x; at < all; at += gridDim.x) {
    const bool queries = at < of_queries;
    const auto length = static_cast<unsigned>(queries ? f.seq_q : f.seq_k);
    const auto heads = static_cast<unsigned>(queries ? f.heads_q : f.heads_kv);
    const unsigned count = (length + Tile::kBlockM - 1) / Tile::kBlockM;  // tiles of a head
    const unsigned index = queries ? at : at - of_queries, head = index / count;
    const unsigned tile = index - head * count, b = head / heads, h = head - b * heads;
    if (queries)
      grad_q_tile<Tile>(p, tiles, tile, h, b, memory);
    else
      grad_kv_tile<Tile>(p, tiles, tile, h, b, memory);
    __syncthreads();
  }
  if (flags && p.grad_bias) grad_bias_elements(p, tiles);
}

// d loss / d sink of a head: -exp(sink - LSE) * D summed over its queries.
__global__ void __launch_bounds__(kTileThreads) grad_sinks_kernel(const AttentionBackwardParams p, const Tiles tiles) {
  __shared__ float scratch[kTileThreads / kWarp];
  const AttentionParams& f = p.forward;
  const std::int64_t h = blockIdx.x;
  float sum = 0.0f;
  for (std::int64_t row = threadIdx.x; row < f.batch * f.seq_q; row += kTileThreads) {
    const std::int64_t b = row / f.seq_q, i = row % f.seq_q;
    if (i >= f.q_length(b)) continue;
    const float lse = f.lse[f.lse_offset(b, h, i)];
    if (lse == -INFINITY || f.sinks[h] == -INFINITY) continue;  // no sink: it weighs nothing
    sum -= expf((f.sinks[h] - lse) - tiles.rest_of(f, b, h, i)) * tiles.delta_of(f, b, h, i);
  }
  sum = block_reduce<kTileThreads>(sum, scratch, Sum{});
  if (threadIdx.x == 0) p.grad_sinks[h] = sum;
}

bool rows_are_vectors(const AttentionBackwardParams& p) {
  const AttentionParams& f = p.forward;
  const auto N = static_cast<std::int64_t>(16 / dtype_bytes(f.dtype));
  const auto fits = [N](const void* data, std::int64_t a, std::int64_t b, std::int64_t c) {
    return is_aligned(data, 16) && a % N == 0 && b % N == 0 && c % N == 0;
  };
  return f.head_dim % 4 == 0 && f.head_dim_v % 4 == 0 &&
         fits(f.q, f.stride_q_batch, f.stride_q_head, f.stride_q_token) &&
         fits(f.k, f.stride_k_batch, f.stride_k_head, f.stride_k_token) &&
         fits(f.v, f.stride_v_batch, f.stride_v_head, f.stride_v_token) &&
         fits(p.grad_out, p.stride_grad_out_batch, p.stride_grad_out_head, p.stride_grad_out_token);
}

// f(Tile{}) with the tiles for a head dim: the 64 KB of 7.5 hold them (60, 60, 52 and 52 KB).
template <class F>
void visit_tile(std::int64_t dim, F&& f) {
  if (dim <= 64) {
    f(Tile<64, 32, 64, 64>{});
  } else if (dim <= 128) {
    f(Tile<32, 32, 128, 128>{});
  } else if (dim <= 256) {
    f(Tile<16, 16, 256, 256>{});
  } else {
    f(Tile<16, 16, 256, 256, 2>{});
  }
}

}  // namespace

Verdict attention_bwd_supports(const AttentionBackwardParams& p) {
  const AttentionParams& f = p.forward;
  if (f.is_paged()) return "it takes no paged keys and values";
  if (f.batch > 65535 || f.heads_q > 65535) return "batch or heads_q is over 65535";
  if (f.seq_q > 0x7fffffff || f.seq_k > 0x7fffffff) return "seq_q or seq_k is over 2^31";
  if (f.batch * f.heads_q * ((f.seq_q + 15) / 16 + (f.seq_k + 15) / 16) > 0x7fffffff)
    return "too many tiles for one grid";
  return Verdict::ok();
}

std::size_t attention_bwd_workspace(const AttentionBackwardParams& p) {
  return sizeof(float) * static_cast<std::size_t>(p.forward.batch * p.forward.heads_q * p.forward.seq_q) +
         large_rows_workspace(p);
}

void attention_bwd(const AttentionBackwardParams& p, void* workspace, Stream stream) {
  const AttentionParams& f = p.forward;
  const CudaDeviceGuard guard(f.device.index);
  const cudaStream_t s = native(stream);
  auto* delta = static_cast<float*>(workspace);
  const std::int64_t rows = f.batch * f.heads_q * f.seq_q;
  const std::int64_t dim = std::max(f.head_dim, f.head_dim_v);
  if (rows > 0) {
    visit_floating(f.dtype, [&](auto zero) {
      launch("attention_bwd: delta", delta_kernel<decltype(zero)>,
             {static_cast<unsigned>(ceil_div(rows, kDeltaThreads / kWarp)), kDeltaThreads, 0, s}, p, delta);
    });
  }
  const LargeRows large = find_large_rows(p, delta + rows, false, stream);
  const Tiles at{delta, f.seq_q, 1.0f, rows_are_vectors(p), large.rest};
  visit_tile(dim, [&](auto tile) {
    using Tile = decltype(tile);
    const unsigned tiles = num_query_tiles<Tile>(p) + num_key_tiles<Tile>(p);
    if (tiles == 0) return;
    launch("attention_bwd", gradients_kernel<Tile>, {tiles, kTileThreads, kSharedBytes<Tile>, s}, p, at,
           static_cast<const int*>(nullptr), 0);
  });
  const std::int64_t elements =
      p.grad_bias_shape[0] * p.grad_bias_shape[1] * p.grad_bias_shape[2] * p.grad_bias_shape[3];
  if (p.grad_bias && elements > 0) {
    launch("attention_bwd: grad_bias", grad_bias_kernel,
           {grid_size(ceil_div(elements, kTileThreads), f.device.index, 32), kTileThreads, 0, s}, p, at);
  }
  if (p.grad_sinks && f.heads_q > 0) {
    launch("attention_bwd: grad_sinks", grad_sinks_kernel, {static_cast<unsigned>(f.heads_q), kTileThreads, 0, s}, p,
           at);
  }
}

void attention_bwd_repair(const AttentionBackwardParams& p, const float* negative_delta, std::int64_t pitch,
                          const int* flags, int num_flags, const float* lse_rest, Stream stream) {
  const AttentionParams& f = p.forward;
  const CudaDeviceGuard guard(f.device.index);
  const auto blocks = static_cast<unsigned>(2 * cuda_device_properties(f.device.index).num_sms);
  visit_tile(std::max(f.head_dim, f.head_dim_v), [&](auto tile) {
    using Tile = decltype(tile);
    launch("attention_bwd: repair", gradients_kernel<Tile>,
           {blocks, kTileThreads, kSharedBytes<Tile>, native(stream), true}, p,
           Tiles{negative_delta, pitch, -1.0f, rows_are_vectors(p), lse_rest}, flags, num_flags);
  });
}

}  // namespace flashkernel::cuda
