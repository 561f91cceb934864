// Softmax of rows longer than a block holds: a cluster of 8 blocks holds one in registers, each block a part, and what
// is reduced over the row goes through the blocks' shared memory. So a row is still read once and written once, where
// the generic kernels read it again. Which is faster depends on the row: see the supports functions. Called through the
// table of kernels.cpp. Invariant: all blocks add the same values in the same order.
#include "cuda/sm90a/long_rows.hpp"

#include "cuda/host/launch.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/softmax_row.cuh"

namespace flashkernel::cuda::sm90a {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocks = 8;                                 // of a cluster, everywhere
constexpr std::int64_t kLongest = kBlocks * kThreads * 8;  // vectors of 16 bytes, 512 KB: 262144 16-bit elements

/// Reductions over a cluster, up to two in a kernel. The blocks' values lie apart for each, so that one may be written
/// while the other is read.
class ClusterReduce {
 public:
  struct Shared {
    float warps[kThreads / kWarp];
    float4 blocks[2];  // this block's value in x
  };
  __device__ explicit ClusterReduce(Shared& shared) : shared_(shared) {}

  template <class Op>
  __device__ float operator()(float value, Op op) {
    value = block_reduce<kThreads>(value, shared_.warps, op);
    float4& mine = shared_.blocks[turn_++];
    if (threadIdx.x == 0) mine = make_float4(value, 0.0f, 0.0f, 0.0f);
    ptx::cluster_arrive();
    ptx::cluster_wait();
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const auto here = ptx::shared_address(&mine);
    value = Op::kIdentity;
    if (lane < kBlocks) value = ptx::load_cluster_4(ptx::map_shared(here, static_cast<std::uint32_t>(lane))).x;
    return warp_reduce(value, op);
  }
  /// Before the block ends: the others may still be reading its values.
  __device__ void finish() const {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }

 private:
  Shared& shared_;
  int turn_ = 0;
};

/// f(row, first column, columns, reduce) for the part of a row that this block holds.
template <int N, class F>
__device__ inline void with_part(std::int64_t columns, F f) {
  __shared__ ClusterReduce::Shared shared;
  const std::int64_t share = (columns / N + kBlocks - 1) / kBlocks * N;
  const std::int64_t first = min(columns, ptx::cluster_rank() * share);
  ClusterReduce reduce(shared);
  f(static_cast<std::int64_t>(blockIdx.x) / kBlocks, first, min(share, columns - first), reduce);
  reduce.finish();
}

template <class T, int kVectors>
__global__ void __launch_bounds__(kThreads, kVectors <= 4 ? 2 : 1) softmax_kernel(const SoftmaxParams p) {
  constexpr int N = kVectorElements<T>;
  with_part<N>(p.columns, [&](std::int64_t row, std::int64_t first, std::int64_t columns, auto& reduce) {
    softmax_row<T, kThreads, kVectors, N>(p, row, first, columns,
                                          [&](float value, auto op) { return reduce(value, op); });
  });
}

template <class T, int kVectors>
__global__ void __launch_bounds__(kThreads, kVectors <= 4 ? 2 : 1) softmax_bwd_kernel(const SoftmaxBackwardParams p) {
  constexpr int N = kVectorElements<T>;
  with_part<N>(p.columns, [&](std::int64_t row, std::int64_t first, std::int64_t columns, auto& reduce) {
    softmax_bwd_row<T, kThreads, kVectors, N, false>(p, row, first, columns,
                                                     [&](float value, auto op) { return reduce(value, op); });
  });
}

/// An H200 found the generic kernels faster on rows of up to `generic` KB (docs/kernels/cuda_memory_bound.md).
Verdict supports(bool vectors, DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t generic) {
  const std::int64_t bytes = columns * static_cast<std::int64_t>(dtype_bytes(dtype));
  if (bytes <= generic * 1024) return Verdict("needs longer rows; generic is faster on these");
  if (bytes / 16 > kLongest) return Verdict("a cluster holds rows of up to 512 KB");
  if (!vectors) return Verdict("needs neighbouring elements and rows on 16-byte boundaries");
  return rows <= 0x7fffffff / kBlocks ? Verdict::ok() : Verdict("more rows than a grid has clusters");
}

/// launch(T{}, kernel's vectors a thread).
template <class F>
void with_shape(DType dtype, std::int64_t columns, F f) {
  visit_floating(dtype, [&](auto zero) {
    const std::int64_t vectors = columns / kVectorElements<decltype(zero)>;
    if (vectors <= kBlocks * kThreads * 4) return f(zero, Constant<4>{});
    f(zero, Constant<8>{});
  });
}

LaunchShape shape(std::int64_t rows, Stream stream) {
  LaunchShape shape{static_cast<unsigned>(rows * kBlocks), kThreads, 0, native(stream)};
  shape.cluster = kBlocks;
  return shape;
}

}  // namespace

Verdict softmax_long_rows_supports(const SoftmaxParams& p) {
  return supports(rows_are_vectors(p), p.dtype, p.rows, p.columns, 256);
}
Verdict softmax_bwd_long_rows_supports(const SoftmaxBackwardParams& p) {
  return supports(rows_are_vectors(p), p.dtype, p.rows, p.columns, 128);
}

void softmax_long_rows(const SoftmaxParams& p, void*, Stream stream) {
  if (p.rows == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  with_shape(p.dtype, p.columns, [&](auto zero, auto vectors) {
    launch("softmax: long rows", softmax_kernel<decltype(zero), vectors.value>, shape(p.rows, stream), p);
  });
}

void softmax_bwd_long_rows(const SoftmaxBackwardParams& p, void*, Stream stream) {
  if (p.rows == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  with_shape(p.dtype, p.columns, [&](auto zero, auto vectors) {
    launch("softmax_bwd: long rows", softmax_bwd_kernel<decltype(zero), vectors.value>, shape(p.rows, stream), p);
  });
}

}  // namespace flashkernel::cuda::sm90a
