// C = A B^T with a fused epilogue on m16n8k8: what linear and its gradient ask for, in fp16 with fp32 sums. A is [m, k]
// and B is [n, k], each stored along k ("k-major") or along its other dim. Called by linear.cu.
//
// Two slots of shared memory: while the products of one tile of k run, the next one is on its way into registers, and
// is put into the other slot before the tile's only barrier. A warp owns 64 x 64 results: 4 KB of fragments for 128
// matrix instructions a 16 of k, half of what shared memory can deliver meanwhile. Every sum has a fixed order.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/tile/staged_tile.cuh"
#include "cuda/linear/epilogue.cuh"

namespace flashkernel::cuda::sm75 {

struct GemmOperand {
  const void* data = nullptr;
  std::int64_t stride = 0;  // elements from one row of the stored matrix to the next
  bool k_major = true;      // a row of the stored matrix runs along k
  bool vectors = false;     // its rows start at multiples of 16 bytes and hold whole vectors
};

struct GemmProblem {
  GemmOperand a, b;
  int m = 0, n = 0, k = 0;
  LinearEpilogue epilogue;
};

/// kLarge: 128 x 128 a block, 64 x 64 a warp; else 64 x 64 and 32 x 32.
template <bool kLarge>
struct GemmShape {
  static constexpr int kM = kLarge ? 128 : 64, kN = kM, kK = kLarge ? 32 : 64;
  static constexpr int kWarpM = kM / 2, kWarpN = kN / 2, kThreads = 128;
  static constexpr int kSlotBytes = (kM + kN) * kK * 2;  // 16 KB
  static constexpr int kSharedBytes = 2 * kSlotBytes;    // two blocks fill a T4's SM
  static_assert(kSharedBytes <= 32 * 1024 && 4 * kWarpM * kWarpN * 2 <= kSharedBytes, "the results leave through it");
};

/// One operand's tiles of kMn x kK, one after the other along k.
template <class T, int kMn, int kK, bool kKMajor, int kThreads>
class Operand {
 public:
  static constexpr int kRows = kKMajor ? kMn : kK, kColumns = kKMajor ? kK : kMn;
  using Tile = SharedTile<kColumns>;
  static constexpr int kBytes = kRows * Tile::kPitch;

  __device__ Operand(const GemmOperand& operand, int first_mn, int num_mn)
      : from_(static_cast<const T*>(operand.data) + (kKMajor ? first_mn * operand.stride : first_mn)),
        stride_(operand.stride),
        vectors_(operand.vectors),
        mn_left_(num_mn - first_mn) {}

  /// Starts the loads of the tile at `k`, of which `k_left` values of k exist.
  __device__ void fetch(int k, int k_left) {
    const T* const from = tile(k);
    const int rows = kKMajor ? mn_left_ : k_left;
    staged_.fetch(kKMajor ? k_left : mn_left_, vectors_, rows >= kRows ? from : nullptr, stride_,
                  [&](int row) { return row < rows ? from + row * stride_ : nullptr; });
  }
  __device__ void store(unsigned char* slot, int k, int k_left) const {
    const T* const from = tile(k);
    const int rows = kKMajor ? mn_left_ : k_left;
    staged_.store(slot, kKMajor ? k_left : mn_left_, vectors_,
                  [&](int row) { return row < rows ? from + row * stride_ : nullptr; });
  }

  /// Fragments of 16 rows each, from row `first` of the tile, at slice `slice` of 16 k; kOfA: as operands A, else B.
  template <bool kOfA, int kCount>
  __device__ static void fragments(std::uint32_t (&to)[kCount][4], std::uint32_t slot, int first, int slice) {
    const int lane = threadIdx.x % 32;
    // Stored along k, A's four 8 x 8 matrices go down before right, B's right before down; transposed the other way.
    constexpr bool kDown = kOfA == kKMajor;
    const int row = kDown ? LaneA::row(lane) : LaneB::row(lane), half = kDown ? LaneA::half(lane) : LaneB::half(lane);
    const std::uint32_t from = slot + Tile::lane_offset(row, half);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kKMajor)
        ptx::ldmatrix_x4(to[i], Tile::at_slice(from, slice) + (first + i * 16) * Tile::kPitch);
      else
        ptx::ldmatrix_x4_trans(to[i], Tile::at_slice(Tile::at_slice(from, first / 16), i) + slice * 16 * Tile::kPitch);
    }
  }

 private:
  __device__ const T* tile(int k) const { return from_ + (kKMajor ? k : k * stride_); }

  const T* from_;
  std::int64_t stride_;
  bool vectors_;
  int mn_left_;
  StagedTile<T, kRows, kColumns, kThreads> staged_;
};

template <class T, bool kLarge, bool kKMajorA, bool kKMajorB>
__global__ void __launch_bounds__(GemmShape<kLarge>::kThreads, 2) gemm_kernel(const __grid_constant__ GemmProblem p) {
  using Shape = GemmShape<kLarge>;
  using OperandA = Operand<T, Shape::kM, Shape::kK, kKMajorA, Shape::kThreads>;
  using OperandB = Operand<T, Shape::kN, Shape::kK, kKMajorB, Shape::kThreads>;
  constexpr int kRowsA = Shape::kWarpM / 16, kRowsB = Shape::kWarpN / 16;
  extern __shared__ __align__(128) unsigned char shared[];

  // Groups of 8 rows of tiles are walked column by column: what runs at one time shares both operands in L2.
  constexpr int kGroup = 8;
  const int tiles_m = (p.m + Shape::kM - 1) / Shape::kM, tiles_n = (p.n + Shape::kN - 1) / Shape::kN;
  const int group = static_cast<int>(blockIdx.x) / (kGroup * tiles_n);
  const int in_group = static_cast<int>(blockIdx.x) - group * kGroup * tiles_n;
  const int group_rows = min(kGroup, tiles_m - group * kGroup);
  const int first_n = in_group / group_rows * Shape::kN;
  const int first_m = (group * kGroup + in_group % group_rows) * Shape::kM;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp % 2 * Shape::kWarpM, warp_n = warp / 2 * Shape::kWarpN;
  const std::uint32_t base = ptx::shared_address(shared);
  OperandA a(p.a, first_m, p.m);
  OperandB b(p.b, first_n, p.n);
  const auto fetch = [&](int k) {
    a.fetch(k, p.k - k);
    b.fetch(k, p.k - k);
  };
  const auto store = [&](int k, int slot) {
    a.store(shared + slot * Shape::kSlotBytes, k, p.k - k);
    b.store(shared + slot * Shape::kSlotBytes + OperandA::kBytes, k, p.k - k);
  };

  float sum[kRowsA][2 * kRowsB][4] = {};
  if (p.k > 0) {
    fetch(0);
    store(0, 0);
  }
  __syncthreads();
  int slot = 0;
#pragma unroll 1
  for (int k = 0; k < p.k; k += Shape::kK) {
    const bool more = k + Shape::kK < p.k;
    if (more) fetch(k + Shape::kK);
    const std::uint32_t from = base + slot * Shape::kSlotBytes;
#pragma unroll
    for (int slice = 0; slice < Shape::kK / 16; ++slice) {
      std::uint32_t fragments_a[kRowsA][4], fragments_b[kRowsB][4];
      OperandA::template fragments<true>(fragments_a, from, warp_m, slice);
      OperandB::template fragments<false>(fragments_b, from + OperandA::kBytes, warp_n, slice);
#pragma unroll
      for (int i = 0; i < kRowsA; ++i)
#pragma unroll
        for (int j = 0; j < kRowsB; ++j) {
          mma_16x8x16(sum[i][2 * j], fragments_a[i], fragments_b[j][0], fragments_b[j][1]);
          mma_16x8x16(sum[i][2 * j + 1], fragments_a[i], fragments_b[j][2], fragments_b[j][3]);
        }
    }
    slot ^= 1;
    if (more) store(k + Shape::kK, slot);  // last read before the last barrier
    __syncthreads();
  }

  // Lane l holds rows l/4 + 8 half of each 16, columns 2 (l%4) + {0, 1} of each 8.
  const LinearEpilogue& e = p.epilogue;
  if (e.bias) {
#pragma unroll
    for (int j = 0; j < 2 * kRowsB; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float bias = bias_of(e.bias, first_n + warp_n + 8 * j + lane % 4 * 2 + c, p.n);
#pragma unroll
        for (int i = 0; i < kRowsA; ++i) {
          sum[i][j][c] += bias;
          sum[i][j][2 + c] += bias;
        }
      }
  }
  // Through the warp's own part of the slots, so that rows leave in vectors of 16 bytes.
  using Staged = SharedTile<Shape::kWarpN>;
  unsigned char* const staged = shared + warp * Shape::kWarpM * Staged::kPitch;
  const int rows_left = p.m - first_m - warp_m, columns_left = p.n - first_n - warp_n;
  const auto store_results = [&](void* data, std::int64_t stride, bool vectors) {
#pragma unroll
    for (int i = 0; i < kRowsA; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < 2 * kRowsB; ++j)
          *reinterpret_cast<std::uint32_t*>(staged +
                                            Staged::element(16 * i + 8 * half + lane / 4, 8 * j + lane % 4 * 2)) =
              pack<T>(sum[i][j][2 * half], sum[i][j][2 * half + 1]);
    __syncwarp();
    T* const to = static_cast<T*>(data) + static_cast<std::int64_t>(first_m + warp_m) * stride + first_n + warp_n;
    store_rows<T, Shape::kWarpM, Shape::kWarpN>(staged, lane, rows_left, columns_left, vectors, to, stride);
    __syncwarp();
  };
  if (e.preactivation) store_results(e.preactivation, e.stride_preactivation, e.vectors_preactivation);
  if constexpr (kKMajorA) {  // else the gradient of weights, which has none
    with_activation(e.activation, [&](auto activation) {
#pragma unroll
      for (int i = 0; i < kRowsA; ++i)
#pragma unroll
        for (int j = 0; j < 2 * kRowsB; ++j)
#pragma unroll
          for (int x = 0; x < 4; ++x) sum[i][j][x] = activate_for<decltype(activation)::value, T>(sum[i][j][x]);
    });
  }
  store_results(e.out, e.stride_out, e.vectors_out);
}

/// Either both operands are k-major, or the second one or both lie along their other dim.
template <class T>
void gemm(const char* name, GemmProblem p, int num_sms, cudaStream_t stream) {
  p.a.vectors &= (p.a.k_major ? p.k : p.m) % 8 == 0;
  p.b.vectors &= (p.b.k_major ? p.k : p.n) % 8 == 0;
  const auto run = [&](auto large, auto k_major_a, auto k_major_b) {
    using Shape = GemmShape<decltype(large)::value>;
    const auto tiles = static_cast<unsigned>(ceil_div(p.m, Shape::kM) * ceil_div(p.n, Shape::kN));
    launch(name, gemm_kernel<T, decltype(large)::value, decltype(k_major_a)::value, decltype(k_major_b)::value>,
           {tiles, Shape::kThreads, Shape::kSharedBytes, stream}, p);
  };
  const auto with_layout = [&](auto large) {
    if (p.a.k_major && p.b.k_major) return run(large, std::true_type{}, std::true_type{});
    if (p.a.k_major) return run(large, std::true_type{}, std::false_type{});
    return run(large, std::false_type{}, std::false_type{});
  };
  if (ceil_div(p.m, 128) * ceil_div(p.n, 128) >= num_sms)
    with_layout(std::true_type{});
  else
    with_layout(std::false_type{});
}

}  // namespace flashkernel::cuda::sm75
