"""`generate` as Transformers has it: its own preparation, then FlashKernel's engine.

Transformers' `generate` reads arguments and configs and prepares tensors, processors and stopping criteria, then calls
the decoding method of the model's class. Here that class is a subclass whose decoding methods are the engine's: an
object of it that shares the model's attributes goes through the stock code, so that nothing of it is written twice.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from itertools import chain, islice
from typing import Any

import torch
from transformers import LogitsProcessorList

from ...generate.speculation import MAX_DRAFT, DraftModel, PromptLookup, Speculation
from .choices import Choices, known
from .follow import FollowingEngine
from .penalties import CountPenalties
from .steps import by_steps

__all__ = ["generate"]

_CACHES = (None, "dynamic", "dynamic_full", "static", "offloaded", "offloaded_static", "hybrid", "sliding_window")
_noted: set[type] = set()
_kinds: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def refuse(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"accelerate: generate was asked for {what}, which FlashKernel's engine does not do; leave it out, or call "
        f"restore(model) for the stock generate"
    )


def generate(
    model: Any,
    *args: Any,
    seed: int | None = None,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    **kwargs: Any,
) -> Any:
    """Stock `generate(inputs, generation_config, logits_processor, ...)` on the engine: see `accelerate`.

    seed: of what sampling draws; None: torch's generator gives one.
    frequency_penalty, presence_penalty, logit_bias: see `flashkernel.generate.SamplingOptions`.
    """
    if frequency_penalty or presence_penalty:
        given = list(args)
        own = given[2] if len(given) > 2 else kwargs.get("logits_processor")
        all_of_them = LogitsProcessorList([*(own or []), CountPenalties(frequency_penalty, presence_penalty)])
        if len(given) > 2:
            args = (*given[:2], all_of_them, *given[3:])
        else:
            kwargs["logits_processor"] = all_of_them
    if logit_bias:
        if kwargs.get("sequence_bias") is not None:
            raise ValueError("accelerate: generate was given logit_bias and sequence_bias; one of them is needed")
        kwargs["sequence_bias"] = {(int(token),): float(bias) for token, bias in logit_bias.items()}
    speculation = _speculation(model, kwargs)
    for name in ("custom_generate", "inputs_embeds", "past_key_values", "cache", "cache_params"):
        if kwargs.get(name) is not None:
            raise refuse(f"{name}={_short(kwargs[name])}")
    if kwargs.get("synced_gpus"):
        raise refuse("synced_gpus=True")
    if kwargs.get("cache_implementation") not in _CACHES:
        raise refuse(f"cache_implementation={kwargs['cache_implementation']!r}")
    ids = args[0] if args and args[0] is not None else kwargs.get("inputs", kwargs.get("input_ids"))
    if ids is not None and (not isinstance(ids, torch.Tensor) or ids.dim() != 2):
        shape = list(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise ValueError(f"accelerate: generate was given input_ids {shape}; a tensor [batch, seq] is needed")
    mask = kwargs.get("attention_mask")
    if mask is not None and ids is not None and tuple(mask.shape) != tuple(ids.shape):
        raise ValueError(
            f"accelerate: generate was given an attention_mask {list(mask.shape)} for input_ids {list(ids.shape)}; "
            f"the same shape is needed"
        )
    shadow: Any = object.__new__(_prepared(type(model)))
    object.__setattr__(shadow, "__dict__", model.__dict__)
    object.__setattr__(shadow, "flashkernel_seed", seed)
    if speculation is None:
        return type(model).generate(shadow, *args, **kwargs)
    engine = model.flashkernel
    with engine.turn:
        before = engine.speculation
        engine.follow()  # a changed model is built anew, and takes its options with it
        engine.speculation = speculation
        try:
            return type(model).generate(shadow, *args, **kwargs)
        finally:
            engine.speculation = before


def _speculation(model: Any, kwargs: dict[str, Any]) -> Speculation | None:
    """What Transformers' names of assisted decoding ask for; they are taken out of `kwargs`."""
    lookup, assistant = kwargs.pop("prompt_lookup_num_tokens", None), kwargs.pop("assistant_model", None)
    if lookup is not None and assistant is not None:
        raise ValueError(
            "accelerate: generate was given prompt_lookup_num_tokens and assistant_model; one of them is needed"
        )
    if lookup is not None:
        ngram = kwargs.pop("max_matching_ngram_size", None) or 2
        return PromptLookup(tokens=min(lookup, MAX_DRAFT), ngram=ngram, min_ngram=1)
    if assistant is None:
        return None
    engine = getattr(assistant, "flashkernel", None)
    if not isinstance(engine, FollowingEngine):
        raise NotImplementedError(
            f"accelerate: generate was given assistant_model={_short(assistant)}, which is not accelerated; call "
            f"accelerate(assistant_model) first"
        )
    if assistant is model:
        raise refuse("assistant_model=the model itself")
    with engine.turn:
        engine.follow()
    tokens = kwargs.pop("num_assistant_tokens", None)
    return DraftModel(engine.model) if tokens is None else DraftModel(engine.model, min(tokens, MAX_DRAFT))


def _prepared(kind: Any) -> Any:
    """A subclass that decodes by the engine; its objects share the attributes of a model."""
    if kind in _kinds:
        return _kinds[kind]
    methods: dict[str, Any] = {
        "__slots__": ("flashkernel_seed",),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "_sample": _sample,
        "_prepare_cache_for_generation": _prepare_no_cache,
    }
    for name in dir(kind):  # beams, assistants, and what older releases have
        if name in ("_beam_search", "_assisted_decoding", "_group_beam_search", "_constrained_beam_search") or (
            name in ("_contrastive_search", "_dola_decoding")
        ):
            methods[name] = _refuse_mode
    _kinds[kind] = type(kind.__name__, (kind,), methods)
    return _kinds[kind]


def _refuse_mode(self: Any, *args: Any, generation_config: Any = None, **kwargs: Any) -> Any:
    beams = getattr(generation_config, "num_beams", None)
    if getattr(generation_config, "prompt_lookup_num_tokens", None):
        raise refuse("prompt_lookup_num_tokens in a generation config; give it to generate as an argument")
    raise refuse(f"num_beams={beams}" if beams and beams > 1 else "another way of decoding than sampling or greedy")


def _prepare_no_cache(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> None:
    if generation_config.cache_implementation not in _CACHES:
        raise refuse(f"cache_implementation={generation_config.cache_implementation!r}")


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, (str, int, float, bool)) else type(value).__name__


# Arguments of the model that change nothing here.
_HARMLESS = (
    "assistant_tokenizer",
    "attention_mask",
    "cache_position",
    "logits_to_keep",
    "position_ids",
    "token_type_ids",
    "tokenizer",
    "use_cache",
)


def _check_model_arguments(config: Any, ids: torch.Tensor, mask: Any, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None and name not in _HARMLESS and not name.startswith("output_"):
            raise refuse(f"{name}={_short(value)}")
    if config.model_type == "gpt2" and given.get("token_type_ids") is not None:
        raise refuse("token_type_ids")
    positions = given.get("position_ids")
    if positions is not None:
        visible = torch.ones_like(ids) if mask is None else (mask != 0).long()
        expected = (visible.cumsum(-1) - 1).to(positions.device)
        if positions.shape[-1] != ids.shape[1] or not bool(
            ((positions == expected) | (visible == 0).to(positions.device)).all()
        ):
            raise refuse("position_ids that are not those of the attention mask")


def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of `GenerationMixin._sample`. Threads that generate at once do so one after the other."""
    with self.flashkernel.turn:
        return _sample_alone(self, *args, **kwargs)


def _sample_alone(
    self: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    config, engine, seed = generation_config, self.flashkernel, self.flashkernel_seed
    mask = model_kwargs.get("attention_mask")
    mask = None if mask is None or bool((mask != 0).all()) else mask != 0
    if synced_gpus:
        raise refuse("synced_gpus=True")
    _check_model_arguments(self.config, input_ids, mask, model_kwargs)
    gives_dict = bool(config.return_dict_in_generate)
    for name in ("output_attentions", "output_hidden_states"):
        if gives_dict and getattr(config, name):
            raise refuse(f"{name}=True")
    keep_scores, keep_logits = gives_dict and bool(config.output_scores), gives_dict and bool(config.output_logits)
    lengths = [criterion.max_length for criterion in stopping_criteria if hasattr(criterion, "max_length")]
    count = max(1, min(lengths, default=config.max_length) - input_ids.shape[1])
    if mask is None:
        prompts, padding = input_ids.tolist(), None
    else:
        rows = zip(input_ids.tolist(), mask.tolist(), strict=True)
        prompts = [[token for token, seen in zip(row, see, strict=True) if seen] for row, see in rows]
        # None fits no processor: only where all tokens behind the padding are visible, the prompt is what one sees.
        left = bool((mask.int().cummax(1).values == mask.int()).all())
        padding = mask.int().argmax(1).tolist() if left else []
    choices = None
    if not (keep_scores or keep_logits or (streamer is not None and len(prompts) > 1)):
        draws = bool(config.do_sample)
        if draws and seed is None:
            state = torch.random.get_rng_state()
            drawn = int(torch.randint(2**62, (1,)))
        else:
            state, drawn = None, seed or 0
        choices = known(logits_processor, stopping_criteria, padding, draws, drawn)
        if choices is None and state is not None:
            torch.random.set_rng_state(state)  # torch itself draws then
    if choices is None:
        _note(logits_processor)
        ids, scores, logits = by_steps(
            engine,
            input_ids,
            prompts,
            count,
            logits_processor,
            stopping_criteria,
            sample=bool(config.do_sample),
            seed=seed,
            pad=config._pad_token_tensor,
            streamer=streamer,
            keep_scores=keep_scores,
            keep_logits=keep_logits,
            mends_logits=any(type(p).__name__ == "InfNanRemoveLogitsProcessor" for p in logits_processor),
        )
    else:
        scores = logits = None
        ids = _by_engine(engine, input_ids, prompts, count, choices, config._pad_token_tensor, streamer)
    if not gives_dict:
        return ids
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=ids, scores=scores, logits=logits)


def _by_engine(
    engine: Any,
    ids: torch.Tensor,
    prompts: list[list[int]],
    count: int,
    choices: Choices,
    pad: torch.Tensor | None,
    streamer: Any,
) -> torch.Tensor:
    new: list[list[int]] = [[] for _ in prompts]
    with engine.at_once():
        events = engine.generate(prompts, max_new_tokens=count, sampling=choices.sampling, stop_tokens=choices.stop)
        first = list(islice(events, 1))
    for event in chain(first, events):
        new[event.sequence].append(event.token)
        if streamer is not None:
            streamer.put(torch.tensor([event.token]))
    if streamer is not None:
        streamer.end()
    longest = max(map(len, new))
    fill = 0 if pad is None else int(pad)
    tokens = torch.tensor([row + [fill] * (longest - len(row)) for row in new])
    return torch.cat([ids, tokens.to(ids.device)], dim=1)


def _note(processors: Any) -> None:
    """Says once for each class that is not of Transformers what it costs."""
    for processor in processors:
        kind = type(processor)
        if kind not in _noted and not kind.__module__.startswith(("transformers.", "flashkernel.")):
            _noted.add(kind)
            warnings.warn(
                f"accelerate: {kind.__qualname__} is called between steps, so the engine computes one step at a time",
                stacklevel=2,
            )
