// What the CUDA side gives to src/memory: cuda_resource.cpp in a build with CUDA, no_cuda/memory.cpp otherwise.
#pragma once

#include <cstddef>
#include <memory>

#include "flashkernel/memory_resource.hpp"
#include "memory/stream_events.hpp"

namespace flashkernel::detail {

/// The plain allocator of CUDA device `index`: one per device, never destroyed. Unsupported where there is none.
MemoryResource* cuda_resource(int index);

/// Events on the streams of CUDA device `index`. Unsupported where there is none.
std::unique_ptr<StreamEvents> cuda_stream_events(int index);

/// Queues on `stream`: `num_rows` rows of `row_bytes` from `src` to `dst`, both with `pitch_bytes` (which may exceed 2
/// GiB) between rows. No row overlaps another.
void cuda_copy_rows(int index, void* dst, const void* src, std::size_t pitch_bytes, std::size_t row_bytes,
                    std::size_t num_rows, Stream stream);

}  // namespace flashkernel::detail
