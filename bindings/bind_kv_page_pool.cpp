// Binds kv_page_pool.hpp: KvPagePool.
#include "array.hpp"
#include "bindings.hpp"
#include "kv_cache_types.hpp"

namespace flashkernel::python {
namespace {

nb::object as_array(const PyKvPagePool& self, const TensorView& view, bool raw) {
  Array array;
  array.view = view;
  array.owner = self.pool;
  return raw ? nb::cast(std::move(array)) : to_numpy(std::move(array));
}

nb::object pages(const PyKvPagePool& self, bool is_k, std::int64_t layer, bool raw) {
  return as_array(self, is_k ? self.pool->k_pages(layer) : self.pool->v_pages(layer), raw);
}

}  // namespace

void bind_kv_page_pool(nb::module_& module) {
  nb::class_<PyKvPagePool>(
      module, "KvPagePool",
      R"doc(Fixed-size pages for keys and values, taken and given back in O(1), with reference counts.

num_pages: pages of each layer. heads_kv, head_dim, head_dim_v (default: head_dim): of the keys and values.
page_size: tokens in a page: 16, 32, 64, 128 or 256.
num_layers: one page id covers the same tokens in every layer.
dtype: "float32", "float16", "bfloat16", "float8_e4m3fn", "int8" (or NumPy's or torch's object for it), or "int4", whose pages
   hold two elements a byte: uint8 [..., head_dim / 2].
token_scales: beside 8-bit pages, store a float32 scale a token and head (`scales`); False: the caller has scales of its own,
   one a head.
device: "cpu" or "cuda:<index>".

A page that was taken has one reference and returns to the free list with the last one. Thread-safe.

Raises: OutOfMemoryError when the storage can't be had; OutOfPagesError when pages run out; ValueError for bad sizes and for a
page that is not taken. Nothing has changed then.

Source: Kwon et al., PagedAttention (2023).

Example:

>>> import flashkernel as fk
>>> pool = fk.KvPagePool(4, heads_kv=2, head_dim=8, page_size=16, dtype="float32")
>>> page = pool.take()
>>> pool.num_free, pool.k_pages().shape
(3, (4, 16, 2, 8))
>>> pool.give_back(page)
)doc")
      .def(
          "__init__",
          [](PyKvPagePool* self, std::int64_t num_pages, std::int64_t heads_kv, std::int64_t head_dim,
             std::optional<std::int64_t> head_dim_v, std::int64_t page_size, std::int64_t num_layers, nb::handle dtype,
             bool token_scales, nb::handle device) {
            KvPagePoolOptions options;
            options.num_pages = num_pages;
            options.heads_kv = heads_kv;
            options.head_dim = head_dim;
            options.head_dim_v = head_dim_v.value_or(0);
            options.page_size = page_size;
            options.num_layers = num_layers;
            options.dtype = parse_dtype("KvPagePool", dtype);
            options.token_scales = token_scales;
            options.device = parse_device(device);
            const nb::gil_scoped_release release;
            new (self) PyKvPagePool{std::make_shared<KvPagePool>(options)};
          },
          "num_pages"_a, "heads_kv"_a, "head_dim"_a, nb::kw_only(), "head_dim_v"_a = nb::none(), "page_size"_a = 256,
          "num_layers"_a = 1, "dtype"_a = "float16", "token_scales"_a = true, "device"_a = "cpu",
          nb::sig(
              "def __init__(self, num_pages: int, heads_kv: int, head_dim: int, *, head_dim_v: int | None = None, "
              "page_size: int = 256, num_layers: int = 1, dtype: typing.Any = 'float16', token_scales: bool = True, "
              "device: typing.Any = 'cpu') -> None"))
      .def(
          "take", [](PyKvPagePool& self) { return self.pool->take(); }, "Takes one page and returns its id.")
      .def(
          "take_many",
          [](PyKvPagePool& self, std::int64_t count) {
            if (count < 0)
              throw InvalidArgument("KvPagePool.take_many: count=" + std::to_string(count) + "; must not be negative");
            // More pages than exist can't be served: the pool says so before anything is stored.
            std::vector<PageId> ids(static_cast<std::size_t>(std::min(count, self.pool->options().num_pages)));
            self.pool->take(count, ids.data());
            return ids;
          },
          "count"_a, "Takes `count` pages, or none and raises OutOfPagesError; returns their ids.")
      .def(
          "retain", [](PyKvPagePool& self, PageId page) { self.pool->retain(page); }, "page"_a,
          "One more reference to a page that is taken.")
      .def(
          "give_back", [](PyKvPagePool& self, PageId page) { self.pool->give_back(page); }, "page"_a,
          "One reference less; the last one frees the page.")
      .def(
          "num_references", [](const PyKvPagePool& self, PageId page) { return self.pool->num_references(page); },
          "page"_a, "References to a page; 0 if it is free.")
      .def(
          "k_pages",
          [](const PyKvPagePool& self, std::int64_t layer, bool raw) { return pages(self, true, layer, raw); },
          "layer"_a = 0, nb::kw_only(), "raw"_a = false,
          nb::sig("def k_pages(self, layer: int = 0, *, raw: bool = False) -> Array if raw else typing.Any"),
          "Keys of one layer, [num_pages, page_size, heads_kv, head_dim], as a NumPy view that keeps the pool alive "
          "(bfloat16 as uint16, float8_e4m3fn as uint8). On a GPU, or with raw=True, a flashkernel.Array, which DLPack "
          "hands to other frameworks.")
      .def(
          "v_pages",
          [](const PyKvPagePool& self, std::int64_t layer, bool raw) { return pages(self, false, layer, raw); },
          "layer"_a = 0, nb::kw_only(), "raw"_a = false,
          nb::sig("def v_pages(self, layer: int = 0, *, raw: bool = False) -> Array if raw else typing.Any"),
          "Values of one layer, [num_pages, page_size, heads_kv, head_dim_v]; else as `k_pages`.")
      .def(
          "k_layers", [](const PyKvPagePool& self, bool raw) { return as_array(self, self.pool->k_layers(), raw); },
          nb::kw_only(), "raw"_a = false,
          nb::sig("def k_layers(self, *, raw: bool = False) -> Array if raw else typing.Any"),
          "Keys of all layers, [num_layers, num_pages, page_size, heads_kv, head_dim]; else as `k_pages`.")
      .def(
          "v_layers", [](const PyKvPagePool& self, bool raw) { return as_array(self, self.pool->v_layers(), raw); },
          nb::kw_only(), "raw"_a = false,
          nb::sig("def v_layers(self, *, raw: bool = False) -> Array if raw else typing.Any"),
          "Values of all layers, [num_layers, num_pages, page_size, heads_kv, head_dim_v]; else as `k_pages`.")
      .def(
          "scales",
          [](const PyKvPagePool& self, std::int64_t layer, bool raw) -> nb::object {
            const KvScales scales = self.pool->scales(layer);
            if (!scales.k.defined()) return nb::none();
            const auto wrap = [&](const TensorView& view) {
              Array array;
              array.view = view;
              array.owner = self.pool;
              return raw ? nb::cast(std::move(array)) : to_numpy(std::move(array));
            };
            return nb::make_tuple(wrap(scales.k), wrap(scales.v));
          },
          "layer"_a = 0, nb::kw_only(), "raw"_a = false,
          nb::sig("def scales(self, layer: int = 0, *, raw: bool = False) -> tuple[Array, Array] | None if raw else "
                  "tuple[typing.Any, typing.Any] | None"),
          "(k_scales, v_scales) of one layer, float32 [num_pages, heads_kv, page_size], or of int4 float16 [num_pages, "
          "heads_kv, page_size, groups, 2], for the ops' kv_scales; None where the pool has none; else as `k_pages`.")
      .def_prop_ro(
          "num_free", [](const PyKvPagePool& self) { return self.pool->num_free(); }, "Pages that can be taken.")
      .def_prop_ro(
          "num_used", [](const PyKvPagePool& self) { return self.pool->num_used(); }, "Pages that are taken.")
      .def_prop_ro(
          "num_pages", [](const PyKvPagePool& self) { return self.pool->options().num_pages; }, "Pages of each layer.")
      .def_prop_ro(
          "page_size", [](const PyKvPagePool& self) { return self.pool->options().page_size; }, "Tokens in a page.")
      .def_prop_ro(
          "num_layers", [](const PyKvPagePool& self) { return self.pool->options().num_layers; }, "Layers.")
      .def_prop_ro(
          "heads_kv", [](const PyKvPagePool& self) { return self.pool->options().heads_kv; },
          "Heads of keys and values.")
      .def_prop_ro(
          "head_dim", [](const PyKvPagePool& self) { return self.pool->options().head_dim; }, "Head dim of the keys.")
      .def_prop_ro(
          "head_dim_v", [](const PyKvPagePool& self) { return extent(self.pool->v_pages(), 3); },
          "Head dim of the values.")
      .def_prop_ro(
          "dtype", [](const PyKvPagePool& self) { return dtype_name(self.pool->options().dtype); },
          "Name of the element type.")
      .def_prop_ro(
          "device", [](const PyKvPagePool& self) { return to_string(self.pool->options().device); },
          "``cpu`` or ``cuda:<index>``.")
      .def("__repr__", [](const PyKvPagePool& self) {
        const KvPagePoolOptions& options = self.pool->options();
        return "flashkernel.KvPagePool(" + std::to_string(options.num_pages) + " pages of " +
               std::to_string(options.page_size) + " tokens, " + std::to_string(self.pool->num_free()) + " free, " +
               dtype_name(options.dtype) + " on " + to_string(options.device) + ")";
      });
}

}  // namespace flashkernel::python
