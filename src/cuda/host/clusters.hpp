// How many clusters of a kernel a device runs at once, for kernels whose grid is that many. In clusters.cpp, apart from
// the templates that ask: a map and a lock for each of them are seconds of a compiler's time.
#pragma once

namespace flashkernel::cuda {

/// Clusters of `num_blocks` blocks of the current device, which is number `device`; with one block, that is blocks.
/// Cached: asking takes microseconds. `name` is for errors.
int clusters_at_once(const char* name, const void* kernel, int num_blocks, int threads, int shared_bytes, int device);

}  // namespace flashkernel::cuda
