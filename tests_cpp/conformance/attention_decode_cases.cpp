// Cases of attention_fwd with few queries over long caches: what split-KV kernels can get wrong. Lengths that leave
// some blocks one piece of a sequence and others many sequences, rows of every packing, every head_dim bucket.
#include <functional>
#include <limits>

#include "conformance/attention_spec.hpp"

namespace flashkernel::conformance {
namespace {

constexpr DType kHalves[] = {DType::kFloat16, DType::kBFloat16};

using AddPaged = std::function<void(const std::string&, const PagedSpec&)>;

/// Sequences and kv heads enough for a cluster each: 8 to 264 of them on an H200, 1 to 8 on the emulator's GPU of 4
/// multiprocessors. A cluster's blocks take tiles of 64 keys in turn.
void group_cases(const PagedSpec& base, const AddPaged& paged) {
  const std::int64_t dim = base.common.head_dim;
  const std::vector<std::int64_t> sixteen = {330, 5, 0, 40, 64, 65, 129, 1, 0, 128, 100, 63, 191, 16, 17, 2};
  const std::vector<std::int64_t> nine = {330, 5, 0, 64, 65, 129, 1, 191, 17};
  PagedSpec spec = base;
  spec.common.heads_kv = 1;
  const auto add = [&](std::int64_t group, std::int64_t page_size) {
    spec.common.heads_q = group;
    spec.page_size = page_size;
    const std::string name = std::to_string(group) + "_heads_of_one_pages" + std::to_string(page_size);
    spec.spare_columns = 512 / page_size;  // room for as many blocks as a cluster may have
    spec.lengths = group > 16 ? nine : sixteen;
    paged(name, spec);
    spec.lengths = {1100};
    paged(name + "_alone", spec);
  };
  for (const std::int64_t group : {1, 4, 7, 8, 9}) add(group, 16);
  add(12, 64);
  add(16, 256);
  add(17, 32);
  add(24, 16);
  for (const std::int64_t page_size : {16, 64, 256}) add(32, page_size);
  add(32, 48);  // no power of two: another kernel's
  spec.page_size = 16;
  spec.spare_columns = 1;
  spec.lengths = {1500, 200};
  paged("32_heads_of_one_two", spec);
  spec.lengths = nine;
  spec.common.scale = -0.3f;
  paged("32_heads_of_one_negative_scale", spec);
  spec.common.scale = 30.0f;
  paged("32_heads_of_one_large_scores", spec);
  spec.lengths = {1500, 200};
  paged("32_heads_of_one_large_scores_two", spec);
  spec.common.scale = {};
  spec.lengths.assign(16, 0);
  paged("32_heads_of_one_empty", spec);
  spec.common.sinks = true;
  spec.page_size = 64;
  spec.lengths = {2000, 3, 0, 129, 64, 1, 300, 2};  // fewer tiles than blocks, and many
  paged("32_heads_of_one_8_and_one_is_long", spec);
  // Few heads, and as many clusters as blocks, or half of them.
  spec.common.sinks = false;
  spec.common.heads_q = 5;
  for (const std::vector<std::int64_t>& lengths : {std::vector<std::int64_t>{200, 0, 64, 33}, {700, 130}}) {
    spec.lengths = lengths;
    paged("5_heads_of_one_" + std::to_string(lengths.size()), spec);
  }
  spec.common.sinks = true;
  spec.common.heads_q = 64, spec.common.heads_kv = 2;
  spec.spare_columns = 40;
  spec.index_dtype = DType::kInt64;
  spec.lengths = {640, 2, 77, 0};
  paged("32_heads_of_each_of_two", spec);
  spec = base;
  spec.common.heads_q = 10, spec.common.heads_kv = 1;
  spec.lengths.clear();
  for (std::int64_t i = 0; i < 40; ++i) spec.lengths.push_back(i % 9 == 4 ? 0 : i * i * 41 % 130);
  paged("10_heads_of_one_40_of_any_length", spec);
  spec.lengths.assign(70, 3);
  spec.lengths[69] = 130;
  paged("10_heads_of_one_70", spec);
  // Sequences see their own NaN and infinity; a page's tokens past their end are NaN or infinity in any case.
  spec = base;
  spec.common.heads_q = 32, spec.common.heads_kv = 1;
  spec.lengths = {200, 30, 65, 0, 128, 16, 300, 64, 17};
  spec.common.adjust = [dim](AttentionTensors& t) {
    t.k->set_at({1, 0, 0, 5}, kNan);
    t.v->set_at({4, 0, 0, dim - 28}, kNan);
    for (std::int64_t d = 0; d < dim; d += 3) t.v->set_at({7, 0, 0, d}, d % 2 ? kInfinity : -kInfinity);
  };
  paged("32_heads_of_one_nan_seen", spec);
}

void cases(CaseList& list) {
  for (const DType dtype : kHalves) {
    const std::string suffix = std::string("_") + short_name(dtype);
    const auto paged = [&](const std::string& name, const PagedSpec& spec) {
      list.add("split_" + name + suffix, [spec](Call& call) { build_attention_paged(call, spec); });
    };
    const auto dense = [&](const std::string& name, const AttentionSpec& spec) {
      list.add("split_" + name + suffix, [spec](Call& call) { build_attention(call, spec); });
    };
    PagedSpec base;
    base.common.dtype = dtype;
    base.common.heads_q = 8;
    base.common.heads_kv = 2;
    base.common.head_dim = 128;
    base.common.seq_q = 1;
    base.lengths = {1, 300, 0, 33, 131};

    for (const std::int64_t dim : {8, 72, 96, 104, 128, 160, 192, 256}) {
      PagedSpec spec = base;
      spec.common.head_dim = dim;
      paged("dim" + std::to_string(dim), spec);
      spec.common.head_dim_v = dim / 2 + 3;  // not a whole vector
      spec.common.seq_q = 3;
      spec.common.mask = kCausal;
      paged("dim" + std::to_string(dim) + "_other_value_dim_causal", spec);
    }
    // Rows of a kv head: one tile of 8, two, four.
    for (const std::int64_t group : {1, 3, 8, 12, 16, 20, 32}) {
      PagedSpec spec = base;
      spec.common.heads_q = 2 * group;
      paged("group" + std::to_string(group), spec);
    }
    paged_variants(base, {2, 4, 8}, paged);
    group_cases(base, paged);
    PagedSpec narrow = base;
    narrow.common.head_dim = 64;
    group_cases(narrow, [&](const std::string& name, const PagedSpec& spec) { paged("dim64_" + name, spec); });
    // Runs of empty sequences, and a short one on either side of a long one.
    PagedSpec spec = base;
    spec.lengths = {2, 1, 4000, 3};
    paged("one_long_among_short", spec);
    spec.lengths.assign(70, 0);
    spec.lengths[40] = 50;
    paged("one_of_70_is_not_empty", spec);
    // Many sequences: whole ones dealt over groups of blocks by their lengths, and cut inside of a group.
    spec.lengths = {90, 0, 17, 260, 33, 1, 48, 0, 140, 5, 16, 310, 64, 2, 75, 31, 200, 0, 20, 47, 9, 128, 3, 66};
    paged("24_of_any_length", spec);
    spec.common.heads_q = spec.common.heads_kv = 16;  // more than there may be clusters for one each
    paged("24_of_any_length_of_16_heads", spec);
    spec.common.head_dim = 64;
    paged("24_of_any_length_of_16_heads_dim64", spec);
    spec.common.head_dim = 128;
    spec.common.heads_q = 8, spec.common.heads_kv = 2;
    spec.lengths.assign(32, 3);
    spec.lengths[0] = 700;
    paged("long_first_of_32", spec);
    spec.lengths = {3, 0, 3, 3, 3, 3, 900};
    paged("long_last_of_7", spec);
    // More than a warp has lanes: blocks share them all, each with as many keys, and cut where that falls.
    spec.lengths.clear();
    for (std::int64_t i = 0; i < 100; ++i) spec.lengths.push_back(i % 7 == 3 ? 0 : i * i * 37 % 150);
    paged("100_of_any_length", spec);
    spec.common.heads_kv = 4;
    paged("100_of_any_length_of_4_heads", spec);
    spec.common.heads_kv = 2;
    spec.common.sinks = true;
    spec.lengths[99] = 2000;
    paged("100_and_the_last_is_long", spec);
    spec.common.sinks = false;
    spec.lengths.assign(33, 16);
    paged("33_alike", spec);
    spec.lengths.assign(33, 0);
    paged("33_empty", spec);
    for (const std::int64_t count : {256, 257}) {
      spec.lengths.assign(static_cast<std::size_t>(count), 1);
      spec.lengths[200] = 600;
      paged(std::to_string(count) + "_of_1", spec);
    }
    spec = base;
    spec.common.head_dim = 64, spec.common.heads_kv = 8;
    for (std::int64_t i = 0; i < 40; ++i) spec.lengths.push_back(i * 29 % 120);
    paged("45_of_dim64", spec);
    spec = base;
    spec.common.heads_q = 32, spec.common.heads_kv = 1;
    spec.lengths = {300, 40, 0, 7};
    paged("32_heads_of_one", spec);
    spec.lengths = {500};
    paged("32_heads_of_one_alone", spec);
    spec.common.heads_q = 40;  // 20 a kv head: 4 parts of 5
    spec.common.heads_kv = 2;
    paged("parts_of_5_alone", spec);
    spec = base;
    spec.common.heads_q = spec.common.heads_kv = 8;
    spec.spare_columns = 2112;  // room for so many keys that a cluster's blocks are wide
    spec.lengths = {700};
    paged("room_for_many_alone", spec);
    spec.spare_columns = 1024;
    spec.lengths = {700, 5, 0, 40};
    paged("room_for_many", spec);
    spec.lengths = {40, 5, 0, 400, 17, 16, 1, 90, 0, 0, 33, 700, 64, 2, 20, 8, 30};  // blocks that are no cluster
    paged("room_for_many_of_17", spec);
    spec = base;
    spec.spare_columns = 2048;
    spec.lengths = {700, 5, 0, 40};
    paged("room_for_many_of_few_heads", spec);
    spec = base;
    spec.common.heads_q = spec.common.heads_kv = 8;
    // Room for so many that a cluster takes up to 16 query heads; for more, that sequences are cut into pieces.
    for (const std::int64_t spare : {900, 2048}) {
      for (const std::int64_t group : {12, 16, 20, 32}) {
        spec = base;
        spec.spare_columns = spare;
        spec.common.heads_q = group, spec.common.heads_kv = 1;
        const std::string name = (spare == 900 ? "room_for_tiles_" : "room_for_pieces_") + std::to_string(group);
        spec.lengths = {700, 5, 0, 40};
        paged(name, spec);
        spec.common.sinks = true;
        spec.lengths = {spare == 900 ? 0 : 5};
        paged(name + "_alone", spec);
      }
    }
    spec = base;
    spec.spare_columns = 16384;  // so many that the emulator's GPU has no cluster for it
    spec.common.heads_q = 8, spec.common.heads_kv = 1;
    spec.lengths = {900};
    paged("pieces_for_one_head", spec);
    spec = base;
    spec.common.sinks = true;
    spec.lengths = {0, 100, 0};
    paged("sinks_and_empty", spec);
    spec = base;
    spec.lengths_q = {1, 0, 2, 1, 2};
    spec.common.mask = kCausal;
    paged("lengths_of_queries", spec);

    AttentionSpec contiguous = base.common;
    contiguous.batch = 3;
    contiguous.seq_k = 333;
    dense("contiguous", contiguous);
    contiguous.layout_k = {{}, {0, 2, 1, 3}};
    contiguous.layout_v = {{}, {2, 0, 1, 3}};
    contiguous.layout_q = {{}, {}, 3, 1};
    contiguous.layout_out = {{}, {2, 1, 0, 3}, 1};
    dense("contiguous_strided", contiguous);
    contiguous.heads_q = 32, contiguous.heads_kv = 1;
    contiguous.batch = 8;
    dense("contiguous_strided_32_heads_of_one", contiguous);
    contiguous = base.common;
    contiguous.heads_q = 48, contiguous.heads_kv = 2;
    contiguous.batch = 8;
    contiguous.seq_k = 333;
    dense("contiguous_24_heads_of_each_of_two", contiguous);
    contiguous.head_dim = 64;
    dense("contiguous_24_heads_of_each_of_two_dim64", contiguous);
    contiguous = base.common;
    contiguous.seq_q = 3;
    contiguous.seq_k = 200;
    contiguous.mask = kCausal;
    contiguous.adjust = [](AttentionTensors& t) {  // seen by the last query of two, by the last, and by all
      for (std::int64_t d = 0; d < 128; ++d) {
        if (d % 3 != 0) t.v->set_at({0, 0, 198, d}, d % 2 ? kNan : std::numeric_limits<double>::infinity());
        t.k->set_at({0, 1, 199, d}, kNan);
      }
      t.v->set_at({1, 0, 199, 7}, kNan);
      t.v->set_at({1, 1, 20, 100}, kNan);
    };
    dense("nan_seen_by_some", contiguous);
  }
}

const OpCases registration("attention_fwd", cases);

}  // namespace
}  // namespace flashkernel::conformance
