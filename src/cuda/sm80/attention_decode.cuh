// Attention for few queries over a long cache (sm_80 and later): split-KV (Flash-Decoding, Dao et al. 2023) with the
// query heads of a kv head packed into one matrix instruction. Instantiated by the generated attention_decode_*.cu.
//
// Bound by memory. A warp takes 16 keys at a time (a granule: inside one page, one look-up) through its own ring of
// cp.async copies, so the loop has no barrier. Keys are the rows of mma.sync m16n8k16 and queries its columns:
// S^T = K Q^T, O^T = V^T P^T; with 8 query rows nothing is computed twice and the output takes half the registers.
// Blocks are persistent; each finds its equal share of all granules from the lengths on the device
// (decode_schedule.cuh). The warps of a block merge at the end of a segment; pairs cut by a border between blocks are
// merged by a second kernel, launched early, in a fixed order.
//
// Invariant on NaN: rows outside of what a sequence's queries see, and rows of pages that do not exist, are
// zero-filled. A row that only some queries see may hold NaN or infinity: non-finite values of V are then taken out of
// the granule before the product and added to the rows that see them.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/ptx/grid.cuh"
#include "cuda/sm80/decode_schedule.cuh"
#include "cuda/tile/attention_score_fast.cuh"
#include "cuda/tile/not_finite.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda::sm80 {

/// How a warp copies a granule: kAcross lanes a row, 16 bytes each.
template <int kDim>
struct GranuleCopy {
  using Tile = SharedTile<kDim>;
  static constexpr int kAcross = Tile::kChunks % 8 == 0 ? 8 : 4;
  static constexpr int kRows = kWarp / kAcross;  // of a pass
  static constexpr int kPasses = kGranule / kRows, kGroups = Tile::kChunks / kAcross;

  /// Rows [first, first + count) of the tile from `from`, the tile's row 0; the others become zero.
  template <class T>
  __device__ static void start(std::uint32_t tile, const T* from, std::int64_t stride, int dim, int first, int count) {
    const int lane = static_cast<int>(threadIdx.x % kWarp), row = lane / kAcross, chunk = lane % kAcross;
    // Two passes on, the twist is the same again.
    const std::uint32_t to[2] = {Tile::offset(row, chunk), Tile::offset(kRows + row, chunk) - kRows * Tile::kPitch};
    from += row * stride + chunk * 8;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass, from += kRows * stride) {
      const bool there = static_cast<unsigned>(pass * kRows + row - first) < static_cast<unsigned>(count);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int bytes = min(max((dim - (group * kAcross + chunk) * 8) * 2, 0), 16);
        ptx::cp_async_16(tile + to[pass % 2] + pass * kRows * Tile::kPitch + group * kAcross * 16,
                         from + group * kAcross * 8, there ? static_cast<std::uint32_t>(bytes) : 0u);
      }
    }
  }
};

/// The next granules of one warp: `count` of them (at most 32), `step` apart from `granule` on; lane l knows the page
/// that holds the l-th one (-1: no such page).
struct Batch {
  const void *k, *v;  // row 0 of the sequence, or of page 0, at the warp's head
  int granule, count;
  int first_key, last_key;
  std::int32_t page;
};

/// Streams a warp's share into its ring, segment after segment, as far ahead as the ring allows.
template <class T, int kDim, int kStages>
class Producer {
 public:
  using Tile = SharedTile<kDim>;
  static constexpr std::uint32_t kTileBytes = kGranule * Tile::kPitch;

  __device__ Producer(const AttentionParams& p, const DecodePlan& plan, const SegmentWalk& walk, std::uint32_t ring)
      : walk_(walk), ring_(ring) {
    const int warp = static_cast<int>(threadIdx.x / kWarp);
    key_lane_ = warp % plan.key_lanes;
    head_ = warp / plan.key_lanes;
    now_ = fetch(p, plan);
    next_ = now_.count > 0 ? fetch(p, plan) : now_;
  }

  /// Starts the copies of the next granule, if there is one; a group of copies in any case.
  __device__ void start(const AttentionParams& p, const DecodePlan& plan) {
    if (used_ == now_.count && next_.count > 0) {
      now_ = next_;
      used_ = 0;
      next_ = fetch(p, plan);
    }
    if (used_ < now_.count) {
      const int key = (now_.granule + used_ * plan.key_lanes) * kGranule;
      const std::int32_t page = __shfl_sync(kFullMask, now_.page, used_);
      const int first = max(now_.first_key - key, 0);
      int count = min(now_.last_key - key, kGranule) - first;
      std::int64_t k_at, v_at;
      if (p.is_paged()) {
        const int slot = key % static_cast<int>(p.page_size);
        if (page < 0 || page >= p.num_pages) count = 0;  // a bad table reads nothing
        k_at = page * p.stride_k_batch + slot * p.stride_k_token;
        v_at = page * p.stride_v_batch + slot * p.stride_v_token;
      } else {
        k_at = key * p.stride_k_token;
        v_at = key * p.stride_v_token;
      }
      const std::uint32_t slot = ring_ + slot_ * 2 * kTileBytes;
      GranuleCopy<kDim>::start(slot, static_cast<const T*>(now_.k) + k_at, p.stride_k_token,
                               static_cast<int>(p.head_dim), first, count);
      GranuleCopy<kDim>::start(slot + kTileBytes, static_cast<const T*>(now_.v) + v_at, p.stride_v_token,
                               static_cast<int>(p.head_dim_v), first, count);
      ++used_;
      slot_ = slot_ + 1 == kStages ? 0 : slot_ + 1;
    }
    ptx::cp_async_commit();
  }

 private:
  __device__ Batch fetch(const AttentionParams& p, const DecodePlan& plan) {
    while (at_ >= segment_.end) {
      if (!walk_.next(p, plan.head_groups, segment_)) return Batch{nullptr, nullptr, 0, 0, 0, 0, 0};
      at_ = segment_.first + key_lane_;
    }
    const KeyRange range(p, segment_.b);
    const std::int64_t g = segment_.head_group * plan.heads + head_;
    std::int64_t k_at = g * p.stride_k_head, v_at = g * p.stride_v_head;
    if (!p.is_paged()) {
      k_at += p.is_varlen_k() ? p.k_begin(segment_.b) * p.stride_k_token : segment_.b * p.stride_k_batch;
      v_at += p.is_varlen_k() ? p.k_begin(segment_.b) * p.stride_v_token : segment_.b * p.stride_v_batch;
    }
    Batch batch;
    batch.k = static_cast<const T*>(p.k) + k_at;
    batch.v = static_cast<const T*>(p.v) + v_at;
    batch.granule = at_;
    batch.count = min(kWarp, (segment_.end - at_ + plan.key_lanes - 1) / plan.key_lanes);
    batch.first_key = range.first(0);
    batch.last_key = range.last(range.q_len - 1);
    batch.page = -1;
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    if (p.is_paged() && lane < batch.count) {
      const int column = (at_ + lane * plan.key_lanes) * kGranule / static_cast<int>(p.page_size);
      batch.page = p.block_table[segment_.b * p.stride_block_table + column];
    }
    at_ += kWarp * plan.key_lanes;
    return batch;
  }

  SegmentWalk walk_;
  Segment segment_;
  Batch now_, next_;
  std::uint32_t ring_;
  int key_lane_, head_, at_ = 0, used_ = 0, slot_ = 0;
};

/// Row of a query tile: query i of head h. Rows are ordered by query, then by head.
__device__ inline int query_of(int row, int group) { return row / group; }

/// Fills the query tiles of a segment's heads; rows past the sequence's are zero.
template <class T, int kDim, int kRows>
__device__ inline void load_queries(const AttentionParams& p, const DecodePlan& plan, const Segment& segment,
                                    std::uint32_t tiles, int rows) {
  using Tile = SharedTile<kDim>;
  const int group = static_cast<int>(p.heads_q / p.heads_kv), dim = static_cast<int>(p.head_dim);
  for (int at = static_cast<int>(threadIdx.x); at < plan.heads * kRows * Tile::kChunks; at += plan.warps * kWarp) {
    const int head = at / (kRows * Tile::kChunks), row = at / Tile::kChunks % kRows, chunk = at % Tile::kChunks;
    uint4 packed{0, 0, 0, 0};
    if (row < rows && chunk * 8 < dim) {
      const int i = query_of(row, group);
      const std::int64_t h = static_cast<std::int64_t>(segment.head_group * plan.heads + head) * group + row % group;
      const T* from = static_cast<const T*>(p.q) + p.q_offset(segment.b, h, i) + chunk * 8;
      if (plan.vectors_q && chunk * 8 + 8 <= dim) {
        packed = *reinterpret_cast<const uint4*>(from);
      } else {
        T* values = reinterpret_cast<T*>(&packed);
        for (int e = 0; e < 8; ++e)
          if (chunk * 8 + e < dim) values[e] = from[e];
      }
    }
    *reinterpret_cast<uint4*>(
        __cvta_shared_to_generic(tiles + head * kRows * Tile::kPitch + Tile::offset(row, chunk))) = packed;
  }
}

/// A finished row, merged from its parts: sinks, LSE, and four columns of the output.
template <class T>
__device__ inline void store_row(const AttentionParams& p, bool vectors, int b, std::int64_t h, int i, int column,
                                 float maximum_log2, float sum, const float (&values)[4]) {
  constexpr float kLn2 = 0.69314718055994531f;
  SoftmaxState state;
  state.maximum = maximum_log2 * kLn2;  // -inf stays
  state.sum = sum;
  float lse;
  const float factor = state.finish(p.sinks, h, &lse);
  if (p.lse && column == 0) p.lse[p.lse_offset(b, h, i)] = lse;
  if (column >= p.head_dim_v) return;
  T* to = static_cast<T*>(p.out) + p.out_offset(b, h, i) + column;
  float scaled[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) scaled[e] = factor == 0.0f ? 0.0f : values[e] * factor;
  if (vectors && column + 4 <= p.head_dim_v) {
    store_floats(to, scaled);
  } else {
    for (int e = 0; e < 4; ++e)
      if (column + e < p.head_dim_v) to[e] = from_float<T>(scaled[e]);
  }
}

/// Output 0 and LSE -inf (or the sink) for the sequences without a visible key, dealt out over the grid; one warp.
template <class T>
__device__ inline void store_empty_sequences(const AttentionParams& p, bool vectors) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const float zeros[4] = {};
  for (int b = static_cast<int>(blockIdx.x); b < p.batch; b += static_cast<int>(gridDim.x)) {
    if (granules_of(p, b).count() > 0) continue;
    const std::int64_t rows = p.q_length(b) * p.heads_q;
    const int columns = static_cast<int>((p.head_dim_v + 3) / 4);
    for (std::int64_t at = lane; at < rows * columns; at += kWarp)
      store_row<T>(p, vectors, b, at / columns % p.heads_q, static_cast<int>(at / columns / p.heads_q),
                   static_cast<int>(at % columns) * 4, -INFINITY, 0.0f, zeros);
  }
}

template <class T, int kDim, int kTiles>
__global__ void __launch_bounds__(kDecodeMaxWarps* kWarp, 1)
    attention_decode_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ DecodePlan plan,
                            float* __restrict__ partials) {
  using Shape = DecodeShape<kDim, kTiles>;
  using Tile = SharedTile<kDim>;
  constexpr int kStages = Shape::kStages, kRows = Shape::kRows, kSlices = kDim / 16;
  constexpr std::uint32_t kTileBytes = Shape::kTileBytes;
  constexpr bool kQueriesInRegisters = kTiles <= 2;
  constexpr float kLog2E = 1.4426950408889634f;
  extern __shared__ __align__(128) unsigned char shared[];

  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  const int head = warp / plan.key_lanes;
  // Shared memory: a ring for each warp, the heads' queries, the warps' results, their maxima and sums.
  const std::uint32_t ring = ptx::shared_address(shared) + warp * Shape::kRingBytes;
  const std::uint32_t queries = ptx::shared_address(shared) + plan.warps * Shape::kRingBytes;
  float* const results =
      reinterpret_cast<float*>(shared + plan.warps * Shape::kRingBytes + plan.heads * Shape::kQueryBytes);
  float* const states = results + plan.warps * kRows * Shape::kResultPitch;

  if (warp == 0) store_empty_sequences<T>(p, plan.vectors_out);
  const Schedule schedule(p, plan);
  if (static_cast<int>(blockIdx.x) >= schedule.blocks()) return;
  SegmentWalk walk(p, schedule, static_cast<int>(blockIdx.x));
  Producer<T, kDim, kStages> producer(p, plan, walk, ring);
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) producer.start(p, plan);
  ptx::allow_next_kernel();

  const int group = static_cast<int>(p.heads_q / p.heads_kv);
  const float scale_log2 = p.scale * kLog2E;
  const std::uint32_t lane_k = Tile::lane_offset(LaneA::row(lane), LaneA::half(lane));
  const std::uint32_t lane_v = Tile::lane_offset(LaneB::row(lane), LaneB::half(lane));  // transposed on the way
  int slot = 0;

  Segment segment;
  while (walk.next(p, plan.head_groups, segment)) {
    const KeyRange range(p, segment.b);
    const int rows = group * range.q_len;
    load_queries<T, kDim, kRows>(p, plan, segment, queries, rows);
    __syncthreads();
    const std::uint32_t tile_q = queries + head * kRows * Tile::kPitch;
    // B operand of S^T: of slice d, registers 2 (d % 2) and the next when there is one tile; else of tiles 2 t, 2 t
    // + 1.
    std::uint32_t query[kQueriesInRegisters ? kTiles : 1][kQueriesInRegisters ? kSlices : 1][2];
    if constexpr (kTiles == 1) {
#pragma unroll
      for (int d = 0; d < kSlices; d += 2) {
        std::uint32_t four[4];
        ptx::ldmatrix_x4(four, tile_q + Tile::offset(lane % 8, lane / 8 + 2 * d));
        query[0][d][0] = four[0], query[0][d][1] = four[1];
        query[0][d + 1][0] = four[2], query[0][d + 1][1] = four[3];
      }
    } else if constexpr (kQueriesInRegisters) {
#pragma unroll
      for (int d = 0; d < kSlices; ++d) {
        std::uint32_t four[4];
        ptx::ldmatrix_x4(four, tile_q + Tile::offset(LaneB::row(lane), LaneB::half(lane) + 2 * d));
        query[0][d][0] = four[0], query[0][d][1] = four[1];
        query[1][d][0] = four[2], query[1][d][1] = four[3];
      }
    }
    const std::uint32_t lane_q = tile_q + Tile::lane_offset(LaneB::row(lane), LaneB::half(lane));

    // Element e of tile t: row 8 t + 2 (lane % 4) + e. Maxima are in base 2.
    float out[kSlices][kTiles][4], maximum[kTiles][2], sum[kTiles][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      maximum[t][0] = maximum[t][1] = -INFINITY;
      sum[t][0] = sum[t][1] = 0.0f;
#pragma unroll
      for (int c = 0; c < kSlices; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[c][t][e] = 0.0f;
    }
    const int first_full = range.first(range.q_len - 1), end_full = range.last(0);  // keys that all queries see

#pragma unroll 1
    for (int granule = segment.first + warp % plan.key_lanes; granule < segment.end; granule += plan.key_lanes) {
      ptx::cp_async_wait<kStages - 2>();
      __syncwarp();  // the granule is there for all lanes, and all have read the slot that is filled next
      producer.start(p, plan);
      const std::uint32_t keys = ring + slot * 2 * kTileBytes, values = keys + kTileBytes;
      slot = slot + 1 == kStages ? 0 : slot + 1;
      const int first_j = granule * kGranule;

      // S^T = K Q^T, in two independent sums when there is one tile.
      constexpr int kSums = kTiles == 1 ? 2 : 1;
      float score[kSums][kTiles][4] = {};
#pragma unroll
      for (int d = 0; d < kSlices; ++d) {
        std::uint32_t a[4];
        ptx::ldmatrix_x4(a, Tile::at_slice(keys + lane_k, d));
        if constexpr (kQueriesInRegisters) {
#pragma unroll
          for (int t = 0; t < kTiles; ++t) ptx::mma_m16n8k16<T>(score[d % kSums][t], a, query[t][d][0], query[t][d][1]);
        } else {
#pragma unroll
          for (int t = 0; t < kTiles; t += 2) {
            std::uint32_t four[4];
            ptx::ldmatrix_x4(four, Tile::at_slice(lane_q, d) + t * kTileRows * Tile::kPitch);
            ptx::mma_m16n8k16<T>(score[0][t], a, four[0], four[1]);
            ptx::mma_m16n8k16<T>(score[0][t + 1], a, four[2], four[3]);
          }
        }
      }
      float(&x)[kTiles][4] = score[0];
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (kSums == 2) x[t][e] += score[1][t][e];
          if (!plan.modified) x[t][e] *= scale_log2;
        }

      const bool masked = first_j < first_full || first_j + kGranule > end_full;
      if (plan.modified || masked) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int row = min(t * kTileRows + 2 * (lane % 4) + e, rows - 1), i = query_of(row, group);
            const float slope = p.alibi_slopes
                                    ? p.alibi_slopes[segment.b * p.stride_alibi_batch +
                                                     (segment.head_group * plan.heads + head) * group + row % group]
                                    : 0.0f;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int j = first_j + lane / 4 + 8 * half;
              float& s = x[t][2 * half + e];
              if (plan.modified)
                s = modified_score_fast(p, slope, nullptr, i, j, range.k_len - range.q_len, s) * kLog2E;
              if (j < range.first(i) || j >= range.last(i)) s = -INFINITY;
            }
          }
      }

      // The shift of the exponentials is the maximum so far, or an older one while no exponential passes 2^8.
      bool above = false;
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) above |= x[t][e] > maximum[t][e % 2] + 8.0f;
      if (__any_sync(kFullMask, above)) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float highest = fmaxf(maximum[t][e], fmaxf(x[t][e], x[t][2 + e]));
#pragma unroll
            for (int step = 4; step < kWarp; step *= 2)
              highest = fmaxf(highest, __shfl_xor_sync(kFullMask, highest, step));
            const float factor = ptx::exp2_approx(maximum[t][e] - SoftmaxState::shift(highest));
            maximum[t][e] = highest;
            sum[t][e] *= factor;
#pragma unroll
            for (int c = 0; c < kSlices; ++c) {
              out[c][t][e] *= factor;
              out[c][t][2 + e] *= factor;
            }
          }
      }
      std::uint32_t probability[kTiles][2];  // B operand of O^T
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[t][e] = ptx::exp2_approx(x[t][e] - SoftmaxState::shift(maximum[t][e % 2]));
        sum[t][0] += x[t][0] + x[t][2];
        sum[t][1] += x[t][1] + x[t][3];
        probability[t][0] = ptx::movmatrix_trans(pack<T>(x[t][0], x[t][1]));
        probability[t][1] = ptx::movmatrix_trans(pack<T>(x[t][2], x[t][3]));
      }

      if (masked && range.q_len > 1 && __any_sync(kFullMask, any_not_finite<T>(values, kTileBytes, lane, kWarp))) {
        // Rare: give each row the non-finite values that it sees, then take them out of the tile.
#pragma unroll 1
        for (int n = 0; n < kGranule; ++n) {
#pragma unroll
          for (int c = 0; c < kSlices; ++c)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const std::uint32_t bits = *static_cast<const unsigned short*>(
                  __cvta_shared_to_generic(values + Tile::element(n, 16 * c + 8 * half + lane / 4)));
              if (is_finite_bits<T>(bits)) continue;
#pragma unroll
              for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                  const int i = query_of(t * kTileRows + 2 * (lane % 4) + e, group), j = first_j + n;
                  if (j >= range.first(i) && j < range.last(i)) out[c][t][2 * half + e] += bits_to_float<T>(bits);
                }
            }
        }
        __syncwarp();
        clean<T>(values, kTileBytes, lane, kWarp);
        __syncwarp();
      }

      // O^T += V^T P^T
#pragma unroll
      for (int c = 0; c < kSlices; ++c) {
        std::uint32_t a[4];
        ptx::ldmatrix_x4_trans(a, Tile::at_slice(values + lane_v, c));
#pragma unroll
        for (int t = 0; t < kTiles; ++t) ptx::mma_m16n8k16<T>(out[c][t], a, probability[t][0], probability[t][1]);
      }
    }

    // Hand the warp's part over.
    float* const result = results + warp * kRows * Shape::kResultPitch;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float total = sum[t][e];
#pragma unroll
        for (int step = 4; step < kWarp; step *= 2) total += __shfl_xor_sync(kFullMask, total, step);
        const int row = t * kTileRows + 2 * (lane % 4) + e;
        if (lane < 4) {
          states[(warp * kRows + row) * 2] = maximum[t][e];
          states[(warp * kRows + row) * 2 + 1] = total;
        }
#pragma unroll
        for (int c = 0; c < kSlices; ++c)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            result[row * Shape::kResultPitch + 16 * c + 8 * half + lane / 4] = out[c][t][2 * half + e];
      }
    __syncthreads();

    const bool whole = segment.begins && segment.ends;
    for (int at = static_cast<int>(threadIdx.x); at < plan.heads * rows * (kDim / 4); at += plan.warps * kWarp) {
      const int column = at % (kDim / 4) * 4, row = at / (kDim / 4) % rows, h = at / (kDim / 4) / rows;
      float highest = -INFINITY;
      for (int w = h * plan.key_lanes; w < (h + 1) * plan.key_lanes; ++w)
        highest = fmaxf(highest, states[(w * kRows + row) * 2]);
      float total = 0.0f, merged[4] = {};
      for (int w = h * plan.key_lanes; w < (h + 1) * plan.key_lanes; ++w) {
        const float factor = ptx::exp2_approx(states[(w * kRows + row) * 2] - SoftmaxState::shift(highest));
        const float4 part =
            *reinterpret_cast<const float4*>(results + (w * kRows + row) * Shape::kResultPitch + column);
        total = fmaf(states[(w * kRows + row) * 2 + 1], factor, total);
        merged[0] = fmaf(part.x, factor, merged[0]);
        merged[1] = fmaf(part.y, factor, merged[1]);
        merged[2] = fmaf(part.z, factor, merged[2]);
        merged[3] = fmaf(part.w, factor, merged[3]);
      }
      if (whole) {
        const std::int64_t g = segment.head_group * plan.heads + h;
        store_row<T>(p, plan.vectors_out, segment.b, g * group + row % group, query_of(row, group), column, highest,
                     total, merged);
      } else {
        // Place 0 of the block: the pair began in another block; place 1: it begins here.
        float* partial = partials + (((2 * blockIdx.x + (segment.begins ? 1 : 0)) * plan.heads + h) * plan.rows + row) *
                                        static_cast<std::int64_t>(Shape::kResultPitch);
        *reinterpret_cast<float4*>(partial + column) = float4{merged[0], merged[1], merged[2], merged[3]};
        if (column == 0) partial[kDim] = highest, partial[kDim + 1] = total;
      }
    }
  }
  ptx::cp_async_wait<0>();
}

/// Merges a row of one pair that several blocks have worked on. Grid: (pairs that can be cut, rows, heads of a group).
/// Starts while the kernel above runs, and finds its pair meanwhile.
constexpr int kCombineWarps = 4;
template <class T, int kDim>
__global__ void __launch_bounds__(kCombineWarps* kWarp)
    attention_decode_combine_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ DecodePlan plan,
                                    const float* __restrict__ partials) {
  constexpr int kPieces = (kDim + 127) / 128;  // of 128 columns, four a lane
  constexpr int kPitch = kDim + 4;
  __shared__ float parts[kCombineWarps][kPitch];
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  const int row = static_cast<int>(blockIdx.y), head = static_cast<int>(blockIdx.z);
  const Schedule schedule(p, plan);
  // The pair: of this number, or, when there are more of them than borders between blocks, the one that the border
  // after this block cuts.
  Pair pair{};
  int first = 0, last = 0;
  if (plan.combine_by_pair) {
    pair = schedule.pair(p, static_cast<int>(blockIdx.x));
  } else if (static_cast<int>(blockIdx.x) + 1 < schedule.blocks()) {
    pair = schedule.pair_at(p, schedule.begin(static_cast<int>(blockIdx.x) + 1) - 1);
  }
  if (pair.count > 0) {
    first = schedule.block_of(pair.start);
    last = schedule.block_of(pair.start + pair.count - 1);
  }
  bool cut = first < last && (plan.combine_by_pair || first == static_cast<int>(blockIdx.x));
  const int group = static_cast<int>(p.heads_q / p.heads_kv);
  cut = cut && row < group * static_cast<int>(p.q_length(pair.b));
  // One block waits in any case: this kernel must not end before the other one.
  if (cut || (blockIdx.x == 0 && row == 0 && head == 0)) ptx::wait_for_previous_kernel();
  if (!cut) return;

  const auto partial_of = [&](int block) {
    const std::int64_t place = 2 * block + (block == first ? 1 : 0);
    return partials + ((place * plan.heads + head) * plan.rows + row) * kPitch;
  };
  float maximum = -INFINITY, sum = 0.0f, merged[kPieces][4] = {};
  const auto join = [&](float other_maximum, float other_sum, const float* from) {
    const float highest = fmaxf(maximum, other_maximum), shift = SoftmaxState::shift(highest);
    const float mine = ptx::exp2_approx(maximum - shift), other = ptx::exp2_approx(other_maximum - shift);
    maximum = highest;
    sum = sum * mine + other_sum * other;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int column = piece * 128 + lane * 4;
      if (column >= kDim) continue;
      const float4 part = *reinterpret_cast<const float4*>(from + column);
      merged[piece][0] = merged[piece][0] * mine + part.x * other;
      merged[piece][1] = merged[piece][1] * mine + part.y * other;
      merged[piece][2] = merged[piece][2] * mine + part.z * other;
      merged[piece][3] = merged[piece][3] * mine + part.w * other;
    }
  };
#pragma unroll 4
  for (int block = first + warp; block <= last; block += kCombineWarps) {
    const float* partial = partial_of(block);
    join(partial[kDim], partial[kDim + 1], partial);
  }
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece)
    if (piece * 128 + lane * 4 < kDim)
      *reinterpret_cast<float4*>(&parts[warp][piece * 128 + lane * 4]) =
          float4{merged[piece][0], merged[piece][1], merged[piece][2], merged[piece][3]};
  if (lane == 0) parts[warp][kDim] = maximum, parts[warp][kDim + 1] = sum;
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int other = 1; other < kCombineWarps; ++other) join(parts[other][kDim], parts[other][kDim + 1], parts[other]);
  const std::int64_t h = (static_cast<std::int64_t>(pair.head_group) * plan.heads + head) * group + row % group;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece)
    if (piece * 128 + lane * 4 < kDim)
      store_row<T>(p, plan.vectors_out, pair.b, h, query_of(row, group), piece * 128 + lane * 4, maximum, sum,
                   merged[piece]);
}

template <class T, int kDim>
void launch_attention_decode(const AttentionParams& p, const DecodePlan& plan, float* partials, cudaStream_t stream) {
  with_decode_tiles<kDim>(p, [&](auto tiles) {
    launch("attention_fwd decode sm80", attention_decode_kernel<T, kDim, decltype(tiles)::value>,
           {static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.warps * kWarp),
            static_cast<std::size_t>(plan.shared_bytes), stream},
           p, plan, partials);
  });
  const bool early = cuda_device_properties(p.device.index).compute_capability >= 90;
  launch("attention_fwd decode sm80: combine", attention_decode_combine_kernel<T, kDim>,
         {dim3(static_cast<unsigned>(plan.combine_items), static_cast<unsigned>(plan.rows),
               static_cast<unsigned>(plan.heads)),
          kCombineWarps * kWarp, 0, stream, early},
         p, plan, static_cast<const float*>(partials));
}

/// An entry of the table.
template <class T, int kDim>
void attention_decode_instance(const AttentionParams& p, void* workspace, Stream stream) {
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  launch_attention_decode<T, kDim>(p, plan_decode<kDim>(p), static_cast<float*>(workspace), native(stream));
}

}  // namespace flashkernel::cuda::sm80
