// Sampling: the next token of each row of logits.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

/// Draws the next token of each row of logits.
/// - logits [rows, vocab] float32, float16 or bfloat16; last dim contiguous; vocab at most 2^23
/// - out int32 or int64 [rows], contiguous: written
/// - logprob float32 [rows], or absent: gets the natural logarithm of the token's probability under the logits as they
///   came
/// - all others: parameters of rows, contiguous [rows] where nothing else is said. An absent one changes nothing. They
///   are read on the device, so that a captured graph replays with other numbers
///
/// In this order, as in Hugging Face Transformers:
/// - `bias` float32 [rows, vocab] is added.
/// - `repetition_penalty` divides positive logits, and multiplies negative ones, of tokens whose `history` is not 0.
///   history int32 [rows, vocab] is 2 * (times generated), plus 1 for a token of the prompt; it is needed with a
///   penalty.
/// - `frequency_penalty` is subtracted once for each time that the row has generated the token, `presence_penalty` once
///   if it has.
/// - A row with `temperature` 0, with top_k 1, or without `temperature` takes the first of its best tokens. The others
///   divide by temperature and go on.
/// - `top_k` (int32 or int64; 0: no limit) keeps the best, and all that equal the last of them.
/// - `top_p` (1: no limit) keeps of these the fewest best whose probability reaches it, equal ones by their ids.
/// - `min_p` (0: no limit; above 1 as 1) keeps of these all that have at least min_p times the probability of the best.
/// - A token is drawn in the order of ids by a number from Philox4x32-10 with key `seed` and counter `offset` (int64, 0
///   where absent).
///
/// The result is the same on every device, bit for bit. Distances from the best logit, in float32, become multiples of
/// 2^-24 (in units of ln 2). Those become integer weights of 2^-40 of the best one's, and all sums are of integers.
/// Tokens of the same distance count as equal. Below 2^-40 of the best one's probability none is drawn.
///
/// A row with a NaN or +inf, or without any number above -inf, gets -1 - (the id of that logit), and a logprob of NaN:
/// a kernel cannot raise an error, so whoever reads the tokens has to look.
FK_API void sample(const TensorView& logits, const TensorView& temperature, const TensorView& top_k,
                   const TensorView& top_p, const TensorView& min_p, const TensorView& bias, const TensorView& history,
                   const TensorView& repetition_penalty, const TensorView& frequency_penalty,
                   const TensorView& presence_penalty, const TensorView& seed, const TensorView& offset,
                   const TensorView& out, const TensorView& logprob = {}, const ExecutionContext& context = {});

}  // namespace flashkernel
