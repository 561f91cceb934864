"""accelerate(model).generate draws with the engine's own options where it covers what was asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import LogitsProcessorList

from flashkernel.integrations.accelerate import generate as module
from flashkernel.integrations.accelerate.penalties import CountPenalties
from flashkernel.integrations.transformers import accelerate
from test_accelerate import IDS, make

STOCK = make("llama")
OURS = accelerate(copy.deepcopy(STOCK), page_size=16)
GREEDY: list[dict[str, Any]] = [
    dict(sequence_bias=[[[5], 3.0], [[9], -2.0]]),
    dict(bad_words_ids=[[3], [77]]),
    dict(sequence_bias=[[[5], 3.0]], bad_words_ids=[[5]], repetition_penalty=1.3),
]


@pytest.fixture
def only_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("step by step")

    monkeypatch.setattr(module, "by_steps", refuse)


@pytest.mark.parametrize("options", GREEDY, ids=str)
def test_greedy_with_biases_is_the_engines_own(options: dict[str, Any], only_the_engine: None) -> None:
    options = dict(max_new_tokens=16, do_sample=False, pad_token_id=0, **options)
    expected = STOCK.generate(IDS, attention_mask=torch.ones_like(IDS), **options)
    assert OURS.generate(IDS, attention_mask=torch.ones_like(IDS), **options).tolist() == expected.tolist()


def test_penalties_of_openai(only_the_engine: None) -> None:
    """Penalties by keyword give the ids of the stock model with the processor, and other ids than without them."""
    options: dict[str, Any] = dict(
        max_new_tokens=24, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(IDS)
    )
    expected = STOCK.generate(IDS, logits_processor=LogitsProcessorList([CountPenalties(2.0, 0.5)]), **options)
    found = OURS.generate(IDS, frequency_penalty=2.0, presence_penalty=0.5, logit_bias=None, **options)
    assert found.tolist() == expected.tolist() != STOCK.generate(IDS, **options).tolist()
    biased = OURS.generate(IDS, logit_bias={5: 1e4}, **options)
    assert bool((biased[:, IDS.shape[1] :] == 5).all())
    with pytest.raises(ValueError, match="logit_bias and sequence_bias"):
        OURS.generate(IDS, logit_bias={5: 1.0}, sequence_bias=[[[5], 3.0]], **options)


def test_sampling_with_everything_is_the_engines_own(only_the_engine: None) -> None:
    options: dict[str, Any] = dict(
        max_new_tokens=24, do_sample=True, temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, typical_p=0.8, seed=3
    )
    options |= dict(frequency_penalty=1.0, logit_bias={5: -4.0}, pad_token_id=0, num_return_sequences=2)
    one, again = (OURS.generate(IDS, attention_mask=torch.ones_like(IDS), **options) for _ in range(2))
    assert one.tolist() == again.tolist() and len(one) == 2 * len(IDS)


def test_penalties_step_by_step() -> None:
    """With a criterion of the caller the same processor runs between steps."""
    options: dict[str, Any] = dict(max_new_tokens=16, do_sample=False, pad_token_id=0)
    options |= dict(attention_mask=torch.ones_like(IDS), output_scores=True, return_dict_in_generate=True)
    expected = STOCK.generate(IDS, logits_processor=LogitsProcessorList([CountPenalties(2.0, 0.5)]), **options)
    found = OURS.generate(IDS, frequency_penalty=2.0, presence_penalty=0.5, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
