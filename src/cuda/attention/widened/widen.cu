// 8-bit and 4-bit pages of some sequences as pages of the queries' dtype, for attention of many queries (variant.hpp).
// Bound by memory: eight elements a thread. Keys in front of the first one that a query may see stay as the workspace
// was, in whole pages; behind the last one there are zeros for a page and more, so that a probability of 0 meets a
// number.
#include "cuda/attention/widened/variant.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/packed.cuh"
#include "cuda/tile/quantized.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 8;  // elements of a thread

constexpr int kBlocksPerMultiprocessor = 8;

/// The layout of K or V.
struct Columns {
  std::int64_t stride_page, stride_head, stride_token;
  int dim, pitch;  // of the pages, and of the workspace
};

/// In place of an element's type: 4-bit ones.
struct FourBits {};

/// Grid: (parts of a sequence, sequence, K or V).
template <class T, class E>
__global__ void __launch_bounds__(kThreads)
    widen_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ WidenedPlan plan,
                 const __grid_constant__ WidenedPages to, bool vectors) {
  const std::int64_t b = blockIdx.y;
  const bool is_v = blockIdx.z == 1;
  const Columns columns = is_v ? Columns{p.stride_v_batch, p.stride_v_head, p.stride_v_token,
                                         static_cast<int>(p.head_dim_v), static_cast<int>(plan.dim_v)}
                               : Columns{p.stride_k_batch, p.stride_k_head, p.stride_k_token,
                                         static_cast<int>(p.head_dim), static_cast<int>(plan.dim)};
  const std::int64_t k_len = p.k_length(b), first = p.first_key(b, 0, p.q_length(b), k_len);
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const std::int64_t end = min((k_len / kWidenedPage + 2) * kWidenedPage, plan.pages * kWidenedPage);
  if (!is_v) {
    for (std::int64_t i = thread; i < plan.pages; i += threads)
      to.table[b * plan.pages + i] = static_cast<std::int32_t>(b * plan.pages + i);
    if (thread == 0) to.lengths[b] = k_len;
  }

  const std::int64_t per_row = (columns.pitch + kWidth - 1) / kWidth, per_token = p.heads_kv * per_row;
  T* const out = static_cast<T*>(is_v ? to.v : to.k) + b * plan.pages * kWidenedPage * p.heads_kv * columns.pitch;
  const KvScale& scales = is_v ? p.quantization.v : p.quantization.k;
  for (std::int64_t at = first / kWidenedPage * kWidenedPage * per_token + thread; at < end * per_token;
       at += threads) {
    const std::int64_t token = at / per_token, rest = at - token * per_token, head = rest / per_row;
    const int column = static_cast<int>(rest - head * per_row) * kWidth;
    float x[kWidth] = {};
    if (token < k_len) {
      std::int64_t page = p.block_table[b * p.stride_block_table + token / p.page_size];
      page = page < 0 || page >= p.num_pages ? 0 : page;
      const std::int64_t slot = token % p.page_size;
      if constexpr (std::is_same_v<E, FourBits>) {
        const auto* const from = static_cast<const unsigned char*>(is_v ? p.v : p.k) + page * columns.stride_page +
                                 slot * columns.stride_token + head * columns.stride_head;
        load_packed({from, scales, page, head, slot, p.dtype}, column, columns.dim, vectors, x);
      } else {
        const E* const from = static_cast<const E*>(is_v ? p.v : p.k) + page * columns.stride_page +
                              slot * columns.stride_token + head * columns.stride_head + column;
        const float scale = *scales.at(page, head, slot);
        if (vectors && column + kWidth <= columns.dim) {
          const auto eight = load_vector<kWidth>(from);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) x[i] = to_float(eight.values[i]) * scale;
        } else {
#pragma unroll
          for (int i = 0; i < kWidth; ++i)
            if (column + i < columns.dim) x[i] = to_float(from[i]) * scale;
        }
      }
    }
    T* const row = out + (token * p.heads_kv + head) * columns.pitch + column;
    constexpr int kPerStore = kVectorElements<T>;
#pragma unroll
    for (int part = 0; part < kWidth; part += kPerStore) {
      if (column + part >= columns.pitch) break;  // rows are whole vectors
      float some[kPerStore];
#pragma unroll
      for (int i = 0; i < kPerStore; ++i) some[i] = x[part + i];
      store_floats(row + part, some);
    }
  }
}

bool in_vectors(const AttentionParams& p) {
  const int bytes = p.quantization.packed ? kWidth / 2 : kWidth;
  bool all = is_aligned(p.k, bytes) && is_aligned(p.v, bytes);
  for (const std::int64_t stride :
       {p.stride_k_batch, p.stride_k_head, p.stride_k_token, p.stride_v_batch, p.stride_v_head, p.stride_v_token})
    all = all && stride % bytes == 0;
  return all;
}

}  // namespace

void widen_pages(const AttentionParams& call, const WidenedPlan& plan, const WidenedPages& pages, Stream stream) {
  const std::int64_t widest = std::max(plan.dim, plan.dim_v);
  const std::int64_t vectors = plan.pages * kWidenedPage * call.heads_kv * ceil_div(widest, std::int64_t{kWidth});
  const dim3 grid(static_cast<unsigned>(ceil_div(vectors, std::int64_t{kThreads})), static_cast<unsigned>(call.batch),
                  2);
  visit_floating(plan.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = call.quantization.packed     ? widen_kernel<T, FourBits>
                        : call.dtype == DType::kInt8 ? widen_kernel<T, Int8>
                                                     : widen_kernel<T, Float8>;
    launch("attention_widen", kernel, {grid, kThreads, 0, native(stream)}, call, plan, pages, in_vectors(call));
  });
}

}  // namespace flashkernel::cuda
