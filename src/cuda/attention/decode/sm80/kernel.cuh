// Attention for few queries over a long cache (sm_80 and later): split-KV (Flash-Decoding, Dao et al. 2023) with the
// query heads of a kv head packed into one matrix instruction. instances/ has the files that instantiate it.
//
// Memory limits this kernel. A warp takes 16 keys at a time through its own ring of cp.async copies, so the loop has no
// barrier. Such a granule lies inside of one page, so that it takes one look-up; of smaller pages it takes one a key.
// Keys are the rows of mma.sync m16n8k16 and queries are its columns: S^T = K Q^T, O^T = V^T P^T. With 8 query rows
// nothing is computed twice, and the output takes half the registers that it would take as rows.
//
// Blocks are persistent. Each one works out its share of all granules from the lengths on the device (schedule.cuh).
// The warps of a block merge at the end of a segment. If a border between blocks cuts a sequence of a head group, the
// last block to finish merges the parts, or a second kernel does, which is launched early; either has a fixed order.
//
// Invariant on NaN: rows of K and V that no query of the sequence sees, and rows of pages that do not exist, become
// zero. A row that only some queries see may hold NaN or infinity. Non-finite values of V are then taken out of the
// granule before the product, and are added to the rows that see them.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/host/zeroed_memory.hpp"
#include "cuda/ptx/atomic.cuh"
#include "cuda/attention/decode/sm80/merge.cuh"
#include "cuda/attention/decode/sm80/producer.cuh"
#include "cuda/attention/score_fast.cuh"
#include "cuda/attention/not_finite.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm80 {

/// Fills the query tiles of a segment's heads; rows past the sequence's are zero.
template <class T, int kQkDim, int kRows>
__device__ inline void load_queries(const AttentionParams& p, const DecodePlan& plan, const Segment& segment,
                                    std::uint32_t tiles, int rows) {
  using Tile = SharedTile<kQkDim>;
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

/// The exponent of a scale, which is its logarithm in base 2, rounded down. It goes into the shift of a row's
/// exponentials. A scale that is NaN or infinite must not move the shift, and a tiny one only so far that exponentials
/// do not overflow.
__device__ inline float scale_exponent(float scale) {
  const std::uint32_t field = __float_as_uint(scale) >> 23 & 0xff;
  return field == 0xff ? 0.0f : fmaxf(static_cast<float>(static_cast<int>(field) - 127), -64.0f);
}

/// Keys and values of 16 bits: operands as ldmatrix fetches them.
template <class T>
struct WideKeys {
  using Element = T;
  using Operand = T;
  static constexpr int kBits = 16;

  /// Queries go into shared memory as they are.
  template <class Query, int kQkDim, int kRows>
  __device__ static void load_queries(const AttentionParams& p, const DecodePlan& plan, const Segment& segment,
                                      std::uint32_t tiles, int rows, float*) {
    sm80::load_queries<Query, kQkDim, kRows>(p, plan, segment, tiles, rows);
  }
  /// f(slice, operand A of S^T) for each 16 dims. (Scales: where those of a granule lie; here there are none.)
  template <int kQkDim, class F>
  __device__ static void each_key_slice(std::uint32_t lane_keys, std::uint32_t, F f) {
#pragma unroll
    for (int d = 0; d < kQkDim / 16; ++d) {
      std::uint32_t a[4];
      ptx::ldmatrix_x4(a, SharedTile<kQkDim>::at_slice(lane_keys, d));
      f(d, a);
    }
  }
  /// f(slice, operand A of O^T).
  template <int kVDim, class F>
  __device__ static void each_value_slice(std::uint32_t lane_values, std::uint32_t, F f) {
#pragma unroll
    for (int c = 0; c < kVDim / 16; ++c) {
      std::uint32_t a[4];
      ptx::ldmatrix_x4_trans(a, SharedTile<kVDim>::at_slice(lane_values, c));
      f(c, a);
    }
  }
  /// The output's column that the lane holds in rows `half` of slice c.
  __device__ static int column(int c, int half, int lane) { return 16 * c + 8 * half + lane / 4; }
  template <int kVDim>
  __device__ static float value_at(std::uint32_t values, std::uint32_t, int key, int column) {
    return bits_to_float<T>(*static_cast<const unsigned short*>(
        __cvta_shared_to_generic(values + SharedTile<kVDim>::element(key, column))));
  }
  template <int kVDim>
  __device__ static bool any_not_finite(std::uint32_t values, std::uint32_t, int bytes, int lane) {
    return cuda::any_not_finite<T>(values, bytes, lane, kWarp);
  }
  template <int kVDim>
  __device__ static void clean(std::uint32_t values, std::uint32_t, int bytes, int lane) {
    cuda::clean<T>(values, bytes, lane, kWarp);
  }
};

/// Brings the page table into L2 while the lengths are on their way, a line a thread of the grid.
__device__ inline void prefetch_table(const AttentionParams& p) {
  constexpr int kLine = 128 / sizeof(std::int32_t);
  const std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kLine;
  if (at < (p.batch - 1) * p.stride_block_table + p.max_pages) ptx::prefetch_l2(p.block_table + at);
}

/// T: of queries and outputs. Keys: how keys and values become operands of the matrix instruction (WideKeys here,
/// NarrowKeys in kernel_quantized.cuh).
template <class T, class Keys, int kQkDim, int kVDim, int kTiles>
__global__ void __launch_bounds__(DecodeShape<kQkDim, kVDim, kTiles, Keys::kBits>::kMaxWarps* kWarp, 1)
    attention_decode_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ DecodePlan plan,
                            float* partials, int* counters) {
  using Shape = DecodeShape<kQkDim, kVDim, kTiles, Keys::kBits>;
  using Tile = SharedTile<kQkDim>;  // of queries
  using KTile = KeyTile<typename Keys::Element, kQkDim>;
  using VTile = KeyTile<typename Keys::Element, kVDim>;
  using Operand = typename Keys::Operand;
  constexpr bool kFactors = Keys::kBits < 16;  // queries have factors
  constexpr bool kScaled = Keys::kBits == 8;   // scales of tokens or heads join scores and probabilities
  constexpr int kStages = Shape::kStages, kRows = Shape::kRows;
  constexpr int kQkSlices = kQkDim / 16, kVSlices = kVDim / 16;
  constexpr bool kQueriesInRegisters =
      kTiles == 1 ? Shape::kWidest <= 256 : kTiles == 2 && Shape::kWidest <= 192;  // else they are read each time
  constexpr bool kMergesInBlock = kTiles <= 2;                                     // see kMostRowsWithin
  constexpr float kLog2E = 1.4426950408889634f;
  extern __shared__ __align__(128) unsigned char shared[];

  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  const int head = warp / plan.key_lanes;
  // Shared memory: a ring for each warp, the heads' queries, the warps' results, their maxima and sums (and, where keys
  // have scales, what queries were divided by).
  const std::uint32_t ring = ptx::shared_address(shared) + warp * Shape::kRingBytes;
  const std::uint32_t queries = ptx::shared_address(shared) + plan.warps * Shape::kRingBytes;
  float* const results =
      reinterpret_cast<float*>(shared + plan.warps * Shape::kRingBytes + plan.heads * Shape::kQueryBytes);
  float* const states = results + plan.warps * kRows * Shape::kResultPitch;
  float* const query_factors = states + plan.warps * kRows * 2;

  if (p.is_paged()) prefetch_table(p);
  const Schedule schedule(p, plan);
  if (static_cast<int>(blockIdx.x) >= schedule.blocks()) {
    Departure departure(counters, plan.blocks);
    if (kMergesInBlock && !plan.combine_apart) departure.announce();
    if (warp == 0) store_empty_sequences<T>(p, plan.vectors_out);
    departure.finish();
    return;
  }
  // The segment that all warps are in, and the next one: in shared memory, registers are full.
  __shared__ SegmentWalk walk;
  __shared__ Segment segments[2];
  __shared__ bool there[2], is_last;
  const SegmentWalk my_walk(p, schedule, static_cast<int>(blockIdx.x));
  if (threadIdx.x == 0) {
    walk = my_walk;
    there[0] = walk.next(p, plan.head_groups, segments[0]);
  }
  Producer<typename Keys::Element, kQkDim, kVDim, kStages> producer(p, plan, my_walk, ring);
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) producer.start(p, plan);
  if (plan.combine_apart) ptx::allow_next_kernel();
  if (warp == plan.warps - 1) store_empty_sequences<T>(p, plan.vectors_out);

  const int group = static_cast<int>(p.heads_q / p.heads_kv);
  const float scale_log2 = p.scale * kLog2E;
  const std::uint32_t lane_k = KTile::lane_offset(LaneA::row(lane), LaneA::half(lane));
  const std::uint32_t lane_v = VTile::lane_offset(LaneB::row(lane), LaneB::half(lane));  // transposed on the way
  int slot = 0;

  __syncthreads();
  if (kMergesInBlock && !plan.combine_apart && !there[0]) {  // somebody wrote lengths meanwhile
    Departure departure(counters, plan.blocks);
    departure.announce();
    departure.finish();
  }
#pragma unroll 1
  for (int turn = 0; there[turn]; turn ^= 1) {
    const Segment& segment = segments[turn];
    const KeyRange& range = segment.range;
    const int rows = group * range.q_len;
    Keys::template load_queries<T, kQkDim, kRows>(p, plan, segment, queries, rows, query_factors);
    __syncthreads();
    const std::uint32_t tile_q = queries + head * kRows * Tile::kPitch;
    // B operand of S^T: of slice d, registers 2 (d % 2) and the next when there is one tile; else of tiles 2 t, 2 t
    // + 1.
    std::uint32_t query[kQueriesInRegisters ? kTiles : 1][kQueriesInRegisters ? kQkSlices : 1][2];
    if constexpr (kTiles == 1 && kQueriesInRegisters) {
#pragma unroll
      for (int d = 0; d < kQkSlices; d += 2) {
        std::uint32_t four[4];
        ptx::ldmatrix_x4(four, tile_q + Tile::offset(lane % 8, lane / 8 + 2 * d));
        query[0][d][0] = four[0], query[0][d][1] = four[1];
        query[0][d + 1][0] = four[2], query[0][d + 1][1] = four[3];
      }
    } else if constexpr (kQueriesInRegisters) {
#pragma unroll
      for (int d = 0; d < kQkSlices; ++d) {
        std::uint32_t four[4];
        ptx::ldmatrix_x4(four, tile_q + Tile::offset(LaneB::row(lane), LaneB::half(lane) + 2 * d));
        query[0][d][0] = four[0], query[0][d][1] = four[1];
        query[1][d][0] = four[2], query[1][d][1] = four[3];
      }
    }
    // One tile: four chunks of its 8 rows at a time, which are two slices; else one slice of two tiles.
    const std::uint32_t lane_q = tile_q + (kTiles == 1 ? Tile::lane_offset(lane % 8, lane / 8)
                                                       : Tile::lane_offset(LaneB::row(lane), LaneB::half(lane)));

    // Element e of tile t: row 8 t + 2 (lane % 4) + e. Maxima are in base 2.
    float out[kVSlices][kTiles][4], maximum[kTiles][2], sum[kTiles][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      maximum[t][0] = maximum[t][1] = -INFINITY;
      sum[t][0] = sum[t][1] = 0.0f;
#pragma unroll
      for (int c = 0; c < kVSlices; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[c][t][e] = 0.0f;
    }
    // What a row's scores are multiplied by, and the head's values; scales of tokens come later.
    [[maybe_unused]] float score_factor[kTiles][2], value_factor = 1.0f;
    if constexpr (kFactors) {
      const std::int64_t g = segment.head_group * plan.heads + head;
      const bool per_head = kScaled && !p.quantization.per_token;
      const float of_head = (per_head ? *p.quantization.k.at(0, g, 0) : 1.0f) * (plan.modified ? 1.0f : scale_log2);
      if (per_head) value_factor = *p.quantization.v.at(0, g, 0);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          score_factor[t][e] = of_head * query_factors[head * kRows + t * kTileRows + 2 * (lane % 4) + e];
    }
    const int first_full = range.first(range.q_len - 1), end_full = range.last(0);  // keys that all queries see

#pragma unroll 1
    for (int granule = segment.first + warp % plan.key_lanes; granule < segment.end; granule += plan.key_lanes) {
      ptx::cp_async_wait<kStages - 2>();
      __syncwarp();  // the granule is there for all lanes, and all have read the slot that is filled next
      producer.start(p, plan);
      const std::uint32_t keys = ring + slot * Shape::kSlotBytes, values = keys + Shape::kKBytes;
      const std::uint32_t scales_of_keys = keys + Shape::kScalesAt;
      const std::uint32_t scales_of_values = scales_of_keys + Shape::kKScaleBytes;
      slot = slot + 1 == kStages ? 0 : slot + 1;
      const int first_j = granule * kGranule;

      // Scales of the lane's two keys: of K, of V, and the exponent of the latter. The shift of the exponentials below
      // is the maximum of score and exponent, so that probability times scale stays in fp16's range. They are read
      // first, so that they come during the product, or after it where registers are full.
      [[maybe_unused]] float key_scale[2] = {1.0f, 1.0f}, value_scale[2] = {1.0f, 1.0f}, exponent[2] = {0.0f, 0.0f};
      [[maybe_unused]] const auto read_scales = [&] {
        if (!p.quantization.per_token) return;
        const float* const scales = static_cast<const float*>(__cvta_shared_to_generic(scales_of_keys)) + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          key_scale[half] = scales[8 * half];
          value_scale[half] = scales[kGranule + 8 * half];
          exponent[half] = scale_exponent(value_scale[half]);
        }
      };
      if constexpr (kScaled && kTiles <= 2) read_scales();

      // S^T = K Q^T, in two independent sums when there is one tile.
      constexpr int kSums = kTiles == 1 ? 2 : 1;
      float score[kSums][kTiles][4] = {};
      [[maybe_unused]] std::uint32_t two_slices[4];
      Keys::template each_key_slice<kQkDim>(keys + lane_k, scales_of_keys, [&](int d, const std::uint32_t(&a)[4]) {
        if constexpr (kQueriesInRegisters) {
#pragma unroll
          for (int t = 0; t < kTiles; ++t)
            ptx::mma_m16n8k16<Operand>(score[d % kSums][t], a, query[t][d][0], query[t][d][1]);
        } else if constexpr (kTiles == 1) {
          if (d % 2 == 0) ptx::ldmatrix_x4(two_slices, Tile::at_slice(lane_q, d));
          ptx::mma_m16n8k16<Operand>(score[d % kSums][0], a, two_slices[d % 2 * 2], two_slices[d % 2 * 2 + 1]);
        } else {
#pragma unroll
          for (int t = 0; t < kTiles; t += 2) {
            std::uint32_t four[4];
            ptx::ldmatrix_x4(four, Tile::at_slice(lane_q, d) + t * kTileRows * Tile::kPitch);
            ptx::mma_m16n8k16<Operand>(score[0][t], a, four[0], four[1]);
            ptx::mma_m16n8k16<Operand>(score[0][t + 1], a, four[2], four[3]);
          }
        }
      });
      if constexpr (kScaled && kTiles > 2) read_scales();
      float(&x)[kTiles][4] = score[0];
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (kSums == 2) x[t][e] += score[1][t][e];
          if constexpr (kScaled)
            x[t][e] *= score_factor[t][e % 2] * key_scale[e / 2];
          else if constexpr (kFactors)
            x[t][e] *= score_factor[t][e % 2];
          else if (!plan.modified)
            x[t][e] *= scale_log2;
        }
      [[maybe_unused]] unsigned hidden = 0;  // bit 4 t + e: the query does not see the key

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
              if (j < range.first(i) || j >= range.last(i)) {
                s = -INFINITY;
                if constexpr (kScaled) hidden |= 1u << (4 * t + 2 * half + e);
              }
            }
          }
      }

      // The shift of the exponentials is the maximum so far, or an older one while no exponential passes 2^8.
      const auto shifted = [&](int t, int e) {
        if constexpr (kScaled)
          return x[t][e] + exponent[e / 2];
        else
          return x[t][e];
      };
      bool above = false;
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) above |= shifted(t, e) > maximum[t][e % 2] + 8.0f;
      if (__any_sync(kFullMask, above)) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float highest = fmaxf(maximum[t][e], fmaxf(shifted(t, e), shifted(t, 2 + e)));
#pragma unroll
            for (int step = 4; step < kWarp; step *= 2)
              highest = fmaxf(highest, __shfl_xor_sync(kFullMask, highest, step));
            const float factor = ptx::exp2_approx(maximum[t][e] - SoftmaxState::shift(highest));
            maximum[t][e] = highest;
            sum[t][e] *= factor;
#pragma unroll
            for (int c = 0; c < kVSlices; ++c) {
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
        if constexpr (kScaled) {
#pragma unroll
          for (int e = 0; e < 4; ++e) x[t][e] = hidden >> (4 * t + e) & 1 ? 0.0f : x[t][e] * value_scale[e / 2];
        }
        probability[t][0] = ptx::movmatrix_trans(pack<Operand>(x[t][0], x[t][1]));
        probability[t][1] = ptx::movmatrix_trans(pack<Operand>(x[t][2], x[t][3]));
      }

      if (masked && range.q_len > 1 &&
          __any_sync(kFullMask, Keys::template any_not_finite<kVDim>(values, scales_of_values, Shape::kVBytes, lane))) {
        // Rare: give each row the non-finite values that it sees, then take them out of the tile.
#pragma unroll 1
        for (int n = 0; n < kGranule; ++n) {
          unsigned seen = 0;  // bit 2 t + e: by that row's query. Once a key: it takes a division
#pragma unroll
          for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int i = query_of(t * kTileRows + 2 * (lane % 4) + e, group), j = first_j + n;
              if (j >= range.first(i) && j < range.last(i)) seen |= 1u << (2 * t + e);
            }
#pragma unroll
          for (int c = 0; c < kVSlices; ++c)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const float value =
                  Keys::template value_at<kVDim>(values, scales_of_values, n, Keys::column(c, half, lane));
              if (isfinite(value)) continue;
#pragma unroll
              for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                  if (seen >> (2 * t + e) & 1) out[c][t][2 * half + e] += value;
            }
        }
        __syncwarp();
        Keys::template clean<kVDim>(values, scales_of_values, Shape::kVBytes, lane);
        __syncwarp();
      }

      // O^T += V^T P^T
      Keys::template each_value_slice<kVDim>(values + lane_v, scales_of_values, [&](int c, const std::uint32_t(&a)[4]) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) ptx::mma_m16n8k16<Operand>(out[c][t], a, probability[t][0], probability[t][1]);
      });
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
        for (int c = 0; c < kVSlices; ++c)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            result[row * Shape::kResultPitch + Keys::column(c, half, lane)] =
                kScaled ? out[c][t][2 * half + e] * value_factor : out[c][t][2 * half + e];
      }
    if (threadIdx.x == 0) there[turn ^ 1] = walk.next(p, plan.head_groups, segments[turn ^ 1]);
    __syncthreads();

    const bool whole = segment.begins() && segment.ends();
    Departure departure(counters, plan.blocks);
    const bool leaves = kMergesInBlock && !plan.combine_apart && !there[turn ^ 1];
    if (leaves && whole) departure.announce();
    for (int at = static_cast<int>(threadIdx.x); at < plan.heads * rows * (kVDim / 4); at += plan.warps * kWarp) {
      const int column = at % (kVDim / 4) * 4, row = at / (kVDim / 4) % rows, h = at / (kVDim / 4) / rows;
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
        float* const partial = partial_row<kVDim>(plan, partials, blockIdx.x, segment.begins(), h, row);
        *reinterpret_cast<float4*>(partial + column) = float4{merged[0], merged[1], merged[2], merged[3]};
        if (column == 0) *reinterpret_cast<float2*>(partial + kVDim) = float2{highest, total};
      }
    }
    if (kMergesInBlock && !whole && !plan.combine_apart) {
      // The last block of the pair to arrive merges what all have left.
      const int first = schedule.block_of(segment.start),
                last = schedule.block_of(segment.start + segment.pair.count() - 1);
      __syncthreads();
      if (threadIdx.x == 0) is_last = ptx::fetch_add_acq_rel(counters + first, 1) == last - first;
      __syncthreads();
      if (leaves) departure.announce();
      for (int at = warp; is_last && at < plan.heads * rows; at += plan.warps) {
        const int row = at % rows, h = at / rows;
        Part<kVDim, 24> part;
        part.add(plan, partials, first, first, last + 1, h, row);
        const std::int64_t g = segment.head_group * plan.heads + h;
        part.template store<T>(p, plan, segment.b, g * group + row % group, query_of(row, group));
      }
    }
    if (leaves) {
      departure.finish();
      break;
    }
  }
  ptx::cp_async_wait<0>();
}

template <class T, class Keys, int kQkDim, int kVDim>
void launch_attention_decode(const AttentionParams& p, const DecodePlan& plan, float* partials, int* counters,
                             cudaStream_t stream) {
  with_decode_tiles<kQkDim, kVDim>(p, [&](auto tiles) {
    launch("attention_fwd decode sm80", attention_decode_kernel<T, Keys, kQkDim, kVDim, decltype(tiles)::value>,
           {static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.warps * kWarp),
            static_cast<std::size_t>(plan.shared_bytes), stream},
           p, plan, partials, counters);
  });
  if (!plan.combine_apart) return;
  const bool early = cuda_device_properties(p.device.index).compute_capability >= 90;
  launch("attention_fwd decode sm80: combine", attention_decode_combine_kernel<T, kVDim>,
         {dim3(static_cast<unsigned>(plan.combine_items), static_cast<unsigned>(plan.rows),
               static_cast<unsigned>(plan.heads)),
          kCombineWarps * kWarp, 0, stream, early},
         p, plan, static_cast<const float*>(partials));
}

/// An entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void attention_decode(const AttentionParams& p, const Plan& planned, void* workspace, Stream stream) {
  using T = Element<kDtype>;
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const DecodePlan& plan = planned.as<DecodePlan>();
  const ZeroedMemory counters(p.device.index, Departure::bytes(plan.blocks), stream);
  launch_attention_decode<T, WideKeys<T>, kQkDim, kVDim>(p, plan, static_cast<float*>(workspace),
                                                         static_cast<int*>(counters.data()), native(stream));
}

}  // namespace flashkernel::cuda::sm80
