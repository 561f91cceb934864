// Emulates src/cuda/host/cooperative.hpp: all blocks of the launch run at the same time, up to 16 of them, as
// FK_EMULATOR_RESIDENT would have it.
#pragma once

#include <string>

#include "cuda/host/launch.hpp"
#include "flashkernel/error.hpp"
#include "simt/shared.hpp"

namespace simt {
/// Whether the launches that follow run all of their blocks at once. In scheduler.cpp.
void run_all_at_once(bool all);
}  // namespace simt

namespace flashkernel::cuda {

template <class... Params, class... Arguments>
void launch_cooperative(const char* name, void (*kernel)(Params...), const LaunchShape& shape,
                        Arguments&&... arguments) {
  if (shape.grid.x > simt::kMostClusterBlocks)
    throw CudaError(std::string(name) + ": the emulated GPU runs 16 blocks at once", cudaErrorInvalidConfiguration);
  struct Scope {
    Scope() { simt::run_all_at_once(true); }
    ~Scope() { simt::run_all_at_once(false); }
  } scope;
  launch(name, kernel, shape, std::forward<Arguments>(arguments)...);
}

}  // namespace flashkernel::cuda
