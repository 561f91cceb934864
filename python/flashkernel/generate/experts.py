"""A block of experts in the place of an MLP (Shazeer et al., 2017): a router sends each token through a few of them.

Called by decoder_model.py. On the CPU each expert that some token was sent to runs on its tokens alone, one after the
other. On a GPU which experts are hit is known to the device only, and a CUDA graph must do the same work at every
replay: tokens are sorted by expert there, and one launch makes the tiles of all experts (triton/grouped_linear.py).
Without Triton every expert runs on every token, and tokens that were not sent to it take nothing from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashkernel as fk

from .arrays import HostArrays
from .errors import CheckpointError
from .routing import Routing

__all__ = ["ExpertBlock", "Experts", "read_experts"]


@dataclass(frozen=True)
class Experts:
    """How a family names its experts, and how it weighs them."""

    block: str  # the name of the block in checkpoints with one matrix for each expert; "mlp" where they are stacked
    router: str
    parts: tuple[str, str, str] | None  # an expert's gate, up and down there; None: they are always stacked
    normalised: bool | None = None  # whether the weights of a token add up to 1; None: as norm_topk_prob says
    softmax_first: bool = True  # over all experts; else over those that were chosen
    routing: Callable[..., Routing] | None = None  # DeepSeek's; None: the largest ones, as the fields above say
    clamped: bool = False  # GPT-OSS: biases, gate and up in turns, and a gate with limits


@dataclass
class ExpertBlock:
    """The experts of one layer, with weights [experts, out, in] and biases [experts, out] or None."""

    arrays: HostArrays
    router_weight: Any
    router_bias: Any
    gate_up: Any
    gate_up_bias: Any
    down: Any
    down_bias: Any
    each: int  # how many experts a token is sent to
    normalised: bool
    softmax_first: bool
    clamp: tuple[float, float] | None  # alpha and limit of a clamped gate
    routing: Routing | None = None  # which has the router's weight, and says who goes where; router_weight is None then

    def _gated(self, gate_up: Any) -> Any:
        if self.clamp is not None:
            return self.arrays.clamped_gate(gate_up[:, ::2], gate_up[:, 1::2], *self.clamp)
        inner = gate_up.shape[1] // 2
        return fk.swiglu(gate_up[:, :inner], gate_up[:, inner:], **self.arrays.op_options)

    def _one(self, x: Any, expert: int) -> Any:
        options = self.arrays.op_options

        def bias(biases: Any) -> Any:
            return None if biases is None else biases[expert]

        x = self._gated(fk.linear(x, self.gate_up[expert], bias(self.gate_up_bias), **options))
        return fk.linear(x, self.down[expert], bias(self.down_bias), **options)

    def __call__(self, x: Any) -> Any:
        """x [tokens, hidden] through its experts; sums are float32, rounded once."""
        arrays = self.arrays
        if self.routing is not None:
            weights, chosen = self.routing(x)
        else:
            logits = fk.linear(x, self.router_weight, self.router_bias, **arrays.op_options)
            weights, chosen = arrays.route(logits, self.each, self.softmax_first, self.normalised)
        if arrays.asynchronous:
            groups = arrays.groups(chosen, self.gate_up.shape[0])
            if groups is not None:
                x = self._gated(groups.linear(x, self.gate_up, self.gate_up_bias, rows=groups.order // self.each))
                return arrays.weighted_sum(groups.linear(x, self.down, self.down_bias, back=True), weights)
        total = arrays.zeros(tuple(x.shape), "float32")
        if arrays.asynchronous:
            for expert in range(self.gate_up.shape[0]):
                arrays.add_chosen(total, self._one(x, expert), weights, chosen, expert)
            return arrays.rounded(total)
        sent = arrays.to_host(chosen)
        for expert in np.unique(sent):
            tokens, places = np.nonzero(sent == expert)
            arrays.add_rows(total, tokens, self._one(arrays.take(x, tokens), int(expert)), weights[tokens, places])
        return arrays.rounded(total)


def read_experts(
    kind: Experts,
    config: Mapping[str, Any],
    arrays: HostArrays,
    at: str,
    read: Callable[..., Any],
    floats: Callable[..., Any],
    stacked: bool,
) -> ExpertBlock:
    """The experts of the layer whose names begin with `at`.

    config: the fields that have been read. read: a tensor by its name within the decoder, and its shape. floats: the
        same in float32 whatever the model's dtype.
    stacked: whether the checkpoint has one tensor for all experts of a layer, as models in memory do.
    """
    count = next(config[name] for name in ("num_local_experts", "num_experts", "n_routed_experts") if name in config)
    each = config["num_experts_per_tok"]
    if each > count:
        raise CheckpointError(
            f"load_model: config.json has num_experts_per_tok={each} and {count} experts; at most {count} can be needed"
        )
    hidden = config["hidden_size"]
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    block = at + ("mlp" if stacked or kind.parts is None else kind.block)
    router = f"{block}.{kind.router}"
    biases: tuple[Any, Any, Any] = (None, None, None)
    if kind.clamped:
        weights = [
            arrays.weight(read(f"{block}.experts.{name}", count, *shape)).swapaxes(1, 2)
            for name, shape in (("gate_up_proj", (hidden, 2 * inner)), ("down_proj", (inner, hidden)))
        ]
        biases = (
            arrays.weight(read(f"{router}.bias", count)),
            arrays.weight(read(f"{block}.experts.gate_up_proj_bias", count, 2 * inner)),
            arrays.weight(read(f"{block}.experts.down_proj_bias", count, hidden)),
        )
    elif stacked or kind.parts is None:
        weights = [
            arrays.weight(read(f"{block}.experts.gate_up_proj", count, 2 * inner, hidden)),
            arrays.weight(read(f"{block}.experts.down_proj", count, hidden, inner)),
        ]
    else:
        gate, up, down = kind.parts

        def one(expert: int, *names: str, rows: int, columns: int) -> np.ndarray:
            return np.concatenate([read(f"{block}.experts.{expert}.{name}.weight", rows, columns) for name in names])

        weights = [
            arrays.weight(np.stack([one(i, gate, up, rows=inner, columns=hidden) for i in range(count)])),
            arrays.weight(np.stack([one(i, down, rows=hidden, columns=inner) for i in range(count)])),
        ]
    routing = None if kind.routing is None else kind.routing(arrays, config, router, floats)
    return ExpertBlock(
        arrays,
        arrays.weight(read(f"{router}.weight", count, hidden)) if routing is None else None,
        biases[0],
        weights[0],
        biases[1],
        weights[1],
        biases[2],
        each,
        config.get("norm_topk_prob", False) if kind.normalised is None else kind.normalised,
        kind.softmax_first,
        (config["swiglu_alpha"], config["swiglu_limit"]) if kind.clamped else None,
        routing,
    )
