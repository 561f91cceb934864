// latent_append: half a warp holds a group of 128 latent columns, eight a lane, finds the largest and writes them in 8
// bits; one more half warp a token has the key. Bound by memory: a row is read once.
#include "cuda/host/launch.hpp"
#include "cuda/kv/latent_append.hpp"
#include "cuda/tile/quantized.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 128, kEach = 8;                        // elements of a lane
constexpr int kLanes = static_cast<int>(kLatentGroup) / kEach;  // that share a group
constexpr int kAtOnce = kThreads / kLanes;                      // parts of rows in a block

/// The parts of a row: its groups, and its key.
__host__ __device__ inline std::int64_t parts_of(const LatentAppendParams& p) {
  return LatentFormat::groups(p.format.rank) + 1;
}

/// kVectors: rows of latents begin at multiples of 16 bytes, those of pages at multiples of 8, and groups are whole.
template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads) latent_append_kernel(const LatentAppendParams p) {
  const std::int64_t parts = parts_of(p), at = static_cast<std::int64_t>(blockIdx.x) * kAtOnce + threadIdx.x / kLanes;
  const std::int64_t token = at / parts, part = at - token * parts;
  const std::int64_t slot = token < p.tokens ? p.slots[token] : -1;
  const bool there = slot >= 0 && slot < p.num_pages * p.page_size;  // lanes stay for the shuffles
  const std::int64_t page = there ? slot / p.page_size : 0;
  const bool grouped = p.format.kind == LatentKind::kGroups, is_key = part == parts - 1;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  std::uint8_t* const row = p.pages + page * p.stride_page + (there ? slot - page * p.page_size : 0) * p.stride_slot;
  const std::int64_t first = part * kLatentGroup + lane * kEach;
  const T* const from = static_cast<const T*>(p.latent) + token * p.stride_latent + first;
  const bool mine = there && !is_key;
  float values[kEach] = {};
  if constexpr (kVectors) {
    if (mine) load_wide(values, from);
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (mine && first + i < p.format.rank) values[i] = to_float(from[i]);
  }
  float scale = 1.0f;
  if (grouped) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) largest = fmaxf(largest, fabsf(values[i]));  // a NaN stays out
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, step));
    scale = latent_scale_of(largest);
    if (mine && lane == 0) reinterpret_cast<float*>(row + p.format.rank)[part] = scale;
  } else {
    scale = p.format.scale.value();
  }
  if (mine) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) values[i] = values[i] / scale;
    if constexpr (kVectors) {
      *reinterpret_cast<uint2*>(row + first) = pack_eight<Float8>(values);
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (first + i < p.format.rank) row[first + i] = from_float<Float8>(values[i]).bits;
    }
  }
  if (!there || !is_key) return;
  const T* const key = static_cast<const T*>(p.key) + token * p.stride_key;
  auto* const turned = reinterpret_cast<__nv_bfloat16*>(row + LatentFormat::bytes(p.format.rank, 0));
  for (std::int64_t d = lane; d < p.turned; d += kLanes) {
    const float x = to_float(key[d]);
    if (grouped)
      turned[d] = x != x ? __ushort_as_bfloat16(kLatentNan) : from_float<__nv_bfloat16>(x);
    else
      row[p.format.rank + d] = from_float<Float8>(x / scale).bits;
  }
}

std::int64_t blocks_of(const LatentAppendParams& p) { return ceil_div(p.tokens * parts_of(p), std::int64_t{kAtOnce}); }

}  // namespace

Verdict latent_append_supports(const LatentAppendParams& p) {
  return blocks_of(p) <= 0x7fffffff ? Verdict::ok() : Verdict("more than 2^31 blocks of rows");
}

void latent_append(const LatentAppendParams& p, void*, Stream stream) {
  if (p.tokens == 0 || p.num_pages == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool vectors = p.format.rank % kLatentGroup == 0 && is_aligned(p.latent, 16) &&
                         p.stride_latent % kVectorElements<T> == 0 && is_aligned(p.pages, 8) &&
                         p.stride_page % 8 == 0 && p.stride_slot % 8 == 0;
    const auto kernel = vectors ? latent_append_kernel<T, true> : latent_append_kernel<T, false>;
    launch("latent_append", kernel, {static_cast<unsigned>(blocks_of(p)), kThreads, 0, native(stream)}, p);
  });
}

}  // namespace flashkernel::cuda
