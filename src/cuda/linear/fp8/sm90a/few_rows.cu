// linear_fp8 for few rows of x, on 9.0. A tile has 128 rows of the weight, which are the left operand (A) of wgmma, and
// kWidth rows of x, which are the right operand (B). The time of a call depends on how many bytes of weights are under
// way at once. So a tile's k is shared by the blocks of a cluster, and two blocks run on a multiprocessor where the
// tile is narrow. A block has two consumer warpgroups and one producer warp.
//
// At the end each block leaves its sums in its shared memory. Then each block finishes a share of the tile: it reads
// that share from the shared memory of all blocks, and adds them in the order of the parts of k.
#include "cuda/linear/fp8/sm90a/linear_fp8.hpp"

#include "cuda/costs.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/linear/epilogue.cuh"
#include "cuda/linear/fp8/sm90a/operand.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda::sm90a {
namespace {

template <int kWidth_>
struct FewShape {
  static constexpr int kWidth = kWidth_, kTileM = fp8_plan::kTileM, kTileK = fp8_plan::kTileK;
  static constexpr int kConsumers = 256, kThreads = kConsumers + 32, kBlocks = fp8_plan::blocks_at_once(kWidth);
  static constexpr int kBytesA = kTileM * kTileK, kStageBytes = fp8_plan::stage_bytes(kWidth);
  static constexpr int kScaleBytes = static_cast<int>(fp8_plan::kMostKTiles) * kWidth * 4;
  static constexpr int kRoom = (kBlocks == 2 ? 112 : 226) * 1024;
  static constexpr int kStages = (kRoom - kScaleBytes - 256) / kStageBytes;
  static constexpr int kScales = kStages * kStageBytes;  // of x: [k-tile of this part, kWidth]
  static constexpr int kFull = kScales + kScaleBytes, kEmpty = kFull + 8 * kStages;
  static constexpr int kSharedBytes = kEmpty + 8 * kStages;
  // Sums on their way, [kWidth, 128] over the ring: a row's pitch keeps four lanes' columns in different banks.
  static constexpr int kPitch = kTileM + 4;  // floats
  static_assert(kWidth * kPitch * 4 <= kScales && kStages >= 2);
};

struct FewArguments {
  CUtensorMap x, weight;
  LinearFp8Params p;
  LinearEpilogue epilogue;
  int rows, out_features, num_k, tiles_x, parts;
  int rows_x;  // of x's boxes
  std::uint64_t policy;
};

/// What a block does: its tile and its part of k.
struct Work {
  int rank, first_row, first_out, first_k, num_k;
  template <class Shape>
  __device__ static Work of(const FewArguments& a, Shape) {
    const int tile = static_cast<int>(blockIdx.x) / a.parts, rank = static_cast<int>(blockIdx.x) % a.parts;
    const int first = rank * a.num_k / a.parts;
    return {rank, tile % a.tiles_x * Shape::kWidth, tile / a.tiles_x * Shape::kTileM, first,
            (rank + 1) * a.num_k / a.parts - first};
  }
};

template <class Shape>
__device__ inline void produce(const FewArguments& a, std::uint32_t base, const Work& work) {
  // Weights are nobody's results, as a rule: what comes first is asked for before the kernel in front has ended, to L2
  // only, so that what it may still write to them is seen.
  for (int kt = 0; kt < min(work.num_k, Shape::kStages); ++kt)
    ptx::tma_prefetch(&a.weight, a.policy, (work.first_k + kt) * Shape::kTileK, work.first_out);
  ptx::wait_for_previous_kernel();
  int slot = 0;
  std::uint32_t parity = 1;
  for (int kt = 0; kt < work.num_k; ++kt) {
    const std::uint32_t full = base + Shape::kFull + 8 * slot, to = base + slot * Shape::kStageBytes;
    const int k = (work.first_k + kt) * Shape::kTileK;
    ptx::mbarrier_wait(base + Shape::kEmpty + 8 * slot, parity);
    ptx::mbarrier_arrive_expect(full, Shape::kBytesA + a.rows_x * Shape::kTileK);
    ptx::tma_load(to, &a.weight, full, a.policy, k, work.first_out);
    ptx::tma_load(to + Shape::kBytesA, &a.x, full, ptx::kL2EvictLast, k, work.first_row);
    if (++slot == Shape::kStages) slot = 0, parity ^= 1;
  }
}

/// The scales of this block's rows of x and k-tiles.
template <class Shape>
__device__ inline void bring_scales(const FewArguments& a, float* to, const Work& work) {
  const LinearFp8Params& p = a.p;
  for (int i = threadIdx.x; i < work.num_k * Shape::kWidth; i += Shape::kConsumers) {
    const int kt = i % work.num_k, column = i / work.num_k, row = work.first_row + column;
    to[kt * Shape::kWidth + column] =
        row < a.rows ? p.x_scale[row * p.stride_x_scale_row + (work.first_k + kt) * p.stride_x_scale_block] : 0.0f;
  }
}

/// This block's sums of its part of k, over the ring in the end.
template <class Shape>
__device__ inline void consume(const FewArguments& a, char* shared, const Work& work) {
  const LinearFp8Params& p = a.p;
  const std::uint32_t base = ptx::shared_address(shared);
  float* const x_scales = reinterpret_cast<float*>(shared + Shape::kScales);
  bring_scales<Shape>(a, x_scales, work);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;  // of the tile's 128
  const std::uint32_t row_offset = __shfl_sync(kFullMask, threadIdx.x / 128 * 64 * Shape::kTileK, 0);
  const float* weight_scale[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::int64_t out = min(work.first_out + row + 8 * h, a.out_features - 1);
    weight_scale[h] = p.weight_scale_of(out) + work.first_k * p.stride_weight_scale_block;
  }
  ptx::barrier_sync(1, Shape::kConsumers);  // the scales are there
  float total[Shape::kWidth / 2] = {}, part[Shape::kWidth / 2];
  int slot = 0;
  std::uint32_t parity = 0;
  for (int kt = 0; kt < work.num_k; ++kt) {
    const std::uint32_t at = base + slot * Shape::kStageBytes;
    const std::uint64_t operand_a = ptx::matrix_descriptor(at + row_offset, 0, 1024);
    const std::uint64_t operand_b = ptx::matrix_descriptor(at + Shape::kBytesA, 0, 1024);
    const float weight[2] = {weight_scale[0][kt * p.stride_weight_scale_block],
                             weight_scale[1][kt * p.stride_weight_scale_block]};
    ptx::mbarrier_wait(base + Shape::kFull + 8 * slot, parity);
    ptx::hold(part);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Shape::kTileK; k += 32)
      ptx::wgmma_fp8_ss<ptx::E4m3>(part, operand_a + k / 16, operand_b + k / 16, k > 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(part);
    if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive(base + Shape::kEmpty + 8 * slot);
    const float* const scales = x_scales + kt * Shape::kWidth + lane % 4 * 2;
#pragma unroll
    for (int c = 0; c < Shape::kWidth / 8; ++c) {
      const float2 x = *reinterpret_cast<const float2*>(scales + 8 * c);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* const t = total + 4 * c + 2 * h;
        t[0] = fmaf(part[4 * c + 2 * h], x.x * weight[h], t[0]);
        t[1] = fmaf(part[4 * c + 2 * h + 1], x.y * weight[h], t[1]);
      }
    }
    if (++slot == Shape::kStages) slot = 0, parity ^= 1;
  }
  ptx::barrier_sync(1, Shape::kConsumers);  // both have read the ring
  float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int c = 0; c < Shape::kWidth / 8; ++c)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sums[(8 * c + lane % 4 * 2 + i % 2) * Shape::kPitch + row + i / 2 * 8] = total[4 * c + i];
}

/// This block's share of the tile: four neighbouring outputs of a row a thread.
template <class Shape>
__device__ inline void finish(const FewArguments& a, char* shared, const Work& work) {
  constexpr int kFours = Shape::kTileM / 4, kItems = Shape::kWidth * kFours;
  const int end = (work.rank + 1) * kItems / a.parts;
  for (int i = work.rank * kItems / a.parts + static_cast<int>(threadIdx.x); i < end; i += Shape::kThreads) {
    const int column = i / kFours, four = i % kFours * 4;
    const int row = work.first_row + column, out = work.first_out + four;
    if (row >= a.rows || out >= a.out_features) continue;
    const float* const own = reinterpret_cast<const float*>(shared) + column * Shape::kPitch + four;
    float x[4] = {};
    if (a.parts == 1) {
      const float4 v = *reinterpret_cast<const float4*>(own);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
      const std::uint32_t at = ptx::shared_address(own);
      for (int r = 0; r < a.parts; ++r) {
        const float4 v = ptx::load_cluster_4(ptx::map_shared(at, static_cast<std::uint32_t>(r)));
        x[0] += v.x, x[1] += v.y, x[2] += v.z, x[3] += v.w;
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] += bias_of(a.epilogue.bias, out + c, a.out_features);
    switch (a.p.dtype) {
      case DType::kFloat16: finish_4<__half>(a.epilogue, row, out, a.out_features, x); break;
      case DType::kBFloat16: finish_4<__nv_bfloat16>(a.epilogue, row, out, a.out_features, x); break;
      default: finish_4<float>(a.epilogue, row, out, a.out_features, x);
    }
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    few_rows_kernel(const __grid_constant__ FewArguments a) {
  extern __shared__ __align__(1024) char shared[];
  const std::uint32_t base = ptx::shared_address(shared);
  if (threadIdx.x == Shape::kConsumers) {
    ptx::tma_prefetch_map(&a.x);
    ptx::tma_prefetch_map(&a.weight);
    for (int s = 0; s < Shape::kStages; ++s) {
      ptx::mbarrier_init(base + Shape::kFull + 8 * s, 1);
      ptx::mbarrier_init(base + Shape::kEmpty + 8 * s, 2);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const Work work = Work::of(a, Shape{});
  if (threadIdx.x >= Shape::kConsumers) {
    if (threadIdx.x == Shape::kConsumers) {
      produce<Shape>(a, base, work);
      ptx::allow_next_kernel();
    }
    __syncwarp();
  } else {
    ptx::wait_for_previous_kernel();
    consume<Shape>(a, shared, work);
  }
  if (a.parts == 1) {
    __syncthreads();
    finish<Shape>(a, shared, work);
    return;
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  finish<Shape>(a, shared, work);
  __syncwarp();
  ptx::cluster_arrive();  // nobody leaves while its sums are read
  ptx::cluster_wait();
}

template <int kWidth>
void launch_few_rows(const LinearFp8Params& p, int parts, cudaStream_t stream) {
  using Shape = FewShape<kWidth>;
  FewArguments a{};
  a.p = p;
  a.rows = static_cast<int>(p.rows);
  a.out_features = static_cast<int>(p.out_features);
  a.rows_x = static_cast<int>(std::min<std::int64_t>(p.rows, kWidth));
  a.x = make_tensor_map("linear_fp8", fp8_rows(p.x, p.rows, p.in_features, p.stride_x_row, a.rows_x));
  a.weight = make_tensor_map("linear_fp8",
                             fp8_rows(p.weight, p.out_features, p.in_features, p.stride_weight_row, Shape::kTileM));
  visit_floating(p.dtype, [&](auto zero) { a.epilogue = plain_epilogue<decltype(zero)>(p.out, p.stride_out_row); });
  a.epilogue.bias = p.bias;
  a.epilogue.activation = p.activation;
  a.num_k = static_cast<int>(ceil_div(p.in_features, Shape::kTileK));
  a.tiles_x = static_cast<int>(ceil_div(p.rows, kWidth));
  a.parts = parts;
  // Weights that are read once and fill much of the L2 cache leave it first.
  constexpr std::int64_t kHalfOfL2 = 25 << 20;
  a.policy = a.tiles_x == 1 && p.in_features * p.out_features > kHalfOfL2 ? ptx::kL2EvictFirst : ptx::kL2EvictLast;
  const auto blocks = ceil_div(p.out_features, Shape::kTileM) * a.tiles_x * parts;
  LaunchShape shape{static_cast<unsigned>(blocks), Shape::kThreads, Shape::kSharedBytes, stream};
  shape.cluster = static_cast<unsigned>(parts);
  shape.early = true;
  launch("linear_fp8", few_rows_kernel<Shape>, shape, a);
}

}  // namespace

Verdict linear_fp8_few_rows_supports(const LinearFp8Params& p) {
  if (const Verdict verdict = fp8_operands_fit(p); !verdict) return verdict;
  if (p.in_features > fp8_plan::kMostKTiles * fp8_plan::kMostParts * fp8_plan::kTileK)
    return "in_features is over 65536";
  if (p.rows > fp8_plan::kMostRowsOfFew) return "it takes at most 1024 rows";
  return Verdict::ok();
}

float linear_fp8_few_rows_cost_us(const LinearFp8Params& p, const DeviceFacts& facts) {
  return static_cast<float>(fp8_plan::plan_few_rows(extent_of(p), facts.num_sms).us);
}

Plan plan_linear_fp8_few_rows(const LinearFp8Params& p, const DeviceFacts& facts) {
  return Plan::of(fp8_plan::plan_few_rows(extent_of(p), facts.num_sms));
}

void linear_fp8_few_rows(const LinearFp8Params& p, const Plan& planned, void*, Stream stream) {
  const CudaDeviceGuard guard(p.device.index);
  const fp8_plan::Plan& plan = planned.as<fp8_plan::Plan>();
  switch (plan.width) {
    case 8: return launch_few_rows<8>(p, plan.parts, native(stream));
    case 16: return launch_few_rows<16>(p, plan.parts, native(stream));
    case 32: return launch_few_rows<32>(p, plan.parts, native(stream));
    case 64: return launch_few_rows<64>(p, plan.parts, native(stream));
    default: return launch_few_rows<128>(p, plan.parts, native(stream));
  }
}

}  // namespace flashkernel::cuda::sm90a
