// linear for up to 64 rows (decode) on 9.0, by wgmma. Such a call is bound by reading the weights from memory once. So
// the weights are the left operand of wgmma, whose 64 rows they fill, and the rows of x are the right operand, which
// may have 8 to 64 columns. One warp copies both by TMA into a ring that is deep enough to hide the latency of memory.
// One warpgroup multiplies.
//
// The work is cut in one of two ways (plan.hpp). Either a block multiplies all of k for its features, and all blocks
// have equally many features. Or the blocks of a cluster have the same features and each multiplies a part of k. Each
// of these blocks finishes a share of the features: the others send it their sums by st.async, and it adds them in the
// order of k. Called by linear/tiles/sm90a/linear.cu.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/linear/few_rows/sm90a/few_rows.hpp"
#include "cuda/linear/tiles/sm90a/operand_map.hpp"

namespace flashkernel::cuda::sm90a {

/// kRows columns of x (8, 16, 32, 64) and up to kFeatures features (64, 128); kBlocksPerSm: 2, or 1 with twice the
/// ring. kLines: of 128 bytes of a feature that come together. kParts: k may be split; else no room is kept for mail.
template <int kRows_, int kBlocksPerSm_, int kLines_, bool kParts_, int kFeatures_ = 64>
struct FewRowsShape {
  static constexpr int kRows = kRows_, kFeatures = kFeatures_, kBlocksPerSm = kBlocksPerSm_, kLines = kLines_;
  static constexpr int kTiles = kFeatures / 64;  // of wgmma
  static constexpr int kTileK = 64 * kLines;
  static constexpr bool kParts = kParts_;
  // One warpgroup multiplies, one warp loads; from 32 rows on there is work for four more that only finish, unless a
  // long stream hides it.
  static constexpr int kHelpers = kParts && (kRows >= 32 || kBlocksPerSm == 1) ? 4 : 0;
  static constexpr int kFinishers = 128 + 32 * kHelpers, kThreads = 160 + 32 * kHelpers;
  static constexpr int kMostAhead = kRows == 64 ? 8 : 6;  // k-tiles of the weights fetched ahead: see fetch_ahead
  static constexpr int kAheadOfStream = kLines > 1 ? 2 : 0;
  static constexpr int kBytesWeight = kFeatures * kTileK * 2, kBytesX = kRows * kTileK * 2;
  static constexpr int kStageBytes = kBytesWeight + kBytesX;  // multiples of 1024
  // Parts are [row][feature], floats; a fragment's lanes hit all banks. What this block finishes itself takes the
  // ring's place, what others send (at most 7 of 8 features) has its own: they may be ahead of this one.
  static constexpr int kPitch = kFeatures + 4, kMailPitch = kFeatures * 7 / 8 + 4;
  static constexpr int kMailBytes = kParts ? kRows * kMailPitch * 4 : 0;
  static constexpr int kRoom = 228 * 1024 / kBlocksPerSm - 1024 - kMailBytes;  // less what the system takes of a block
  static constexpr int kMostStages = 16, kBarrierBytes = 16 * kMostStages + 8;
  static constexpr int kStages =
      (kRoom - kBarrierBytes) / kStageBytes < kMostStages ? (kRoom - kBarrierBytes) / kStageBytes : kMostStages;
  static constexpr int kLeastStages = (kRows * kPitch * 4 + kStageBytes - 1) / kStageBytes;
  static_assert(kLeastStages <= kStages && kMailBytes % 16 == 0);
};

struct FewRowsArguments {
  CUtensorMap weight, x;
  LinearEpilogue epilogue;
  int rows, features, num_k;  // num_k: k-tiles
  int block_features;         // of a block: a multiple of 8, of 8 `splits`; kFeatures where lines come in pairs
  int splits;                 // blocks of a cluster
  int stages;                 // of the ring: as many as there are k-tiles, if they fit
};

inline constexpr int kMostSplits = 8;  // the largest portable cluster

/// What one block does: features [first_feature, + features), k-tiles [first, + count); it finishes `share` of the
/// features.
template <class Shape>
struct FewRowsBlock {
  int features, splits, rank, share, first_feature, first, count, stages, mail;
  int arriving;  // bytes of a k-tile
  std::uint32_t base, barriers;

  __device__ FewRowsBlock(const FewRowsArguments& p, const char* shared)
      : features(p.block_features),
        splits(Shape::kParts ? p.splits : 1),
        rank(static_cast<int>(blockIdx.x) % splits),
        share(features / splits),
        first_feature(static_cast<int>(blockIdx.x) / splits * features),
        first(rank * p.num_k / splits),
        count((rank + 1) * p.num_k / splits - first),
        stages(p.stages),
        mail(stages * Shape::kStageBytes),
        arriving((features + p.rows) * Shape::kTileK * 2),
        base(ptx::shared_address(shared)),
        barriers(base + mail + Shape::kMailBytes) {}
  __device__ std::uint32_t full(int slot) const { return barriers + 8 * slot; }
  __device__ std::uint32_t empty(int slot) const { return full(Shape::kMostStages + slot); }
  __device__ std::uint32_t mail_full() const { return full(2 * Shape::kMostStages); }
  /// Where block `owner` keeps what block `from` sends: everybody's but its own, in the order of ranks.
  __device__ int mail_column(int owner, int from) const { return (from < owner ? from : from - 1) * share; }
};

/// load(offset in the stage, first feature, first line) for the boxes of k-tile `tile` of kLines lines: 8 features
/// each, so that a feature's lines, which are neighbours in memory, are asked for together.
template <class Shape, class Load>
__device__ inline void each_box(int first_feature, int tile, Load load) {
#pragma unroll
  for (int i = 0; i < Shape::kFeatures / 8; ++i)
    load(i * 8 * 128 * Shape::kLines, first_feature + 8 * i, tile * Shape::kLines);
}

/// The producer's thread.
template <class Shape, bool kAlongIn>
__device__ inline void load_few_rows(const FewRowsArguments& p, const FewRowsBlock<Shape>& block) {
  const std::uint64_t once = ptx::l2_evict_first(), shared_by_all = ptx::l2_evict_last();
  int slot = 0;
  std::uint32_t parity = 1;
#pragma unroll 1
  for (int t = 0; t < block.count; ++t) {
    const int k = (block.first + t) * Shape::kTileK;
    const std::uint32_t weight = block.base + slot * Shape::kStageBytes;
    if (t >= block.stages) {  // else as the kernel began
      ptx::mbarrier_wait(block.empty(slot), parity);
      ptx::mbarrier_arrive_expect(block.full(slot), block.arriving);
    }
    if constexpr (Shape::kLines > 1) {
      each_box<Shape>(block.first_feature, block.first + t, [&](int at, int feature, int line) {
        ptx::tma_load(weight + at, &p.weight, block.full(slot), once, 0, feature, line);
      });
    } else {
      ptx::tma_load(weight, &p.weight, block.full(slot), once, kAlongIn ? k : block.first_feature,
                    kAlongIn ? block.first_feature : k);
    }
#pragma unroll
    for (int line = 0; line < Shape::kLines; ++line)
      ptx::tma_load(weight + Shape::kBytesWeight + line * Shape::kRows * 128, &p.x, block.full(slot), shared_by_all,
                    k + 64 * line, 0);
    if (++slot == block.stages) slot = 0, parity ^= 1;
  }
}

/// Asks for the weights before the block's turn: to L2 only, so that what the kernels before may still write to them is
/// seen. Short parts as a whole. The beginning of a long stream costs more than it gives in tiles of one line; in tiles
/// of two it gives.
template <class Shape, bool kAlongIn>
__device__ inline void fetch_ahead(const FewRowsArguments& p, const FewRowsBlock<Shape>& block) {
  const std::uint64_t once = ptx::l2_evict_first();
  if constexpr (Shape::kLines > 1) {
    for (int t = 0; t < min(block.count, Shape::kAheadOfStream); ++t)
      each_box<Shape>(block.first_feature, block.first + t,
                      [&](int, int feature, int line) { ptx::tma_prefetch(&p.weight, once, 0, feature, line); });
    return;
  }
  if (block.count > Shape::kMostAhead) return;
  for (int t = 0; t < block.count; ++t) {
    const int k = (block.first + t) * Shape::kTileK;
    ptx::tma_prefetch(&p.weight, once, kAlongIn ? k : block.first_feature, kAlongIn ? block.first_feature : k);
  }
}

/// Fragments of a block's sums: element 4 c + e of lane l in warp w is, of tile i, feature 64 i + 16 w + l/4 + 8 (e/2)
/// of row 8 c + 2 (l%4) + e%2.
template <class Shape>
using FewRowsSums = float[Shape::kTiles][Shape::kRows / 2];

/// The multiplying warpgroup. Features past the block's are multiplied, too: what lies in their places, into sums that
/// nobody reads.
template <class T, class Shape, bool kAlongIn>
__device__ inline void multiply_few_rows(const FewRowsBlock<Shape>& block, FewRowsSums<Shape>& sum) {
  int slot = 0, last = 0;
  std::uint32_t parity = 0;
#pragma unroll 1
  for (int t = 0; t < block.count; ++t) {
    const std::uint32_t weight = block.base + slot * Shape::kStageBytes;
    ptx::mbarrier_wait(block.full(slot), parity);
#pragma unroll
    for (int i = 0; i < Shape::kTiles; ++i) ptx::hold(sum[i]);
    ptx::wgmma_fence();
#pragma unroll
    for (int line = 0; line < Shape::kLines; ++line) {
      // A box is 8 features' first lines, then their second ones: the next 8 features are kLines KB on.
      const std::uint64_t a = ptx::matrix_descriptor(weight + line * 1024, 8192, 1024 * Shape::kLines);
      const std::uint64_t b =
          ptx::matrix_descriptor(weight + Shape::kBytesWeight + line * Shape::kRows * 128, 8192, 1024);
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int i = 0; i < Shape::kTiles; ++i)
          ptx::wgmma_ss<T, !kAlongIn, false>(sum[i], a + step * (kAlongIn ? 2 : 128) + i * (8192 / 16) * Shape::kLines,
                                             b + step * 2, t > 0 || line > 0 || step > 0);
    }
    ptx::wgmma_commit();
#pragma unroll
    for (int i = 0; i < Shape::kTiles; ++i) ptx::hold(sum[i]);
    ptx::wgmma_wait<1>();
    if (threadIdx.x == 0 && t > 0) ptx::mbarrier_arrive(block.empty(last));
    last = slot;
    if (++slot == block.stages) slot = 0, parity ^= 1;
  }
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < Shape::kTiles; ++i) ptx::hold(sum[i]);
}

/// Each warp's half fragments (8 features) to the block that finishes them. Its own take the place of the ring.
template <class Shape>
__device__ inline void send_parts(const FewRowsBlock<Shape>& block, char* shared, const FewRowsSums<Shape>& sum) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int half = 0; half < 2 * Shape::kTiles; ++half) {
    const int at = half / 2 * 64 + 16 * warp + half % 2 * 8;
    if (Shape::kParts && at >= block.features) break;
    const int owner = Shape::kParts ? at / block.share : 0;  // shares are multiples of 8
    const int feature = at - owner * block.share + lane / 4, row = lane % 4 * 2;
    const auto to = static_cast<std::uint32_t>(owner);
    const int word = row * Shape::kMailPitch + block.mail_column(owner, block.rank) + feature;
    const std::uint32_t there = ptx::map_shared(block.base + block.mail + 4 * word, to);
    const std::uint32_t barrier = ptx::map_shared(block.mail_full(), to);
    float* const own = reinterpret_cast<float*>(shared) + row * Shape::kPitch + feature;
#pragma unroll
    for (int c = 0; c < Shape::kRows / 8; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = sum[half / 2][4 * c + half % 2 * 2 + e];
        if (!Shape::kParts || owner == block.rank) {
          own[(8 * c + e) * Shape::kPitch] = x;
        } else {
          ptx::store_async(there + 4 * (8 * c + e) * Shape::kMailPitch, x, barrier);
        }
      }
  }
}

template <class T, class Shape, bool kAlongIn>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    few_rows_kernel(const __grid_constant__ FewRowsArguments p) {
  extern __shared__ __align__(1024) char shared[];
  const FewRowsBlock<Shape> block(p, shared);
  const int thread = static_cast<int>(threadIdx.x);
  const bool multiplies = thread < 128, loads = thread >= 128 && thread < 160;
  if (thread == 128) {
    ptx::tma_prefetch_map(&p.weight);
    ptx::tma_prefetch_map(&p.x);
    for (int s = 0; s < block.stages; ++s) {
      ptx::mbarrier_init(block.full(s), 1);
      ptx::mbarrier_init(block.empty(s), 1);
      if (s < block.count) ptx::mbarrier_arrive_expect(block.full(s), block.arriving);
    }
    ptx::mbarrier_init(block.mail_full(), 1);
    const int expected = (block.splits - 1) * block.share * Shape::kRows * 4;
    if (expected > 0) ptx::mbarrier_arrive_expect(block.mail_full(), static_cast<std::uint32_t>(expected));
    ptx::fence_mbarrier_init();
    fetch_ahead<Shape, kAlongIn>(p, block);
    if (p.epilogue.bias)
      ptx::prefetch_l2(static_cast<const char*>(p.epilogue.bias.data) +
                       block.first_feature * dtype_bytes(p.epilogue.bias.dtype));
  }
  __syncwarp();
  if (block.splits > 1) ptx::cluster_arrive_relaxed();
  // Who has made the barriers need not wait for those who use them.
  constexpr std::uint32_t kMade = 1;
  if (loads)
    ptx::barrier_arrive(kMade, Shape::kThreads);
  else
    ptx::barrier_sync(kMade, Shape::kThreads);
  ptx::wait_for_previous_kernel();
  if (thread == 128) {
    load_few_rows<Shape, kAlongIn>(p, block);
    ptx::allow_next_kernel();  // not before: its blocks would stand in the way of the weights
  }

  // A thread finishes four neighbouring features for some of the rows.
  const int finisher = thread - (thread >= 160 ? 32 : 0);
  const int across = block.share / 4, rows_at_once = Shape::kFinishers / across;  // across: 2 to 32
  const int mine = finisher % across * 4, feature = block.first_feature + block.rank * block.share + mine;
  // The bias is asked for now and looked at in the end: its conversion would wait for memory.
  const TypedPointer& bias_from = p.epilogue.bias;
  const bool plain_bias = bias_from && bias_from.dtype == dtype_of<T> && feature + 4 <= p.features &&
                          reinterpret_cast<std::uintptr_t>(bias_from.data) % 8 == 0;
  Packed<T, 4> raw_bias{};
  if (plain_bias) raw_bias = load_vector<4>(static_cast<const T*>(bias_from.data) + feature);
  FewRowsSums<Shape> sum;
  if (multiplies) multiply_few_rows<T, Shape, kAlongIn>(block, sum);
  __syncwarp();
  if (block.splits > 1) ptx::cluster_wait();  // all blocks are there, and their mail's barriers
  __syncthreads();                            // the ring is read
  if (multiplies) send_parts(block, shared, sum);
  if (block.splits > 1) ptx::mbarrier_wait(block.mail_full(), 0);
  __syncthreads();  // this block's own parts are there
  if (loads || feature >= p.features || finisher >= rows_at_once * across) return;
  float bias[4];
  if (plain_bias) {
    unpack(bias, raw_bias);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) bias[i] = bias_of(bias_from, feature + i, p.features);
  }

#pragma unroll 2
  for (int row = finisher / across; row < p.rows; row += rows_at_once) {
    float4 part[kMostSplits];  // all are under way at once
#pragma unroll
    for (int other = 0; other < kMostSplits; ++other) {
      if (other >= block.splits) continue;
      const char* const from =
          other == block.rank
              ? shared + 4 * (row * Shape::kPitch + mine)
              : shared + block.mail + 4 * (row * Shape::kMailPitch + block.mail_column(block.rank, other) + mine);
      part[other] = *reinterpret_cast<const float4*>(from);
    }
    float x[4] = {bias[0], bias[1], bias[2], bias[3]};
#pragma unroll
    for (int other = 0; other < kMostSplits; ++other)
      if (other < block.splits)
        x[0] += part[other].x, x[1] += part[other].y, x[2] += part[other].z, x[3] += part[other].w;
    finish_4<T>(p.epilogue, row, feature, p.features, x);
  }
}

/// k-tiles of the longest part.
inline int tiles_of_part(std::int64_t k, int splits, int tile) {
  return static_cast<int>(ceil_div(ceil_div(k, tile), splits));
}

/// Weights [mn, k] along k, k a multiple of 64: boxes of `lines` lines of 8 features, their first lines before their
/// second ones.
template <class T>
CUtensorMap line_map(const char* name, const GemmOperand& operand, std::int64_t mn, std::int64_t k, int lines) {
  TensorMapSpec spec;
  spec.data = operand.data;
  spec.dtype = dtype_of<T>;
  spec.rank = 3;
  spec.dims[0] = {64, 1, 64};
  spec.dims[1] = {mn, operand.stride, 8};
  spec.dims[2] = {k / 64, 64, static_cast<std::uint32_t>(lines)};
  return make_tensor_map(name, spec);
}

template <class T, class Shape, bool kAlongIn>
void launch_few_rows(const FewRowsProblem& p, const FewRowsBlocksPlan& plan, cudaStream_t stream) {
  const char* const name = "linear: few rows";
  FewRowsArguments arguments;
  if constexpr (Shape::kLines > 1)
    arguments.weight = line_map<T>(name, p.weight, p.features, p.k, Shape::kLines);
  else
    arguments.weight = operand_map<T>(name, p.weight, p.features, p.k, plan.block_features, Shape::kTileK);
  // Boxes end with x: rows past it cost the copy engine time as if they were there, or more. What lies in their
  // places is multiplied into sums that nobody reads.
  arguments.x = operand_map<T>(name, p.x, p.rows, p.k, static_cast<int>(p.rows), 64);
  arguments.epilogue = p.epilogue;
  arguments.rows = static_cast<int>(p.rows);
  arguments.features = static_cast<int>(p.features);
  arguments.num_k = static_cast<int>(ceil_div(p.k, Shape::kTileK));
  arguments.block_features = plan.block_features;
  arguments.splits = plan.splits;
  const int tiles = tiles_of_part(p.k, plan.splits, Shape::kTileK);
  arguments.stages = std::clamp(tiles, Shape::kLeastStages, Shape::kStages);
  LaunchShape shape{
      static_cast<unsigned>(ceil_div(p.features, plan.block_features) * plan.splits), Shape::kThreads,
      static_cast<std::size_t>(arguments.stages * Shape::kStageBytes + Shape::kMailBytes + Shape::kBarrierBytes),
      stream};
  shape.cluster = static_cast<unsigned>(plan.splits);
  shape.early = true;
  launch(name, few_rows_kernel<T, Shape, kAlongIn>, shape, arguments);
}

template <class T>
void few_rows(const FewRowsProblem& p, const FewRowsBlocksPlan& plan, cudaStream_t stream) {
  const bool alone = plan.blocks_per_sm == 1;
  // Shapes that may split k.
  const auto with_parts = [&](auto rows, auto along_in) {
    constexpr int kRows = decltype(rows)::value;
    constexpr bool kAlongIn = decltype(along_in)::value;
    if (alone) return launch_few_rows<T, FewRowsShape<kRows, 1, 1, true>, kAlongIn>(p, plan, stream);
    launch_few_rows<T, FewRowsShape<kRows, 2, 1, true>, kAlongIn>(p, plan, stream);
  };
  const auto whole = [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    if (plan.line_pairs) return launch_few_rows<T, FewRowsShape<kRows, 1, 2, false>, true>(p, plan, stream);
    if (plan.block_features > 64) {
      if (alone) return launch_few_rows<T, FewRowsShape<kRows, 1, 1, false, 128>, true>(p, plan, stream);
      return launch_few_rows<T, FewRowsShape<kRows, 2, 1, false, 128>, true>(p, plan, stream);
    }
    if (alone) return launch_few_rows<T, FewRowsShape<kRows, 1, 1, false>, true>(p, plan, stream);
    launch_few_rows<T, FewRowsShape<kRows, 2, 1, false>, true>(p, plan, stream);
  };
  const auto with_rows = [&](auto rows) {
    if (!p.weight.k_major) return with_parts(rows, std::false_type{});
    if (plan.splits > 1) return with_parts(rows, std::true_type{});
    whole(std::integral_constant<int, std::max(16, decltype(rows)::value)>{});
  };
  if (p.rows <= 8) return with_rows(std::integral_constant<int, 8>{});
  if (p.rows <= 16) return with_rows(std::integral_constant<int, 16>{});
  if (p.rows <= 32) return with_rows(std::integral_constant<int, 32>{});
  with_rows(std::integral_constant<int, 64>{});
}

template <class T>
void few_rows(const FewRowsProblem& p, const FewRowsBlocksInOrderPlan& plan, cudaStream_t stream) {
  few_rows<T>(p, plan.blocks, stream);
}

}  // namespace flashkernel::cuda::sm90a
