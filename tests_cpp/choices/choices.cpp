// Which row serves which call, and by which plan, on four simulated GPUs: some 320,000 calls, recorded when the choice
// followed priorities and refusals (golden.inc), and made again by costs. A change here is a change of what users run:
// time both rows on a GPU, then write the new record with FK_WRITE_CHOICES=<file>.
// Needs the CUDA table, whose functions the emulated kernels bring along; nothing is launched.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <tuple>

#include "choices/grid.hpp"
#include "choices/text.hpp"
#include "cuda/arithmetic.hpp"
#include "cuda/host/row_plan.hpp"
#include "hopper_devices.hpp"
#include "ops/select.hpp"

namespace flashkernel::choices {
namespace {

struct Record {
  int capability;
  const char* op;
  const char* kernel;
  int calls;
  std::uint64_t hash;  // FNV-1a of the numbers of these calls, and of what their plans say
};
constexpr Record kGolden[] = {
#include "choices/golden.inc"
};

using Key = std::tuple<int, std::string, std::string>;
struct Seen {
  int calls = 0;
  std::uint64_t hash = 0xcbf29ce484222325ull;
};

class Recorder {
 public:
  explicit Recorder(const DeviceFacts& facts, std::map<Key, Seen>& seen) : facts_(facts), seen_(seen) {}

  template <class Params>
  void operator()(const Params& params) {
    const Choice<Params> choice = choose(params, DeviceType::kCuda, facts_);
    if (choice.row != cheapest(params)) ++skipped_;
    std::string kernel = "none", said = std::to_string(number_[Params::kOp]++);
    if (choice.row) {
      kernel = choice.row->state.name;
      if (says_more(kernel)) said += detail_text(params, kernel, make_plan(choice, params, facts_));
    }
    Seen& seen = seen_[{facts_.compute_capability, Params::kOp, kernel}];
    ++seen.calls;
    for (const char c : said + "\n") seen.hash = (seen.hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  }

  ~Recorder() { EXPECT_EQ(skipped_, 0) << "calls whose cheapest row was left to another one"; }

 private:
  // By the rule alone, without what `choose` saves itself.
  template <class Params>
  const typename OpTable<Params>::Row* cheapest(const Params& params) const {
    const typename OpTable<Params>::Row* best = nullptr;
    float least = 0;
    for (auto& row : OpTable<Params>::instance()) {
      if (row.state.device != DeviceType::kCuda || refusal<Params>(row, params, facts_)) continue;
      const float cost = row.entry->cost_us(params, facts_);
      if (!best || cost < least) best = &row, least = cost;
    }
    return best;
  }

  const DeviceFacts& facts_;
  std::map<Key, Seen>& seen_;
  int skipped_ = 0;
  std::map<std::string, int> number_;
};

std::map<Key, Seen> record() {
  std::map<Key, Seen> seen;
  struct Gpu {
    int capability, num_sms, shared_kilobytes;
  };
  for (const Gpu& gpu : {Gpu{75, 40, 64}, {80, 108, 163}, {86, 84, 99}, {90, 132, 227}}) {
    DeviceFacts facts;
    facts.compute_capability = gpu.capability;
    facts.num_sms = gpu.num_sms;
    facts.max_shared_bytes_per_block = gpu.shared_kilobytes * 1024;
    facts.clusters = &cuda::sm90a::kH200.clusters;
    Recorder recorder(facts, seen);
    each_decode(recorder);
    each_attention(8000, recorder);
    each_attention_backward(4000, recorder);
    each_linear(recorder);
    each_linear_backward(recorder);
    each_norm(recorder);
    each_norm_backward(recorder);
    each_softmax(recorder);
    each_softmax_backward(recorder);
  }
  return seen;
}

TEST(Choices, AreThoseThatWereRecorded) {
  const std::map<Key, Seen> seen = record();
  if (const char* const path = std::getenv("FK_WRITE_CHOICES")) {
    std::FILE* const file = std::fopen(path, "w");
    ASSERT_NE(file, nullptr) << path;
    for (const auto& [key, of] : seen)
      std::fprintf(file, "{%d, \"%s\", \"%s\", %d, 0x%016llxull},\n", std::get<0>(key), std::get<1>(key).c_str(),
                   std::get<2>(key).c_str(), of.calls, static_cast<unsigned long long>(of.hash));
    std::fclose(file);
  }
  std::size_t found = 0;
  for (const Record& golden : kGolden) {
    SCOPED_TRACE(std::string(golden.kernel) + " on " + std::to_string(golden.capability));
    const auto at = seen.find({golden.capability, golden.op, golden.kernel});
    ASSERT_NE(at, seen.end()) << "serves no call of the grid any more";
    ++found;
    EXPECT_EQ(at->second.calls, golden.calls);
    EXPECT_EQ(at->second.hash, golden.hash) << "other calls, or other plans";
  }
  EXPECT_EQ(found, seen.size()) << "a row serves calls that no record knows";
}

TEST(DecodeClusters, ThresholdsAreWhereTheyAreNamed) {
  using namespace cuda::sm90a;
  const auto is_for = [](std::int64_t batch, std::int64_t keys, int parts, int tiles, int blocks) {
    AttentionParams p;
    p.batch = batch, p.heads_kv = 1, p.seq_k = keys / batch;
    ClusterPlan plan;
    plan.parts = parts, plan.tiles = tiles, plan.blocks = blocks;
    return is_for_clusters(p, plan, 132);
  };
  EXPECT_TRUE(is_for(2, kMostKeysOfParts, 2, 1, 64));
  EXPECT_FALSE(is_for(2, kMostKeysOfParts + 2, 2, 1, 64));
  EXPECT_TRUE(is_for(1, kMostKeysOfOne, 2, 1, 64));
  EXPECT_FALSE(is_for(1, kMostKeysOfOne + 1, 2, 1, 64));
  EXPECT_TRUE(is_for(2, kMostKeysOfTiles, 2, 2, 64));
  EXPECT_FALSE(is_for(2, kMostKeysOfTiles + 2, 2, 2, 64));
  EXPECT_TRUE(is_for(2, kMostKeysOfOneTile, 1, 2, 64));
  EXPECT_FALSE(is_for(2, kMostKeysOfOneTile + 2, 1, 2, 64));
  EXPECT_TRUE(is_for(1, 1 << 28, 1, 1, 53));  // two multiprocessors in five
  EXPECT_TRUE(is_for(1, 52 * kMostKeysOfFewBlocks, 1, 1, 52));
  EXPECT_FALSE(is_for(1, 52 * kMostKeysOfFewBlocks + 1, 1, 1, 52));
}

DeviceFacts h200() {
  DeviceFacts facts;
  facts.compute_capability = 90;
  facts.num_sms = 132;
  facts.max_shared_bytes_per_block = 227 * 1024;
  return facts;
}

NormParams rms_norm_of(std::int64_t rows, std::int64_t features, bool residual) {
  NormParams p;
  p.dtype = DType::kFloat16;
  p.device = Device::cuda(0);
  p.kind = NormKind::kRmsNorm;
  p.rows = rows, p.features = features;
  p.x = p.out = address();
  if (residual) p.residual = p.residual_out = address();
  p.stride_x_row = p.stride_out_row = p.stride_residual_row = p.stride_residual_out_row = features;
  return p;
}

/// The plan of the row that serves a call on an H200.
template <class Params>
cuda::BlockRows<Params> block_rows(const Params& p) {
  DeviceFacts facts = h200();
  return make_plan(choose(p, DeviceType::kCuda, facts), p, facts).template as<cuda::BlockRows<Params>>();
}

TEST(Float8Attention, KernelsThatWidenGoFirst) {
  for (const std::int64_t dim : {64, 128, 256})
    for (const std::int64_t seq : {128, 16384}) {
      Float8AttentionParams p;
      AttentionParams& a = p.attention;
      a.dtype = a.dtype_q = DType::kFloat8E4M3;
      a.device = Device::cuda(0);
      a.batch = 2, a.heads_q = a.heads_kv = 8, a.seq_q = a.seq_k = seq, a.head_dim = a.head_dim_v = dim;
      a.q = a.k = a.v = a.out = address();
      a.stride_q_token = a.stride_k_token = a.stride_v_token = a.stride_out_token = 8 * dim;
      a.stride_q_head = a.stride_k_head = a.stride_v_head = a.stride_out_head = dim;
      a.stride_q_batch = a.stride_k_batch = a.stride_v_batch = a.stride_out_batch = seq * 8 * dim;
      DeviceFacts facts = h200();
      const auto choice = choose(p, DeviceType::kCuda, facts);
      ASSERT_NE(choice.row, nullptr);
      const std::string name = choice.row->state.name;
      EXPECT_NE(name.find("sm90a/widened"), std::string::npos) << name;
    }
}

TEST(RowPlans, ANormsPlanHasTheBlockOfItsLaunch) {
  const auto plan_of = [](std::int64_t rows, std::int64_t features, bool residual) {
    return block_rows(rms_norm_of(rows, features, residual));
  };
  const auto expect = [](const cuda::BlockRows<NormParams>& plan, int threads, int rows) {
    EXPECT_NE(plan.kernel, nullptr);
    EXPECT_EQ(plan.threads, threads);
    EXPECT_EQ(plan.rows, rows);
  };
  expect(plan_of(1, 1024, false), 128, 1);      // few rows: a vector a thread
  expect(plan_of(4096, 1024, false), 32, 4);    // many: a warp a row
  expect(plan_of(4096, 4096, false), 256, 1);   // two vectors a thread
  expect(plan_of(4096, 4096, true), 512, 1);    // a residual: one
  expect(plan_of(4096, 16384, false), 512, 1);  // four
  expect(plan_of(4096, 100, false), 256, 1);    // no whole vectors: walked
  EXPECT_NE(plan_of(4096, 4096, false).kernel, plan_of(4096, 4096, true).kernel);
}

DeviceFacts h200_in_mode() {
  DeviceFacts facts = h200();
  facts.clusters = &cuda::sm90a::kH200.clusters;
  return in_mode(facts);
}

/// The arithmetic that the invariant mode gives a call on an H200.
template <class Params>
std::string row_in_mode(const Params& p) {
  const Choice<Params> choice = choose_invariant(p, DeviceType::kCuda, h200_in_mode());
  return choice.row ? choice.row->state.arithmetic : "none";
}

/// The same of a norm or of softmax, and what decides in which order a row is added.
template <class Params>
std::string cut_in_mode(const Params& p) {
  const DeviceFacts facts = h200_in_mode();
  const Choice<Params> choice = choose_invariant(p, DeviceType::kCuda, facts);
  if (!choice.row) return "none";
  const Plan plan = make_plan(choice, p, facts);
  const std::string arithmetic = choice.row->state.arithmetic;
  if (arithmetic == cuda::arithmetic::kClusterOfARow) {
    const auto& rows = plan.as<cuda::ClusterRows>();
    return arithmetic + numbers({rows.blocks, rows.share});
  }
  return arithmetic + numbers({reinterpret_cast<std::intptr_t>(plan.as<cuda::BlockRows<Params>>().kernel)});
}

TEST(InvariantMode, ANormsPlanIsThatOfAnyNumberOfRows) {
  for (const std::int64_t features : {64, 777, 1024, 4096, 9000, 40000})
    for (const bool residual : {false, true}) {
      const std::string first = cut_in_mode(rms_norm_of(1, features, residual));
      for (const std::int64_t rows : {2, 500, 100000})
        EXPECT_EQ(cut_in_mode(rms_norm_of(rows, features, residual)), first) << rows << " rows of " << features;
    }
}

TEST(InvariantMode, ASoftmaxsPlanIsThatOfAnyNumberOfRows) {
  for (const std::int64_t columns : {33, 512, 4096, 16384, 32000, 32768, 128256, 131072, 128257, 151936}) {
    std::string first;
    for (const std::int64_t rows : {1, 2, 500, 100000}) {
      SoftmaxParams p;
      p.dtype = DType::kFloat32;
      p.device = Device::cuda(0);
      p.ndim = 1;
      p.shape[0] = p.rows = rows;
      p.columns = columns;
      p.x = p.out = address();
      p.stride_x[0] = p.stride_out[0] = columns;
      p.stride_x_column = p.stride_out_column = 1;
      if (rows == 1) first = cut_in_mode(p);
      EXPECT_EQ(cut_in_mode(p), first) << rows << " rows of " << columns;
    }
    const bool in_clusters = columns >= 32768 && columns <= 131072 && columns % 4 == 0;
    EXPECT_EQ(first.find(cuda::arithmetic::kClusterOfARow) != first.npos, in_clusters) << first;
    EXPECT_NE(first, "none");
  }
}

TEST(InvariantMode, LinearHasOneArithmeticForAnyNumberOfRows) {
  for (const auto& [dtype, in, out, arithmetic] : {std::tuple{DType::kBFloat16, 4096, 4096, "tiles_whole_k_sm90a"},
                                                   std::tuple{DType::kFloat16, 64, 8, "tiles_whole_k_sm90a"},
                                                   std::tuple{DType::kFloat16, 4096, 50257, "tiles_sm80"},
                                                   std::tuple{DType::kFloat32, 4096, 4096, "tiles_sm80_f32"}})
    for (const std::int64_t rows : {1, 8, 64, 500, 8192}) {
      LinearParams p;
      p.dtype = dtype;
      p.device = Device::cuda(0);
      p.rows = rows, p.in_features = in, p.out_features = out;
      p.x = p.weight = address();
      p.out = address();
      p.stride_x_row = p.stride_weight_out = in;
      p.stride_weight_in = 1;
      p.stride_out_row = out;
      EXPECT_EQ(row_in_mode(p), arithmetic) << rows << " rows";
    }
}

TEST(InvariantMode, LinearOfFewRowsRunsAKernelOfFewRows) {
  const auto kernel = [](std::int64_t rows, std::int64_t in, std::int64_t out, bool along_in = true) -> std::string {
    LinearParams p;
    p.dtype = DType::kBFloat16;
    p.device = Device::cuda(0);
    p.rows = rows, p.in_features = in, p.out_features = out;
    p.x = p.weight = address();
    p.out = address();
    p.stride_x_row = in;
    p.stride_weight_out = along_in ? in : 1, p.stride_weight_in = along_in ? 1 : out;
    p.stride_out_row = out;
    const std::string name = choose_invariant(p, DeviceType::kCuda, h200_in_mode()).row->state.name;
    return name.substr(std::string("linear/cuda/sm90a/bf16/").size());
  };
  EXPECT_EQ(kernel(1, 4096, 4096), "few_rows/in_order");
  EXPECT_EQ(kernel(32, 14336, 1024), "few_rows/in_order");
  EXPECT_EQ(kernel(64, 14336, 1024), "few_rows/in_order");
  EXPECT_EQ(kernel(64, 4096, 4096), "few_rows/blocks_in_order");
  EXPECT_EQ(kernel(1, 4104, 4096), "few_rows/blocks_in_order");
  EXPECT_EQ(kernel(65, 4096, 4096).substr(0, 6), "large/");
  EXPECT_EQ(kernel(1, 4096, 4096, false).substr(0, 6), "large/");
}

TEST(InvariantMode, WalkedRowsOffVectorsAreRefused) {
  // Rows of whole vectors with a gap behind them: the first one begins at a multiple of 16 bytes, the second does not,
  // and alone each would be walked in another order.
  const auto softmax = [](std::int64_t columns, std::int64_t gap) {
    SoftmaxParams p;
    p.dtype = DType::kFloat32;
    p.device = Device::cuda(0);
    p.ndim = 1;
    p.shape[0] = p.rows = 2;
    p.columns = columns;
    p.x = p.out = address();
    p.stride_x[0] = columns + gap, p.stride_out[0] = columns;
    return choose_invariant(p, DeviceType::kCuda, h200_in_mode()).row != nullptr;
  };
  const auto norm = [](std::int64_t features, std::int64_t gap) {
    NormParams p;
    p.dtype = DType::kFloat32;
    p.device = Device::cuda(0);
    p.kind = NormKind::kRmsNorm;
    p.rows = 2;
    p.features = features;
    p.x = p.out = address();
    p.stride_x_row = features + gap, p.stride_out_row = features;
    return choose_invariant(p, DeviceType::kCuda, h200_in_mode()).row != nullptr;
  };
  EXPECT_TRUE(softmax(300000, 0) && softmax(300000, 4) && softmax(300001, 0) && softmax(300001, 2));
  EXPECT_FALSE(softmax(300000, 2));
  EXPECT_TRUE(norm(40000, 0) && norm(40000, 4) && norm(40001, 0) && norm(40001, 2));
  EXPECT_FALSE(norm(40000, 2));
}

TEST(RowPlans, ASoftmaxsPlanHasTheBlockOfItsLaunch) {
  const auto threads_of = [](std::int64_t rows, std::int64_t columns) {
    SoftmaxParams p;
    p.dtype = DType::kFloat32;
    p.device = Device::cuda(0);
    p.ndim = 1;
    p.shape[0] = p.rows = rows;
    p.columns = columns;
    p.x = p.out = address();
    p.stride_x[0] = p.stride_out[0] = columns;
    return block_rows(p).threads;
  };
  EXPECT_EQ(threads_of(1, 512), 128);
  EXPECT_EQ(threads_of(4096, 512), 32);
  EXPECT_EQ(threads_of(4096, 16384), 512);  // eight vectors a thread
  EXPECT_EQ(threads_of(4096, 33), 128);
}

}  // namespace
}  // namespace flashkernel::choices
