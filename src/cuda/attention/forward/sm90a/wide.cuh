// Attention forward for Hopper with head dims over 256. A block owns 64 queries: its output takes all registers of two
// warpgroups, half of the columns each. Each warpgroup computes the scores of half of a block's keys. They hand each
// other row maxima and probabilities through shared memory, whence the probabilities are operands of both.
//
// 64 queries ask for twice the keys and values that 128 do, more than the L2 cache delivers. Therefore two blocks,
// whose queries are neighbours, form a cluster, and each loads half of every piece of K and V for both. A piece is free
// again once the consumers of both have read it. Pieces of K are 64 columns, those of V 16 keys, so that they become
// free one after the other while products go on. instances/ has the files that instantiate it.
//
//   S(j + 1) = Q K^T    O += P(j) V    softmax of S(j + 1), while the second product is under way    and so on
//
// The invariant on NaN is that of kernel.cuh: a row whose result is not finite, and that met a masked block, is
// computed again (redo_row).
#pragma once

#include <numeric>

#include "cuda/attention/forward/sm90a/epilogue.cuh"
#include "cuda/attention/forward/sm90a/redo.cuh"
#include "cuda/attention/forward/sm90a/variant.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace flashkernel::cuda::sm90a {

/// Tiles lie as chunks of 64 columns: 64 lines of 128 bytes, swizzled.
struct WideShape {
  static constexpr int kQkDim = 512, kVDim = 512, kBlockN = 64;
  static constexpr bool kScored = false, kSparse = false, kTakesBits = false;
  static constexpr int kThreads = 384, kChunks = 8, kUnits = 4;  // pieces of K: a chunk; of V: 16 rows of all chunks
  static constexpr int kChunkBytes = 64 * 128, kTileBytes = kChunks * kChunkBytes, kUnitBytes = kTileBytes / kUnits;
  static constexpr int kArrivals = 2 * 8;  // that free a piece: the consumers' warps of both blocks
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(2 * kConsumerRegisters + kProducerRegisters <= registers_a_row(kThreads));
  // Byte offsets in shared memory.
  static constexpr int kK = kTileBytes, kV = 2 * kTileBytes, kWeights = 3 * kTileBytes;  // two tiles of probabilities
  static constexpr int kRows = kWeights + 2 * kChunkBytes;  // a number a row from either warpgroup
  static constexpr int kBarriers = kRows + 2 * 64 * 4, kMetNan = kBarriers + (1 + 2 * kChunks + 2 * kUnits) * 8;
  static constexpr int kRecord = kMetNan + 8, kSharedBytes = kRecord + (sizeof(TileRecord) + 15) / 16 * 16;
  static_assert(kSharedBytes <= 227 * 1024, "a block of sm_90 has 227 KB");
};

/// The addresses of a block's shared memory.
struct WideShared {
  std::uint32_t base;
  __device__ std::uint32_t q(int chunk) const { return base + chunk * WideShape::kChunkBytes; }
  __device__ std::uint32_t k(int chunk) const { return q(chunk) + WideShape::kK; }
  __device__ std::uint32_t v(int chunk) const { return q(chunk) + WideShape::kV; }
  __device__ std::uint32_t weights(int slot) const { return q(slot) + WideShape::kWeights; }
  __device__ std::uint32_t q_full() const { return base + WideShape::kBarriers; }
  __device__ std::uint32_t k_full(int chunk) const { return q_full() + 8 * (1 + chunk); }
  __device__ std::uint32_t k_empty(int chunk) const { return k_full(WideShape::kChunks + chunk); }
  __device__ std::uint32_t v_full(int unit) const { return k_full(2 * WideShape::kChunks + unit); }
  __device__ std::uint32_t v_empty(int unit) const { return v_full(WideShape::kUnits + unit); }
  __device__ float* number(int warpgroup, int row) const {
    return static_cast<float*>(__cvta_shared_to_generic(base + WideShape::kRows)) + warpgroup * 64 + row;
  }
  __device__ TileRecord* record() const {
    return static_cast<TileRecord*>(__cvta_shared_to_generic(base + WideShape::kRecord));
  }
  __device__ int* met_nan() const { return static_cast<int*>(__cvta_shared_to_generic(base + WideShape::kMetNan)); }
};

struct WidePlan {
  int pairs;           // of tiles of queries, of the longest sequence: a cluster's each
  int heads_q, group;  // query heads, and of a kv head
  int k_rows, v_rows;  // that one copy brings: half of a block and a step of 16 keys, or what these share with pages
  float scale_log2;    // from what goes into the exponentials to powers of two
};

/// What a block computes; the same blocks of keys for both of a cluster.
__device__ inline TileRecord wide_tile(const AttentionParams& p, const WidePlan& plan, int rank) {
  TileRecord tile;
  const unsigned cluster = blockIdx.x / 2, pairs = static_cast<unsigned>(plan.pairs), head = cluster / pairs;
  const int pair = plan.pairs - 1 - static_cast<int>(cluster - head * pairs);  // the one with the most keys first
  tile.b = static_cast<int>(head / static_cast<unsigned>(plan.heads_q));
  tile.h = static_cast<int>(head % static_cast<unsigned>(plan.heads_q));
  tile.g = tile.h / plan.group;
  tile.round = 0;
  tile.range = KeyRange(p, tile.b);
  const int first = pair * 128, last = min(tile.range.q_len, first + 128) - 1;
  tile.first_query = first + 64 * rank;
  const int first_key = tile.range.first(first);
  tile.last_key = tile.range.last(last);
  tile.end_block = (tile.last_key + 63) / 64;
  tile.num_blocks = first >= tile.range.q_len ? -1 : tile.last_key > first_key ? tile.end_block - first_key / 64 : 0;
  tile.first_full = (tile.range.first(tile.first_query + 63) + 63) / 64;
  tile.end_full = tile.range.last(tile.first_query) / 64;
  return tile;
}

/// Where the lane's 8 keys of a block lie: lanes 0 to 7. Past the end of a sequence in pages, and for a bad id, an
/// image that is none.
struct WidePlace {
  int row = 0, image = 0;

  __device__ WidePlace(const AttentionParams& p, const TileRecord& tile, int block) {
    const int lane = static_cast<int>(threadIdx.x % 32), key = block * 64 + lane % 8 * 8;
    if (!p.is_paged()) {
      row = key + (p.is_varlen_k() ? static_cast<int>(p.k_begin(tile.b)) : 0);
      image = p.is_varlen_k() ? 0 : tile.b;
      return;
    }
    image = static_cast<int>(p.num_pages);
    if (block < 0 || key >= tile.range.k_len) return;
    const auto page_size = static_cast<unsigned>(p.page_size), column = static_cast<unsigned>(key) / page_size;
    row = key - static_cast<int>(column * page_size);
    const int page = p.block_table[tile.b * p.stride_block_table + column];
    if (page >= 0 && page < p.num_pages) image = page;
  }
  __device__ WidePlace of(int eighth) const {
    WidePlace other = *this;
    other.row = __shfl_sync(kFullMask, row, eighth);
    other.image = __shfl_sync(kFullMask, image, eighth);
    return other;
  }
};

/// One warp runs this for K and one for V: it loads its block's half of each piece, for both blocks of the cluster.
template <bool kOfV>
__device__ inline void produce_wide(const AttentionParams& p, const WidePlan& plan, const WideShared& shared,
                                    const CUtensorMap* map, const TileRecord& tile, int rank) {
  using Shape = WideShape;
  constexpr int kPieces = kOfV ? Shape::kUnits : Shape::kChunks, kBytes = Shape::kTileBytes / kPieces;
  const int lane = static_cast<int>(threadIdx.x % 32), rows = kOfV ? plan.v_rows : plan.k_rows;
  // A copy brings `rows` keys of 64 columns. Of K: rows of the block's half of the keys; of V: half of the chunks.
  const int first = kOfV ? lane / 4 * rows : rank * 32 + lane * rows;
  const int chunk_of_lane = kOfV ? rank * 4 + lane % 4 : 0;
  const bool loads = kOfV ? lane < 4 * (16 / rows) : lane < 32 / rows;
  WidePlace next(p, tile, tile.end_block - 1);
  for (int i = 0; i < tile.num_blocks; ++i) {
    const WidePlace places = next;
    next = WidePlace(p, tile, i + 1 < tile.num_blocks ? tile.end_block - 2 - i : -1);
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece) {
      const std::uint32_t full = kOfV ? shared.v_full(piece) : shared.k_full(piece);
      const int row = kOfV ? piece * 16 + first : first, chunk = kOfV ? chunk_of_lane : piece;
      const WidePlace place = places.of(row / 8 % 8);
      ptx::mbarrier_wait(kOfV ? shared.v_empty(piece) : shared.k_empty(piece), (i & 1) ^ 1);
      if (lane == 0) ptx::mbarrier_arrive_expect(full, kBytes);
      __syncwarp();
      if (loads)
        ptx::tma_load_multicast((kOfV ? shared.v(chunk) : shared.k(chunk)) + row * 128, map, full, 3,
                                ptx::l2_evict_last(), chunk * 64, place.row, tile.g, place.image);
    }
  }
}

enum WideBarrier : int { kWideMaxima = 1, kWideWeights = 2, kWideWarpgroup = 3 };  // named; the last: one of each

/// A consumer: one warpgroup, with half of the keys of the scores and half of the columns of the output.
template <class T, bool kModified>
struct WideConsumer {
  using Shape = WideShape;
  /// Steps of Q K^T, of 32, whose part of Q lies in registers: they read shared memory less.
  static constexpr int kHeld = kModified ? 8 : 11;

  const AttentionParams& p;
  const WidePlan& plan;
  const WideShared& shared;
  const TileRecord& tile;
  const int warpgroup, rank;

  float score[16];  // 64 x 32
  float out[128];   // 64 x 256
  std::uint32_t queries[kHeld][4];
  RunningRows rows;  // sums: of the warpgroup's keys

  __device__ static int row() { return static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4); }

  /// Tells both producers that the warp has read a piece.
  __device__ void release(std::uint32_t barrier) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    if (lane == 0) ptx::mbarrier_arrive(barrier);
    if (lane == 1) ptx::mbarrier_arrive_cluster(ptx::map_shared(barrier, static_cast<std::uint32_t>(rank ^ 1)));
  }

  __device__ void load_queries() {
    const int lane = threadIdx.x % 32, at = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int d = 0; d < kHeld; ++d) ptx::ldmatrix_x4(queries[d], shared.q(0) + row_chunk(at, 2 * d + lane / 16));
  }

  /// S = Q K^T of the i-th block. All but the last piece of K are free afterwards, and the probabilities of the block
  /// before are there: the wait for them costs nothing while products are under way.
  __device__ void issue_scores(int i) {
    const std::uint64_t q = ptx::matrix_descriptor(shared.q(0), 16, 1024);
    const std::uint64_t k = ptx::matrix_descriptor(shared.k(0) + warpgroup * 32 * 128, 16, 1024);
    ptx::hold(score);
#pragma unroll
    for (int c = 0; c < Shape::kChunks; ++c) {
      ptx::mbarrier_wait(shared.k_full(c), i & 1);
      ptx::wgmma_fence();
#pragma unroll
      for (int d = 4 * c; d < 4 * c + 4; ++d) {
        const std::uint32_t at = (c * Shape::kChunkBytes + d % 4 * 32) / 16;
        if (d < kHeld)
          ptx::wgmma_rs<T>(score, queries[d < kHeld ? d : 0], k + at, d > 0);
        else
          ptx::wgmma_ss<T>(score, q + at, k + at, d > 0);
      }
      ptx::wgmma_commit();
      if (c == 0) continue;
      ptx::wgmma_wait<1>();
      release(shared.k_empty(c - 1));
      if (c == 2 && i > 0) ptx::barrier_sync(kWideWeights, 256);
    }
  }

  /// O += P V of the i-th block, a batch for each piece of V; only issues.
  __device__ void issue_values(int i) {
    const std::uint64_t weights = ptx::matrix_descriptor(shared.weights(i & 1), 16, 1024);
    const std::uint64_t v = ptx::matrix_descriptor(shared.v(4 * warpgroup), Shape::kChunkBytes, 1024);
    ptx::hold(out);
#pragma unroll
    for (int n = 0; n < Shape::kUnits; ++n) {
      ptx::mbarrier_wait(shared.v_full(n), i & 1);
      ptx::wgmma_fence();
      ptx::wgmma_ss<T, false, true>(out, weights + n * 32 / 16, v + n * 2048 / 16, n > 0 || i > 0);
      ptx::wgmma_commit();
    }
  }

  /// Zeroes the values past the end of a sequence, which belong to another one or to none: the product would multiply
  /// them by 0.
  __device__ void clear_values(int first) {
    for (int n = 0; n < Shape::kUnits; ++n) ptx::mbarrier_wait(shared.v_full(n), 0);
#pragma unroll 1
    for (int at = first * 8 + static_cast<int>(threadIdx.x % 128); at < 64 * 8; at += 128)
      for (int c = 0; c < 4; ++c)
        *static_cast<uint4*>(__cvta_shared_to_generic(shared.v(4 * warpgroup + c) + at * 16)) = uint4{0, 0, 0, 0};
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync(kWideWarpgroup + warpgroup, 128);
  }

  /// The probabilities of the i-th block, from its scores, for both warpgroups. Meanwhile the values of the block
  /// before come into the output (kValues).
  template <bool kValues>
  __device__ void make_weights(int i) {
    const int block = tile.end_block - 1 - i, lane = threadIdx.x % 32;
    if constexpr (kModified) modify_scores(score, p.scale, p.softcap);
    if (block >= tile.end_full || block < tile.first_full)
      mask_scores(score, tile.range, tile.first_query + row(), block * 64 + warpgroup * 32 + 2 * (lane % 4));
    float highest[2], factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      highest[half] = row_maximum(score, half, -INFINITY);
      if (lane % 4 == 0) *shared.number(warpgroup, row() + 8 * half) = highest[half];
    }
    ptx::barrier_sync(kWideMaxima, 256);
    if constexpr (kValues) {
      ptx::wgmma_wait<2>();
      release(shared.v_empty(0));
      release(shared.v_empty(1));
    }
    // The shift of the exponentials: the row's maximum, but an older one serves while no exponential of the row passes
    // 2^8. Both warpgroups come to the same.
    bool moved = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      highest[half] = fmaxf(rows.maximum[half], fmaxf(highest[half], *shared.number(warpgroup ^ 1, row() + 8 * half)));
      const bool moves = (highest[half] - rows.maximum[half]) * plan.scale_log2 > 8.0f;  // -inf - -inf is NaN: no
      const float next = moves ? highest[half] : rows.maximum[half];
      factor[half] = ptx::exp2_approx((rows.maximum[half] - SoftmaxState::shift(next)) * plan.scale_log2);
      factor[half] = moves ? factor[half] : 1.0f;
      rows.maximum[half] = next;
      moved |= moves;
      const float shift = SoftmaxState::shift(next) * plan.scale_log2;
      float sum[2] = {rows.sum[half] * factor[half], 0.0f};
#pragma unroll
      for (int c = 0; c < 4; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = score[4 * c + 2 * half + e];
          x = ptx::exp2_approx(fmaf(x, plan.scale_log2, -shift));
          sum[e] += x;
        }
      rows.sum[half] = sum[0] + sum[1];
    }
    const std::uint32_t to = shared.weights(i & 1);
    const int at = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int c = 0; c < 2; ++c)
      ptx::stmatrix_x4(to + row_chunk(at, 4 * warpgroup + 2 * c + lane / 16), pack<T>(score[8 * c], score[8 * c + 1]),
                       pack<T>(score[8 * c + 2], score[8 * c + 3]), pack<T>(score[8 * c + 4], score[8 * c + 5]),
                       pack<T>(score[8 * c + 6], score[8 * c + 7]));
    ptx::fence_proxy_async_shared();
    if constexpr (kValues) {
      ptx::wgmma_wait<0>();
      ptx::hold(out);
      release(shared.v_empty(2));
      release(shared.v_empty(3));
      if (__any_sync(kFullMask, moved)) {
#pragma unroll
        for (int c = 0; c < 32; ++c)
#pragma unroll
          for (int e = 0; e < 4; ++e) out[4 * c + e] *= factor[e / 2];
      }
    }
  }

  __device__ void store() {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.sum[half] += __shfl_xor_sync(kFullMask, rows.sum[half], 1);
      rows.sum[half] += __shfl_xor_sync(kFullMask, rows.sum[half], 2);
      if (threadIdx.x % 4 == 0) *shared.number(warpgroup, row() + 8 * half) = rows.sum[half];
    }
    ptx::barrier_sync(kWideMaxima, 256);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      SoftmaxState state;
      state.maximum = kModified || rows.maximum[half] == -INFINITY ? rows.maximum[half] : rows.maximum[half] * p.scale;
      state.sum = *shared.number(0, row() + 8 * half) + *shared.number(1, row() + 8 * half);
      float lse;
      factor[half] = state.finish(p.sinks, tile.h, &lse);
      const int i = tile.first_query + row() + 8 * half;
      if (p.lse && warpgroup == 0 && threadIdx.x % 4 == 0 && i < tile.range.q_len)
        p.lse[p.lse_offset(tile.b, tile.h, i)] = lse;
    }
    const int last = tile.end_block - tile.num_blocks;
    if ((last < tile.first_full || tile.end_block > tile.end_full) && has_nan(out)) *shared.met_nan() = 1;
    const OutputRecord at{tile.b, tile.h, tile.first_query, min(64, tile.range.q_len - tile.first_query)};
    stage_rows<T, 0, 4>(out, factor, shared.q(4 * warpgroup));  // nobody reads Q any more
    ptx::barrier_sync(kWideWarpgroup + warpgroup, 128);
    store_some_rows(p, at, 4 * warpgroup, 4, shared.q(4 * warpgroup));
    ptx::barrier_sync(kWideMaxima, 256);
    if (*shared.met_nan()) redo_rows();
  }

  /// Computes the rows again that are not finite: a warp of both warpgroups 8 rows.
  __device__ void redo_rows() {
    const int lane = threadIdx.x % 32, first = tile.first_query + (warpgroup * 4 + threadIdx.x % 128 / 32) * 8;
#pragma unroll 1
    for (int i = first; i < min(first + 8, tile.range.q_len); ++i) {
      const T* const of_row = static_cast<const T*>(p.out) + p.out_offset(tile.b, tile.h, i);
      float zero = 0.0f;  // NaN once any element is not finite
#pragma unroll 1
      for (int column = lane; column < p.head_dim_v; column += 32) zero = fmaf(to_float(of_row[column]), 0.0f, zero);
      if (__any_sync(kFullMask, zero != zero)) redo_row<Shape, T>(p, tile, i);
    }
  }

  __device__ void run() {
    ptx::mbarrier_wait(shared.q_full(), 0);
    load_queries();
    rows.clear();
    issue_scores(0);
    ptx::wgmma_wait<0>();
    ptx::hold(score);
    release(shared.k_empty(Shape::kChunks - 1));
    make_weights<false>(0);
    const int past = tile.range.k_len - (tile.end_block - 1) * 64;
    if ((p.is_varlen_k() || p.is_paged()) && past < 64) clear_values(past);
    for (int i = 1; i < tile.num_blocks; ++i) {
      issue_scores(i);
      issue_values(i - 1);
      ptx::wgmma_wait<4>();
      ptx::hold(score);
      release(shared.k_empty(Shape::kChunks - 1));
      make_weights<true>(i);
    }
    ptx::barrier_sync(kWideWeights, 256);
    issue_values(tile.num_blocks - 1);
    ptx::wgmma_wait<0>();
    ptx::hold(out);
    store();
  }
};

template <class T, bool kModified>
__global__ void __launch_bounds__(WideShape::kThreads, 1)
    attention_fwd_wide_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ WidePlan plan,
                              const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                              const __grid_constant__ CUtensorMap map_v) {
  using Shape = WideShape;
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];  // lines of the swizzle: 1024 bytes
  const WideShared shared{ptx::shared_address(dynamic_shared)};
  const int rank = static_cast<int>(ptx::cluster_rank());
  const int warpgroup = static_cast<int>(__shfl_sync(kFullMask, threadIdx.x / 128, 0));
  const TileRecord& tile = *shared.record();  // registers are full
  if (threadIdx.x == 0) *shared.record() = wide_tile(p, plan, rank);
  __syncthreads();
  if (tile.num_blocks <= 0) {  // in both blocks of the cluster
    if (tile.num_blocks == 0 && warpgroup == 1) store_empty_rows<Shape, T>(p, tile);
    return;
  }
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&map_q, &map_k, &map_v}) ptx::tma_prefetch_map(map);
    ptx::mbarrier_init(shared.q_full(), 1);
    for (int c = 0; c < Shape::kChunks; ++c) {
      ptx::mbarrier_init(shared.k_full(c), 1);
      ptx::mbarrier_init(shared.k_empty(c), Shape::kArrivals);
    }
    for (int n = 0; n < Shape::kUnits; ++n) {
      ptx::mbarrier_init(shared.v_full(n), 1);
      ptx::mbarrier_init(shared.v_empty(n), Shape::kArrivals);
    }
    *shared.met_nan() = 0;
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (warpgroup == 0) {
    ptx::decrease_registers<Shape::kProducerRegisters>();
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) {
        ptx::mbarrier_arrive_expect(shared.q_full(), Shape::kTileBytes);
        const int row = tile.first_query + (p.is_varlen_q() ? static_cast<int>(p.q_begin(tile.b)) : 0);
        for (int c = 0; c < Shape::kChunks; ++c)
          ptx::tma_load(shared.q(c), &map_q, shared.q_full(), ptx::l2_evict_first(), c * 64, row, tile.h,
                        p.is_varlen_q() ? 0 : tile.b);
      }
      __syncwarp();
      produce_wide<false>(p, plan, shared, &map_k, tile, rank);
    } else if (threadIdx.x < 64) {
      produce_wide<true>(p, plan, shared, &map_v, tile, rank);
    }
  } else {
    ptx::increase_registers<Shape::kConsumerRegisters>();
    WideConsumer<T, kModified> consumer{p, plan, shared, tile, warpgroup - 1, rank};
    consumer.run();
  }
  __syncwarp();
  // A block's shared memory stays until the other one has sent its last copy and its last arrival there.
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

template <class T, bool kModified>
void launch_attention_fwd_wide(const AttentionParams& p, cudaStream_t stream) {
  constexpr float kLog2E = 1.4426950408889634f;
  WidePlan plan{};
  plan.pairs = static_cast<int>(ceil_div(p.seq_q, 128));
  plan.heads_q = static_cast<int>(p.heads_q);
  plan.group = static_cast<int>(p.heads_q / p.heads_kv);
  plan.k_rows = static_cast<int>(p.is_paged() ? std::gcd<std::int64_t, std::int64_t>(p.page_size, 32) : 32);
  plan.v_rows = static_cast<int>(p.is_paged() ? std::gcd<std::int64_t, std::int64_t>(p.page_size, 16) : 16);
  plan.scale_log2 = kModified ? kLog2E : p.scale * kLog2E;
  LaunchShape shape{static_cast<unsigned>(2 * p.batch * p.heads_q * plan.pairs), WideShape::kThreads,
                    WideShape::kSharedBytes, stream};
  shape.cluster = 2;
  launch("attention_fwd sm90a wide", attention_fwd_wide_kernel<T, kModified>, shape, p, plan,
         make_tensor_map("attention_fwd q", q_map(p, 64)),
         make_tensor_map("attention_fwd k", kv_map(p, false, static_cast<std::uint32_t>(plan.k_rows))),
         make_tensor_map("attention_fwd v", kv_map(p, true, static_cast<std::uint32_t>(plan.v_rows))));
}

/// An entry of the table.
template <DType kDtype>
void attention_fwd_wide(const AttentionParams& p, void*, Stream stream) {
  using T = Element<kDtype>;
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  // The plain kernel relies on this: if scores are products times a positive scale, the largest product is the maximum.
  if (p.softcap > 0.0f || !(p.scale > 0.0f))
    launch_attention_fwd_wide<T, true>(p, native(stream));
  else
    launch_attention_fwd_wide<T, false>(p, native(stream));
}

}  // namespace flashkernel::cuda::sm90a
