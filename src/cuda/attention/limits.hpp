// How many tokens the kernels of attention take, and which pairs of head dims their instances are built for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashkernel::cuda {

/// The most tokens of a sequence: kernels count tokens in 32 bits, with room for a window on either side.
inline constexpr std::int64_t kMostTokens = std::int64_t{1} << 29;

/// The head dim of queries and keys, and that of values and results. A kernel that is built for a pair serves every
/// call whose head dims are no larger: it fills the columns that are missing with zeros.
struct HeadDims {
  int qk, v;

  constexpr bool hold(std::int64_t head_dim, std::int64_t head_dim_v) const {
    return head_dim <= qk && head_dim_v <= v;
  }
  /// What a call costs, as far as head dims decide: Q K^T runs over qk columns and P V over v.
  constexpr int size() const { return qk + v; }
  constexpr int widest() const { return qk > v ? qk : v; }
};

inline constexpr const char* kTooSmallHeadDims = "head_dim is larger than what it is built for";

/// Whether no smaller one of the kernel's pairs holds the call's head dims, which `own` does. Others take the call too,
/// and multiply more zeros.
template <std::size_t kPairs>
constexpr bool is_smallest(const HeadDims (&built)[kPairs], HeadDims own, std::int64_t head_dim,
                           std::int64_t head_dim_v) {
  for (const HeadDims& pair : built)
    if (pair.size() < own.size() && pair.hold(head_dim, head_dim_v)) return false;
  return true;
}

// The pairs of each kernel. A pair of two different head dims stands in its list like any other; (192, 128) is that of
// DeepSeek's prefill.
inline constexpr HeadDims kTiledHeadDims[] = {{32, 32},   {64, 64},   {96, 96},  {128, 128},
                                              {192, 128}, {192, 192}, {256, 256}};
inline constexpr HeadDims kShortHeadDims[] = {{32, 32}, {64, 64}, {128, 128}};
inline constexpr HeadDims kWideHeadDims[] = {{256, 256}, {512, 512}};  // the first: of kernels for rows that fit a warp
inline constexpr HeadDims kNarrowHeadDims[] = {{32, 32}, {64, 64}, {96, 96}, {128, 128}};  // backward: fp32, and 7.5
inline constexpr HeadDims kHopperForwardHeadDims[] = {{64, 64},   {96, 96},   {128, 128}, {192, 128},
                                                      {192, 192}, {256, 256}, {512, 512}};
inline constexpr HeadDims kHopperScoredHeadDims[] = {{64, 64}, {128, 128}};
inline constexpr HeadDims kHopperBackwardHeadDims[] = {{64, 64},   {96, 96},   {128, 128},
                                                       {192, 128}, {192, 192}, {256, 256}};
inline constexpr HeadDims kDecodeHeadDims[] = {{64, 64}, {128, 128}, {192, 192}, {256, 256}, {512, 512}};
inline constexpr HeadDims kFewQueriesHeadDims[] = {{64, 64}, {128, 128}};
inline constexpr HeadDims kDecodeQuantizedHeadDims[] = {{64, 64}, {128, 128}, {256, 256}, {512, 512}};
inline constexpr HeadDims kFloat8HeadDims[] = {{64, 64}, {128, 128}, {256, 256}};
inline constexpr HeadDims kFloat8WidenedHeadDims[] = {{64, 64}, {128, 128}, {256, 256}};

}  // namespace flashkernel::cuda
