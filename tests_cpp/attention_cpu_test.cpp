// Every CPU attention kernel against the scalar oracle on random calls: dense, variable-length and paged, all options
// mixed, with NaN and Inf in every place that must not be read, and the promises about repeats, batch mates and
// threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/cpu_features.hpp"
#include "core/float_types.hpp"
#include "core/thread_pool.hpp"
#include "flashkernel/device.hpp"
#include "ops/attention_params.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

using Random = std::mt19937;

int pick(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }
bool chance(Random& random, int one_in) { return pick(random, 1, one_in) == 1; }

// Values of any floating dtype.
struct Buffer {
  DType dtype = DType::kFloat32;
  std::vector<char> bytes;
  void resize(DType type, std::int64_t count, float fill) {
    dtype = type;
    bytes.resize(static_cast<std::size_t>(count + 1) * dtype_bytes(type));
    for (std::int64_t i = 0; i <= count; ++i) set(i, fill);
  }
  void set(std::int64_t i, float x) {
    visit_floating(
        dtype, [&](auto zero) { reinterpret_cast<decltype(zero)*>(bytes.data())[i] = from_float<decltype(zero)>(x); });
  }
  float get(std::int64_t i) const {
    float x = 0;
    visit_floating(dtype, [&](auto zero) { x = to_float(reinterpret_cast<const decltype(zero)*>(bytes.data())[i]); });
    return x;
  }
};

// One random call with the memory behind it.
struct Call {
  AttentionParams p;
  Buffer q, k, v, out, bias;
  std::vector<float> lse, slopes, sinks;
  std::vector<std::int64_t> cu_q, lens64;
  std::vector<std::int32_t> cu_k, table;
  std::string text;
  float spread = 1.0f;
};

Call make_call(Random& random, DType dtype, int big) {
  Call c;
  AttentionParams& p = c.p;
  p.dtype = p.dtype_q = dtype;
  p.batch = pick(random, 1, 3);
  p.heads_kv = pick(random, 1, 3);
  static constexpr int kGroups[] = {1, 1, 2, 3, 4, 5, 7};
  p.heads_q = p.heads_kv * kGroups[pick(random, 0, 6)];
  static constexpr int kDims[] = {1, 8, 16, 32, 33, 40, 64, 64, 64, 80, 100, 128, 128, 192, 256};
  p.head_dim = kDims[pick(random, 0, 14)];
  p.head_dim_v = chance(random, 3) ? kDims[pick(random, 0, 14)] : p.head_dim;
  const auto length = [&](int top) {
    return chance(random, 12) ? 0 : chance(random, 3) ? pick(random, 1, 8) : pick(random, 1, top);
  };
  const int layout = pick(random, 0, 3);  // dense, variable-length, paged, paged with variable queries
  const bool varlen_q = layout == 1 || layout == 3;
  std::normal_distribution<float> normal;
  c.spread = chance(random, 6) ? 30.0f : 1.0f;

  std::vector<std::int64_t> q_len, k_len;
  const int top_q = chance(random, 2) ? 6 : big, top_k = chance(random, 8) ? 5 * big : big;
  const std::int64_t same_q = length(top_q), same_k = length(top_k);
  for (int b = 0; b < p.batch; ++b) {
    q_len.push_back(varlen_q ? length(top_q) : same_q);
    k_len.push_back(layout == 0 ? same_k : length(top_k));
  }
  p.seq_q = *std::max_element(q_len.begin(), q_len.end());
  p.seq_k = *std::max_element(k_len.begin(), k_len.end());
  c.cu_q = {0};
  c.cu_k = {0};
  for (int b = 0; b < p.batch; ++b) {
    c.cu_q.push_back(c.cu_q.back() + q_len[b]);
    c.cu_k.push_back(static_cast<std::int32_t>(c.cu_k.back() + k_len[b]));
  }
  p.total_q = c.cu_q.back();

  // Strides: [batch, seq, heads, dim] or [batch, heads, seq, dim], each with its own padding.
  const auto lay_out = [&](std::int64_t heads, std::int64_t seq, std::int64_t dim, std::int64_t& batch,
                           std::int64_t& head, std::int64_t& token) {
    const std::int64_t pad = pick(random, 0, 2) * 3;
    if (chance(random, 2)) {
      head = dim + pad;
      token = heads * head + pick(random, 0, 1) * 5;
      batch = std::max<std::int64_t>(seq, 1) * token;
    } else {
      token = dim + pad;
      head = std::max<std::int64_t>(seq, 1) * token + pick(random, 0, 1) * 7;
      batch = heads * head;
    }
    return batch;
  };
  const std::int64_t q_seq = varlen_q ? p.total_q : p.seq_q, q_batches = varlen_q ? 1 : p.batch;
  c.q.resize(dtype,
             q_batches * lay_out(p.heads_q, q_seq, p.head_dim, p.stride_q_batch, p.stride_q_head, p.stride_q_token),
             kNan);
  c.out.resize(
      dtype,
      q_batches * lay_out(p.heads_q, q_seq, p.head_dim_v, p.stride_out_batch, p.stride_out_head, p.stride_out_token),
      kNan);
  c.lse.assign(static_cast<std::size_t>(q_batches * p.heads_q * std::max<std::int64_t>(q_seq, 1)), kNan);
  p.stride_lse_token = 1;
  p.stride_lse_head = q_seq;
  p.stride_lse_batch = p.heads_q * q_seq;
  if (varlen_q) p.cu_seqlens_q = {c.cu_q.data(), true};

  std::int64_t k_seq = p.seq_k, k_batches = p.batch;
  if (layout == 1) {
    k_seq = c.cu_k.back();
    k_batches = 1;
    p.cu_seqlens_k = {c.cu_k.data(), false};
    p.total_k = k_seq;
  } else if (layout >= 2) {
    p.page_size = 16 << pick(random, 0, 2);
    p.max_pages = (p.seq_k + p.page_size - 1) / p.page_size + 1;
    p.num_pages = p.batch * p.max_pages + 2;
    k_seq = p.page_size;
    k_batches = p.num_pages;
    p.stride_block_table = p.max_pages + 1;
    c.table.assign(static_cast<std::size_t>(p.batch * p.stride_block_table), -1);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(p.num_pages));
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i);
    std::shuffle(ids.begin(), ids.end(), random);
    std::size_t next = 0;
    for (std::int64_t b = 0; b < p.batch; ++b) {
      for (std::int64_t j = 0; j * p.page_size < k_len[b]; ++j) c.table[b * p.stride_block_table + j] = ids[next++];
    }
    p.block_table = c.table.data();
    c.lens64.assign(k_len.begin(), k_len.end());
    p.seq_lens = {c.lens64.data(), true};
  }
  // Everything starts as NaN; only what some call may read becomes a number.
  c.k.resize(dtype,
             k_batches * lay_out(p.heads_kv, k_seq, p.head_dim, p.stride_k_batch, p.stride_k_head, p.stride_k_token),
             kNan);
  c.v.resize(dtype,
             k_batches * lay_out(p.heads_kv, k_seq, p.head_dim_v, p.stride_v_batch, p.stride_v_head, p.stride_v_token),
             kNan);

  p.scale = chance(random, 8) ? -0.3f : 1.0f / std::sqrt(static_cast<float>(p.head_dim));
  if (chance(random, 4)) p.softcap = chance(random, 2) ? 2.0f : 50.0f;
  if (chance(random, 2)) {
    p.causal = true;
    p.window_right = 0;
  } else if (chance(random, 4)) {
    p.window_right = pick(random, 0, 40);
  }
  if (chance(random, 3)) p.window_left = pick(random, 0, chance(random, 2) ? 10 : 300);
  if (chance(random, 4)) {
    p.stride_alibi_batch = chance(random, 2) ? p.heads_q : 0;
    for (std::int64_t i = 0; i < p.batch * p.heads_q; ++i) c.slopes.push_back(0.05f * static_cast<float>(i + 1));
    p.alibi_slopes = c.slopes.data();
  }
  if (chance(random, 4)) {
    for (std::int64_t i = 0; i < p.heads_q; ++i) c.sinks.push_back(normal(random));
    if (chance(random, 4)) c.sinks[0] = -kInf;
    p.sinks = c.sinks.data();
  }
  if (layout == 0 && chance(random, 3)) {
    AttentionBias& bias = p.bias;
    bias.dtype = chance(random, 2) ? DType::kFloat32 : dtype;
    std::int64_t at = 1;
    if (!chance(random, 4)) {
      bias.stride_k = chance(random, 6) ? 2 : 1;
      at = p.seq_k * bias.stride_k + 3;
    }
    if (!chance(random, 3)) {
      bias.stride_q = at;
      at *= std::max<std::int64_t>(p.seq_q, 1);
    }
    if (!chance(random, 3)) {
      bias.stride_head = at;
      at *= p.heads_q;
    }
    if (!chance(random, 3)) {
      bias.stride_batch = at;
      at *= p.batch;
    }
    c.bias.resize(bias.dtype, at, kNan);
    for (std::int64_t i = 0; i < at; ++i) c.bias.set(i, chance(random, 9) ? -kInf : normal(random));
    if (!bias.stride_k) c.bias.set(0, 0.5f);
    bias.data = c.bias.bytes.data();
  }

  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t i = 0; i < q_len[b]; ++i)
      for (std::int64_t h = 0; h < p.heads_q; ++h)
        for (std::int64_t x = 0; x < p.head_dim; ++x) c.q.set(p.q_offset(b, h, i) + x, normal(random) * c.spread);
    // Keys that no query sees stay NaN.
    const std::int64_t first = q_len[b] ? p.first_key(0, q_len[b], k_len[b]) : k_len[b];
    const std::int64_t last = q_len[b] ? p.last_key(q_len[b] - 1, q_len[b], k_len[b]) : 0;
    for (std::int64_t j = first; j < last; ++j)
      for (std::int64_t h = 0; h < p.heads_kv; ++h) {
        for (std::int64_t x = 0; x < p.head_dim; ++x) c.k.set(p.k_offset(b, h, j) + x, normal(random));
        for (std::int64_t x = 0; x < p.head_dim_v; ++x) c.v.set(p.v_offset(b, h, j) + x, normal(random));
      }
    // Now and then a NaN or an infinity that some rows see and others do not.
    if (last > first && chance(random, 4)) {
      for (int n = pick(random, 1, 3); n > 0; --n) {
        const std::int64_t j = pick(random, static_cast<int>(first), static_cast<int>(last) - 1),
                           h = pick(random, 0, static_cast<int>(p.heads_kv) - 1);
        const bool key = chance(random, 3);
        const std::int64_t x = pick(random, 0, static_cast<int>(key ? p.head_dim : p.head_dim_v) - 1);
        if (key) {
          c.k.set(p.k_offset(b, h, j) + x, kNan);
        } else {
          c.v.set(p.v_offset(b, h, j) + x, chance(random, 2) ? kNan : chance(random, 2) ? kInf : -kInf);
        }
      }
    }
  }
  p.q = c.q.bytes.data();
  p.k = c.k.bytes.data();
  p.v = c.v.bytes.data();
  p.out = c.out.bytes.data();
  p.lse = chance(random, 5) ? nullptr : c.lse.data();
  c.text = std::string(dtype_name(dtype)) + " layout " + std::to_string(layout) + " b" + std::to_string(p.batch) +
           " hq" + std::to_string(p.heads_q) + " hk" + std::to_string(p.heads_kv) + " sq" + std::to_string(p.seq_q) +
           " sk" + std::to_string(p.seq_k) + " d" + std::to_string(p.head_dim) + " dv" + std::to_string(p.head_dim_v) +
           " window " + std::to_string(p.window_left) + "," + std::to_string(p.window_right) + " cap " +
           std::to_string(p.softcap) + " scale " + std::to_string(p.scale) + (p.bias.data ? " bias" : "") +
           (p.sinks ? " sinks" : "") + (p.alibi_slopes ? " alibi" : "") + " page " + std::to_string(p.page_size) +
           " spread " + std::to_string(c.spread);
  return c;
}

void run(const KernelEntry<AttentionParams>& row, const AttentionParams& p) {
  const Plan plan = row.plan ? row.plan(p, facts_of(Device::cpu())) : Plan();
  const std::size_t bytes = plan.workspace_bytes;
  std::vector<char> workspace(bytes + 64, '\xFF');  // NaN bits: nothing may be taken from it unwritten
  row.launch(p, plan, workspace.data() + (64 - reinterpret_cast<std::uintptr_t>(workspace.data()) % 64) % 64, Stream{});
  for (std::size_t i = workspace.size() - 1; i < workspace.size() && i >= bytes + 64; --i)
    ASSERT_EQ(workspace[i], '\xFF');
}

const KernelEntry<AttentionParams>* find_row(const std::string& name) {
  for (const auto& row : cpu_kernels<AttentionParams>()) {
    if (name == row.name) return &row;
  }
  return nullptr;
}

class AttentionCpu : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    row_ = find_row(GetParam());
    if (!row_) GTEST_SKIP() << "not built";
    if ((available_cpu_features() & row_->cpu_features) != row_->cpu_features)
      GTEST_SKIP() << "this processor cannot run it";
  }
  const KernelEntry<AttentionParams>* row_ = nullptr;
};

void compare(Call& c, const KernelEntry<AttentionParams>& row) {
  const std::vector<char> out_poison = c.out.bytes;
  const std::vector<float> lse_poison = c.lse;
  run(*find_row("attention_fwd/cpu/scalar"), c.p);
  const Buffer expected = c.out;
  const std::vector<float> expected_lse = c.lse;
  c.out.bytes = out_poison;
  c.p.out = c.out.bytes.data();
  c.lse = lse_poison;
  if (c.p.lse) c.p.lse = c.lse.data();
  if (!row.supports(c.p)) return;
  run(row, c.p);

  // Rounding of the output, plus what rounding scores of this size does to a softmax.
  const double unit = c.p.dtype == DType::kFloat32 ? 1e-5 : c.p.dtype == DType::kFloat16 ? 1.2e-3 : 1e-2;
  const double scores = c.p.dtype == DType::kFloat32 ? 1e-4 : c.p.dtype == DType::kFloat16 ? 2e-4 : 1e-3;
  const bool large = c.spread > 1 || c.p.scale < 0;
  const double tolerance = unit + (large ? scores : 0.0),
               lse_tolerance = (c.p.dtype == DType::kFloat32 ? 2e-5 : 1e-4) * (large ? 5 : 1);
  const auto count = static_cast<std::int64_t>(expected.bytes.size() / dtype_bytes(c.p.dtype));
  for (std::int64_t i = 0; i < count; ++i) {
    const float want = expected.get(i), got = c.out.get(i);
    if (std::isnan(want) || std::isnan(got)) {
      ASSERT_TRUE(std::isnan(want) && std::isnan(got)) << c.text << " at " << i << ": " << got << ", expected " << want;
    } else if (std::isinf(want)) {
      ASSERT_EQ(want, got) << c.text << " at " << i;
    } else {
      ASSERT_NEAR(want, got, tolerance * std::max(1.0f, std::fabs(want))) << c.text << " at " << i;
    }
  }
  if (!c.p.lse) return;
  for (std::size_t i = 0; i < c.lse.size(); ++i) {
    const float want = expected_lse[i], got = c.lse[i];
    if (std::isnan(want) || std::isinf(want)) {
      ASSERT_EQ(std::isnan(want), std::isnan(got)) << c.text << " lse " << i << ": " << got << ", expected " << want;
      if (!std::isnan(want)) {
        ASSERT_EQ(want, got) << c.text << " lse " << i;
      }
    } else {
      ASSERT_NEAR(want, got, lse_tolerance * std::max(1.0f, std::fabs(want))) << c.text << " lse " << i;
    }
  }
}

TEST_P(AttentionCpu, MatchesTheOracleOnRandomCalls) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (unsigned seed = 0; seed < 120; ++seed) {
      Random random(seed * 3 + static_cast<unsigned>(dtype));
      Call c = make_call(random, dtype, seed < 100 ? 90 : 400);
      SCOPED_TRACE("seed " + std::to_string(seed));
      compare(c, *row_);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(AttentionCpu, RepeatsBitForBitAndForgetsItsThreads) {
  const int threads = num_workers();
  for (unsigned seed = 0; seed < 40; ++seed) {
    Random random(seed + 1000);
    Call c = make_call(random,
                       seed % 3 == 2 ? DType::kFloat16
                       : seed % 3    ? DType::kFloat32
                                     : DType::kBFloat16,
                       seed < 30 ? 200 : 1500);
    if (!row_->supports(c.p)) continue;
    run(*row_, c.p);
    const std::vector<char> first = c.out.bytes;
    for (const int n : {1, 2, 5}) {
      set_num_threads(n);
      run(*row_, c.p);
      ASSERT_EQ(std::memcmp(first.data(), c.out.bytes.data(), first.size()), 0)
          << c.text << " with " << n << " threads";
    }
    set_num_threads(threads);
  }
}

TEST_P(AttentionCpu, ForgetsItsBatchMates) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    Random random(seed + 2000);
    Call c = make_call(random, seed % 2 ? DType::kFloat32 : DType::kFloat16, 200);
    if (c.p.cu_seqlens_q || c.p.is_paged() || c.p.batch < 2 || !row_->supports(c.p)) continue;
    run(*row_, c.p);
    const std::vector<char> all = c.out.bytes;
    AttentionParams last = c.p;  // the last sequence alone
    const std::int64_t b = c.p.batch - 1, size = static_cast<std::int64_t>(dtype_bytes(c.p.dtype));
    last.batch = 1;
    last.q = c.q.bytes.data() + b * c.p.stride_q_batch * size;
    last.k = c.k.bytes.data() + b * c.p.stride_k_batch * size;
    last.v = c.v.bytes.data() + b * c.p.stride_v_batch * size;
    last.out = c.out.bytes.data() + b * c.p.stride_out_batch * size;
    if (last.lse) last.lse += b * c.p.stride_lse_batch;
    if (last.bias.data)
      last.bias.data =
          c.bias.bytes.data() + b * c.p.bias.stride_batch * static_cast<std::int64_t>(dtype_bytes(c.p.bias.dtype));
    if (last.alibi_slopes) last.alibi_slopes += b * c.p.stride_alibi_batch;
    run(*row_, last);
    ASSERT_EQ(std::memcmp(all.data(), c.out.bytes.data(), all.size()), 0) << c.text;
  }
}

// Logits of +-1e5, and inputs at the ends of their types' ranges, against the oracle.
TEST_P(AttentionCpu, SurvivesExtremeInputs) {
  for (const float factor : {300.0f, 1e-20f, 1e25f, 1e37f}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      Random random(7);
      Call c;
      do c = make_call(random, dtype, 90);
      while (c.p.seq_q < 20 || c.p.seq_k < 20 || c.p.bias.data);
      std::normal_distribution<float> normal;
      const auto count = [&](const Buffer& b) {
        return static_cast<std::int64_t>(b.bytes.size() / dtype_bytes(dtype));
      };
      c.p.softcap = 0;
      for (std::int64_t i = 0; i < count(c.q); ++i)
        c.q.set(i, std::round(normal(random) * 2) * (factor == 300.0f ? factor : factor));
      for (std::int64_t i = 0; i < count(c.k); ++i)
        c.k.set(i, std::round(normal(random) * 2) * (factor == 300.0f ? factor : 1 / factor));
      for (std::int64_t i = 0; i < count(c.v); ++i) c.v.set(i, normal(random));
      c.spread = 30.0f;
      compare(c, *row_);
      if (HasFatalFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttentionCpu,
                         testing::Values("attention_fwd/cpu/avx2", "attention_fwd/cpu/avx512", "attention_fwd/cpu/amx",
                                         "attention_fwd/cpu/amx_fp16"),
                         [](const auto& info) {
                           return std::string(info.param).substr(std::string(info.param).rfind('/') + 1);
                         });

}  // namespace
}  // namespace flashkernel
