// Front door of sample.
#include "flashkernel/sample.hpp"

#include "ops/check.hpp"
#include "ops/sample_params.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

/// A parameter of each row, or null where it is absent.
template <class T>
const T* row_numbers(const Checker& check, const char* name, const TensorView& view, DType needed, std::int64_t rows) {
  if (!view.defined()) return nullptr;
  check.dtype(name, view, needed);
  check.ndim(name, view, 1, 1);
  check.extent(name, view, 0, rows, "logits.shape[0]");
  check.contiguous(name, view);
  return static_cast<const T*>(view.data);
}

/// A number for each token of each row, or null where they are absent.
template <class T>
const T* token_numbers(const Checker& check, const char* name, const TensorView& view, DType needed,
                       const TensorView& logits, std::int64_t& stride) {
  if (!view.defined()) return nullptr;
  check.dtype(name, view, needed);
  check.same_shape(name, view, "logits", logits);
  check.last_dim_contiguous(name, view);
  stride = view.strides[0];
  return static_cast<const T*>(view.data);
}

}  // namespace

void sample(const TensorView& logits, const TensorView& temperature, const TensorView& top_k, const TensorView& top_p,
            const TensorView& min_p, const TensorView& bias, const TensorView& history,
            const TensorView& repetition_penalty, const TensorView& frequency_penalty,
            const TensorView& presence_penalty, const TensorView& seed, const TensorView& offset, const TensorView& out,
            const TensorView& logprob, const ExecutionContext& context) {
  const Checker check("sample", logits.device);
  check.floating("logits", logits);
  check.ndim("logits", logits, 2, 2);
  check.last_dim_contiguous("logits", logits);
  SampleParams params;
  params.dtype = logits.dtype;
  params.device = logits.device;
  params.rows = logits.shape[0];
  params.vocab = logits.shape[1];
  if (params.vocab == 0 || params.vocab > SampleParams::kMostTokens)
    check.fail(shape_text("logits", logits, 1) + "; needs 1 to " + std::to_string(SampleParams::kMostTokens));
  params.logits = logits.data;
  params.stride_logits = logits.strides[0];
  const auto floats = [&](const char* name, const TensorView& view) {
    return row_numbers<float>(check, name, view, DType::kFloat32, params.rows);
  };
  params.temperature = floats("temperature", temperature);
  params.top_p = floats("top_p", top_p);
  params.min_p = floats("min_p", min_p);
  params.repetition_penalty = floats("repetition_penalty", repetition_penalty);
  params.frequency_penalty = floats("frequency_penalty", frequency_penalty);
  params.presence_penalty = floats("presence_penalty", presence_penalty);
  params.seed = row_numbers<std::int64_t>(check, "seed", seed, DType::kInt64, params.rows);
  params.offset = row_numbers<std::int64_t>(check, "offset", offset, DType::kInt64, params.rows);
  IndexCopies copies(check.device());
  if (top_k.defined()) params.top_k = check.index_array("top_k", top_k, params.rows, copies);
  params.bias = token_numbers<float>(check, "bias", bias, DType::kFloat32, logits, params.stride_bias);
  params.history = token_numbers<std::int32_t>(check, "history", history, DType::kInt32, logits, params.stride_history);
  if (!params.history)
    check.require(!params.repetition_penalty && !params.frequency_penalty && !params.presence_penalty,
                  "a penalty was given without history; needs history int32 [rows, vocab]");
  check.index("out", out);
  check.ndim("out", out, 1, 1);
  check.extent("out", out, 0, params.rows, "logits.shape[0]");
  check.contiguous("out", out);
  const auto apart = [&](const char* name, const TensorView& view) {
    check.apart(name, view,
                {{"logits", logits},
                 {"temperature", temperature},
                 {"top_k", top_k},
                 {"top_p", top_p},
                 {"min_p", min_p},
                 {"bias", bias},
                 {"history", history},
                 {"repetition_penalty", repetition_penalty},
                 {"frequency_penalty", frequency_penalty},
                 {"presence_penalty", presence_penalty},
                 {"seed", seed},
                 {"offset", offset}});
  };
  apart("out", out);
  params.out = out.data;
  params.out_is_int64 = out.dtype == DType::kInt64;
  if (logprob.defined()) {
    params.logprob = const_cast<float*>(floats("logprob", logprob));
    apart("logprob", logprob);
    check.no_overlap("logprob", logprob, "out", out);
  }
  if (params.rows == 0 && !context.explain) return;
  dispatch(params, params.device, context);
}

}  // namespace flashkernel
