// KV append and gather for pages of 8-bit and 4-bit elements; what kv_ops.cu is for others. Bound by memory. Rows (one
// head of one token) of whole vectors and up to 256 elements are appended by kv_append_quantized.cu; others here, a
// warp a row: through shared memory as fp32, where RoPE turns it and its largest magnitude gives its scale, four
// neighbouring elements a lane. Angles are worked out once a token. A slot or page id out of range moves nothing; q is
// rotated all the same. The numbers: include/flashkernel/kv_ops.hpp.
#include <cmath>

#include "cuda/kv/append_angle.cuh"
#include "cuda/kv/kv.hpp"
#include "cuda/kv/lengths_after.cuh"
#include "cuda/host/launch.hpp"
#include "cuda/tile/packed.cuh"
#include "cuda/tile/quantized.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/rope.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kMostTokens = 8;                   // that a block takes at a time
constexpr std::size_t kSharedBytes = 47 * 1024;  // rows and angles; no GPU needs asking for it

/// How a call is cut: tokens that a block takes at once, and floats between the warps' rows in shared memory.
struct AppendPlan {
  int tokens, pitch;
  double frequency_step;  // log2 of the ratio of neighbouring pairs' frequencies
  bool vectors;           // rows of four elements at a time, at both ends
};

/// Row `from` as fp32 into the warp's shared memory.
template <class T>
__device__ inline void stage_row(float* row, const T* from, int dim, bool vectors) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  if (vectors) {
    for (int at = lane * 4; at < dim; at += kWarp * 4) {
      float four[4];
      load_floats(four, from + at);
      *reinterpret_cast<float4*>(row + at) = float4{four[0], four[1], four[2], four[3]};
    }
  } else {
    for (int at = lane; at < dim; at += kWarp) row[at] = to_float(from[at]);
  }
  __syncwarp();
}

__device__ inline void rotate_row(float* row, const RopeSpec& rope, const float2* angles) {
  const int half = static_cast<int>(rope.rotary_dim / 2);
  for (int pair = static_cast<int>(threadIdx.x % kWarp); pair < half; pair += kWarp) {
    float& a = row[rope.interleaved ? 2 * pair : pair];
    float& b = row[rope.interleaved ? 2 * pair + 1 : pair + half];
    const float2 turn = angles[pair];
    const float first = a;
    a = first * turn.x - b * turn.y;
    b = first * turn.y + b * turn.x;
  }
  __syncwarp();
}

/// The staged row into a page: its scale, then its elements.
template <class E>
__device__ inline void store_row(const float* row, int dim, bool per_token, float* scale, E* to, bool vectors) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  float used;
  if (per_token) {
    float largest = 0.0f;
    bool has_nan = false;
    for (int at = lane; at < dim; at += kWarp) {
      largest = fmaxf(largest, fabsf(row[at]));  // a NaN loses
      has_nan = has_nan || row[at] != row[at];
    }
    largest = warp_reduce(largest, Largest{});
    if (dtype_of<E> == DType::kInt8 && __any_sync(kFullMask, has_nan)) largest = NAN;
    used = row_scale(largest, largest_element(dtype_of<E>));
    if (lane == 0) *scale = used;
  } else {
    used = *scale;
  }
  const float inverse = 1.0f / used;
  if (vectors) {
    for (int at = lane * 4; at < dim; at += kWarp * 4) {
      const float4 four = *reinterpret_cast<const float4*>(row + at);
      const float scaled[4] = {four.x * inverse, four.y * inverse, four.z * inverse, four.w * inverse};
      *reinterpret_cast<Packed<E, 4>*>(to + at) = pack_vector<E>(scaled);
    }
  } else {
    for (int at = lane; at < dim; at += kWarp) to[at] = from_float<E>(row[at] * inverse);
  }
}

/// The same as int4, a group after another; `scale` is the row's first word. The row is of an even number of elements.
__device__ inline void store_row_int4(const float* row, int dim, float* scale, Int4x2* to) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  static_assert(kInt4Group == kWarp);
  for (int begin = 0; begin < dim; begin += kInt4Group) {
    const bool mine = begin + lane < dim;
    const float x = mine ? row[begin + lane] : 0.0f, bounded = Int4Step::bounded(x);
    const float least = -warp_reduce(mine ? -bounded : -kInt4Largest, Largest{});
    const float largest = warp_reduce(mine ? bounded : -kInt4Largest, Largest{});
    const Int4Step step(least, largest, __any_sync(kFullMask, x != x) != 0);
    const std::uint32_t low = step.element(x), high = __shfl_down_sync(kFullMask, low, 1);
    if (mine && lane % 2 == 0) to[(begin + lane) / 2] = {static_cast<std::uint8_t>(low | high << 4)};
    if (lane == 0) reinterpret_cast<std::uint32_t*>(scale)[begin / kInt4Group] = step.word;
  }
}

template <class E>
__device__ inline void store_row_as(const float* row, int dim, bool per_token, float* scale, E* to, bool vectors) {
  if constexpr (kIsInt4<E>)
    store_row_int4(row, dim, scale, to);
  else
    store_row(row, dim, per_token, scale, to, vectors);
}

template <class T, class E>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ KvAppendParams p, const __grid_constant__ AppendPlan plan) {
  extern __shared__ float4 shared[];
  write_lengths_after(p);
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
  const int half = p.has_rope ? static_cast<int>(p.rope.rotary_dim / 2) : 0;
  float* const row = reinterpret_cast<float*>(shared) + warp * plan.pitch;
  const int warps = static_cast<int>(blockDim.x / kWarp);
  float2* const angles = reinterpret_cast<float2*>(reinterpret_cast<float*>(shared) + warps * plan.pitch);
  const int heads_kv = static_cast<int>(p.pages.heads_kv), heads_q = static_cast<int>(p.heads_q);
  const int rows_per_token = 2 * heads_kv + heads_q;
  const int dim = static_cast<int>(p.pages.head_dim), dim_v = static_cast<int>(p.pages.head_dim_v);
  const KvQuantization& quantization = p.pages.quantization;

  for (std::int64_t base = static_cast<std::int64_t>(blockIdx.x) * plan.tokens; base < p.tokens;
       base += static_cast<std::int64_t>(gridDim.x) * plan.tokens) {
    const int count = static_cast<int>(min(static_cast<std::int64_t>(plan.tokens), p.tokens - base));
    for (int at = static_cast<int>(threadIdx.x); at < count * half; at += static_cast<int>(blockDim.x)) {
      const int pair = at % half;
      const double frequency =
          p.rope.inv_freq ? static_cast<double>(p.rope.inv_freq[pair]) : exp2(plan.frequency_step * pair);
      float cosine, sine;
      append_angle(p, base + at / half, pair, frequency * kInversePi, &cosine, &sine);
      angles[at] = float2{cosine, p.rope.inverse ? -sine : sine};
    }
    __syncthreads();
    for (int at = warp; at < count * rows_per_token; at += warps) {
      const int t = at / rows_per_token, number = at - t * rows_per_token;
      const std::int64_t token = base + t;
      if (number >= 2 * heads_kv) {
        const int head = number - 2 * heads_kv;
        stage_row(row, static_cast<const T*>(p.q) + token * p.stride_q_token + head * p.stride_q_head, dim,
                  plan.vectors);
        rotate_row(row, p.rope, angles + t * half);
        T* const to = static_cast<T*>(p.q_out) + token * p.stride_q_out_token + head * p.stride_q_out_head;
        const T* const from = static_cast<const T*>(p.q) + token * p.stride_q_token + head * p.stride_q_head;
        for (int d = lane; d < dim; d += kWarp)
          to[d] = d < 2 * half ? from_float<T>(row[d]) : from[d];  // what is not rotated keeps its bits
      } else {
        const std::int64_t slot = p.slot(token), page = slot / p.pages.page_size;
        if (slot < 0 || page >= p.pages.num_pages) continue;
        const std::int64_t offset = slot - page * p.pages.page_size;
        if (number < heads_kv) {
          stage_row(row, static_cast<const T*>(p.k) + token * p.stride_k_token + number * p.stride_k_head, dim,
                    plan.vectors);
          if (half > 0) rotate_row(row, p.rope, angles + t * half);
          store_row_as(row, dim, quantization.per_token, quantization.k.at(page, number, offset),
                       static_cast<E*>(p.pages.k) + page * p.pages.stride_k_page + offset * p.pages.stride_k_slot +
                           number * p.pages.stride_k_head,
                       plan.vectors);
        } else {
          const int head = number - heads_kv;
          stage_row(row, static_cast<const T*>(p.v) + token * p.stride_v_token + head * p.stride_v_head, dim_v,
                    plan.vectors);
          store_row_as(row, dim_v, quantization.per_token, quantization.v.at(page, head, offset),
                       static_cast<E*>(p.pages.v) + page * p.pages.stride_v_page + offset * p.pages.stride_v_slot +
                           head * p.pages.stride_v_head,
                       plan.vectors);
        }
      }
      __syncwarp();  // the row's place is filled again next
    }
    __syncthreads();  // and the angles
  }
}

constexpr int kReadLanes = 16;  // that read a row

/// The row that this thread reads a part of: of k (blockIdx.y 0) or of v (1), a head of a position of a sequence.
struct ReadRow {
  bool is_v, exists, there;                 // there: it lies in a page. Else its numbers are 0
  std::int64_t head, page, slot, from, to;  // from, to: elements from the first of the pages and of the output

  __device__ explicit ReadRow(const KvReadParams& p) : is_v(blockIdx.y == 1), exists(false), there(false) {
    const KvPages& pages = p.pages;
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kReadLanes) + threadIdx.x / kReadLanes;
    exists = row < p.batch * p.max_seq * pages.heads_kv;
    if (!exists) return;
    const std::int64_t at = row / pages.heads_kv, b = at / p.max_seq, position = at - b * p.max_seq;
    const std::int64_t block = position / pages.page_size;
    head = row - at * pages.heads_kv;
    slot = position - block * pages.page_size;
    page = -1;
    if (position < p.seq_lens[b] && block < p.max_pages) page = p.block_table[b * p.stride_block_table + block];
    there = page >= 0 && page < pages.num_pages;
    from = is_v ? page * pages.stride_v_page + slot * pages.stride_v_slot + head * pages.stride_v_head
                : page * pages.stride_k_page + slot * pages.stride_k_slot + head * pages.stride_k_head;
    to = is_v ? b * p.stride_v_out_batch + position * p.stride_v_out_token + head * p.stride_v_out_head
              : b * p.stride_k_out_batch + position * p.stride_k_out_token + head * p.stride_k_out_head;
  }
};

/// kWidth numbers to the output, at most 16 bytes at a time.
template <class T, int kWidth>
__device__ inline void store_values(T* to, const float (&values)[kWidth]) {
  constexpr int kStep = kWidth < kVectorElements<T> ? kWidth : kVectorElements<T>;
#pragma unroll
  for (int e = 0; e < kWidth; e += kStep) {
    float part[kStep];
#pragma unroll
    for (int i = 0; i < kStep; ++i) part[i] = values[e + i];
    store_floats(to + e, part);
  }
}

/// Grid: (rows of sequence, position and head, k or v); a row by kReadLanes lanes, kWidth elements at a time.
template <class T, class E, int kWidth>
__global__ void __launch_bounds__(kThreads) read_kernel(const __grid_constant__ KvReadParams p) {
  const ReadRow row(p);
  if (!row.exists) return;
  const KvPages& pages = p.pages;
  const std::int64_t dim = row.is_v ? pages.head_dim_v : pages.head_dim;
  T* const to = static_cast<T*>(row.is_v ? p.v_out : p.k_out) + row.to;
  const E* const from = static_cast<const E*>(row.is_v ? pages.v : pages.k) + row.from;
  float scale = 0.0f;
  if (row.there) scale = *(row.is_v ? pages.quantization.v : pages.quantization.k).at(row.page, row.head, row.slot);
  for (std::int64_t column = threadIdx.x % kReadLanes * kWidth; column < dim; column += kReadLanes * kWidth) {
    float values[kWidth] = {};
    if (row.there) {
      load_floats(values, from + column);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) values[e] *= scale;
    }
    store_values(to + column, values);
  }
}

/// The same for 4-bit elements, eight at a time. `words`: rows begin at multiples of 4 bytes; `vectors`: rows of the
/// output at multiples of 16.
template <class T>
__global__ void __launch_bounds__(kThreads)
    read_packed_kernel(const __grid_constant__ KvReadParams p, bool words, bool vectors) {
  constexpr int kWidth = 8;
  const ReadRow row(p);
  if (!row.exists) return;
  const KvPages& pages = p.pages;
  const int dim = static_cast<int>(row.is_v ? pages.head_dim_v : pages.head_dim);
  T* const to = static_cast<T*>(row.is_v ? p.v_out : p.k_out) + row.to;
  const PackedRow packed{static_cast<const unsigned char*>(row.is_v ? pages.v : pages.k) + row.from,
                         row.is_v ? pages.quantization.v : pages.quantization.k,
                         row.page,
                         row.head,
                         row.slot,
                         pages.dtype};
  for (int column = static_cast<int>(threadIdx.x % kReadLanes) * kWidth; column < dim; column += kReadLanes * kWidth) {
    float values[kWidth] = {};
    if (row.there) load_packed(packed, column, dim, words, values);
    if (!vectors || column + kWidth > dim) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e)
        if (column + e < dim) to[column + e] = from_float<T>(values[e]);
      continue;
    }
    store_values(to + column, values);
  }
}

/// f(T{}, E{}) for the dtype of numbers and that of 8-bit elements.
template <class F>
void visit_dtypes(DType dtype, DType elements, F f) {
  visit_floating(dtype, [&](auto zero) {
    if (elements == DType::kInt8) return f(zero, Int8{});
    f(zero, Float8{});
  });
}

bool fits(const void* data, std::size_t element, std::int64_t width, std::initializer_list<std::int64_t> strides) {
  bool all = is_aligned(data, element * static_cast<std::size_t>(width));
  for (const std::int64_t stride : strides) all = all && stride % width == 0;
  return all;
}

bool pages_fit(const KvPages& p, std::int64_t width) {
  return p.head_dim % width == 0 && p.head_dim_v % width == 0 &&
         fits(p.k, 1, width, {p.stride_k_page, p.stride_k_slot, p.stride_k_head}) &&
         fits(p.v, 1, width, {p.stride_v_page, p.stride_v_slot, p.stride_v_head});
}

std::int64_t row_pitch(const KvPages& p) { return ceil_div(std::max(p.head_dim, p.head_dim_v), 4) * 4; }
std::int64_t angle_floats(const KvAppendParams& p) { return p.has_rope ? p.rope.rotary_dim : 0; }

}  // namespace

Verdict kv_append_quantized_supports(const KvAppendParams& p) {
  if (static_cast<std::size_t>(row_pitch(p.pages) + angle_floats(p)) * sizeof(float) > kSharedBytes)
    return "it takes pages of 8 and 4 bits with head_dim up to 6016 only";  // a row and its angles: 2 x 6016 x 4 B
  return Verdict::ok();
}

void kv_append_quantized(const KvAppendParams& p, Stream stream) {
  if (kv_append_in_registers(p)) return kv_append_quantized_rows(p, stream);
  AppendPlan plan{};
  plan.pitch = static_cast<int>(row_pitch(p.pages));
  const std::size_t row_bytes = static_cast<std::size_t>(plan.pitch) * sizeof(float);
  const std::size_t angle_bytes = static_cast<std::size_t>(angle_floats(p)) * sizeof(float);
  const auto warps = std::min<std::size_t>(kWarps, (kSharedBytes - angle_bytes) / row_bytes);
  // Few heads: several tokens at a time, so that every warp has two rows.
  const std::int64_t rows = std::max<std::int64_t>(1, 2 * p.pages.heads_kv + p.heads_q);
  const auto room =
      static_cast<std::int64_t>(angle_bytes == 0 ? kMostTokens : (kSharedBytes - warps * row_bytes) / angle_bytes);
  plan.tokens = static_cast<int>(std::min({ceil_div(2 * kWarps, rows), std::int64_t{kMostTokens}, room}));
  plan.frequency_step = !p.has_rope || p.rope.inv_freq || p.rope.rotary_dim == 0
                            ? 0.0
                            : -2.0 * std::log2(p.rope.theta) / static_cast<double>(p.rope.rotary_dim);
  const std::size_t element = dtype_bytes(p.dtype);
  plan.vectors = pages_fit(p.pages, 4) && fits(p.k, element, 4, {p.stride_k_token, p.stride_k_head}) &&
                 fits(p.v, element, 4, {p.stride_v_token, p.stride_v_head}) &&
                 (p.heads_q == 0 || fits(p.q, element, 4, {p.stride_q_token, p.stride_q_head}));
  const LaunchShape shape{grid_size(ceil_div(p.tokens, plan.tokens), p.device.index, 8),
                          static_cast<unsigned>(warps * kWarp),
                          warps * row_bytes + static_cast<std::size_t>(plan.tokens) * angle_bytes, native(stream)};
  if (p.pages.dtype == DType::kInt4x2)
    return visit_floating(
        p.dtype, [&](auto zero) { launch("kv_append", append_kernel<decltype(zero), Int4x2>, shape, p, plan); });
  visit_dtypes(p.dtype, p.pages.dtype, [&](auto zero, auto element_zero) {
    launch("kv_append", append_kernel<decltype(zero), decltype(element_zero)>, shape, p, plan);
  });
}

void kv_read_quantized(const KvReadParams& p, Stream stream) {
  const std::size_t element = dtype_bytes(p.dtype);
  const bool vectors =
      pages_fit(p.pages, 8) && is_aligned(p.k_out, 16) && is_aligned(p.v_out, 16) &&
      fits(p.k_out, element, 4, {p.stride_k_out_batch, p.stride_k_out_token, p.stride_k_out_head}) &&
      fits(p.v_out, element, 4, {p.stride_v_out_batch, p.stride_v_out_token, p.stride_v_out_head}) &&
      (element == 4 || (fits(p.k_out, element, 8, {p.stride_k_out_batch, p.stride_k_out_token, p.stride_k_out_head}) &&
                        fits(p.v_out, element, 8, {p.stride_v_out_batch, p.stride_v_out_token, p.stride_v_out_head})));
  const std::int64_t rows = p.batch * p.max_seq * p.pages.heads_kv;
  const LaunchShape shape{dim3(static_cast<unsigned>(ceil_div(rows, kThreads / kReadLanes)), 2), kThreads, 0,
                          native(stream)};
  if (p.pages.quantization.packed) {
    const auto outputs_fit = [&](std::int64_t width) {
      return is_aligned(p.k_out, 16) && is_aligned(p.v_out, 16) &&
             fits(p.k_out, element, width, {p.stride_k_out_batch, p.stride_k_out_token, p.stride_k_out_head}) &&
             fits(p.v_out, element, width, {p.stride_v_out_batch, p.stride_v_out_token, p.stride_v_out_head});
    };
    const KvPages& pages = p.pages;
    const bool words = fits(pages.k, 1, 4, {pages.stride_k_page, pages.stride_k_slot, pages.stride_k_head}) &&
                       fits(pages.v, 1, 4, {pages.stride_v_page, pages.stride_v_slot, pages.stride_v_head});
    return visit_floating(p.dtype, [&](auto zero) {
      using T = decltype(zero);
      launch("kv_read", read_packed_kernel<T>, shape, p, words, outputs_fit(kVectorElements<T>));
    });
  }
  visit_dtypes(p.dtype, p.pages.dtype, [&](auto zero, auto element_zero) {
    using T = decltype(zero);
    using E = decltype(element_zero);
    launch("kv_read", vectors ? read_kernel<T, E, 8> : read_kernel<T, E, 1>, shape, p);
  });
}

}  // namespace flashkernel::cuda
