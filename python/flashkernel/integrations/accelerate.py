"""`accelerate(model)`: a model of Transformers generates by FlashKernel's engine.

The engine computes with the model's own parameters. Where it wants several of them as one matrix (Q, K and V; gate
and up) it makes that matrix once, and the parameters become views of it: no second copy stays, and stock forward
passes and training go on with the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..generate.arrays import DTYPES, TorchArrays
from ..generate.checkpoint import MemoryCheckpoint
from ..generate.engine import Engine
from ..generate.model import build_model
from ..generate.sampling import SamplingOptions

__all__ = ["accelerate", "restore"]

# Arguments of `generate` that are read; all others must be absent, or say what happens anyway.
_READ = {"max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "eos_token_id", "pad_token_id"}
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "use_cache": (True,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
    "length_penalty": (1.0,),
    "typical_p": (1.0,),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "early_stopping": (False,),
    "return_dict_in_generate": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
}
_OF_THE_FILE = ("bos_token_id", "transformers_version", "_from_model_config", "decoder_start_token_id")
# What Transformers takes where neither the caller nor the model's generation config says anything.
_DEFAULTS: dict[str, Any] = {"max_length": 20, "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}


def accelerate(model: Any, **options: Any) -> Any:
    """Replaces `model.generate`; returns the model, whose `.flashkernel` is the `Engine` now. `restore` undoes it.

    model: GPT-2, Llama, Mistral, Qwen2 or Qwen3 with a language-modelling head, in one dtype (float32, float16,
    bfloat16)
        on one device, the CPU or a GPU.
    options: those of `flashkernel.generate.Engine`: page_size, num_pages, max_batch, ...

    `model.generate(input_ids, attention_mask=None, ...)` takes prompts padded on either side and returns what the
    stock one does: int64 [batch, prompt + new], the padded prompts, then the new tokens with pad_token_id behind the
    last one. It reads max_new_tokens, max_length, do_sample, temperature, top_k, top_p, eos_token_id, pad_token_id,
    from the arguments or the model's generation_config, and `seed` (default 0) for sampling. Sampling draws other
    numbers than torch's.

    Ready at once: nothing is compiled. On a GPU the first step of each batch size captures its CUDA graph.

    Raises NotImplementedError for another model, a parameter elsewhere, and arguments of `generate` beyond these.
    """
    weight = model.get_input_embeddings().weight
    dtype = str(weight.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise NotImplementedError(f"accelerate: the model's dtype is {dtype}; one of {', '.join(DTYPES)} is needed")
    odd = {
        f"{p.dtype} on {p.device}" for p in model.parameters() if (p.dtype, p.device) != (weight.dtype, weight.device)
    }
    if odd:
        raise NotImplementedError(
            f"accelerate: parameters are {weight.dtype} on {weight.device} and {', '.join(sorted(odd))}; "
            f"one dtype on one device is needed"
        )
    if weight.is_cuda and weight.device.index != torch.cuda.current_device():
        raise NotImplementedError(
            f"accelerate: the model is on {weight.device}, the current device is cuda:{torch.cuda.current_device()}; "
            f"make the model's the current one (torch.cuda.set_device)"
        )
    if model.get_output_embeddings() is None:
        raise NotImplementedError(f"accelerate: {type(model).__name__} has no language-modelling head")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    config = getattr(model, "generation_config", None)
    checkpoint = MemoryCheckpoint(model.config.to_dict(), parameters, config and config.to_diff_dict())
    inner = build_model(checkpoint, TorchArrays(dtype, str(weight.device)))
    for names, whole in getattr(inner, "stacked", []):
        begin = 0
        for name in names:
            rows = parameters[name].shape[0]
            parameters[name].data = whole[begin : begin + rows]
            begin += rows
    for name, weight in getattr(inner, "turned", []):
        parameters[name].data = weight.T
    engine = Engine(inner, **options)
    model.flashkernel = engine

    def generate(
        inputs: torch.Tensor | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        generation_config: Any = None,
        seed: int = 0,
        **arguments: Any,
    ) -> torch.Tensor:
        ids = inputs if input_ids is None else input_ids
        if ids is None or ids.dim() != 2:
            raise ValueError("accelerate: generate needs input_ids [batch, seq]")
        asked = _asked(generation_config or model.generation_config, arguments)
        return _generate(engine, ids, attention_mask, asked, seed)

    model.generate = generate
    return model


def restore(model: Any) -> Any:
    """Gives `model.generate` back and drops the engine with its cache."""
    for name in ("generate", "flashkernel"):
        if name in vars(model):
            delattr(model, name)
    return model


def _asked(config: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the call wants: its arguments, then the generation config, then Transformers' defaults."""
    asked = {name: value for name, value in config.to_dict().items() if value is not None}
    asked.update({name: value for name, value in arguments.items() if value is not None})
    for name, value in asked.items():
        if name in _READ or name in _OF_THE_FILE or value in _HARMLESS.get(name, ()):
            continue
        raise NotImplementedError(
            f"accelerate: generate was asked for {name}={value!r}, which FlashKernel's engine does not do; leave it "
            f"out, or call restore(model) for the stock generate"
        )
    return {**_DEFAULTS, **asked}


def _generate(
    engine: Engine, ids: torch.Tensor, mask: torch.Tensor | None, asked: Mapping[str, Any], seed: int
) -> torch.Tensor:
    width = ids.shape[1]
    eos = asked.get("eos_token_id")
    stop = frozenset() if eos is None else frozenset(torch.as_tensor(eos).flatten().tolist())
    pad = asked.get("pad_token_id")
    pad = int(pad if pad is not None else min(stop, default=0))
    count = int(asked["max_new_tokens"] if "max_new_tokens" in asked else asked["max_length"] - width)
    sampling = SamplingOptions()
    if asked["do_sample"]:
        sampling = SamplingOptions(float(asked["temperature"]), int(asked["top_k"]), float(asked["top_p"]), seed)
    rows, visible = ids.tolist(), (torch.ones_like(ids) if mask is None else mask).bool().tolist()
    prompts = [[t for t, seen in zip(row, see, strict=True) if seen] for row, see in zip(rows, visible, strict=True)]
    new: list[list[int]] = [[] for _ in prompts]
    for event in engine.generate(prompts, max_new_tokens=count, sampling=sampling, stop_tokens=stop):
        new[event.sequence].append(event.token)
    longest = max(map(len, new))
    padded = torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens in new], dtype=ids.dtype)
    return torch.cat([ids, padded.to(ids.device)], dim=1)
