// Binds sample.hpp: sample.
#include "flashkernel/sample.hpp"

#include "op.hpp"

namespace flashkernel::python {
namespace {

nb::object sample(nb::handle logits, nb::handle temperature, nb::handle top_k, nb::handle top_p, nb::handle min_p,
                  nb::handle bias, nb::handle history, nb::handle repetition_penalty, nb::handle frequency_penalty,
                  nb::handle presence_penalty, nb::handle seed, nb::handle offset, nb::handle out, nb::handle logprob,
                  nb::handle stream, nb::handle dtype) {
  Call call("sample", stream, dtype);
  const TensorView logits_view = call.input("logits", logits);
  const auto optional = [&](const char* name, nb::handle array) { return call.optional_input(name, array); };
  const TensorView temperatures = optional("temperature", temperature), top_ks = optional("top_k", top_k),
                   top_ps = optional("top_p", top_p), min_ps = optional("min_p", min_p),
                   biases = optional("bias", bias), histories = optional("history", history),
                   repetitions = optional("repetition_penalty", repetition_penalty),
                   frequencies = optional("frequency_penalty", frequency_penalty),
                   presences = optional("presence_penalty", presence_penalty), seeds = optional("seed", seed),
                   offsets = optional("offset", offset);
  Output output = call.output("out", out, DType::kInt64, Shape{extent(logits_view, 0)});
  Output logprobs;
  if (!logprob.is_none()) logprobs = call.output("logprob", logprob, DType::kFloat32, Shape{extent(logits_view, 0)});
  call.run([&](const ExecutionContext& context) {
    flashkernel::sample(logits_view, temperatures, top_ks, top_ps, min_ps, biases, histories, repetitions, frequencies,
                        presences, seeds, offsets, output.view, logprobs.view, context);
  });
  return call.result(output);
}

void bind_sample(nb::module_& module) {
  def_op<&sample>(
      module,
      "def sample(logits: ArrayT, temperature: SupportsDLPack | None = None, top_k: SupportsDLPack | None = None, "
      "top_p: SupportsDLPack | None = None, min_p: SupportsDLPack | None = None, *, bias: SupportsDLPack | None = "
      "None, history: SupportsDLPack | None = None, repetition_penalty: SupportsDLPack | None = None, "
      "frequency_penalty: SupportsDLPack | None = None, presence_penalty: SupportsDLPack | None = None, seed: "
      "SupportsDLPack | None = None, offset: SupportsDLPack | None = None, out: SupportsDLPack | None = None, logprob: "
      "SupportsDLPack | None = None, stream: typing.Any = None, dtype: typing.Any = None) -> ArrayT",
      R"doc(The next token of each row of logits, without a sort, by one kernel.

logits: [rows, vocab]; float32, float16 or bfloat16; contiguous last dim.
temperature, top_p, min_p: float32 [rows]. Temperature 0, or none: the first of the best tokens. Only the fewest best
    tokens whose probability reaches top_p are drawn (equal ones by their ids; 1: all), and of these the ones at least
    min_p times as likely as the best (0: all; above 1 as 1).
top_k: int32 or int64 [rows]; only the best top_k are drawn, and what equals the last of them; 0: all.
bias: float32 [rows, vocab], added to the logits.
history: int32 [rows, vocab], 2 * (times generated), plus 1 for a token of the prompt; needed with a penalty.
repetition_penalty: float32 [rows]; logits of tokens with a history are divided by it where positive, else multiplied.
frequency_penalty, presence_penalty: float32 [rows]; subtracted for each time the row has generated a token, and once if it has.
seed, offset: int64 [rows]; key and counter of the draw (Philox4x32-10); 0 where absent.
out: int32 or int64 [rows], written in place and returned.
logprob: float32 [rows], written: the natural logarithm of the token's probability under the logits as they came.

Returns out, int64. The same tokens on every device, bit for bit. A row with a NaN or +inf, or without a number above
-inf, gets -1 - (the id of that logit), and logprob NaN.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> logits = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]], np.float32))
>>> fk.sample(logits).tolist()
[0, 1]
>>> t, p = np.ones(2, np.float32), np.array([0.5, 0.95], np.float32)
>>> bool(fk.sample(logits, t, top_p=p, seed=np.array([7, 8]))[0] == 0)
True
)doc");
}

const OpFile registration(bind_sample);

}  // namespace
}  // namespace flashkernel::python
