// MLA decoding (sm_80 and later): all query heads against one latent row a token (DeepSeek-V2, 2024, in its absorbed
// form). instances/ has the files that instantiate it.
//
// A block has a tile of query rows: 16, 32 or 64 heads times queries. A tile of 32 latent rows is copied once, by
// cp.async, and used twice: all 576 columns are the keys of S = Q L^T, the first 512 are the values of O = P L. Its
// eight warps share the scores (16 rows and 8 or 16 keys each), which they hand on through shared memory; the softmax
// of a row belongs to neighbouring threads; then each warp has 64 columns of the result for all rows, so that a value
// is read from shared memory once.
//
// Latent rows of 8 bits wait in the ring as they are, and are widened into one of two tiles of 16 bits while the
// softmax of the tile before is made.
//
// Blocks are persistent, and their shares are those of split-KV decode (decode/sm80/schedule.cuh); a second kernel
// merges sequences that are cut by a border of shares.
//
// Invariant on NaN: latent rows that no query of the sequence sees become zero. Where some queries see a row and others
// do not, and a value is not finite, the tile's result is summed by plain loops that leave hidden keys out.
#pragma once

#include <string>

#include "cuda/attention/decode/sm80/kernel.cuh"
#include "cuda/attention/mla/sm80/variant.hpp"
#include "cuda/tile/latent_row.cuh"
#include "flashkernel/error.hpp"

namespace flashkernel::cuda::sm80 {

/// Where a thread copies its piece of a tile from: row threadIdx.x / 8, every eighth 16 bytes. The page of the next
/// tile is looked up while this one is copied.
template <class T, bool kNarrow>
class LatentTiles {
 public:
  using Tile = SharedTile<kMlaDim>;

  /// Keys [begin, end) of sequence b, whose rows are of `chunks` times 16 bytes.
  __device__ LatentTiles(const AttentionParams& p, int chunks, int b, int begin, int end)
      : chunks_(chunks),
        table_(p.block_table + b * p.stride_block_table),
        page_size_(static_cast<unsigned>(p.page_size)),
        next_(begin + static_cast<int>(threadIdx.x) / 8),
        end_(end),
        page_(page_of(next_)) {}

  /// Starts the copy of the next tile, if there is one, and ends a group of copies.
  __device__ void start(const AttentionParams& p, std::uint32_t slot) {
    const int row = static_cast<int>(threadIdx.x) / 8, chunk = static_cast<int>(threadIdx.x) % 8;
    if (next_ - row < end_) {
      const bool there = next_ < end_;
      const int page = page_ < 0 || page_ >= p.num_pages ? 0 : page_;  // a bad page id leads to no other memory
      const unsigned at = static_cast<unsigned>(there ? next_ : 0) % page_size_;
      const std::int64_t offset = page * p.stride_k_batch + at * p.stride_k_token;
      if constexpr (kNarrow) {
        const std::uint8_t* const from = static_cast<const std::uint8_t*>(p.k) + offset;
#pragma unroll
        for (int i = 0; i < ceil_div(kMlaNarrowPitch / 16, 8); ++i)
          if (chunk + 8 * i < chunks_)
            ptx::cp_async_16(slot + row * kMlaNarrowPitch + (chunk + 8 * i) * 16, from + (chunk + 8 * i) * 16,
                             there ? 16 : 0);
      } else {
        const T* const from = static_cast<const T*>(p.k) + offset + chunk * 8;
        const std::uint32_t to = slot + Tile::offset(row, chunk);
#pragma unroll
        for (int group = 0; group < Tile::kChunks / 8; ++group)
          ptx::cp_async_16(to + group * 128, from + group * 64, there ? 16 : 0);
      }
      next_ += kMlaKeys;
      page_ = page_of(next_);
    }
    ptx::cp_async_commit();
  }

 private:
  __device__ int page_of(int key) const { return key < end_ ? table_[static_cast<unsigned>(key) / page_size_] : 0; }

  int chunks_;
  const std::int32_t* table_;
  unsigned page_size_;
  int next_, end_, page_;
};

/// A tile of 8-bit rows becomes one of T; all threads of the block take part. `scale`: of rows with one.
template <class T>
__device__ inline void widen_latent_tile(const unsigned char* narrow, std::uint32_t tile, bool one_scale, float scale) {
  using Tile = SharedTile<kMlaDim>;
  constexpr int kGroupChunks = static_cast<int>(kLatentGroup) / 8, kLatentChunks = kMlaValueDim / 8;
  constexpr int kKeyAt = static_cast<int>(LatentFormat::bytes(kMlaValueDim, 0));
#pragma unroll 3
  for (int at = static_cast<int>(threadIdx.x); at < kMlaKeys * Tile::kChunks; at += kMlaWarps * kWarp) {
    const int row = at / Tile::kChunks, chunk = at % Tile::kChunks;
    const unsigned char* const from = narrow + row * kMlaNarrowPitch;
    uint4 numbers;
    if (one_scale || chunk < kLatentChunks) {
      const float own =
          one_scale ? scale : *reinterpret_cast<const float*>(from + kMlaValueDim + chunk / kGroupChunks * 4);
      numbers = widen_e4m3x8<T>(*reinterpret_cast<const uint2*>(from + chunk * 8), own);
    } else {
      numbers = round_bf16x8<T>(*reinterpret_cast<const uint4*>(from + kKeyAt + (chunk - kLatentChunks) * 16));
    }
    *static_cast<uint4*>(__cvta_shared_to_generic(tile + Tile::offset(row, chunk))) = numbers;
  }
}

/// All but the newest `stages` - 2 groups of copies have arrived.
__device__ inline void wait_for_tile(int stages) {
  if (stages == 4)
    ptx::cp_async_wait<2>();
  else if (stages == 3)
    ptx::cp_async_wait<1>();
  else
    ptx::cp_async_wait<0>();
}

/// The warp's part of S, into shared memory [kColumnParts][kRows][kScorePitch].
template <class T, class Shape>
__device__ inline void mla_scores(std::uint32_t queries, std::uint32_t tile, float* scores) {
  using Tile = SharedTile<kMlaDim>;
  constexpr int kSlices = kMlaDim / 16 / Shape::kColumnParts;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int row_tile = warp % Shape::kRowTiles, key_warp = warp / Shape::kRowTiles % Shape::kKeyWarps,
            part = warp / (Shape::kRowTiles * Shape::kKeyWarps);
  const std::uint32_t lane_q =
      queries + row_tile * 16 * Tile::kPitch + Tile::lane_offset(LaneA::row(lane), LaneA::half(lane));
  float sum[2][4] = {};
  if constexpr (Shape::kKeysOfWarp == 16) {
    const std::uint32_t lane_k =
        tile + key_warp * 16 * Tile::kPitch + Tile::lane_offset(LaneB::row(lane), LaneB::half(lane));
#pragma unroll 4
    for (int d = 0; d < kSlices; ++d) {
      std::uint32_t a[4], k[4];
      ptx::ldmatrix_x4(a, Tile::at_slice(lane_q, d));
      ptx::ldmatrix_x4(k, Tile::at_slice(lane_k, d));
      ptx::mma_m16n8k16<T>(sum[0], a, k[0], k[1]);
      ptx::mma_m16n8k16<T>(sum[1], a, k[2], k[3]);
    }
  } else {
    // Eight keys, two slices at a time; even and odd slices have sums of their own.
    const std::uint32_t lane_k = tile + key_warp * 8 * Tile::kPitch + Tile::lane_offset(lane % 8, lane / 8);
#pragma unroll 3
    for (int at = 0; at < kSlices; at += 2) {
      const int d = part * kSlices + at;
      std::uint32_t a[2][4], k[4];
      ptx::ldmatrix_x4(k, Tile::at_slice(lane_k, d));
      ptx::ldmatrix_x4(a[0], Tile::at_slice(lane_q, d));
      ptx::ldmatrix_x4(a[1], Tile::at_slice(lane_q, d + 1));
      ptx::mma_m16n8k16<T>(sum[0], a[0], k[0], k[1]);
      ptx::mma_m16n8k16<T>(sum[1], a[1], k[2], k[3]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[0][e] += sum[1][e];
  }
  float* const to = scores + (part * Shape::kRows + row_tile * 16 + lane / 4) * Shape::kScorePitch +
                    key_warp * Shape::kKeysOfWarp + 2 * (lane % 4);
#pragma unroll
  for (int n = 0; n < Shape::kKeysOfWarp / 8; ++n) {
    *reinterpret_cast<float2*>(to + n * 8) = float2{sum[n][0], sum[n][1]};
    *reinterpret_cast<float2*>(to + n * 8 + 8 * Shape::kScorePitch) = float2{sum[n][2], sum[n][3]};
  }
}

/// The softmax of a row, which kThreads neighbouring threads share: each has kKeys keys of a tile and their sum.
template <class T, class Shape>
struct MlaSoftmax {
  static constexpr int kThreads = kMlaWarps * kWarp / Shape::kRows, kKeys = kMlaKeys / kThreads;
  float maximum = -INFINITY, sum = 0.0f;  // in base 2

  __device__ static int row() { return static_cast<int>(threadIdx.x) / kThreads; }
  __device__ static int part() { return static_cast<int>(threadIdx.x) % kThreads; }

  /// Scores of a tile become weights, in T, at the row's beginning. The row sees the tile's first `visible` keys.
  __device__ void weigh(float* scores, float* factors, float scale_log2, int visible) {
    float* const from = scores + row() * Shape::kScorePitch;
    const int first = part() * kKeys;
    float x[kKeys], highest = maximum;
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      x[k] = from[first + k];
#pragma unroll
      for (int other = 1; other < Shape::kColumnParts; ++other)
        x[k] += from[other * Shape::kRows * Shape::kScorePitch + first + k];
      x[k] = first + k < visible ? x[k] * scale_log2 : -INFINITY;
      highest = fmaxf(highest, x[k]);
    }
#pragma unroll
    for (int step = 1; step < kThreads; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(kFullMask, highest, step));
    const float shift = SoftmaxState::shift(highest), factor = ptx::exp2_approx(maximum - shift);
    maximum = highest;
    sum *= factor;
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      x[k] = first + k < visible ? ptx::exp2_approx(x[k] - shift) : 0.0f;
      sum += x[k];
    }
    if (part() == 0) factors[row()] = factor;
    __syncwarp();  // the row's scores are read
    auto* const to = reinterpret_cast<std::uint32_t*>(from) + first / 2;
#pragma unroll
    for (int k = 0; k < kKeys; k += 2) to[k / 2] = pack<T>(x[k], x[k + 1]);
  }

  /// Hands on a row's maximum and sum.
  __device__ void put(float* states) {
#pragma unroll
    for (int step = 1; step < kThreads; step *= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
    if (part() == 0) states[2 * row()] = maximum, states[2 * row() + 1] = sum;
  }
};

/// The warp's 64 columns of the result, as m16n8 accumulators.
template <class T, class Shape>
struct MlaResult {
  using Tile = SharedTile<kMlaDim>;
  static constexpr int kColumns = kMlaValueDim / kMlaWarps, kPairs = kColumns / 16;
  float out[Shape::kRowTiles][2 * kPairs][4];

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ static int first_column() { return static_cast<int>(threadIdx.x) / kWarp * kColumns; }
  __device__ static int row(int m, int half) { return m * 16 + lane() / 4 + half * 8; }
  __device__ static int column(int n) { return first_column() + n * 8 + 2 * (lane() % 4); }

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < 2 * kPairs; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][n][e] = 0.0f;
  }
  __device__ void rescale(const float* factors) {
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m) {
      const float upper = factors[row(m, 0)], lower = factors[row(m, 1)];
      if (upper == 1.0f && lower == 1.0f) continue;
#pragma unroll
      for (int n = 0; n < 2 * kPairs; ++n) {
        out[m][n][0] *= upper, out[m][n][1] *= upper;
        out[m][n][2] *= lower, out[m][n][3] *= lower;
      }
    }
  }
  __device__ void add(std::uint32_t weights, std::uint32_t tile) {
    const std::uint32_t lane_p = weights + LaneA::row(lane()) * (Shape::kScorePitch * 4) + LaneA::half(lane()) * 16;
    const std::uint32_t lane_v = tile + Tile::lane_offset(LaneA::row(lane()), LaneA::half(lane()));  // transposed
#pragma unroll
    for (int step = 0; step < kMlaKeys / 16; ++step) {
      std::uint32_t p[Shape::kRowTiles][4];
#pragma unroll
      for (int m = 0; m < Shape::kRowTiles; ++m)
        ptx::ldmatrix_x4(p[m], lane_p + m * 16 * (Shape::kScorePitch * 4) + step * 32);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        std::uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, Tile::at_slice(lane_v + step * 16 * Tile::kPitch, first_column() / 16 + pair));
#pragma unroll
        for (int m = 0; m < Shape::kRowTiles; ++m) {
          ptx::mma_m16n8k16<T>(out[m][2 * pair], p[m], v[0], v[1]);
          ptx::mma_m16n8k16<T>(out[m][2 * pair + 1], p[m], v[2], v[3]);
        }
      }
    }
  }
  /// The same by plain loops, where a row adds its first `visible(row)` keys alone.
  template <class Visible>
  __device__ void add_visible(const float* weights, std::uint32_t tile, Visible visible) {
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto* const p = reinterpret_cast<const unsigned short*>(weights + row(m, half) * Shape::kScorePitch);
        const int count = min(visible(row(m, half)), kMlaKeys);
#pragma unroll 1
        for (int k = 0; k < count; ++k) {
          const float weight = bits_to_float<T>(p[k]);
#pragma unroll
          for (int n = 0; n < 2 * kPairs; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const std::uint32_t bits =
                  *static_cast<const unsigned short*>(__cvta_shared_to_generic(tile + Tile::element(k, column(n) + e)));
              float& to = out[m][n][2 * half + e];
              to = fmaf(weight, bits_to_float<T>(bits), to);
            }
        }
      }
  }
};

/// Whether one of the tile's keys from `first` on has a value that is not finite; all threads of the block take part,
/// and `found` is set.
template <class T>
__device__ inline void find_not_finite(std::uint32_t tile, int first, int* found) {
  using Tile = SharedTile<kMlaDim>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int key = first + warp; key < kMlaKeys; key += kMlaWarps)
    for (int chunk = lane; chunk < kMlaValueDim / 8; chunk += kWarp)
      if (any_not_finite<T>(tile + Tile::offset(key, chunk), 16, 0, 1)) *found = 1;
}

/// Stores a segment's result, or the block's part of it; `states` has each row's maximum and sum.
template <class T, class Shape>
__device__ inline void put_result(const MlaResult<T, Shape>& result, const AttentionParams& p, const DecodePlan& plan,
                                  const Segment& segment, const float* states, float* partials) {
  constexpr float kLn2 = 0.69314718055994531f;
  const int group = static_cast<int>(p.heads_q / p.heads_kv), rows = group * segment.range.q_len;
  const bool whole = segment.begins() && segment.ends();
#pragma unroll
  for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = result.row(m, half);
      if (row >= rows) continue;
      SoftmaxState state{states[2 * row], states[2 * row + 1]};
      if (!whole) {
        float* const to = partial_row<kMlaValueDim>(plan, partials, blockIdx.x, segment.begins(), 0, row);
#pragma unroll
        for (int n = 0; n < 2 * result.kPairs; ++n)
          *reinterpret_cast<float2*>(to + result.column(n)) =
              float2{result.out[m][n][2 * half], result.out[m][n][2 * half + 1]};
        if (result.column(0) == 0) *reinterpret_cast<float2*>(to + kMlaValueDim) = float2{state.maximum, state.sum};
        continue;
      }
      const int i = query_of(row, group);
      const std::int64_t h = static_cast<std::int64_t>(segment.head_group) * group + row % group;
      state.maximum *= kLn2;  // -inf stays
      float lse;
      const float factor = state.finish(nullptr, h, &lse);
      if (p.lse && result.column(0) == 0) p.lse[p.lse_offset(segment.b, h, i)] = lse;
      auto* const to = static_cast<unsigned short*>(p.out) + p.out_offset(segment.b, h, i);
#pragma unroll
      for (int n = 0; n < 2 * result.kPairs; ++n) {
        const float low = result.out[m][n][2 * half], high = result.out[m][n][2 * half + 1];
        const std::uint32_t packed =
            pack<T>(factor == 0.0f ? 0.0f : low * factor, factor == 0.0f ? 0.0f : high * factor);
        if (plan.vectors_out) {
          *reinterpret_cast<std::uint32_t*>(to + result.column(n)) = packed;
        } else {
          to[result.column(n)] = static_cast<unsigned short>(packed);
          to[result.column(n) + 1] = static_cast<unsigned short>(packed >> 16);
        }
      }
    }
}

template <class T, class Shape>
__global__ void __launch_bounds__(kMlaWarps* kWarp, 1)
    mla_decode_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ MlaPlan plan,
                      const __grid_constant__ LatentFormat format, float* partials) {
  constexpr bool kNarrow = Shape::kNarrow;
  constexpr float kLog2E = 1.4426950408889634f;
  extern __shared__ __align__(128) unsigned char shared[];
  const std::uint32_t queries = ptx::shared_address(shared), widened = queries + Shape::kQueryBytes,
                      ring = widened + Shape::kWidenedBytes;
  float* const scores =
      reinterpret_cast<float*>(shared + Shape::kQueryBytes + Shape::kWidenedBytes + plan.stages * Shape::kStageBytes);
  float* const factors = scores + Shape::kScoreBytes / 4;
  float* const states = factors + Shape::kRows;
  const std::uint32_t weights = ptx::shared_address(scores);

  const Schedule schedule(p, plan.decode);
  if (static_cast<int>(blockIdx.x) >= schedule.blocks()) {
    if (threadIdx.x < kWarp) store_empty_sequences<T>(p, plan.decode.vectors_out);
    return;
  }
  // The segment that the block is in, and the next one: in shared memory, registers are full.
  __shared__ SegmentWalk walk;
  __shared__ Segment segments[2];
  __shared__ int there[2];       // words: of two bytes a compiler may read both
  __shared__ int not_finite[2];  // of a tile, and of the next one
  const SegmentWalk my_walk(p, schedule, static_cast<int>(blockIdx.x));
  if (threadIdx.x == 0) {
    walk = my_walk;
    there[0] = walk.next(p, plan.decode.head_groups, segments[0]);
    not_finite[0] = not_finite[1] = 0;
  }
  ptx::allow_next_kernel();
  if (threadIdx.x >= (kMlaWarps - 1) * kWarp) store_empty_sequences<T>(p, plan.decode.vectors_out);
  __syncthreads();

  const int group = static_cast<int>(p.heads_q / p.heads_kv);
  const float scale_log2 = p.scale * kLog2E;
  const bool one_scale = format.kind == LatentKind::kOneScale;
  const float row_scale = kNarrow && one_scale ? format.scale.value() : 1.0f;
  const int chunks = one_scale ? kMlaDim / 16 : kMlaNarrowPitch / 16;  // of a row of 8 bits
  const auto widen = [&](int slot, int which) {
    widen_latent_tile<T>(shared + Shape::kQueryBytes + Shape::kWidenedBytes + slot * Shape::kStageBytes,
                         widened + which * Shape::kTileBytes, one_scale, row_scale);
  };
  MlaResult<T, Shape> result;
#pragma unroll 1
  for (int turn = 0; there[turn]; turn ^= 1) {
    const Segment& segment = segments[turn];
    const KeyRange& range = segment.range;
    const int rows = group * range.q_len;
    const int begin = segment.first * kGranule, end = min(segment.end * kGranule, range.last(range.q_len - 1));
    LatentTiles<T, kNarrow> tiles(p, chunks, segment.b, begin, end);
    for (int stage = 0; stage < plan.stages - 1; ++stage) tiles.start(p, ring + stage * Shape::kStageBytes);
    load_queries<T, kMlaDim, Shape::kRows>(p, plan.decode, segment, queries, rows);
    if (threadIdx.x == 0) there[turn ^ 1] = walk.next(p, plan.decode.head_groups, segments[turn ^ 1]);
    result.clear();
    MlaSoftmax<T, Shape> softmax;
    // The first key that a row does not see; 0 for rows that are none.
    const auto last_of = [&](int row) { return row < rows ? min(end, range.last(query_of(row, group))) : 0; };
    const int own_last = last_of(softmax.row());
    const int full = range.last(0);  // keys up to this one are seen by all queries
    int slot = 0, parity = 0;
    const auto start_next = [&] {  // into the place of the one before `slot`
      tiles.start(p, ring + (slot == 0 ? plan.stages - 1 : slot - 1) * Shape::kStageBytes);
      slot = slot + 1 == plan.stages ? 0 : slot + 1;
    };
    if constexpr (kNarrow) {
      wait_for_tile(plan.stages);
      __syncthreads();
      widen(0, 0);
      start_next();
    }
#pragma unroll 1
    for (int first = begin; first < end; first += kMlaKeys) {
      const std::uint32_t tile = kNarrow ? widened + parity * Shape::kTileBytes : ring + slot * Shape::kStageBytes;
      if constexpr (!kNarrow) wait_for_tile(plan.stages);
      __syncthreads();  // the tile is there, and the one before it is used up
      if constexpr (!kNarrow) start_next();
      mla_scores<T, Shape>(queries, tile, scores);
      const bool masked = first + kMlaKeys > full && full < end;  // some see keys of the tile that others do not
      if (masked) find_not_finite<T>(tile, max(0, full - first), &not_finite[parity]);
      if (threadIdx.x == 0) not_finite[parity ^ 1] = 0;
      if constexpr (kNarrow) wait_for_tile(plan.stages);
      __syncthreads();
      softmax.weigh(scores, factors, scale_log2, own_last - first);
      if constexpr (kNarrow) {
        if (first + kMlaKeys < end) widen(slot, parity ^ 1);
        start_next();
      }
      __syncthreads();
      result.rescale(factors);
      if (masked && not_finite[parity])
        result.add_visible(scores, tile, [&](int row) { return last_of(row) - first; });
      else
        result.add(weights, tile);
      parity ^= 1;
    }
    softmax.put(states);
    __syncthreads();
    put_result<T, Shape>(result, p, plan.decode, segment, states, partials);
    __syncthreads();  // the queries, the states and the segment are used up
  }
  ptx::cp_async_wait<0>();
}

/// An entry of the table.
template <DType kDtype, bool kNarrow>
void mla_decode(const MlaDecodeParams& params, const Plan& planned, void* workspace, Stream stream) {
  using T = Element<kDtype>;
  const MlaPlan& plan = planned.as<MlaPlan>();
  const AttentionParams p = mla_grouped(params.attention, plan.decode.head_groups);
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  if (plan.stages == 0)
    throw Unsupported("attention_mla_decode: the GPU's shared memory holds no tile of " +
                      std::to_string(plan.decode.rows) + " query rows; use attention_mla_decode/cuda/generic");
  const CudaDeviceGuard guard(p.device.index);
  auto* const partials = static_cast<float*>(workspace);
  with_mla_shape<kNarrow>(plan.decode.rows, [&](auto shape) {
    launch("attention_mla_decode sm80", mla_decode_kernel<T, decltype(shape)>,
           {static_cast<unsigned>(plan.decode.blocks), kMlaWarps * kWarp,
            static_cast<std::size_t>(plan.decode.shared_bytes), native(stream)},
           p, plan, params.format, partials);
  });
  const bool early = cuda_device_properties(p.device.index).compute_capability >= 90;
  launch("attention_mla_decode sm80: combine", attention_decode_combine_kernel<T, kMlaValueDim>,
         {dim3(static_cast<unsigned>(plan.decode.combine_items), static_cast<unsigned>(plan.decode.rows), 1),
          kCombineWarps * kWarp, 0, native(stream), early},
         p, plan.decode, static_cast<const float*>(partials));
}

}  // namespace flashkernel::cuda::sm80
