// Cases of kv_append, kv_read, kv_copy_pages and find_bad_page: pages in any order, skipped slots, RoPE on the way, far
// strides.
#include <array>
#include <limits>

#include "conformance/conformance.hpp"
#include "conformance/each_dtype.hpp"
#include "flashkernel/kv_ops.hpp"

namespace flashkernel::conformance {
namespace {

struct Spec {
  DType dtype;
  std::int64_t pages, page_size, heads, dim, dim_v;
  std::int64_t tokens = 0, max_seq = 0;  // append; read
  Layout k_pages = {}, v_pages = {}, k = {}, v = {};
  bool rope = false, interleaved = false, in_place = false;
  std::int64_t heads_q = 0, rotary = -1;
  Layout q = {};
  DType pages_dtype = DType::kFloat32;  // 8-bit pages: theirs; else not used
  bool token_scales = false;
  std::int64_t table_rows = 0;  // of cos and sin for RoPE; 0: none
  DType table_dtype = DType::kFloat32;
  bool places = false;  // tokens go behind those of their sequences
  bool norms = false;   // RMSNorm of heads before they are rotated
  DType norm_dtype = DType::kFloat32;
  bool odd_values = false;  // NaN, infinities, zeros and values far apart

  bool packed() const { return is_packed(pages_dtype); }
  DType cache() const { return is_quantized(pages_dtype) || packed() ? pages_dtype : dtype; }
  /// Of a row of pages as tensors count.
  std::int64_t columns(std::int64_t of) const { return packed() ? of / 2 : of; }
};

/// Scales of 4-bit pages, and zeros of int4.
KvScales make_group_scales(Call& call, const Spec& s, bool written) {
  const bool int4 = s.pages_dtype == DType::kInt4x2;
  KvScales scales;
  for (TensorView* view : {&scales.k, &scales.v}) {
    const bool is_v = view == &scales.v;
    const std::int64_t group = int4 ? kInt4Group : kNvfp4Group, groups = ((is_v ? s.dim_v : s.dim) + group - 1) / group;
    const Shape shape =
        int4 ? Shape{s.pages, s.heads, s.page_size, groups, 2} : Shape{s.pages, s.heads, s.page_size, groups};
    const Layout layout = int4 ? Layout{{}, {1, 0, 2, 3, 4}, 0, 2} : Layout{{}, {1, 0, 2, 3}, 3, 1};
    const DType dtype = int4 ? DType::kFloat16 : DType::kFloat8E4M3;
    const char* const name = is_v ? "v_scales" : "k_scales";
    TestTensor& tensor = written ? call.in_out(name, dtype, shape, layout) : call.input(name, dtype, shape, layout);
    tensor.fill([&] { return (0.5 + call.random.uniform()) / 40; });
    *view = tensor.view();
  }
  if (!int4) scales.k_tensor = 3.0f, scales.v_tensor = 0.7f;
  return scales;
}

/// Scales of 8-bit pages: one for each head, given; or one for each token and head. Absent for other pages.
KvScales make_scales(Call& call, const Spec& s, bool written) {
  if (s.packed()) return make_group_scales(call, s, written);
  if (!is_quantized(s.pages_dtype)) return {};
  KvScales scales;
  for (TensorView* view : {&scales.k, &scales.v}) {
    const char* const name = view == &scales.k ? "k_scales" : "v_scales";
    const Layout layout{{}, {1, 0, 2}, 3, 1};
    TestTensor& tensor = !s.token_scales ? call.input(name, DType::kFloat32, {s.heads})
                         : written       ? call.in_out(name, DType::kFloat32, {s.pages, s.heads, s.page_size}, layout)
                                         : call.input(name, DType::kFloat32, {s.pages, s.heads, s.page_size}, layout);
    tensor.fill([&] { return (0.5 + call.random.uniform()) / 40; });
    *view = tensor.view();
  }
  return scales;
}

/// What a row of keys or values can hold besides numbers of one size, a token each.
void make_odd(TestTensor& tensor) {
  const Shape& shape = tensor.shape();
  const double values[] = {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
                           -std::numeric_limits<double>::infinity(), 1e4, 0};
  for (std::int64_t t = 0; t < shape[0]; ++t)
    for (std::int64_t h = 0; h < shape[1]; ++h) {
      if (t % 7 < 5) tensor.set_at({t, h, (t + h) % shape[2]}, values[t % 7]);
      for (std::int64_t d = 0; d < shape[2]; ++d) {
        if (t % 7 == 5) tensor.set_at({t, h, d}, 0);                                  // a row of zeros
        if (t % 7 == 6) tensor.set_at({t, h, d}, 6e-8 * static_cast<double>(d + 1));  // subnormal in fp16
      }
    }
}

DType index_dtype(const Spec& s) { return s.dtype == DType::kBFloat16 ? DType::kInt32 : DType::kInt64; }

void build_append(Call& call, const Spec& s) {
  // Angles in fp32 and in fp64 part where an 8-bit element is rounded: by one step then.
  // Normed numbers are rounded before they are turned: a neighbour then, and both of a pair.
  const double factor = s.norms ? 3 : s.rope && (is_quantized(s.pages_dtype) || s.packed()) ? 2 : 1;
  TestTensor& k_pages =
      call.in_out("k_pages", s.cache(), {s.pages, s.page_size, s.heads, s.columns(s.dim)}, s.k_pages, factor);
  TestTensor& v_pages =
      call.in_out("v_pages", s.cache(), {s.pages, s.page_size, s.heads, s.columns(s.dim_v)}, s.v_pages);
  TestTensor& k = call.input("k", s.dtype, {s.tokens, s.heads, s.dim}, s.k);
  TestTensor& v = call.input("v", s.dtype, {s.tokens, s.heads, s.dim_v}, s.v);
  if (s.odd_values) make_odd(k), make_odd(v);
  const KvScales scales = make_scales(call, s, true);
  std::vector<std::int64_t> slots, positions;
  for (std::int64_t i = 0; i < s.pages * s.page_size; ++i) slots.push_back(i);
  call.random.shuffle(slots);
  slots.resize(static_cast<std::size_t>(s.tokens), -1);
  for (std::size_t t = 2; t < slots.size(); t += 5) slots[t] = -1 - static_cast<std::int64_t>(t);
  for (std::int64_t t = 0; t < s.tokens; ++t)
    positions.push_back(call.random.integer(0, s.table_rows > 0 ? s.table_rows - 1 : 100000));
  const std::int64_t batch = 3, columns = s.pages / batch;
  KvAppendPlaces places;
  if (s.places) {  // sequences of their own pages: one of no token, one that begins inside a page
    std::vector<std::int64_t> table(static_cast<std::size_t>(batch * columns));
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int64_t>(i);
    call.random.shuffle(table);
    const std::int64_t first = s.tokens / 3;
    places.block_table = call.indices("block_table", DType::kInt32, {batch, columns}, table, {{}, {}, 3}).view();
    places.seq_lens = call.indices("seq_lens", index_dtype(s), {batch}, {s.page_size / 2, 5, 0}).view();
    places.cu_seqlens = call.indices("cu_seqlens", index_dtype(s), {batch + 1}, {0, first, first, s.tokens}).view();
    if (s.interleaved) places.positions = call.indices("first_positions", index_dtype(s), {batch}, {7, 0, 3}).view();
    places.seq_lens_after = call.output("seq_lens_after", DType::kInt32, {batch}).view();
  }
  TestTensor& slot = call.indices("slots", index_dtype(s), {s.tokens}, slots);
  if (!s.rope && s.places) {
    call.run = [&, scales, places](const ExecutionContext& context) {
      kv_append_to_sequences(k.view(), v.view(), k_pages.view(), v_pages.view(), scales, places, std::nullopt, context);
    };
    return;
  }
  if (!s.rope) {
    call.run = [&, scales](const ExecutionContext& context) {
      kv_append(k.view(), v.view(), k_pages.view(), v_pages.view(), scales, slot.view(), std::nullopt, context);
    };
    return;
  }
  TestTensor& position = call.indices("positions", index_dtype(s), {s.tokens}, positions);
  TestTensor *q = nullptr, *q_out = nullptr;
  if (s.heads_q > 0) {
    const Shape shape{s.tokens, s.heads_q, s.dim};
    q = s.in_place ? &call.in_out("q", s.dtype, shape, s.q, factor) : &call.input("q", s.dtype, shape, s.q);
    q_out = s.in_place ? q : &call.output("q_out", s.dtype, shape, {}, factor);
  }
  TestTensor* const k_norm = s.norms ? &call.input("k_norm", s.norm_dtype, {s.dim}) : nullptr;
  TestTensor* const q_norm = s.norms && q ? &call.input("q_norm", s.norm_dtype, {s.dim}) : nullptr;
  TestTensor *cos = nullptr, *sin = nullptr;
  if (s.table_rows > 0) {
    const Shape shape{s.table_rows, (s.rotary < 0 ? s.dim : s.rotary) / 2};
    cos = &call.input("cos", s.table_dtype, shape, {{}, {}, 3, 1});
    sin = &call.input("sin", s.table_dtype, shape, {{}, {}, 5});
  }
  RopeOptions options;
  options.rotary_dim = s.rotary, options.interleaved = s.interleaved;
  call.run = [=, &k, &v, &k_pages, &v_pages, &slot, &position](const ExecutionContext& context) {
    KvAppendRope rope;
    if (!s.places) rope.positions = position.view();
    rope.options = options;
    if (cos) rope.cos = cos->view(), rope.sin = sin->view();
    if (q) rope.q = q->view(), rope.q_out = q_out->view();
    if (k_norm) rope.k_norm = k_norm->view();
    if (q_norm) rope.q_norm = q_norm->view();
    if (s.places)
      kv_append_to_sequences(k.view(), v.view(), k_pages.view(), v_pages.view(), scales, places, rope, context);
    else
      kv_append(k.view(), v.view(), k_pages.view(), v_pages.view(), scales, slot.view(), rope, context);
  };
}

void build_read(Call& call, const Spec& s) {
  const std::int64_t batch = 4, max_pages = (s.max_seq + s.page_size - 1) / s.page_size;
  TestTensor& k_pages = call.input("k_pages", s.cache(), {s.pages, s.page_size, s.heads, s.columns(s.dim)}, s.k_pages);
  TestTensor& v_pages =
      call.input("v_pages", s.cache(), {s.pages, s.page_size, s.heads, s.columns(s.dim_v)}, s.v_pages);
  if (s.odd_values && !s.packed()) k_pages.set(3, std::numeric_limits<double>::quiet_NaN());
  const KvScales scales = make_scales(call, s, false);
  // Full, empty, one token, anything; table entries past a sequence's pages are no pages at all.
  const std::vector<std::int64_t> lens{s.max_seq, 0, s.max_seq > 0 ? 1 : 0, call.random.integer(0, s.max_seq)};
  std::vector<std::int64_t> table;
  for (const std::int64_t len : lens)
    for (std::int64_t page = 0; page < max_pages; ++page)
      table.push_back(page * s.page_size < len ? call.random.integer(0, s.pages - 1) : (page % 2 ? -1 : 2147483647));
  TestTensor& blocks = call.indices("block_table", DType::kInt32, {batch, max_pages}, table, {{}, {}, /*gap=*/3});
  TestTensor& len = call.indices("seq_lens", index_dtype(s), {batch}, lens);
  TestTensor& k = call.output("k_out", s.dtype, {batch, s.max_seq, s.heads, s.dim}, s.k);
  TestTensor& v = call.output("v_out", s.dtype, {batch, s.max_seq, s.heads, s.dim_v}, s.v);
  call.run = [&, scales](const ExecutionContext& context) {
    kv_read(k_pages.view(), v_pages.view(), scales, blocks.view(), len.view(), k.view(), v.view(), context);
  };
}

void build_copy(Call& call, const Spec& s) {
  TestTensor& k_pages = call.in_out("k_pages", s.cache(), {s.pages, s.page_size, s.heads, s.columns(s.dim)}, s.k_pages);
  TestTensor& v_pages =
      call.in_out("v_pages", s.cache(), {s.pages, s.page_size, s.heads, s.columns(s.dim_v)}, s.v_pages);
  const KvScales scales = make_scales(call, s, true);
  std::vector<std::int64_t> pages, src, dst;
  for (std::int64_t page = 0; page < s.pages; ++page) pages.push_back(page);
  call.random.shuffle(pages);
  const std::int64_t sources = s.pages / 3;  // each read twice, the others written
  for (std::int64_t i = 0; i < 2 * sources; ++i) {
    src.push_back(pages[static_cast<std::size_t>(i % sources)]);
    dst.push_back(pages[static_cast<std::size_t>(sources + i)]);
  }
  TestTensor& from = call.indices("src", index_dtype(s), {2 * sources}, src);
  TestTensor& to = call.indices("dst", DType::kInt32, {2 * sources}, dst);
  call.run = [&, scales](const ExecutionContext& context) {
    kv_copy_pages(k_pages.view(), v_pages.view(), scales, from.view(), to.view(), context);
  };
}

void find_cases(CaseList& list) {
  struct Table {
    const char* name;
    std::int64_t page_size, max_pages;
    std::vector<std::int64_t> lengths;
    std::vector<std::array<std::int64_t, 3>> entries;  // sequence, slot, page
  };
  // 37 sequences: more than a block has warps; 70 columns: more than a warp looks at at once.
  const std::vector<std::int64_t> many(37, 70 * 16);
  const Table tables[] = {
      {"good", 16, 70, many, {}},
      {"past_the_end", 16, 70, many, {{5, 3, 20}}},
      {"negative", 16, 70, many, {{36, 69, -1}}},
      {"least_sequence_first", 16, 70, many, {{33, 0, 20}, {2, 68, 21}, {2, 69, -7}, {1, 40, 2147483647}}},
      {"unused_entries_may_be_anything", 16, 4, {33, 0, 48}, {{0, 3, 99}, {1, 0, -1}, {2, 3, 20}}},
      {"last_used_entry", 16, 4, {33, 0, 49}, {{0, 3, 99}, {1, 0, -1}, {2, 3, 20}}},
      {"length_past_the_table", 7, 3, {21, 22, -1}, {}},
      {"negative_length", 7, 3, {21, 0, -1}, {}},
      {"no_columns", 256, 0, {0, 0}, {}},
      {"no_sequence", 16, 3, {}, {}},
  };
  for (const Table& table : tables)
    for (const DType dtype : {DType::kInt32, DType::kInt64})
      list.add(std::string(table.name) + (dtype == DType::kInt32 ? "_int32" : "_int64"), [=](Call& call) {
        const auto batch = static_cast<std::int64_t>(table.lengths.size());
        std::vector<std::int64_t> pages;
        for (std::int64_t i = 0; i < batch * table.max_pages; ++i) pages.push_back(call.random.integer(0, 19));
        for (const auto& entry : table.entries)
          pages[static_cast<std::size_t>(entry[0] * table.max_pages + entry[1])] = entry[2];
        TestTensor& blocks = call.indices("block_table", DType::kInt32, {batch, table.max_pages}, pages, {{}, {}, 5});
        TestTensor& lengths = call.indices("seq_lens", dtype, {batch}, table.lengths);
        TestTensor& fault = call.output("fault", DType::kInt64, {3});
        const std::int64_t page_size = table.page_size;
        call.run = [&, page_size](const ExecutionContext& context) {
          find_bad_page(blocks.view(), lengths.view(), 20, page_size, fault.view(), context);
        };
      });
}

using Build = void (*)(Call&, const Spec&);

// What pages of the tokens' dtype and of 8 bits have in common; `add` takes a name and a Spec.
template <class Add>
void page_size_case(DType dtype, std::int64_t page_size, const Add& add) {
  Spec spec{dtype, 4, page_size, 2, 16, 16};
  spec.tokens = 3 * page_size, spec.max_seq = 2 * page_size + 1;
  add("page_size" + std::to_string(page_size), spec);
}

Spec dim_spec(DType dtype, std::int64_t dim) {
  Spec spec{dtype, 6, 16, 3, dim, dim % 2 ? dim + 4 : dim};
  spec.tokens = 37, spec.max_seq = 41;
  return spec;
}

template <class Add>
void few_tokens_and_strides(DType dtype, const Add& add) {
  Spec one{dtype, 3, 16, 4, 64, 64};
  one.tokens = one.max_seq = 1;
  add("one_token", one);
  one.tokens = one.max_seq = 0;
  add("no_tokens", one);
  Spec strided{dtype, 6, 16, 3, 24, 40};
  strided.tokens = 30, strided.max_seq = 50;
  strided.k_pages = {{}, {0, 2, 1, 3}, 3, 1}, strided.v_pages = {{}, {2, 0, 1, 3}, 5};
  strided.k.gap = 7, strided.k.offset = 1, strided.v.gap = 1;
  add("strides", strided);
  strided.places = true;
  add("behind", strided);
}

template <class Add>
void rope_cases(DType dtype, const Add& add) {
  for (const bool interleaved : {false, true}) {
    const std::string form = interleaved ? "_interleaved" : "_halves";
    Spec rope{dtype, 6, 16, 3, 64, 48};
    rope.tokens = 40, rope.rope = true, rope.interleaved = interleaved;
    add("rope_k_only" + form, rope);
    rope.heads_q = 7;
    for (const std::int64_t dim : {2, 34, 64, 128}) {
      rope.dim = dim;
      add("rope" + std::to_string(dim) + form, rope);
    }
    rope.rotary = 48;
    rope.q = {{}, {1, 0, 2}, 5, 1};
    add("rope_partial" + form, rope);
    rope.in_place = true;
    add("rope_in_place" + form, rope);
    Spec table{dtype, 6, 16, 3, 64, 48};
    table.tokens = 40, table.rope = true, table.interleaved = interleaved, table.table_rows = 90;
    add("table_k_only" + form, table);
    table.heads_q = 5;
    for (const DType kind : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      table.table_dtype = kind;
      add("table_" + std::string(dtype_name(kind)) + form, table);
    }
    table.dim = 34;  // no whole vectors
    add("table34" + form, table);
    table.dim = 64, table.rotary = 48;
    add("table_partial" + form, table);
    table.places = rope.places = true;
    rope.in_place = false;
    add("rope_behind" + form, rope);
    add("table_behind" + form, table);
  }
}

template <class Add>
void norm_cases(DType dtype, const Add& add) {
  for (const bool interleaved : {false, true}) {
    const std::string form = interleaved ? "_interleaved" : "_halves";
    Spec spec{dtype, 6, 16, 3, 64, 48};
    spec.tokens = 20, spec.rope = spec.norms = true, spec.interleaved = interleaved;
    add("norm_k_only" + form, spec);
    spec.heads_q = 5;
    for (const std::int64_t dim : {2, 34, 96, 128, 512}) {
      spec.dim = dim;
      add("norm" + std::to_string(dim) + form, spec);
    }
    spec.dim = 64, spec.rotary = 48, spec.norm_dtype = dtype;
    spec.q = {{}, {1, 0, 2}, 5, 1};
    add("norm_partial" + form, spec);
    spec.in_place = true;
    add("norm_in_place" + form, spec);
    spec.table_rows = 90, spec.places = true;
    add("norm_table_behind" + form, spec);
    spec.dim = 640, spec.rotary = -1, spec.places = false;  // more than a GPU's kernel norms
    add("norm640" + form, spec);
  }
}

template <Build kBuild>
void cases(CaseList& list) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    const auto add = [&](const std::string& name, const Spec& spec) {
      list.add(name + suffix, [=](Call& call) { kBuild(call, spec); });
    };
    for (const std::int64_t page_size : {1, 16, 32, 64, 128, 256}) page_size_case(dtype, page_size, add);
    for (const std::int64_t dim : {1, 8, 33, 64, 100, 128, 256}) add("dim" + std::to_string(dim), dim_spec(dtype, dim));
    few_tokens_and_strides(dtype, add);
    Spec far{dtype, 3, 4, 2, 24, 24};
    far.tokens = 9, far.max_seq = 10;
    far.k_pages.strides = {kFarStride, 48, 24, 1}, far.v_pages.strides = {24, 48 * 4, kFarStride, 1};
    add("strides_past_2_31", far);
    if (kBuild != static_cast<Build>(build_append)) return;
    rope_cases(dtype, add);
    norm_cases(dtype, add);
    for (const bool interleaved : {false, true}) {
      const std::string form = interleaved ? "_interleaved" : "_halves";
      Spec large{dtype, 2, 16, 2, 640, 16};  // more pairs than a block of threads takes
      large.tokens = 20, large.heads_q = 1, large.rope = true, large.interleaved = interleaved;
      add("rope640" + form, large);
      Spec many{dtype, 40, 16, 2, 64, 48};  // several tokens a block on a large GPU
      many.tokens = 600, many.heads_q = 3, many.rope = true, many.interleaved = interleaved;
      add("rope_600_tokens" + form, many);
      large.table_rows = many.table_rows = 70;
      add("table640" + form, large);
      add("table_600_tokens" + form, many);
    }
  });
}

// 8-bit pages: every dtype of tokens, both dtypes of elements, both kinds of scales.
template <Build kBuild>
void quantized_cases(CaseList& list) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    for (const DType pages : {DType::kFloat8E4M3, DType::kInt8})
      for (const bool token_scales : {false, true}) {
        const auto add = [&](const std::string& name, Spec spec) {
          spec.pages_dtype = pages, spec.token_scales = token_scales;
          list.add(std::string(pages == DType::kInt8 ? "int8_" : "e4m3_") + (token_scales ? "token_" : "head_") + name +
                       suffix,
                   [=](Call& call) { kBuild(call, spec); });
        };
        for (const std::int64_t page_size : {1, 16, 256}) page_size_case(dtype, page_size, add);
        for (const std::int64_t dim : {1, 33, 64, 128, 256, 520}) {
          Spec spec = dim_spec(dtype, dim);
          add("dim" + std::to_string(dim), spec);
          if (dim == 1) continue;
          spec.odd_values = true;
          add("odd_values_dim" + std::to_string(dim), spec);
        }
        few_tokens_and_strides(dtype, add);
        if (kBuild == static_cast<Build>(build_append)) rope_cases(dtype, add);
      }
  });
}

// 4-bit pages: every dtype of tokens; NVFP4's are not appended to.
template <Build kBuild>
void packed_cases(CaseList& list) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    for (const DType pages : {DType::kInt4x2, DType::kFloat4E2M1x2}) {
      if (pages != DType::kInt4x2 && kBuild == static_cast<Build>(build_append)) continue;
      const auto add = [&](const std::string& name, Spec spec) {
        spec.pages_dtype = pages;
        list.add((pages == DType::kInt4x2 ? "int4_" : "nvfp4_") + name + suffix,
                 [=](Call& call) { kBuild(call, spec); });
      };
      for (const std::int64_t page_size : {1, 16}) page_size_case(dtype, page_size, add);
      for (const std::int64_t dim : {2, 34, 64, 80, 128, 256, 520}) {
        Spec spec = dim_spec(dtype, dim);
        add("dim" + std::to_string(dim), spec);
        if (dim == 2) continue;
        spec.odd_values = true;
        add("odd_values_dim" + std::to_string(dim), spec);
      }
      few_tokens_and_strides(dtype, add);
      if (kBuild == static_cast<Build>(build_append)) rope_cases(dtype, add);
    }
  });
}

const OpCases append("kv_append", cases<build_append>);
const OpCases read("kv_read", cases<build_read>);
const OpCases copy("kv_copy_pages", cases<build_copy>);
const OpCases append_quantized("kv_append", quantized_cases<build_append>);
const OpCases read_quantized("kv_read", quantized_cases<build_read>);
const OpCases copy_quantized("kv_copy_pages", quantized_cases<build_copy>);
const OpCases append_packed("kv_append", packed_cases<build_append>);
const OpCases read_packed("kv_read", packed_cases<build_read>);
const OpCases copy_packed("kv_copy_pages", packed_cases<build_copy>);
const OpCases find("find_bad_page", find_cases);

}  // namespace
}  // namespace flashkernel::conformance
