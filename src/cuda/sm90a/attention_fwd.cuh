// Attention forward for Hopper: wgmma, TMA, one producer warpgroup and two or three consumers, persistent. After
// FlashAttention-3 (Shah et al., 2024). Instantiated by the generated attention_fwd_<dtype>_d<dim>.cu files.
//
// A thread block takes tiles of queries (64 a consumer) until none is left; the producer runs ahead into the next tile
// while the consumers finish one. Parts: attention_fwd_shape.cuh (tiles, shared memory), _producer.cuh, _consumer.cuh,
// _softmax.cuh, _epilogue.cuh. docs/kernels/attention_hopper.md draws the schedule.
//
// Invariant on NaN: the tensor core makes 0 * NaN = NaN out of a masked pair. Rows whose result is not finite and that
// met a masked block are computed once more from what they see alone (redo_row).
#pragma once

#include <numeric>

#include "cuda/host/launch.hpp"
#include "cuda/sm90a/attention_fwd.hpp"
#include "cuda/sm90a/attention_fwd_consumer.cuh"
#include "cuda/sm90a/attention_fwd_producer.cuh"

namespace flashkernel::cuda::sm90a {

template <class Shape, class T>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attention_fwd_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlan plan,
                         const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                         const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_out) {
  extern __shared__ unsigned char dynamic_shared[];
  const SharedLayout<Shape> shared{(ptx::shared_address(dynamic_shared) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Shape::kQSlots; ++slot)
      for (int w = 0; w < Shape::kConsumers; ++w) {
        ptx::mbarrier_init(shared.q_full(slot, w), 1);
        ptx::mbarrier_init(shared.q_empty(slot, w), 1);
      }
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::mbarrier_init(shared.k_full(stage), 1);
      ptx::mbarrier_init(shared.v_full(stage), 1);
      ptx::mbarrier_init(shared.k_empty(stage), 4 * Shape::kConsumers);
      ptx::mbarrier_init(shared.v_empty(stage), 4 * Shape::kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = static_cast<int>(__shfl_sync(kFullMask, threadIdx.x / 128, 0));
  if (warpgroup == 0) {
    ptx::decrease_registers<Shape::kProducerRegisters>();
    if (threadIdx.x == 0)
      produce<Shape, false>(p, plan, shared, &map_q, &map_k);
    else if (threadIdx.x == 32)
      produce<Shape, true>(p, plan, shared, &map_q, &map_v);
  } else {
    ptx::increase_registers<Shape::kConsumerRegisters>();
    Consumer<Shape, T> consumer{p, plan, shared, &map_out, warpgroup - 1};
    consumer.run();
  }
}

template <class Shape, class T>
void launch_attention_fwd(const AttentionParams& p, cudaStream_t stream) {
  ForwardPlan plan;
  plan.q_tiles = static_cast<int>(ceil_div(p.seq_q, Shape::kBlockM));
  const std::int64_t heads = p.batch * p.heads_q;
  plan.heads = static_cast<int>(heads);
  plan.heads_q = static_cast<int>(p.heads_q);
  plan.group = static_cast<int>(p.heads_q / p.heads_kv);
  constexpr float kLog2E = 1.4426950408889634f;
  plan.modified = p.softcap > 0.0f || !(p.scale > 0.0f);
  plan.scale_log2 = plan.modified ? kLog2E : p.scale * kLog2E;
  plan.items = static_cast<int>(heads * plan.q_tiles);
  plan.kv_box_rows = static_cast<int>(p.is_paged() ? std::gcd<std::int64_t, std::int64_t>(p.page_size, Shape::kBlockN)
                                                   : Shape::kBlockN);
  // Without a right bound all tiles are alike, and a head's stay together. Else heavy ones go first, among as many
  // heads as have their K and V in half of the L2 cache.
  const std::int64_t bytes_per_head = std::max<std::int64_t>(1, (p.head_dim + p.head_dim_v) * 2 * p.seq_k / plan.group);
  const CudaDeviceProperties& device = cuda_device_properties(p.device.index);
  plan.heads_at_once = static_cast<int>(
      p.window_right < 0 ? 1 : std::max<std::int64_t>(1, std::min(heads, device.l2_bytes / 2 / bytes_per_head)));
  const auto box = static_cast<std::uint32_t>(plan.kv_box_rows);
  launch("attention_fwd sm90a", attention_fwd_kernel<Shape, T>,
         {static_cast<unsigned>(std::min(plan.items, device.num_sms)), Shape::kThreads, SharedLayout<Shape>::kBytes,
          stream},
         p, plan, make_tensor_map("attention_fwd q", q_map(p, 64)),
         make_tensor_map("attention_fwd k", kv_map(p, false, box)),
         make_tensor_map("attention_fwd v", kv_map(p, true, box)),
         make_tensor_map("attention_fwd out", out_map(p, 64)));
}

// Tiles by head_dim: queries x keys. Shared memory: kQSlots Q and kStages of K and of V, 227 KB.
template <int kDim>
struct ForwardTiles;
template <>
struct ForwardTiles<64> {
  using Shape = ForwardShape<64, 3, 96, 2>;  // 2 x 24 + 4 x 12 KB
};
template <>
struct ForwardTiles<96> {
  using Shape = ForwardShape<96, 2, 128, 2>;  // 2 x 32 + 4 x 32 KB
};
template <>
struct ForwardTiles<128> {
  using Shape = ForwardShape<128, 2, 128, 2>;  // 2 x 32 + 4 x 32 KB
};
template <>
struct ForwardTiles<192> {
  using Shape = ForwardShape<192, 2, 80, 1>;  // 48 + 4 x 30 KB
};
template <>
struct ForwardTiles<256> {
  using Shape = ForwardShape<256, 2, 80, 1>;  // 64 + 4 x 40 KB
};

/// An entry of the table.
template <class T, int kDim>
void attention_fwd_instance(const AttentionParams& p, void*, Stream stream) {
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  launch_attention_fwd<typename ForwardTiles<kDim>::Shape, T>(p, native(stream));
}

}  // namespace flashkernel::cuda::sm90a
