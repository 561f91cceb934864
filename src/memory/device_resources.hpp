// What the CUDA side gives to src/memory: cuda_resource.cpp in a build with CUDA, no_cuda/memory.cpp otherwise.
#pragma once

#include <memory>

#include "flashkernel/memory_resource.hpp"
#include "memory/stream_events.hpp"

namespace flashkernel::detail {

/// The plain allocator of CUDA device `index`: one per device, never destroyed. Unsupported where there is none.
MemoryResource* cuda_resource(int index);

/// Events on the streams of CUDA device `index`. Unsupported where there is none.
std::unique_ptr<StreamEvents> cuda_stream_events(int index);

}  // namespace flashkernel::detail
