// kv_append, kv_read and kv_copy_pages: where every element lands, what stays untouched, and what is refused before a
// page is.
#include "flashkernel/kv_ops.hpp"

#include <gtest/gtest.h>

#include <numeric>

#include "flashkernel/error.hpp"
#include "test_tensor.hpp"

namespace flashkernel {
namespace {

using namespace testing;

constexpr std::int64_t kPages = 6, kHeads = 3, kDim = 8, kDimV = 5;

struct Pages {
  std::int64_t page_size;
  TestTensor k, v;
  Pages(DType dtype, std::int64_t page_size, bool strided = false)
      : page_size(page_size),
        k(dtype, {kPages, page_size, kHeads, kDim},
          strided ? Shape{page_size * kHeads * kDim + 7, kDim, page_size * kDim, 1}
                  : Shape{page_size * kHeads * kDim, kHeads * kDim, kDim, 1}),
        v(dtype, {kPages, page_size, kHeads, kDimV}, strided ? Layout::kPadded : Layout::kContiguous) {
    k.fill(kNaN), v.fill(kNaN);  // poison: what is not written must stay
  }
  std::int64_t row(std::int64_t slot, std::int64_t head) const { return slot * kHeads + head; }
};

/// Values that name their place.
void fill_tokens(TestTensor& k, TestTensor& v, double start = 0) {
  for (std::int64_t i = 0; i < k.numel(); ++i) k.set(i, start + static_cast<double>(i % 2039));
  for (std::int64_t i = 0; i < v.numel(); ++i) v.set(i, -start - static_cast<double>(i % 2039));
}

TEST(KvAppend, WritesItsSlotsAndNothingElse) {
  for (const DType dtype : floating_dtypes())
    for (const std::int64_t page_size : {1, 4, 16})
      for (const bool strided : {false, true})
        for (const DType index : {DType::kInt32, DType::kInt64}) {
          Pages pages(dtype, page_size, strided);
          const std::int64_t slots_in_all = kPages * page_size;
          const std::vector<double> chosen = {static_cast<double>(slots_in_all - 1), 0, -1, 2, -100};
          TestTensor k(dtype, {5, kHeads, kDim}, strided ? Layout::kSwapped : Layout::kContiguous),
              v(dtype, {5, kHeads, kDimV}, Layout::kPadded);
          TestTensor slots(index, {5});
          fill_tokens(k, v), slots.fill(chosen);
          auto want_k = pages.k.values(), want_v = pages.v.values();
          for (std::int64_t t = 0; t < 5; ++t) {
            const auto slot = static_cast<std::int64_t>(chosen[static_cast<std::size_t>(t)]);
            if (slot < 0) continue;
            for (std::int64_t i = 0; i < kHeads * kDim; ++i)
              want_k[static_cast<std::size_t>(slot * kHeads * kDim + i)] = k[t * kHeads * kDim + i];
            for (std::int64_t i = 0; i < kHeads * kDimV; ++i)
              want_v[static_cast<std::size_t>(slot * kHeads * kDimV + i)] = v[t * kHeads * kDimV + i];
          }
          kv_append(k, v, pages.k, pages.v, slots);
          expect_close(pages.k, want_k, 0, "k");
          expect_close(pages.v, want_v, 0, "v");
        }
}

TEST(KvAppend, RopeOnTheWayEqualsRopeBefore) {
  for (const DType dtype : floating_dtypes())
    for (const bool interleaved : {false, true}) {
      Pages fused(dtype, 4), separate(dtype, 4);
      TestTensor k(dtype, {6, kHeads, kDim}), v(dtype, {6, kHeads, kDimV}), q(dtype, {6, 7, kDim}, Layout::kSwapped),
          q_out(dtype, {6, 7, kDim});
      TestTensor k_rotated(dtype, {6, kHeads, kDim}), q_rotated(dtype, {6, 7, kDim});
      TestTensor slots(DType::kInt64, {6}), positions(DType::kInt32, {6});
      k.random(1), v.random(2), q.random(3), slots.fill({3, 9, -1, 0, 23, 7}),
          positions.fill({0, 100, 7, 2047, 65537, 1});
      KvAppendRope rope_arguments;
      rope_arguments.positions = positions;
      rope_arguments.options.rotary_dim = 6;
      rope_arguments.options.interleaved = interleaved;
      rope_arguments.q = q;
      rope_arguments.q_out = q_out;
      kv_append(k, v, fused.k, fused.v, slots, rope_arguments);
      const auto heads_first = [](const TestTensor& tensor) {
        return tensor.view().transpose(0, 1);
      };  // rope wants [heads, seq, dim]
      rope(heads_first(q), heads_first(k), positions, heads_first(q_rotated), heads_first(k_rotated),
           rope_arguments.options);
      kv_append(k_rotated, v, separate.k, separate.v, slots);
      expect_close(fused.k, separate.k.values(), 1e-6, "k");
      expect_close(fused.v, separate.v.values(), 0, "v");
      expect_close(q_out, q_rotated.values(), 1e-6, "q");
      rope_arguments.q_out = q;  // in place; a skipped slot's q is rotated all the same
      kv_append(k, v, fused.k, fused.v, slots, rope_arguments);
      expect_close(q, q_rotated.values(), 1e-6, "q in place");
      rope_arguments.q = rope_arguments.q_out = {};
      kv_append(k, v, fused.k, fused.v, slots, rope_arguments);
      expect_close(fused.k, separate.k.values(), 1e-6, "k alone");
    }
}

TEST(KvAppend, TablesOnTheWayEqualTablesBefore) {
  for (const DType dtype : floating_dtypes())
    for (const bool interleaved : {false, true}) {
      Pages fused(dtype, 4), separate(dtype, 4);
      TestTensor k(dtype, {6, kHeads, kDim}), v(dtype, {6, kHeads, kDimV}), q(dtype, {6, 7, kDim}, Layout::kSwapped),
          q_out(dtype, {6, 7, kDim}), k_rotated(dtype, {6, kHeads, kDim}), q_rotated(dtype, {6, 7, kDim});
      TestTensor slots(DType::kInt64, {6}), positions(DType::kInt32, {6}), cos(DType::kFloat32, {12, 3}),
          sin(DType::kFloat32, {12, 3});
      k.random(1), v.random(2), q.random(3), cos.random(4), sin.random(5), slots.fill({3, 9, -1, 0, 23, 7}),
          positions.fill({0, 11, 7, 2, 5, 1});
      KvAppendRope rope;
      rope.positions = positions;
      rope.options.interleaved = interleaved;
      rope.q = q, rope.q_out = q_out, rope.cos = cos, rope.sin = sin;
      kv_append(k, v, fused.k, fused.v, slots, rope);
      const auto heads_first = [](const TestTensor& tensor) { return tensor.view().transpose(0, 1); };
      rope_table(heads_first(q), heads_first(k), cos, sin, positions, heads_first(q_rotated), heads_first(k_rotated),
                 rope.options);
      kv_append(k_rotated, v, separate.k, separate.v, slots);
      expect_close(fused.k, separate.k.values(), 1e-6, "k");
      expect_close(fused.v, separate.v.values(), 0, "v");
      expect_close(q_out, q_rotated.values(), 1e-6, "q");
    }
}

TEST(KvAppend, NoTokens) {
  Pages pages(DType::kFloat32, 4);
  TestTensor k(DType::kFloat32, {0, kHeads, kDim}), v(DType::kFloat32, {0, kHeads, kDimV}), slots(DType::kInt32, {0});
  const auto before = pages.k.bytes();
  kv_append(k, v, pages.k, pages.v, slots);
  EXPECT_EQ(pages.k.bytes(), before);
}

TEST(KvAppend, Refusals) {
  const DType f32 = DType::kFloat32;
  Pages pages(f32, 4);
  TestTensor k(f32, {2, kHeads, kDim}), v(f32, {2, kHeads, kDimV}), slots(DType::kInt64, {2}),
      positions(DType::kInt64, {2}), q(f32, {2, 4, kDim}), q_out(f32, {2, 4, kDim});
  k.random(1), v.random(2), slots.fill({0, 5}), positions.fill({0, 1}), q.random(3);
  const auto refused = [&](const TensorView& a, const TensorView& b, const TensorView& kp, const TensorView& vp,
                           const TensorView& s, const std::optional<KvAppendRope>& rope,
                           std::vector<std::string> fragments) {
    expect_refused<InvalidArgument>([&] { kv_append(a, b, kp, vp, s, rope); }, "kv_append", fragments,
                                    {&pages.k, &pages.v, &q, &q_out});
  };
  TestTensor two_heads(f32, {2, 2, kDim}), wide(f32, {2, kHeads, kDim + 1}), three(f32, {3, kHeads, kDimV}),
      half(DType::kFloat16, {2, kHeads, kDim});
  TestTensor floats(f32, {2}), long_slots(DType::kInt64, {3}), reversed(f32, {2, kHeads, kDim}, Layout::kReversed),
      other_pages(f32, {kPages + 1, 4, kHeads, kDimV});
  TestTensor no_size(f32, {kPages, 0, kHeads, kDim}), no_size_v(f32, {kPages, 0, kHeads, kDimV}),
      shared(f32, {kPages, 4, kHeads, kDim}, Shape{0, 24, 8, 1});
  refused({}, v, pages.k, pages.v, slots, {}, {"k is absent"});
  refused(k, {}, pages.k, pages.v, slots, {}, {"v is absent"});
  refused(k, v, {}, pages.v, slots, {}, {"k_pages is absent"});
  refused(k, v, pages.k, {}, slots, {}, {"v_pages is absent"});
  refused(k, v, pages.k, pages.v, {}, {}, {"slots is absent"});
  refused(two_heads, v, pages.k, pages.v, slots, {}, {"k.shape[1]=2", "k_pages.shape[2]=3"});
  refused(wide, v, pages.k, pages.v, slots, {}, {"k.shape[2]=9", "k_pages.shape[3]=8"});
  refused(k, three, pages.k, pages.v, slots, {}, {"v.shape[0]=3", "the number of tokens=2"});
  refused(half, v, pages.k, pages.v, slots, {}, {"k is float16", "needs float32"});
  refused(reversed, v, pages.k, pages.v, slots, {}, {"k.stride[2]=6", "contiguous"});
  refused(k, v, pages.k, other_pages, slots, {}, {"v_pages.shape[0]=7", "k_pages.shape[0]=6"});
  refused(k, v, no_size, no_size_v, slots, {}, {"k_pages.shape[1]=0", "page size"});
  refused(k, v, shared, pages.v, slots, {}, {"k_pages.stride[0]=0", "must not overlap itself"});
  refused(k, v, pages.k, pages.v, floats, {}, {"slots is float32", "needs int32 or int64"});
  refused(k, v, pages.k, pages.v, long_slots, {}, {"slots.shape[0]=3", "needs 2"});
  slots.set(1, 24);
  refused(k, v, pages.k, pages.v, slots, {}, {"slots[1]=24", "up to 23", "num_pages * page_size=24"});
  slots.set(1, 9e15);
  refused(k, v, pages.k, pages.v, slots, {}, {"slots[1]=9000000000000000"});
  slots.set(1, 5);
  KvAppendRope rope;
  refused(k, v, pages.k, pages.v, slots, rope, {"rope.positions is absent"});
  rope.positions = long_slots;
  refused(k, v, pages.k, pages.v, slots, rope, {"rope.positions.shape[0]=3", "needs 2"});
  rope.positions = positions;
  rope.options.rotary_dim = 3;
  refused(k, v, pages.k, pages.v, slots, rope, {"rotary_dim=3", "head_dim=8"});
  rope.options.rotary_dim = 8;
  TestTensor cos(f32, {9, 4}), sin(f32, {9, 4}), wide_table(f32, {9, 5}), few(f32, {3, 4});
  rope.cos = cos;
  refused(k, v, pages.k, pages.v, slots, rope, {"rope.sin is absent"});
  rope.cos = {}, rope.sin = sin;
  refused(k, v, pages.k, pages.v, slots, rope, {"rope.cos is absent"});
  rope.cos = wide_table;
  refused(k, v, pages.k, pages.v, slots, rope, {"rope.sin"});
  rope.sin = wide_table;
  refused(k, v, pages.k, pages.v, slots, rope, {"rope.cos.shape[1]=5", "half of head_dim=8"});
  rope.cos = cos, rope.sin = sin, rope.options.rotary_dim = 6;
  refused(k, v, pages.k, pages.v, slots, rope, {"rotary_dim=6", "4 columns"});
  rope.options.rotary_dim = 8, rope.options.inv_freq = few.view();
  refused(k, v, pages.k, pages.v, slots, rope, {"rope.inv_freq and rope.cos"});
  rope.options.inv_freq = {}, rope.cos = rope.sin = few;
  positions.set(1, 3);
  refused(k, v, pages.k, pages.v, slots, rope, {"rope.positions[1]=3", "rows of the table"});
  positions.set(1, 0);
  rope.cos = rope.sin = {};
  rope.q = q;
  refused(k, v, pages.k, pages.v, slots, rope, {"rope.q_out is absent"});
  rope.q = {}, rope.q_out = q_out;
  refused(k, v, pages.k, pages.v, slots, rope, {"rope.q is absent"});
  rope.q = wide;
  refused(k, v, pages.k, pages.v, slots, rope, {"rope.q.shape[2]=9", "k_pages.shape[3]=8"});
  rope.q = q, rope.q_out = k;
  refused(k, v, pages.k, pages.v, slots, rope, {"rope.q_out is", "shapes must match"});
}

TEST(KvAppend, ToSequencesEqualsSlotsWorkedOutByHand) {
  Pages by_slots(DType::kFloat32, 4), by_sequences(DType::kFloat32, 4);
  TestTensor k(DType::kFloat32, {4, kHeads, kDim}), v(DType::kFloat32, {4, kHeads, kDimV}), slots(DType::kInt64, {4}),
      table(DType::kInt32, {3, 2}), lengths(DType::kInt64, {3}), starts(DType::kInt32, {4}), after(DType::kInt32, {3});
  k.random(1), v.random(2);
  table.fill({5, 0, 3, 99, 2, 4}), lengths.fill({3, 2, 7}), starts.fill({0, 3, 3, 4});
  slots.fill({5 * 4 + 3, 0, 1, 4 * 4 + 3});
  KvAppendPlaces places;
  places.block_table = table, places.seq_lens = lengths, places.cu_seqlens = starts, places.seq_lens_after = after;
  kv_append(k, v, by_slots.k, by_slots.v, slots);
  kv_append_to_sequences(k, v, by_sequences.k, by_sequences.v, {}, places);
  EXPECT_EQ(by_slots.k.bytes(), by_sequences.k.bytes());
  EXPECT_EQ(by_slots.v.bytes(), by_sequences.v.bytes());
  expect_close(after, {6, 2, 8}, 0, "lengths after the call");
}

TEST(KvAppend, ToSequencesRefusals) {
  const DType f32 = DType::kFloat32;
  Pages pages(f32, 4);
  TestTensor k(f32, {4, kHeads, kDim}), v(f32, {4, kHeads, kDimV}), table(DType::kInt32, {2, 2}),
      lengths(DType::kInt64, {2}), starts(DType::kInt32, {3}), after(DType::kInt32, {2});
  k.random(1), v.random(2), table.fill({5, 0, 3, 1}), lengths.fill({3, 2}), starts.fill({0, 3, 4}),
      after.fill({-9, -9});
  KvAppendPlaces right;
  right.block_table = table, right.seq_lens = lengths, right.cu_seqlens = starts, right.seq_lens_after = after;
  const auto refused = [&](const KvAppendPlaces& places, const std::vector<std::string>& fragments,
                           const std::optional<KvAppendRope>& rope = {}) {
    expect_refused<InvalidArgument>([&] { kv_append_to_sequences(k, v, pages.k, pages.v, {}, places, rope); },
                                    "kv_append", fragments, {&pages.k, &pages.v, &after});
  };
  const auto with = [&](TensorView KvAppendPlaces::*which, const TensorView& view) {
    KvAppendPlaces places = right;
    places.*which = view;
    return places;
  };
  TestTensor wide(DType::kInt64, {2, 2}), three(DType::kInt32, {3}), three_rows(DType::kInt32, {3, 2}),
      none(DType::kInt32, {2, 0}), positions(DType::kInt32, {2});
  TensorView inside = after;
  inside.data = table.view().data;
  three.fill({1, 1, 1}), three_rows.fill({0, 1, 2, 3, 4, 5});
  refused(with(&KvAppendPlaces::block_table, {}), {"block_table is absent"});
  refused(with(&KvAppendPlaces::block_table, wide), {"block_table is int64", "needs int32"});
  refused(with(&KvAppendPlaces::block_table, none),
          {"block_table.shape[1]=0", "at least one token, sequence and page"});
  refused(with(&KvAppendPlaces::seq_lens, {}), {"seq_lens is absent"});
  refused(with(&KvAppendPlaces::seq_lens, three), {"seq_lens.shape[0]=3", "needs 2"});
  refused(with(&KvAppendPlaces::cu_seqlens, lengths), {"cu_seqlens.shape[0]=2", "needs 3"});
  refused(with(&KvAppendPlaces::positions, three), {"positions.shape[0]=3", "needs 2"});
  refused(with(&KvAppendPlaces::seq_lens_after, lengths), {"seq_lens_after is int64", "needs int32"});
  refused(with(&KvAppendPlaces::seq_lens_after, three), {"seq_lens_after.shape[0]=3", "block_table.shape[0]=2"});
  refused(with(&KvAppendPlaces::seq_lens_after, inside), {"seq_lens_after shares memory with block_table"});
  KvAppendPlaces even;
  even.block_table = three_rows, even.seq_lens = three;
  refused(even, {"k.shape[0]=4", "a multiple of the 3 sequences"});
  starts.fill({0, 5, 4});
  refused(right, {"cu_seqlens[1]=5", "cu_seqlens[2]=4", "never decrease"});
  starts.fill({0, 3, 5});
  refused(right, {"cu_seqlens[2]=5", "end at 4"});
  starts.fill({0, 3, 4});
  lengths.set(0, 6);
  refused(right, {"seq_lens[0]=6", "position 8", "a cache of 8 tokens"});
  lengths.set(0, 9e18);
  refused(right, {"seq_lens[0]=9000000000000000000", "position 9000000000000000000"});
  lengths.set(0, -1);
  refused(right, {"seq_lens[0]=-1", "negative"});
  lengths.set(0, 3);
  for (const double page : {-1.0, static_cast<double>(kPages)}) {
    table.set(1, page);
    refused(right, {"slots by block_table[1]=", "num_pages * page_size=24"});
  }
  table.set(1, 0);
  KvAppendRope rope;
  rope.positions = positions;
  refused(right, {"rope.positions are given"}, rope);
}

TEST(KvRead, GathersThroughTheTableAndZeroesTheTail) {
  for (const DType dtype : floating_dtypes())
    for (const std::int64_t page_size : {1, 4, 16})
      for (const bool strided : {false, true}) {
        Pages pages(dtype, page_size, strided);
        // Shuffled and shared pages; ids past a sequence's length are never read.
        const std::int64_t max_seq = 3 * page_size;
        TestTensor table(DType::kInt32, {4, 3}, Layout::kPadded), lens(strided ? DType::kInt32 : DType::kInt64, {4});
        table.fill({5, 0, 3, 0, 5, -7, 1000, -1, -1, 4, 99, 99});
        lens.fill({static_cast<double>(max_seq),
                   static_cast<double>(page_size + 1 < 2 * page_size ? page_size + 1 : page_size), 0, 1});
        for (const std::int64_t page : {0, 3, 4, 5})
          for (std::int64_t i = 0; i < page_size * kHeads * kDim; ++i) {
            pages.k.set(page * page_size * kHeads * kDim + i, static_cast<double>(page * 300 + i % 300));
            if (i < page_size * kHeads * kDimV)
              pages.v.set(page * page_size * kHeads * kDimV + i, static_cast<double>(-page * 300 - i % 300));
          }
        TestTensor k(dtype, {4, max_seq, kHeads, kDim}, strided ? Layout::kSwapped : Layout::kContiguous),
            v(dtype, {4, max_seq, kHeads, kDimV}, Layout::kPadded);
        k.fill(kNaN), v.fill(kNaN);
        kv_read(pages.k, pages.v, table, lens, k, v);
        const auto want = [&](const TestTensor& source, std::int64_t dim) {
          std::vector<double> values;
          for (std::int64_t b = 0; b < 4; ++b)
            for (std::int64_t t = 0; t < max_seq; ++t)
              for (std::int64_t i = 0; i < kHeads * dim; ++i) {
                const bool exists = static_cast<double>(t) < lens[b];
                const auto page = exists ? static_cast<std::int64_t>(table[b * 3 + t / page_size]) : 0;
                values.push_back(exists ? source[(page * page_size + t % page_size) * kHeads * dim + i] : 0.0);
              }
          return values;
        };
        expect_close(k, want(pages.k, kDim), 0, "k");
        expect_close(v, want(pages.v, kDimV), 0, "v");
      }
}

TEST(KvRead, ReadsBackWhatWasAppendedBitForBit) {
  Pages pages(DType::kFloat16, 4);
  TestTensor k(DType::kFloat16, {4, kHeads, kDim}), v(DType::kFloat16, {4, kHeads, kDimV}), slots(DType::kInt32, {4});
  for (std::int64_t i = 0; i < k.numel(); ++i)
    static_cast<std::uint16_t*>(k.view().data)[i] =
        static_cast<std::uint16_t>(0x7c00 + 11 * i);  // infinities and NaN payloads
  v.random(1), slots.fill({8, 9, 10, 11});
  kv_append(k, v, pages.k, pages.v, slots);
  TestTensor table(DType::kInt32, {1, 1}), lens(DType::kInt64, {1}), k_out(DType::kFloat16, {1, 4, kHeads, kDim}),
      v_out(DType::kFloat16, {1, 4, kHeads, kDimV});
  table.fill(2), lens.fill(4);
  kv_read(pages.k, pages.v, table, lens, k_out, v_out);
  EXPECT_EQ(k.bytes(), k_out.bytes());
  EXPECT_EQ(v.bytes(), v_out.bytes());
}

TEST(KvRead, Refusals) {
  const DType f32 = DType::kFloat32;
  Pages pages(f32, 4);
  TestTensor table(DType::kInt32, {2, 2}), lens(DType::kInt64, {2}), k(f32, {2, 8, kHeads, kDim}),
      v(f32, {2, 8, kHeads, kDimV});
  table.fill({0, 1, 2, 3}), lens.fill({8, 5});
  const auto refused = [&](const TensorView& kp, const TensorView& t, const TensorView& l, const TensorView& a,
                           const TensorView& b, std::vector<std::string> fragments) {
    expect_refused<InvalidArgument>([&] { kv_read(kp, pages.v, t, l, a, b); }, "kv_read", fragments,
                                    {&k, &v, &pages.k});
  };
  TestTensor wide_table(DType::kInt64, {2, 2}), one_len(DType::kInt64, {1}), short_k(f32, {2, 7, kHeads, kDim}),
      three(f32, {3, 8, kHeads, kDim}), half(DType::kFloat16, {2, 8, kHeads, kDim});
  TestTensor flat(DType::kInt32, {4}), heads(f32, {2, 8, 2, kDim});
  refused({}, table, lens, k, v, {"k_pages is absent"});
  refused(pages.k, {}, lens, k, v, {"block_table is absent"});
  refused(pages.k, wide_table, lens, k, v, {"block_table is int64", "needs int32"});
  refused(pages.k, flat, lens, k, v, {"block_table is int32[4] on cpu; needs 2 dims"});
  refused(pages.k, table, one_len, k, v, {"seq_lens.shape[0]=1", "needs 2"});
  refused(pages.k, table, lens, three, v, {"k_out.shape[0]=3", "block_table.shape[0]=2"});
  refused(pages.k, table, lens, heads, v, {"k_out.shape[2]=2", "k_pages.shape[2]=3"});
  refused(pages.k, table, lens, half, v, {"k_out is float16", "needs float32"});
  refused(pages.k, table, lens, short_k, v, {"v_out.shape[1]=8", "k_out.shape[1]=7"});
  refused(pages.k, table, lens, k, {}, {"v_out is absent"});
  for (const double bad : {6.0, -1.0, 2147483647.0}) {
    table.set(3, bad);
    refused(pages.k, table, lens, k, v,
            {"block_table[1][1]=" + std::to_string(static_cast<std::int64_t>(bad)), "from 0 to 5", "num_pages=6"});
  }
  table.set(3, 3);
  for (const double bad : {9.0, -1.0}) {
    lens.set(0, bad);
    refused(pages.k, table, lens, k, v,
            {"seq_lens[0]=" + std::to_string(static_cast<std::int64_t>(bad)), "from 0 to 8"});
  }
  TestTensor long_k(f32, {2, 9, kHeads, kDim}), long_v(f32, {2, 9, kHeads, kDimV});
  lens.set(0, 9);
  refused(pages.k, table, lens, long_k, long_v, {"seq_lens[0]=9", "from 0 to 8", "block_table.shape[1] * page_size"});
  lens.set(0, 8);
  TensorView inside = k.view();
  inside.data = pages.k.view().data;
  refused(pages.k, table, lens, inside, v, {"k_out shares memory with k_pages"});
}

TEST(KvCopyPages, CopiesAndRefuses) {
  for (const DType dtype : floating_dtypes())
    for (const bool strided : {false, true}) {
      Pages pages(dtype, 4, strided);
      pages.k.random(1), pages.v.random(2);
      auto want_k = pages.k.values(), want_v = pages.v.values();
      TestTensor src(DType::kInt32, {3}), dst(DType::kInt64, {3});
      src.fill({4, 0, 4}), dst.fill({1, 5, 2});
      for (std::size_t i = 0; i < 3; ++i) {
        const auto from = static_cast<std::ptrdiff_t>(src[static_cast<std::int64_t>(i)]),
                   to = static_cast<std::ptrdiff_t>(dst[static_cast<std::int64_t>(i)]);
        std::copy_n(want_k.begin() + from * 4 * kHeads * kDim, 4 * kHeads * kDim,
                    want_k.begin() + to * 4 * kHeads * kDim);
        std::copy_n(want_v.begin() + from * 4 * kHeads * kDimV, 4 * kHeads * kDimV,
                    want_v.begin() + to * 4 * kHeads * kDimV);
      }
      kv_copy_pages(pages.k, pages.v, src, dst);
      expect_close(pages.k, want_k, 0, "k");
      expect_close(pages.v, want_v, 0, "v");
    }
  Pages pages(DType::kFloat32, 4);
  TestTensor src(DType::kInt64, {2}), dst(DType::kInt64, {2}), one(DType::kInt64, {1}), none(DType::kInt64, {0});
  kv_copy_pages(pages.k, pages.v, none, none);
  const auto refused = [&](std::vector<double> from, std::vector<double> to, std::vector<std::string> fragments) {
    src.fill(from), dst.fill(to);
    expect_refused<InvalidArgument>([&] { kv_copy_pages(pages.k, pages.v, src, dst); }, "kv_copy_pages", fragments,
                                    {&pages.k, &pages.v});
  };
  refused({0, 6}, {1, 2}, {"src[1]=6", "from 0 to 5"});
  refused({0, 1}, {-1, 2}, {"dst[0]=-1", "from 0 to 5"});
  refused({0, 1}, {3, 3}, {"dst names page 3 twice"});
  refused({0, 1}, {2, 0}, {"src[0]=0 is in dst too"});
  refused({4, 1}, {2, 4}, {"src[0]=4 is in dst too"});
  expect_refused<InvalidArgument>([&] { kv_copy_pages(pages.k, pages.v, src, one); }, "kv_copy_pages",
                                  {"dst.shape[0]=1", "needs 2"}, {&pages.k});
}

TEST(CheckBlockTable, NamesTheFirstBadEntry) {
  TestTensor table(DType::kInt32, {2, 3}), lengths(DType::kInt32, {2});
  table.fill({0, 5, 99, 2, -3, 6}), lengths.fill({20, 16});
  EXPECT_NO_THROW(check_block_table(table, lengths, 6, 16));
  const auto expect = [&](std::int64_t sequence, std::int64_t slot, std::int64_t page, const char* text) {
    try {
      check_block_table(table, lengths, 6, 16);
      FAIL() << "no error";
    } catch (const BadBlockTable& error) {
      EXPECT_EQ(error.sequence, sequence);
      EXPECT_EQ(error.slot, slot);
      EXPECT_EQ(error.page, page);
      EXPECT_STREQ(error.what(), text);
    }
  };
  lengths.fill({20, 48});
  expect(1, 1, -3, "check_block_table: block_table[1, 1]=-3; page ids are 0 to 5");
  lengths.fill({33, 48});
  expect(0, 2, 99, "check_block_table: block_table[0, 2]=99; page ids are 0 to 5");
  lengths.fill({49, 48});
  expect(0, -1, 49, "check_block_table: seq_lens[0]=49; block_table has room for 0 to 48 tokens a sequence");
  EXPECT_THROW(check_block_table(table, lengths, -1, 16), InvalidArgument);
  EXPECT_THROW(check_block_table(table, lengths, 6, 0), InvalidArgument);
}

}  // namespace
}  // namespace flashkernel
