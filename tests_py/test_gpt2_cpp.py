"""examples/gpt2_cpp/expected.json and unicode_classes.hpp are what Python gives: the C++ program is compared with them.

Run this file as a program to write expected.json anew.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

from flashkernel.generate import Engine, TextTokenizer, find_model, load_model

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "gpt2_cpp"
if not EXAMPLE.is_dir():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)

NEW_TOKENS = 48
CONTINUED = [
    "def fibonacci(n):\n",
    'class Stack:\n    """A stack."""\n\n    def push(self, item):\n',
    "import os\nimport sys\n\n\ndef main(argv=None):\n",
    '# π ≈ 3.14159 — naïve café ½ ②\nfor i in range(10):\n\tprint("it\'s",  i)  \n\n\n',
]
# Only encoded and decoded: what the cutting pattern treats each in its own way.
ENCODED = [
    "",
    " ",
    "   \n\t x\u00a0y\u2003 z\u3000\r\n",
    "they'll've we're I'd I'm it's don't 'S 'T rock'n'roll ''s",
    "x1y22z333 ٣٤٥ Ⅷ ½ 1,234.5e-6",
    "Straße naïve Ελληνικά русский 日本語のテキスト 한국어 हिन्दी עברית العربية",
    "e\u0301 a\u0308 👩\u200d👩\u200d👧 😀😀 \U0001d54f\U0001f1ea",
    "<|endoftext|>def f():<|endoftext|><|endoftext|> pass<|endoftext",
    "!!! ... --- ___ $%^&*()  {}[]\\|/ ~`\x00\x01\x7f\x85",
    "a" * 70 + " " * 70 + "=" * 70,
]


def cases() -> tuple[list[dict[str, Any]], float]:
    """The cases, and the least distance between the best and the second best logit of any chosen token."""
    model, tokenizer = load_model(find_model("demo"), device="cpu"), TextTokenizer(find_model("demo"))
    forward, margins = model.forward, []

    def spy(*args: Any) -> Any:
        logits = forward(*args)
        best = np.sort(logits[-1])
        margins.append(float(best[-1] - best[-2]))
        return logits

    model.forward = spy  # type: ignore[method-assign]
    found = []
    for prompt in CONTINUED:
        ids = tokenizer.encode(prompt)
        events = Engine(model).generate([ids], max_new_tokens=NEW_TOKENS)
        found.append({"prompt": prompt, "ids": ids, "tokens": [event.token for event in events]})
    found += [{"prompt": prompt, "ids": tokenizer.encode(prompt), "tokens": []} for prompt in ENCODED]
    for case in found:
        case["text"] = tokenizer.decode(case["ids"] + case["tokens"])  # without the special tokens
    return found, min(margins)


def test_expected_tokens_are_those_of_the_python_engine() -> None:
    committed = json.loads((EXAMPLE / "expected.json").read_text(encoding="utf-8"))
    found, margin = cases()
    assert committed["cases"] == found
    assert margin > 1e-2  # far above fp32's rounding: no other machine may choose another token
    assert all(len(case["tokens"]) == NEW_TOKENS for case in found[: len(CONTINUED)])


def test_unicode_classes_are_those_of_python() -> None:
    spec = importlib.util.spec_from_file_location("unicode_classes", EXAMPLE / "unicode_classes.py")
    assert spec and spec.loader
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    committed = (EXAMPLE / "unicode_classes.hpp").read_text(encoding="utf-8")
    if f"Unicode {unicodedata.unidata_version}." not in committed:
        pytest.skip(f"this Python knows Unicode {unicodedata.unidata_version}, the file is of another version")
    assert writer.header() == committed


if __name__ == "__main__":
    text = json.dumps({"cases": cases()[0]}, ensure_ascii=True)
    (EXAMPLE / "expected.json").write_text(text.replace('{"prompt"', '\n{"prompt"') + "\n", encoding="utf-8")
    sys.exit(0)
