// linear_fp8 for many rows of x, on 9.0. A block takes tile after tile. One producer warp copies k-tiles by TMA into a
// ring. Each of two consumer warpgroups has 64 x kTileN results.
//
// The tensor cores add 8-bit products with few bits. So wgmma adds only 128 of k at a time. Each such partial sum is
// then multiplied by its scales and added to float32 sums in registers, while the other warpgroup multiplies. The rows
// of B are loaded in an order that gives each thread 8 neighbouring columns of the result, which the thread stores
// itself.
#include "cuda/linear/fp8/sm90a/linear_fp8.hpp"

#include "cuda/costs.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/linear/fp8/sm90a/operand.hpp"
#include "cuda/linear/tiles/sm90a/shape.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm90a {
namespace {

constexpr int kMostGroupRows = 8;  // for TileIndex
constexpr int kThirds = 64;        // columns with one scale, wherever a tile begins

template <int kTileN_>
struct TileShape {
  static constexpr int kTileM = fp8_plan::kTileM, kTileN = kTileN_, kTileK = fp8_plan::kTileK;
  static constexpr int kThreads = 384, kConsumerRegisters = 240, kProducerRegisters = 24;
  static_assert(2 * kConsumerRegisters + kProducerRegisters <= registers_a_row(kThreads));
  static constexpr int kGroups = kTileN / 32;
  static constexpr int kBytesA = kTileM * kTileK, kBytesB = kTileN * kTileK, kStageBytes = kBytesA + kBytesB;
  static constexpr int kStages = (227 * 1024 - 256) / kStageBytes;
  static constexpr int kFull = kStages * kStageBytes, kEmpty = kFull + 8 * kStages;
  static constexpr int kSharedBytes = kEmpty + 8 * kStages;
};

struct TileArguments {
  CUtensorMap a, b;
  LinearFp8Params p;
  int m, n, num_k, tiles_m, tiles_n, tiles, group_rows;
  int rows_a;           // of A's boxes: a tile's, or all of m where it has less
  bool scale_a_column;  // the weight's scales are one a row of it: they are applied in the end
};

__device__ inline TileIndex tile_of(const TileArguments& a, int index) {
  return TileIndex(index, a.tiles_m, a.tiles_n, a.group_rows);
}

/// One thread: all tiles of this block, one k-tile after the other.
template <class Shape>
__device__ inline void produce(const TileArguments& a, std::uint32_t base, int first, int step) {
  int slot = 0;
  std::uint32_t parity = 1;  // the first round finds empty slots
  ptx::wait_for_previous_kernel();
  for (int index = first; index < a.tiles; index += step) {
    const TileIndex tile = tile_of(a, index);
    const int m = TileSpan(tile.m, Shape::kTileM, a.m).first, n = TileSpan(tile.n, Shape::kTileN, a.n).first;
    for (int kt = 0; kt < a.num_k; ++kt) {
      const std::uint32_t full = base + Shape::kFull + 8 * slot, to = base + slot * Shape::kStageBytes;
      ptx::mbarrier_wait(base + Shape::kEmpty + 8 * slot, parity);
      ptx::mbarrier_arrive_expect(full, a.rows_a * Shape::kTileK + Shape::kBytesB);
      ptx::tma_load(to, &a.a, full, ptx::kL2EvictLast, kt * Shape::kTileK, m);
      ptx::tma_load(to + Shape::kBytesA, &a.b, full, ptx::kL2EvictLast, kt * Shape::kTileK, 0, 0, 0, n / 8);
      if (++slot == Shape::kStages) slot = 0, parity ^= 1;
    }
  }
}

/// The scales of one k-tile that a thread needs: of its rows in each 8 of 16, and of the tile's blocks of columns.
struct Scales {
  float x[2], weight[2];
};

/// Where they lie for one tile.
struct ScalesOfTile {
  const float *x[2], *weight[2];
  __device__ ScalesOfTile(const TileArguments& a, const TileSpan& rows, const TileSpan& columns, int row) {
    const LinearFp8Params& p = a.p;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      x[h] = p.x_scale + min(rows.first + row + 8 * h, a.m - 1) * p.stride_x_scale_row;
      const int block = columns.first / static_cast<int>(fp8::kBlock) + h;
      const int last = (a.n - 1) / static_cast<int>(fp8::kBlock);
      weight[h] = p.weight_scale + (p.out_per_scale > 1 ? min(block, last) * p.stride_weight_scale_out : 0);
    }
  }
  __device__ Scales load(const TileArguments& a, int kt) const {
    Scales s;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      s.x[h] = x[h][kt * a.p.stride_x_scale_block];
      s.weight[h] = a.scale_a_column ? 1.0f : weight[h][kt * a.p.stride_weight_scale_block];
    }
    return s;
  }
};

/// total += part * scales. `odd`: the tile begins in the second half of a block of columns.
template <class Shape>
__device__ inline void add_part(float (&total)[Shape::kTileN / 2], const float (&part)[Shape::kTileN / 2],
                                const Scales& s, bool odd) {
  const float middle = odd ? s.weight[1] : s.weight[0];
#pragma unroll
  for (int third = 0; third < Shape::kTileN / kThirds; ++third) {
    const float weight = third == 0 ? s.weight[0] : third == 1 ? middle : s.weight[1];
    const float scale[2] = {s.x[0] * weight, s.x[1] * weight};
#pragma unroll
    for (int i = 0; i < kThirds / 2; ++i) {
      float& sum = total[third * (kThirds / 2) + i];
      sum = fmaf(part[third * (kThirds / 2) + i], scale[i / 2 % 2], sum);
    }
  }
}

/// Scales of the weight's rows, bias and activation of eight neighbours. All choices are made for these eight anew: a
/// choice between forms of all sums would cost the registers of both.
__device__ inline void finish_eight(const TileArguments& a, float (&x)[8], int column) {
  const LinearFp8Params& p = a.p;
  if (a.scale_a_column) {
#pragma unroll
    for (int v = 0; v < 8; ++v) x[v] *= p.weight_scale[(column + v) * p.stride_weight_scale_out];
  }
  const auto add_bias = [&](const auto* bias) {
#pragma unroll
    for (int v = 0; v < 8; ++v) x[v] += to_float(bias[column + v]);
  };
  if (p.bias) {
    switch (p.bias.dtype) {
      case DType::kFloat16: add_bias(static_cast<const __half*>(p.bias.data)); break;
      case DType::kBFloat16: add_bias(static_cast<const __nv_bfloat16*>(p.bias.data)); break;
      default: add_bias(static_cast<const float*>(p.bias.data));
    }
  }
  if (p.activation == Activation::kNone) return;
  with_activation(p.activation, [&](auto activation) {  // 8-bit products are not so exact that the fast ones are felt
#pragma unroll
    for (int v = 0; v < 8; ++v) x[v] = activate_fast<decltype(activation)::value>(x[v]);
  });
}

/// `at`: of the first in the result.
__device__ inline void store_eight(const LinearFp8Params& p, std::int64_t at, const float (&x)[8], bool there) {
  if (p.dtype == DType::kFloat32) {
    float* const to = static_cast<float*>(p.out) + at;
    std::uint32_t bits[8];
#pragma unroll
    for (int v = 0; v < 8; ++v) bits[v] = __float_as_uint(x[v]);
    ptx::store_16(to, {bits[0], bits[1], bits[2], bits[3]}, there);
    ptx::store_16(to + 4, {bits[4], bits[5], bits[6], bits[7]}, there);
    return;
  }
  const auto words = [&](auto zero) -> uint4 {
    using T = decltype(zero);
    return {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7])};
  };
  ptx::store_16(static_cast<std::uint16_t*>(p.out) + at,
                p.dtype == DType::kFloat16 ? words(__half{}) : words(__nv_bfloat16{}), there);
}

template <class Shape>
__device__ inline void store_tile(const TileArguments& a, const float (&total)[Shape::kTileN / 2], const TileSpan& rows,
                                  const TileSpan& columns, int row) {
  const int own = static_cast<int>(threadIdx.x % 4) * 8;
  std::uint32_t column = static_cast<std::uint32_t>(columns.first + own);
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[8];
#pragma unroll
      for (int v = 0; v < 8; ++v) x[v] = total[16 * g + v % 4 * 4 + h * 2 + v / 4];
      finish_eight(a, x, static_cast<int>(column) + 32 * g);
      store_eight(a.p, (rows.first + row + 8 * h) * a.p.stride_out_row + static_cast<int>(column) + 32 * g, x,
                  rows.stores(row + 8 * h) && columns.stores(32 * g + own));
      ptx::hold(column);  // one after the other: all at once would not fit the registers
    }
  }
}

/// A warpgroup's tiles. The next k-tile's products are asked for as soon as the registers of the last ones are free,
/// the first ones of the next tile before this one's results are stored. Behind the last tile they are of whatever lies
/// in the ring, and nobody looks at them: a branch round them would cost the registers of both ways.
template <class Shape>
__device__ inline void consume(const TileArguments& a, std::uint32_t base, int group, int first, int step) {
  const int lane = threadIdx.x % 32, row = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const std::uint32_t row_offset = __shfl_sync(kFullMask, group * 64 * Shape::kTileK, 0);
  float total[Shape::kTileN / 2], part[Shape::kTileN / 2];
  int slot = 0;
  std::uint32_t parity = 0;
  const auto multiply = [&](bool comes) {
    const std::uint32_t at = base + slot * Shape::kStageBytes;
    const std::uint64_t operand_a = ptx::matrix_descriptor(at + row_offset, 0, 1024);
    const std::uint64_t operand_b = ptx::matrix_descriptor(at + Shape::kBytesA, 0, 1024);
    if (comes) ptx::mbarrier_wait(base + Shape::kFull + 8 * slot, parity);
    ptx::hold(part);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Shape::kTileK; k += 32)
      ptx::wgmma_fp8_ss<ptx::E4m3>(part, operand_a + k / 16, operand_b + k / 16, k > 0);
    ptx::wgmma_commit();
  };
  const auto add = [&](const Scales& scales, bool odd) {
    ptx::wgmma_wait<0>();
    ptx::hold(part);
    if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive(base + Shape::kEmpty + 8 * slot);
    if (++slot == Shape::kStages) slot = 0, parity ^= 1;
    add_part<Shape>(total, part, scales, odd);
  };
  multiply(true);  // there are not more blocks than tiles
  for (int index = first; index < a.tiles; index += step) {
    const TileIndex tile = tile_of(a, index);
    const TileSpan rows(tile.m, Shape::kTileM, a.m), columns(tile.n, Shape::kTileN, a.n);
    const bool odd = columns.first / kThirds % 2 != 0;
    const ScalesOfTile places(a, rows, columns, row);
    Scales scales = places.load(a, 0);
#pragma unroll
    for (float& sum : total) sum = 0.0f;
    for (int kt = 1; kt < a.num_k; ++kt) {
      const Scales next = places.load(a, kt);
      add(scales, odd);
      scales = next;
      multiply(true);
    }
    add(scales, odd);
    multiply(index + step < a.tiles);
    store_tile<Shape>(a, total, rows, columns, row);
  }
  ptx::wgmma_wait<0>();
  ptx::hold(part);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) tiles_kernel(const __grid_constant__ TileArguments a) {
  extern __shared__ __align__(1024) char shared[];
  const std::uint32_t base = ptx::shared_address(shared);
  if (threadIdx.x == 0) {
    ptx::tma_prefetch_map(&a.a);
    ptx::tma_prefetch_map(&a.b);
    for (int s = 0; s < Shape::kStages; ++s) {
      ptx::mbarrier_init(base + Shape::kFull + 8 * s, 1);
      ptx::mbarrier_init(base + Shape::kEmpty + 8 * s, 2);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    ptx::decrease_registers<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce<Shape>(a, base, first, step);
      ptx::allow_next_kernel();
    }
  } else {
    ptx::increase_registers<Shape::kConsumerRegisters>();
    ptx::wait_for_previous_kernel();
    consume<Shape>(a, base, group - 1, first, step);
  }
}

template <int kTileN>
void launch_tiles(const LinearFp8Params& p, cudaStream_t stream) {
  using Shape = TileShape<kTileN>;
  TileArguments a{};
  a.p = p;
  a.m = static_cast<int>(p.rows);
  a.n = static_cast<int>(p.out_features);
  a.rows_a = static_cast<int>(std::min<std::int64_t>(p.rows, Shape::kTileM));
  a.a = make_tensor_map("linear_fp8", fp8_rows(p.x, p.rows, p.in_features, p.stride_x_row, a.rows_a));
  a.b = make_tensor_map(
      "linear_fp8", fp8_interleaved_rows(p.weight, p.out_features, p.in_features, p.stride_weight_row, Shape::kGroups));
  a.num_k = static_cast<int>(ceil_div(p.in_features, Shape::kTileK));
  a.tiles_m = static_cast<int>(ceil_div(p.rows, Shape::kTileM));
  a.tiles_n = static_cast<int>(ceil_div(p.out_features, Shape::kTileN));
  a.tiles = a.tiles_m * a.tiles_n;
  a.group_rows = static_cast<int>(ceil_div(a.tiles_m, ceil_div(a.tiles_m, kMostGroupRows)));
  a.scale_a_column = p.out_per_scale == 1 && p.stride_weight_scale_out != 0;
  const int num_sms = cuda_device_properties(p.device.index).num_sms;
  LaunchShape shape{static_cast<unsigned>(std::min(a.tiles, num_sms)), Shape::kThreads, Shape::kSharedBytes, stream};
  shape.early = true;
  launch("linear_fp8", tiles_kernel<Shape>, shape, a);
}

}  // namespace

Verdict linear_fp8_tiles_supports(const LinearFp8Params& p) {
  if (const Verdict verdict = fp8_operands_fit(p); !verdict) return verdict;
  if (p.out_features % kThirds != 0 || p.out_features < fp8_plan::kWidths[0])
    return "out_features is not a multiple of 64 from 128 on";
  if (p.out_per_scale == 1 && p.stride_weight_scale_out != 0 && p.stride_weight_scale_block != 0)
    return "scales for 128 neighbours of a row of the weight";
  if (!is_aligned(p.out, 16) || p.stride_out_row * static_cast<std::int64_t>(dtype_bytes(p.dtype)) % 16 != 0)
    return "rows of out are not at multiples of 16 bytes";
  return Verdict::ok();
}

bool linear_fp8_tiles_is_invariant(const LinearFp8Params& p) {
  return p.rows > 0 && p.in_features > 0 && p.in_features % 16 == 0 && p.out_features % kThirds == 0 &&
         p.out_features >= fp8_plan::kWidths[0] &&
         (p.out_per_scale > 1 || p.stride_weight_scale_out == 0 || p.stride_weight_scale_block == 0);
}

float linear_fp8_tiles_cost_us(const LinearFp8Params& p, const DeviceFacts& facts) {
  return static_cast<float>(fp8_plan::plan_tiles(extent_of(p), facts.num_sms).us);
}

Plan plan_linear_fp8_tiles(const LinearFp8Params& p, const DeviceFacts& facts) {
  return Plan::of(fp8_plan::plan_tiles(extent_of(p), facts.num_sms));
}

void linear_fp8_tiles(const LinearFp8Params& p, const Plan& plan, void*, Stream stream) {
  const CudaDeviceGuard guard(p.device.index);
  if (plan.as<fp8_plan::Plan>().width == 192) return launch_tiles<192>(p, native(stream));
  launch_tiles<128>(p, native(stream));
}

}  // namespace flashkernel::cuda::sm90a
