// sample on 9.0: the blocks of a cluster hold a row in shared memory, so that it is read once.
#include "cuda/sampling/sm90a/sample.hpp"

#include "cuda/host/launch.hpp"
#include "cuda/sampling/plan.hpp"
#include "cuda/sampling/sample.cuh"

namespace flashkernel::cuda::sm90a {
namespace {

template <class T>
__global__ void __launch_bounds__(sampler::kThreads, 2)
    sample_kernel(const SampleParams p, int blocks, int share, bool vectors) {
  extern __shared__ __align__(16) std::uint32_t held[];
  __shared__ sampler::Shared shared;
  take_turn();
  sampler::RowSampler<T, true>(p, shared, held, blocks, share).run(vectors);
}

}  // namespace

Verdict sample_supports(const SampleParams& p) {
  if (p.vocab > kSampleMostBlocks * kSampleMostHeld) return Verdict("a cluster holds up to 393216 tokens");
  return p.rows <= 0x7fffffff / kSampleMostBlocks ? Verdict::ok() : Verdict("more rows than a grid has clusters");
}

Plan plan_sample(const SampleParams& p, const DeviceFacts& device) {
  return Plan::of(sample_plan(p.rows, p.vocab, device.num_sms));
}

void sample(const SampleParams& p, const Plan& plan, void*, Stream stream) {
  if (p.rows == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const auto& cut = plan.as<SamplePlan>();
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool vectors = is_aligned(p.logits, 16) && (p.rows == 1 || p.stride_logits % kVectorElements<T> == 0);
    LaunchShape shape{static_cast<unsigned>(p.rows * cut.blocks), sampler::kThreads,
                      static_cast<std::size_t>(cut.share) * sizeof(std::uint32_t), native(stream), true};
    shape.cluster = static_cast<unsigned>(cut.blocks);
    launch("sample", sample_kernel<T>, shape, p, cut.blocks, cut.share, vectors);
  });
}

}  // namespace flashkernel::cuda::sm90a
