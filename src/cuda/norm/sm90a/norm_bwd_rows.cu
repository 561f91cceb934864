// LayerNorm and RMSNorm backward on 9.0, up to 512 KB a row: a block (a cluster of up to 16 for more than 32 KB a row)
// takes a batch of rows, then the one as many batches on as there are blocks: so the GPU walks all tensors from their
// begin to their end. Its part of grad_out and h comes by cp.async through a ring of three stages of shared memory,
// so two stages, up to 128 KB an SM, are always under way; each thread reads back only what it has copied, so the ring
// needs no barrier. Column sums stay in registers. What a row's parts add up to goes to all blocks of the cluster by
// st.async. Bound by memory: 3 tensors, 4 with a residual. Called through the table of kernels.cpp.
// Invariant: the order of all additions follows from the shape and the number of clusters the GPU holds.
#include "cuda/norm/sm90a/norm_bwd_rows.hpp"

#include <utility>

#include "cuda/host/clusters.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/held_row.cuh"
#include "cuda/norm/norm_bwd_combine.cuh"
#include "cuda/norm/norm_weight.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/row.cuh"
#include "cuda/pipeline/turn.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda::sm90a {
namespace {

constexpr int kStages = 3;
constexpr int kMostBlocks = 16;              // of a cluster
constexpr std::int64_t kMostVectors = 2048;  // of 16 bytes, of a row, in a block

/// Cluster k of `clusters` takes the batches k, k + clusters, k + 2 * clusters, ... of `batch` rows.
struct RowsPlan {
  int num_blocks = 1;  // of a cluster
  int clusters = 0;
  int batch = 1;  // rows; less than the kernel's kRows where all clusters would not have one
};

/// Which calls a kernel is for. kAny asks at run time, in the loop over vectors, for a residual and for weights of
/// another dtype than the rows; the others are for calls with neither. kPacked has the weights in registers as they are
/// in memory, and no branch between a row's vectors.
enum class Calls { kAny, kPlain, kPacked };

/// kThreads threads hold a part of kRows rows, kVectors vectors each; kBlocks blocks an SM. kKeep: g * w and h less its
/// mean stay in registers from the row's sums to its result, else both are read and widened again.
template <class T, bool kLayerNormKind, int kThreadsOf, int kVectorsOf, int kRowsOf, bool kClusterOf,
          int kBlocksOf = 512 / kThreadsOf, bool kKeepOf = false, Calls kCalls = Calls::kAny>
struct Shape {
  using Element = T;
  static constexpr bool kLayerNorm = kLayerNormKind, kCluster = kClusterOf, kKeep = kKeepOf;
  static constexpr bool kAny = kCalls == Calls::kAny, kPacked = kCalls == Calls::kPacked;
  static constexpr int kThreads = kThreadsOf, kVectors = kVectorsOf, kRows = kRowsOf;
  static constexpr int N = kVectorElements<T>, kWarps = kThreads / kWarp;
  static constexpr int kSums = kLayerNorm ? 2 : 1;                      // columns of grad_weight, and of grad_bias
  static constexpr bool kHoldWeights = !kPacked && kVectors * N <= 16;  // as floats in registers
  static constexpr bool kShareWeights = !kPacked && !kHoldWeights;      // in shared memory
  // 64 sums a thread leave no registers for the residual to wait in.
  static constexpr bool kResidualEarly = kSums * kVectors * N < 64;
  static constexpr int kBlocks = kBlocksOf;  // by 512 threads an SM: 128 registers a thread, 64 KB a stage
  // Dynamic shared memory: the ring, [stage][row][grad_out, h][vector][thread], weights (those
  // of another dtype than the rows may find no room: they are read from memory for each row), the cluster's mail.
  static constexpr int kTensorBytes = kVectors * kThreads * 16, kRowBytes = 2 * kTensorBytes;
  static constexpr int kStageBytes = kRows * kRowBytes, kRingBytes = kStages * kStageBytes;
  static constexpr int kMailBytes = 2 * kRows * kMostBlocks * 8;  // two turns of {sum, dot}
  static constexpr int kMailAt = kRingBytes + (kShareWeights ? kTensorBytes : 0);
  static constexpr int kSharedBytes = kMailAt + (kCluster ? kMailBytes + 16 : 0);
};

/// Sums of kRows rows, each thread's, over the block or the cluster; two turns, so that one barrier is enough: it (or
/// a message that was sent after it) stands between a turn's reads and the writes of the turn after next.
template <class S>
class RowSums {
  static constexpr int kRows = S::kRows;

 public:
  using Scratch = float2[2][kRows][S::kWarps];

  __device__ RowSums(Scratch& scratch, unsigned char* mail, int num_blocks)
      : scratch_(scratch), mail_(reinterpret_cast<float2*>(mail)), num_blocks_(num_blocks) {
    if constexpr (S::kCluster) {
      if (threadIdx.x == 0) {
        ptx::mbarrier_init(barrier(0), 1);
        ptx::mbarrier_init(barrier(1), 1);
        ptx::fence_mbarrier_init();
      }
      ptx::cluster_arrive();
    }
  }
  /// Before the block ends.
  __device__ void finish() const {
    if constexpr (S::kCluster) ptx::cluster_wait();
  }

  __device__ void operator()(float2 (&sums)[kRows]) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (S::kLayerNorm) sums[r].x = warp_reduce(sums[r].x, Sum{});
      sums[r].y = warp_reduce(sums[r].y, Sum{});
      if (lane == 0) scratch_[turn_][r][warp] = sums[r];
    }
    __syncthreads();
    if constexpr (S::kCluster) {
      ptx::cluster_wait();  // all have read the last sums, long ago: this costs a look
      if (warp == 0) send(lane);
      ptx::mbarrier_wait(barrier(turn_), phase_);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sums[r] = {0.0f, 0.0f};
        for (int block = 0; block < num_blocks_; ++block) add(sums[r], mail_[place(r, block)]);
      }
      phase_ ^= turn_;
      __syncwarp();
      ptx::cluster_arrive_relaxed();
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = block_sums(r);
    }
    turn_ ^= 1;
  }

 private:
  __device__ static void add(float2& sum, float2 more) {
    if constexpr (S::kLayerNorm) sum.x += more.x;
    sum.y += more.y;
  }
  __device__ float2 block_sums(int r) const {
    float2 sum{0.0f, 0.0f};
#pragma unroll
    for (int warp = 0; warp < S::kWarps; ++warp) add(sum, scratch_[turn_][r][warp]);
    return sum;
  }
  __device__ int place(int r, int block) const { return (turn_ * kRows + r) * kMostBlocks + block; }
  __device__ std::uint32_t barrier(int turn) const {
    return ptx::shared_address(mail_) + S::kMailBytes + 8 * static_cast<std::uint32_t>(turn);
  }
  /// Lane l writes this block's sums into block l of the cluster.
  __device__ void send(int lane) const {
    if (lane == 0) ptx::mbarrier_arrive_expect(barrier(turn_), static_cast<std::uint32_t>(num_blocks_ * kRows * 8));
    float2 sums[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = block_sums(r);
    if (lane >= num_blocks_) return;
    const int rank = static_cast<int>(ptx::cluster_rank());
    const auto there = [&](std::uint32_t address) {
      return ptx::map_shared(address, static_cast<std::uint32_t>(lane));
    };
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      ptx::store_async_2(there(ptx::shared_address(mail_ + place(r, rank))), sums[r], there(barrier(turn_)));
  }

  Scratch& scratch_;
  float2* mail_;
  int num_blocks_, turn_ = 0;
  std::uint32_t phase_ = 0;  // of both turns' barriers: it changes after the second
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    rows_kernel(const NormBackwardParams p, const RowsPlan plan, float* partial_weight, float* partial_bias) {
  using T = typename S::Element;
  constexpr int N = S::N, kVectors = S::kVectors, kRows = S::kRows;
  using Vector = Words<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ typename RowSums<S>::Scratch scratch;

  take_turn();
  const int blocks = S::kCluster ? plan.num_blocks : 1;
  const std::int64_t cluster = blockIdx.x / static_cast<unsigned>(blocks);
  const std::int64_t first_row = cluster * plan.batch, step = static_cast<std::int64_t>(plan.clusters) * plan.batch;
  const auto inside = [&](std::int64_t row, int r) { return row + r < p.rows && (kRows == 1 || r < plan.batch); };
  // This block's columns begin at `part`; a thread's vector j is at `column + j * kStep`.
  const int thread = static_cast<int>(threadIdx.x), features = static_cast<int>(p.features);
  const int share = S::kCluster ? (features / N + blocks - 1) / blocks * N : features;
  const int part = S::kCluster ? static_cast<int>(ptx::cluster_rank()) * share : 0;
  const int columns = min(share, features - part);
  const std::int64_t column = part + thread * N;
  constexpr int kStep = S::kThreads * N;
  const auto holds = [&](int j) { return thread * N < columns - j * kStep; };
  const float inverse_features = 1.0f / static_cast<float>(features);

  const auto slot = [&](int stage, int r, int tensor, int j) {
    return shared + stage * S::kStageBytes + r * S::kRowBytes + tensor * S::kTensorBytes +
           (j * S::kThreads + thread) * 16;
  };
  // Rows and columns past the end are filled with zeros.
  const auto copy = [&](std::int64_t row, int stage) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool there = inside(row, r);
      const T* const grad_out = static_cast<const T*>(p.grad_out) + (row + r) * p.stride_grad_out_row + column;
      const T* const h = static_cast<const T*>(p.h) + (row + r) * p.stride_h_row + column;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const std::uint32_t bytes = there && holds(j) ? 16 : 0;
        ptx::cp_async_16_kept(ptx::shared_address(slot(stage, r, 0, j)), grad_out + j * kStep, bytes);
        ptx::cp_async_16_kept(ptx::shared_address(slot(stage, r, 1, j)), h + j * kStep, bytes);
      }
    }
    ptx::cp_async_commit();
  };
  const bool other_weights = S::kAny && p.weight && p.weight.dtype != dtype_of<T>;
  const bool has_residual = S::kAny && p.grad_residual_out;
  const auto weight_slot = [&](int j) { return shared + S::kRingBytes + (j * S::kThreads + thread) * 16; };
  if constexpr (S::kShareWeights) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (!p.weight) {
        float ones[N];
#pragma unroll
        for (int i = 0; i < N; ++i) ones[i] = 1.0f;
        store_floats(reinterpret_cast<T*>(weight_slot(j)), ones);
      } else if (!other_weights) {
        ptx::cp_async_16(ptx::shared_address(weight_slot(j)), static_cast<const T*>(p.weight.data) + column + j * kStep,
                         holds(j) ? 16 : 0);
      }
    }
  }
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) copy(first_row + stage * step, stage);

  // As words: of a vector of elements the compiler would load each by itself.
  const auto read_shared = [](const unsigned char* from, float(&values)[N]) {
    reinterpret_cast<const Vector*>(from)->floats(values);
  };
  const auto read_weight = [&](int j, float(&weight)[N]) {
    read_norm_weight(holds(j) ? p.weight : TypedPointer{}, p.weight_offset, column + j * kStep, weight);
  };
  float weights[S::kHoldWeights ? kVectors : 1][N];
  if constexpr (S::kHoldWeights) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) read_weight(j, weights[j]);
  }
  Vector packed[S::kPacked ? kVectors : 1];
  if constexpr (S::kPacked) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (auto& word : packed[j].words) word = kOnes<T>;
      if (p.weight && holds(j))
        packed[j] = *reinterpret_cast<const Vector*>(static_cast<const T*>(p.weight.data) + column + j * kStep);
    }
  }
  const auto weighted = [&](int j, const float(&g)[N], float(&gw)[N]) {
    float again[N];
    if constexpr (S::kPacked) {  // widened each time: kept as floats they would take twice the registers
#pragma unroll
      for (auto& word : packed[j].words) ptx::settle(word);
      packed[j].floats(again);
#pragma unroll
      for (float& weight : again) weight += p.weight_offset;
    } else if constexpr (S::kShareWeights) {
      if (other_weights) {
        read_weight(j, again);
      } else {
        read_shared(weight_slot(j), again);
#pragma unroll
        for (float& weight : again) weight += p.weight_offset;
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) gw[i] = g[i] * (S::kHoldWeights ? weights[j][i] : again[i]);
  };

  float sums[S::kSums][kVectors][N] = {};  // of g * x_hat, and of g, over this cluster's rows
  // rstd and mean of the batch after this one: lane r has row r's rstd, lane kRows + r its mean. Were all lanes to load
  // the same, the compiler would move it to a uniform register, and wait for it at once.
  const auto ask = [&](std::int64_t row) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, r = lane % kRows;
    const float* const from = S::kLayerNorm && lane >= kRows ? p.mean : p.rstd;
    return lane < S::kSums * kRows && inside(row, r) ? from[row + r] : 0.0f;
  };
  float asked = ask(first_row);
  RowSums<S> add_up(scratch, shared + S::kMailAt, blocks);

  int stage = 0, free_stage = kStages - 1;
  for (std::int64_t row = first_row; row < p.rows; row += step) {
    copy(row + (kStages - 1) * step, free_stage);
    float mean[kRows], rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rstd[r] = __shfl_sync(kFullMask, asked, r);
      mean[r] = S::kLayerNorm ? __shfl_sync(kFullMask, asked, kRows + r) : 0.0f;
    }
    asked = ask(row + step);
    const auto read_residual = [&](int r, int j) {
      const T* const from = static_cast<const T*>(p.grad_residual_out) + (row + r) * p.stride_grad_residual_out_row;
      return has_residual && inside(row, r) && holds(j) ? *reinterpret_cast<const Vector*>(from + column + j * kStep)
                                                        : Vector{};
    };
    ptx::cp_async_wait<kStages - 1>();

    // grad_out and h, the latter without its mean.
    const auto read = [&](int r, int j, float(&g)[N], float(&centred)[N]) {
      read_shared(slot(stage, r, 0, j), g);
      read_shared(slot(stage, r, 1, j), centred);
      if constexpr (S::kLayerNorm) {
#pragma unroll
        for (int i = 0; i < N; ++i) centred[i] -= mean[r];
      }
    };
    constexpr int kKept = S::kKeep ? kRows * kVectors : 1;
    float kept_gw[kKept][N], kept_h[kKept][N];
    float2 row_sums[kRows];  // of g * w, and of g * w * (h - mean)
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row_sums[r] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float g[N], gw[N], centred[N];
        read(r, j, g, centred);
        weighted(j, g, gw);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          sums[0][j][i] = fmaf(g[i] * rstd[r], centred[i], sums[0][j][i]);
          if constexpr (S::kLayerNorm) {
            sums[1][j][i] += g[i];
            row_sums[r].x += gw[i];
          }
          row_sums[r].y = fmaf(gw[i], centred[i], row_sums[r].y);
          if constexpr (S::kKeep) kept_gw[r * kVectors + j][i] = gw[i], kept_h[r * kVectors + j][i] = centred[i];
        }
      }
    }
    if (p.grad_x) {
      Vector residual[S::kResidualEarly ? kRows : 1][kVectors];  // on its way while the block adds
      if constexpr (S::kResidualEarly) {
#pragma unroll
        for (int at = 0; at < kRows * kVectors; ++at)
          residual[at / kVectors][at % kVectors] = read_residual(at / kVectors, at % kVectors);
      }
      add_up(row_sums);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (!inside(row, r)) continue;
        // rstd * (g * w - mean(g * w) - x_hat * mean(g * w * x_hat))
        const float shift = row_sums[r].x * inverse_features;
        const float slope = -rstd[r] * rstd[r] * (row_sums[r].y * inverse_features) * rstd[r];
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          if (!S::kPacked && !holds(j)) continue;
          float g[N], gw[N], centred[N], result[N];
          if constexpr (S::kKeep) {
#pragma unroll
            for (int i = 0; i < N; ++i) gw[i] = kept_gw[r * kVectors + j][i], centred[i] = kept_h[r * kVectors + j][i];
          } else {
            read(r, j, g, centred);
            weighted(j, g, gw);
          }
#pragma unroll
          for (int i = 0; i < N; ++i) {
            if constexpr (S::kLayerNorm) gw[i] -= shift;
            result[i] = fmaf(gw[i], rstd[r], centred[i] * slope);
          }
          if (has_residual) {
            float more[N];
            (S::kResidualEarly ? residual[r][j] : read_residual(r, j)).floats(more);
#pragma unroll
            for (int i = 0; i < N; ++i) result[i] += more[i];
          }
          if (S::kPacked && !holds(j)) continue;
          store_floats(static_cast<T*>(p.grad_x) + (row + r) * p.stride_grad_x_row + column + j * kStep, result);
        }
      }
    }
    free_stage = stage;
    stage = stage + 1 < kStages ? stage + 1 : 0;
  }
  ptx::cp_async_wait<0>();
  add_up.finish();
  const auto write = [&](int which, float* partial) {
    if (!partial) return;
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (holds(j)) store_wide(partial + cluster * p.features + column + j * kStep, sums[which][j]);
  };
  write(0, partial_weight);
  if constexpr (S::kLayerNorm) write(1, partial_bias);
}

template <class S>
int blocks_of_cluster(std::int64_t vectors) {
  int blocks = 1;
  while (ceil_div(vectors, blocks) > S::kThreads * S::kVectors) blocks *= 2;
  return blocks;
}

/// The shapes that an H200 found faster for calls with neither residual nor weights of another dtype; false
/// where it found none.
template <class T, bool kLayerNorm, class F>
bool with_plain_shape(std::int64_t vectors, F f) {
  const auto take = [&](auto shape) { return f(shape), true; };
  if constexpr (sizeof(T) == 2) {
    using TwoRows = Shape<T, kLayerNorm, 128, 1, 2, false, 4, true, Calls::kPlain>;
    if constexpr (kLayerNorm) {
      if (vectors <= 96) return take(Shape<T, kLayerNorm, 128, 1, 4, false, 4, false, Calls::kPlain>{});
      if (vectors <= 128) return take(TwoRows{});
    } else {
      if (vectors <= 96) return take(TwoRows{});
      if (vectors <= 128) return take(Shape<T, kLayerNorm, 128, 1, 1, false, 5, true, Calls::kPlain>{});
    }
    if (vectors > 256 && vectors <= 512) return take(Shape<T, kLayerNorm, 256, 2, 1, false, 2, true, Calls::kPlain>{});
  }
  // Two blocks share a row; of less than 768 vectors in each too little would be under way.
  if (vectors > 2 * 768 && vectors <= kMostVectors)
    return take(Shape<T, kLayerNorm, 512, 2, 1, true, 1, sizeof(T) == 4, Calls::kPacked>{});
  if (vectors > kMostVectors) return take(Shape<T, kLayerNorm, 512, 4, 1, true, 1, false, Calls::kPacked>{});
  return false;
}

/// f(Shape) for the part of a row of `vectors` vectors that a block holds; `plain`: as with_plain_shape.
template <class T, bool kLayerNorm, class F>
void with_shape_of(std::int64_t vectors, bool plain, F f) {
  if (plain && with_plain_shape<T, kLayerNorm>(vectors, f)) return;
  constexpr bool k16Bit = sizeof(T) == 2;  // bound by instructions: what is kept need not be read and widened again
  if constexpr (k16Bit && kLayerNorm) {
    if (vectors <= 96) return f(Shape<T, kLayerNorm, 96, 1, 2, false, 6, true>{});
  }
  if constexpr (k16Bit) {
    if (vectors > 96 && vectors <= 128) return f(Shape<T, kLayerNorm, 128, 1, 2, false, 4, true>{});
  }
  if constexpr (!k16Bit || !kLayerNorm) {
    if (vectors <= 128) return f(Shape<T, kLayerNorm, 128, 1, 4, false>{});
  }
  if (vectors <= 256) return f(Shape<T, kLayerNorm, 128, 2, 2, false>{});
  if constexpr (k16Bit) {
    if (vectors <= 512) return f(Shape<T, kLayerNorm, 512, 1, 2, false, 1, true>{});
  } else {
    if (vectors <= 512) return f(Shape<T, kLayerNorm, 256, 2, 2, false>{});
  }
  if (vectors <= 1024) return f(Shape<T, kLayerNorm, 512, 2, 2, false>{});
  if constexpr (k16Bit && !kLayerNorm) {  // two blocks with half a row each keep it in registers
    if (vectors <= kMostVectors) return f(Shape<T, kLayerNorm, 512, 2, 1, true, 1, true>{});
  } else {
    if (vectors <= kMostVectors) return f(Shape<T, kLayerNorm, 512, 4, 1, false>{});
  }
  return f(Shape<T, kLayerNorm, 512, 4, 1, true>{});
}
template <class F>
void with_shape(const NormBackwardParams& p, F f) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t vectors = p.features / kVectorElements<T>;
    const bool plain = !p.grad_residual_out && (!p.weight || p.weight.dtype == p.dtype);
    if (p.kind == NormKind::kLayerNorm) return with_shape_of<T, true>(vectors, plain, f);
    with_shape_of<T, false>(vectors, plain, f);
  });
}

/// Clusters (blocks, where one holds a row) that the current device runs at once.
template <class S>
int clusters_of(int num_blocks, int device) {
  return clusters_at_once("norm_bwd: clusters at once", reinterpret_cast<const void*>(rows_kernel<S>), num_blocks,
                          S::kThreads, S::kSharedBytes, device);
}

/// As many clusters as the GPU runs at once: an even share of rows, and the fewest partial sums.
template <class S>
RowsPlan plan(const NormBackwardParams& p) {
  RowsPlan plan;
  plan.num_blocks = blocks_of_cluster<S>(p.features / S::N);
  const std::int64_t most = std::max(1, clusters_of<S>(plan.num_blocks, p.device.index));
  plan.batch = static_cast<int>(std::min<std::int64_t>(S::kRows, ceil_div(p.rows, most)));
  plan.clusters = static_cast<int>(std::min(most, ceil_div(p.rows, plan.batch)));
  return plan;
}

}  // namespace

Verdict norm_bwd_rows_supports(const NormBackwardParams& p) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(p.dtype));
  const std::int64_t vectors = p.features * bytes / 16;
  if (p.rows == 0) return Verdict("no rows");
  if (vectors == 0) return Verdict("rows are empty");
  if (vectors > kMostBlocks * kMostVectors) return Verdict("a cluster holds rows of up to 512 KB");
  const auto aligned = [&](const void* data, std::int64_t stride) {
    return !data || (is_aligned(data, 16) && (p.rows == 1 || stride * bytes % 16 == 0));
  };
  if (p.features * bytes % 16 != 0 || !is_aligned(p.weight.data, 16) || !aligned(p.grad_out, p.stride_grad_out_row) ||
      !aligned(p.h, p.stride_h_row) || !aligned(p.grad_x, p.stride_grad_x_row) ||
      !aligned(p.grad_residual_out, p.stride_grad_residual_out_row))
    return Verdict("needs rows and weights on 16-byte boundaries");
  if (p.kind == NormKind::kRmsNorm && p.grad_bias) return Verdict("RMSNorm has no bias");
  const CudaDeviceGuard guard(p.device.index);
  int clusters = 0;
  with_shape(p, [&](auto shape) {
    using S = decltype(shape);
    clusters = clusters_of<S>(blocks_of_cluster<S>(vectors), p.device.index);
  });
  return clusters > 0 ? Verdict::ok() : Verdict("this GPU holds no cluster of so many blocks");
}

Plan plan_norm_bwd_rows(const NormBackwardParams& p, const DeviceFacts&) {
  const CudaDeviceGuard guard(p.device.index);
  const int sums = (p.grad_weight ? 1 : 0) + (p.grad_bias ? 1 : 0);
  RowsPlan rows;
  with_shape(p, [&](auto shape) { rows = plan<decltype(shape)>(p); });
  return Plan::of(rows, sizeof(float) * static_cast<std::size_t>(sums * rows.clusters * p.features));
}

void norm_bwd_rows(const NormBackwardParams& p, const Plan& planned, void* workspace, Stream stream) {
  const CudaDeviceGuard guard(p.device.index);
  const cudaStream_t s = native(stream);
  float* const first = static_cast<float*>(workspace);
  const RowsPlan& how = planned.as<RowsPlan>();
  const int clusters = how.clusters;
  float* const partial_weight = p.grad_weight ? first : nullptr;
  float* const partial_bias = p.grad_bias ? first + (p.grad_weight ? clusters * p.features : 0) : nullptr;
  with_shape(p, [&](auto kernel_shape) {
    using S = decltype(kernel_shape);
    LaunchShape shape{static_cast<unsigned>(clusters * how.num_blocks), S::kThreads, S::kSharedBytes, s, true};
    shape.cluster = static_cast<unsigned>(how.num_blocks);
    launch("norm_bwd: rows", rows_kernel<S>, shape, p, how, partial_weight, partial_bias);
  });
  if (!p.grad_weight && !p.grad_bias) return;
  namespace combine = norm_bwd_combine;
  combine::with_lanes(p.features, clusters, [&](auto lanes) {
    launch("norm_bwd: combine", combine::kernel<decltype(lanes)>,
           {combine::grid(p, lanes), dim3(combine::kThreads, lanes.kLanes), 0, s, true}, p, clusters, partial_weight,
           partial_bias);
  });
}

}  // namespace flashkernel::cuda::sm90a
