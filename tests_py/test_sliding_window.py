"""Pages wholly behind a sliding window go back to the pool while their sequences run, and nothing else changes.

The oracle is the same model in an engine that keeps every page.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flashkernel.generate import Engine, SamplingOptions
from flashkernel.generate.arrays import CudaArrays, HostArrays, TorchArrays
from flashkernel.generate.devices import available_devices
from flashkernel.generate.model import Model
from test_scheduler import PROMPTS, SAMPLED, SETUPS, llama

WINDOW, PAGE = 24, 16
ARRAYS = {"numpy": HostArrays, "torch": TorchArrays, **({"cuda": CudaArrays} if "cuda" in available_devices() else {})}
NONE: frozenset[int] = frozenset()


def mistral(kind: str, keep_pages: bool = False, **changes: Any) -> Model:
    config = dict(model_type="mistral", sliding_window=WINDOW, max_position_embeddings=1000)
    model = llama(ARRAYS[kind](), **{**config, **changes})
    if keep_pages:
        model.window = None  # what the scheduler goes by; layers have their own
    return model


def run(engine: Engine, prompts: list[list[int]], count: int, sampling: SamplingOptions) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in prompts]
    for event in engine.generate(prompts, max_new_tokens=count, stop_tokens=NONE, sampling=sampling):
        tokens[event.sequence].append(event.token)
    assert engine.pages_in_use == 0
    return tokens


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_long_text_holds_as_many_pages_as_its_window(kind: str, setup: dict[str, Any]) -> None:
    engine = Engine(mistral(kind), page_size=PAGE, **setup)
    whole = Engine(mistral(kind, keep_pages=True), page_size=PAGE)
    assert run(engine, [[1, 2, 3]], 400, SAMPLED) == run(whole, [[1, 2, 3]], 400, SAMPLED)
    # The window before the first of the steps to come, those steps, and a part of a page at either end.
    assert engine.stats.peak_pages <= (WINDOW + setup["steps"]) // PAGE + 2
    assert whole.stats.peak_pages == -(-402 // PAGE)


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_batches_of_long_and_short_prompts(kind: str, setup: dict[str, Any]) -> None:
    """Twice: the second time the prefix index has pages that their sequences had given back."""
    prompts = [*PROMPTS, [7, 9] * 40]
    engine = Engine(mistral(kind), page_size=PAGE, **setup)
    expected = run(Engine(mistral(kind, keep_pages=True), page_size=PAGE), prompts, 70, SAMPLED)
    for _ in range(2):
        assert run(engine, prompts, 70, SAMPLED) == expected
    assert (engine.stats.prefix_tokens >= 64) == setup.get("prefix_sharing", True)


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_more_sequences_fit_the_same_pages(kind: str, setup: dict[str, Any]) -> None:
    """Twelve pages, of which one sequence would fill eleven: pages go from sequence to sequence, contents and all."""
    prompts = [[i + 1, 2 * i + 1, 3] for i in range(4)]
    plain = Engine(mistral(kind, keep_pages=True), page_size=PAGE)
    expected = run(plain, prompts, 170, SAMPLED)
    engine = Engine(mistral(kind), page_size=PAGE, num_pages=12, **setup)
    assert run(engine, prompts, 170, SAMPLED) == expected
    keeping = Engine(mistral(kind, keep_pages=True), page_size=PAGE, num_pages=12, **setup)
    assert run(keeping, prompts, 170, SAMPLED) == expected
    if engine.max_batch >= 4:
        assert engine.stats.preemptions == 0 < keeping.stats.preemptions


def test_a_prompt_gives_pages_back_between_its_chunks() -> None:
    engine = Engine(mistral("numpy"), page_size=PAGE, prefill_chunk=20)
    prompt = [i % 50 for i in range(300)]
    request = engine.submit(prompt, max_new_tokens=40, stop_tokens=NONE)
    held = []
    while not request.finish:
        engine.step()
        held.append(engine.pages_in_use)
    assert held[0] == 19 and held[14] <= 3  # 300 tokens; their last chunk is the fifteenth
    turn = engine.submit([*prompt, *request.generated, 9], max_new_tokens=2, stop_tokens=NONE)
    while not turn.finish:
        engine.step()
    assert engine.stats.prefix_tokens == 336  # all full pages of the text, though most of them had been given back
    expected = run(Engine(mistral("numpy", keep_pages=True), page_size=PAGE), [prompt], 40, SamplingOptions())
    assert [request.generated] == expected


def test_layers_that_see_everything_keep_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert llama(HostArrays()).window is None and mistral("numpy", sliding_window=None).window is None
    assert mistral("numpy").window == WINDOW
    monkeypatch.setattr("flashkernel.generate.decoder_model.layer_windows", lambda *_: [9, WINDOW])
    assert mistral("numpy").window == WINDOW
    monkeypatch.setattr("flashkernel.generate.decoder_model.layer_windows", lambda *_: [None, WINDOW])
    mixed = mistral("numpy")
    assert mixed.window is None
    engine = Engine(mixed, page_size=PAGE)
    run(engine, [[1, 2, 3]], 60, SAMPLED)
    assert engine.stats.peak_pages == 4
