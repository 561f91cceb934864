"""The training example, run for a few steps, and the checkpoint that the package ships, which the example made."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
safetensors_torch = pytest.importorskip("safetensors.torch")

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "train_gpt2.py"
CHECKPOINT = ROOT / "python" / "flashkernel" / "models" / "gpt2-python"
if not SCRIPT.is_file() or not CHECKPOINT.is_dir():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)

VOCAB_SIZE = 320
# Not from the standard library, so never seen in training.
UNSEEN = '''\
import json
import os


class Inventory:
    """Counts of the items in stock, by name."""

    def __init__(self, path):
        self.path = path
        self.items = {}

    def add(self, name, count=1):
        """Add items to the stock."""
        if count < 0:
            raise ValueError("count must not be negative")
        self.items[name] = self.items.get(name, 0) + count

    def load(self):
        if not os.path.exists(self.path):
            return False
        with open(self.path, encoding="utf-8") as file:
            self.items = json.load(file)
        return True

    def __len__(self):
        return len(self.items)


def main():
    inventory = Inventory("stock.json")
    for name in sorted(inventory.items):
        print(name, inventory.items[name])


if __name__ == "__main__":
    main()
'''


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small source folder: modules of one shape, a file that does not decode and one in a folder that is skipped."""
    root = tmp_path_factory.mktemp("source")
    for i in range(12):
        functions = [
            f'def get_{name}_{i}(self, key):\n    """Return the {name} of key."""\n    return self.{name}[key + {i}]\n'
            for name in ("count", "index", "value", "parent", "length")
        ]
        (root / f"module_{i}.py").write_text("\n\n".join(functions), encoding="utf-8")
    (root / "broken.py").write_bytes(b"# coding: utf-8\nx = '\xff'\n")
    (root / "site-packages").mkdir()
    (root / "site-packages" / "other.py").write_text("skipped = True\n" * 100, encoding="utf-8")
    return root


def train(source: Path, out: Path, seed: int) -> Path:
    size = ["--vocab-size", str(VOCAB_SIZE), "--context", "64", "--n-embd", "32"]
    steps = ["--steps", "30", "--warmup", "3", "--eval-interval", "10", "--batch-size", "4", "--max-new-tokens", "4"]
    options = ["--quick", "--device=cpu", f"--source={source}", f"--out={out}", f"--seed={seed}", "--dropout=0.1"]
    # One thread: on a busy machine the threads of a model this small mostly wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, SCRIPT, *options, *size, *steps], check=True, env=environment)
    return out


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(source, tmp_path_factory.mktemp("trained"), seed=1)


def test_training_lowers_the_loss(trained: Path) -> None:
    record = json.loads((trained / "training.json").read_text(encoding="utf-8"))
    history = record["history"]
    assert [entry["step"] for entry in history] == [10, 20, 30]
    assert record["train"]["files"] + record["val"]["files"] == 12  # neither the broken file nor the skipped folder
    for key in "train_loss", "val_loss":
        losses = [entry[key] for entry in history]
        assert losses == sorted(losses, reverse=True)
    # Uniform guessing costs log(VOCAB_SIZE); the text is so regular that 30 steps save far more than a tenth of it.
    assert history[-1]["val_loss"] < 0.9 * math.log(VOCAB_SIZE)


def test_trained_folder_loads_in_transformers(trained: Path) -> None:
    model = transformers.GPT2LMHeadModel.from_pretrained(trained, dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained)
    assert model.dtype == torch.float16
    assert model.config.vocab_size == len(tokenizer) == VOCAB_SIZE
    assert model.config.n_positions == tokenizer.model_max_length == 64
    text = 'def f(x):\n    """\u00e9\t"""\n\n\n        return x\n'
    ids = tokenizer(text)["input_ids"]
    assert ids == tokenizers.Tokenizer.from_file(str(trained / "tokenizer.json")).encode(text).ids
    assert ids[0] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_no_token_reaches_across_a_newline(trained: Path) -> None:
    vocab = tokenizers.Tokenizer.from_file(str(trained / "tokenizer.json")).get_vocab()
    assert [token for token in vocab if "\u010a" in token] == ["\u010a"]  # byte-level BPE's letter for a newline


def test_seed_decides_the_weights(trained: Path, source: Path, tmp_path: Path) -> None:
    again = train(source, tmp_path / "again", seed=1)
    other = train(source, tmp_path / "other", seed=2)
    for name in "model.safetensors", "tokenizer.json", "config.json":
        assert (again / name).read_bytes() == (trained / name).read_bytes()
    assert (other / "model.safetensors").read_bytes() != (trained / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def shipped() -> Iterator[tuple[transformers.GPT2LMHeadModel, tokenizers.Tokenizer]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as above
    model = transformers.GPT2LMHeadModel.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    yield model, tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    torch.set_num_threads(threads)


def test_shipped_folder() -> None:
    files = {path.name: path.stat().st_size for path in CHECKPOINT.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "LICENSE", "README.md"} <= files.keys()
    assert sum(files.values()) <= 8_000_000
    weights = safetensors_torch.load_file(CHECKPOINT / "model.safetensors")
    assert all(weight.dtype == torch.float16 and weight.isfinite().all() for weight in weights.values())
    assert "lm_head.weight" not in weights  # tied to the embedding
    config = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["activation_function"] == "gelu_new"
    assert weights["transformer.wte.weight"].shape == (config["vocab_size"], config["n_embd"])


def test_shipped_model_predicts_unseen_python(shipped) -> None:
    model, tokenizer = shipped
    ids = torch.tensor([tokenizer.encode(UNSEEN).ids])
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=ids).loss.item()
    bits_per_byte = loss * (ids.shape[1] - 1) / len(UNSEEN.encode()) / math.log(2)
    assert bits_per_byte < 0.75  # 0.693 measured; the same model trained without the test suites had 0.81


@pytest.mark.parametrize("prompt", ["def fibonacci(n):\n", "import os\n\ndef ", "class Stack:\n"])
def test_shipped_model_writes_python(shipped, prompt: str) -> None:
    model, tokenizer = shipped
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=100, pad_token_id=0
    )
    lines = tokenizer.decode(output[0].tolist()).split("\n")
    parsing = next(n for n in range(len(lines), -1, -1) if parses("\n".join(lines[:n])))
    assert parsing >= 4 and parsing >= len(lines) // 2, "\n".join(lines)


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
