// Results of the product in gemm.cuh that leave by the copy engine, where sends_results says so.
#pragma once

#include "cuda/pipeline/tensor_map.hpp"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/linear/tiles/sm90a/epilogue.cuh"

namespace flashkernel::cuda::sm90a {

/// The activations that have code for it.
constexpr bool sends(Activation activation) {
  return activation == Activation::kNone || activation == Activation::kGeluTanh;
}

/// Whether they do, with `rounds` tiles for a multiprocessor. Products are held up less by the engine than by threads
/// that store for themselves: 1 to 6 % of a call with GELU, up to 2.5 % without activation. One round has no products
/// to hold up, and waits for the engine in the end: 1 % slower. (lab/notebooks/linear_cuda_log.md)
inline bool sends_results(const GemmProblem& p, std::int64_t rounds) {
  const LinearEpilogue& e = p.epilogue;
  return sends(e.activation) && !e.preactivation && p.m >= 128 && rounds > 1;
}

/// The results [m, n], m 128 or more, in boxes of a piece: 32 columns of a warp's 16 rows of the upper 64 of a tile and
/// of its 16 of the lower ones. Coordinates column, row, 0.
template <class T>
TensorMapSpec results_map(const GemmProblem& p) {
  TensorMapSpec spec;
  spec.data = p.epilogue.out;
  spec.dtype = dtype_of<T>;
  spec.rank = 3;
  spec.dims[0] = {p.n, 1, 32};
  spec.dims[1] = {p.m - 64, p.epilogue.stride_out, 16};
  spec.dims[2] = {2, 64 * p.epilogue.stride_out, 2};
  spec.swizzle_bytes = 0;
  return spec;
}

/// A warp's way out: kPiecePlaces places of its own in shared memory, which pieces take in turn. What tiles share
/// (TileSpan) is written by both, the same values. All but `bias` is the warp's, and known to be: what the engine is
/// told comes from uniform registers then.
template <class T, class Shape>
struct PieceSender {
  const CUtensorMap* map;
  const T* bias;  // of the thread's 8 columns of the tile's first 32, in shared memory
  char* places;
  int row, column;  // of the tile's first piece
  static_assert(Shape::kGroups % Shape::kPiecePlaces == 0, "each tile begins at the first place");

  __device__ PieceSender(const GemmArguments& p, TileIndex tile, const T* tile_bias, char* shared, int group)
      : map(&p.out), bias(tile_bias + threadIdx.x % 4 * 8) {
    const auto uniform = [](int value) { return __shfl_sync(kFullMask, value, 0); };
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32 % 4);
    places = shared + SharedStorage<Shape>::kStaged + (uniform(group) * 4 + warp) * Shape::kStagedBytes;
    row = uniform(rows_of<Shape>(p, tile).first) + 16 * warp;
    column = uniform(columns_of<Shape>(p, tile).first);
  }

  __device__ char* place(int g) const { return places + g % Shape::kPiecePlaces * Shape::kPieceBytes; }

  /// Piece g, which all lanes have written.
  __device__ void send(int g) const {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    ptx::tma_store(map, ptx::shared_address(place(g)), column + 32 * g, row, 0);
    ptx::bulk_commit();
  }
};

/// Piece g from the sums of its columns. The one before it, unless it is the `first`, is sent behind half of this one's
/// arithmetic: by then it has reached shared memory.
template <class T, class Shape, Activation kActivation>
__device__ inline void put_piece(const PieceSender<T, Shape>& to, int g, bool first, const float (&bias)[8],
                                 const float* const (&sum)[Shape::kPartsM]) {
  std::uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < Shape::kPartsM; ++half) {
    uint4 values[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      values[i] = neighbours<T, kActivation>(sum[half], i, bias);
      ptx::hold(values[i].x), ptx::hold(values[i].y), ptx::hold(values[i].z), ptx::hold(values[i].w);
    }
    if (half == 0) {
      if (!first) to.send(g - 1);
      if (lane == 0) ptx::bulk_wait_read<Shape::kPiecePlaces - 1>();
      __syncwarp();
    }
    // Rows lane / 4 and 8 further, of 64 bytes: written without bank conflicts.
    uint4* const rows = reinterpret_cast<uint4*>(to.place(g)) + 64 * half;
    rows[lane] = values[0];
    rows[32 + lane] = values[1];
    ptx::hold(lane);  // one half after the other: all at once would not fit the registers
  }
}

/// All groups of 32 columns, or the left half of them. Beside products an instruction takes several clocks and a load
/// from shared memory many, so a group's bias is asked for a group ahead.
template <class T, class Shape, Activation kActivation>
__device__ inline void send_groups(const PieceSender<T, Shape>& to, const Sums<Shape>& sum, bool left_half) {
  auto next_bias = load_vector<8>(to.bias);
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
    if (g == Shape::kLeftGroups && left_half) return to.send(g - 1);
    float bias[8];
    unpack(bias, next_bias);
    if (g + 1 < Shape::kGroups) next_bias = load_vector<8>(to.bias + 32 * (g + 1));
    put_piece<T, Shape, kActivation>(to, g, g == 0, bias, {sum[0] + 16 * g, sum[1] + 16 * g});
  }
  to.send(Shape::kGroups - 1);
}

/// The right half, of sums that the other warpgroup gave.
template <class T, class Shape, Activation kActivation>
__device__ inline void send_right_half(const PieceSender<T, Shape>& to, const char* shared) {
  const float4* from = reinterpret_cast<const float4*>(shared) + threadIdx.x % 128;
#pragma unroll 1
  for (int g = Shape::kLeftGroups; g < Shape::kGroups; ++g) {
    float bias[8], sum[Shape::kPartsM][16];
    load_floats(bias, to.bias + 32 * g);
    from = take_sums(sum, from);
    put_piece<T, Shape, kActivation>(to, g, g == Shape::kLeftGroups, bias, {sum[0], sum[1]});
  }
  to.send(Shape::kGroups - 1);
}

/// Before a thread ends that may have sent.
__device__ inline void wait_for_sent() {
  if (threadIdx.x % 32 == 0) ptx::bulk_wait_read<0>();
}

}  // namespace flashkernel::cuda::sm90a
