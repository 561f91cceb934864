// The product of gemm.hpp: a multistage cp.async ring, ldmatrix fragments one slice ahead of mma.sync, and the epilogue
// in fp32. For fp32 operands each term is three TF32 products (Ootomo and Yokota, 2022): x = hi + lo, and hi hi + hi lo
// + lo hi keeps 21 bits; the sums of a tile of k are added to the total in fp32, since the tensor core truncates.
// Invariant: every sum has a fixed order; with splits, parts are added in the order of k.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/linear/tiles/sm80/gemm_operand.cuh"
#include "cuda/linear/split_sum.cuh"

namespace flashkernel::cuda::sm80 {

/// kLarge: 128 x 128 a block, else 64 x 64.
template <class T, bool kLarge>
struct GemmShape {
  static constexpr bool kFp32 = sizeof(T) == 4;
  static constexpr int kM = kLarge ? 128 : 64, kN = kM;
  static constexpr int kK = kLarge || kFp32 ? 32 : 64;
  static constexpr int kWarpM = kLarge ? 64 : 32, kWarpN = kLarge && !kFp32 ? 64 : 32;
  static constexpr int kWarpsM = kM / kWarpM, kWarpsN = kN / kWarpN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;  // 128; 256 for large tiles of fp32
  // Large: 4 x 16 KB (fp32 3 x 32 KB); small: 4 x 16 KB. Two blocks a multiprocessor from 8.0 on (164 KB).
  static constexpr int kStages = kLarge && kFp32 ? 3 : 4;
  static constexpr int kStageBytes = (kM + kN) * kK * static_cast<int>(sizeof(T));
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes <= kLeastSharedBytes);
};

/// Which tile a block computes: groups of 8 rows of tiles are walked column by column, so that what runs at one time
/// shares both operands in L2.
struct TileIndex {
  int m, n;
  __device__ TileIndex(int index, int tiles_m, int tiles_n) {
    constexpr int kGroup = 8;
    const int group = index / (kGroup * tiles_n), in_group = index - group * kGroup * tiles_n;
    const int rows = min(kGroup, tiles_m - group * kGroup);
    n = in_group / rows;
    m = group * kGroup + in_group - n * rows;
  }
};

/// sum over [k, end) of A[m, k] B[n, k] in plain fp32: for results that are not finite, which hi + lo can't represent.
static __device__ __attribute__((noinline)) float plain_sum(const GemmOperand& a, const GemmOperand& b, std::int64_t m,
                                                            std::int64_t n, int k, int end) {
  const float* from_a = static_cast<const float*>(a.data) + (a.k_major ? m * a.stride : m);
  const float* from_b = static_cast<const float*>(b.data) + (b.k_major ? n * b.stride : n);
  float sum = 0.0f;
  for (std::int64_t at = k; at < end; ++at)
    sum = fmaf(from_a[a.k_major ? at : at * a.stride], from_b[b.k_major ? at : at * b.stride], sum);
  return sum;
}

template <class T, int kRowsA, int kRowsB>
struct Fragments {
  std::uint32_t a[kRowsA][4], b[kRowsB][4];
};

template <int kCount>
__device__ inline void split(std::uint32_t (&high)[kCount][4], std::uint32_t (&low)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const std::uint32_t bits = high[i][e];
      high[i][e] = bits & 0xffffe000;  // TF32: sign, 8 bits of exponent, 10 of mantissa
      low[i][e] = __float_as_uint(__uint_as_float(bits) - __uint_as_float(high[i][e]));
    }
}

template <class T, int kRowsA, int kRowsB>
__device__ inline void multiply(float (&sum)[kRowsA][2 * kRowsB][4], Fragments<T, kRowsA, kRowsB>& f) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < kRowsA; ++i)
#pragma unroll
      for (int j = 0; j < kRowsB; ++j) {
        ptx::mma_m16n8k16<T>(sum[i][2 * j], f.a[i], f.b[j][0], f.b[j][1]);
        ptx::mma_m16n8k16<T>(sum[i][2 * j + 1], f.a[i], f.b[j][2], f.b[j][3]);
      }
  } else {
    std::uint32_t low_a[kRowsA][4], low_b[kRowsB][4];
    split(f.a, low_a);
    split(f.b, low_b);
    const auto product = [&](const std::uint32_t(&a)[kRowsA][4], const std::uint32_t(&b)[kRowsB][4]) {
#pragma unroll
      for (int i = 0; i < kRowsA; ++i)
#pragma unroll
        for (int j = 0; j < kRowsB; ++j) {
          ptx::mma_m16n8k8_tf32(sum[i][2 * j], a[i], b[j][0], b[j][1]);
          ptx::mma_m16n8k8_tf32(sum[i][2 * j + 1], a[i], b[j][2], b[j][3]);
        }
    };
    product(low_a, f.b);
    product(f.a, low_b);
    product(f.a, f.b);
  }
}

template <class T, bool kLarge, bool kKMajorA, bool kKMajorB>
__global__ void __launch_bounds__(GemmShape<T, kLarge>::kThreads, 1) gemm_kernel(const GemmProblem p) {
  using Shape = GemmShape<T, kLarge>;
  using OperandA = Operand<T, Shape::kM, Shape::kK, kKMajorA, Shape::kThreads>;
  using OperandB = Operand<T, Shape::kN, Shape::kK, kKMajorB, Shape::kThreads>;
  constexpr int kStages = Shape::kStages, kSlices = Shape::kK / OperandA::kSlice;
  constexpr int kRowsA = Shape::kWarpM / 16, kRowsB = Shape::kWarpN / 16;
  extern __shared__ __align__(1024) char shared[];

  const TileIndex tile(static_cast<int>(blockIdx.x), (p.m + Shape::kM - 1) / Shape::kM,
                       (p.n + Shape::kN - 1) / Shape::kN);
  const int first_m = tile.m * Shape::kM, first_n = tile.n * Shape::kN;
  const int first_k = static_cast<int>(blockIdx.y) * p.k_per_split, end_k = min(p.k, first_k + p.k_per_split);
  const int num_tiles = max(0, (end_k - first_k + Shape::kK - 1) / Shape::kK);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp % Shape::kWarpsM * Shape::kWarpM, warp_n = warp / Shape::kWarpsM * Shape::kWarpN;

  OperandA a(p.a, first_m, p.m, first_k);
  OperandB b(p.b, first_n, p.n, first_k);
  const auto slot_of = [&](int t) { return shared + t % kStages * Shape::kStageBytes; };
  const auto start_copy = [&](int t) {
    if (t < num_tiles) {
      a.load(slot_of(t), end_k - first_k - t * Shape::kK);
      b.load(slot_of(t) + OperandA::kTileBytes, end_k - first_k - t * Shape::kK);
    }
    ptx::cp_async_commit();  // an empty group where no tile is left, so that the counts stay right
  };
  const auto fetch = [&](Fragments<T, kRowsA, kRowsB>& f, const char* slot, int slice) {
    OperandA::fragments_a(f.a, slot, warp_m, slice);
    OperandB::fragments_b(f.b, slot + OperandA::kTileBytes, warp_n, slice);
  };

  float sum[kRowsA][2 * kRowsB][4] = {};
#pragma unroll
  for (int t = 0; t < kStages - 1; ++t) start_copy(t);
#pragma unroll 1
  for (int t = 0; t < num_tiles; ++t) {
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();  // tile t is there for all, and the slot that is filled next is read by nobody
    start_copy(t + kStages - 1);
    const char* slot = slot_of(t);
    if constexpr (sizeof(T) == 2) {
      Fragments<T, kRowsA, kRowsB> f[2];
      fetch(f[0], slot, 0);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        if (slice + 1 < kSlices) fetch(f[(slice + 1) % 2], slot, slice + 1);
        multiply<T>(sum, f[slice % 2]);
      }
    } else {
      float part[kRowsA][2 * kRowsB][4] = {};
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        Fragments<T, kRowsA, kRowsB> f;
        fetch(f, slot, slice);
        multiply<T>(part, f);
      }
#pragma unroll
      for (int i = 0; i < kRowsA; ++i)
#pragma unroll
        for (int j = 0; j < 2 * kRowsB; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][j][e] += part[i][j][e];
    }
  }
  ptx::cp_async_wait<0>();

  // Lane l holds rows l/4 + 8 half of each 16, columns 2 (l%4) + {0, 1} of each 8.
  const int row = first_m + warp_m + lane / 4, column = first_n + warp_n + lane % 4 * 2;
  const auto each = [&](auto f) {  // f(row, column, two neighbours)
#pragma unroll
    for (int i = 0; i < kRowsA; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < 2 * kRowsB; ++j)
          f(row + 16 * i + 8 * half, column + 8 * j, sum[i][j][2 * half], sum[i][j][2 * half + 1]);
  };
  if constexpr (Shape::kFp32) {
    each([&](int m, int n, float& x, float& y) {
      if (!isfinite(x) && m < p.m && n < p.n) x = plain_sum(p.a, p.b, m, n, first_k, end_k);
      if (!isfinite(y) && m < p.m && n + 1 < p.n) y = plain_sum(p.a, p.b, m, n + 1, first_k, end_k);
    });
  }
  if (p.partial) {
    const std::int64_t stride = padded_columns(p.n);
    float* const to = p.partial + static_cast<std::int64_t>(blockIdx.y) * p.m * stride;
    each([&](int m, int n, float x, float y) {  // n is even, so its pair is inside the padded row
      if (m < p.m && n < p.n) *reinterpret_cast<float2*>(to + m * stride + n) = make_float2(x, y);
    });
    return;
  }

  const LinearEpilogue& e = p.epilogue;
  if (e.bias) {
#pragma unroll
    for (int j = 0; j < 2 * kRowsB; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float bias = bias_of(e.bias, column + 8 * j + c, p.n);
#pragma unroll
        for (int i = 0; i < kRowsA; ++i) {
          sum[i][j][c] += bias;
          sum[i][j][2 + c] += bias;
        }
      }
  }
  const auto apply_activation = [&] {
    if constexpr (kKMajorA)  // else a gradient: see gemm.hpp
      with_activation(e.activation, [&](auto activation) {
        each([&](int, int, float& x, float& y) {
          x = activate_for<decltype(activation)::value, T>(x);
          y = activate_for<decltype(activation)::value, T>(y);
        });
      });
  };
  if constexpr (Shape::kFp32) {
    // Four lanes' pairs are whole sectors of 32 bytes.
    const auto store = [&](float* to, std::int64_t stride, bool vectors) {
      each([&](int m, int n, float x, float y) {
        if (m >= p.m || n >= p.n) return;
        float* const pair = to + m * stride + n;
        if (vectors && n + 1 < p.n) {
          *reinterpret_cast<float2*>(pair) = make_float2(x, y);
        } else {
          pair[0] = x;
          if (n + 1 < p.n) pair[1] = y;
        }
      });
    };
    if (e.preactivation) store(static_cast<float*>(e.preactivation), e.stride_preactivation, e.vectors_preactivation);
    apply_activation();
    store(static_cast<float*>(e.out), e.stride_out, e.vectors_out);
  } else {
    // Through the warp's own part of the ring, so that rows leave in vectors of 16 bytes.
    using Staged = SharedTile<Shape::kWarpN>;
    char* const staged = shared + warp * Shape::kWarpM * Staged::kPitch;
    __syncthreads();  // everybody has read the last tile
    const auto store = [&](T* to, std::int64_t stride, bool vectors) {
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
      const int rows = p.m - first_m - warp_m, columns = p.n - first_n - warp_n;
      to += static_cast<std::int64_t>(first_m + warp_m) * stride + first_n + warp_n;
#pragma unroll 4
      for (int at = lane; at < Shape::kWarpM * Staged::kChunks; at += 32) {
        const int r = at / Staged::kChunks, chunk = at % Staged::kChunks;
        if (r < rows && chunk * 8 < columns)
          store_chunk(to + r * stride + chunk * 8, *reinterpret_cast<const uint4*>(staged + Staged::offset(r, chunk)),
                      columns - chunk * 8, vectors);
      }
      __syncwarp();
    };
    if (e.preactivation) store(static_cast<T*>(e.preactivation), e.stride_preactivation, e.vectors_preactivation);
    apply_activation();
    store(static_cast<T*>(e.out), e.stride_out, e.vectors_out);
  }
}

template <class T>
void gemm(const char* name, GemmProblem p, const GemmPlan& plan, void* workspace, cudaStream_t stream) {
  p.k_per_split = plan.k_per_split;
  p.partial = plan.splits > 1 ? static_cast<float*>(workspace) : nullptr;
  const auto run = [&](auto large, auto k_major_a, auto k_major_b) {
    using Shape = GemmShape<T, decltype(large)::value>;
    const std::int64_t tiles = ceil_div(p.m, Shape::kM) * ceil_div(p.n, Shape::kN);
    launch(name, gemm_kernel<T, decltype(large)::value, decltype(k_major_a)::value, decltype(k_major_b)::value>,
           {dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(plan.splits)), Shape::kThreads,
            Shape::kSharedBytes, stream},
           p);
  };
  const auto with_layout = [&](auto large) {
    if (p.a.k_major && p.b.k_major) return run(large, std::true_type{}, std::true_type{});
    if (p.a.k_major) return run(large, std::true_type{}, std::false_type{});
    return run(large, std::false_type{}, std::false_type{});
  };
  if (plan.large)
    with_layout(std::true_type{});
  else
    with_layout(std::false_type{});
  if (plan.splits > 1) {
    const std::int64_t stride = padded_columns(p.n);
    launch(name, split_sum::kernel<T>, {split_sum::grid(p.m, stride), split_sum::kThreads, 0, stream}, p.epilogue,
           p.partial, plan.splits, p.m, p.n, stride);
  }
}

}  // namespace flashkernel::cuda::sm80
