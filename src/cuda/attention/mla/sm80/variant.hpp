// MLA decoding on tensor cores (mma.sync): which calls it takes, and how a call is spread over the device. kernel.cuh
// is the kernel, instances/ compile it. Host code; tests_cpp/mla_plan_test.cpp.
//
// All heads read the same latent rows. So a call is paged attention of `head_groups` kv heads that lie at the same
// place: each is a group of query heads whose rows, with all queries, fill one tile. The schedule and the merge of
// split-KV decode (decode/sm80) then serve it as they are.
#pragma once

#include "cuda/attention/decode/sm80/variant.hpp"
#include "cuda/costs.hpp"
#include "ops/attention_mla_params.hpp"

namespace flashkernel::cuda::sm80 {

inline constexpr int kMlaDim = 576, kMlaValueDim = 512;
inline constexpr int kMlaWarps = 8, kMlaKeys = 32;  // of a block, of a tile
inline constexpr int kMlaMostRows = 64;
inline constexpr int kMlaLeastStages = 2, kMlaMostStages = 4;

/// Bytes of a latent row of 8 bits in shared memory: an odd number of 16.
inline constexpr int kMlaNarrowPitch = 656;

/// kRows: query rows of a block, 16, 32 or 64. Shared memory: the queries, a ring of tiles of latent rows, and scores,
/// whose place the weights take. kNarrow: the ring holds rows of 8 bits, and two more tiles what they stand for.
template <int kRows_, bool kNarrow_>
struct MlaShape {
  static constexpr bool kNarrow = kNarrow_;
  static constexpr int kRows = kRows_, kRowTiles = kRows / 16;
  // Scores: a warp has 16 rows and kKeysOfWarp keys, over a part of the columns where warps are left.
  static constexpr int kKeysOfWarp = kRows == 64 ? 16 : 8;
  static constexpr int kKeyWarps = kMlaKeys / kKeysOfWarp;
  static constexpr int kColumnParts = kMlaWarps / (kRowTiles * kKeyWarps);
  static constexpr int kScorePitch = kMlaKeys + 4;  // floats; an odd number of 16 bytes
  static constexpr int kQueryBytes = kRows * kMlaDim * 2;
  static constexpr int kTileBytes = kMlaKeys * kMlaDim * 2;
  static constexpr int kStageBytes = kNarrow ? kMlaKeys * kMlaNarrowPitch : kTileBytes;  // of the ring
  static constexpr int kWidenedBytes = kNarrow ? 2 * kTileBytes : 0;
  static constexpr int kScoreBytes = kColumnParts * kRows * kScorePitch * 4;
  static constexpr int kStateBytes = kRows * 3 * 4;  // a row's factor, maximum and sum

  static constexpr int shared_bytes(int stages) {
    return kQueryBytes + kWidenedBytes + stages * kStageBytes + kScoreBytes + kStateBytes;
  }
};
/// What the kernel has in shared memory beside that: segments, flags.
inline constexpr int kMlaStaticBytes = 512;

struct MlaPlan {
  DecodePlan decode;  // heads 1, head_groups as above, rows of a group
  int stages = 0;     // 0: the device's shared memory holds no tile of the call's rows
};

/// f(MlaShape<kRows, kNarrow>{}) for the smallest tile that holds a group's rows.
template <bool kNarrow, class F>
auto with_mla_shape(int rows, F&& f) {
  if (rows <= 16) return f(MlaShape<16, kNarrow>{});
  if (rows <= 32) return f(MlaShape<32, kNarrow>{});
  return f(MlaShape<64, kNarrow>{});
}

/// Query rows of the largest tile that a device's shared memory holds; 0: of none.
template <bool kNarrow>
int mla_most_rows(const DeviceFacts& device) {
  for (int rows = kMlaMostRows; rows >= 16; rows /= 2)
    if (with_mla_shape<kNarrow>(rows, [](auto shape) { return shape.shared_bytes(kMlaLeastStages); }) +
            kMlaStaticBytes <=
        device.max_shared_bytes_per_block)
      return rows;
  return 0;
}

/// Heads of a group: the most that divide heads_q and whose rows fit a tile.
inline std::int64_t mla_group(const AttentionParams& p, std::int64_t most_rows = kMlaMostRows) {
  for (std::int64_t group = std::min(p.heads_q, most_rows / std::max<std::int64_t>(1, p.seq_q)); group > 1; --group)
    if (p.heads_q % group == 0) return group;
  return 1;
}

/// The call as the kernel and the schedule see it.
inline AttentionParams mla_grouped(AttentionParams p, std::int64_t head_groups) {
  p.heads_kv = head_groups;
  p.stride_k_head = p.stride_v_head = 0;
  return p;
}

template <bool kNarrow>
MlaPlan plan_mla_decode(const AttentionParams& call, const DeviceFacts& device) {
  const int most_rows = mla_most_rows<kNarrow>(device);
  const AttentionParams p = mla_grouped(call, call.heads_q / mla_group(call, most_rows));
  MlaPlan plan;
  DecodePlan& d = plan.decode;
  d.blocks = decode_blocks(p, 16, device.num_sms);
  d.warps = kMlaWarps;
  d.heads = 1;
  d.key_lanes = kMlaKeys / kGranule;  // a share is a tile at least
  d.head_groups = static_cast<int>(p.heads_kv);
  d.rows = static_cast<int>(decode_rows(p));
  d.combine_apart = true;
  const std::int64_t pairs = p.batch * d.head_groups, borders = std::max(1, d.blocks - 1);
  d.combine_by_pair = pairs <= borders;
  d.combine_items = static_cast<int>(std::min(pairs, borders));
  const auto fits = [](const void* data, std::uintptr_t bytes, std::int64_t a, std::int64_t b, std::int64_t c) {
    const auto elements = static_cast<std::int64_t>(bytes / 2);
    return reinterpret_cast<std::uintptr_t>(data) % bytes == 0 && a % elements == 0 && b % elements == 0 &&
           c % elements == 0;
  };
  d.vectors_q = fits(p.q, 16, p.stride_q_batch, p.stride_q_head, p.stride_q_token);
  d.vectors_out = fits(p.out, 8, p.stride_out_batch, p.stride_out_head, p.stride_out_token);
  if (d.rows > most_rows) return plan;
  with_mla_shape<kNarrow>(d.rows, [&](auto shape) {
    using Shape = decltype(shape);
    plan.stages = kMlaMostStages;
    while (plan.stages > kMlaLeastStages &&
           Shape::shared_bytes(plan.stages) + kMlaStaticBytes > device.max_shared_bytes_per_block)
      --plan.stages;
    d.shared_bytes = Shape::shared_bytes(plan.stages);
  });
  return plan;
}

template <bool kNarrow>
Plan plan_of_mla_decode(const MlaDecodeParams& p, const DeviceFacts& device) {
  const MlaPlan plan = plan_mla_decode<kNarrow>(p.attention, device);
  return Plan::of(plan, sizeof(float) * static_cast<std::size_t>(plan.decode.partial_floats(kMlaValueDim)));
}

/// Calls whose tile no shared memory of the device holds are for another kernel.
template <bool kNarrow>
bool mla_decode_fits(const MlaDecodeParams& p, const DeviceFacts& device) {
  return plan_mla_decode<kNarrow>(p.attention, device).stages > 0;
}

/// kNarrow: of latent rows of 8 bits, which are rounded to kDtype.
template <DType kDtype, bool kNarrow>
Verdict mla_decode_supports(const MlaDecodeParams& params) {
  const AttentionParams& p = params.attention;
  if (params.format.is_narrow() != kNarrow)
    return kNarrow ? "it is for latent rows of 8 bits" : "it takes no latent rows of 8 bits";
  if ((kNarrow ? p.dtype_q : p.dtype) != kDtype) return "it is built for another dtype";
  if (p.head_dim != kMlaDim || p.head_dim_v != kMlaValueDim) return "it takes latent rows of 576 and values of 512";
  if (p.seq_q > kMlaMostRows) return "it takes at most 64 queries";
  constexpr std::int64_t kOf16Bytes = kNarrow ? 16 : 8;
  if (reinterpret_cast<std::uintptr_t>(p.k) % 16 != 0 || p.stride_k_batch % kOf16Bytes != 0 ||
      p.stride_k_token % kOf16Bytes != 0)
    return "latent rows must start at multiples of 16 bytes";
  // The kernel counts in 32 bits: keys, granules of all sequences and groups, and columns of the table.
  if (p.seq_k > kMostTokens || p.batch * p.heads_q * (p.seq_k / kGranule + 1) >= std::int64_t{1} << 31)
    return "the call has more keys than it takes";
  return Verdict::ok();
}

/// Launches the kernels of an MlaPlan.
template <DType kDtype, bool kNarrow>
void mla_decode(const MlaDecodeParams& p, const Plan& plan, void* workspace, Stream stream);

}  // namespace flashkernel::cuda::sm80
