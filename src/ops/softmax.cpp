// Front doors of softmax, log-softmax and their gradients: one dim is the columns, the others merge into rows.
#include "flashkernel/reduce.hpp"
#include "ops/check.hpp"
#include "ops/merge_dims.hpp"
#include "ops/reduce_params.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

/// The dim that `axis` names; a tensor of no dims counts as one of one element.
int check_axis(const Checker& check, const TensorView& x, int axis) {
  const int ndim = x.ndim > 0 ? x.ndim : 1;
  if (axis < -ndim || axis >= ndim)
    check.fail("axis=" + std::to_string(axis) + "; needs " + std::to_string(-ndim) + " to " + std::to_string(ndim - 1));
  return axis < 0 ? axis + ndim : axis;
}

/// The dims that are not the axis.
int other_dims(const TensorView& x, int axis, int (&dims)[kMaxDims]) {
  int count = 0;
  for (int d = 0; d < x.ndim; ++d)
    if (d != axis) dims[count++] = d;
  return count;
}

template <class Params, int N>
void set_rows(Params& params, const MergedDims<N>& rows, std::int64_t* const (&strides)[N]) {
  params.ndim = rows.ndim;
  params.rows = rows.count();
  for (int d = 0; d < rows.ndim; ++d) {
    params.shape[d] = rows.shape[d];
    for (int n = 0; n < N; ++n) strides[n][d] = rows.strides[n][d];
  }
}

std::int64_t column_stride(const TensorView& view, int axis) { return view.shape[axis] == 1 ? 1 : view.strides[axis]; }

void forward(bool log, const char* op, const TensorView& x, const TensorView& out, int axis,
             const ExecutionContext& context) {
  const Checker check(op, x.device);
  check.floating("x", x);
  check.ndim("x", x, 0, kMaxDims);
  check.like("out", out, "x", x);
  check.writable("out", out);
  check.same_or_apart("out", out, "x", x);
  const int column_dim = check_axis(check, x, axis);
  if (out.numel() == 0 && !context.explain) return;

  const TensorView in = with_leading_dims(x, 1), to = with_leading_dims(out, 1);
  SoftmaxParams params;
  params.log = log;
  params.dtype = x.dtype;
  params.device = x.device;
  params.x = in.data;
  params.out = to.data;
  params.columns = in.shape[column_dim];
  params.stride_x_column = column_stride(in, column_dim);
  params.stride_out_column = column_stride(to, column_dim);
  int dims[kMaxDims];
  const int count = other_dims(in, column_dim, dims);
  set_rows<SoftmaxParams, 2>(params, merge_dims<2>({&to, &in}, dims, count, DimOrder::kByStride),
                             {params.stride_out, params.stride_x});
  dispatch(params, params.device, context);
}

void backward(bool log, const char* op, const TensorView& grad_out, const TensorView& out, const TensorView& grad_x,
              int axis, const ExecutionContext& context) {
  const Checker check(op, out.device);
  check.floating("out", out);
  check.ndim("out", out, 0, kMaxDims);
  check.like("grad_out", grad_out, "out", out);
  check.like("grad_x", grad_x, "out", out);
  check.writable("grad_x", grad_x);
  check.same_or_apart("grad_x", grad_x, "grad_out", grad_out);
  check.same_or_apart("grad_x", grad_x, "out", out);
  const int column_dim = check_axis(check, out, axis);
  if (out.numel() == 0 && !context.explain) return;

  const TensorView grad = with_leading_dims(grad_out, 1), y = with_leading_dims(out, 1),
                   to = with_leading_dims(grad_x, 1);
  SoftmaxBackwardParams params;
  params.log = log;
  params.dtype = out.dtype;
  params.device = out.device;
  params.grad_out = grad.data;
  params.out = y.data;
  params.grad_x = to.data;
  params.columns = y.shape[column_dim];
  params.stride_grad_out_column = column_stride(grad, column_dim);
  params.stride_out_column = column_stride(y, column_dim);
  params.stride_grad_x_column = column_stride(to, column_dim);
  int dims[kMaxDims];
  const int count = other_dims(y, column_dim, dims);
  set_rows<SoftmaxBackwardParams, 3>(params, merge_dims<3>({&to, &grad, &y}, dims, count, DimOrder::kByStride),
                                     {params.stride_grad_x, params.stride_grad_out, params.stride_out});
  dispatch(params, params.device, context);
}

}  // namespace

void softmax(const TensorView& x, const TensorView& out, int axis, const ExecutionContext& context) {
  forward(false, "softmax", x, out, axis, context);
}

void log_softmax(const TensorView& x, const TensorView& out, int axis, const ExecutionContext& context) {
  forward(true, "log_softmax", x, out, axis, context);
}

void softmax_backward(const TensorView& grad_out, const TensorView& out, const TensorView& grad_x, int axis,
                      const ExecutionContext& context) {
  backward(false, "softmax_backward", grad_out, out, grad_x, axis, context);
}

void log_softmax_backward(const TensorView& grad_out, const TensorView& out, const TensorView& grad_x, int axis,
                          const ExecutionContext& context) {
  backward(true, "log_softmax_backward", grad_out, out, grad_x, axis, context);
}

}  // namespace flashkernel
