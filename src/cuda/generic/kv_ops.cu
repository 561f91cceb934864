// KV append (plain, or with RoPE on k and q), gather and page copy. One warp moves one head of one token; all page
// arithmetic is 64-bit. A slot or page id out of range moves nothing: these kernels stay in bounds whatever the table
// holds.
#include "cuda/generic/kernels.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/rope.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kWarpsPerBlock = 8;

// Copies `count` elements, 16 bytes a lane where both ends allow it.
template <class T>
__device__ inline void copy_row(T* to, const T* from, std::int64_t count) {
  const int lane = threadIdx.x;
  const auto ends = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
  if ((ends | static_cast<std::uintptr_t>(count * sizeof(T))) % 16 == 0) {
    const std::int64_t vectors = count * static_cast<std::int64_t>(sizeof(T)) / 16;
    for (std::int64_t i = lane; i < vectors; i += kWarp)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  } else {
    for (std::int64_t i = lane; i < count; i += kWarp) to[i] = from[i];
  }
}

template <class T>
__device__ inline void fill_zero(T* to, std::int64_t count) {
  for (std::int64_t i = threadIdx.x; i < count; i += kWarp) to[i] = T{};
}

template <class T>
__device__ inline void rotate_row(T* to, const T* from, std::int64_t head_dim, const RopeSpec& spec,
                                  std::int64_t position) {
  const std::int64_t half = spec.rotary_dim / 2;
  for (std::int64_t pair = threadIdx.x; pair < half; pair += kWarp) {
    float cosine, sine;
    rope_angle(spec, position, pair, &cosine, &sine);
    if (spec.inverse) sine = -sine;
    const std::int64_t first = spec.interleaved ? 2 * pair : pair,
                       second = spec.interleaved ? 2 * pair + 1 : pair + half;
    const float a = to_float(from[first]), b = to_float(from[second]);
    to[first] = from_float<T>(a * cosine - b * sine);
    to[second] = from_float<T>(a * sine + b * cosine);
  }
  for (std::int64_t i = spec.rotary_dim + threadIdx.x; i < head_dim; i += kWarp) to[i] = from[i];
}

// Rows of a token: heads_kv of k, heads_kv of v, then heads_q of q.
template <class T>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) append_kernel(const KvAppendParams p) {
  const std::int64_t rows_per_token = 2 * p.pages.heads_kv + p.heads_q;
  const std::int64_t rows = p.tokens * rows_per_token;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.y; row < rows;
       row += static_cast<std::int64_t>(gridDim.x) * kWarpsPerBlock) {
    const std::int64_t token = row / rows_per_token;
    std::int64_t head = row - token * rows_per_token;
    if (head >= 2 * p.pages.heads_kv) {
      head -= 2 * p.pages.heads_kv;
      rotate_row(static_cast<T*>(p.q_out) + token * p.stride_q_out_token + head * p.stride_q_out_head,
                 static_cast<const T*>(p.q) + token * p.stride_q_token + head * p.stride_q_head, p.pages.head_dim,
                 p.rope, p.positions[token]);
      continue;
    }
    const std::int64_t slot = p.slots[token];
    const std::int64_t page = slot / p.pages.page_size;
    if (slot < 0 || page >= p.pages.num_pages) continue;
    const std::int64_t offset = slot - page * p.pages.page_size;
    if (head < p.pages.heads_kv) {
      const T* from = static_cast<const T*>(p.k) + token * p.stride_k_token + head * p.stride_k_head;
      T* to = static_cast<T*>(p.pages.k) + page * p.pages.stride_k_page + offset * p.pages.stride_k_slot +
              head * p.pages.stride_k_head;
      if (p.has_rope) {
        rotate_row(to, from, p.pages.head_dim, p.rope, p.positions[token]);
      } else {
        copy_row(to, from, p.pages.head_dim);
      }
    } else {
      head -= p.pages.heads_kv;
      copy_row(static_cast<T*>(p.pages.v) + page * p.pages.stride_v_page + offset * p.pages.stride_v_slot +
                   head * p.pages.stride_v_head,
               static_cast<const T*>(p.v) + token * p.stride_v_token + head * p.stride_v_head, p.pages.head_dim_v);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) read_kernel(const KvReadParams p) {
  const std::int64_t rows = p.batch * p.max_seq * p.pages.heads_kv;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.y; row < rows;
       row += static_cast<std::int64_t>(gridDim.x) * kWarpsPerBlock) {
    const std::int64_t head = row % p.pages.heads_kv;
    const std::int64_t position = row / p.pages.heads_kv % p.max_seq, b = row / p.pages.heads_kv / p.max_seq;
    T* k_out = static_cast<T*>(p.k_out) + b * p.stride_k_out_batch + position * p.stride_k_out_token +
               head * p.stride_k_out_head;
    T* v_out = static_cast<T*>(p.v_out) + b * p.stride_v_out_batch + position * p.stride_v_out_token +
               head * p.stride_v_out_head;
    const std::int64_t block = position / p.pages.page_size, offset = position - block * p.pages.page_size;
    const bool visible = position < p.seq_lens[b] && block < p.max_pages;
    const std::int64_t page = visible ? p.block_table[b * p.stride_block_table + block] : -1;
    if (page < 0 || page >= p.pages.num_pages) {
      fill_zero(k_out, p.pages.head_dim);
      fill_zero(v_out, p.pages.head_dim_v);
      continue;
    }
    copy_row(k_out,
             static_cast<const T*>(p.pages.k) + page * p.pages.stride_k_page + offset * p.pages.stride_k_slot +
                 head * p.pages.stride_k_head,
             p.pages.head_dim);
    copy_row(v_out,
             static_cast<const T*>(p.pages.v) + page * p.pages.stride_v_page + offset * p.pages.stride_v_slot +
                 head * p.pages.stride_v_head,
             p.pages.head_dim_v);
  }
}

template <class T>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) copy_kernel(const KvCopyParams p) {
  const std::int64_t rows_per_page = p.pages.page_size * p.pages.heads_kv;
  const std::int64_t rows = p.count * rows_per_page;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.y; row < rows;
       row += static_cast<std::int64_t>(gridDim.x) * kWarpsPerBlock) {
    const std::int64_t i = row / rows_per_page, head = row % p.pages.heads_kv;
    const std::int64_t offset = row % rows_per_page / p.pages.heads_kv;
    const std::int64_t from = p.src[i], to = p.dst[i];
    if (from < 0 || to < 0 || from >= p.pages.num_pages || to >= p.pages.num_pages) continue;
    T* k = static_cast<T*>(p.pages.k) + offset * p.pages.stride_k_slot + head * p.pages.stride_k_head;
    T* v = static_cast<T*>(p.pages.v) + offset * p.pages.stride_v_slot + head * p.pages.stride_v_head;
    copy_row(k + to * p.pages.stride_k_page, k + from * p.pages.stride_k_page, p.pages.head_dim);
    copy_row(v + to * p.pages.stride_v_page, v + from * p.pages.stride_v_page, p.pages.head_dim_v);
  }
}

unsigned grid_for_rows(std::int64_t rows, Device device) {
  return grid_size(ceil_div(rows, kWarpsPerBlock), device.index, 32);
}

const dim3 kBlock(kWarp, kWarpsPerBlock);

}  // namespace

Verdict kv_append_supports(const KvAppendParams&) { return Verdict::ok(); }
void kv_append(const KvAppendParams& p, void*, Stream stream) {
  const std::int64_t rows = p.tokens * (2 * p.pages.heads_kv + p.heads_q);
  if (rows == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) {
    launch("kv_append", append_kernel<decltype(zero)>, {grid_for_rows(rows, p.device), kBlock, 0, native(stream)}, p);
  });
}

Verdict kv_read_supports(const KvReadParams&) { return Verdict::ok(); }
void kv_read(const KvReadParams& p, void*, Stream stream) {
  const std::int64_t rows = p.batch * p.max_seq * p.pages.heads_kv;
  if (rows == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) {
    launch("kv_read", read_kernel<decltype(zero)>, {grid_for_rows(rows, p.device), kBlock, 0, native(stream)}, p);
  });
}

Verdict kv_copy_supports(const KvCopyParams&) { return Verdict::ok(); }
void kv_copy(const KvCopyParams& p, void*, Stream stream) {
  const std::int64_t rows = p.count * p.pages.page_size * p.pages.heads_kv;
  if (rows == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) {
    launch("kv_copy_pages", copy_kernel<decltype(zero)>, {grid_for_rows(rows, p.device), kBlock, 0, native(stream)}, p);
  });
}

}  // namespace flashkernel::cuda
