// sample by one block a row: plain device code.
#include "cuda/sampling/sample.hpp"

#include "cuda/host/launch.hpp"
#include "cuda/sampling/sample.cuh"

namespace flashkernel::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(sampler::kThreads, 2) sample_kernel(const SampleParams p) {
  __shared__ sampler::Shared shared;
  take_turn();
  sampler::RowSampler<T, false>(p, shared, nullptr, 1, static_cast<int>(p.vocab)).run(false);
}

}  // namespace

Verdict sample_supports(const SampleParams& p) {
  return p.rows <= 0x7fffffff ? Verdict::ok() : Verdict("more rows than a grid has blocks");
}

void sample(const SampleParams& p, void*, Stream stream) {
  if (p.rows == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) {
    launch("sample", sample_kernel<decltype(zero)>,
           {static_cast<unsigned>(p.rows), sampler::kThreads, 0, native(stream), true}, p);
  });
}

}  // namespace flashkernel::cuda
