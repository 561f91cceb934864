// Shapes of the sm80 backward kernels (tiles, teams of warps, shared memory) and what their launches share. Used by
// prepare.cuh, main.cuh, grad_q.cuh, bias.cuh and kernel.cuh.
#pragma once

#include <cstdint>

#include "cuda/attention/backward/sm80/variant.hpp"
#include "cuda/tile/divisor.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm80 {

/// Of a warp, when `dim` columns are shared by at most `warps`.
constexpr int fewest_columns(int dim, int warps) {
  for (int columns = 16; columns < dim; columns += 16)
    if (dim % columns == 0 && dim / columns <= warps) return columns;
  return dim;
}

template <int kQkDim_, int kVDim_, BackwardKind kKind>
struct BackwardShape {
  static constexpr int kQkDim = kQkDim_, kVDim = kVDim_, kWidest = HeadDims{kQkDim, kVDim}.widest();
  static constexpr bool kModified = kKind == BackwardKind::kModified;
  static constexpr int kTeamWarps = 4, kWarps = 2 * kTeamWarps, kThreads = kWarps * 32;
  // A warp owns 16 or 32 keys: of dV it holds kSlices * kVDim / 8 * 4 registers, of dK kSlices * kQkDim / 8 * 4; that
  // is 128 at d128 and d256.
  static constexpr int kSlices = kWidest <= 128 ? 2 : 1;
  static constexpr int kBlockN = kTeamWarps * kSlices * 16;
  static constexpr int kBlockM = backward_block_m(kWidest, kKind);
  static constexpr int kPart = kBlockM < 64 ? kBlockM : 64;  // queries at a time: kSlices * kPart / 2 registers
  static constexpr int kStages = 2;                          // of Q, dO, LSE and D
  // With one buffer of dS a step has one more barrier. The largest head dim has no room for two buffers in 99 KB.
  static constexpr int kGradSBuffers = kWidest == 256 && kBlockM == 16 ? 1 : 2;
  static constexpr bool kHoldKeys =
      kWidest <= 64;  // a team's K or V as operands in registers, a quarter of the head dim a slice
  // Each team has code of its own for its products, and hands P^T over in 16 bytes a lane. That makes d64 faster
  // (lab/notebooks/attention_sm80.md, "The loop at d64"); other head dims have not been measured.
  static constexpr bool kOwnCode = kQkDim == 64 && kVDim == 64 && !kModified;
  // Up to so many tiles of keys, adding in order costs less than zeroing the sums, which it saves.
  static constexpr int kOrderedTiles = kOwnCode ? 4 : 8;
  // dQ: kBlockM x kQkDim over warps of kQSlices * 16 queries and kColumns columns; pieces as square as the shape
  // allows.
  static constexpr int kQSlices = kQkDim == 96 || kQkDim == 192 || kQkDim == 32 ? 1
                                  : kBlockM == 16                               ? 1
                                  : kBlockM / 16 * kQkDim / 16 >= 32            ? 2
                                                                                : 1;
  static constexpr int kWarpsM = kBlockM / 16 / kQSlices;
  static constexpr int kColumns = fewest_columns(kQkDim, kWarps / kWarpsM), kWarpsD = kQkDim / kColumns;
  using QkRows = SharedTile<kQkDim>;   // of V and dO too, which may be narrower: teams share their code
  using Scores = SharedTile<kBlockM>;  // dS^T: rows are keys
  // Byte offsets in shared memory.
  static constexpr int kK = 0, kV = kK + kBlockN * QkRows::kPitch, kQ = kV + kBlockN * QkRows::kPitch;
  static constexpr int kQBytes = kBlockM * QkRows::kPitch, kGradOutBytes = kQBytes;
  static constexpr int kGradOut = kQ + kStages * kQBytes, kGradS = kGradOut + kStages * kGradOutBytes;
  static constexpr int kGradSBytes = kBlockN * Scores::kPitch;
  static constexpr int kLse = kGradS + kGradSBuffers * kGradSBytes, kDelta = kLse + kStages * kBlockM * 4;
  static constexpr int kSharedBytes = kDelta + kStages * kBlockM * 4;
  static_assert(kSharedBytes + 128 <= backward_shared_limit(kKind), "and what the kernel declares itself");
  static_assert(kWarpsM * kWarpsD <= kWarps && kColumns % 16 == 0, "every piece of dQ has a warp");

  /// The place of an element of a tile's sum of dQ. Sums lie in the order of the fragments, so that what a warp adds
  /// lies side by side.
  __device__ static int sum_index(int warp, int slice, int column_tile, int lane) {
    return ((warp * kQSlices + slice) * (kColumns / 8) + column_tile) * 128 + lane * 4;
  }
};

struct BackwardPlan {
  int k_tiles, q_tiles;  // of the longest sequence
  bool ordered;          // blocks add to dQ in the order of their tickets
  // Heads, and tiles of keys of a head, that run side by side; heads of the last group of them; blocks of a group; a
  // batch's heads.
  Divisor at_once, chunk, last_at_once, group_blocks, heads_kv;
  unsigned groups;
  int group;  // query heads of a kv head
  bool vectors_q, vectors_k, vectors_v, vectors_out, vectors_grad_out, vectors_grad_q, vectors_grad_k, vectors_grad_v;
  float scale_log2;
  float *delta, *lse;  // -D, and -LSE in base 2
  float* sums;
  int* counters;
  int* ticket;
  int* not_finite;  // becomes 1 when some gradient is not finite
};

/// Remembers whether all values that it was shown are finite.
struct FiniteCheck {
  float zero = 0.0f;  // NaN once one is not
  __device__ void see(float x) { zero = fmaf(x, 0.0f, zero); }
  __device__ void report(int* not_finite) const {
    if (zero != zero) *not_finite = 1;
  }
};

}  // namespace flashkernel::cuda::sm80
