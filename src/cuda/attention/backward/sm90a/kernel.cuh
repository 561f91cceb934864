// Attention backward for Hopper: wgmma, TMA, one producer warpgroup, two that own keys and one that makes dQ (or, in
// long calls at d128, no such one), persistent. After FlashAttention-2 and -3 (Dao, 2023; Shah et al., 2024).
// instances/ has the file that instantiates it; steps.hpp adds the gradient of the sinks, and the repair of what is not
// finite.
//
//   shape.cuh     tiles, shared memory             prepare.cuh   row sums, before the pass
//   order.hpp     which block takes which keys     keys.cuh      dK and dV
//   producer.cuh  loads by TMA                     queries.cuh   dQ
//   epilogue.cuh  writes gradients                 joined.cuh    dK, dV and dQ by the same warpgroups
//   wide.cuh      dK and dV at head dims over 128  bias.cuh      the gradient of a bias
//   sparse.cuh    lists of steps, with a block mask
// lab/notebooks/attention_hopper.md draws the schedule.
//
// Invariant on NaN: masked pairs are zero before each product, and what lies outside of the tensors is zero. What is
// left (0 * NaN is NaN in the tensor core) always leaves some gradient that is not finite; the kernels look for one,
// and plan.not_finite has the generic kernel compute all gradients again.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/ptx/grid.cuh"
#include "cuda/attention/backward/sm90a/bias.cuh"
#include "cuda/attention/backward/sm90a/joined.cuh"
#include "cuda/attention/backward/sm90a/keys.cuh"
#include "cuda/attention/backward/sm90a/prepare.cuh"
#include "cuda/attention/backward/sm90a/producer.cuh"
#include "cuda/attention/backward/sm90a/queries.cuh"
#include "cuda/attention/backward/sm90a/sparse.cuh"
#include "cuda/attention/backward/sm90a/wide.cuh"

namespace flashkernel::cuda::sm90a {

/// kModified: with a softcap, a bias, ALiBi or a packed mask; JoinedBackwardShape: some pairs are hidden.
template <class Shape, class T, bool kModified>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attention_bwd_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ BackwardPlan plan,
                         const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                         const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_grad_out,
                         const __grid_constant__ CUtensorMap map_rows) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];  // lines of the swizzle: 1024 bytes
  using Layout = BackwardLayout<Shape>;
  const Layout shared{ptx::shared_address(dynamic_shared)};
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&map_q, &map_k, &map_v, &map_grad_out, &map_rows}) ptx::tma_prefetch_map(map);
    constexpr int kKeyWarps = Shape::kKeyWarps, kQueryWarps = Shape::kQueryWarps;
    ptx::mbarrier_init(shared.v_full(), 1);
    ptx::mbarrier_init(shared.v_empty(), kKeyWarps);
    for (int slot = 0; slot < Shape::kKeySlots; ++slot) {
      ptx::mbarrier_init(shared.k_full(slot), 1);
      ptx::mbarrier_init(shared.k_empty(slot), Shape::kConsumerWarps);
    }
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::mbarrier_init(shared.q_full(stage), 1);
      ptx::mbarrier_init(shared.q_empty(stage), kKeyWarps);
      ptx::mbarrier_init(shared.grad_out_full(stage), 1);
      ptx::mbarrier_init(shared.grad_out_empty(stage), kKeyWarps);
    }
    for (int slot = 0; slot < Shape::kScoreSlots; ++slot) {
      ptx::mbarrier_init(shared.grad_s_full(slot), kKeyWarps);
      ptx::mbarrier_init(shared.grad_s_empty(slot), kQueryWarps);
    }
    for (int slot = 0; slot < Layout::kItems; ++slot) {
      ptx::mbarrier_init(shared.item_full(slot), 1);
      // Every lane that has read a record says so itself: racecheck takes one lane's word for that lane alone.
      ptx::mbarrier_init(shared.item_empty(slot), Shape::kConsumerWarps * kWarp + 2);
    }
    for (int slot = 0; slot < Layout::kTurns; ++slot) {
      ptx::mbarrier_init(shared.turn_full(slot), 1);
      ptx::mbarrier_init(shared.turn_empty(slot), kQueryWarps);
    }
    for (int slot = 0; slot < Layout::kPasses; ++slot) {
      ptx::mbarrier_init(shared.pass_full(slot), kQueryWarps * (Shape::kJoined ? kWarp : 1));
      ptx::mbarrier_init(shared.pass_empty(slot), 1);
    }
    if constexpr (Shape::kMayCut) *shared.range() = {0, 0};
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::wait_for_previous_kernel();
  const int warpgroup = static_cast<int>(__shfl_sync(kFullMask, threadIdx.x / 128, 0));
  if (warpgroup == 0) {
    ptx::decrease_registers<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce_gradients<Shape>(p, plan, shared, &map_q, &map_k, &map_v, &map_grad_out, &map_rows);
    } else if (threadIdx.x == 32) {
      if constexpr (Shape::kJoined)
        pass_published_turns<Shape>(p, plan, shared);
      else
        pass_turns<Shape>(p, plan, shared);
    } else if (threadIdx.x == 64) {
      if constexpr (Shape::kJoined)
        publish_turns<Shape>(p, plan, shared);
      else
        await_turns<Shape>(p, plan, shared);
    }
  } else if constexpr (Shape::kJoined) {
    ptx::increase_registers<Shape::kKeyRegisters>();
    JoinedConsumer<Shape, T, kModified> consumer{{p, plan, shared, warpgroup - 1}};
    consumer.run();
  } else if (warpgroup == 1) {
    ptx::decrease_registers<Shape::kQueryRegisters>();
    QueryConsumer<Shape, T> consumer{p, plan, shared};
    consumer.run();
  } else if constexpr (Shape::kWide) {
    ptx::increase_registers<Shape::kKeyRegisters>();
    if (warpgroup == 2) {
      WideKeyConsumer<Shape, T, kModified, 0> consumer{p, plan, shared};
      consumer.run();
    } else {
      WideKeyConsumer<Shape, T, kModified, 1> consumer{p, plan, shared};
      consumer.run();
    }
  } else {
    ptx::increase_registers<Shape::kKeyRegisters>();
    KeyConsumer<Shape, T, kModified> consumer{p, plan, shared, warpgroup - 2};
    consumer.run();
  }
}

/// What the order of a launch follows from.
template <class Shape>
BackwardCall backward_call(const AttentionParams& f, const BackwardPlan& plan, const CudaDeviceProperties& device) {
  BackwardCall call;
  call.heads = plan.heads, call.k_tiles = plan.k_tiles, call.q_tiles = plan.q_tiles, call.group = plan.group;
  call.ordered = plan.ordered;
  call.joined = Shape::kJoined;
  call.sparse = Shape::kSparse;
  call.uneven = (f.window_right >= 0) != (f.window_left >= 0);
  if (f.window_right >= 0 && f.window_left >= 0)
    call.band_tiles = (f.window_left + f.window_right + Shape::kBlockN) / Shape::kBlockM + 1;
  call.head_bytes = f.seq_q * plan.group * (Shape::kQkDim * (2 + 4) + Shape::kVDim * 2);  // Q, dQ and dO
  call.num_sms = device.num_sms, call.l2_bytes = device.l2_bytes;
  return call;
}

/// Whether the last block to add to a tile of dQ writes grad_q. It reads what the others have added, and its steps take
/// twice as long. Where queries see no keys after their own, each block is the last one for a few of its tiles, and
/// that is cheaper than a kernel that converts; otherwise one tile of keys would be the last one for all of them.
inline bool last_writes(const AttentionParams& f, int k_tiles) { return f.window_right >= 0 || k_tiles <= 1; }

/// Whether the key warpgroups make dQ, at d128 and without a softcap. Measured on an H200, fp16, TFLOP/s without and
/// with a warpgroup of its own for dQ: without a mask 380 and 365 at seq 512, 522 and 476 at 2048; causal 236 and 242
/// at 512, 323 and 326 at 1024, 413 and 399 at 2048. bf16 gains more (grouped heads, causal 1024: 391 and 357).
inline bool joined_is_faster(const AttentionParams& f) {
  const bool masked = f.window_right >= 0 || f.window_left >= 0;
  return std::min(f.seq_q, f.seq_k) >= (masked ? 1024 : 512);
}

/// Whether some tile has pairs to hide: under a window, or past the end of a sequence.
inline bool may_mask(const AttentionParams& f) {
  return f.window_left >= 0 || f.window_right >= 0 || f.is_varlen_k() || f.seq_k % kBackwardBlockN != 0;
}

template <class T, int kQkDim, int kVDim>
void launch_grad_bias(const AttentionBackwardParams& p, const BackwardPlan& plan, cudaStream_t s) {
  using Shape = GradBiasShape<kQkDim, kVDim>;
  const AttentionParams& f = p.forward;
  const std::int64_t tiles = ceil_div(f.seq_q, Shape::kQueries) * ceil_div(f.seq_k, Shape::kKeys);
  const auto blocks = static_cast<unsigned>(p.grad_bias_shape[0] * p.grad_bias_shape[1] * tiles);
  if (blocks == 0) return;
  launch("attention_bwd sm90a: grad_bias", grad_bias_kernel<T, kQkDim, kVDim>,
         {blocks, Shape::kThreads, Shape::kBytes, s}, p, plan,
         make_tensor_map("attention_bwd q", q_map(f, Shape::kQueries)),
         make_tensor_map("attention_bwd k", kv_map(f, false, Shape::kKeys)),
         make_tensor_map("attention_bwd v", kv_map(f, true, Shape::kKeys)),
         make_tensor_map("attention_bwd grad_out", grad_out_map(p, Shape::kQueries)));
}

template <class Shape, class T, bool kModified>
void launch_attention_bwd(const AttentionBackwardParams& p, void* workspace, cudaStream_t s) {
  constexpr HeadDims kDims{Shape::kQkDim, Shape::kVDim};
  constexpr bool kEarly = true;  // each kernel starts while the one before it ends, and waits for that
  const AttentionParams& f = p.forward;
  const BackwardWorkspace layout(p, kDims);
  char* const bytes = static_cast<char*>(workspace);
  const CudaDeviceProperties& device = cuda_device_properties(f.device.index);
  BackwardPlan plan;
  plan.k_tiles = static_cast<int>(ceil_div(f.seq_k, Shape::kBlockN));
  plan.q_tiles = static_cast<int>(layout.tiles);
  plan.heads = static_cast<int>(f.batch * f.heads_kv);
  const int items = plan.heads * plan.k_tiles;
  plan.group = static_cast<int>(f.heads_q / f.heads_kv);
  plan.ordered = p.deterministic || order_is_cheap(Shape::kJoined, plan.k_tiles);
  const BackwardCall call = backward_call<Shape>(f, plan, device);
  int at_once = choose_heads_at_once(call);
  BackwardCut cut(p, kDims, device.num_sms);
  if (plan.ordered || !Shape::kMayCut || kModified) cut.items = cut.ranges = 0;
  plan.whole_items = items - static_cast<int>(cut.items);
  plan.tickets = plan.whole_items + static_cast<int>(cut.ranges);
  plan.range_tiles = static_cast<int>(cut.range_tiles);
  plan.cut_tiles = static_cast<int>(cut.items) * plan.q_tiles;
  // The last group of heads has all of the cut items, and begins with others: the first tiles of keys.
  while (plan.last_heads(at_once) * (plan.k_tiles - 1) < cut.items) ++at_once;
  plan.set_groups(at_once, first_tiles_lead(call));
  plan.last_writes = !Shape::kJoined && !Shape::kSparse && plan.ordered && last_writes(f, plan.k_tiles);
  plan.scale_log2 = f.scale * 1.4426950408889634f;
  plan.delta = reinterpret_cast<float*>(bytes);
  plan.rows = reinterpret_cast<float*>(bytes + layout.rows);
  plan.sums = reinterpret_cast<float*>(bytes + layout.sums);
  plan.counters = reinterpret_cast<int*>(bytes + layout.counters);
  plan.ticket = reinterpret_cast<int*>(bytes + layout.ticket);
  plan.not_finite = reinterpret_cast<int*>(bytes + layout.not_finite);
  plan.given = reinterpret_cast<int*>(bytes + layout.given);
  plan.parts = reinterpret_cast<float*>(bytes + layout.parts);
  plan.adders = plan.num_steps = nullptr;
  plan.list_batches = plan.list_heads_q = plan.list_heads_kv = plan.zeroed = 0;
  plan.orders = nullptr;
  plan.steps = nullptr;

  const auto q_blocks = static_cast<unsigned>(f.batch * f.heads_q * plan.q_tiles);
  if constexpr (Shape::kSparse) {
    plan.adders = reinterpret_cast<int*>(bytes + layout.adders);
    plan.orders = reinterpret_cast<std::uint16_t*>(bytes + layout.orders);
    plan.num_steps = reinterpret_cast<int*>(bytes + layout.num_steps);
    plan.steps = reinterpret_cast<SparseStep*>(bytes + layout.steps);
    const SparseLists lists(f);
    plan.zeroed = !plan.ordered;
    plan.list_batches = static_cast<int>(lists.batches);
    plan.list_heads_q = static_cast<int>(lists.heads_q), plan.list_heads_kv = static_cast<int>(lists.heads_kv);
    const int of_queries = plan.list_batches * plan.list_heads_q * plan.q_tiles;
    const int of_keys = plan.list_batches * plan.list_heads_kv * plan.k_tiles;
    const auto shape = [&](int count) {
      return LaunchShape{static_cast<unsigned>((count + kListWarps - 1) / kListWarps), kListWarps * kWarp, 0, s};
    };
    if (q_blocks > 0) launch("attention_bwd sm90a: order", order_kernel<Shape>, shape(of_queries), p, plan, of_queries);
    if (items > 0) launch("attention_bwd sm90a: steps", steps_kernel<Shape>, shape(of_keys), p, plan, of_keys);
  }
  if (q_blocks == 0) {
    // No queries: nothing but zeros for the keys, and the ticket and flag that prepare_kernel would have reset.
    cuda_check(cudaMemsetAsync(plan.ticket, 0, 2 * sizeof(int), s), "attention_bwd sm90a: ticket");
  } else {
    launch("attention_bwd sm90a: prepare", prepare_kernel<T, kDims.qk, kDims.v>, {q_blocks, 256, 0, s, kEarly}, p,
           plan);
  }
  if (items > 0) {
    launch("attention_bwd sm90a", attention_bwd_kernel<Shape, T, kModified>,
           {static_cast<unsigned>(std::min(items, device.num_sms)), Shape::kThreads, BackwardLayout<Shape>::kBytes, s,
            kEarly},
           p, plan, make_tensor_map("attention_bwd q", q_map(f, Shape::kBlockM)),
           make_tensor_map("attention_bwd k", kv_map(f, false, Shape::kBlockN)),
           make_tensor_map("attention_bwd v", kv_map(f, true, Shape::kBlockN)),
           make_tensor_map("attention_bwd grad_out", grad_out_map(p, Shape::kBlockM)),
           make_tensor_map("attention_bwd rows", rows_map(plan.rows, q_blocks, Shape::kBlockM)));
  }
  if constexpr (kModified && !Shape::kWide && !Shape::kJoined)
    if (p.grad_bias) launch_grad_bias<T, kDims.qk, kDims.v>(p, plan, s);
  if (!p.grad_q || q_blocks == 0 || plan.last_writes) return;
  if constexpr (Shape::kJoined)
    launch("attention_bwd sm90a: grad_q", joined_grad_q_kernel<Shape, T>, {q_blocks, 256, 0, s, kEarly}, p, plan);
  else
    launch("attention_bwd sm90a: grad_q", grad_q_kernel<T, kDims.qk, kDims.v>,
           {q_blocks, 2 * Shape::kBlockM, 0, s, kEarly}, p, plan);
}

/// An entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void attention_bwd(const AttentionBackwardParams& p, void* workspace, Stream stream) {
  using T = Element<kDtype>;
  if constexpr (backward_takes_block_mask(kQkDim, kVDim))
    if (p.forward.mask.blocks.data) return attention_bwd_sparse<kDtype, kQkDim, kVDim>(p, workspace, stream);
  const CudaDeviceGuard guard(p.forward.device.index);
  if constexpr (backward_takes_modifiers(kQkDim, kVDim))
    if (p.forward.has_score_modifier())
      return launch_attention_bwd<BackwardShape<kQkDim, kVDim>, T, true>(p, workspace, native(stream));
  if constexpr (kQkDim == JoinedBackwardShape::kQkDim && kVDim == JoinedBackwardShape::kVDim)
    if (!p.invariant && joined_is_faster(p.forward))
      return may_mask(p.forward) ? launch_attention_bwd<JoinedBackwardShape, T, true>(p, workspace, native(stream))
                                 : launch_attention_bwd<JoinedBackwardShape, T, false>(p, workspace, native(stream));
  launch_attention_bwd<BackwardShape<kQkDim, kVDim>, T, false>(p, workspace, native(stream));
}

template <DType kDtype, int kQkDim, int kVDim>
void attention_bwd_sparse(const AttentionBackwardParams& p, void* workspace, Stream stream) {
  static_assert(backward_takes_block_mask(kQkDim, kVDim), "one head dim");
  const CudaDeviceGuard guard(p.forward.device.index);
  launch_attention_bwd<SparseBackwardShape<kQkDim>, Element<kDtype>, false>(p, workspace, native(stream));
}

}  // namespace flashkernel::cuda::sm90a
