// Front doors of the reductions: sorts dims into kept and reduced ones and merges neighbours.
#include "flashkernel/reduce.hpp"

#include "ops/check.hpp"
#include "ops/merge_dims.hpp"
#include "ops/reduce_params.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

struct Axes {
  int kept[kMaxDims], reduced[kMaxDims];
  int num_kept = 0, num_reduced = 0;
};

Axes sort_axes(const Checker& check, const TensorView& x, AxisMask axes) {
  if (axes >> x.ndim != 0) {
    int highest = kMaxDims * 4 - 1;
    while (!(axes >> highest & 1u)) --highest;
    check.fail("axes name dim " + std::to_string(highest) + " but x is " + to_string(x));
  }
  Axes sorted;
  for (int d = 0; d < x.ndim; ++d) {
    if (axes == 0 || (axes >> d & 1u)) {
      sorted.reduced[sorted.num_reduced++] = d;
    } else {
      sorted.kept[sorted.num_kept++] = d;
    }
  }
  return sorted;
}

/// `out` with x's dims: those left out have size 1.
TensorView check_out(const Checker& check, const TensorView& x, const TensorView& out, const Axes& axes) {
  TensorView full = out;
  const bool kept_dims = out.ndim == x.ndim;
  if (!kept_dims && out.ndim != axes.num_kept)
    check.fail("out is " + to_string(out) + "; needs " + std::to_string(axes.num_kept) + " dims, or " +
               std::to_string(x.ndim) + " with the reduced dims of size 1");
  full.ndim = x.ndim;
  for (int i = 0; i < axes.num_reduced; ++i) {
    const int d = axes.reduced[i];
    if (kept_dims) check.extent("out", out, d, 1, "a reduced dim's size");
    full.shape[d] = 1;
    full.strides[d] = 0;
  }
  for (int i = 0; i < axes.num_kept; ++i) {
    const int d = axes.kept[i], from = kept_dims ? d : i;
    check.extent("out", out, from, x.shape[d], ("x.shape[" + std::to_string(d) + "]").c_str());
    full.shape[d] = out.shape[from];
    full.strides[d] = out.strides[from];
  }
  return full;
}

void reduce(ReduceOp op, const char* name, const TensorView& x, const TensorView& out, AxisMask axis_mask,
            const ExecutionContext& context) {
  const Checker check(name, x.device);
  check.floating("x", x);
  check.ndim("x", x, 0, kMaxDims);
  if (op == ReduceOp::kArgmax) {
    check.dtype("out", out, DType::kInt64);
  } else {
    check.float32_or("out", out, x.dtype);
  }
  const Axes axes = sort_axes(check, x, axis_mask);
  const TensorView full_out = check_out(check, x, out, axes);
  check.writable("out", out);
  check.no_overlap("out", out, "x", x);

  ReduceParams params;
  params.op = op;
  params.dtype = x.dtype;
  params.out_dtype = out.dtype;
  params.device = x.device;
  params.x = x.data;
  params.out = out.data;
  const auto kept = merge_dims<2>({&full_out, &x}, axes.kept, axes.num_kept, DimOrder::kByStride);
  // argmax counts in row-major order; the others may take the order of memory.
  const auto reduced = merge_dims<1>({&x}, axes.reduced, axes.num_reduced,
                                     op == ReduceOp::kArgmax ? DimOrder::kKeep : DimOrder::kByStride);
  params.num_kept = kept.ndim;
  params.num_reduced = reduced.ndim;
  params.kept_count = kept.count();
  params.reduced_count = reduced.count();
  for (int d = 0; d < kept.ndim; ++d) {
    params.kept_shape[d] = kept.shape[d];
    params.stride_out[d] = kept.strides[0][d];
    params.stride_x_kept[d] = kept.strides[1][d];
  }
  for (int d = 0; d < reduced.ndim; ++d) {
    params.reduced_shape[d] = reduced.shape[d];
    params.stride_x_reduced[d] = reduced.strides[0][d];
  }
  if (params.reduced_count == 0 && (op == ReduceOp::kMax || op == ReduceOp::kArgmax))
    check.fail("x is " + to_string(x) + ", so there is nothing to reduce; needs at least one element along the axes");
  if (params.kept_count == 0 && !context.explain) return;
  dispatch(params, params.device, context);
}

}  // namespace

void reduce_sum(const TensorView& x, const TensorView& out, AxisMask axes, const ExecutionContext& context) {
  reduce(ReduceOp::kSum, "reduce_sum", x, out, axes, context);
}

void reduce_mean(const TensorView& x, const TensorView& out, AxisMask axes, const ExecutionContext& context) {
  reduce(ReduceOp::kMean, "reduce_mean", x, out, axes, context);
}

void reduce_max(const TensorView& x, const TensorView& out, AxisMask axes, const ExecutionContext& context) {
  reduce(ReduceOp::kMax, "reduce_max", x, out, axes, context);
}

void argmax(const TensorView& x, const TensorView& out, AxisMask axes, const ExecutionContext& context) {
  reduce(ReduceOp::kArgmax, "argmax", x, out, axes, context);
}

}  // namespace flashkernel
