"""Attention's options have one declaration, and every function that takes them takes all of them with its defaults."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from conftest import HAS_TRITON_WHEELS
from flashkernel.attention_options import AttentionOptions

OPS = ["attention", "attention_varlen", "attention_paged", "attention_backward", "attention_varlen_backward"]
MODULES = ["flashkernel", "flashkernel.torch", "flashkernel.reference", *["flashkernel.triton"] * HAS_TRITON_WHEELS]


def taking_options() -> list[Any]:
    """The ops of each module, less those of the reference that pass `**options` on to another."""
    found = []
    for name in MODULES:
        module = importlib.import_module(name)
        for op in OPS:
            function = getattr(module, op, None)
            kinds = [p.kind for p in inspect.signature(function).parameters.values()] if function else []
            if kinds and inspect.Parameter.VAR_KEYWORD not in kinds:
                found.append(pytest.param(function, id=f"{name}.{op}"))
    assert len(found) >= 10
    return found


@pytest.mark.parametrize("function", taking_options())
def test_signatures_have_every_option_with_its_default(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    blocks = {"block_mask", "block_size"}
    without = {
        "attention_varlen": {"bias", "mask", *blocks},
        "attention_varlen_backward": {"bias", "mask", *blocks},
        "attention_paged": {"bias", *blocks},
    }.get(function.__name__, set())
    for name in AttentionOptions._fields:
        assert (name in parameters) == (name not in without), name
        if name in parameters:
            assert parameters[name].default == AttentionOptions._field_defaults[name], name
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_sides() -> None:
    assert AttentionOptions().sides() == (None, None)
    assert AttentionOptions(causal=True).sides() == (None, 0)
    assert AttentionOptions(causal=True, window=(4, 7)).sides() == (4, 0)
    assert AttentionOptions(window=(-1, 7)).sides() == (None, 7)
    assert AttentionOptions(window=(3, None)).window_sides() == (3, -1)


def test_keywords_leave_out_what_is_not_given() -> None:
    assert AttentionOptions(True, (3, None)).keywords() == {
        "causal": True,
        "window": (3, None),
        "softcap": 0.0,
        "alibi": "distance",
    }


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"softcap": -1.0}, "softcap=-1.0; 0 or a positive number is needed"),
        ({"softcap": float("nan")}, "softcap=nan; 0 or a positive number is needed"),
        ({"scale": float("inf")}, "scale=inf; a finite number is needed"),
        ({"window": 3}, "window=3; a pair (left, right) of token counts, None for unbounded, is needed"),
        ({"window": (1,)}, "window has 1 entries; a pair (left, right) of token counts, None for unbounded, is needed"),
        ({"window": (1, -2)}, "window=(1, -2); a pair (left, right) of token counts, None for unbounded, is needed"),
        ({"window": (3, None), "softcap": 2, "scale": 0.5}, None),
    ],
)
def test_refusals(options: dict[str, Any], sentence: str | None) -> None:
    assert AttentionOptions(**options).refusal() == sentence


def test_torch_schemas_name_every_option_once() -> None:
    from flashkernel.torch import _attention_options as schemas

    names = [argument.split()[-1] for argument in schemas.DENSE.split(", ")]
    assert len(names) == schemas.NUM_DENSE == schemas.NUM_VARLEN + 5
    sides = ("_left", "_right", "_q", "_k")
    plain = {next((name.removesuffix(side) for side in sides if name.endswith(side)), name) for name in names}
    assert plain == set(AttentionOptions._fields)
    options = AttentionOptions(True, (3, -1), 2.0, 0.5, "slopes", "sinks", "bias", "mask", "signed", "blocks", (64, 9))
    assert AttentionOptions(**schemas.from_schema(*schemas.to_dense_schema(options))) == options
    others = options._replace(bias=None, mask=None, block_mask=None, block_size=128)
    assert AttentionOptions(**schemas.from_schema(*schemas.to_schema(others))) == others
