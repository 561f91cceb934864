"""Which experts DeepSeek-V2 and V3 send a token to (DeepSeek-AI, 2024): a few of a few groups of experts.

Called by experts.py. Logits and what follows are float32 whatever the model's dtype. Nothing here waits for the device,
so that a CUDA graph holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashkernel as fk

from .arrays import HostArrays
from .errors import CheckpointError, UnsupportedModelError
from .files import describe

__all__ = ["Routing", "read_v2", "read_v3"]


@dataclass
class Routing:
    """A router. A group counts by its best expert, or with a correction by its best two; only the experts of the best
    groups can be chosen."""

    arrays: HostArrays
    weight: Any  # float32 [experts, hidden]
    correction: Any  # float32 [experts], added to scores when experts are chosen and not when they are weighed; or None
    each: int  # how many experts a token is sent to
    groups: int
    kept: int  # how many groups
    sigmoid: bool  # scores are sigmoids of the logits; else their softmax
    normalised: bool  # whether the weights of a token add up to `factor`
    factor: float

    def __post_init__(self) -> None:
        self.ids = self.arrays.index(np.arange(self.groups), "int64")

    def __call__(self, x: Any) -> tuple[Any, Any]:
        """Weights, float32 [tokens, each], and experts, int64 [tokens, each], of x [tokens, hidden]."""
        arrays = self.arrays
        scores = self._scores(fk.linear(arrays.floats(x), self.weight))
        choice = scores if self.correction is None else scores + self.correction
        if self.kept < self.groups:
            rows, experts = choice.shape
            grouped = choice.reshape(rows * self.groups, experts // self.groups)
            best = arrays.best(grouped, _counting(self.correction is not None))[1].sum(-1)
            kept = arrays.best(best.reshape(rows, self.groups), self.kept)[0]
            mask = (kept[:, :, None] == self.ids).any(1)  # [rows, groups]
            choice = arrays.masked(choice.reshape(rows, self.groups, -1), mask[:, :, None]).reshape(rows, experts)
        chosen, _ = arrays.best(choice, self.each)
        weights = arrays.columns(scores, chosen)
        if self.normalised:
            weights = weights / (weights.sum(-1)[:, None] + 1e-20)
        return weights * self.factor, chosen

    def _scores(self, logits: Any) -> Any:
        if not fk.is_invariant():
            return self.arrays.probabilities(logits, self.sigmoid)
        if not self.sigmoid:
            return fk.softmax(logits)
        # exp of an array library may depend on where a number stands.
        pairs = self.arrays.zeros((*logits.shape, 2), "float32")
        pairs[..., 0] = logits
        return fk.softmax(pairs)[..., 0]


def _counting(corrected: bool) -> int:
    """By how many of its experts a group counts."""
    return 2 if corrected else 1


def _refuse(config: Mapping[str, Any], name: str, needed: Any) -> None:
    if config[name] != needed:
        raise UnsupportedModelError(
            f"load_model: config.json has {name}={describe(config[name])}, which Transformers does not compute with; "
            f"{describe(needed)} is needed"
        )


def _read(
    arrays: HostArrays,
    config: Mapping[str, Any],
    router: str,
    floats: Callable[..., Any],
    *,
    grouped: bool,
    corrected: bool,
    sigmoid: bool,
    normalised: bool,
) -> Routing:
    _refuse(config, "moe_layer_freq", 1)
    count, each = config["n_routed_experts"], config["num_experts_per_tok"]
    groups, kept = (config["n_group"] or 1, config["topk_group"] or 1) if grouped else (1, 1)
    size, least = count // groups, _counting(corrected)
    if count % groups or kept > groups or each > kept * size or (kept < groups and size < least):
        raise CheckpointError(
            f"load_model: config.json has n_routed_experts={count}, n_group={groups}, topk_group={kept} and "
            f"num_experts_per_tok={each}; groups of one size, of {least} or more, and topk_group of them with as many "
            "experts as a token needs, are needed"
        )
    return Routing(
        arrays,
        floats(f"{router}.weight", 0.0, count, config["hidden_size"]),
        floats(f"{router}.e_score_correction_bias", 0.0, count) if corrected else None,
        each,
        groups,
        kept,
        sigmoid,
        normalised,
        config["routed_scaling_factor"],
    )


def read_v2(arrays: HostArrays, config: Mapping[str, Any], router: str, floats: Callable[..., Any]) -> Routing:
    """The router of a layer of DeepSeek-V2. router: what the names of its tensors begin with; floats: a tensor in
    float32 by its name, an offset, and its shape."""
    _refuse(config, "scoring_func", "softmax")
    _refuse(config, "norm_topk_prob", False)
    method = config["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(
            f"load_model: config.json has topk_method={describe(method)}; greedy or group_limited_greedy is needed"
        )
    grouped = method == "group_limited_greedy"
    return _read(arrays, config, router, floats, grouped=grouped, corrected=False, sigmoid=False, normalised=False)


def read_v3(arrays: HostArrays, config: Mapping[str, Any], router: str, floats: Callable[..., Any]) -> Routing:
    """The router of a layer of DeepSeek-V3; see `read_v2`."""
    _refuse(config, "scoring_func", "sigmoid")
    _refuse(config, "topk_method", "noaux_tc")
    normalised = config["norm_topk_prob"]
    return _read(arrays, config, router, floats, grouped=True, corrected=True, sigmoid=True, normalised=normalised)
