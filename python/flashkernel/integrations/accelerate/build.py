"""The engine's model on the parameters of a stock one.

Where the engine wants several parameters as one matrix (Q, K and V; gate and up; a kind's matrices of all layers), or
with rows of zeros behind them, it makes that matrix once, and the parameters then lie in it: no second copy stays, and
stock forward passes and training go on with the same numbers. Each parameter has a storage of its own size all the same
(that of a tensor which came through DLPack), so that saving and copying see separate tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...generate.arrays import DTYPES, TorchArrays
from ...generate.checkpoint import MemoryCheckpoint
from ...generate.errors import CheckpointError, UnsupportedModelError
from ...generate.families import FAMILIES
from ...generate.model import Model, build_model
from ...generate.one_launch import pays, stack_layers
from ...generate.rope_scaling import Rope
from .protocol import SharesParameters
from .supported import check_modules

__all__ = ["build"]


class _Parameters(Mapping[str, torch.Tensor]):
    """A model's parameters by name, and which of them were read; and the buffers that are saved with them."""

    def __init__(self, model: Any):
        self._found = dict(model.named_parameters(remove_duplicate=False))
        kept = model.state_dict(keep_vars=True)
        buffers = {name: tensor for name, tensor in model.named_buffers() if name in kept}
        self._found |= buffers
        self.read: set[int] = {id(tensor) for tensor in buffers.values()}  # nobody has to read them

    def __getitem__(self, name: str) -> torch.Tensor:
        parameter = self._found[name]
        self.read.add(id(parameter))
        return parameter

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Any:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def unread(self) -> list[str]:
        return [name for name, parameter in self._found.items() if id(parameter) not in self.read]


def _one_place(model: Any) -> tuple[str, torch.device]:
    """The dtype and the device of all parameters."""
    weight = model.get_input_embeddings().weight
    dtype = str(weight.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise NotImplementedError(f"accelerate: the model's dtype is {dtype}; one of {', '.join(DTYPES)} is needed")
    # Of routers that Transformers keeps in float32 the engine takes the numbers in float32 too.
    wide = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    odd = {
        f"{p.dtype} on {p.device}"
        for name, p in model.named_parameters()
        if (p.dtype, p.device) != (weight.dtype, weight.device)
        and not (p.dtype == torch.float32 and p.device == weight.device and name.endswith(tuple(wide)))
    }
    if odd:
        raise NotImplementedError(
            f"accelerate: parameters are {weight.dtype} on {weight.device} and {', '.join(sorted(odd))}; "
            f"one dtype on one device is needed"
        )
    if weight.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"accelerate: the model is on {weight.device}; the CPU or a CUDA device is needed")
    if weight.is_cuda and weight.device.index != torch.cuda.current_device():
        raise NotImplementedError(
            f"accelerate: the model is on {weight.device}, the current device is cuda:{torch.cuda.current_device()}; "
            f"make the model's the current one (torch.cuda.set_device)"
        )
    return dtype, weight.device


def build(
    model: Any, before: Model | None = None, *, one_launch: bool | None = None, kv_dtype: str | None = None
) -> Model:
    """The engine's model; `before`: the one made last, whose matrices are taken where parameters still lie in them.

    one_launch, kv_dtype: as `Engine` takes them; layers are stacked for the one where it is wanted, or pays.

    Nothing of `model` is changed where this raises.

    Raises NotImplementedError for what the engine does not compute.
    """
    model_type = getattr(model.config, "model_type", None)
    if model_type == "gpt2" or model_type in FAMILIES:
        check_modules(model, FAMILIES[model_type].module if model_type in FAMILIES else model_type)
    dtype, device = _one_place(model)
    head = model.get_output_embeddings()
    if head is None:
        raise NotImplementedError(f"accelerate: {type(model).__name__} has no language-modelling head")
    parameters = _Parameters(model)
    generation = getattr(model, "generation_config", None)
    config = model.config.to_dict()
    # What the modules hold, whatever the config says.
    config["tie_word_embeddings"] = head.weight is model.get_input_embeddings().weight
    arrays = TorchArrays(dtype, str(device))
    if isinstance(before, SharesParameters):
        arrays.stacks = {whole.data_ptr(): whole for _, whole in before.stacked}
    try:
        inner = build_model(MemoryCheckpoint(config, parameters, generation and generation.to_diff_dict()), arrays)
    except CheckpointError as error:
        raise NotImplementedError(f"accelerate: the model is not what its config says: {error}") from error
    unread = parameters.unread()
    if unread:
        raise NotImplementedError(
            f"accelerate: {type(model).__name__} has {', '.join(unread[:3])}{' ...' if unread[3:] else ''}, which "
            f"FlashKernel's engine does not compute with; call restore(model) for the stock generate"
        )
    if not isinstance(inner, SharesParameters):
        raise NotImplementedError(
            f"accelerate: FlashKernel's {type(inner).__name__} does not tell where a stock model's parameters lie; "
            f"an architecture with the attributes of SharesParameters is needed"
        )
    _check_numbers(model, inner)
    _take_frequencies(model, inner)
    if one_launch is None:
        one_launch = pays(inner, kv_dtype or dtype)
    if one_launch:
        try:
            stack_layers(inner, before)
        except UnsupportedModelError as error:
            raise NotImplementedError(str(error).replace("generate:", "accelerate:", 1)) from error
    _repoint(parameters, inner)
    return inner


def _check_numbers(model: Any, inner: SharesParameters) -> None:
    """Numbers that modules keep beside the config."""
    for name, module in model.named_modules():
        for key in [key for key in inner.numbers if "." not in key]:
            value, needed = getattr(module, key, None), inner.numbers[key]
            needed = inner.numbers.get(f"{name.rpartition('.')[2]}.{key}", needed)
            if isinstance(value, (int, float)) and not np.isclose(value, needed, rtol=1e-6, atol=0):
                shown = "eps" if key == "variance_epsilon" else key
                raise NotImplementedError(
                    f"accelerate: {name} has {shown}={value}, the config {needed}; one number is needed"
                )


def _take_frequencies(model: Any, inner: SharesParameters) -> None:
    """RoPE's frequencies as the stock model has them: `.half()` rounds them, and they can be set."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    for name, rope in inner.ropes.items():
        before = f"{name}_" if name else ""
        # What a model takes for longer texts stays in inv_freq until its next call.
        has = getattr(rotary, f"{before}{'original_' if rope.changes else ''}inv_freq", None)
        if has is None:  # no layer of this type
            continue
        _take(rope, has.detach().float().cpu().numpy(), getattr(rotary, f"{before}attention_scaling", 1.0), inner)


def _take(rope: Rope, has: np.ndarray, factor: float, inner: SharesParameters) -> None:
    if not np.isclose(factor, rope.factor, rtol=1e-6, atol=0):
        raise NotImplementedError(f"accelerate: RoPE has attention_scaling={factor}; {rope.factor} is needed")
    ours = rope.frequencies() if rope.inv_freq is None else rope.inv_freq.cpu().numpy()
    if has.shape != ours.shape:
        raise NotImplementedError(f"accelerate: RoPE has {has.size} frequencies; {ours.size} are needed")
    if not np.allclose(has, ours, rtol=1e-6, atol=0):
        rope.inv_freq = inner.arrays.index(has, "float32")


def _repoint(parameters: Mapping[str, torch.Tensor], inner: SharesParameters) -> None:
    """Parameters move to where the engine wants them; their own memory is free then."""
    for names, whole in inner.stacked:
        begin = 0
        for name in names:
            parameter = parameters[name]
            rows = parameter.shape[0]
            place = whole[begin : begin + rows]
            if parameter.data_ptr() != place.data_ptr():
                parameter.data = torch.from_dlpack(place)
            begin += rows
    for name, weight in inner.turned:
        if parameters[name].data_ptr() != weight.data_ptr():
            parameters[name].data = weight.T
