// The front door of merge_states: two partial results of attention into that over the union of their keys.
// Called by users and by the bindings. Invariant: an error leaves out and lse untouched.
#include "flashkernel/attention.hpp"
#include "ops/attention_check.hpp"
#include "ops/overlap.hpp"
#include "ops/select.hpp"

namespace flashkernel {
void merge_states(const TensorView& out_a, const TensorView& lse_a, const TensorView& out_b, const TensorView& lse_b,
                  const TensorView& out, const TensorView& lse, const ExecutionContext& context) {
  const Checker check("merge_states", out_a.device);
  check.floating("out_a", out_a);
  check.ndim("out_a", out_a, 1, 4);
  check_mirror(check, "out_b", out_b, "out_a", out_a);
  check_mirror(check, "out", out, "out_a", out_a);
  for (const auto& [name, view] :
       {std::pair<const char*, const TensorView&>{"out_a", out_a}, {"out_b", out_b}, {"out", out}})
    check.last_dim_contiguous(name, view);

  const int rows = out_a.ndim - 1;
  const auto check_lse = [&](const char* name, const TensorView& view) {
    check.dtype(name, view, DType::kFloat32);
    check.ndim(name, view, rows, rows);
    for (int d = 0; d < rows; ++d)
      if (view.shape[d] != out_a.shape[d])
        check.fail(shape_text(name, view, d) + " but " + shape_text("out_a", out_a, d) + "; shapes must match");
  };
  check_lse("lse_a", lse_a);
  check_lse("lse_b", lse_b);
  if (lse.defined()) check_lse("lse", lse);
  check.writable("out", out);
  if (lse.defined()) check.writable("lse", lse);
  // Each row is read before it is written, so part a may be updated in place: element for element, or not at all.
  if (!is_same_tensor(out, out_a)) check.no_overlap("out", out, "out_a", out_a);
  if (lse.defined() && !is_same_tensor(lse, lse_a)) check.no_overlap("lse", lse, "lse_a", lse_a);
  for (const auto& [name, view] : {std::pair<const char*, const TensorView&>{"out_b", out_b}, {"lse_b", lse_b}}) {
    check.no_overlap("out", out, name, view);
    check.no_overlap("lse", lse, name, view);
  }
  check.no_overlap("out", out, "lse_a", lse_a);
  check.no_overlap("lse", lse, "out_a", out_a);
  check.no_overlap("out", out, "lse", lse);

  MergeStatesParams p;
  p.dtype = out_a.dtype;
  p.device = out_a.device;
  p.head_dim = out_a.shape[rows];
  p.out_a = out_a.data;
  p.out_b = out_b.data;
  p.out = out.data;
  p.lse_a = static_cast<const float*>(lse_a.data);
  p.lse_b = static_cast<const float*>(lse_b.data);
  p.lse = lse.defined() ? static_cast<float*>(lse.data) : nullptr;
  for (int d = 0; d < rows; ++d) {
    const int to = 3 - rows + d;
    p.shape[to] = out_a.shape[d];
    p.stride_out_a[to] = out_a.strides[d];
    p.stride_out_b[to] = out_b.strides[d];
    p.stride_out[to] = out.strides[d];
    p.stride_lse_a[to] = lse_a.strides[d];
    p.stride_lse_b[to] = lse_b.strides[d];
    if (lse.defined()) p.stride_lse[to] = lse.strides[d];
  }
  if (p.shape[0] * p.shape[1] * p.shape[2] == 0 && !context.explain) return;
  dispatch(p, p.device, context);
}

}  // namespace flashkernel
