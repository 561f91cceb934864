// Sampling: the next token of each row of logits.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

/// out[r] = a token drawn from logits [rows, vocab] (float32, float16 or bfloat16; contiguous last dim; at most 2^23
/// tokens). out: int32 or int64 [rows], contiguous. All parameters of rows are contiguous [rows], and absent ones
/// change nothing; they are read on the device, so that a captured graph replays with other numbers.
///
/// In this order, as Hugging Face has it: `bias` float32 [rows, vocab] is added; `repetition_penalty` divides positive
/// logits and multiplies negative ones of tokens whose `history` is not 0; `frequency_penalty` is subtracted once for
/// each time that the row has generated the token, `presence_penalty` once if it has. history: int32 [rows, vocab]:
/// 2 * (times generated), plus 1 for a token of the prompt; needed with a penalty. Then a row with `temperature` 0 (or
/// top_k 1, or without `temperature`) takes the first of its best tokens. The others divide by temperature, keep the
/// top_k best (int32 or int64; all that equal the last of them; 0: no limit), of these the fewest best whose
/// probability reaches top_p, equal ones by their ids (1: no limit), of these all that have at least min_p times the
/// probability of the best (0: no limit; above 1 as 1), and draw in the order of ids by a number from Philox4x32-10
/// with key `seed` [rows] and counter `offset` [rows] (int64, 0 where absent).
///
/// The result is the same on every device, bit for bit: distances from the best logit, in float32, become multiples of
/// 2^-24 (in units of ln 2), those become integer weights of 2^-40 of the best one's, and all sums are of integers.
/// Tokens of the same distance count as equal; below 2^-40 of the best one's probability none is drawn.
///
/// A row with a NaN or +inf, or without any number above -inf, gets -1 - (the id of that logit): a kernel can't throw,
/// and whoever reads the tokens sees it. logprob: float32 [rows], or absent: the natural logarithm of the token's
/// probability under the logits as they came (NaN for such a row).
FK_API void sample(const TensorView& logits, const TensorView& temperature, const TensorView& top_k,
                   const TensorView& top_p, const TensorView& min_p, const TensorView& bias, const TensorView& history,
                   const TensorView& repetition_penalty, const TensorView& frequency_penalty,
                   const TensorView& presence_penalty, const TensorView& seed, const TensorView& offset,
                   const TensorView& out, const TensorView& logprob = {}, const ExecutionContext& context = {});

}  // namespace flashkernel
