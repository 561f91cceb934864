// Sum, mean, max and argmax over any set of axes, in two steps: partial results over fixed chunks of the reduced
// elements, then the chunks in order. Chunks depend on the shape only, so a result is the same bit for bit on every run
// and every GPU. Row mode: a block per output, its threads over neighbouring reduced elements (warp shuffles, then
// shared memory). Column mode: outputs are neighbours in memory and the reduced elements are not: a thread for 16 bytes
// of outputs (one, where they are not aligned for that), 8 lanes of rows.
#include <type_traits>

#include "cuda/reduce/reduce.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/held_row.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/strided.cuh"
#include "cuda/pipeline/turn.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 32, kLanes = 8;  // column mode's block
constexpr std::int64_t kLeastChunk = 8192, kMostChunks = 2048, kEnoughBlocks = 4096, kEnoughRows = 1024;

// A partial result. `index` is used by argmax only.
struct Partial {
  float value;
  std::int64_t index;
};

template <ReduceOp kOp>
struct Combine {
  static __device__ Partial identity() { return {kOp == ReduceOp::kSum ? 0.0f : -INFINITY, -1}; }
  // The first maximum wins, and the first NaN wins over everything; the order of a and b does not matter.
  static __device__ Partial combine(Partial a, Partial b) {
    if constexpr (kOp == ReduceOp::kSum) {
      return {a.value + b.value, -1};
    } else if constexpr (kOp == ReduceOp::kMax) {
      return {Max{}(a.value, b.value), -1};
    } else {
      if (a.index < 0) return b;
      if (b.index < 0) return a;
      const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
      if (a_nan != b_nan) return a_nan ? a : b;
      if (!a_nan && a.value != b.value) return a.value > b.value ? a : b;
      return a.index < b.index ? a : b;
    }
  }
};

/// N independent chains, one for each element of the vectors that a thread reads in turn. For argmax a chain keeps the
/// turn of its maximum, one 32-bit number.
template <ReduceOp kOp, int N>
struct Chains {
  float value[N];
  unsigned turn[kOp == ReduceOp::kArgmax ? N : 1];

  __device__ Chains() {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      value[i] = Combine<kOp>::identity().value;
      if constexpr (kOp == ReduceOp::kArgmax) turn[i] = 0;  // right for a chain of -inf, too
    }
  }
  template <class T>
  __device__ void add(const Packed<T, N>& vector, unsigned now) {
    float values[N];
    unpack(values, vector);
    add(values, now);
  }
  __device__ void add(const float (&vector)[N], unsigned now) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float x = vector[i];
      if constexpr (kOp == ReduceOp::kArgmax) {
        const bool wins = !(x <= value[i]) && value[i] == value[i];  // larger or the first NaN
        value[i] = wins ? x : value[i];
        turn[i] = wins ? now : turn[i];
      } else {
        value[i] = Combine<kOp>::combine({value[i], -1}, {x, -1}).value;
      }
    }
  }
  /// The result of chain i, whose elements are at first + i, `step` apart.
  __device__ Partial result(int i, std::int64_t first, std::int64_t step) const {
    if constexpr (kOp == ReduceOp::kArgmax) return {value[i], first + turn[i] * step + i};
    return {value[i], -1};
  }
};

template <ReduceOp kOp>
__device__ inline Partial warp_combine(Partial mine) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) {
    Partial other;
    other.value = __shfl_xor_sync(kFullMask, mine.value, lane);
    other.index = kOp == ReduceOp::kArgmax ? __shfl_xor_sync(kFullMask, mine.index, lane) : -1;
    mine = Combine<kOp>::combine(mine, other);
  }
  return mine;
}

/// A partial result where many are kept.
template <ReduceOp kOp>
using Stored = std::conditional_t<kOp == ReduceOp::kArgmax, Partial, float>;

template <ReduceOp kOp>
__device__ inline Stored<kOp> stored(Partial partial) {
  if constexpr (kOp == ReduceOp::kArgmax) return partial;
  if constexpr (kOp != ReduceOp::kArgmax) return partial.value;
}
__device__ inline Partial partial_of(float value) { return {value, -1}; }
__device__ inline Partial partial_of(Partial partial) { return partial; }

/// Combines the results of a block of kBlock threads. Its first warp has the answer.
template <ReduceOp kOp, int kBlock = kThreads>
__device__ inline Partial block_combine(Partial mine) {
  constexpr int kWarps = kBlock / kWarp;
  __shared__ Stored<kOp> warps[kWarps];
  mine = warp_combine<kOp>(mine);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = stored<kOp>(mine);
  __syncthreads();
  if (threadIdx.x >= kWarp) return mine;
  return warp_combine<kOp>(threadIdx.x < kWarps ? partial_of(warps[threadIdx.x]) : Combine<kOp>::identity());
}

/// Index: unsigned where 32 bits count the outputs.
template <class Index>
__device__ inline void write_result(const ReduceParams& p, Index output, Partial result) {
  const std::int64_t offset = strided_offset(output, p.num_kept, p.kept_shape, p.stride_out);
  if (p.op == ReduceOp::kArgmax) {
    static_cast<std::int64_t*>(p.out)[offset] = result.index;
  } else {
    const float scale = p.op == ReduceOp::kMean ? 1.0f / static_cast<float>(p.reduced_count) : 1.0f;
    const float value = p.op == ReduceOp::kMean && p.reduced_count == 0 ? NAN : result.value * scale;
    store_typed(p.out, p.out_dtype, offset, p.op == ReduceOp::kMean ? value : result.value);
  }
}

/// A block takes chunk blockIdx.y of an output. N > 1: the reduced elements of an output are neighbours, and chunks
/// start on 16-byte boundaries.
template <class T, ReduceOp kOp, int N>
__global__ void __launch_bounds__(kThreads)
    row_kernel(const ReduceParams p, std::int64_t chunk, Partial* __restrict__ partials) {
  for (std::int64_t output = blockIdx.x; output < p.kept_count; output += gridDim.x) {
    const T* x = static_cast<const T*>(p.x) + strided_offset(output, p.num_kept, p.kept_shape, p.stride_x_kept);
    const std::int64_t begin = blockIdx.y * chunk, end = min(p.reduced_count, begin + chunk);
    Partial mine = Combine<kOp>::identity();
    if constexpr (N > 1) {
      // Loads in flight: the first use comes after the last of them. What keeps more than sums keeps fewer.
      constexpr int kBatch = sizeof(T) == 2 && kOp == ReduceOp::kSum ? 8 : 4;
      constexpr int kStep = kThreads * N;
      const std::int64_t first = begin + threadIdx.x * N;
      Chains<kOp, N> chains;
      const auto load = [&](std::int64_t at) { return load_vector<N>(x + at); };
      std::int64_t at = first;
      unsigned turn = 0;  // of vectors: at = first + turn * kStep
      for (; at + (kBatch - 1) * kStep + N <= end; at += kBatch * kStep) {
        Packed<T, N> batch[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) batch[j] = load(at + j * kStep);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) chains.add(batch[j], turn++);
      }
      if (at + N <= end) {  // the same of what is left
        Packed<T, N> batch[kBatch];
        const auto left = static_cast<int>((end - at - N) / kStep);  // besides the first
#pragma unroll
        for (int j = 0; j < kBatch; ++j) batch[j] = load(at + min(j, left) * kStep);
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
          if (j <= left) chains.add(batch[j], turn++);
        at += static_cast<std::int64_t>(left + 1) * kStep;
      }
      for (; at < end; ++at) mine = Combine<kOp>::combine(mine, {to_float(x[at]), at});
      if (turn > 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) mine = Combine<kOp>::combine(mine, chains.result(i, first, kStep));
      }
    } else {
      for (std::int64_t at = begin + threadIdx.x; at < end; at += kThreads) {
        const std::int64_t offset = p.num_reduced == 1
                                        ? at * p.stride_x_reduced[0]
                                        : strided_offset(at, p.num_reduced, p.reduced_shape, p.stride_x_reduced);
        mine = Combine<kOp>::combine(mine, {to_float(x[offset]), at});
      }
    }
    mine = block_combine<kOp>(mine);
    if (threadIdx.x == 0) {
      if (partials) {
        partials[output * gridDim.y + blockIdx.y] = mine;
      } else {
        write_result(p, output, mine);
      }
    }
    __syncthreads();  // the shared partials are written again for the next output
  }
}

/// A whole row by kRowThreads threads, a warp or a block, kHeld vectors of each under way at once. 32 bits count rows
/// and elements: between a block's start and its loads there is as little as can be. It starts early.
template <class T, ReduceOp kOp, int kHeld, int kRowThreads>
__global__ void __launch_bounds__(kRowThreads == kWarp ? kThreads : kRowThreads)
    whole_row_kernel(const ReduceParams p) {
  constexpr int N = kVectorElements<T>;
  constexpr unsigned kRows = kRowThreads == kWarp ? kThreads / kWarp : 1;
  take_turn();
  const unsigned output = blockIdx.x * kRows + (kRows > 1 ? threadIdx.y : 0);
  if (kRows > 1 && output >= static_cast<unsigned>(p.kept_count)) return;
  const int thread = static_cast<int>(threadIdx.x), count = static_cast<int>(p.reduced_count), vectors = count / N;
  const T* const x = static_cast<const T*>(p.x) + strided_offset(output, p.num_kept, p.kept_shape, p.stride_x_kept);
  constexpr std::uint32_t kNothing = kOp == ReduceOp::kSum ? 0 : kMinusInfinities<T>;
  const auto* const row = reinterpret_cast<const Words<T>*>(x);
  Chains<kOp, N> chains;
  unsigned turn = 0;
#pragma unroll 1
  for (int first = 0; first < vectors; first += kHeld * kRowThreads) {
    // Past the row's end its last vector is loaded again: loads with a predicate, or whose use has one, wait for each
    // other (ptxas puts each behind the use of the one before).
    Words<T> held[kHeld];
#pragma unroll
    for (int j = 0; j < kHeld; ++j) held[j] = row[min(first + j * kRowThreads + thread, vectors - 1)];
    settle(held);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      held[j].keep_if(first + j * kRowThreads + thread < vectors, kNothing);
      float values[N];
      held[j].floats(values);
      chains.add(values, turn++);
    }
  }
  Partial mine = Combine<kOp>::identity();
  if (thread < vectors) {
#pragma unroll
    for (int i = 0; i < N; ++i) mine = Combine<kOp>::combine(mine, chains.result(i, thread * N, kRowThreads * N));
  }
  if (const int at = vectors * N + thread; at < count && thread < N)  // what fills no vector
    mine = Combine<kOp>::combine(mine, {to_float(x[at]), at});
  if constexpr (kRowThreads == kWarp)
    mine = warp_combine<kOp>(mine);
  else
    mine = block_combine<kOp, kRowThreads>(mine);
  if (thread == 0) write_result(p, output, mine);
}

/// A block takes kColumns * N outputs of a chunk, kLanes rows at a time. N > 1: outputs are neighbours in runs of N on
/// 16-byte boundaries, and the reduced dim is one.
template <class T, ReduceOp kOp, int N>
__global__ void __launch_bounds__(kColumns* kLanes)
    column_kernel(const ReduceParams p, std::int64_t chunk, Stored<kOp>* __restrict__ partials) {
  constexpr int kBatch = kOp == ReduceOp::kArgmax ? 2 : 4;  // loads in flight
  __shared__ float values[kLanes][N][kColumns];
  __shared__ std::int64_t indices[kOp == ReduceOp::kArgmax ? kLanes : 1][N][kColumns];
  const std::int64_t output = (static_cast<std::int64_t>(blockIdx.x) * kColumns + threadIdx.x) * N;
  const std::int64_t begin = blockIdx.y * chunk, end = min(p.reduced_count, begin + chunk);
  const std::int64_t first = begin + threadIdx.y;
  const bool inside = output < p.kept_count;
  Chains<kOp, N> chains;
  unsigned turn = 0;
  if (inside) {
    const T* const x = static_cast<const T*>(p.x) + strided_offset(output, p.num_kept, p.kept_shape, p.stride_x_kept);
    const auto offset = [&](std::int64_t at) {
      return p.num_reduced == 1 ? at * p.stride_x_reduced[0]
                                : strided_offset(at, p.num_reduced, p.reduced_shape, p.stride_x_reduced);
    };
    std::int64_t at = first;
    for (; at + (kBatch - 1) * kLanes < end; at += kBatch * kLanes) {
      std::int64_t offsets[kBatch];
      Packed<T, N> batch[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) offsets[j] = offset(at + j * kLanes);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) batch[j] = load_vector<N>(x + offsets[j]);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) chains.add(batch[j], turn++);
    }
    for (; at < end; at += kLanes) chains.add(load_vector<N>(x + offset(at)), turn++);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Partial mine = turn > 0 ? chains.result(i, first - i, kLanes) : Combine<kOp>::identity();
    values[threadIdx.y][i][threadIdx.x] = mine.value;
    if constexpr (kOp == ReduceOp::kArgmax) indices[threadIdx.y][i][threadIdx.x] = mine.index;
  }
  __syncthreads();
  for (int i = threadIdx.y; i < N && inside; i += kLanes) {
    Partial mine = Combine<kOp>::identity();
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const std::int64_t index = kOp == ReduceOp::kArgmax ? indices[lane][i][threadIdx.x] : -1;
      mine = Combine<kOp>::combine(mine, {values[lane][i][threadIdx.x], index});
    }
    if (partials) {
      partials[blockIdx.y * p.kept_count + output + i] = stored<kOp>(mine);
    } else {
      write_result(p, output + i, mine);
    }
  }
}

template <ReduceOp kOp>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const ReduceParams p, int chunks, const Partial* __restrict__ partials) {
  for (std::int64_t output = blockIdx.x; output < p.kept_count; output += gridDim.x) {
    Partial mine = Combine<kOp>::identity();
    for (int chunk = threadIdx.x; chunk < chunks; chunk += kThreads)
      mine = Combine<kOp>::combine(mine, partials[output * chunks + chunk]);
    mine = block_combine<kOp>(mine);
    if (threadIdx.x == 0) write_result(p, output, mine);
    __syncthreads();
  }
}

/// A block takes kColumns outputs, a lane every kLanes-th chunk.
template <ReduceOp kOp>
__global__ void __launch_bounds__(kColumns* kLanes)
    combine_columns_kernel(const ReduceParams p, int chunks, const Stored<kOp>* __restrict__ partials) {
  __shared__ Partial lanes[kLanes][kColumns];
  const std::int64_t output = static_cast<std::int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  Partial mine = Combine<kOp>::identity();
  if (output < p.kept_count) {
#pragma unroll 4
    for (int chunk = threadIdx.y; chunk < chunks; chunk += kLanes)
      mine = Combine<kOp>::combine(mine, partial_of(partials[chunk * p.kept_count + output]));
  }
  lanes[threadIdx.y][threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.y > 0 || output >= p.kept_count) return;
#pragma unroll
  for (int lane = 1; lane < kLanes; ++lane) mine = Combine<kOp>::combine(mine, lanes[lane][threadIdx.x]);
  write_result(p, output, mine);
}

struct Plan {
  bool columns;
  std::int64_t chunk;
  int chunks;
};

/// How many outputs a call is cut for.
std::int64_t planned_outputs(const ReduceParams& p, bool invariant) { return invariant ? 1 : p.kept_count; }

Plan plan_of(const ReduceParams& p, bool invariant) {
  Plan plan{};
  const std::int64_t outputs = planned_outputs(p, invariant);
  const bool reduced_neighbours = p.num_reduced == 0 || p.stride_x_reduced[p.num_reduced - 1] == 1;
  const bool kept_neighbours = p.num_kept > 0 && p.stride_x_kept[p.num_kept - 1] == 1;
  plan.columns = kept_neighbours && !reduced_neighbours;
  // A block of column mode reads 512 bytes of kLanes rows at a time, so its chunks are shorter.
  const std::int64_t least = plan.columns ? kLeastChunk / 64 : kLeastChunk;
  // Outputs that fill a GPU of any size need no chunks.
  const std::int64_t of_block = kColumns * 16 / static_cast<std::int64_t>(dtype_bytes(p.dtype));
  const std::int64_t units = plan.columns ? ceil_div(outputs, of_block) : outputs;
  const bool enough = !plan.columns && units >= kEnoughRows;  // combining chunks costs a launch
  const std::int64_t most =
      enough ? 1 : std::max<std::int64_t>(1, std::min(kMostChunks, kEnoughBlocks / std::max<std::int64_t>(1, units)));
  plan.chunk = std::max(least, ceil_div(p.reduced_count, most));
  plan.chunk = ceil_div(plan.chunk, 64) * 64;
  plan.chunks = static_cast<int>(std::max<std::int64_t>(1, ceil_div(p.reduced_count, plan.chunk)));
  return plan;
}

template <class T, ReduceOp kOp>
void run_columns(const ReduceParams& p, const Plan& plan, void* workspace, cudaStream_t stream) {
  constexpr int N = kVectorElements<T>;
  auto* const partials = plan.chunks > 1 ? static_cast<Stored<kOp>*>(workspace) : nullptr;
  bool vectors = is_aligned(p.x, 16) && p.kept_shape[p.num_kept - 1] % N == 0;
  for (int d = 0; d < p.num_kept - 1; ++d) vectors = vectors && p.stride_x_kept[d] % N == 0;
  for (int d = 0; d < p.num_reduced; ++d) vectors = vectors && p.stride_x_reduced[d] % N == 0;
  const auto blocks = static_cast<unsigned>(ceil_div(p.kept_count, vectors ? kColumns * N : kColumns));
  launch("reduce", vectors ? column_kernel<T, kOp, N> : column_kernel<T, kOp, 1>,
         {dim3(blocks, static_cast<unsigned>(plan.chunks)), dim3(kColumns, kLanes), 0, stream}, p, plan.chunk,
         partials);
  if (!partials) return;
  launch("reduce: combine", combine_columns_kernel<kOp>,
         {static_cast<unsigned>(ceil_div(p.kept_count, kColumns)), dim3(kColumns, kLanes), 0, stream}, p, plan.chunks,
         partials);
}

/// Rows that whole_row_kernel takes. Short ones go by warps, where they are enough to fill a GPU of any size. Four
/// vectors under way are what 32 registers hold, which let a multiprocessor have all its threads.
template <class T, ReduceOp kOp>
void run_whole_rows(const ReduceParams& p, bool invariant, cudaStream_t stream) {
  const std::int64_t vectors = p.reduced_count / kVectorElements<T>;
  const auto run = [&](auto kernel, int row_threads) {
    const int rows = row_threads == kWarp ? kThreads / kWarp : 1;
    launch("reduce", kernel,
           {static_cast<unsigned>(ceil_div(p.kept_count, rows)), dim3(row_threads, rows), 0, stream, true}, p);
  };
  if (vectors <= 8 * kWarp && planned_outputs(p, invariant) >= 4096) {
    if (vectors <= 2 * kWarp) return run(whole_row_kernel<T, kOp, 2, kWarp>, kWarp);
    if (vectors <= 3 * kWarp) return run(whole_row_kernel<T, kOp, 3, kWarp>, kWarp);
    return run(whole_row_kernel<T, kOp, 4, kWarp>, kWarp);
  }
  if (vectors <= 4 * 128) return run(whole_row_kernel<T, kOp, 4, 128>, 128);
  run(whole_row_kernel<T, kOp, 4, kThreads>, kThreads);
}

template <class T, ReduceOp kOp>
void run(const ReduceParams& p, bool invariant, void* workspace, cudaStream_t stream) {
  const Plan plan = plan_of(p, invariant);
  if (plan.columns) return run_columns<T, kOp>(p, plan, workspace, stream);
  auto* const partials = plan.chunks > 1 ? static_cast<Partial*>(workspace) : nullptr;
  constexpr int N = kVectorElements<T>;
  bool vectors = p.num_reduced == 1 && p.stride_x_reduced[0] == 1 && is_aligned(p.x, 16);
  for (int d = 0; d < p.num_kept; ++d)
    vectors = vectors && ((p.kept_shape[d] == 1 && !invariant) || p.stride_x_kept[d] % N == 0);
  if (vectors && !partials && p.kept_count <= std::int64_t{1} << 30 && p.reduced_count <= std::int64_t{1} << 30)
    return run_whole_rows<T, kOp>(p, invariant, stream);
  launch(
      "reduce", vectors ? row_kernel<T, kOp, N> : row_kernel<T, kOp, 1>,
      {dim3(static_cast<unsigned>(std::min<std::int64_t>(p.kept_count, 1 << 30)), static_cast<unsigned>(plan.chunks)),
       kThreads, 0, stream},
      p, plan.chunk, partials);
  if (!partials) return;
  launch("reduce: combine", combine_kernel<kOp>,
         {static_cast<unsigned>(std::min<std::int64_t>(p.kept_count, 1 << 30)), kThreads, 0, stream}, p, plan.chunks,
         partials);
}

}  // namespace

Verdict reduce_supports(const ReduceParams& p) {
  return p.kept_count <= std::int64_t{0x7fffffff} * kColumns ? Verdict::ok()
                                                             : Verdict("more results than a grid has blocks");
}

std::size_t reduce_workspace(const ReduceParams& p, bool invariant) {
  const Plan plan = plan_of(p, invariant);
  return plan.chunks > 1 ? sizeof(Partial) * static_cast<std::size_t>(p.kept_count * plan.chunks) : 0;
}

void reduce(const ReduceParams& p, bool invariant, void* workspace, Stream stream) {
  if (p.kept_count == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    switch (p.op) {
      case ReduceOp::kSum:
      case ReduceOp::kMean: return run<T, ReduceOp::kSum>(p, invariant, workspace, native(stream));
      case ReduceOp::kMax: return run<T, ReduceOp::kMax>(p, invariant, workspace, native(stream));
      case ReduceOp::kArgmax: return run<T, ReduceOp::kArgmax>(p, invariant, workspace, native(stream));
    }
  });
}

}  // namespace flashkernel::cuda
