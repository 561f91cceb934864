// Rows that the blocks of a cluster share, one after another: what the kernels for long rows on 9.0 (long_rows.cu,
// norm_long_rows.cu) have in common. A block's part of the next rows comes by cp.async into shared memory while this
// row, in registers, is added up and stored, so memory is never without requests of an SM. What is reduced over the row
// goes to all blocks by st.async. Invariants: a thread reads back only what it has copied itself, so the stages need no
// barrier; all blocks combine the same values in the same order.
#pragma once

#include "cuda/host/clusters.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vector.cuh"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm90a::long_rows {

constexpr int kThreads = 512;   // of a block: 128 registers each, one block an SM
constexpr int kHeld = 8;        // vectors of 16 bytes of a row that a thread holds: 64 KB a block
constexpr int kMostBlocks = 8;  // of a cluster

/// 16 bytes of a row. As one word: of a vector of 16-bit elements the compiler would load the elements one by one.
template <class T>
struct Word {
  static constexpr int N = kVectorElements<T>;
  uint4 word;
  __device__ void floats(float (&values)[N]) const { unpack(values, reinterpret_cast<const Packed<T, N>&>(word)); }
  __device__ void set(const float (&values)[N]) { reinterpret_cast<Packed<T, N>&>(word) = pack_vector<T>(values); }
};

/// The columns of a row that this block holds: [first, first + count). A thread's vector j is at column(j).
template <class T>
class Part {
 public:
  static constexpr int N = kVectorElements<T>;
  __device__ Part(std::int64_t columns, int num_blocks)
      : columns_(static_cast<int>(columns)), share_((columns_ / N + num_blocks - 1) / num_blocks * N) {
    first = static_cast<int>(ptx::cluster_rank()) * share_;
    count = count_of(static_cast<int>(ptx::cluster_rank()));
  }
  __device__ int count_of(int block) const { return max(0, min(share_, columns_ - block * share_)); }
  __device__ int column(int j) const { return first + (j * kThreads + static_cast<int>(threadIdx.x)) * N; }
  __device__ bool holds(int j) const { return (j * kThreads + static_cast<int>(threadIdx.x)) * N < count; }
  int first, count;

 private:
  int columns_, share_;
};

/// One 16-byte place of shared memory for each vector of each thread.
struct Slot {
  static constexpr int kBytes = kHeld * kThreads * 16;
  unsigned char* at;
  __device__ unsigned char* vector(int j) const { return at + (j * kThreads + static_cast<int>(threadIdx.x)) * 16; }
  /// The columns of a row that `part` holds, and zeros behind them; under way until this thread waits for its group.
  template <class T>
  __device__ void copy(const T* row, const Part<T>& part) const {
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      ptx::cp_async_16(ptx::shared_address(vector(j)), row + part.column(j), part.holds(j) ? 16 : 0);
  }
  template <class T>
  __device__ Word<T> read(int j) const {
    return {*reinterpret_cast<const uint4*>(vector(j))};
  }
};

/// Slot i of a kernel's dynamic shared memory.
__device__ inline Slot slot_of(int i) {
  extern __shared__ __align__(16) unsigned char shared[];
  return {shared + i * Slot::kBytes};
}

/// The rows of this block's cluster: first, first + step, and so on.
struct Walk {
  explicit __device__ Walk(int num_blocks)
      : first(blockIdx.x / static_cast<unsigned>(num_blocks)), step(gridDim.x / static_cast<unsigned>(num_blocks)) {}
  std::int64_t first, step;
};

/// Reductions over the block and the cluster. Two turns of everything, so that the barrier of one reduction (or the
/// messages of one exchange, which a block sends after such a barrier) stands between a turn's reads and its next
/// writes.
class Exchange {
 public:
  static constexpr int kWarps = kThreads / kWarp;
  struct Shared {
    float warps[2][kWarps];
    float2 mail[2][kMostBlocks];
    alignas(8) std::uint64_t arrived[2];
  };

  /// Every thread of every block of the cluster.
  __device__ Exchange(Shared& shared, int num_blocks) : shared_(shared), num_blocks_(num_blocks) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(ptx::shared_address(&shared_.arrived[0]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared_.arrived[1]), 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::cluster_arrive_relaxed();
  }
  /// Before the block ends.
  __device__ void finish() const { ptx::cluster_wait(); }

  /// Over the block's threads, for all of them.
  template <class Op>
  __device__ float block(float value, Op op) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    value = warp_reduce(value, op);
    if (lane == 0) shared_.warps[block_turn_][warp] = value;
    __syncthreads();
    value = lane < kWarps ? shared_.warps[block_turn_][lane] : Op::kIdentity;
    block_turn_ ^= 1;
    return warp_reduce(value, op);
  }

  /// Sends `mine` (of all threads alike, after a reduction over the block) to the whole cluster. Lane l gets the value
  /// of the cluster's block l, or `missing` where there is none: what a reduction over the warp makes the row's.
  __device__ float2 all(float2 mine, float2 missing) {
    const auto barrier = ptx::shared_address(&shared_.arrived[turn_]);
    ptx::cluster_wait();  // all have read the last values, long ago: this costs a look
    if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(barrier, static_cast<std::uint32_t>(num_blocks_) * 8);
    if (static_cast<int>(threadIdx.x) < num_blocks_) {
      const auto here = ptx::shared_address(&shared_.mail[turn_][ptx::cluster_rank()]);
      ptx::store_async_2(ptx::map_shared(here, threadIdx.x), mine, ptx::map_shared(barrier, threadIdx.x));
    }
    ptx::mbarrier_wait(barrier, phase_);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const float2 value = lane < num_blocks_ ? shared_.mail[turn_][lane] : missing;
    phase_ ^= turn_;
    turn_ ^= 1;
    __syncwarp();
    ptx::cluster_arrive_relaxed();
    return value;
  }

 private:
  Shared& shared_;
  int num_blocks_, turn_ = 0, block_turn_ = 0;
  std::uint32_t phase_ = 0;  // of both turns' barriers: it changes after the second
};

/// Rows that clusters take: those above 128 KB in fp32 and 96 KB in 16 bits, where an H200 found them ahead of the
/// generic kernels (docs/kernels/cuda_memory_bound.md). `vectors`: whole vectors on 16-byte boundaries.
inline Verdict serves(DType dtype, std::int64_t columns, bool vectors) {
  const std::int64_t bytes = columns * static_cast<std::int64_t>(dtype_bytes(dtype));
  if (bytes <= (dtype == DType::kFloat32 ? 128 : 96) * 1024)
    return Verdict("needs longer rows; generic is faster on these");
  if (bytes > 512 * 1024) return Verdict("a cluster holds rows of up to 512 KB");
  return vectors ? Verdict::ok() : Verdict("needs neighbouring elements and rows on 16-byte boundaries");
}

/// Blocks that hold a row of `vectors`.
inline int blocks_of_cluster(std::int64_t vectors) {
  int blocks = 1;
  while (blocks * static_cast<std::int64_t>(kThreads * kHeld) < vectors) blocks *= 2;
  return blocks;
}

/// As many clusters as the GPU runs at once, or as there are rows.
template <class... Params, class... Arguments>
void launch_rows(const char* name, void (*kernel)(Params...), int slots, std::int64_t rows, std::int64_t vectors,
                 int device, Stream stream, const Arguments&... arguments) {
  const int blocks = blocks_of_cluster(vectors), bytes = slots * Slot::kBytes;
  const std::int64_t most =
      std::max(1, clusters_at_once(name, reinterpret_cast<const void*>(kernel), blocks, kThreads, bytes, device));
  const std::int64_t clusters = std::min(rows, most);
  LaunchShape shape{static_cast<unsigned>(clusters * blocks), kThreads, static_cast<std::size_t>(bytes),
                    native(stream)};
  shape.cluster = static_cast<unsigned>(blocks);
  launch(name, kernel, shape, arguments..., blocks);
}

}  // namespace flashkernel::cuda::sm90a::long_rows
