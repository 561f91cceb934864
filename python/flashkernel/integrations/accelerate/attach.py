"""`accelerate` and `restore`: what a model gets and gives back."""

from __future__ import annotations

import functools
from typing import Any

from .follow import FollowingEngine
from .generate import generate

__all__ = ["accelerate", "restore"]

_OURS = ("generate", "flashkernel", "__reduce_ex__")


def accelerate(model: Any, **options: Any) -> Any:
    """Replaces `model.generate`; returns the model, whose `.flashkernel` is the `Engine` now. `restore` undoes it.

    model: of one of the families in docs/generate.md (GPT-2, Llama, Qwen, Gemma, Phi-3, Mixtral, GPT-OSS, ...), with a
        language-modelling head, in one dtype (float32, float16, bfloat16) on one device, the CPU or a GPU, made of
        stock modules without hooks or adapters.
    options: those of `flashkernel.generate.Engine`: page_size, num_pages, max_batch, ...

    **Arguments.** `model.generate` takes what the stock one takes and gives what it gives: Transformers' own code reads
    the arguments and generation configs, infers masks and lengths, and makes the processors and stopping criteria.
    Then the engine chooses tokens. The repetition penalty, temperature, top_k, top_p, min_p, typical_p, biases and bans
    of single tokens and end-of-text tokens are its own, and so are frequency_penalty=, presence_penalty= and
    logit_bias=, which the stock `generate` lacks. With any other processor or criterion (stop_strings, max_time,
    functions of yours, a streamer for several sequences, output_scores) it computes one step at a time and calls them
    on Transformers' tensors in between, which is slower; for a processor that is not of Transformers a warning says so
    once.

    prompt_lookup_num_tokens= (with max_matching_ngram_size=) and assistant_model= (with num_assistant_tokens=) are the
    engine's speculation, which changes no token: for any batch, greedy or sampled. The assistant must be accelerated,
    too, and have the same vocabulary. Where the engine computes one step at a time nothing is drafted.

    Two things differ. A prompt padded on the right goes on behind its last visible token (the stock model goes on
    behind the padding). Sampling draws other numbers than torch's, from `seed=` or, without one, from a number of
    torch's generator, so that torch.manual_seed makes it repeatable.

    Refused by name (NotImplementedError): beams, custom generation, an assistant that is not accelerated,
    inputs_embeds, a cache of the caller, quantised caches, output_attentions, output_hidden_states, token_type_ids of
    GPT-2, position_ids that skip, a length beyond the model's context. A NaN or inf among the logits is
    NonFiniteLogitsError, a RuntimeError.

    **Weights.** The engine computes with the model's own parameters: what training changes, it sees. Each call looks at
    modules, hooks, parameters and version counters first (some 0.3 ms for a Llama of 1B). Weights written in place:
    pages kept from earlier prompts are dropped. Other dtypes, devices, tensors, layers, heads or embeddings: the
    engine is made anew, or a sentence says what it does not compute. Writes through `.data` count no version, so a
    call that may find or leave kept pages (more than page_size tokens, unless prefix_sharing=False) also reads all
    weights once, which takes about as long as a decode step or two.

    **Copies.** Parameters stay separate tensors, though Q, K and V lie one behind the other. copy.deepcopy, pickle and
    torch.save give the stock model: call accelerate on the copy.

    **Threads.** Calls of several threads run one after the other. A child of fork() generates, too, on the CPU.

    Ready at once: nothing is compiled. On a GPU the first step of each batch size captures its CUDA graph.

    Raises NotImplementedError for another model and a parameter elsewhere.
    """
    engine = FollowingEngine(model, vars(model).get("flashkernel"), **options)
    model.flashkernel = engine
    model.generate = functools.partial(generate, model)
    model.__dict__["__reduce_ex__"] = functools.partial(_reduce, model)
    return model


def restore(model: Any) -> Any:
    """Gives `model.generate` back and drops the engine with its cache."""
    for name in _OURS:
        vars(model).pop(name, None)
    return model


def _reduce(model: Any, protocol: Any) -> Any:
    """How copy and pickle see the model: as the stock one."""
    kind: Any = type(model)
    reduced = list(kind.__reduce_ex__(model, protocol))
    if isinstance(reduced[2], dict):
        reduced[2] = {key: value for key, value in reduced[2].items() if key not in _OURS}
    return tuple(reduced)
