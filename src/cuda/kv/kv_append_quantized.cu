// KV append to pages of 8-bit and int4 elements for rows (one head of one token) that part of a warp holds in
// registers, eight elements a lane: 16 bytes of 16-bit numbers in, 8 bytes out (int4: 4). Called by kv_quantized.cu,
// which takes any other row through shared memory. Bound by memory: what stands in its way is arithmetic (some 130
// instructions a lane and row take as long as the memory), so a token's slot is divided into page and place once, and
// its angles worked out once, by one thread each while everybody's rows are under way.
#include "cuda/kv/kv.hpp"
#include "cuda/kv/lengths_after.cuh"
#include "cuda/host/launch.hpp"
#include "cuda/tile/packed.cuh"
#include "cuda/tile/quantized.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/kv/append_angle.cuh"
#include "cuda/tile/rope.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 8;       // elements of a lane
constexpr int kInFlight = 4;    // rows that a lane loads before it stores the first
constexpr int kMostTokens = 8;  // that a block takes
constexpr int kMostPairs = kWarp * kWidth / 2;

struct Plan {
  int lanes;         // of a row: 8, 16 or 32
  int tokens_shift;  // a block takes 2^this tokens
};

/// Where a token's k or v goes; its head h at + h * stride. Null: nowhere.
struct Place {
  void* elements;
  float* scale;
};

/// What this block reads of k, v or q.
template <class T>
struct Source {
  const T* data;
  std::int64_t stride_token, stride_head;
  int heads, dim;
};

/// kWidth numbers of T as 16-byte words.
template <class T>
struct Row8 {
  static constexpr int kWords = kWidth * static_cast<int>(sizeof(T)) / 16, kPerWord = kVectorElements<T>;
  uint4 words[kWords];

  __device__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  __device__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint4*>(to)[i] = words[i];
  }
  __device__ Row8 of_lane(int lane) const {
    Row8 other;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      other.words[i].x = __shfl_sync(kFullMask, words[i].x, lane);
      other.words[i].y = __shfl_sync(kFullMask, words[i].y, lane);
      other.words[i].z = __shfl_sync(kFullMask, words[i].z, lane);
      other.words[i].w = __shfl_sync(kFullMask, words[i].w, lane);
    }
    return other;
  }
  __device__ void to_floats(float (&x)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const auto& part = reinterpret_cast<const Packed<T, kPerWord>&>(words[i]);
#pragma unroll
      for (int j = 0; j < kPerWord; ++j) x[i * kPerWord + j] = to_float(part.values[j]);
    }
  }
  __device__ void from_floats(const float (&x)[kWidth]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      float part[kPerWord];
#pragma unroll
      for (int j = 0; j < kPerWord; ++j) part[j] = x[i * kPerWord + j];
      reinterpret_cast<Packed<T, kPerWord>&>(words[i]) = pack_vector<T>(part);
    }
  }
};

/// The largest magnitude of a row over its lanes; int8 has no NaN of its own, so there a NaN makes it NaN.
template <class E>
__device__ inline float largest_magnitude(const float (&x)[kWidth], int lanes) {
  if constexpr (dtype_of<E> == DType::kInt8) {
    unsigned largest = 0;  // magnitudes order like their bits, NaN above all
#pragma unroll
    for (int i = 0; i < kWidth; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
    for (int step = lanes / 2; step > 0; step /= 2) largest = max(largest, __shfl_xor_sync(kFullMask, largest, step));
    return __uint_as_float(largest);
  } else {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) largest = fmaxf(largest, fabsf(x[i]));  // a NaN loses
    for (int step = lanes / 2; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, step));
    return largest;
  }
}

/// Grid: (blocks of tokens, k, v or q). A block's rows are numbered (head, token), tokens fastest.
template <class T, class E>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ KvAppendParams p, const __grid_constant__ RopeFrequencies frequencies,
                  Plan plan) {
  alignas(16) __shared__ float cosines[kMostTokens * kMostPairs], sines[kMostTokens * kMostPairs];
  __shared__ Place places[kMostTokens];
  const KvPages& pages = p.pages;
  const bool is_v = blockIdx.y == 1, is_q = blockIdx.y == 2;
  const auto heads_kv = static_cast<int>(pages.heads_kv), dim = static_cast<int>(pages.head_dim);
  const Source<T> from =
      is_q ? Source<T>{static_cast<const T*>(p.q), p.stride_q_token, p.stride_q_head, static_cast<int>(p.heads_q), dim}
      : is_v ? Source<T>{static_cast<const T*>(p.v), p.stride_v_token, p.stride_v_head, heads_kv,
                         static_cast<int>(pages.head_dim_v)}
             : Source<T>{static_cast<const T*>(p.k), p.stride_k_token, p.stride_k_head, heads_kv, dim};
  const KvScale& scales = is_v ? pages.quantization.v : pages.quantization.k;

  write_lengths_after(p);
  const int thread = static_cast<int>(threadIdx.x);
  const int group = thread / plan.lanes, groups = kThreads / plan.lanes, lane = thread % plan.lanes;
  const int column = lane * kWidth, shift = plan.tokens_shift;
  const int half = p.has_rope && !is_v ? static_cast<int>(p.rope.rotary_dim / 2) : 0;
  const std::int64_t base = static_cast<std::int64_t>(blockIdx.x) << shift;
  const int count = static_cast<int>(min(std::int64_t{1} << shift, p.tokens - base));
  const int rows = from.heads << shift;

  struct Which {
    int t, head;
    bool mine;  // this lane has a part of it
  };
  const auto which = [&](int at) {
    Which w{at & ((1 << shift) - 1), at >> shift, false};
    w.mine = at < rows && w.t < count && column < from.dim;
    return w;
  };
  const T* const data = from.data + base * from.stride_token + column;
  const auto load = [&](int first, Row8<T>(&held)[kInFlight]) {
#pragma unroll
    for (int r = 0; r < kInFlight; ++r) {
      const Which w = which(first + r * groups);
      held[r] = {};
      if (w.mine) held[r].load(data + w.t * from.stride_token + w.head * from.stride_head);
    }
  };

  Row8<T> held[kInFlight];
  load(group, held);
  for (int at = thread; at < count * half; at += kThreads) {
    const int t = at / half;
    float cosine, sine;
    const int pair = at - t * half;
    append_angle(p, base + t, pair, half_turns_per_token(p.rope, frequencies, pair), &cosine, &sine);
    cosines[at] = cosine;
    sines[at] = p.rope.inverse ? -sine : sine;
  }
  if (thread < count && !is_q) {
    const std::int64_t slot = p.slot(base + thread), page = slot / pages.page_size;
    const std::int64_t offset = slot - page * pages.page_size;
    Place place{nullptr, nullptr};
    if (slot >= 0 && page < pages.num_pages) {
      place.elements = is_v ? static_cast<E*>(pages.v) + page * pages.stride_v_page + offset * pages.stride_v_slot
                            : static_cast<E*>(pages.k) + page * pages.stride_k_page + offset * pages.stride_k_slot;
      place.scale = scales.at(page, 0, offset);
    }
    places[thread] = place;
  }
  __syncthreads();

  // Lanes [0, 2 * partner_step) of a row rotate; without interleaving pairs are `partner_step` lanes apart.
  const int partner_step = half / kWidth;
  const bool rotates = column < 2 * half, is_second = !p.rope.interleaved && lane >= partner_step;
  const int partner = thread % kWarp + (!rotates ? 0 : is_second ? -partner_step : partner_step);
  const auto rotate = [&](const Row8<T>& row, int t, float(&x)[kWidth]) {
    if (p.rope.interleaved) {
      if (!rotates) return;
      const int pair = t * half + column / 2;
#pragma unroll
      for (int i = 0; i < kWidth; i += 2) {
        const float first = x[i], cosine = cosines[pair + i / 2], sine = sines[pair + i / 2];
        x[i] = first * cosine - x[i + 1] * sine;
        x[i + 1] = first * sine + x[i + 1] * cosine;
      }
    } else {
      float other[kWidth];
      row.of_lane(partner).to_floats(other);  // by all lanes of the warp
      if (!rotates) return;
      const int pair = t * half + column - (is_second ? half : 0);
      float cosine[kWidth], sine[kWidth];
      load_wide(cosine, cosines + pair);
      load_wide(sine, sines + pair);
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        x[i] = is_second ? other[i] * sine[i] + x[i] * cosine[i] : x[i] * cosine[i] - other[i] * sine[i];
    }
  };
  // Four lanes have a group of 32 elements; the last one of a row may be shorter.
  [[maybe_unused]] const auto store_int4 = [&](const Which& w, const float(&x)[kWidth]) {
    float least = kInt4Largest, largest = -kInt4Largest;
    int has_nan = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (!w.mine) break;
      has_nan |= x[i] != x[i];
      least = fminf(least, Int4Step::bounded(x[i]));
      largest = fmaxf(largest, Int4Step::bounded(x[i]));
    }
#pragma unroll
    for (int step = 1; step < kInt4Group / kWidth; step *= 2) {
      least = fminf(least, __shfl_xor_sync(kFullMask, least, step));
      largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, step));
      has_nan |= __shfl_xor_sync(kFullMask, has_nan, step);
    }
    const Place place = places[w.t];
    if (!w.mine || !place.elements) return;
    const Int4Step step(least, largest, has_nan != 0);
    if (lane % (kInt4Group / kWidth) == 0)
      reinterpret_cast<std::uint32_t*>(place.scale + w.head * scales.stride_head)[lane / (kInt4Group / kWidth)] =
          step.word;
    std::uint32_t eight = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) eight |= step.element(x[i]) << (4 * i);
    *reinterpret_cast<std::uint32_t*>(static_cast<E*>(place.elements) +
                                      w.head * (is_v ? pages.stride_v_head : pages.stride_k_head) + column / 2) = eight;
  };
  const std::int64_t stride_head = is_v ? pages.stride_v_head : pages.stride_k_head;
  const auto store_q = [&](Row8<T>& row, const Which& w, const float(&x)[kWidth]) {
    if (!w.mine) return;
    if (rotates) row.from_floats(x);  // what is not rotated keeps its bits
    row.store(static_cast<T*>(p.q_out) + (base + w.t) * p.stride_q_out_token + w.head * p.stride_q_out_head + column);
  };
  [[maybe_unused]] const auto store = [&](const Which& w, float(&x)[kWidth]) {
    if constexpr (!kIsInt4<E>) {
      float used = 1.0f;
      if (pages.quantization.per_token)
        used = row_scale(largest_magnitude<E>(x, plan.lanes), largest_element(dtype_of<E>));
      const Place place = places[w.t];
      if (!w.mine || !place.elements) return;
      float* const scale = place.scale + w.head * scales.stride_head;
      if (!pages.quantization.per_token) {
        used = *scale;
      } else if (lane == 0) {
        *scale = used;
      }
      const float inverse = 1.0f / used;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] *= inverse;
      *reinterpret_cast<uint2*>(static_cast<E*>(place.elements) + w.head * stride_head + column) = pack_eight<E>(x);
    }
  };

  for (int first = 0; first < rows; first += kInFlight * groups) {  // the same turns for all lanes of a warp
    if (first > 0) load(first + group, held);
#pragma unroll
    for (int r = 0; r < kInFlight; ++r) {
      const Which w = which(first + group + r * groups);
      float x[kWidth];
      held[r].to_floats(x);
      if (half > 0) rotate(held[r], w.t, x);
      if (is_q)
        store_q(held[r], w, x);
      else if constexpr (kIsInt4<E>)
        store_int4(w, x);
      else
        store(w, x);
    }
  }
}

}  // namespace

/// Whole vectors everywhere, heads of up to 256 elements, and pairs that are whole lanes apart.
bool kv_append_in_registers(const KvAppendParams& p) {
  const KvPages& pages = p.pages;
  const auto element = static_cast<std::int64_t>(dtype_bytes(p.dtype));
  const auto fits = [](const void* data, std::int64_t bytes_of, std::int64_t bytes,
                       std::initializer_list<std::int64_t> strides) {
    bool all = is_aligned(data, static_cast<std::size_t>(bytes));
    for (const std::int64_t stride : strides) all = all && stride * bytes_of % bytes == 0;
    return all;
  };
  const std::int64_t dim = std::max(pages.head_dim, pages.head_dim_v);
  const std::int64_t pairs_step = p.rope.interleaved ? kWidth : 2 * kWidth;
  return dim <= kWarp * kWidth && pages.head_dim % kWidth == 0 && pages.head_dim_v % kWidth == 0 &&
         (!p.has_rope || p.rope.rotary_dim % pairs_step == 0) && pages.heads_kv <= 1 << 20 && p.heads_q <= 1 << 20 &&
         fits(p.k, element, 16, {p.stride_k_token, p.stride_k_head}) &&
         fits(p.v, element, 16, {p.stride_v_token, p.stride_v_head}) &&
         fits(pages.k, 1, kWidth, {pages.stride_k_page, pages.stride_k_slot, pages.stride_k_head}) &&
         fits(pages.v, 1, kWidth, {pages.stride_v_page, pages.stride_v_slot, pages.stride_v_head}) &&
         (p.heads_q == 0 || (fits(p.q, element, 16, {p.stride_q_token, p.stride_q_head}) &&
                             fits(p.q_out, element, 16, {p.stride_q_out_token, p.stride_q_out_head}))) &&
         p.tokens <= 0x7fffffff;
}

void kv_append_quantized_rows(const KvAppendParams& p, Stream stream) {
  const std::int64_t dim = std::max(p.pages.head_dim, p.pages.head_dim_v);
  Plan plan{};
  plan.lanes = dim <= 8 * kWidth ? 8 : dim <= 16 * kWidth ? 16 : 32;
  // As many tokens a block as have all their rows under way at once; few tokens get a block each.
  const std::int64_t at_once = kThreads / plan.lanes * kInFlight, rows = p.pages.heads_kv;
  const bool is_few = p.tokens <= 4 * cuda_device_properties(p.device.index).num_sms;
  while (!is_few && (2 << plan.tokens_shift) <= kMostTokens && (rows << (plan.tokens_shift + 1)) <= at_once)
    ++plan.tokens_shift;
  const auto blocks = static_cast<unsigned>(ceil_div(p.tokens, std::int64_t{1} << plan.tokens_shift));
  const RopeFrequencies frequencies = p.has_rope ? rope_frequencies(p.rope) : RopeFrequencies{};
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = p.pages.dtype == DType::kInt4x2 ? append_kernel<T, Int4x2>
                        : p.pages.dtype == DType::kInt8 ? append_kernel<T, Int8>
                                                        : append_kernel<T, Float8>;
    launch("kv_append", kernel, {dim3(blocks, p.heads_q > 0 ? 3 : 2), kThreads, 0, native(stream)}, p, frequencies,
           plan);
  });
}

}  // namespace flashkernel::cuda
