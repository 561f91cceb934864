// Streams in a build without CUDA: there is nothing to wait for on the CPU, and no other device.
#include "flashkernel/stream_order.hpp"

#include <string>

#include "flashkernel/error.hpp"

namespace flashkernel {
namespace {

void check(Device device, const char* function) {
  if (device.is_cuda())
    throw Unsupported(std::string(function) + ": device=cuda:" + std::to_string(device.index) +
                      "; this build has no CUDA; build with FLASHKERNEL_CUDA=ON or use device cpu");
}

}  // namespace

void order_streams(Device device, Stream, Stream) { check(device, "order_streams"); }
void synchronize(Device device, Stream) { check(device, "synchronize"); }
void synchronize(Device device) { check(device, "synchronize"); }

}  // namespace flashkernel
