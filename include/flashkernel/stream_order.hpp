// Streams that wait for one another, and for them: for callers whose arrays go from one stream to another. On the CPU,
// where a call returns when its work is done, none of it does anything.
#pragma once

#include "flashkernel/export.hpp"
#include "flashkernel/stream.hpp"
#include "flashkernel/types.hpp"

namespace flashkernel {

/// Work that is queued on `later` from now on waits for what is queued on `earlier`; the caller does not. Both are
/// streams of `device`. CudaError where the driver refuses, Unsupported for a GPU that this build has no code for.
FK_API void order_streams(Device device, Stream earlier, Stream later);

/// Returns when the work that is queued on `stream` has run. CudaError where work before it has failed.
FK_API void synchronize(Device device, Stream stream);

/// Returns when the work of all streams of `device` has run.
FK_API void synchronize(Device device);

}  // namespace flashkernel
