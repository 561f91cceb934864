// The tiles of the product in gemm.cuh: their shape, their order, and where a block keeps what in shared memory.
#pragma once

#include <algorithm>

#include "cuda/ptx/warpgroup.cuh"
#include "cuda/linear/tiles/sm90a/gemm.hpp"
#include "cuda/pipeline/register_pool.hpp"

namespace flashkernel::cuda::sm90a {

/// Walks groups of rows of tiles column by column, so that what runs at one time shares both operands in L2.
struct TileIndex {
  int m, n;
  __device__ TileIndex(int index, int tiles_m, int tiles_n, int group_rows) {
    const int group = index / (group_rows * tiles_n), in_group = index - group * group_rows * tiles_n;
    const int rows = min(group_rows, tiles_m - group * group_rows);
    n = in_group / rows;
    m = group * group_rows + in_group - n * rows;
  }
};

/// How a block's two warpgroups go about their tiles, and how results leave. Cooperative: both on one tile. Ping-pong:
/// each on a tile of its own. Neighbours: B's rows come in the order of interleaved_rows (operand_map.hpp), so that a
/// thread has 8 neighbouring columns of its rows and stores them itself; else they change places in shared memory.
enum class GemmWay { kCooperative, kPingPong, kPingPongNeighbours };

/// kTileN columns a tile of 128 rows. kCluster blocks share a tile's k (linear/cluster_k/sm90a/kernel.cuh) where it is
/// over 1. With neighbours k has kStages k-tiles or more and n kTileN columns; the kRest last columns of a tile, less
/// than 32, come as they are: a thread has two neighbours of each 8.
template <int kTileN_, GemmWay kWay, int kCluster_ = 1>
struct GemmShape {
  static constexpr int kTileM = 128, kTileN = kTileN_, kTileK = 64;  // kTileK: lines of 128 bytes
  static constexpr bool kPingPong = kWay != GemmWay::kCooperative, kNeighbours = kWay == GemmWay::kPingPongNeighbours;
  static constexpr int kCluster = kCluster_;
  // Else both operands are k-major.
  static constexpr bool kAnyLayout = kTileN % 64 == 0 && !kNeighbours;
  static constexpr int kConsumers = 2;                         // warpgroups
  static constexpr bool kParts = !kPingPong && kCluster == 1;  // k may be cut into parts that meet in the workspace
  // k-tiles by which a cooperative tile's second warpgroup is behind the first one in the end: that one's epilogue, or
  // its exchange with other blocks, runs under its products.
  static constexpr int kBehind = kCluster > 1 ? 4 : !kPingPong && kTileN == 96 ? 2 : 0;
  // For TileIndex. With many rounds these were the fastest, with one round large ones
  // (lab/notebooks/linear_cuda_log.md).
  static constexpr int kMostGroupRows = !kPingPong ? 16 : kTileN == 128 ? 4 : 6;
  static constexpr int kThreads = 128 * kConsumers + (kCluster > 1 ? 32 : 128);
  static constexpr int kPartsM = kPingPong ? 2 : 1;  // of 64 rows a warpgroup
  // Sums of 128 x 192 take 192 registers a thread: the most that fits beside the epilogue's.
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
  static_assert(kCluster > 1 || kConsumers * kConsumerRegisters + kProducerRegisters <= registers_a_row(kThreads));
  // kNeighbours: of 32 columns; those left of kLeftGroups are the left half of a tile.
  static constexpr int kRest = kNeighbours ? kTileN % 32 : 0;
  static constexpr int kGroups = kTileN / 32, kLeftGroups = (kGroups + (kRest > 0 ? 1 : 0)) / 2;
  // kSends: results may leave by the copy engine (sender.cuh), in pieces of a warp's 32 rows x 32 columns.
  static constexpr bool kSends = kNeighbours && kTileN == 192;
  static constexpr int kPieceBytes = 32 * 32 * 2, kPiecePlaces = 3;
  static constexpr int kColumns = kTileN % 64 == 0 ? 64 : 32;  // that leave together
  static constexpr int kStagedBytes = kSends                        ? kPiecePlaces * kPieceBytes
                                      : kNeighbours || kCluster > 1 ? 0
                                                                    : 16 * kColumns * 2;  // of a warp
  static constexpr int kBytesA = kTileM * kTileK * 2, kBytesB = kTileN * kTileK * 2;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  // Places of the bias: one for each warpgroup, in fp32; with kNeighbours one for each of four tiles, in T (see
  // load_bias).
  static constexpr int kBiasPlaces = kNeighbours ? 4 : kConsumers, kBiasBytes = kTileN * (kNeighbours ? 2 : 4);
  // A cluster's blocks share a tile's chunks of 8 columns. A block has room for the others' sums of the largest share.
  static constexpr int kChunks = kTileN / 8, kChunkBytes = kTileM * 8 * 4,
                       kMostChunks = (kChunks + kCluster - 1) / kCluster;
  static constexpr int kMailBytes = (kCluster - 1) * kMostChunks * kChunkBytes;
  static constexpr int kBesideRing = kConsumers * 4 * kStagedBytes + kBiasPlaces * kBiasBytes + kMailBytes + 256;
  static constexpr int kRoomForStages = (227 * 1024 - kBesideRing) / kStageBytes;  // 5 of 40 KB; of 32 KB 6 or 7
  static constexpr int kStages = kNeighbours ? std::min(kRoomForStages, gemm_plan::kMostSlots) : kRoomForStages;
  static constexpr int kSharedBytes = kStages * kStageBytes + kBesideRing;
};

struct GemmArguments {
  CUtensorMap a, b;
  CUtensorMap b_rest;  // of a tile's kRest last columns
  CUtensorMap out;     // kSends: the results, in boxes of a piece
  LinearEpilogue epilogue;
  float* partial;   // [parts, m, n] where k is cut, else null
  int m, n, num_k;  // num_k: k-tiles of a part; of all parts where they are a cluster's
  int tiles_m, tiles_n;
  int group_rows;  // of TileIndex
  int rows_a;      // of A's boxes: a tile's, or all of m where it has less and A is k-major
  std::uint64_t policy_b;
  int parts;
  int tiles;   // of all parts
  bool sends;  // kSends: results leave by the copy engine
};

template <class Shape>
struct SharedStorage {
  // Byte offsets in dynamic shared memory; the ring's slots and staged tiles begin at multiples of 1024.
  static constexpr int kRing = 0;
  static constexpr int kMail = Shape::kStages * Shape::kStageBytes;
  static constexpr int kStaged = kMail + Shape::kMailBytes;
  static constexpr int kBias = kStaged + Shape::kConsumers * 4 * Shape::kStagedBytes;
  static constexpr int kFull = kBias + Shape::kBiasPlaces * Shape::kBiasBytes;
  static constexpr int kEmpty = kFull + 8 * Shape::kStages;
  // kNeighbours: a warpgroup has read a place's bias; half of the last tile's sums are there.
  static constexpr int kBiasRead = kEmpty + 8 * Shape::kStages;
  static constexpr int kHanded = kBiasRead + 8 * Shape::kBiasPlaces;
  static constexpr int kMailFull = kHanded;  // of a cluster: a warpgroup's mail is there
  static_assert(kHanded + 8 * Shape::kConsumers <= Shape::kSharedBytes && kStaged % 1024 == 0);
};

/// Which part of k an index means: the tiles of a part follow each other, or the parts of a cluster's tile.
template <class Shape>
__device__ inline int part_of(const GemmArguments& p, int index) {
  if (Shape::kCluster > 1) return index % Shape::kCluster;
  return Shape::kParts ? index / (p.tiles_m * p.tiles_n) : 0;
}

template <class Shape>
__device__ inline TileIndex tile_of(const GemmArguments& p, int index) {
  if (Shape::kCluster > 1) return TileIndex(index / Shape::kCluster, p.tiles_m, p.tiles_n, p.group_rows);
  const int in_part = index - part_of<Shape>(p, index) * p.tiles_m * p.tiles_n;
  return TileIndex(in_part, p.tiles_m, p.tiles_n, p.group_rows);
}

/// Where a tile lies along one dim, and which of its rows (or columns) it stores. The last tile ends with the matrix
/// and leaves to the one before what they share: the copy engine takes longer for what is not there than for what is. A
/// matrix smaller than a tile has one tile, of which what is there counts.
struct TileSpan {
  int first, bound;
  bool is_short;
  __device__ TileSpan(int index, int tile, int extent)
      : first(max(0, min(index * tile, extent - tile))),
        bound(extent < tile ? extent : index * tile - first),
        is_short(extent < tile) {}
  /// The rows from row `by` on.
  __device__ TileSpan from(int by) const {
    TileSpan span = *this;
    span.first += by;
    span.bound -= by;
    return span;
  }
  __device__ bool stores(int i) const { return (i < bound) == is_short; }
};
template <class Shape>
__device__ inline TileSpan rows_of(const GemmArguments& p, TileIndex tile) {
  return {tile.m, Shape::kTileM, p.m};
}
template <class Shape>
__device__ inline TileSpan columns_of(const GemmArguments& p, TileIndex tile) {
  return {tile.n, Shape::kTileN, p.n};
}

struct KTiles {
  int first, count;
};

/// A part's k-tiles: as many in each; those of a cluster as even as can be.
template <class Shape>
__device__ inline KTiles k_tiles_of(const GemmArguments& p, int index) {
  const int part = part_of<Shape>(p, index);
  if (Shape::kCluster == 1) return {part * p.num_k, p.num_k};
  const int first = part * p.num_k / Shape::kCluster;
  return {first, (part + 1) * p.num_k / Shape::kCluster - first};
}

/// A thread's sums of one tile, as wgmma gives them.
template <class Shape>
using Sums = float[Shape::kPartsM][Shape::kTileN / 2];

}  // namespace flashkernel::cuda::sm90a
