"""Short prompts as steps of a fixed shape: the same tokens as side by side, from a shape's second time on."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from flashkernel.generate import DraftModel, Engine, find_model, load_model, prompt_graphs
from flashkernel.generate.arrays import TorchArrays
from flashkernel.generate.checkpoint import MemoryCheckpoint
from flashkernel.generate.drafts import ModelDrafter
from flashkernel.generate.fixed_step import FixedStep
from flashkernel.generate.model import build_model
from model_families import family_model

PROMPTS = [[5, 3, 90], [*range(1, 41)], [7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]]


def made(name: str) -> Any:
    if name == "demo":
        return load_model(find_model("demo"), device="cpu")
    stock = family_model(name)
    return build_model(MemoryCheckpoint(stock.config.to_dict(), stock.state_dict()), TorchArrays("float32", "cpu"))


def tokens(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    for event in engine.generate(prompts, max_new_tokens=5, stop_tokens=frozenset()):
        found[event.sequence].append(event.token)
    return found


@pytest.mark.parametrize("name", ["demo", "gemma3-scaled", "qwen3-yarn", "deepseek-v2-lite"])
def test_tokens_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    shapes: list[tuple[int, int]] = []
    run = FixedStep.run

    def counted(self: FixedStep, rows: Any) -> Any:
        shapes.append((self.rows, self.each))
        return run(self, rows)

    monkeypatch.setattr(FixedStep, "run", counted)
    wanted = tokens(Engine(model, page_size=16, prefix_sharing=False), PROMPTS)
    engine = Engine(model, page_size=16, num_pages=64)
    engine.reserve(64)
    assert engine._scheduler is not None and not shapes
    engine._scheduler.by_graph = True  # without graphs of decode steps, for which this machine has no GPU
    for time in range(3):
        for prompt, expected in zip(PROMPTS, wanted, strict=True):
            assert tokens(engine, [prompt]) == [expected]
        assert len(shapes) == [2, 5, 9][time]  # three prompts have one shape; of the long one a prefix is found
    assert tokens(engine, PROMPTS[::2]) == wanted[::2] and tokens(engine, PROMPTS[::2]) == wanted[::2]
    assert shapes[-1] == (2, 16) and engine.pages_in_use == 0


def test_a_draft_model_reads_all_but_the_last_token() -> None:
    model = made("demo")
    wanted = tokens(Engine(model, page_size=16, prefix_sharing=False), PROMPTS)
    draft = DraftModel(model, tokens=3, adaptive=False)
    engine = Engine(model, page_size=16, num_pages=64, speculation=draft, prefix_sharing=False)
    engine.reserve(64)
    assert engine._scheduler is not None and engine._scheduler.speculator is not None
    drafter = engine._scheduler.speculator.drafter
    assert isinstance(drafter, ModelDrafter)
    sequences = drafter._sequences
    sequences.by_graph = True
    for _ in range(3):
        for prompt, expected in zip(PROMPTS, wanted, strict=True):
            assert tokens(engine, [prompt]) == [expected]
    assert sequences.prompt_graphs._steps


def test_what_is_worth_a_graph() -> None:
    model = made("demo")
    engine = Engine(model, page_size=16, num_pages=64)
    engine.reserve(64)
    assert engine._scheduler is not None
    graphs = engine._scheduler.prompt_graphs
    row = lambda n: prompt_graphs.TokenRow([1] * n, 0, np.arange(n), np.arange(-(-n // 16), dtype=np.int32))
    assert graphs._shape([row(100)]) == (1, 112, 8)
    assert graphs._shape([row(100)] * 3) == (4, 112, 8)
    assert graphs._shape([row(600)]) is None  # the device is busy for long enough
    assert graphs._shape([row(200), row(1), row(1)]) is None  # most of the places would be empty
    for places in range(1, 2000):
        assert places <= prompt_graphs.prompt_places(places) <= places * 1.25 + 16


def test_examples() -> None:
    assert not doctest.testmod(prompt_graphs).failed
