// The front door of merge_states: two or more partial results of attention into that over the union of their keys.
// Called by users and by the bindings. Invariant: an error leaves out and lse untouched.
#include "flashkernel/attention.hpp"
#include "ops/attention_check.hpp"
#include "ops/merge_dims.hpp"
#include "ops/overlap.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

/// The view of entry 0 along the first dim.
TensorView first_entry(const TensorView& view) {
  TensorView entry = view;
  --entry.ndim;
  for (int d = 0; d < entry.ndim; ++d) {
    entry.shape[d] = view.shape[d + 1];
    entry.strides[d] = view.strides[d + 1];
  }
  return entry;
}

}  // namespace

void merge_states(const TensorView& out_a, const TensorView& lse_a, const TensorView& out_b, const TensorView& lse_b,
                  const TensorView& out, const TensorView& lse, const ExecutionContext& context) {
  const Checker check("merge_states", out_a.device);
  const bool is_pair = out_b.defined() || lse_b.defined();
  const int leading = is_pair ? 0 : 1;  // dims before a state's own: the parts
  check.floating("out_a", out_a);
  check.ndim("out_a", out_a, 1 + leading, 4 + leading);
  const int rows = out_a.ndim - leading - 1;
  const auto check_shape = [&](const char* name, const TensorView& view, int skipped, int count) {
    check.ndim(name, view, count, count);
    for (int d = 0; d < count; ++d)
      if (view.shape[d] != out_a.shape[skipped + d])
        check.fail(shape_text(name, view, d) + " but " + shape_text("out_a", out_a, skipped + d) +
                   "; shapes must match");
  };
  if (is_pair) check_mirror(check, "out_b", out_b, "out_a", out_a);
  check.floating("out", out);
  if (out_a.dtype != DType::kFloat32) check.dtype("out", out, out_a.dtype);
  check_shape("out", out, leading, rows + 1);
  check.last_dim_contiguous("out_a", out_a);
  if (is_pair) check.last_dim_contiguous("out_b", out_b);
  check.last_dim_contiguous("out", out);

  const auto check_lse = [&](const char* name, const TensorView& view, int skipped) {
    check.dtype(name, view, DType::kFloat32);
    check_shape(name, view, skipped, rows + leading - skipped);
  };
  check_lse("lse_a", lse_a, 0);
  if (is_pair) check_lse("lse_b", lse_b, 0);
  if (lse.defined()) check_lse("lse", lse, leading);
  check.writable("out", out);
  if (lse.defined()) check.writable("lse", lse);
  // Each row of a pair is read before it is written, so part a may be updated in place: element for element, or not at
  // all.
  if (!is_pair || !is_same_tensor(out, out_a)) check.no_overlap("out", out, "out_a", out_a);
  if (lse.defined() && !(is_pair && is_same_tensor(lse, lse_a))) check.no_overlap("lse", lse, "lse_a", lse_a);
  for (const auto& [name, view] : {std::pair<const char*, const TensorView&>{"out_b", out_b}, {"lse_b", lse_b}}) {
    check.no_overlap("out", out, name, view);
    check.no_overlap("lse", lse, name, view);
  }
  check.no_overlap("out", out, "lse_a", lse_a);
  check.no_overlap("lse", lse, "out_a", out_a);
  check.no_overlap("out", out, "lse", lse);

  MergeStatesParams p;
  p.dtype = out_a.dtype;
  p.out_dtype = out.dtype;
  p.device = out_a.device;
  p.head_dim = out.shape[rows];
  p.out_a = out_a.data;
  p.out_b = is_pair ? out_b.data : nullptr;
  p.out = out.data;
  p.lse_a = static_cast<const float*>(lse_a.data);
  p.lse_b = is_pair ? static_cast<const float*>(lse_b.data) : nullptr;
  p.lse = lse.defined() ? static_cast<float*>(lse.data) : nullptr;
  p.is_pair = is_pair;
  p.parts = is_pair ? 2 : out_a.shape[0];
  p.stride_out_part = is_pair ? 0 : out_a.strides[0];
  p.stride_lse_part = is_pair ? 0 : lse_a.strides[0];

  const TensorView part_out = is_pair ? out_a : first_entry(out_a), part_lse = is_pair ? lse_a : first_entry(lse_a);
  static constexpr int kRows[] = {0, 1, 2};
  const TensorView* const views[] = {&part_out, &out_b, &out, &part_lse, &lse_b, &lse};
  const MergedDims<6> merged = merge_dims(views, kRows, rows, DimOrder::kByStride);
  std::int64_t* const strides[] = {p.stride_out_a, p.stride_out_b, p.stride_out,
                                   p.stride_lse_a, p.stride_lse_b, p.stride_lse};
  for (int d = 0; d < merged.ndim; ++d) {
    const int to = 3 - merged.ndim + d;
    p.shape[to] = merged.shape[d];
    for (int n = 0; n < 6; ++n) strides[n][to] = merged.strides[n][d];
  }
  if (merged.count() == 0 && !context.explain) return;
  dispatch(p, p.device, context);
}

}  // namespace flashkernel
