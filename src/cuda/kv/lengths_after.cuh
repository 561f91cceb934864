// What kv_append writes besides pages: how long each sequence is once its tokens are there.
#pragma once

#include "ops/kv_params.hpp"

namespace flashkernel::cuda {

/// By the grid's first block. Every block of the grid reads the lengths before, which are another array.
__device__ inline void write_lengths_after(const KvAppendParams& p) {
  const KvPlaces& places = p.places;
  if (!places.seq_lens_after || blockIdx.x != 0 || blockIdx.y != 0) return;
  for (std::int64_t b = threadIdx.x; b < places.batch; b += blockDim.x)
    places.seq_lens_after[b] = static_cast<std::int32_t>(places.seq_lens[b] + places.begin(b + 1) - places.begin(b));
}

}  // namespace flashkernel::cuda
