// The keyword arguments that every attention op shares, and how they become AttentionOptions. Used by
// bind_attention*.cpp.
#pragma once

#include "array_type.hpp"
#include "bindings.hpp"
#include "flashkernel/attention.hpp"
#include "op.hpp"

namespace flashkernel::python {

/// window is None, or a pair (left, right) of token counts where None and -1 mean unbounded.
inline void parse_window(const Call& call, nb::handle window, AttentionOptions& options) {
  if (window.is_none()) return;
  constexpr const char* kNeeded = "a pair (left, right) of token counts, None for unbounded,";
  const auto [left, right] = parse_pair(call, "window", window, kNeeded);
  const auto side = [&](const nb::object& value) -> std::int64_t {
    if (value.is_none()) return -1;
    std::int64_t tokens = 0;
    if (!nb::try_cast(value, tokens) || tokens < -1)
      call.fail("window=" + short_repr(window) + "; " + kNeeded + " is needed");
    return tokens;
  };
  options.window_left = side(left);
  options.window_right = side(right);
}

/// The word for a form of ALiBi.
inline Alibi parse_alibi(const Call& call, const std::string& form) {
  if (form == "distance") return Alibi::kDistance;
  if (form == "signed") return Alibi::kSigned;
  if (form == "sqrt") return Alibi::kSqrt;
  call.fail("alibi=\"" + form + "\"; needs \"distance\", \"signed\" or \"sqrt\"");
}

/// A boolean array as one of bytes: its own memory under the type that the library reads.
inline nb::object as_bytes(nb::handle mask) {
  nb::object dtype = attribute_or_null(mask, "dtype");
  if (!dtype.is_valid()) return nb::borrow(mask);
  const std::string name = text_of(dtype);
  if (name == "torch.bool") return mask.attr("view")(nb::module_::import_("torch").attr("uint8"));
  if (name == "bool") return mask.attr("view")("uint8");
  return nb::borrow(mask);
}

/// block_size is a number of tokens, or a pair: of queries, of keys.
inline void parse_block_size(const Call& call, nb::handle given, AttentionOptions& options) {
  const auto tokens = [&](nb::handle value) {
    std::int64_t size = 0;
    if (!nb::try_cast(value, size))
      call.fail("block_size=" + short_repr(given) + "; a number of tokens, or a pair (of queries, of keys), is needed");
    return size;
  };
  if (nb::isinstance<nb::int_>(given)) {
    options.block_size_q = options.block_size_k = tokens(given);
    return;
  }
  const auto [of_queries, of_keys] =
      parse_pair(call, "block_size", given, "a number of tokens, or a pair (of queries, of keys),");
  options.block_size_q = tokens(of_queries);
  options.block_size_k = tokens(of_keys);
}

/// Stands in an op's C++ parameters for `causal, window, softcap, scale, bias, mask, block_mask, block_size,
/// alibi_slopes, alibi, sinks` of its signature, in this order; without bias to block_size for ops that have none.
template <bool kHasBias>
struct GivenOptions {
  static constexpr int kParameters = kHasBias ? 11 : 7;

  bool causal = false;
  nb::handle window;
  double softcap = 0;
  std::optional<double> scale;
  nb::handle bias, mask, block_mask, block_size, alibi_slopes, sinks;
  mutable nb::object blocks_held, mask_held;  // what parse() made
  std::string alibi = "distance";

  int take(PyObject** values) {
    int i = 0;
    const auto next = [&](auto& to) { return convert(values[i], to) && ++i; };
    const bool taken = next(causal) && next(window) && next(softcap) && next(scale) &&
                       (!kHasBias || (next(bias) && next(mask) && next(block_mask) && next(block_size))) &&
                       next(alibi_slopes) && next(alibi) && next(sinks);
    return taken ? -1 : i;
  }

  AttentionOptions parse(Call& call) const {
    AttentionOptions options;
    options.causal = causal;
    parse_window(call, window, options);
    options.softcap = static_cast<float>(softcap);
    if (scale) options.scale = static_cast<float>(*scale);
    if (kHasBias) {
      options.bias = call.optional_input("bias", bias);
      if (!block_mask.is_none())
        parse_block_mask(call, options);
      else
        options.mask = call.optional_input("mask", mask);
    }
    if (alibi != "distance") options.alibi = parse_alibi(call, alibi);
    options.alibi_slopes = call.optional_input("alibi_slopes", alibi_slopes);
    options.sinks = call.optional_input("sinks", sinks);
    return options;
  }

 private:
  // An array, or a flashkernel.BlockMask, whose size and mask count where it has them.
  void parse_block_mask(Call& call, AttentionOptions& options) const {
    nb::object blocks = nb::borrow(block_mask), size = nb::borrow(block_size);
    mask_held = nb::borrow(mask);
    if (nb::object own = attribute_or_null(block_mask, "blocks"); own.is_valid()) {
      blocks = own;
      size = nb::borrow(block_mask.attr("block_size"));
      const nb::object own_mask = nb::borrow(block_mask.attr("mask"));
      if (!mask.is_none() && !own_mask.is_none()) call.fail("mask is given, but block_mask has one already");
      if (mask.is_none()) mask_held = own_mask;
    }
    blocks_held = as_bytes(blocks);
    options.block_mask = call.input("block_mask", blocks_held);
    parse_block_size(call, size, options);
    options.mask = call.optional_input("mask", mask_held);
  }
};
using DenseOptions = GivenOptions<true>;
using SequenceOptions = GivenOptions<false>;

/// What flash-attn's functions pass for an attention call, as AttentionOptions: a side of the window below 0 is
/// unbounded, and a softcap of 0 or less is off.
inline AttentionOptions flash_options(Call& call, std::optional<double> scale, bool causal, std::int64_t left,
                                      std::int64_t right, double softcap, nb::handle alibi_slopes, nb::handle sinks) {
  AttentionOptions options;
  options.causal = causal;
  options.window_left = left < 0 ? -1 : left;
  options.window_right = right < 0 ? -1 : right;
  options.softcap = softcap > 0 ? static_cast<float>(softcap) : 0.0f;
  if (scale) options.scale = static_cast<float>(*scale);
  options.alibi_slopes = call.optional_input("alibi_slopes", alibi_slopes);
  options.sinks = call.optional_input("sinks", sinks);
  return options;
}

/// LSE of q [total, heads, head_dim] is [heads, total].
inline Shape varlen_lse_shape(const TensorView& q) { return Shape{extent(q, 1), extent(q, 0)}; }

/// The largest difference of neighbours in cumulative lengths on the host; -1 when they are not such an array.
inline std::int64_t largest_step(const TensorView& cu_seqlens) {
  if (cu_seqlens.ndim != 1 || !is_index(cu_seqlens.dtype) || !cu_seqlens.device.is_cpu()) return -1;
  const auto at = [&](std::int64_t i) -> std::int64_t {
    const std::int64_t offset = i * cu_seqlens.strides[0];
    return cu_seqlens.dtype == DType::kInt32 ? static_cast<const std::int32_t*>(cu_seqlens.data)[offset]
                                             : static_cast<const std::int64_t*>(cu_seqlens.data)[offset];
  };
  std::int64_t largest = 0;
  for (std::int64_t i = 1; i < cu_seqlens.shape[0]; ++i) {
    const std::int64_t step = at(i) - at(i - 1);
    if (step > largest) largest = step;
  }
  return largest;
}

/// What max_seqlen_q of a paged call is where it is not given.
inline std::int64_t longest_of_queries(const TensorView& q, const TensorView& cu_seqlens_q,
                                       std::optional<std::int64_t> given) {
  if (given) return *given;
  if (!cu_seqlens_q.defined()) return extent(q, -2);
  const std::int64_t longest = largest_step(cu_seqlens_q);
  return longest < 0 ? extent(q, 0) : longest;  // on a GPU: no sequence is longer than all of them
}

}  // namespace flashkernel::python
