// Front doors of linear_cross_entropy, linear_selected_log_prob and their gradients. A call is a loop over chunks of
// classes and rows: linear's kernel writes a chunk of logits into the workspace, a kernel of the op takes it up before
// the next one overwrites it. The gradient makes the logits again, and two products of each chunk's gradient.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "flashkernel/loss.hpp"
#include "ops/check.hpp"
#include "ops/linear_loss_chunks.hpp"
#include "ops/linear_loss_params.hpp"
#include "ops/loss_check.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

/// Cuts one allocation into pieces that begin at multiples of 256 bytes.
class Pieces {
 public:
  std::size_t add(std::int64_t count, std::size_t bytes) {
    const std::size_t at = size_;
    size_ += (static_cast<std::size_t>(count) * bytes + kDefaultAlignment - 1) / kDefaultAlignment * kDefaultAlignment;
    return at;
  }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_ = 0;
};

void* at(const Workspace& workspace, std::size_t offset) { return static_cast<char*>(workspace.data()) + offset; }

/// Rows [first, first + count) of a matrix, or that part of a vector.
TensorView slice(TensorView view, std::int64_t first, std::int64_t count) {
  if (!view.defined()) return view;
  view.data =
      static_cast<char*>(view.data) + first * view.strides[0] * static_cast<std::int64_t>(dtype_bytes(view.dtype));
  view.shape[0] = count;
  return view;
}

IndexArray slice(IndexArray array, std::int64_t first) {
  return {static_cast<const char*>(array.data) + first * (array.is_int64 ? 8 : 4), array.is_int64};
}

TensorView matrix(void* data, DType dtype, Device device, std::int64_t rows, std::int64_t columns, std::int64_t pitch) {
  return TensorView(data, dtype, {rows, columns}, {pitch, 1}, device);
}

struct Inputs {
  const TensorView &x, &weight, &bias, &targets, &class_weights;
};

/// What all four functions check, and what forward and backward params have in common.
template <class Params>
Params common_params(const Checker& check, const Inputs& in, std::int64_t ignore_index, float softcap,
                     IndexCopies& copies) {
  check.floating("x", in.x);
  check.ndim("x", in.x, 2, 2);
  check.last_dim_contiguous("x", in.x);
  check.dtype("weight", in.weight, in.x.dtype);
  check.ndim("weight", in.weight, 2, 2);
  check.extent("weight", in.weight, 1, in.x.shape[1], "x.shape[1]");
  if (in.weight.shape[0] == 0) check.fail("weight.shape[0]=0; needs at least one class");
  if (in.weight.numel() > 0 && in.weight.shape[0] > 1 && in.weight.shape[1] > 1 && in.weight.strides[0] != 1 &&
      in.weight.strides[1] != 1)
    check.fail("weight has strides [" + std::to_string(in.weight.strides[0]) + ", " +
               std::to_string(in.weight.strides[1]) +
               "]; one of its dims must be contiguous (stride 1): make a contiguous copy");
  check.optional_vector("bias", in.bias, in.weight.shape[0], in.x.dtype);
  if (!(softcap >= 0.0f && softcap < INFINITY))
    check.fail("softcap=" + std::to_string(softcap) + "; needs a finite number above 0, or 0 for none");
  Params params;
  params.dtype = in.x.dtype;
  params.device = in.x.device;
  params.classes = in.weight.shape[0];
  params.ignore_index = ignore_index;
  params.softcap = softcap;
  params.targets = check.index_array("targets", in.targets, in.x.shape[0], copies);
  if (in.class_weights.defined()) {
    check.dtype("class_weights", in.class_weights, DType::kFloat32);
    check.ndim("class_weights", in.class_weights, 1, 1);
    check.extent("class_weights", in.class_weights, 0, params.classes, "weight.shape[0]");
    check.contiguous("class_weights", in.class_weights);
    params.class_weights = static_cast<const float*>(in.class_weights.data);
  }
  if (in.x.device.is_cpu())
    for (std::int64_t row = 0; row < in.x.shape[0]; ++row)
      if (const std::int64_t t = params.targets[row]; (t < 0 || t >= params.classes) && t != ignore_index)
        check.fail("targets[" + std::to_string(row) + "]=" + std::to_string(t) + "; needs 0 to " +
                   std::to_string(params.classes - 1) + ", or ignore_index=" + std::to_string(ignore_index));
  return params;
}

template <class Params>
void take_options(const Checker& check, const LinearCrossEntropyOptions& options, Params& params) {
  if (!(options.label_smoothing >= 0.0f && options.label_smoothing <= 1.0f))
    check.fail("label_smoothing=" + std::to_string(options.label_smoothing) + "; needs a number from 0 to 1");
  if (!(options.z_loss >= 0.0f && options.z_loss < INFINITY))
    check.fail("z_loss=" + std::to_string(options.z_loss) + "; needs a finite number of at least 0");
  if (options.reduction > Reduction::kMean)
    check.fail("reduction=" + std::to_string(static_cast<int>(options.reduction)) + "; needs kNone, kSum or kMean");
  params.label_smoothing = options.label_smoothing;
  params.z_loss = options.z_loss;
  params.reduction = options.reduction;
}

template <class Params>
void take_temperature(const Checker& check, float temperature, Params& params) {
  if (!(temperature > 0.0f && temperature < INFINITY))
    check.fail("temperature=" + std::to_string(temperature) + "; needs a finite number above 0");
  params.scale = 1.0f / temperature;
  params.reduction = Reduction::kNone;
  params.is_log_prob = true;
}

void check_apart(const Checker& check, const char* name, const TensorView& written, const Inputs& in) {
  check.apart(name, written,
              {{"x", in.x},
               {"weight", in.weight},
               {"bias", in.bias},
               {"targets", in.targets},
               {"class_weights", in.class_weights}});
}

/// Makes chunks of logits, and so that on the CPU the order of their sums does not depend on how many rows there are.
class Logits {
 public:
  Logits(const Inputs& in, const LossChunks& chunks, Pieces& pieces) : in_(in), chunks_(chunks) {
    const bool cpu = in.x.device.is_cpu();
    least_ = cpu ? kCpuLeastRows : 0;
    const std::size_t bytes = dtype_bytes(in.x.dtype);
    logits_ = pieces.add(std::max(chunks.rows, least_) * chunks.pitch, bytes);
    if (cpu) padded_ = pieces.add(least_ * in.x.shape[1], bytes);
  }

  void make(const Workspace& workspace, std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns,
            const ExecutionContext& context) const {
    TensorView x = slice(in_.x, row, rows);
    if (rows > 0 && rows < least_) {
      const std::int64_t features = x.shape[1];
      const std::size_t bytes = static_cast<std::size_t>(features) * dtype_bytes(x.dtype);
      auto* const to = static_cast<char*>(at(workspace, padded_));
      std::memset(to, 0, bytes * static_cast<std::size_t>(least_));
      for (std::int64_t r = 0; r < rows && bytes > 0; ++r)
        std::memcpy(to + bytes * static_cast<std::size_t>(r), slice(x, r, 1).data, bytes);
      x = matrix(to, x.dtype, x.device, least_, features, features);
    }
    linear(x, slice(in_.weight, column, columns), slice(in_.bias, column, columns),
           matrix(data(workspace), x.dtype, x.device, x.shape[0], columns, chunks_.pitch), {}, Activation::kNone,
           context);
  }

  void* data(const Workspace& workspace) const { return at(workspace, logits_); }

 private:
  const Inputs& in_;
  const LossChunks& chunks_;
  std::int64_t least_ = 0;
  std::size_t logits_ = 0, padded_ = 0;
};

/// The states of all rows: each chunk of logits is made and taken up.
void take_up_all(LinearCrossEntropyParams params, const Logits& logits, const LossChunks& chunks, std::int64_t tokens,
                 const Workspace& workspace, LossState* states, const ExecutionContext& context) {
  const IndexArray targets = params.targets;
  params.segment = chunks.segment;
  params.stride_logits_row = chunks.pitch;
  params.logits = logits.data(workspace);
  for (std::int64_t c = 0; c < params.classes; c += chunks.columns) {
    params.first_column = c;
    params.columns = std::min(chunks.columns, params.classes - c);
    for (std::int64_t r = 0; r < tokens; r += chunks.rows) {
      params.rows = std::min(chunks.rows, tokens - r);
      logits.make(workspace, r, params.rows, c, params.columns, context);
      params.targets = slice(targets, r);
      params.state = states + r;
      dispatch(params, params.device, context);
    }
  }
}

void run_forward(LinearCrossEntropyParams params, const Inputs& in, const ExecutionContext& context) {
  using Step = LinearCrossEntropyParams::Step;
  const std::int64_t tokens = in.x.shape[0];
  const LossChunks chunks =
      loss_chunks(params.device, params.dtype, tokens, params.classes, is_invariant_call(context));
  Pieces pieces;
  const std::size_t state = pieces.add(tokens, sizeof(LossState));
  const Logits logits(in, chunks, pieces);
  if (context.explain) {
    params.segment = chunks.segment;
    params.stride_logits_row = chunks.pitch;
    params.rows = std::min(chunks.rows, tokens);
    params.columns = chunks.columns;
    dispatch(params, params.device, context);
    context.explain->workspace_bytes = pieces.size();
    return;
  }
  const Workspace workspace(pieces.size(), params.device, context);
  auto* const states = static_cast<LossState*>(at(workspace, state));
  take_up_all(params, logits, chunks, tokens, workspace, states, context);
  params.step = Step::kFinish;
  params.rows = tokens;
  params.columns = params.classes;
  params.state = states;
  dispatch(params, params.device, context);
}

/// Whether the LSE of a row does not say enough (ops/large_lse.hpp). Asked where the host can read it.
bool has_large_row(const LinearCrossEntropyBackwardParams& params, std::int64_t tokens) {
  return params.device.is_cpu() && std::any_of(params.lse, params.lse + tokens, is_large_lse);
}

/// What the forward pass knew of each row.
LinearCrossEntropyParams forward_of(const LinearCrossEntropyBackwardParams& params) {
  LinearCrossEntropyParams forward;
  forward.dtype = params.dtype;
  forward.device = params.device;
  forward.classes = params.classes;
  forward.ignore_index = params.ignore_index;
  forward.softcap = params.softcap;
  forward.scale = params.scale;
  forward.targets = params.targets;
  return forward;
}

/// A gradient whose chunks are written where they belong, or as parts that are added up in fp32.
struct Accumulator {
  bool direct = false;       // linear_backward writes the gradient itself
  std::size_t part = 0;      // of linear_backward
  bool sum_is_grad = false;  // an fp32 gradient: it is the sum
  std::size_t sum = 0;
};

void run_backward(LinearCrossEntropyBackwardParams params, const Inputs& in, const LinearGradients& gradients,
                  const ExecutionContext& context) {
  using Step = LinearCrossEntropyBackwardParams::Step;
  const std::int64_t tokens = in.x.shape[0], features = in.x.shape[1];
  const Device device = params.device;
  const std::size_t bytes = dtype_bytes(params.dtype);
  const auto row_bytes = features * static_cast<std::int64_t>(bytes);
  const bool invariant = is_invariant_call(context);
  LossChunks chunks = loss_chunks(device, params.dtype, tokens, params.classes, invariant);
  const bool one_row_chunk = chunks.rows >= tokens;
  Accumulator x, weight, bias;
  weight.direct = one_row_chunk && gradients.weight.dtype == params.dtype;
  bias.direct = one_row_chunk;
  if (gradients.weight.defined() && !weight.direct)
    chunks = loss_chunks(device, params.dtype, tokens, params.classes, invariant, row_bytes);
  x.direct = chunks.columns >= params.classes;
  x.sum_is_grad = params.dtype == DType::kFloat32;
  weight.sum_is_grad = gradients.weight.dtype == DType::kFloat32;
  bias.sum_is_grad = gradients.bias.dtype == DType::kFloat32;

  Pieces pieces;
  const std::size_t coefficients = pieces.add(tokens, sizeof(LossCoefficients));
  const Logits logits(in, chunks, pieces);
  const auto plan = [&](Accumulator& a, const TensorView& grad, std::int64_t part, std::size_t part_bytes,
                        std::int64_t sum) {
    if (!grad.defined() || a.direct) return;
    a.part = pieces.add(part, part_bytes);
    if (!a.sum_is_grad) a.sum = pieces.add(sum, sizeof(float));
  };
  plan(x, gradients.x, chunks.rows * features, bytes, tokens * features);
  plan(weight, gradients.weight, chunks.columns * features, bytes, chunks.columns * features);
  plan(bias, gradients.bias, chunks.columns, sizeof(float), chunks.columns);
  const bool again = has_large_row(params, tokens);
  const std::size_t state = again ? pieces.add(tokens, sizeof(LossState)) : 0;
  params.stride_logits_row = chunks.pitch;
  const IndexArray targets = params.targets;
  const float* const lse = params.lse;
  if (context.explain) {
    params.rows = std::min(chunks.rows, tokens);
    params.columns = chunks.columns;
    dispatch(params, device, context);
    context.explain->workspace_bytes = pieces.size();
    return;
  }
  const Workspace workspace(pieces.size(), device, context);
  auto* const all_coefficients = static_cast<LossCoefficients*>(at(workspace, coefficients));
  if (again) {
    auto* const states = static_cast<LossState*>(at(workspace, state));
    take_up_all(forward_of(params), logits, chunks, tokens, workspace, states, context);
    params.state = states;
  }
  params.logits = logits.data(workspace);
  params.coefficients = all_coefficients;
  params.step = Step::kCoefficients;
  params.rows = tokens;
  params.columns = params.classes;
  dispatch(params, device, context);

  const auto accumulate = [&](const Accumulator& a, DType part_dtype, std::int64_t rows, std::int64_t columns,
                              std::int64_t sum_row, const TensorView& grad, bool first, bool last) {
    LinearCrossEntropyBackwardParams p;
    p.step = Step::kAccumulate;
    p.device = device;
    p.dtype = params.dtype;
    p.rows = rows;
    p.columns = columns;
    p.is_first = first;
    p.part = {at(workspace, a.part), part_dtype};
    if (a.sum_is_grad) {
      p.sum = static_cast<float*>(grad.data);
      p.stride_sum_row = grad.strides[0];
    } else {
      p.sum = static_cast<float*>(at(workspace, a.sum)) + sum_row * columns;
      p.stride_sum_row = columns;
      if (last) p.out = grad.data;
      p.out_dtype = grad.dtype;
      p.stride_out_row = grad.strides[0];
    }
    dispatch(p, device, context);
  };

  params.step = Step::kGradient;
  for (std::int64_t c = 0; c < params.classes; c += chunks.columns) {
    params.first_column = c;
    params.columns = std::min(chunks.columns, params.classes - c);
    const TensorView grad_weight = slice(gradients.weight, c, params.columns);
    const TensorView grad_bias = slice(gradients.bias, c, params.columns);
    for (std::int64_t r = 0; r == 0 || r < tokens; r += chunks.rows) {  // of no rows, too: their sums are 0
      params.rows = std::min(chunks.rows, tokens - r);
      if (params.rows > 0) {
        logits.make(workspace, r, params.rows, c, params.columns, context);
        params.targets = slice(targets, r);
        params.lse = lse + r;
        params.coefficients = all_coefficients + r;
        dispatch(params, device, context);
      }
      const TensorView grad_x = slice(gradients.x, r, params.rows);
      LinearGradients parts{grad_x, grad_weight, grad_bias};
      if (grad_x.defined() && !x.direct)
        parts.x = matrix(at(workspace, x.part), params.dtype, device, params.rows, features, features);
      if (grad_weight.defined() && !weight.direct)
        parts.weight = matrix(at(workspace, weight.part), params.dtype, device, params.columns, features, features);
      if (grad_bias.defined() && !bias.direct)
        parts.bias = TensorView(at(workspace, bias.part), DType::kFloat32, {params.columns}, device);
      linear_backward(matrix(params.logits, params.dtype, device, params.rows, params.columns, chunks.pitch),
                      slice(in.x, r, params.rows), slice(in.weight, c, params.columns), {}, parts, Activation::kNone,
                      context);
      const bool last_rows = r + chunks.rows >= tokens, last_columns = c + chunks.columns >= params.classes;
      if (grad_x.defined() && !x.direct && params.rows > 0)
        accumulate(x, params.dtype, params.rows, features, r, grad_x, c == 0, last_columns);
      if (grad_weight.defined() && !weight.direct)
        accumulate(weight, params.dtype, params.columns, features, 0, grad_weight, r == 0, last_rows);
      if (grad_bias.defined() && !bias.direct)
        accumulate(bias, DType::kFloat32, 1, params.columns, 0, grad_bias, r == 0, last_rows);
    }
  }
}

void check_gradients(const Checker& check, const Inputs& in, const TensorView& grad_loss, const TensorView& lse,
                     const LinearGradients& gradients) {
  check_per_row(check, "lse", lse, in.x.shape[0], "x.shape[0]");
  check.contiguous("lse", lse);
  const auto check_written = [&](const char* name, const TensorView& view) {
    check.writable(name, view);
    check_apart(check, name, view, in);
    check.apart(name, view, {{"lse", lse}, {"grad_loss", grad_loss}});
  };
  if (gradients.x.defined()) {
    check.like("gradients.x", gradients.x, "x", in.x);
    check.last_dim_contiguous("gradients.x", gradients.x);
    check_written("gradients.x", gradients.x);
  }
  if (gradients.weight.defined()) {
    check.float32_or("gradients.weight", gradients.weight, in.x.dtype);
    check.same_shape("gradients.weight", gradients.weight, "weight", in.weight);
    check.last_dim_contiguous("gradients.weight", gradients.weight);
    check_written("gradients.weight", gradients.weight);
    check.no_overlap("gradients.weight", gradients.weight, "gradients.x", gradients.x);
  }
  if (gradients.bias.defined()) {
    check.optional_vector("gradients.bias", gradients.bias, in.weight.shape[0], in.x.dtype);
    check_written("gradients.bias", gradients.bias);
    check.apart("gradients.bias", gradients.bias,
                {{"gradients.x", gradients.x}, {"gradients.weight", gradients.weight}});
  }
}

bool wants_nothing(const LinearGradients& gradients) {
  return gradients.x.numel() == 0 && gradients.weight.numel() == 0 && gradients.bias.numel() == 0;
}

}  // namespace

void linear_cross_entropy(const TensorView& x, const TensorView& weight, const TensorView& bias,
                          const TensorView& targets, const TensorView& class_weights, const TensorView& loss,
                          const TensorView& z_loss, const TensorView& lse, const LinearCrossEntropyOptions& options,
                          const ExecutionContext& context) {
  const Checker check("linear_cross_entropy", x.device);
  IndexCopies copies(check.device());
  const Inputs in{x, weight, bias, targets, class_weights};
  auto params = common_params<LinearCrossEntropyParams>(check, in, options.ignore_index, options.softcap, copies);
  take_options(check, options, params);
  check_loss(check, "loss", loss, x.shape[0], options.reduction, "x.shape[0]");
  check.contiguous("loss", loss);
  check_apart(check, "loss", loss, in);
  if (z_loss.defined()) {
    check_loss(check, "z_loss", z_loss, x.shape[0], options.reduction, "x.shape[0]");
    check.contiguous("z_loss", z_loss);
    check_apart(check, "z_loss", z_loss, in);
    check.no_overlap("z_loss", z_loss, "loss", loss);
    params.z_losses = static_cast<float*>(z_loss.data);
  }
  if (lse.defined()) {
    check_per_row(check, "lse", lse, x.shape[0], "x.shape[0]");
    check.contiguous("lse", lse);
    check_apart(check, "lse", lse, in);
    check.apart("lse", lse, {{"loss", loss}, {"z_loss", z_loss}});
    params.lse = static_cast<float*>(lse.data);
  }
  params.loss = static_cast<float*>(loss.data);
  if (loss.numel() == 0 && !context.explain) return;
  run_forward(params, in, context);
}

void linear_cross_entropy_backward(const TensorView& grad_loss, const TensorView& x, const TensorView& weight,
                                   const TensorView& bias, const TensorView& targets, const TensorView& class_weights,
                                   const TensorView& lse, const LinearGradients& gradients,
                                   const LinearCrossEntropyOptions& options, const ExecutionContext& context) {
  const Checker check("linear_cross_entropy_backward", x.device);
  IndexCopies copies(check.device());
  const Inputs in{x, weight, bias, targets, class_weights};
  auto params =
      common_params<LinearCrossEntropyBackwardParams>(check, in, options.ignore_index, options.softcap, copies);
  take_options(check, options, params);
  check_loss(check, "grad_loss", grad_loss, x.shape[0], options.reduction, "x.shape[0]");
  check_gradients(check, in, grad_loss, lse, gradients);
  params.grad_loss = static_cast<const float*>(grad_loss.data);
  params.stride_grad_loss = options.reduction == Reduction::kNone ? grad_loss.strides[0] : 0;
  params.lse = static_cast<const float*>(lse.data);
  if (wants_nothing(gradients) && !context.explain) return;
  run_backward(params, in, gradients, context);
}

void linear_selected_log_prob(const TensorView& x, const TensorView& weight, const TensorView& bias,
                              const TensorView& targets, const TensorView& log_prob, const TensorView& lse,
                              float softcap, float temperature, std::int64_t ignore_index,
                              const ExecutionContext& context) {
  const Checker check("linear_selected_log_prob", x.device);
  IndexCopies copies(check.device());
  const TensorView no_weights;
  const Inputs in{x, weight, bias, targets, no_weights};
  auto params = common_params<LinearCrossEntropyParams>(check, in, ignore_index, softcap, copies);
  take_temperature(check, temperature, params);
  check_per_row(check, "log_prob", log_prob, x.shape[0], "x.shape[0]");
  check.contiguous("log_prob", log_prob);
  check_apart(check, "log_prob", log_prob, in);
  if (lse.defined()) {
    check_per_row(check, "lse", lse, x.shape[0], "x.shape[0]");
    check.contiguous("lse", lse);
    check_apart(check, "lse", lse, in);
    check.no_overlap("lse", lse, "log_prob", log_prob);
    params.lse = static_cast<float*>(lse.data);
  }
  params.loss = static_cast<float*>(log_prob.data);
  if (log_prob.numel() == 0 && !context.explain) return;
  run_forward(params, in, context);
}

void linear_selected_log_prob_backward(const TensorView& grad_log_prob, const TensorView& x, const TensorView& weight,
                                       const TensorView& bias, const TensorView& targets, const TensorView& lse,
                                       const LinearGradients& gradients, float softcap, float temperature,
                                       std::int64_t ignore_index, const ExecutionContext& context) {
  const Checker check("linear_selected_log_prob_backward", x.device);
  IndexCopies copies(check.device());
  const TensorView no_weights;
  const Inputs in{x, weight, bias, targets, no_weights};
  auto params = common_params<LinearCrossEntropyBackwardParams>(check, in, ignore_index, softcap, copies);
  take_temperature(check, temperature, params);
  check_per_row(check, "grad_log_prob", grad_log_prob, x.shape[0], "x.shape[0]");
  check_gradients(check, in, grad_log_prob, lse, gradients);
  params.grad_loss = static_cast<const float*>(grad_log_prob.data);
  params.stride_grad_loss = grad_log_prob.strides[0];
  params.lse = static_cast<const float*>(lse.data);
  if (wants_nothing(gradients) && !context.explain) return;
  run_backward(params, in, gradients, context);
}

}  // namespace flashkernel
