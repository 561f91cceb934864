// Cases of attention_mla_decode: heads and queries round the tiles of 16, 32 and 64 rows, lengths round pages and
// parts, pages of any size, latent rows of DeepSeek's dims and of others, in 8 bits too, NaN where nobody looks. And of
// latent_append.
#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "conformance/conformance.hpp"
#include "conformance/each_dtype.hpp"
#include "flashkernel/attention_mla.hpp"

namespace flashkernel::conformance {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What latent rows are: in q's dtype, elements of 8 bits with a scale for each 128 of them, or with one for all.
enum class Form { kNumbers, kGroups, kOneScale };

struct Spec {
  Form form = Form::kNumbers;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> lengths = {37, 5};
  std::int64_t heads = 16, seq_q = 1, head_dim = 576, head_dim_v = 512, page_size = 64;
  bool causal = false, lse = true, check_pages = false;
  float scale = 0.0722f;  // of DeepSeek's 192 columns
  DType index_dtype = DType::kInt32;
  Layout q = {}, pages = {}, out = {}, lse_layout = {};
  int repeats = 2;
  double factor = 1;
  /// put(row, column, value); place(b, j): the row of key j of sequence b
  std::function<void(const std::function<void(std::int64_t, std::int64_t, double)>& put,
                     const std::function<std::int64_t(std::int64_t, std::int64_t)>& place)>
      adjust = {};

  std::int64_t groups() const { return (head_dim_v + 127) / 128; }
  std::int64_t row_elements() const {
    return form == Form::kGroups ? head_dim_v + 4 * groups() + 2 * (head_dim - head_dim_v) : head_dim;
  }
};

// Rows of bytes: elements, scales, and the key's columns in bfloat16.
void fill_grouped(TestTensor& latent, const Spec& spec, Random& random) {
  std::vector<double> bytes;
  for (std::int64_t row = 0; row < latent.shape()[0] * latent.shape()[1]; ++row) {
    const auto put = [&](std::uint64_t bits, int count) {
      for (int i = 0; i < count; ++i) bytes.push_back(static_cast<double>(bits >> 8 * i & 0xff));
    };
    for (std::int64_t d = 0; d < spec.head_dim_v; ++d) put(encode(DType::kFloat8E4M3, 40 * random.normal()), 1);
    for (std::int64_t g = 0; g < spec.groups(); ++g) put(encode(DType::kFloat32, 0.01 + 0.02 * random.uniform()), 4);
    for (std::int64_t d = spec.head_dim_v; d < spec.head_dim; ++d) put(encode(DType::kBFloat16, random.normal()), 2);
  }
  latent.fill(bytes);
}

void build(Call& call, const Spec& spec) {
  const auto batch = static_cast<std::int64_t>(spec.lengths.size()), size = spec.page_size;
  const auto pages_of = [&](std::int64_t length) { return (length + size - 1) / size; };
  std::int64_t num_pages = 2, longest = 0;  // two belong to nobody
  for (const std::int64_t length : spec.lengths) num_pages += pages_of(length), longest = std::max(longest, length);
  TestTensor& q = call.input("q", spec.dtype, {batch, spec.heads, spec.seq_q, spec.head_dim}, spec.q);
  const DType dtype = spec.form == Form::kNumbers  ? spec.dtype
                      : spec.form == Form::kGroups ? DType::kUInt8
                                                   : DType::kFloat8E4M3;
  TestTensor& latent = call.input("latent_pages", dtype, {num_pages, size, spec.row_elements()}, spec.pages);
  if (spec.form == Form::kGroups && !latent.blank()) fill_grouped(latent, spec, call.random);
  TestTensor* scale_of_all = nullptr;
  if (spec.form == Form::kOneScale) {
    scale_of_all = &call.input("latent_scale", DType::kFloat32, {1});
    scale_of_all->set(0, 0.0171875);
  }

  // Pages in random order; columns past a sequence's last page lead nowhere.
  std::vector<std::int64_t> free_pages(static_cast<std::size_t>(num_pages));
  std::iota(free_pages.begin(), free_pages.end(), 0);
  call.random.shuffle(free_pages);
  const std::int64_t columns = pages_of(longest) + 1;
  std::vector<std::int64_t> table(static_cast<std::size_t>(batch * columns), 0x7f000000);
  std::vector<std::int64_t> owned(static_cast<std::size_t>(num_pages), 0);
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = spec.lengths[static_cast<std::size_t>(b)];
    for (std::int64_t column = 0; column < pages_of(length); ++column) {
      const std::int64_t page = free_pages.back();
      free_pages.pop_back();
      table[static_cast<std::size_t>(b * columns + column)] = page;
      owned[static_cast<std::size_t>(page)] = std::min(size, length - column * size);
    }
  }
  if (!latent.blank()) {
    for (std::int64_t page = 0; page < num_pages; ++page)  // what no sequence owns
      for (std::int64_t token = owned[static_cast<std::size_t>(page)]; token < size; ++token)
        for (std::int64_t d = 0; d < spec.row_elements(); ++d)
          latent.set_at({page, token, d}, spec.form == Form::kGroups ? 255 : page % 2 ? kInfinity : kNan);
    const auto put = [&](std::int64_t row, std::int64_t column, double value) {
      const std::int64_t at = row * spec.row_elements();
      if (spec.form != Form::kGroups) {
        latent.set(at + column, value);
      } else if (column < spec.head_dim_v) {
        latent.set(at + column, static_cast<double>(encode(DType::kFloat8E4M3, value)));
      } else {
        const std::uint64_t bits = encode(DType::kBFloat16, value);
        for (int i = 0; i < 2; ++i)
          latent.set(at + 4 * spec.groups() + 2 * column - spec.head_dim_v + i,
                     static_cast<double>(bits >> 8 * i & 0xff));
      }
    };
    if (spec.adjust)
      spec.adjust(put, [&](std::int64_t b, std::int64_t j) {
        return table[static_cast<std::size_t>(b * columns + j / size)] * size + j % size;
      });
  }
  const TensorView block_table =
      call.indices("block_table", DType::kInt32, {batch, columns}, table, {{}, {}, 3, 0, {}}).view();
  const TensorView seq_lens = call.indices("seq_lens", spec.index_dtype, {batch}, spec.lengths).view();
  TestTensor& out =
      call.output("out", spec.dtype, {batch, spec.heads, spec.seq_q, spec.head_dim_v}, spec.out, spec.factor);
  TestTensor* lse = nullptr;
  if (spec.lse) lse = &call.output("lse", DType::kFloat32, {batch, spec.heads, spec.seq_q}, spec.lse_layout);
  call.repeats = spec.repeats;
  const float scale = spec.scale;
  const bool causal = spec.causal, check_pages = spec.check_pages;
  call.run = [=, &q, &latent, &out](const ExecutionContext& context) {
    attention_mla_decode(q.view(), latent.view(), block_table, seq_lens,
                         scale_of_all ? scale_of_all->view() : TensorView(), out.view(),
                         lse ? lse->view() : TensorView(), scale, causal, check_pages, context);
  };
}

void cases(CaseList& list) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    const auto add = [&](const std::string& name, Spec spec) {
      spec.dtype = dtype;
      list.add(name + suffix, [=](Call& call) { build(call, spec); });
    };
    // Heads round the tiles of rows; one, two and four queries, with and without the causal mask.
    for (const std::int64_t heads : {1, 8, 16, 17, 32, 64, 128}) {
      Spec spec;
      spec.heads = heads;
      add("heads" + std::to_string(heads), spec);
      spec.seq_q = heads <= 32 ? 4 : 2;
      spec.lengths = {70, 3, 0};
      add("heads" + std::to_string(heads) + "_queries", spec);
      spec.causal = true;
      add("heads" + std::to_string(heads) + "_causal", spec);
    }
    // Lengths round granules, tiles and pages; alone and among others.
    for (const std::int64_t length : {1, 15, 16, 17, 63, 64, 65, 129, 300}) {
      Spec spec;
      spec.lengths = {length};
      add("alone" + std::to_string(length), spec);
    }
    for (const std::int64_t size : {1, 7, 16, 32, 128}) {
      Spec spec;
      spec.page_size = size;
      spec.lengths = {100, 0, 33};
      spec.seq_q = 2, spec.causal = true;
      add("pages_of_" + std::to_string(size), spec);
    }
    Spec many;
    many.lengths.clear();
    for (std::int64_t b = 0; b < 40; ++b) many.lengths.push_back(b * 37 % 150);
    add("40_of_any_length", many);
    many.heads = 128;
    many.lengths = {513, 2, 700};
    add("long_of_128_heads", many);
    many.heads = 16;
    many.lengths.assign(40, 0);
    many.lengths[38] = 900;
    add("one_of_40_is_not_empty", many);
    Spec empty;
    empty.lengths = {0, 0};
    add("no_keys", empty);
    empty.lengths = {};
    add("no_sequences", empty);
    // Other dims.
    for (const auto& [dim, dim_v] :
         {std::pair<std::int64_t, std::int64_t>{48, 32}, {576, 576 - 64 - 8}, {40, 40}, {13, 5}}) {
      Spec spec;
      spec.head_dim = dim, spec.head_dim_v = dim_v;
      spec.lengths = {45, 130};
      spec.seq_q = 2, spec.causal = true;
      add("dim" + std::to_string(dim) + "_" + std::to_string(dim_v), spec);
    }
    // Layouts: [batch, seq, heads, head_dim], as projections give it, and rows that lie apart.
    Spec apart;
    apart.seq_q = 3, apart.causal = true, apart.lengths = {90, 41};
    apart.index_dtype = DType::kInt64;
    apart.q = {{}, {0, 2, 1, 3}, 8};
    apart.out = {{}, {0, 2, 1, 3}, 8};
    apart.lse_layout = {{}, {2, 0, 1}, 2, 3};
    apart.pages.gap = 16;
    add("apart", apart);
    apart.q.gap = 3, apart.q.offset = 1, apart.out.gap = 5, apart.out.offset = 1;
    add("q_unaligned", apart);
    apart.pages.gap = 3, apart.pages.offset = 1;
    add("unaligned", apart);
    Spec plain;
    plain.lse = false;
    plain.check_pages = true;
    add("no_lse", plain);
    plain.scale = -0.05f;
    add("negative_scale", plain);
    // Scores of every size; a row that only some queries see holds NaN, or infinity beside its value's columns.
    Spec large;
    large.lengths = {200};
    large.scale = 0.5f;
    large.factor = 4;  // scores to 50, whose rounding in fp32 is that of their weights
    add("large_scores", large);
    Spec special;
    special.seq_q = 4, special.causal = true;
    special.lengths = {68, 30};
    special.adjust = [](const auto& put, const auto& place) {
      const auto set = [&](std::int64_t b, std::int64_t j, std::int64_t d, double value) {
        put(place(b, j), d, value);
      };
      set(0, 67, 5, kNan);  // seen by the last query alone
      set(0, 66, 300, kNan);
      set(1, 29, 511, kNan);
      set(1, 28, 570, kInfinity);  // of the key alone
    };
    add("hidden_nan", special);
    special.heads = 64;
    add("hidden_nan_64_heads", special);

    // Rows of 8 bits.
    for (const auto& [form, word] :
         {std::pair<Form, const char*>{Form::kGroups, "groups_"}, {Form::kOneScale, "scale_"}}) {
      const auto add_narrow = [&](const std::string& name, Spec spec) {
        spec.form = form;
        add(word + name, spec);
      };
      for (const std::int64_t heads : {1, 16, 17, 64, 128}) {
        Spec spec;
        spec.heads = heads;
        spec.lengths = {70, 3, 0, 129};
        add_narrow("heads" + std::to_string(heads), spec);
      }
      Spec queries;
      queries.seq_q = 4, queries.causal = true, queries.lengths = {70, 3, 0};
      add_narrow("causal", queries);
      for (const std::int64_t size : {1, 7, 24}) {
        Spec spec;
        spec.page_size = size;
        spec.lengths = {100, 0, 33};
        add_narrow("pages_of_" + std::to_string(size), spec);
      }
      Spec narrow_long;
      narrow_long.heads = 128, narrow_long.lengths = {513, 2, 700};
      add_narrow("long", narrow_long);
      for (const auto& [dim, dim_v] :
           {std::pair<std::int64_t, std::int64_t>{48, 32}, {576, 500}, {40, 40}, {264, 132}}) {
        Spec spec;
        spec.head_dim = dim, spec.head_dim_v = dim_v;
        spec.lengths = {45, 130};
        spec.seq_q = 2, spec.causal = true;
        add_narrow("dim" + std::to_string(dim) + "_" + std::to_string(dim_v), spec);
      }
      Spec gaps = apart;
      gaps.q.gap = 8, gaps.q.offset = 0, gaps.out.gap = 8, gaps.out.offset = 0;
      gaps.pages = {};
      gaps.pages.gap = 16;
      add_narrow("apart", gaps);
      gaps.pages.gap = 4;
      add_narrow("unaligned", gaps);
      Spec hidden = special;
      hidden.heads = 16;
      add_narrow("hidden_nan", hidden);
    }
  });
}

struct AppendSpec {
  DType dtype = DType::kFloat32;
  std::int64_t tokens = 9, rank = 512, turned = 64, page_size = 16;
  bool one_scale = false, special = false;
  Layout latent = {}, key = {}, pages = {};
  DType index_dtype = DType::kInt32;
};

void build_append(Call& call, const AppendSpec& spec) {
  TestTensor& latent = call.input("latent", spec.dtype, {spec.tokens, spec.rank}, spec.latent);
  TestTensor& key = call.input("key", spec.dtype, {spec.tokens, spec.turned}, spec.key);
  if (spec.special && !latent.blank()) {
    latent.set_at({0, 3}, kInfinity);
    latent.set_at({1, 130}, kNan);
    for (std::int64_t d = 128; d < 256; ++d) latent.set_at({2, d}, d % 2 ? 0.0 : 1e-30);
    key.set_at({0, 1}, kNan);
    key.set_at({1, 2}, -kInfinity);
  }
  const std::int64_t num_pages = spec.tokens / spec.page_size + 2, groups = (spec.rank + 127) / 128;
  const std::int64_t columns = spec.rank + (spec.one_scale ? spec.turned : 4 * groups + 2 * spec.turned);
  TestTensor& pages = call.in_out("latent_pages", spec.one_scale ? DType::kFloat8E4M3 : DType::kUInt8,
                                  {num_pages, spec.page_size, columns}, spec.pages);
  std::vector<std::int64_t> slots(static_cast<std::size_t>(num_pages * spec.page_size));
  std::iota(slots.begin(), slots.end(), 0);
  call.random.shuffle(slots);
  slots.resize(static_cast<std::size_t>(spec.tokens));
  if (spec.tokens > 2) slots[2] = -1;
  const TensorView slot_view = call.indices("slots", spec.index_dtype, {spec.tokens}, slots).view();
  TestTensor* scale = nullptr;
  if (spec.one_scale) {
    scale = &call.input("latent_scale", DType::kFloat32, {1});
    scale->set(0, 0.009);
  }
  call.run = [=, &latent, &key, &pages](const ExecutionContext& context) {
    latent_append(latent.view(), key.view(), pages.view(), slot_view, scale ? scale->view() : TensorView(), context);
  };
}

void append_cases(CaseList& list) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    for (const bool one_scale : {false, true}) {
      const auto add = [&](const std::string& name, AppendSpec spec) {
        spec.dtype = dtype;
        spec.one_scale = one_scale;
        list.add((one_scale ? "scale_" : "groups_") + name + suffix, [=](Call& call) { build_append(call, spec); });
      };
      add("deepseek", {});
      AppendSpec spec;
      spec.tokens = 70, spec.index_dtype = DType::kInt64;
      spec.latent.gap = 8, spec.key.gap = 3, spec.pages.gap = 16;
      add("gaps", spec);
      spec.latent.gap = 3, spec.latent.offset = 1, spec.pages.gap = 4;
      add("unaligned", spec);
      AppendSpec small;
      small.rank = 32, small.turned = 16;
      add("small", small);
      small.rank = 196, small.turned = 0, small.page_size = 1;
      add("no_key", small);
      AppendSpec special;
      special.special = true;
      add("special", special);
      AppendSpec none;
      none.tokens = 0;
      add("no_tokens", none);
    }
  });
}

const OpCases registration("attention_mla_decode", cases);
const OpCases append_registration("latent_append", append_cases);

}  // namespace
}  // namespace flashkernel::conformance
