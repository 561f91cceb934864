// The rule by which a kernel is chosen (ops/select.hpp), on a table of the test's own: least modelled cost among the
// rows that are allowed, run on the device and accept; the first of equal ones; preferred ones before all others. And
// plans: made once a call, for the row that runs, and handed to its launch.
#include <gtest/gtest.h>

#include "flashkernel/error.hpp"
#include "flashkernel/invariant.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

struct ToyParams {
  static constexpr const char* kOp = "toy";
  std::int64_t size = 0;
};
double work_of(const ToyParams& p) { return static_cast<double>(p.size); }

/// What the rows have seen.
struct Seen {
  int plans = 0, launches = 0;
  std::int64_t told = 0;
  void* workspace = nullptr;
};
Seen seen;

struct ToyDetail {
  std::int64_t words[8];
};

Verdict takes_any(const ToyParams&) { return Verdict::ok(); }
Verdict takes_even(const ToyParams& p) { return p.size % 2 == 0 ? Verdict::ok() : Verdict("needs an even size"); }

float grows(const ToyParams& p, const DeviceFacts&) { return 1.0f + static_cast<float>(p.size); }
float stays(const ToyParams&, const DeviceFacts&) { return 10.0f; }
float by_device(const ToyParams&, const DeviceFacts& facts) { return facts.num_sms > 100 ? 1.0f : 100.0f; }

Plan plan(const ToyParams& p, const DeviceFacts&) {
  ++seen.plans;
  ToyDetail detail{};
  detail.words[7] = 3 * p.size;
  return Plan::of(detail, static_cast<std::size_t>(p.size));
}
void launch(const ToyParams&, const Plan& plan, void* workspace, Stream) {
  ++seen.launches;
  seen.told = plan.as<ToyDetail>().words[7];
  seen.workspace = workspace;
}
void launch_nothing(const ToyParams&, const Plan&, void*, Stream) { ++seen.launches; }

}  // namespace

template <>
KernelTable<ToyParams> cpu_kernels() {
  static constexpr KernelEntry<ToyParams> rows[] = {
      {"toy/cpu/grows", DeviceType::kCpu, 0, 0, 0, "a", takes_even, grows, plan, launch},
      {"toy/cpu/stays", DeviceType::kCpu, 0, 0, 0, "a", takes_any, stays, nullptr, launch_nothing},
      invariant(KernelEntry<ToyParams>{"toy/cpu/stays_too", DeviceType::kCpu, 0, 0, 0, "b", takes_any, stays, nullptr,
                                       launch_nothing}),
      {"toy/cpu/future", DeviceType::kCpu, 0, 0, 1u << 31, "b", takes_any, by_device, nullptr, launch_nothing}};
  return {rows, 4};
}
template <>
KernelTable<ToyParams> cuda_kernels() {
  static constexpr KernelEntry<ToyParams> rows[] = {
      {"toy/cuda/old", DeviceType::kCuda, 75, 999, 0, "a", takes_any, stays, nullptr, launch_nothing},
      {"toy/cuda/wide", DeviceType::kCuda, 80, 999, 0, "b", takes_any, by_device, nullptr, launch_nothing},
      {"toy/cuda/new", DeviceType::kCuda, 90, 90, 0, "c", takes_even, grows, nullptr, launch_nothing}};
  return {rows, 3};
}

namespace {

std::string chosen(std::int64_t size, DeviceType device = DeviceType::kCpu, const DeviceFacts& facts = {}) {
  const Choice<ToyParams> choice = choose(ToyParams{size}, device, facts);
  return choice.row ? choice.row->state.name : "none";
}

class Selection : public ::testing::Test {
 protected:
  void SetUp() override { seen = {}; }
  void TearDown() override {
    for (auto& row : OpTable<ToyParams>::instance()) row.state.allowed = true, row.state.preferred = false;
    any_preferred = false;
  }
  static RowState& state(const std::string& name) {
    for (auto& row : OpTable<ToyParams>::instance())
      if (name == row.state.name) return row.state;
    throw InvalidArgument("no row " + name);
  }
};

TEST_F(Selection, TheLeastModelledCostRuns) {
  EXPECT_EQ(chosen(4), "toy/cpu/grows");
  EXPECT_EQ(chosen(8), "toy/cpu/grows");
  EXPECT_EQ(chosen(10), "toy/cpu/stays");
  EXPECT_EQ(chosen(3), "toy/cpu/stays");  // which would be slower, but may
}

TEST_F(Selection, OfEqualCostsTheFirstOfTheTableRuns) {
  EXPECT_EQ(chosen(3), "toy/cpu/stays");
  state("toy/cpu/stays").allowed = false;
  EXPECT_EQ(chosen(3), "toy/cpu/stays_too");
}

TEST_F(Selection, TheInvariantModeChoosesAmongRowsOfOneArithmetic) {
  const auto chosen_in_mode = [](std::int64_t size, DeviceType device, const DeviceFacts& facts) {
    const Choice<ToyParams> choice = choose_invariant(ToyParams{size}, device, facts);
    return std::string(choice.row ? choice.row->state.name : "none");
  };
  DeviceFacts facts;
  for (const std::int64_t size : {2, 3, 8, 1000}) {  // "grows" would cost less for some
    EXPECT_EQ(chosen_in_mode(size, DeviceType::kCpu, facts), "toy/cpu/stays_too");
    EXPECT_STREQ(invariant_arithmetic(ToyParams{size}, DeviceType::kCpu, facts), "b");
  }
  facts.num_sms = 132;
  facts.cpu_features = 1u << 31;
  EXPECT_EQ(chosen_in_mode(3, DeviceType::kCpu, facts), "toy/cpu/future");  // of the same arithmetic
  facts.compute_capability = 90;
  EXPECT_EQ(chosen_in_mode(2, DeviceType::kCuda, facts), "none");  // no row has the promise
}

TEST_F(Selection, ACallOrAScopeTurnsTheInvariantModeOn) {
  ExecutionContext context;
  Explanation explanation;
  context.explain = &explanation;
  const auto kernel = [&] {
    dispatch(ToyParams{4}, Device::cpu(), context);
    return explanation.kernel;
  };
  EXPECT_EQ(kernel(), "toy/cpu/grows");
  EXPECT_FALSE(explanation.invariant);
  context.invariant = true;
  EXPECT_EQ(kernel(), "toy/cpu/stays_too");
  EXPECT_TRUE(explanation.invariant);
  EXPECT_EQ(explanation.arithmetic, "b");
  EXPECT_EQ(explanation.candidates[0].reason, "its arithmetic is a; calls of this kind have b in the invariant mode");
  context.invariant = false;
  {
    const InvariantScope outer;
    const InvariantScope inner;
    EXPECT_EQ(kernel(), "toy/cpu/stays_too");
  }
  EXPECT_EQ(kernel(), "toy/cpu/grows");
  state("toy/cpu/stays_too").allowed = false;
  context.explain = nullptr;
  context.invariant = true;
  EXPECT_THROW(dispatch(ToyParams{4}, Device::cpu(), context), Unsupported);
}

TEST_F(Selection, WhatTheDeviceCannotRunIsLeftOut) {
  DeviceFacts facts;
  facts.num_sms = 132;
  EXPECT_EQ(chosen(3, DeviceType::kCpu, facts), "toy/cpu/stays");
  facts.cpu_features = 1u << 31;
  EXPECT_EQ(chosen(3, DeviceType::kCpu, facts), "toy/cpu/future");
  for (const auto& [capability, name] : {std::pair{70, "none"}, {75, "toy/cuda/old"}, {80, "toy/cuda/wide"}}) {
    facts.compute_capability = capability;
    EXPECT_EQ(chosen(2, DeviceType::kCuda, facts), name);
  }
}

TEST_F(Selection, CostsMayAskTheDevice) {
  DeviceFacts facts;
  facts.compute_capability = 90;
  facts.num_sms = 16;
  EXPECT_EQ(chosen(2, DeviceType::kCuda, facts), "toy/cuda/new");
  EXPECT_EQ(chosen(20, DeviceType::kCuda, facts), "toy/cuda/old");
  facts.num_sms = 132;
  EXPECT_EQ(chosen(2, DeviceType::kCuda, facts), "toy/cuda/wide");
}

TEST_F(Selection, PreferredRowsGoBeforeAllOthersByTheSameRule) {
  any_preferred = true;
  state("toy/cpu/stays_too").preferred = true;
  EXPECT_EQ(chosen(4), "toy/cpu/stays_too");
  state("toy/cpu/grows").preferred = true;
  EXPECT_EQ(chosen(4), "toy/cpu/grows");
  EXPECT_EQ(chosen(3), "toy/cpu/stays_too");
  state("toy/cpu/stays_too").preferred = false;
  EXPECT_EQ(chosen(3), "toy/cpu/stays");  // none that is preferred accepts
}

TEST_F(Selection, APlanIsMadeOnceAndReachesTheLaunch) {
  dispatch(ToyParams{4}, Device::cpu(), {});
  EXPECT_EQ(seen.plans, 1);
  EXPECT_EQ(seen.launches, 1);
  EXPECT_EQ(seen.told, 12);
  EXPECT_NE(seen.workspace, nullptr);
  dispatch(ToyParams{10}, Device::cpu(), {});
  EXPECT_EQ(seen.plans, 1);  // of the row that runs, no other
  EXPECT_EQ(seen.launches, 2);
}

TEST_F(Selection, ExplainListsEachCostAndTheChosenPlan) {
  Explanation explanation;
  ExecutionContext context;
  context.explain = &explanation;
  dispatch(ToyParams{4}, Device::cpu(), context);
  EXPECT_EQ(seen.launches, 0);
  EXPECT_EQ(explanation.kernel, "toy/cpu/grows");
  EXPECT_EQ(explanation.workspace_bytes, 4u);
  EXPECT_EQ(explanation.modelled_us, 5.0f);
  ASSERT_EQ(explanation.candidates.size(), 4u);
  EXPECT_EQ(explanation.candidates[0].modelled_us, 5.0f);
  EXPECT_EQ(explanation.candidates[1].modelled_us, 10.0f);
  EXPECT_FALSE(explanation.candidates[3].accepted);
  EXPECT_EQ(explanation.candidates[3].modelled_us, 0.0f);
  dispatch(ToyParams{3}, Device::cpu(), context);
  EXPECT_EQ(explanation.candidates[0].reason, "needs an even size");
}

TEST_F(Selection, NoRowIsAnErrorWithEachReason) {
  for (auto& row : OpTable<ToyParams>::instance()) row.state.allowed = row.state.name == std::string("toy/cpu/grows");
  try {
    dispatch(ToyParams{3}, Device::cpu(), {});
    ADD_FAILURE() << "something ran";
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find("toy/cpu/grows: needs an even size"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("toy/cpu/stays: another kernel is forced"), std::string::npos);
  }
}

}  // namespace
}  // namespace flashkernel
