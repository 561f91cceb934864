"""TextTokenizer beside Transformers' AutoTokenizer by the flags of tokenizer_config.json: the same ids or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from flashkernel.generate import CheckpointError, TextTokenizer, find_model

SPECIAL = ["<unk>", "<s>", "</s>"]
FLAGS: list[dict[str, Any]] = [
    {},
    *({name: value} for name in ("add_bos_token", "add_eos_token", "add_prefix_space") for value in (True, False)),
    {"add_bos_token": True, "add_eos_token": True},
    {"add_bos_token": True, "add_prefix_space": True},
]
CLASSES = ["PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "GPT2TokenizerFast"]
TEXT = "ab c"


def save(folder: Path, kind: str, prefix: bool, template: bool, config: dict[str, Any]) -> None:
    """A tiny tokenizer of bytes or of pieces."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) if kind == "bytes" else ["\u2581", *"abcdef"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        scheme: Any = "first" if prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.add_special_tokens(SPECIAL)
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **config}))
    model = "gpt2" if config["tokenizer_class"].startswith("GPT2") else "llama"
    (folder / "config.json").write_text(json.dumps({"model_type": model}))


# Of pieces, Transformers' GPT-2 class makes a tokenizer of bytes, which no checkpoint has.
KINDS = [(name, kind) for name in CLASSES for kind in ("bytes", "pieces") if kind == "bytes" or "GPT2" not in name]


@pytest.mark.parametrize("name, kind", KINDS)
@pytest.mark.parametrize("prefix", [True, False], ids=["space", "no_space"])
def test_same_ids_or_a_refusal(name: str, kind: str, prefix: bool, tmp_path: Path) -> None:
    served = 0
    for template in (True, False):
        for flags in FLAGS:
            save(tmp_path, kind, prefix, template, {"tokenizer_class": name, **flags})
            expected = transformers.AutoTokenizer.from_pretrained(tmp_path)(TEXT).input_ids
            try:
                assert TextTokenizer(tmp_path).encode(TEXT) == expected, (flags, template)
                served += 1
            except CheckpointError as error:
                assert "add_prefix_space=" in str(error)
                (tmp_path / "tokenizer_config.json").unlink()
                assert TextTokenizer(tmp_path).encode(TEXT) != expected, (flags, template)
    assert served >= 2 * (len(FLAGS) if name == "PreTrainedTokenizerFast" else 1)


def test_the_demo_model() -> None:
    expected = transformers.AutoTokenizer.from_pretrained(find_model("demo"))("import os").input_ids
    assert TextTokenizer(find_model("demo")).encode("import os") == expected
