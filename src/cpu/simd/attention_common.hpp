// What all fast CPU attention kernels share: where rows and keys lie, score modifiers, the online softmax's
// bookkeeping, the end of a row, and the order of tasks. Included under avx2/, avx512/ and amx/ after one vector type
// (`Vec`). Rows: the queries of all heads that share one kv head, token-major: row r is token r / group, head r % group
// of the group, so that K and V are read once for the group and neighbouring rows see nearly the same keys. Invariants:
// a mask is an interval of keys per row; keys outside are never read into a result; the order of every sum depends on
// key positions only, so results repeat bit for bit whatever the number of threads. Paper: Milakov & Gimelshein,
// "Online normalizer calculation for softmax" (2018); Dao, FlashAttention-2 (2023), algorithm 1.
#pragma once

#include "ops/attention_params.hpp"

namespace flashkernel::cpu {
namespace {

// Up to this many rows a kv head, K and V come from memory once and are used too few times to repay packing.
constexpr int kDecodeRows = 16;

inline std::int64_t index_at(const IndexArray& a, std::int64_t i) {
  return a.is_int64 ? static_cast<const std::int64_t*>(a.data)[i] : static_cast<const std::int32_t*>(a.data)[i];
}

// The rows of K or V of one sequence and kv head.
template <class T>
struct KeyRows {
  const T* base;             // row of key 0; paged: of slot 0 in page 0
  std::int64_t stride;       // from a token to the next
  const std::int32_t* page;  // ids of this sequence's pages; null: not paged
  std::int64_t num_pages, page_size, page_stride;

  // The page of key j. A panel that begins before the window may reach a page that was given back: whatever its entry
  // holds, some page of the pool is read instead, and masked.
  std::int64_t page_of(std::int64_t j) const {
    const std::int64_t id = page[j / page_size];
    return static_cast<std::uint64_t>(id) < static_cast<std::uint64_t>(num_pages) ? id : 0;
  }
  const T* row(std::int64_t j) const {
    if (!page) return base + j * stride;
    return base + page_of(j) * page_stride + j % page_size * stride;
  }
  // How many keys from j on lie `stride` apart.
  std::int64_t run(std::int64_t j) const { return page ? page_size - j % page_size : INT64_MAX; }
};

// One sequence and kv head of a call. T: elements of queries and outputs, K: of keys and values.
template <class T, class K = T>
struct Sequence {
  const AttentionParams* p;
  std::int64_t b, head0;  // first query head of the group
  std::int64_t group;     // query heads a kv head
  std::int64_t q_len, k_len;
  std::int64_t q_begin;  // first row of the sequence when variable-length, else 0
  std::int64_t k_start;  // the first key that any query sees
  KeyRows<K> k, v;

  std::int64_t rows() const { return q_len * group; }
  std::int64_t token(std::int64_t row) const { return row / group; }
  std::int64_t head(std::int64_t row) const { return head0 + row % group; }

  // The same sequence, `n` kv heads on.
  Sequence other_head(std::int64_t n) const {
    Sequence s = *this;
    s.head0 += n * group;
    s.k.base += n * p->stride_k_head;
    s.v.base += n * p->stride_v_head;
    return s;
  }

  const T* q_row(std::int64_t row) const {
    return static_cast<const T*>(p->q) + offset(row, p->stride_q_batch, p->stride_q_head, p->stride_q_token);
  }
  T* out_row(std::int64_t row) const {
    return static_cast<T*>(p->out) + offset(row, p->stride_out_batch, p->stride_out_head, p->stride_out_token);
  }
  float* lse(std::int64_t row) const {
    return p->lse ? p->lse + offset(row, p->stride_lse_batch, p->stride_lse_head, p->stride_lse_token) : nullptr;
  }
  // Keys [first, last) that a row sees.
  std::int64_t first_key(std::int64_t row) const {
    if (p->window_left < 0) return k_start;
    return imin(k_len, imax<std::int64_t>(k_start, token(row) + k_len - q_len - p->window_left));
  }
  std::int64_t last_key(std::int64_t row) const {
    if (p->window_right < 0) return k_len;
    return imin(k_len, imax<std::int64_t>(0, token(row) + k_len - q_len + p->window_right + 1));
  }

 private:
  std::int64_t offset(std::int64_t row, std::int64_t batch, std::int64_t head_stride, std::int64_t token_stride) const {
    const std::int64_t i = q_begin + token(row);
    return (p->cu_seqlens_q.data ? 0 : b * batch) + i * token_stride + head(row) * head_stride;
  }
};

inline std::int64_t query_length(const AttentionParams& p, std::int64_t b) {
  if (!p.cu_seqlens_q.data) return p.seq_q;
  const std::int64_t length = index_at(p.cu_seqlens_q, b + 1) - index_at(p.cu_seqlens_q, b);
  return p.seqused_q.data ? imin(length, index_at(p.seqused_q, b)) : length;  // checked: not below 0
}

template <class T, class K = T>
inline Sequence<T, K> sequence_of(const AttentionParams& p, std::int64_t b, std::int64_t head_kv) {
  Sequence<T, K> s;
  s.p = &p;
  s.b = b;
  s.group = p.heads_q / p.heads_kv;
  s.head0 = head_kv * s.group;
  s.q_len = query_length(p, b);
  s.q_begin = p.cu_seqlens_q.data ? index_at(p.cu_seqlens_q, b) : 0;
  std::int64_t k_begin = 0;
  s.k_len = p.seq_k;
  s.k_start = 0;
  if (p.cu_seqlens_k.data) {
    k_begin = index_at(p.cu_seqlens_k, b);
    s.k_len = index_at(p.cu_seqlens_k, b + 1) - k_begin;
    if (p.seqused_k.data) s.k_len = imin(s.k_len, index_at(p.seqused_k, b));
  } else if (p.block_table) {
    s.k_len = index_at(p.seq_lens, b);
    if (p.k_starts.data) s.k_start = imin(s.k_len, index_at(p.k_starts, b));
  }
  const auto rows = [&](const void* data, std::int64_t batch, std::int64_t head, std::int64_t token) {
    KeyRows<K> r;
    r.base = static_cast<const K*>(data) + head_kv * head;
    if (!p.block_table) r.base += p.cu_seqlens_k.data ? k_begin * token : b * batch;
    r.stride = token;
    r.page = p.block_table ? p.block_table + b * p.stride_block_table : nullptr;
    r.num_pages = p.num_pages;
    r.page_size = p.block_table ? p.page_size : 1;
    r.page_stride = batch;
    return r;
  };
  s.k = rows(p.k, p.stride_k_batch, p.stride_k_head, p.stride_k_token);
  s.v = rows(p.v, p.stride_v_batch, p.stride_v_head, p.stride_v_token);
  return s;
}

// The scales of keys (or values) [key0 + from, key0 + to) of an 8-bit cache, to out[from..to).
template <class T, class K>
inline void load_scales(const Sequence<T, K>& seq, const KvScale& scale, std::int64_t key0, int from, int to,
                        float* out) {
  const float* base = scale.data + seq.head0 / seq.group * scale.stride_head;
  for (int j = from; j < to;) {
    const std::int64_t key = key0 + j, slot = key % seq.k.page_size;
    const int end = static_cast<int>(imin<std::int64_t>(to, j + seq.k.page_size - slot));
    const float* at = base + seq.k.page_of(key) * scale.stride_page + slot * scale.stride_slot;
    for (; j < end; ++j, at += scale.stride_slot) out[j] = *at;
  }
}

// A plain scaled row needs no pass of its own: exp2((s - max) * scale * log2 e) takes the scale along (if it keeps the
// order).
inline bool plain_scores(const AttentionParams& p) {
  return !(p.softcap > 0) && !p.bias.data && !p.alibi_slopes && !p.mask.data && !p.mask.blocks.data && p.scale > 0;
}
// Logits in the score buffer times this are in units of log 2.
inline float log2_factor(const AttentionParams& p) { return plain_scores(p) ? p.scale * kLog2E : kLog2E; }
// Times this they are scores as the contract means them.
inline float score_unit(const AttentionParams& p) { return plain_scores(p) ? p.scale : 1.0f; }

inline Vec::Reg tanh_lanes(Vec::Reg x) {
  const Vec::Reg a = Vec::abs(x);
  const Vec::Reg z = Vec::mul(x, x);
  Vec::Reg small = Vec::set1(kTanhCoefficients[4]);
  for (int i = 3; i >= 0; --i) small = Vec::fma(small, z, Vec::set1(kTanhCoefficients[i]));
  small = Vec::fma(Vec::mul(x, z), small, x);
  const Vec::Reg e = Vec::exp2<6>(Vec::mul(a, Vec::set1(-2.0f * kLog2E)));
  const Vec::Reg one = Vec::set1(1.0f);
  const Vec::Reg large = Vec::copy_sign(Vec::div(Vec::sub(one, e), Vec::add(one, e)), x);
  return Vec::select_less(a, Vec::set1(kTanhSmall), small, large);
}

template <class B>
inline Vec::Reg bias_lanes(const B* bias, std::int64_t stride, int n) {
  if (stride == 1) return n >= Vec::kWidth ? Vec::load(bias) : Vec::load_first(bias, n);
  B lanes[Vec::kWidth] = {};
  for (int i = 0; i < imin(n, Vec::kWidth); ++i) lanes[i] = bias[i * stride];
  return Vec::load(lanes);
}

// What ALiBi adds to the scores of the keys j, j + 1, ..; `distance` is from key j to the query's position.
inline Vec::Reg add_alibi(const AttentionParams& p, Vec::Reg minus_slope, std::int64_t distance, Vec::Reg scores) {
  const Vec::Reg d = Vec::sub(Vec::set1(static_cast<float>(distance)), Vec::iota());
  if (p.alibi == Alibi::kDistance) return Vec::fma(minus_slope, Vec::abs(d), scores);
  if (p.alibi == Alibi::kSigned) return Vec::fma(minus_slope, d, scores);
  float lanes[Vec::kWidth];
  Vec::store(lanes, Vec::max(d, Vec::zero()));
  for (int i = 0; i < Vec::kWidth; ++i) lanes[i] = __builtin_sqrtf(lanes[i]);
  return Vec::fma(minus_slope, Vec::load(lanes), scores);
}

// Bit n says whether a row of the packed mask shows key j + n, for the Vec::kWidth keys from j on; keys at and behind
// k_len count as hidden.
inline std::uint32_t mask_bits(const std::uint32_t* mask, std::int64_t j, std::int64_t k_len) {
  if (j >= k_len) return 0;
  const std::int64_t word = j / 32;
  std::uint64_t bits = mask[word];
  if ((word + 1) * 32 < k_len) bits |= static_cast<std::uint64_t>(mask[word + 1]) << 32;
  return static_cast<std::uint32_t>(bits >> (j % 32));
}

// What the block mask says of query i and key j. Free functions for the same reason as mask_row.
inline std::uint8_t block_at(const AttentionBlocks& blocks, std::int64_t b, std::int64_t h, std::int64_t i,
                             std::int64_t j) {
  return blocks.data[b * blocks.stride_batch + h * blocks.stride_head + (i >> blocks.shift_q) * blocks.stride_q +
                     (j >> blocks.shift_k) * blocks.stride_k];
}
// Whether the block mask hides all keys [first, last), below k_len, from query i.
inline bool blocks_hide(const AttentionBlocks& blocks, std::int64_t b, std::int64_t h, std::int64_t i,
                        std::int64_t first, std::int64_t last) {
  const std::int64_t step = std::int64_t{1} << blocks.shift_k;
  for (std::int64_t j = first / step * step; j < last; j += step)
    if (block_at(blocks, b, h, i, j) != kBlockHidden) return false;
  return true;
}

// The row of the packed mask of query i of a sequence. A member of the params would be a function of the whole library,
// compiled for a newer instruction set (tests_cpp/no_weak_symbols.cmake).
template <class T, class K>
inline const std::uint32_t* mask_row(const Sequence<T, K>& seq, std::int64_t h, std::int64_t i) {
  const AttentionParams& p = *seq.p;
  return p.is_varlen_q() ? p.mask.row(0, h, p.q_begin(seq.b) + i) : p.mask.row(seq.b, h, i);
}

// The bits of query i of a sequence from key j on, whose mask may be of its last keys alone.
template <class T, class K>
inline std::uint32_t shown_keys(const Sequence<T, K>& seq, std::int64_t h, std::int64_t i, std::int64_t j) {
  const AttentionMask& given = seq.p->mask;
  if (given.blocks.data && j < seq.k_len) {
    const std::uint8_t block = block_at(given.blocks, seq.b, h, i, j);
    if (block != kBlockShown || !given.data) return block == kBlockHidden ? 0u : ~0u;
  }
  const std::uint32_t* const mask = mask_row(seq, h, i);
  if (!seq.p->is_paged()) return mask_bits(mask, j, seq.k_len);
  const std::int64_t bit = j - (seq.k_len - seq.q_len);
  if (bit >= 0) return mask_bits(mask, bit, seq.q_len);
  if (bit <= -Vec::kWidth) return ~0u;
  return mask_bits(mask, 0, seq.q_len) << -bit | ((1u << -bit) - 1);
}

// Vec::kWidth scores: those of hidden keys become -inf, whatever they are.
inline void hide_scores(std::uint32_t bits, float* s) {
  constexpr std::uint32_t kAll = (1u << Vec::kWidth) - 1;
  if ((bits & kAll) == kAll) return;
  for (int i = 0; i < Vec::kWidth; ++i) s[i] = bits >> i & 1u ? s[i] : kNegInf;
}

// Whether the masks hide all keys [first, last) from all rows [row0, row1).
template <class T, class K>
inline bool mask_hides_block(const Sequence<T, K>& seq, std::int64_t row0, std::int64_t row1, std::int64_t first,
                             std::int64_t last) {
  const AttentionBlocks& blocks = seq.p->mask.blocks;
  if (blocks.data) {
    // Rows are token-major: those of a group of heads and of one block of queries lie side by side.
    bool hidden = true;
    const std::int64_t step = seq.group << blocks.shift_q, heads = blocks.stride_head == 0 ? 1 : seq.group;
    for (std::int64_t row = row0; row < row1 && hidden; row = (row / step + 1) * step)
      for (std::int64_t h = 0; h < heads && hidden; ++h)
        hidden = blocks_hide(blocks, seq.b, seq.head0 + h, seq.token(row), first, imin(last, seq.k_len));
    return hidden;
  }
  if (!seq.p->mask.data) return false;
  if (seq.p->is_paged()) {
    const std::int64_t before = seq.k_len - seq.q_len;  // these are shown
    if (first < before) return false;
    first -= before;
    last = imin<std::int64_t>(last - before, seq.q_len);
  }
  for (std::int64_t row = row0; row < row1; ++row) {
    const std::uint32_t* words = mask_row(seq, seq.head(row), seq.token(row));
    for (std::int64_t word = first / 32; word * 32 < last; ++word)
      if (words[word] != 0) return false;
  }
  return true;
}

// s[from, to) of one row, key `key0` at s[0]: raw dot products become logits (scale, softcap, bias, ALiBi, packed
// mask). from and to are multiples of the vector width; lanes at and behind k_len get any value, without a read of the
// bias there.
template <class T, class K>
inline void modify_scores(const Sequence<T, K>& seq, std::int64_t row, std::int64_t key0, float* s, int from, int to) {
  const AttentionParams& p = *seq.p;
  const std::int64_t i = seq.token(row), h = seq.head(row);
  const bool cap = p.softcap > 0;
  const Vec::Reg scale = Vec::set1(cap ? p.scale / p.softcap : p.scale);
  const Vec::Reg softcap = Vec::set1(p.softcap);
  const std::int64_t bias_offset = seq.b * p.bias.stride_batch + h * p.bias.stride_head + i * p.bias.stride_q;
  const Vec::Reg slope = Vec::set1(p.alibi_slopes ? -p.alibi_slopes[seq.b * p.stride_alibi_batch + h] : 0.0f);
  for (int x = from; x < to; x += Vec::kWidth) {
    const std::int64_t j = key0 + x;
    Vec::Reg t = Vec::mul(Vec::load(s + x), scale);
    if (cap) t = Vec::mul(tanh_lanes(t), softcap);
    if (p.bias.data) {
      const int n = static_cast<int>(imin<std::int64_t>(Vec::kWidth, imax<std::int64_t>(0, seq.k_len - j)));
      const std::int64_t at = bias_offset + j * p.bias.stride_k;
      Vec::Reg bias;
      if (p.bias.dtype == DType::kFloat32) {
        bias = bias_lanes(static_cast<const float*>(p.bias.data) + at, p.bias.stride_k, n);
      } else if (p.bias.dtype == DType::kFloat16) {
        bias = bias_lanes(static_cast<const Half*>(p.bias.data) + at, p.bias.stride_k, n);
      } else {
        bias = bias_lanes(static_cast<const BFloat*>(p.bias.data) + at, p.bias.stride_k, n);
      }
      t = Vec::add(t, bias);
    }
    if (p.alibi_slopes) t = add_alibi(p, slope, i + seq.k_len - seq.q_len - j, t);
    Vec::store(s + x, t);
    if (p.mask.data || p.mask.blocks.data) hide_scores(shown_keys(seq, h, i, j), s + x);
  }
}

// A bias of -inf hides a key as a packed mask does: its value must not be read.
template <class T, class K>
inline bool score_hides(const Sequence<T, K>& seq, std::int64_t row, std::int64_t j) {
  const AttentionBias& bias = seq.p->bias;
  if (seq.p->mask.blocks.data) {
    if ((shown_keys(seq, seq.head(row), seq.token(row), j) & 1u) == 0) return true;
  } else if (seq.p->mask.data) {
    const std::int64_t bit = seq.p->is_paged() ? j - (seq.k_len - seq.q_len) : j;
    if (bit >= 0 && (mask_row(seq, seq.head(row), seq.token(row))[bit / 32] >> (bit % 32) & 1u) == 0) return true;
  }
  if (!bias.data) return false;
  const std::int64_t at =
      seq.b * bias.stride_batch + seq.head(row) * bias.stride_head + seq.token(row) * bias.stride_q + j * bias.stride_k;
  switch (bias.dtype) {
    case DType::kFloat32: return static_cast<const float*>(bias.data)[at] == kNegInf;
    case DType::kFloat16: return static_cast<const Half*>(bias.data)[at].bits == 0xFC00;
    default: return static_cast<const BFloat*>(bias.data)[at].bits == 0xFF80;
  }
}

// Masked keys of [from, to) get -inf: those before `lo` and from `hi` on.
inline void mask_scores(float* s, int from, int lo, int hi, int to) {
  for (int x = from; x < lo; ++x) s[x] = kNegInf;
  for (int x = hi; x < to; ++x) s[x] = kNegInf;
}

// NaN is dropped here on purpose: it comes back through exp2 into the sum.
inline float row_max(const float* s, int from, int to) {
  Vec::Reg a = Vec::set1(kNegInf), b = a;
  int x = from;
  for (; x + 2 * Vec::kWidth <= to; x += 2 * Vec::kWidth) {
    a = Vec::max(Vec::load(s + x), a);
    b = Vec::max(Vec::load(s + x + Vec::kWidth), b);
  }
  if (x < to) a = Vec::max(Vec::load(s + x), a);
  return Vec::max_lane(Vec::max(a, b));
}

// The weight of something seen is never 0, however small: an infinite value behind it stays infinite instead of turning
// NaN.
constexpr float kLeastWeight = 0x1p-126f;

inline float exp2_weight(float x) {
  float lanes[Vec::kWidth];
  Vec::store(lanes, Vec::exp2<6>(Vec::set1(x)));
  return imax(lanes[0], kLeastWeight);  // NaN comes through
}

// Exponents are fma(s, factor, -reference). That leaves the rounding of s * factor at the maximum itself as a rest,
// which is nothing for usual logits but overflows for those of 1e30: from such a row the reference is taken away first.
// Then no finite logit becomes infinite, not even those of a row of -FLT_MAX, which is what masks are made of.
struct Exponent {
  float factor, reference;
};
inline Exponent exponent_of(float* s, int from, int to, float factor, float reference) {
  const float scaled = reference * factor;
  if (__builtin_fabsf(scaled) < 0x1p20f) return {factor, scaled};  // a rest below 2^-4
  for (int x = from; x < to; x += Vec::kWidth) Vec::store(s + x, Vec::sub(Vec::load(s + x), Vec::set1(reference)));
  return {factor, 0.0f};
}

// The state of a row moves on to a new maximum (both in units of the score buffer): what it had so far counts `alpha`
// times, and exponents are taken relative to the result. Minus infinity stands for "nothing seen": then 0 serves as the
// reference.
inline float advance_max(float new_max, float* m, float* alpha, float factor) {
  const float old = *m;
  if (new_max > old) *m = new_max;
  const float reference = *m == kNegInf ? 0.0f : *m;
  *alpha = old == *m ? 1.0f : exp2_weight((old - reference) * factor);
  return reference;
}

// out = o / l with the sink in the denominator; lse = m + ln(l), m in units of the score buffer.
template <class T, class K>
inline void finish_row(const Sequence<T, K>& seq, std::int64_t row, const float* o, float m, float l) {
  const AttentionParams& p = *seq.p;
  float factor = 1.0f;
  m *= score_unit(p);
  if (p.sinks) {
    const float sink = p.sinks[seq.head(row)];
    const float top = sink > m ? sink : m;
    if (top != kNegInf) {
      factor = exp2_weight((m - top) * kLog2E);
      l = l * factor + (sink == kNegInf ? 0.0f : exp2_weight((sink - top) * kLog2E));
      m = top;
    }
  }
  const bool empty = l == 0.0f;  // no key seen: o is 0
  const Vec::Reg inv = Vec::set1(empty ? 0.0f : factor / l);
  T* out = seq.out_row(row);
  const int d = static_cast<int>(p.head_dim_v);
  for (int x = 0; x < d; x += Vec::kWidth) {
    Vec::store_first(out + x, empty ? Vec::zero() : Vec::mul(Vec::load(o + x), inv), imin(Vec::kWidth, d - x));
  }
  if (float* lse = seq.lse(row)) *lse = empty ? kNegInf : static_cast<float>(m + __builtin_log(l));
}

// Tasks: one block of rows of one sequence and kv head each; long ones (late rows under a causal mask) first.
struct TaskGrid {
  std::int64_t rows_per_task, num_tasks;
  const std::int64_t* first_task;  // [batch + 1] when lengths vary, else null
};

inline std::int64_t blocks_of(const AttentionParams& p, std::int64_t q_len, std::int64_t rows_per_task) {
  return ceil_div(q_len * (p.heads_q / p.heads_kv), rows_per_task);
}

// rows_per_task: as many strips as `most`, but enough tasks that the threads finish together.
inline TaskGrid make_grid(const AttentionParams& p, int strip, int least, int most, int num_threads,
                          std::int64_t* first_task) {
  TaskGrid g;
  const std::int64_t group = p.heads_q / p.heads_kv;
  const std::int64_t total = p.cu_seqlens_q.data ? p.total_q : p.batch * p.seq_q;
  const std::int64_t strips = ceil_div(total * group * p.heads_kv, strip);
  const std::int64_t fair = strips / (std::int64_t{8} * num_threads);
  g.rows_per_task = strip * imax<std::int64_t>(least, imin<std::int64_t>(most, fair));
  g.first_task = nullptr;
  if (!p.cu_seqlens_q.data) {
    g.num_tasks = p.batch * p.heads_kv * blocks_of(p, p.seq_q, g.rows_per_task);
    return g;
  }
  std::int64_t n = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    first_task[b] = n;
    n += p.heads_kv * blocks_of(p, query_length(p, b), g.rows_per_task);
  }
  first_task[p.batch] = n;
  g.first_task = first_task;
  g.num_tasks = n;
  return g;
}

struct Task {
  std::int64_t b, head_kv, block;
};

inline Task find_task(const AttentionParams& p, const TaskGrid& g, std::int64_t t) {
  if (!g.first_task) {
    const std::int64_t pairs = p.batch * p.heads_kv, blocks = g.num_tasks / pairs;
    return {t % pairs / p.heads_kv, t % p.heads_kv, blocks - 1 - t / pairs};
  }
  std::int64_t lo = 0, hi = p.batch;  // the last b with first_task[b] <= t
  while (hi - lo > 1) {
    const std::int64_t mid = lo + (hi - lo) / 2;
    (g.first_task[mid] <= t ? lo : hi) = mid;
  }
  const std::int64_t local = t - g.first_task[lo];
  const std::int64_t blocks = (g.first_task[lo + 1] - g.first_task[lo]) / p.heads_kv;
  return {lo, local % p.heads_kv, blocks - 1 - local / p.heads_kv};
}

// Hands out pieces of one allocation, each on its own cache line.
struct Arena {
  char* at;
  template <class U>
  U* take(std::int64_t count) {
    U* result = reinterpret_cast<U*>(at);
    at += round_up(count * static_cast<std::int64_t>(sizeof(U)), 64);
    return result;
  }
};

}  // namespace
}  // namespace flashkernel::cpu
