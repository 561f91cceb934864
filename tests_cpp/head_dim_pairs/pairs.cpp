// Kernels whose values have another head dim than queries and keys, on the emulated GPU. Rows of the table have
// (192, 128); sm75.cu, sm80.cu and sm90a.cu make that and other pairs for this test, which calls them as a row would
// and compares with the scalar kernels of the CPU.
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "core/cuda_devices.hpp"
#include "cuda/attention/backward/sm75/variant.hpp"
#include "cuda/attention/backward/sm80/variant.hpp"
#include "cuda/attention/backward/sm90a/variant.hpp"
#include "cuda/attention/decode/sm80/variant.hpp"
#include "cuda/attention/forward/sm75/variant.hpp"
#include "cuda/attention/forward/sm80/variant.hpp"
#include "cuda/attention/forward/sm90a/variant.hpp"
#include "flashkernel/attention.hpp"
#include "flashkernel/kernels.hpp"
#include "ops/attention_check.hpp"
#include "test_tensor.hpp"

namespace flashkernel {
namespace {

using conformance::Random;
using conformance::Shape;
using conformance::TestTensor;

struct PairCall {
  DType dtype;
  std::int64_t head_dim, head_dim_v;
  std::int64_t seq_q = 70, seq_k = 150;
  AttentionOptions options = {};
};

/// The tensors of a call, once for the CPU and once for the GPU, with the same values in the inputs.
class Tensors {
 public:
  Tensors(const PairCall& call, Device device)
      : q("q", call.dtype, {2, 4, call.seq_q, call.head_dim}, {}, device),
        k("k", call.dtype, {2, 2, call.seq_k, call.head_dim}, {}, device),
        v("v", call.dtype, {2, 2, call.seq_k, call.head_dim_v}, {}, device),
        grad_out("grad_out", call.dtype, {2, 4, call.seq_q, call.head_dim_v}, {}, device),
        out("out", call.dtype, {2, 4, call.seq_q, call.head_dim_v}, {}, device),
        lse("lse", DType::kFloat32, {2, 4, call.seq_q}, {}, device),
        grad_q("grad_q", call.dtype, q.shape(), {}, device),
        grad_k("grad_k", call.dtype, k.shape(), {}, device),
        grad_v("grad_v", call.dtype, v.shape(), {}, device) {
    Random random(7);
    for (TestTensor* input : {&q, &k, &v, &grad_out}) {
      input->fill([&] { return random.normal(); });
      input->upload();
    }
    for (TestTensor* output : {&out, &lse, &grad_q, &grad_k, &grad_v}) output->upload();
  }

  TestTensor q, k, v, grad_out, out, lse, grad_q, grad_k, grad_v;
};

AttentionParams params_of(const PairCall& call, const Tensors& t, AttentionPass pass) {
  const Checker check("attention", t.q.view().device);
  AttentionParams p;
  check_dense(check, t.q.view(), t.k.view(), t.v.view(), t.out.view(), t.lse.view(), pass, p);
  check_options(check, call.options, p);
  return p;
}

void expect_like(TestTensor& got, const TestTensor& want, double floor) {
  got.download();
  EXPECT_EQ(got.damage(), "");
  const double relative = 2 * testing::unit_roundoff(want.dtype());
  for (std::int64_t i = 0; i < want.numel(); ++i)
    ASSERT_NEAR(got.get(i), want.get(i), relative * std::abs(want.get(i)) + floor) << got.name() << "[" << i << "]";
}

Tensors on_cpu(const PairCall& call) {
  Tensors t(call, Device::cpu());
  force_kernels("attention_fwd/cpu/scalar");
  attention(t.q.view(), t.k.view(), t.v.view(), t.out.view(), t.lse.view(), call.options);
  force_kernels("attention_bwd/cpu/scalar");
  AttentionGradients gradients;
  gradients.q = t.grad_q.view(), gradients.k = t.grad_k.view(), gradients.v = t.grad_v.view();
  attention_backward(t.grad_out.view(), t.q.view(), t.k.view(), t.v.view(), t.out.view(), t.lse.view(), {}, gradients,
                     call.options, true);
  force_kernels("");
  return t;
}

using Forward = void (*)(const AttentionParams&, void*, Stream);

void check_forward(const PairCall& call, Forward kernel, std::size_t (*workspace)(const AttentionParams&) = nullptr) {
  const Tensors want = on_cpu(call);
  Tensors got(call, Device::cuda(0));
  const AttentionParams p = params_of(call, got, AttentionPass::kForward);
  TestTensor memory("workspace", DType::kFloat32, {static_cast<std::int64_t>(workspace ? workspace(p) / 4 + 1 : 1)}, {},
                    Device::cuda(0));
  memory.upload();
  kernel(p, memory.view().data, Stream{});
  const double floor = call.dtype == DType::kFloat32 ? 1e-5 : call.dtype == DType::kFloat16 ? 1e-3 : 8e-3;
  expect_like(got.out, want.out, floor);
  expect_like(got.lse, want.lse, 1e-5);
}

using Backward = void (*)(const AttentionBackwardParams&, void*, Stream);

void check_backward(const PairCall& call, Backward kernel, std::size_t (*workspace)(const AttentionBackwardParams&)) {
  const Tensors want = on_cpu(call);
  Tensors got(call, Device::cuda(0));
  for (const auto& [to, from] : {std::pair{&got.out, &want.out}, std::pair{&got.lse, &want.lse}}) {
    to->fill(from->values());
    to->upload();
  }
  AttentionBackwardParams p;
  p.forward = params_of(call, got, AttentionPass::kBackward);
  p.grad_out = got.grad_out.view().data;
  p.grad_q = got.grad_q.view().data, p.grad_k = got.grad_k.view().data, p.grad_v = got.grad_v.view().data;
  const auto strides = [](const TestTensor& t, std::int64_t& batch, std::int64_t& head, std::int64_t& token) {
    const TensorView view = t.view();
    batch = view.strides[0], head = view.strides[1], token = view.strides[2];
  };
  strides(got.grad_out, p.stride_grad_out_batch, p.stride_grad_out_head, p.stride_grad_out_token);
  strides(got.grad_q, p.stride_grad_q_batch, p.stride_grad_q_head, p.stride_grad_q_token);
  strides(got.grad_k, p.stride_grad_k_batch, p.stride_grad_k_head, p.stride_grad_k_token);
  strides(got.grad_v, p.stride_grad_v_batch, p.stride_grad_v_head, p.stride_grad_v_token);
  TestTensor memory("workspace", DType::kFloat32, {static_cast<std::int64_t>(workspace(p) / 4 + 1)}, {},
                    Device::cuda(0));
  memory.upload();
  kernel(p, memory.view().data, Stream{});
  expect_like(got.grad_q, want.grad_q, 4e-3);
  expect_like(got.grad_k, want.grad_k, 4e-3);
  expect_like(got.grad_v, want.grad_v, 4e-3);
}

/// Without a mask, under a causal one, and with a softcap, which takes the kernels for modified scores.
std::vector<PairCall> calls_of(DType dtype, std::int64_t head_dim, std::int64_t head_dim_v) {
  PairCall full{dtype, head_dim, head_dim_v};
  PairCall causal = full, capped = full;
  causal.options.causal = true;
  capped.options.softcap = 5.0f;
  return {full, causal, capped};
}

TEST(HeadDimPairs, Sm75Forward) {
  for (const PairCall& call : calls_of(DType::kFloat16, 192, 128))
    check_forward(call, cuda::sm75::attention_fwd<DType::kFloat16, 192, 128>);
  check_forward({DType::kFloat16, 185, 99}, cuda::sm75::attention_fwd<DType::kFloat16, 192, 128>);
}

TEST(HeadDimPairs, Sm80Forward) {
  for (const PairCall& call : calls_of(DType::kBFloat16, 192, 128))
    check_forward(call, cuda::sm80::attention_fwd<DType::kBFloat16, 192, 128>);
  check_forward({DType::kBFloat16, 185, 99}, cuda::sm80::attention_fwd<DType::kBFloat16, 192, 128>);
}

TEST(HeadDimPairs, Sm80ForwardInFp32WithTheWiderValues) {
  for (const PairCall& call : calls_of(DType::kFloat32, 64, 96))
    check_forward(call, cuda::sm80::attention_fwd_f32<64, 96>);
}

template <cuda::sm80::DecodeMerge kMerge>
Plan plan_of_decode(const AttentionParams& p) {
  return cuda::sm80::plan_attention_decode<192, 128, kMerge>(p, cuda_device_facts(0));
}
template <cuda::sm80::DecodeMerge kMerge>
std::size_t decode_workspace(const AttentionParams& p) {
  return plan_of_decode<kMerge>(p).workspace_bytes;
}
template <cuda::sm80::DecodeMerge kMerge>
void decode(const AttentionParams& p, void* workspace, Stream stream) {
  cuda::sm80::attention_decode<DType::kFloat16, 192, 128>(p, plan_of_decode<kMerge>(p), workspace, stream);
}

TEST(HeadDimPairs, Sm80Decode) {
  for (PairCall call : calls_of(DType::kFloat16, 192, 128)) {
    call.seq_q = 3, call.seq_k = 700;
    check_forward(call, decode<cuda::sm80::DecodeMerge::kApart>, decode_workspace<cuda::sm80::DecodeMerge::kApart>);
    check_forward(call, decode<cuda::sm80::DecodeMerge::kWithin>, decode_workspace<cuda::sm80::DecodeMerge::kWithin>);
  }
}

template <bool kInvariant>
void forward_sm90a(const AttentionParams& p, void* workspace, Stream stream) {
  cuda::sm90a::attention_fwd<DType::kFloat16, 192, 128>(p, kInvariant, workspace, stream);
}

TEST(HeadDimPairs, Sm90aForward) {
  for (const PairCall& call : calls_of(DType::kFloat16, 192, 128)) {
    check_forward(call, forward_sm90a<false>);
    check_forward(call, forward_sm90a<true>);
  }
}

TEST(HeadDimPairs, Sm75Backward) {
  for (const PairCall& call : calls_of(DType::kFloat16, 96, 64))
    check_backward(call, cuda::sm75::attention_bwd<DType::kFloat16, 96, 64>,
                   cuda::sm75::attention_bwd_workspace<96, 64>);
}

TEST(HeadDimPairs, Sm80Backward) {
  for (const PairCall& call : calls_of(DType::kFloat16, 192, 128))
    check_backward(call, cuda::sm80::attention_bwd<DType::kFloat16, 192, 128>,
                   cuda::sm80::attention_bwd_workspace<192, 128>);
  check_backward({DType::kFloat16, 185, 99}, cuda::sm80::attention_bwd<DType::kFloat16, 192, 128>,
                 cuda::sm80::attention_bwd_workspace<192, 128>);
}

TEST(HeadDimPairs, Sm90aBackward) {
  for (const PairCall& call : calls_of(DType::kFloat16, 128, 64))
    check_backward(call, cuda::sm90a::attention_bwd<DType::kFloat16, 128, 64>,
                   cuda::sm90a::attention_bwd_workspace<128, 64>);
}

TEST(HeadDimPairs, TheSmallestPairThatHoldsACallIsFound) {
  constexpr cuda::HeadDims built[] = {{128, 128}, {192, 128}, {192, 192}, {576, 512}};
  const auto serves = [&](cuda::HeadDims own, std::int64_t head_dim, std::int64_t head_dim_v) {
    return own.hold(head_dim, head_dim_v) && cuda::is_smallest(built, own, head_dim, head_dim_v);
  };
  EXPECT_TRUE(serves({192, 128}, 192, 128));
  EXPECT_FALSE(serves({192, 192}, 192, 128));
  EXPECT_TRUE(serves({192, 192}, 192, 129));
  EXPECT_TRUE(serves({192, 128}, 129, 1));
  EXPECT_FALSE(serves({192, 128}, 128, 128));
  EXPECT_TRUE(serves({576, 512}, 193, 1));
  EXPECT_FALSE(serves({576, 512}, 577, 512));
}

}  // namespace
}  // namespace flashkernel
