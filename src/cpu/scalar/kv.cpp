// Keys and values into pages, out of them, and from page to page. Copies keep every bit, NaN payloads included; what
// goes into 8-bit pages is rounded by scales (include/flashkernel/kv_ops.hpp), one multiplication by 1 / scale an
// element.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/scalar/kernels.hpp"
#include "cpu/scalar/rotation.hpp"

namespace flashkernel::cpu_scalar {
namespace {

template <class T>
void copy(const T* in, T* out, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = in[i];
}

Rotation rotation_of(const KvAppendParams& p, std::int64_t pair, std::int64_t token) {
  const std::int64_t position = p.positions[token];
  if (!p.table) return rotation_at(p.rope, pair, position);
  return {load_as(p.table.dtype, p.table.cos, position * p.table.stride_cos + pair),
          load_as(p.table.dtype, p.table.sin, position * p.table.stride_sin + pair)};
}

// RMSNorm of a head (Zhang and Sennrich, 2019), rounded to its dtype.
template <class T>
std::vector<T> normed_head(const KvAppendParams& p, TypedPointer weight, const T* in) {
  std::vector<T> out(static_cast<std::size_t>(p.pages.head_dim));
  double squares = 0.0;
  for (std::int64_t i = 0; i < p.pages.head_dim; ++i) squares += load<T>(in, i) * load<T>(in, i);
  const double mean = squares / static_cast<double>(p.pages.head_dim);
  const double rstd = 1.0 / std::sqrt(mean + static_cast<double>(p.norm_eps));
  for (std::int64_t i = 0; i < p.pages.head_dim; ++i) store<T>(out.data(), i, load<T>(in, i) * rstd * load(weight, i));
  return out;
}

template <class T>
void rotate_head(const KvAppendParams& p, std::int64_t token, TypedPointer norm, const T* in, T* out) {
  std::vector<T> normed;
  if (norm) {
    normed = normed_head(p, norm, in);
    in = normed.data();
  }
  for (std::int64_t pair = 0; pair < p.rope.rotary_dim / 2; ++pair)
    rotate_pair(p.rope, pair, rotation_of(p, pair, token), in, out);
  copy_unrotated(p.rope, p.pages.head_dim, in, out);
}

// The scale of a row of floats: its own, from its largest magnitude, where the cache has one a token (then it is
// stored).
template <class E>
float scale_of(const KvQuantization& quantization, float* scale, const std::vector<float>& row) {
  if (!quantization.per_token) return *scale;
  float largest = 0;
  bool has_nan = false;
  for (const float x : row) {
    has_nan = has_nan || std::isnan(x);
    if (std::abs(x) > largest) largest = std::abs(x);
  }
  if (has_nan && std::is_same_v<E, Int8>) largest = std::numeric_limits<float>::quiet_NaN();
  return *scale = row_scale(largest, largest_element(std::is_same_v<E, Int8> ? DType::kInt8 : DType::kFloat8E4M3));
}

template <class E>
void store_quantized(const KvQuantization& quantization, float* scale, const std::vector<float>& row, E* to) {
  const float inverse = 1.0f / scale_of<E>(quantization, scale, row);
  for (std::size_t i = 0; i < row.size(); ++i) to[i] = from_float<E>(row[i] * inverse);
}

// A row of floats as int4, group by group (ops/kv_packed_params.hpp says how).
void store_int4(const KvScale& scale, float* words, const std::vector<float>& row, std::uint8_t* to) {
  for (std::size_t i = 0; i < row.size(); i += 2) to[i / 2] = 0;
  for (int g = 0; g < scale.groups; ++g) {
    const std::size_t begin = static_cast<std::size_t>(g) * kInt4Group, end = std::min(row.size(), begin + kInt4Group);
    const auto bounded = [&](std::size_t i) { return std::min(std::max(row[i], -kInt4Largest), kInt4Largest); };
    float least = kInt4Largest, largest = -kInt4Largest;
    bool has_nan = false;
    for (std::size_t i = begin; i < end; ++i) {
      has_nan = has_nan || std::isnan(row[i]);
      least = std::min(least, bounded(i));
      largest = std::max(largest, bounded(i));
    }
    std::uint32_t word = kInt4NanWord;
    if (!has_nan) {
      const Half zero = from_float<Half>(least);
      const Half step = from_float<Half>(std::max(largest - to_float(zero), 0.0f) * kFifteenth);
      const float inverse = to_float(step) > 0 ? 1.0f / to_float(step) : 0.0f;
      for (std::size_t i = begin; i < end; ++i) {
        const float place = std::nearbyint((bounded(i) - to_float(zero)) * inverse);
        const auto element = static_cast<unsigned>(std::min(std::max(place, 0.0f), 15.0f));
        to[i / 2] = static_cast<std::uint8_t>(to[i / 2] | element << (i % 2 * 4));
      }
      word = step.bits | static_cast<std::uint32_t>(zero.bits) << 16;
    }
    std::memcpy(words + g, &word, sizeof word);
  }
}

// The rows of k and v of one head of one token as numbers, with the rotation that the call asks for.
template <class T>
std::vector<float> row_of_k(const KvAppendParams& p, std::int64_t token, const T* k) {
  std::vector<float> row(static_cast<std::size_t>(p.pages.head_dim));
  for (std::size_t i = 0; i < row.size(); ++i) row[i] = to_float(k[i]);
  if (p.has_rope)
    for (std::int64_t pair = 0; pair < p.rope.rotary_dim / 2; ++pair)
      rotate_pair(p.rope, pair, rotation_of(p, pair, token), k, row.data());
  return row;
}
template <class T>
std::vector<float> row_of_v(const KvAppendParams& p, const T* v) {
  std::vector<float> row(static_cast<std::size_t>(p.pages.head_dim_v));
  for (std::size_t i = 0; i < row.size(); ++i) row[i] = to_float(v[i]);
  return row;
}

template <class T>
void append_int4(const KvAppendParams& p, std::int64_t token, std::int64_t page, std::int64_t offset, std::int64_t h,
                 const T* k, const T* v) {
  const KvPages& pages = p.pages;
  const KvQuantization& quantization = pages.quantization;
  store_int4(quantization.k, quantization.k.at(page, h, offset), row_of_k(p, token, k),
             static_cast<std::uint8_t*>(pages.k) + page * pages.stride_k_page + offset * pages.stride_k_slot +
                 h * pages.stride_k_head);
  store_int4(quantization.v, quantization.v.at(page, h, offset), row_of_v(p, v),
             static_cast<std::uint8_t*>(pages.v) + page * pages.stride_v_page + offset * pages.stride_v_slot +
                 h * pages.stride_v_head);
}

// k and v of one head of one token, with the rotation that the call asks for, into 8-bit pages.
template <class T, class E>
void append_quantized(const KvAppendParams& p, std::int64_t token, std::int64_t page, std::int64_t offset,
                      std::int64_t h, const T* k, const T* v) {
  const KvPages& pages = p.pages;
  store_quantized(
      pages.quantization, pages.quantization.k.at(page, h, offset), row_of_k(p, token, k),
      static_cast<E*>(pages.k) + page * pages.stride_k_page + offset * pages.stride_k_slot + h * pages.stride_k_head);
  store_quantized(
      pages.quantization, pages.quantization.v.at(page, h, offset), row_of_v(p, v),
      static_cast<E*>(pages.v) + page * pages.stride_v_page + offset * pages.stride_v_slot + h * pages.stride_v_head);
}

template <class T>
void append_token(const KvAppendParams& p, std::int64_t token) {
  const KvPages& pages = p.pages;
  const std::int64_t slot = p.slots[token];
  if (slot >= 0 && slot < pages.num_pages * pages.page_size) {
    const std::int64_t page = slot / pages.page_size, offset = slot % pages.page_size;
    for (std::int64_t h = 0; h < pages.heads_kv; ++h) {
      const T* k = static_cast<const T*>(p.k) + token * p.stride_k_token + h * p.stride_k_head;
      const T* v = static_cast<const T*>(p.v) + token * p.stride_v_token + h * p.stride_v_head;
      if (pages.quantization.packed) {
        append_int4(p, token, page, offset, h, k, v);
        continue;
      }
      if (pages.quantization) {
        visit_quantized(pages.dtype,
                        [&](auto zero) { append_quantized<T, decltype(zero)>(p, token, page, offset, h, k, v); });
        continue;
      }
      T* k_page = static_cast<T*>(pages.k) + page * pages.stride_k_page + offset * pages.stride_k_slot +
                  h * pages.stride_k_head;
      T* v_page = static_cast<T*>(pages.v) + page * pages.stride_v_page + offset * pages.stride_v_slot +
                  h * pages.stride_v_head;
      if (p.has_rope) {
        rotate_head(p, token, p.k_norm, k, k_page);
      } else {
        copy(k, k_page, pages.head_dim);
      }
      copy(v, v_page, pages.head_dim_v);
    }
  }
  for (std::int64_t h = 0; h < p.heads_q; ++h)
    rotate_head(p, token, p.q_norm, static_cast<const T*>(p.q) + token * p.stride_q_token + h * p.stride_q_head,
                static_cast<T*>(p.q_out) + token * p.stride_q_out_token + h * p.stride_q_out_head);
}

// A row of pages at the other end: bits as they are, or numbers with their scale.
template <class T, class E>
void read_row(const E* from, float scale, T* to, std::int64_t count) {
  if constexpr (std::is_same_v<T, E>)
    copy(from, to, count);
  else
    for (std::int64_t i = 0; i < count; ++i) to[i] = from_float<T>(to_float(from[i]) * scale);
}

template <class T, class E>
void read_token(const KvReadParams& p, std::int64_t batch, std::int64_t token) {
  const KvPages& pages = p.pages;
  T* k = static_cast<T*>(p.k_out) + batch * p.stride_k_out_batch + token * p.stride_k_out_token;
  T* v = static_cast<T*>(p.v_out) + batch * p.stride_v_out_batch + token * p.stride_v_out_token;
  const bool exists = token < p.seq_lens[batch];
  const std::int64_t page = exists ? p.block_table[batch * p.stride_block_table + token / pages.page_size] : 0;
  const std::int64_t offset = token % pages.page_size;
  for (std::int64_t h = 0; h < pages.heads_kv; ++h) {
    T* k_head = k + h * p.stride_k_out_head;
    T* v_head = v + h * p.stride_v_out_head;
    if (exists) {
      const KvQuantization& quantization = pages.quantization;
      read_row(static_cast<const E*>(pages.k) + page * pages.stride_k_page + offset * pages.stride_k_slot +
                   h * pages.stride_k_head,
               quantization ? *quantization.k.at(page, h, offset) : 1.0f, k_head, pages.head_dim);
      read_row(static_cast<const E*>(pages.v) + page * pages.stride_v_page + offset * pages.stride_v_slot +
                   h * pages.stride_v_head,
               quantization ? *quantization.v.at(page, h, offset) : 1.0f, v_head, pages.head_dim_v);
    } else {
      for (std::int64_t i = 0; i < pages.head_dim; ++i) store<T>(k_head, i, 0.0);
      for (std::int64_t i = 0; i < pages.head_dim_v; ++i) store<T>(v_head, i, 0.0);
    }
  }
}

template <class T>
void read_packed_token(const KvReadParams& p, std::int64_t batch, std::int64_t token) {
  const KvPages& pages = p.pages;
  const bool exists = token < p.seq_lens[batch];
  const std::int64_t page = exists ? p.block_table[batch * p.stride_block_table + token / pages.page_size] : 0;
  const std::int64_t slot = token % pages.page_size;
  for (std::int64_t h = 0; h < pages.heads_kv; ++h)
    for (const bool is_v : {false, true}) {
      T* const to = is_v ? static_cast<T*>(p.v_out) + batch * p.stride_v_out_batch + token * p.stride_v_out_token +
                               h * p.stride_v_out_head
                         : static_cast<T*>(p.k_out) + batch * p.stride_k_out_batch + token * p.stride_k_out_token +
                               h * p.stride_k_out_head;
      const auto* const from = static_cast<const unsigned char*>(is_v ? pages.v : pages.k) +
                               page * (is_v ? pages.stride_v_page : pages.stride_k_page) +
                               slot * (is_v ? pages.stride_v_slot : pages.stride_k_slot) +
                               h * (is_v ? pages.stride_v_head : pages.stride_k_head);
      const PackedRow row{from, is_v ? pages.quantization.v : pages.quantization.k, page, h, slot, pages.dtype};
      const std::int64_t dim = is_v ? pages.head_dim_v : pages.head_dim;
      for (std::int64_t i = 0; i < dim; ++i) to[i] = from_float<T>(exists ? row[i] : 0.0f);
    }
}

// T: anything of an element's size.
template <class T>
void copy_page_slot(const KvPages& pages, std::int64_t src, std::int64_t dst, std::int64_t slot) {
  for (std::int64_t h = 0; h < pages.heads_kv; ++h) {
    T* k = static_cast<T*>(pages.k) + slot * pages.stride_k_slot + h * pages.stride_k_head;
    T* v = static_cast<T*>(pages.v) + slot * pages.stride_v_slot + h * pages.stride_v_head;
    copy<T>(k + src * pages.stride_k_page, k + dst * pages.stride_k_page, pages.head_dim);
    copy<T>(v + src * pages.stride_v_page, v + dst * pages.stride_v_page, pages.head_dim_v);
    if (!pages.quantization.per_token) continue;
    for (const KvScale& scale : {pages.quantization.k, pages.quantization.v}) {
      if (pages.dtype == DType::kFloat4E2M1x2) {
        auto* const bytes =
            reinterpret_cast<std::uint8_t*>(scale.data) + h * scale.stride_head + slot * scale.stride_slot;
        copy(bytes + src * scale.stride_page, bytes + dst * scale.stride_page, scale.groups);
      } else {
        copy(scale.at(src, h, slot), scale.at(dst, h, slot), scale.groups);
      }
    }
  }
}

std::int64_t elements_per_token(const KvPages& pages) { return pages.heads_kv * (pages.head_dim + pages.head_dim_v); }

}  // namespace

void kv_append(const KvAppendParams& p, void*, Stream) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t token = begin; token < end; ++token) append_token<T>(p, token);
    };
    parallel_for(p.tokens, grain_for(elements_per_token(p.pages) + p.heads_q * p.pages.head_dim), task);
  });
}

void kv_read(const KvReadParams& p, void*, Stream) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t i = begin; i < end; ++i) {
        if (p.pages.quantization.packed) {
          read_packed_token<T>(p, i / p.max_seq, i % p.max_seq);
        } else if (!p.pages.quantization) {
          read_token<T, T>(p, i / p.max_seq, i % p.max_seq);
        } else {
          visit_quantized(p.pages.dtype,
                          [&](auto element) { read_token<T, decltype(element)>(p, i / p.max_seq, i % p.max_seq); });
        }
      }
    };
    parallel_for(p.batch * p.max_seq, grain_for(elements_per_token(p.pages)), task);
  });
}

void kv_copy_pages(const KvCopyParams& p, void*, Stream) {
  auto task = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t pair = i / p.pages.page_size, slot = i % p.pages.page_size;
      switch (dtype_bytes(p.pages.dtype)) {
        case 1: copy_page_slot<std::uint8_t>(p.pages, p.src[pair], p.dst[pair], slot); break;
        case 2: copy_page_slot<std::uint16_t>(p.pages, p.src[pair], p.dst[pair], slot); break;
        default: copy_page_slot<std::uint32_t>(p.pages, p.src[pair], p.dst[pair], slot);
      }
    }
  };
  parallel_for(p.count * p.pages.page_size, grain_for(elements_per_token(p.pages)), task);
}

void find_bad_page(const FindBadPageParams& p, void*, Stream) {
  std::int64_t* const fault = p.host_fault ? p.host_fault : p.fault;
  const auto report = [fault](std::int64_t sequence, std::int64_t slot, std::int64_t value) {
    fault[0] = sequence, fault[1] = slot, fault[2] = value;
  };
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t length = p.seq_lens[b];
    if (length < 0 || length > p.max_pages * p.page_size) return report(b, -1, length);
    for (std::int64_t slot = p.first_slot(b, length); slot < (length + p.page_size - 1) / p.page_size; ++slot) {
      const std::int64_t page = p.block_table[b * p.stride_block_table + slot];
      if (page < 0 || page >= p.num_pages) return report(b, slot, page);
    }
  }
  report(-1, -1, -1);
}

}  // namespace flashkernel::cpu_scalar
