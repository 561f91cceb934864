// The registry from outside: what kernels() lists, how force_kernels() matches, what explain says, and that calls are
// counted.
#include "flashkernel/kernels.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "core/cpu_features.hpp"
#include "flashkernel/attention.hpp"
#include "flashkernel/error.hpp"
#include "ops/select.hpp"
#include "test_tensor.hpp"

namespace flashkernel {
namespace {

using namespace testing;

class KernelsTest : public ::testing::Test {
 protected:
  KernelsTest() : q(DType::kFloat32, {1, 2, 4, 8}), out(DType::kFloat32, {1, 2, 4, 8}) { q.random(1); }
  void TearDown() override { force_kernels(""); }

  Explanation explain() {
    Explanation explanation;
    ExecutionContext context;
    context.explain = &explanation;
    attention(q, q, q, out, {}, {}, context);
    return explanation;
  }

  static std::uint64_t calls(const std::string& id) {
    for (const KernelInfo& kernel : kernels())
      if (kernel.id == id) return kernel.calls;
    ADD_FAILURE() << "no kernel " << id;
    return 0;
  }

  TestTensor q, out;
};

TEST_F(KernelsTest, EveryOpHasAScalarKernel) {
  std::set<std::string> ops, with_oracle, ids;
  for (const KernelInfo& kernel : kernels()) {
    EXPECT_TRUE(ids.insert(kernel.id).second) << kernel.id << " is listed twice";
    EXPECT_EQ(kernel.id.rfind(kernel.op + "/", 0), 0u) << kernel.id << " does not start with its op, " << kernel.op;
    ops.insert(kernel.op);
    if (kernel.id != kernel.op + "/cpu/scalar") continue;
    with_oracle.insert(kernel.op);
    EXPECT_TRUE(kernel.available) << kernel.id;
    EXPECT_EQ(kernel.cpu_features, "") << kernel.id;
  }
  EXPECT_EQ(ops, with_oracle);
  EXPECT_GE(ops.size(), 19u);
}

TEST_F(KernelsTest, NoIdIsAPrefixOfAnother) {  // or forcing the one would allow the other
  for (const KernelInfo& a : kernels())
    for (const KernelInfo& b : kernels()) EXPECT_NE(b.id.rfind(a.id + "/", 0), 0u) << a.id << " and " << b.id;
}

TEST_F(KernelsTest, ListsByOpWithTheScalarKernelLastOfTheProcessors) {
  const auto all = kernels();
  EXPECT_TRUE(
      std::is_sorted(all.begin(), all.end(), [](const KernelInfo& a, const KernelInfo& b) { return a.op < b.op; }));
  for (std::size_t i = 0; i + 1 < all.size(); ++i)  // of equal costs the first one runs: that must not be the oracle
    if (all[i].id == all[i].op + "/cpu/scalar" && all[i + 1].op == all[i].op) {
      EXPECT_EQ(all[i + 1].device, DeviceType::kCuda) << all[i + 1].id;
    }
}

TEST_F(KernelsTest, EveryKernelNamesItsArithmetic) {
  for (const KernelInfo& kernel : kernels()) EXPECT_NE(kernel.arithmetic, "") << kernel.id;
}

TEST_F(KernelsTest, ForcingPicksByIdPrefixAndWildcard) {
  for (const char* pattern : {"attention_fwd/cpu/scalar", "*/cpu/scalar", "rope/cpu,attention_fwd/cpu/scalar",
                              " attention_fwd/cpu/scalar , rope "}) {
    force_kernels(pattern);
    EXPECT_EQ(forced_kernels(), pattern);
    EXPECT_EQ(explain().kernel, "attention_fwd/cpu/scalar") << pattern;
  }
  force_kernels("");
  const std::string best = explain().kernel;
  force_kernels("attention_fwd/cpu");  // a prefix: all of the CPU's
  EXPECT_EQ(explain().kernel, best);
  force_kernels("rope/cpu/scalar");  // another op: attention chooses freely
  EXPECT_EQ(explain().kernel, best);
}

TEST_F(KernelsTest, APreferredKernelGoesBeforeAllOthersAndRestrictsNothing) {
  const Explanation free = explain();
  force_kernels("*/cpu/scalar?");
  const Explanation preferring = explain();
  EXPECT_EQ(preferring.kernel, "attention_fwd/cpu/scalar");
  ASSERT_EQ(preferring.candidates.size(), free.candidates.size());
  for (std::size_t i = 0; i < free.candidates.size(); ++i)
    EXPECT_EQ(preferring.candidates[i].accepted, free.candidates[i].accepted) << free.candidates[i].kernel;
  const auto before = calls("attention_fwd/cpu/scalar");
  attention(q, q, q, out, {}, {});
  EXPECT_EQ(calls("attention_fwd/cpu/scalar"), before + 1);
  EXPECT_THROW(force_kernels("*/cpu/nothing?"), InvalidArgument);
  force_kernels("");
  EXPECT_EQ(explain().kernel, free.kernel);
}

TEST_F(KernelsTest, ForcingTheUnknownIsRefusedAndChangesNothing) {
  force_kernels("attention_fwd/cpu/scalar");
  for (const char* pattern :
       {"attention_fwd/cpu/scala", "attention", "attention_fwd/cpu/scalar/x", "nonsense/cpu", "*/nothing"}) {
    try {
      force_kernels(pattern);
      ADD_FAILURE() << "accepted " << pattern;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(pattern), std::string::npos) << error.what();
    }
    EXPECT_EQ(forced_kernels(), "attention_fwd/cpu/scalar");
    EXPECT_EQ(explain().kernel, "attention_fwd/cpu/scalar");
  }
}

TEST_F(KernelsTest, ExplainRunsNothingAndNamesEveryCandidate) {
  force_kernels("attention_fwd/cpu/scalar");
  out.fill(kNaN);
  const auto before = out.bytes();
  const std::uint64_t calls_before = calls("attention_fwd/cpu/scalar");
  const Explanation explanation = explain();
  EXPECT_EQ(out.bytes(), before);
  EXPECT_EQ(calls("attention_fwd/cpu/scalar"), calls_before);
  EXPECT_EQ(explanation.op, "attention_fwd");
  std::size_t of_op = 0;
  for (const KernelInfo& kernel : kernels()) of_op += kernel.op == "attention_fwd" && kernel.device == DeviceType::kCpu;
  EXPECT_EQ(explanation.candidates.size(), of_op);
  for (const KernelVerdict& verdict : explanation.candidates) {
    EXPECT_EQ(verdict.accepted, verdict.kernel == "attention_fwd/cpu/scalar") << verdict.kernel;
    EXPECT_EQ(verdict.accepted, verdict.reason.empty()) << verdict.kernel;
    EXPECT_EQ(verdict.reason, verdict.accepted ? "" : "another kernel is forced") << verdict.kernel;
  }
}

TEST_F(KernelsTest, WhatIsMissingIsNamed) {
  EXPECT_EQ(lacking_features(kCpuAvx512 | kCpuAmxBf16, kCpuAvx2), "needs avx512, amx_bf16; this processor has avx2");
  EXPECT_EQ(lacking_features(kCpuAvx2, 0), "needs avx2; this processor has none of them");
  const Device gpu = Device::cuda(1);
  EXPECT_EQ(other_capability(90, 90, 80, gpu), "needs compute capability 9.0; cuda:1 has 8.0");
  EXPECT_EQ(other_capability(80, 999, 75, gpu), "needs compute capability 8.0 or later; cuda:1 has 7.5");
  EXPECT_EQ(other_capability(75, 89, 120, gpu), "needs compute capability 7.5 to 8.9; cuda:1 has 12.0");
  EXPECT_EQ(other_capability(75, 999, 0, gpu), "needs compute capability 7.5 or later; cuda:1 has none");
  // As explain and "no kernel" say it, where this processor lacks something.
  for (const KernelVerdict& verdict : explain().candidates)
    for (const KernelInfo& kernel : kernels()) {
      if (kernel.id != verdict.kernel || kernel.available) continue;
      EXPECT_NE(verdict.reason.find("; this processor has "), std::string::npos) << verdict.reason;
    }
}

TEST_F(KernelsTest, ExplainValidatesAsTheCallDoes) {
  Explanation explanation;
  ExecutionContext context;
  context.explain = &explanation;
  TestTensor wrong(DType::kFloat16, {1, 2, 4, 8});
  EXPECT_THROW(attention(q, wrong, q, out, {}, {}, context), InvalidArgument);
}

TEST_F(KernelsTest, CallsAreCounted) {
  force_kernels("attention_fwd/cpu/scalar");
  const std::uint64_t before = calls("attention_fwd/cpu/scalar");
  for (int i = 0; i < 3; ++i) attention(q, q, q, out, {});
  EXPECT_EQ(calls("attention_fwd/cpu/scalar"), before + 3);
}

TEST_F(KernelsTest, ADeviceWithoutKernelsIsUnsupported) {
  if (num_cuda_devices() > 0) return;  // then there may be kernels: the CUDA tests have their own
  TensorView on_gpu = q, gpu_out = out;
  on_gpu.device = gpu_out.device = Device::cuda(0);
  try {
    attention(on_gpu, on_gpu, on_gpu, gpu_out, {});
    ADD_FAILURE() << "accepted a tensor on a GPU that is not there";
  } catch (const Unsupported& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("attention_fwd: no kernel"), std::string::npos) << text;
    EXPECT_NE(text.find("cuda:0"), std::string::npos) << text;
  }
}

// The workspace comes from the resource that the caller names, and goes back to it.
class CountingResource final : public MemoryResource {
 public:
  void* allocate(std::size_t bytes, std::size_t alignment, Stream stream) override {
    ++allocations;
    return upstream_.allocate(bytes, alignment, stream);
  }
  void deallocate(void* pointer, std::size_t bytes, std::size_t alignment, Stream stream) noexcept override {
    ++deallocations;
    upstream_.deallocate(pointer, bytes, alignment, stream);
  }
  Device device() const noexcept override { return Device::cpu(); }
  MemoryStats stats() const override { return upstream_.stats(); }
  int allocations = 0, deallocations = 0;

 private:
  HostResource upstream_;
};

TEST_F(KernelsTest, WorkspaceComesFromTheCallersResource) {
  CountingResource resource;
  ExecutionContext context;
  context.workspace = &resource;
  const bool needs_workspace = explain().workspace_bytes > 0;
  attention(q, q, q, out, {}, {}, context);
  EXPECT_EQ(resource.allocations, needs_workspace ? 1 : 0);
  EXPECT_EQ(resource.deallocations, resource.allocations);
}

}  // namespace
}  // namespace flashkernel
