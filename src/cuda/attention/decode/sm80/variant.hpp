// Split-KV decode on tensor cores: what a row of the table says about an instance, and how a call is spread over the
// device. kernel.cuh defines the instances, which are compiled in instances/. Host code;
// tests_cpp/decode_plan_test.cpp. Invariant: the spread depends on shapes only, never on lengths. Therefore a captured
// graph replays with other lengths.
#pragma once

#include <algorithm>

#include "cuda/attention/limits.hpp"
#include "cuda/costs.hpp"
#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm80 {

inline constexpr int kGranule = 16;  // keys that a warp takes at a time; they lie in one page, or pages are smaller
/// The most warps of a block. Four warps, one for each scheduler, suffice for granules of 16-bit keys and one tile of
/// query rows. A granule of 8-bit or 4-bit keys has fewer bytes and more instructions a byte, and one with more query
/// rows has two or four times the products; then a scheduler needs more than one warp to cover the latencies. With four
/// tiles at d128 a block has six warps, not eight, since the result of each takes 17 KB.
inline constexpr int decode_max_warps(int dim, int tiles, int bits) {
  if (bits < 16) return 8;
  return dim != 128 || tiles == 1 ? 4 : tiles == 2 ? 8 : 6;
}
inline constexpr int kTileRows = 8;  // query rows of one matrix instruction

/// The most tiles of query rows that a warp serves: its registers hold their outputs.
inline constexpr int decode_most_tiles(int dim) { return dim <= 128 ? 4 : dim <= 256 ? 2 : 1; }

/// kTiles: tiles of 8 query rows that a warp serves. A warp has kStages granules of K and V in shared memory, all but
/// one of them on their way. On 9.0 that is 48 to 128 KB for each multiprocessor, where a rate of 4.5 TB/s with a
/// latency of 1 us needs 34 KB. kBits: of an element of K and V; those of 8 and 4 bits bring their scales along.
template <int kQkDim_, int kVDim_, int kTiles, int kBits = 16>
struct DecodeShape {
  static constexpr int kQkDim = kQkDim_, kVDim = kVDim_, kWidest = std::max(kQkDim, kVDim);
  static constexpr int kMaxWarps = decode_max_warps(kWidest, kTiles, kBits);
  static constexpr int kStagesOf128 = kTiles == 1 ? 5 : kBits == 16 ? 2 : kTiles == 2 ? 5 : 4;
  static constexpr int kStages = kWidest <= 64 ? 8 : kWidest <= 128 ? kStagesOf128 : kWidest <= 192 ? 3 : 2;
  static constexpr int kKBytes = kGranule * kQkDim * kBits / 8, kVBytes = kGranule * kVDim * kBits / 8;
  static constexpr int scale_bytes(int dim) { return kBits == 16 ? 0 : kGranule * 4 * (kBits == 8 ? 1 : dim / 32); }
  static constexpr int kKScaleBytes = scale_bytes(kQkDim), kVScaleBytes = scale_bytes(kVDim);
  static constexpr int kScalesAt = kKBytes + kVBytes;  // in a slot: K, V, scales of K, of V
  static constexpr int kSlotBytes = kScalesAt + kKScaleBytes + kVScaleBytes;
  static constexpr int kRingBytes = kStages * kSlotBytes;  // of a warp
  static constexpr int kRows = kTiles * kTileRows;
  static constexpr int kQueryBytes = kRows * kQkDim * 2;  // of a head
  // The result of a warp: numerators, maximum and sum. Rows of numerators are kVDim + 4 floats apart, so that the
  // stores of a quarter of a warp fall into different banks.
  static constexpr int kResultPitch = kVDim + 4;  // floats
  static constexpr int kResultBytes = kRows * kResultPitch * 4 + kRows * 8;

  static constexpr int shared_bytes(int warps, int heads) {
    const int factors = kBits < 16 ? kMaxWarps * kRows * 4 : 0;                        // of query rows
    return warps * (kRingBytes + kResultBytes) + heads * kQueryBytes + factors + 512;  // and a few variables
  }
};

/// How a call is spread over the device.
struct DecodePlan {
  int blocks = 0;     // persistent, one a multiprocessor, at most
  int warps = 0;      // of a block: heads x key_lanes
  int heads = 1;      // kv heads that a block takes side by side
  int key_lanes = 0;  // warps that share a head's keys
  int head_groups = 0;
  int rows = 0;  // query rows of a kv head, at most
  int shared_bytes = 0;
  bool combine_apart = false;  // pairs cut by a border are merged by a second kernel, not by the last block to arrive
  int combine_items = 0;       // pairs of sequence and head group, or borders between blocks, if there are fewer
  bool combine_by_pair = false;
  bool modified = false;  // softcap or ALiBi
  bool vectors_q = false, vectors_out = false;

  /// Floats of the partial results. A block leaves at most two: one for the pair of sequence and head group that its
  /// share starts within, one for the pair that its share ends within.
  std::int64_t partial_floats(int dim_v) const { return std::int64_t{2} * blocks * heads * rows * (dim_v + 4); }
};

inline std::int64_t decode_rows(const AttentionParams& p) { return p.heads_q / p.heads_kv * p.seq_q; }

/// f(Constant<kTiles>) for the tiles that a call needs.
template <int kValue>
struct DecodeTiles {
  static constexpr int value = kValue;
};
template <int kQkDim, int kVDim, class F>
auto with_decode_tiles(const AttentionParams& p, F&& f) {
  const std::int64_t rows = decode_rows(p);
  constexpr int kMost = decode_most_tiles(std::max(kQkDim, kVDim));
  if constexpr (kMost >= 4) {
    if (rows > 2 * kTileRows) return f(DecodeTiles<4>{});
  }
  if constexpr (kMost >= 2) {
    if (rows > kTileRows) return f(DecodeTiles<2>{});
  }
  return f(DecodeTiles<1>{});
}

/// A border between two blocks' shares may cut a pair of sequence and head group. Who merges its parts: a second
/// kernel, or the last of the pair's blocks to finish. Each is a row of the table.
enum class DecodeMerge { kApart, kWithin };

/// Query rows of a kv head, at most, of blocks that merge: with more, a warp's registers are full.
inline constexpr std::int64_t kMostRowsWithin = 2 * kTileRows;
/// Keys of all sequences up to which a second kernel is faster: by 6 to 8 % on 9.0. From 8192 keys on it is 4 to 8 %
/// slower.
inline constexpr std::int64_t kMostKeysApart = 4096;
/// Rows of parts that one block reads in 2 us. If all work were in one sequence, a block that merges would have to read
/// more than that where the next function says so; a second kernel then does it with many blocks.
inline constexpr std::int64_t kMostPartsWithin = 512;

/// Whether a second kernel merges faster, of a call that both rows take.
inline bool is_for_apart(const AttentionParams& p, int blocks) {
  const std::int64_t rows = decode_rows(p);
  return rows > kMostRowsWithin || p.batch * p.seq_k <= kMostKeysApart ||
         rows * (blocks / p.heads_kv + 2) > kMostPartsWithin;
}

/// Persistent blocks: one a multiprocessor. Over 16-bit keys each head group gets the same number, where that leaves
/// few multiprocessors idle. The blocks of all heads then go through the same sequences side by side and cut them at
/// the same places; if all lengths are equal, they may cut none.
inline int decode_blocks(const AttentionParams& p, int bits, int num_sms) {
  const int alike = num_sms - num_sms % std::max(1, static_cast<int>(p.heads_kv));
  return bits == 16 && 16 * alike >= 15 * num_sms ? alike : num_sms;
}

template <int kQkDim, int kVDim, int kBits>
DecodePlan plan_decode(const AttentionParams& p, DecodeMerge merge, const DeviceFacts& device) {
  DecodePlan plan;
  plan.blocks = decode_blocks(p, kBits, device.num_sms);
  plan.head_groups = static_cast<int>(p.heads_kv) / plan.heads;
  plan.rows = static_cast<int>(decode_rows(p));
  with_decode_tiles<kQkDim, kVDim>(p, [&](auto tiles) {
    using Shape = DecodeShape<kQkDim, kVDim, decltype(tiles)::value, kBits>;
    plan.key_lanes = Shape::kMaxWarps / plan.heads;
    while (plan.key_lanes > 1 &&
           Shape::shared_bytes(plan.key_lanes * plan.heads, plan.heads) > device.max_shared_bytes_per_block)
      --plan.key_lanes;
    plan.warps = plan.key_lanes * plan.heads;
    plan.shared_bytes = Shape::shared_bytes(plan.warps, plan.heads);
  });
  plan.combine_apart = merge == DecodeMerge::kApart;
  const std::int64_t pairs = p.batch * plan.head_groups, borders = std::max(1, plan.blocks - 1);
  plan.combine_by_pair = pairs <= borders;
  plan.combine_items = static_cast<int>(std::min(pairs, borders));
  plan.modified = p.has_score_modifier();
  const auto fits = [](const void* data, std::uintptr_t bytes, std::int64_t a, std::int64_t b, std::int64_t c) {
    const auto elements = static_cast<std::int64_t>(bytes / 2);
    return reinterpret_cast<std::uintptr_t>(data) % bytes == 0 && a % elements == 0 && b % elements == 0 &&
           c % elements == 0;
  };
  plan.vectors_q = fits(p.q, 16, p.is_varlen_q() ? 0 : p.stride_q_batch, p.stride_q_head, p.stride_q_token);
  plan.vectors_out = fits(p.out, 8, p.is_varlen_q() ? 0 : p.stride_out_batch, p.stride_out_head, p.stride_out_token);
  return plan;
}

/// A row's plan: a DecodePlan, and room for the parts.
template <int kQkDim, int kVDim, DecodeMerge kMerge, int kBits = 16>
Plan plan_attention_decode(const AttentionParams& p, const DeviceFacts& device) {
  const DecodePlan plan = plan_decode<kQkDim, kVDim, kBits>(p, kMerge, device);
  return Plan::of(plan, sizeof(float) * static_cast<std::size_t>(plan.partial_floats(kVDim)));
}

template <DecodeMerge kMerge, int kBits = 16>
float attention_decode_cost_us(const AttentionParams& p, const DeviceFacts& device) {
  const double us = attention_us(p, rates::kDecodeSm80);
  const bool apart = is_for_apart(p, decode_blocks(p, kBits, device.num_sms));
  return static_cast<float>(apart == (kMerge == DecodeMerge::kApart) ? us : kOutsideItsRange * us);
}

/// What decoding over 16-bit keys and over 8-bit keys both ask for. `vector`: elements of K and V in 16 bytes.
template <int kQkDim, int kVDim, DecodeMerge kMerge>
Verdict decode_supports(const AttentionParams& p, std::int64_t vector) {
  if (!HeadDims{kQkDim, kVDim}.hold(p.head_dim, p.head_dim_v)) return kTooSmallHeadDims;
  if (decode_rows(p) > kTileRows * decode_most_tiles(std::max(kQkDim, kVDim)))
    return "it takes at most 32 query rows for each kv head, 16 where head_dim is over 128, 8 where it is over 256";
  if (kMerge == DecodeMerge::kWithin && decode_rows(p) > kMostRowsWithin)
    return "it takes at most 16 query rows for each kv head";
  if (p.bias.data) return "it takes no additive bias";
  if (p.mask.is_given()) return "it takes no packed mask or block mask";
  if (p.is_paged() && p.page_size % kGranule != 0 && (vector != 8 || kGranule % p.page_size != 0))
    return vector == 8 ? "page_size must be a multiple of 16, or 1, 2, 4 or 8" : "page_size must be a multiple of 16";
  const auto rows_of_16_bytes = [vector](const void* data, std::int64_t a, std::int64_t b, std::int64_t c) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && a % vector == 0 && b % vector == 0 && c % vector == 0;
  };
  const bool side_by_side = p.is_varlen_k();
  if (!rows_of_16_bytes(p.k, side_by_side ? 0 : p.stride_k_batch, p.stride_k_head, p.stride_k_token) ||
      !rows_of_16_bytes(p.v, side_by_side ? 0 : p.stride_v_batch, p.stride_v_head, p.stride_v_token))
    return "rows of k and v must start at multiples of 16 bytes";
  // The kernel counts in 32 bits: keys, with room for windows, granules of all sequences and heads, and columns of the
  // table.
  if (p.seq_k > std::int64_t{1} << 29 || p.batch * p.heads_kv * (p.seq_k / kGranule + 1) >= std::int64_t{1} << 31)
    return "the call has more keys than it takes";
  return Verdict::ok();
}

template <DType kDtype, int kQkDim, int kVDim, DecodeMerge kMerge>
Verdict attention_decode_supports(const AttentionParams& p) {
  if (p.dtype != kDtype) return "it is built for another dtype";
  return decode_supports<kQkDim, kVDim, kMerge>(p, 8);
}

/// kDtype: of the queries.
template <DType kDtype, int kQkDim, int kVDim, DecodeMerge kMerge>
Verdict attention_decode_quantized_supports(const AttentionParams& p) {
  if (!p.quantization || p.quantization.packed) return "it takes 8-bit pages only";
  if (p.dtype_q != kDtype) return "it is built for another dtype of queries";
  const auto granules_of_16_bytes = [](const KvScale& scale) {
    return reinterpret_cast<std::uintptr_t>(scale.data) % 16 == 0 && scale.stride_page % 4 == 0 &&
           scale.stride_head % 4 == 0;
  };
  if (p.quantization.per_token && !(granules_of_16_bytes(p.quantization.k) && granules_of_16_bytes(p.quantization.v)))
    return "rows of scales must start at multiples of 16 bytes";
  return decode_supports<kQkDim, kVDim, kMerge>(p, 16);
}

/// Pages of int4. kDtype: of the queries.
template <DType kDtype, int kQkDim, int kVDim, DecodeMerge kMerge>
Verdict attention_decode_int4_supports(const AttentionParams& p) {
  if (p.dtype != DType::kInt4x2) return "it takes int4 pages only";
  if (p.dtype_q != kDtype) return "it is built for another dtype of queries";
  if (p.head_dim != kQkDim || p.head_dim_v != kVDim) return "it takes its own head dim only";
  const auto whole_copies = [](const KvScale& scale, int dim) {
    const int words = std::min(4, dim / 32);  // of a copy
    return reinterpret_cast<std::uintptr_t>(scale.data) % (4 * words) == 0 && scale.stride_page % words == 0 &&
           scale.stride_head % words == 0 && scale.stride_slot % words == 0;
  };
  if (!whole_copies(p.quantization.k, kQkDim) || !whole_copies(p.quantization.v, kVDim))
    return "scales of a token must start at multiples of 16 bytes, or of 8 where head_dim is 64";
  return decode_supports<kQkDim, kVDim, kMerge>(p, 16);
}

/// Launches the kernels of a DecodePlan.
template <DType kDtype, int kQkDim, int kVDim>
void attention_decode(const AttentionParams& p, const Plan& plan, void* workspace, Stream stream);

/// Launches the kernels of a DecodePlan.
template <DType kDtype, int kQkDim, int kVDim>
void attention_decode_quantized(const AttentionParams& p, const Plan& plan, void* workspace, Stream stream);
template <DType kDtype, int kQkDim, int kVDim>
void attention_decode_int4(const AttentionParams& p, const Plan& plan, void* workspace, Stream stream);

/// What the rows over pages of kBits have of their own: 8, or int4's 4.
template <int kBits, DType kDtype, int kQkDim, int kVDim, DecodeMerge kMerge>
struct NarrowDecode {
  static constexpr auto supports = attention_decode_quantized_supports<kDtype, kQkDim, kVDim, kMerge>;
  static constexpr auto launch = attention_decode_quantized<kDtype, kQkDim, kVDim>;
};
template <DType kDtype, int kQkDim, int kVDim, DecodeMerge kMerge>
struct NarrowDecode<4, kDtype, kQkDim, kVDim, kMerge> {
  static constexpr auto supports = attention_decode_int4_supports<kDtype, kQkDim, kVDim, kMerge>;
  static constexpr auto launch = attention_decode_int4<kDtype, kQkDim, kVDim>;
};

}  // namespace flashkernel::cuda::sm80
