// CUDA memory in a build without CUDA: refused.
#include <string>

#include "flashkernel/error.hpp"
#include "memory/device_resources.hpp"

namespace flashkernel::detail {

MemoryResource* cuda_resource(int index) {
  throw Unsupported("default_resource: device=cuda:" + std::to_string(index) +
                    "; this build has no CUDA; build with FLASHKERNEL_CUDA=ON or use device cpu");
}

std::unique_ptr<StreamEvents> cuda_stream_events(int index) {
  throw Unsupported("CachingResource: upstream is on cuda:" + std::to_string(index) +
                    "; this build has no CUDA; build with FLASHKERNEL_CUDA=ON");
}

void cuda_copy_rows(int index, void*, const void*, std::size_t, std::size_t, std::size_t, Stream) {
  throw Unsupported("KvCache: pages are on cuda:" + std::to_string(index) + "; this build has no CUDA");
}

}  // namespace flashkernel::detail
