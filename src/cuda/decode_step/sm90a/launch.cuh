// The launches of kernel.cuh: one of all phases, whose blocks must all be on the GPU at once, or one a phase.
#pragma once

#include <cstddef>

#include "cuda/decode_step/sm90a/kernel.cuh"
#include "cuda/decode_step/sm90a/variant.hpp"
#include "cuda/host/clusters.hpp"
#include "cuda/host/cooperative.hpp"
#include "cuda/host/zeroed_memory.hpp"
#include "flashkernel/error.hpp"

namespace flashkernel::cuda::decode_step {

template <class T, int D, bool kChained>
void launch_of(const DecodeStepParams& p, const Plan& plan, void* workspace, Stream stream) {
  constexpr const char* kName = "decode_step";
  const auto kernel = decode_step_kernel<T, D>;
  const CudaDeviceGuard guard(p.device.index);
  Run run{};
  run.p = p;
  run.g = geometry_of(p, plan.as<int>());
  run.page_size = Divisor(p.page_size);
  run.one_over_hidden = 1.0f / static_cast<float>(p.hidden);
  const Workspace w = workspace_of(run.g);
  const auto at = [&](std::size_t offset) { return static_cast<unsigned char*>(workspace) + offset; };
  run.residual = at(w.residual), run.q = at(w.q), run.inner = at(w.inner);
  run.attended = at(w.attended);
  run.partial = reinterpret_cast<float*>(at(w.partial)), run.lse = reinterpret_cast<float*>(at(w.lse));
  LaunchShape shape{static_cast<unsigned>(run.g.blocks), kThreads, sizeof(Shared), native(stream)};
  if (!kChained) {
    for (run.first_phase = 0; run.first_phase < run.g.phases(); ++run.first_phase) {
      run.last_phase = run.first_phase + 1;
      flashkernel::cuda::launch(kName, kernel, shape, run);
    }
    return;
  }
  const int at_once = clusters_at_once(kName, reinterpret_cast<const void*>(kernel), 1, kThreads,
                                       static_cast<int>(sizeof(Shared)), p.device.index);
  if (at_once < run.g.blocks)
    throw Unsupported("decode_step: the GPU runs " + std::to_string(at_once) + " of " + std::to_string(run.g.blocks) +
                      " blocks at once; the kernels of one launch a phase are needed");
  const ZeroedMemory counters(p.device.index, Departure::bytes(run.g.phases() * kCounterStride), stream);
  run.counters = static_cast<int*>(counters.data());
  run.last_phase = run.g.phases();
  run.chained = 1;
  launch_cooperative(kName, kernel, shape, run);
}

template <class T, bool kChained>
void launch_for(const DecodeStepParams& p, const Plan& plan, void* workspace, Stream stream) {
  if (p.head_dim == 64)
    launch_of<T, 64, kChained>(p, plan, workspace, stream);
  else
    launch_of<T, 128, kChained>(p, plan, workspace, stream);
}

}  // namespace flashkernel::cuda::decode_step
