// Rows that the blocks of a cluster share: what the kernels for long rows on 9.0 (softmax/sm90a/long_rows.cu,
// norm/sm90a/norm_long_rows.cu) have in common. A block holds its part of a row in registers (tile/held_row.cuh). To
// reduce over the row, every warp sends its part to every block by st.async, so a block needs no barrier of its own.
// Blocks are small, and several of them run on a multiprocessor: while one waits for its row or for sums of other
// blocks, another one stores. Where a cluster walks several rows, a vector of the next row takes the registers of the
// current one as soon as that vector is stored. Invariant: all blocks combine the same messages in the same order,
// which follows from the shape.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/host/clusters.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/host/row_plan.hpp"
#include "cuda/tile/held_row.cuh"
#include "cuda/tile/reduce.cuh"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::long_rows {

constexpr int kMostBlocks = 16;  // of a cluster: every GPU of 9.0 runs 8, and some run up to 16 (cluster_fits)

constexpr int kAll = std::numeric_limits<int>::max();

/// A block has kThreads threads with kVectors vectors of 16 bytes each. A multiprocessor has kResident threads, which
/// decides how many registers a thread has. A cluster takes kRows rows where there are enough of them; with kAll the
/// rows are divided among the clusters that the GPU runs at once.
template <int kThreads_, int kVectors_, int kResident_, int kRows_ = 1>
struct Shape {
  static constexpr int kThreads = kThreads_, kVectors = kVectors_, kBlocksPerSm = kResident_ / kThreads_;
  static constexpr int kBytes = kThreads * kVectors * 16;  // of a row, in a block
  static constexpr int kRows = kRows_;
  static constexpr bool kWalks = kRows > 1;
  template <class T>
  using Held = HeldRow<T, kThreads, kVectors>;
};
/// 32 KB a block in every shape: rows of 512 KB take 16.
using Long = Shape<256, 8, 1024>;

/// The columns of a row that this block holds: [first, first + count).
struct Part {
  __device__ Part(std::int64_t columns, int share)
      : first(static_cast<int>(ptx::cluster_rank()) * share),
        count(max(0, min(share, static_cast<int>(columns) - first))) {}
  int first, count;
};

__device__ inline std::int64_t number_of_cluster(int num_blocks) {
  return blockIdx.x / static_cast<unsigned>(num_blocks);
}

__device__ inline void send(std::uint32_t to, float message, std::uint32_t barrier) {
  ptx::store_async(to, message, barrier);
}
__device__ inline void send(std::uint32_t to, const float2& message, std::uint32_t barrier) {
  ptx::store_async_2(to, message, barrier);
}
__device__ inline void send(std::uint32_t to, const float4& message, std::uint32_t barrier) {
  ptx::store_async_4(to, message, barrier);
}

/// Sends to all blocks what each warp of the cluster has found in its part of a row: a message of float, float2 or
/// float4.
template <class Message, class S>
class Exchange {
 public:
  static constexpr int kWarps = S::kThreads / kWarp;
  struct Shared {
    alignas(16) Message mail[kMostBlocks * kWarps];
    alignas(8) std::uint64_t arrived;
  };

  /// Every thread of every block of the cluster.
  __device__ Exchange(Shared& shared, int num_blocks) : shared_(shared), num_blocks_(num_blocks) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(barrier(), 1);
      ptx::fence_mbarrier_init();
    }
    next();
  }

  /// Sends this warp's message (the same in all of its lanes), and returns when everybody's are here.
  __device__ void all(const Message& mine) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    ptx::cluster_wait();  // all run, and their barriers count; later, all have read the last messages
    if (lane < num_blocks_) {
      const auto to = ptx::shared_address(&shared_.mail[static_cast<int>(ptx::cluster_rank()) * kWarps + warp]);
      send(ptx::map_shared(to, lane), mine, ptx::map_shared(barrier(), lane));
    }
    __syncwarp();
    ptx::mbarrier_wait(barrier(), phase_);
    phase_ ^= 1;
  }
  /// Must be called after the last each() of a row, but only if another row follows. (If nobody waits for an arrival
  /// after the last row, synccheck of compute-sanitizer blames the next kernel whose barrier lies in the same place.)
  __device__ void next() const {
    if (threadIdx.x == 0) expect();
    __syncwarp();
    ptx::cluster_arrive_relaxed();
  }
  /// Calls f(message) for every 32nd message from this lane on. A reduction over the warp then gives the row's result.
  template <class F>
  __device__ void each(F f) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int k = 0; k < kMostBlocks * kWarps / kWarp; ++k)
      if (k * kWarp + lane < size()) f(shared_.mail[k * kWarp + lane]);
  }

 private:
  __device__ int size() const { return num_blocks_ * kWarps; }
  __device__ std::uint32_t barrier() const { return ptx::shared_address(&shared_.arrived); }
  __device__ void expect() const {
    ptx::mbarrier_arrive_expect(barrier(), static_cast<std::uint32_t>(size() * sizeof(Message)));
  }
  Shared& shared_;
  int num_blocks_;
  std::uint32_t phase_ = 0;
};

/// Blocks that hold a row of `vectors`. At least two: st.async in a block without a cluster is an illegal instruction.
template <class S = Long>
int blocks_of_cluster(std::int64_t vectors) {
  return std::max(2, static_cast<int>(ceil_div(vectors * 16, S::kBytes)));
}

/// Rows that a cluster can take. Which of them it is faster for stands in row_costs.hpp. `vectors`: rows are whole
/// vectors on 16-byte boundaries.
inline Verdict serves(DType dtype, std::int64_t columns, bool vectors) {
  const std::int64_t bytes = columns * static_cast<std::int64_t>(dtype_bytes(dtype));
  if (bytes == 0) return Verdict("rows are empty");
  if (bytes > kMostBlocks * Long::kBytes) return Verdict("a cluster holds rows of up to 512 KB");
  return vectors ? Verdict::ok() : Verdict("needs neighbouring elements and rows on 16-byte boundaries");
}

/// A kernel: its function, Shape, element type, bytes of dynamic shared memory a block and name in errors.
template <class S_, class T_, class... Params>
struct Kernel {
  using S = S_;
  using T = T_;
  void (*function)(Params...);
  int shared_bytes;
  const char* name;
};
template <class S, class T, class... Params>
Kernel<S, T, Params...> kernel_of(void (*function)(Params...), int shared_bytes, const char* name) {
  return {function, shared_bytes, name};
}

/// Clusters that the GPU, number `device`, runs at once.
template <class K>
int clusters_at_once(const K& kernel, int blocks, int device) {
  return cuda::clusters_at_once(kernel.name, reinterpret_cast<const void*>(kernel.function), blocks, K::S::kThreads,
                                kernel.shared_bytes, device);
}

/// Whether the GPU runs clusters of as many blocks as a row takes. Not every GPU runs more than 8.
template <class K>
Verdict cluster_fits(const K& kernel, std::int64_t columns, int device) {
  const int blocks = blocks_of_cluster<typename K::S>(columns / kVectorElements<typename K::T>);
  if (blocks <= 8) return Verdict::ok();
  const CudaDeviceGuard guard(device);
  return clusters_at_once(kernel, blocks, device) > 0 ? Verdict::ok()
                                                      : Verdict("this GPU runs no clusters of that many blocks");
}

/// The clusters for `rows` rows: at least as many as the GPU runs at once, or one for each row if there are fewer rows.
template <class K>
std::int64_t clusters_of(const K& kernel, std::int64_t rows, int blocks, int device) {
  if (!K::S::kWalks) return rows;
  const std::int64_t at_once = std::max(1, clusters_at_once(kernel, blocks, device));
  return std::max(ceil_div(rows, K::S::kRows), std::min(rows, at_once));
}

/// The current device is number `device`.
template <class K>
ClusterRows plan_rows(const K& kernel, std::int64_t columns, std::int64_t rows, int device) {
  constexpr int N = kVectorElements<typename K::T>;
  ClusterRows plan;
  plan.blocks = blocks_of_cluster<typename K::S>(columns / N);
  plan.share = static_cast<int>(ceil_div(columns / N, plan.blocks)) * N;
  plan.clusters = clusters_of(kernel, rows, plan.blocks, device);
  return plan;
}

/// The kernel's last parameters are the blocks of a cluster and the columns of a block.
template <class K, class Params>
void launch_rows(const K& kernel, const ClusterRows& plan, const Params& p, Stream stream) {
  LaunchShape shape{static_cast<unsigned>(plan.clusters * plan.blocks), K::S::kThreads,
                    static_cast<std::size_t>(kernel.shared_bytes), native(stream), true};
  shape.cluster = static_cast<unsigned>(plan.blocks);
  launch(kernel.name, kernel.function, shape, p, plan.blocks, plan.share);
}

}  // namespace flashkernel::cuda::long_rows
