// Front door of RoPE: checks q, k, positions and tables and fills RopeParams; `rope_spec` is shared with kv_append.
#include "flashkernel/rope.hpp"

#include <cmath>
#include <limits>

#include "ops/check.hpp"
#include "ops/rope_params.hpp"
#include "ops/rope_spec.hpp"
#include "ops/select.hpp"

namespace flashkernel {

RopeSpec rope_spec(const Checker& check, const RopeOptions& options, std::int64_t head_dim) {
  RopeSpec spec;
  spec.theta = options.theta;
  spec.rotary_dim = options.rotary_dim == -1 ? head_dim : options.rotary_dim;
  spec.interleaved = options.interleaved;
  spec.inverse = options.inverse;
  if (spec.rotary_dim < 0 || spec.rotary_dim > head_dim || spec.rotary_dim % 2 != 0)
    check.fail("rotary_dim=" + std::to_string(spec.rotary_dim) +
               "; needs an even number up to head_dim=" + std::to_string(head_dim));
  if (options.inv_freq.defined()) {
    check.dtype("inv_freq", options.inv_freq, DType::kFloat32);
    check.ndim("inv_freq", options.inv_freq, 1, 1);
    check.extent("inv_freq", options.inv_freq, 0, spec.rotary_dim / 2, "rotary_dim / 2");
    check.contiguous("inv_freq", options.inv_freq);
    spec.inv_freq = static_cast<const float*>(options.inv_freq.data);
  } else if (!std::isfinite(options.theta) || options.theta <= 0.0) {
    check.fail("theta=" + std::to_string(options.theta) + "; needs a positive finite number");
  }
  return spec;
}

namespace {

struct HeadStrides {
  std::int64_t batch, head, token;
};

HeadStrides head_strides(const TensorView& view) { return {view.strides[0], view.strides[1], view.strides[2]}; }

/// Checks one of q, k with its output and gives both 4 dims.
void check_pair(const Checker& check, const char* name, const char* out_name, TensorView& in, TensorView& out) {
  check.floating(name, in);
  check.ndim(name, in, 2, 4);
  check.dtype(out_name, out, in.dtype);
  check.same_shape(out_name, out, name, in);
  in = with_leading_dims(in, 4);
  out = with_leading_dims(out, 4);
  check.last_dim_contiguous(name, in);
  check.last_dim_contiguous(out_name, out);
  check.writable(out_name, out);
  check.same_or_apart(out_name, out, name, in);
}

/// Fills all but the angles' source, whose tensors no output may overlap.
RopeParams head_params(const Checker& check, TensorView q, TensorView k, TensorView q_out, TensorView k_out,
                       std::initializer_list<NamedView> angles) {
  check_pair(check, "q", "q_out", q, q_out);
  check.apart("q_out", q_out, angles);
  RopeParams params;
  params.dtype = q.dtype;
  params.device = check.device();
  params.batch = q.shape[0];
  params.heads_q = q.shape[1];
  params.seq = q.shape[2];
  params.head_dim = q.shape[3];
  params.q = q.data;
  params.q_out = q_out.data;
  const HeadStrides in = head_strides(q), out = head_strides(q_out);
  params.stride_q_batch = in.batch, params.stride_q_head = in.head, params.stride_q_token = in.token;
  params.stride_q_out_batch = out.batch, params.stride_q_out_head = out.head, params.stride_q_out_token = out.token;
  if (!k.defined()) {
    check.require(!k_out.defined(), "k_out is given but k is absent; give both or neither");
    return params;
  }
  check_pair(check, "k", "k_out", k, k_out);
  check.dtype("k", k, q.dtype);
  check.extent("k", k, 0, params.batch, "q's batch");
  check.extent("k", k, 2, params.seq, "q's seq");
  check.extent("k", k, 3, params.head_dim, "q's head_dim");
  check.no_overlap("k_out", k_out, "q", q);
  check.no_overlap("q_out", q_out, "k", k);
  check.no_overlap("k_out", k_out, "q_out", q_out);
  check.apart("k_out", k_out, angles);
  params.heads_kv = k.shape[1];
  params.k = k.data;
  params.k_out = k_out.data;
  const HeadStrides k_in = head_strides(k), to = head_strides(k_out);
  params.stride_k_batch = k_in.batch, params.stride_k_head = k_in.head, params.stride_k_token = k_in.token;
  params.stride_k_out_batch = to.batch, params.stride_k_out_head = to.head, params.stride_k_out_token = to.token;
  return params;
}

/// positions [seq], [1, seq] or [batch, seq]. With `end` > 0 the host's values must lie in [0, end), else fit int32.
void set_positions(const Checker& check, const TensorView& positions, std::int64_t end, IndexCopies& copies,
                   RopeParams& params) {
  if (!positions.defined()) return;
  check.index("positions", positions);
  check.ndim("positions", positions, 1, 2);
  check.extent("positions", positions, positions.ndim - 1, params.seq, "q's seq");
  check.last_dim_contiguous("positions", positions);
  const bool per_batch = positions.ndim == 2 && positions.shape[0] != 1;
  if (per_batch) check.extent("positions", positions, 0, params.batch, "q's batch");
  params.positions = {positions.data, positions.dtype == DType::kInt64};
  if (per_batch) {
    params.stride_positions_batch = positions.strides[0];
    params.positions = copies.rows_of(params.positions, params.batch, params.seq, &params.stride_positions_batch,
                                      [&](std::int64_t) { return params.seq; });
  } else {
    params.positions = copies.of(params.positions, params.seq);
  }
  const std::int64_t bytes = static_cast<std::int64_t>(dtype_bytes(positions.dtype));
  for (std::int64_t b = 0; b < (per_batch ? params.batch : 1); ++b) {
    IndexArray row = params.positions;
    row.data = static_cast<const unsigned char*>(row.data) + b * params.stride_positions_batch * bytes;
    if (end > 0)
      check.indices_in_range("positions", row, params.seq, 0, end, "rows of the table");
    else
      check_positions(check, "positions", row, params.seq);
  }
}

void run(const RopeParams& params, const ExecutionContext& context) {
  const bool empty = params.batch * params.seq * params.head_dim * (params.heads_q + params.heads_kv) == 0;
  if (empty && !context.explain) return;
  dispatch(params, params.device, context);
}

}  // namespace

void rope(const TensorView& q, const TensorView& k, const TensorView& positions, const TensorView& q_out,
          const TensorView& k_out, const RopeOptions& options, const ExecutionContext& context) {
  const Checker check("rope", q.device);
  RopeParams params =
      head_params(check, q, k, q_out, k_out, {{"positions", positions}, {"inv_freq", options.inv_freq}});
  params.spec = rope_spec(check, options, params.head_dim);
  IndexCopies copies(check.device());
  set_positions(check, positions, 0, copies, params);
  run(params, context);
}

void rope_table(const TensorView& q, const TensorView& k, const TensorView& cos, const TensorView& sin,
                const TensorView& positions, const TensorView& q_out, const TensorView& k_out,
                const RopeOptions& options, const ExecutionContext& context) {
  const Checker check("rope_table", q.device);
  RopeParams params = head_params(check, q, k, q_out, k_out, {{"cos", cos}, {"sin", sin}, {"positions", positions}});
  IndexCopies copies(check.device());
  check.floating("cos", cos);
  check.ndim("cos", cos, 2, 3);
  check.dtype("sin", sin, cos.dtype);
  check.same_shape("sin", sin, "cos", cos);
  check.last_dim_contiguous("cos", cos);
  check.last_dim_contiguous("sin", sin);
  const std::int64_t half = cos.shape[cos.ndim - 1];
  if (half > params.head_dim / 2)
    check.fail(shape_text("cos", cos, cos.ndim - 1) +
               "; needs at most half of head_dim=" + std::to_string(params.head_dim));
  if (options.rotary_dim != -1 && options.rotary_dim != 2 * half)
    check.fail("rotary_dim=" + std::to_string(options.rotary_dim) + " but cos has " + std::to_string(half) +
               " columns; needs twice as many, or -1");
  params.spec.rotary_dim = 2 * half;
  params.spec.interleaved = options.interleaved;
  params.spec.inverse = options.inverse;
  params.cos = cos.data;
  params.sin = sin.data;
  params.table_dtype = cos.dtype;
  params.table_rows = cos.shape[cos.ndim - 2];
  params.stride_table_row = cos.strides[cos.ndim - 2];
  params.stride_sin_row = sin.strides[sin.ndim - 2];
  if (cos.ndim == 3) {
    check.require(!positions.defined(),
                  "positions are given but cos has 3 dims, one row per token; leave positions out");
    if (cos.shape[0] != 1) check.extent("cos", cos, 0, params.batch, "q's batch");
    check.extent("cos", cos, 1, params.seq, "q's seq");
    params.table_is_per_token = true;
    params.stride_table_batch = cos.shape[0] != 1 ? cos.strides[0] : 0;
    params.stride_sin_batch = sin.shape[0] != 1 ? sin.strides[0] : 0;
  } else if (positions.defined()) {
    if (params.table_rows == 0 && params.batch * params.seq > 0) check.fail("cos.shape[0]=0; needs a row per position");
    set_positions(check, positions, params.table_rows, copies, params);
  } else if (params.seq > params.table_rows) {
    check.fail(shape_text("cos", cos, 0) + " but q has " + std::to_string(params.seq) +
               " tokens; needs a row per position");
  }
  run(params, context);
}

}  // namespace flashkernel
