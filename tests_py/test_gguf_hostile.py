"""GGUF files made to break the reader: typed errors of one line, and no memory for what a count merely promises.
checkpoint_fuzz.py has the seeded mutations.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

import gguf_files
from flashkernel.generate import CheckpointError, GenerationError, TextTokenizer, UnsupportedModelError, load_model
from flashkernel.generate.gguf_file import GgufFile, is_gguf
from flashkernel.terminal import visible

File = gguf_files.File
HUGE = [2**24, 2**31, 2**40, 2**61, 2**63, 2**64 - 1]


def small() -> File:
    return gguf_files.decoder(hidden=32, heads=2, heads_kv=1, inner=32, context=64)


def refused(path: Path, text: str, kind: type[Exception] = CheckpointError) -> None:
    """Loading fails with one short line that holds `text`, and takes no more memory than the file has bytes or so."""
    tracemalloc.start()
    try:
        with pytest.raises(kind, match=text) as caught:
            load_model(path, device="cpu")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert visible(str(caught.value)) == str(caught.value) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("what", ["tensors", "pairs"])
def test_counts_of_the_header(what: str, count: int, tmp_path: Path) -> None:
    file = small()
    file.counts[what] = count
    refused(file.write(tmp_path / "m.gguf"), f"counts {count} {'tensors' if what == 'tensors' else 'key-value pairs'}")


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("kind", [0, 5, gguf_files.BOOL, gguf_files.STRING, 12])
def test_counts_of_arrays(kind: int, count: int, tmp_path: Path) -> None:
    file = small()
    file.metadata["tokenizer.ggml.tokens"] = (gguf_files.ARRAY, struct.pack("<IQ", kind, count) + bytes(1000))
    refused(file.write(tmp_path / "m.gguf"), f"counts {count} elements of the value of 'tokenizer.ggml.tokens'")


@pytest.mark.parametrize("length", HUGE)
def test_lengths_of_strings(length: int, tmp_path: Path) -> None:
    file = small()
    file.metadata["general.name"] = (gguf_files.STRING, struct.pack("<Q", length))
    refused(file.write(tmp_path / "m.gguf"), f"counts {length} bytes of the value of 'general.name'")
    file = small()
    value = struct.pack("<IQQ", gguf_files.STRING, 2, length)
    file.metadata["tokenizer.ggml.tokens"] = (gguf_files.ARRAY, value)
    refused(file.write(tmp_path / "m.gguf"), "ends within the value of 'tokenizer.ggml.tokens'")


def test_a_hole_of_a_terabyte_makes_no_vocabulary(tmp_path: Path) -> None:
    """A file that is long enough for its counts: they are held against bounds of their own."""
    data = small().build()
    path = tmp_path / "m.gguf"
    head = data[:24] + gguf_files.string("a") + struct.pack("<IIQ", gguf_files.ARRAY, gguf_files.STRING, 2**30)
    path.write_bytes(head)
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # no disk is used
    refused(path, "counts 1073741824 elements")


@pytest.mark.parametrize("dims", [(2**63, 2), (2**32, 2**32), (32, 2**40), (0, 32), (31, 32)], ids=str)
def test_shapes(dims: tuple[int, ...], tmp_path: Path) -> None:
    file = small()
    file.tensors[0].dims = dims
    file.tensors[0].kind = 8
    refused(file.write(tmp_path / "m.gguf"), "which Q8_0 does not hold|begins at byte")


def change(**fields: Any) -> Callable[[File], None]:
    return lambda file: file.metadata.update({name.replace("__", "."): value for name, value in fields.items()})


def tensor(**fields: Any) -> Callable[[File], None]:
    return lambda file: [setattr(file.tensors[3], name, value) for name, value in fields.items()] and None


CASES: dict[str, tuple[Callable[[File], None], str]] = {
    "many dims": (tensor(dims=(1,) * 90), "has 90 dimensions"),
    "overlap": (tensor(offset=0), "begins at byte 0 of the data"),
    "hole": (tensor(offset=1 << 30), "begins at byte 1073741824"),
    "misplaced": (tensor(offset=7), "begins at byte 7"),
    "cut data": (lambda file: file.tensors.__setitem__(-1, cut(file.tensors[-1])), "ends within the data"),
    "a name twice": (lambda file: file.tensors.append(file.tensors[0]), "occurs twice"),
    "a long name": (tensor(name="a" * 300), "counts 300 bytes of a tensor's name"),
    "a name that is not text": (tensor(name=b"\xff"), "is not UTF-8"),
    "alignment 0": (change(general__alignment=0), "alignment is not"),
    "alignment 2**31": (change(general__alignment=2**31), "alignment is not"),
    "alignment of text": (change(general__alignment="32"), "alignment is not"),
    "a bool of 2": (change(a=(gguf_files.BOOL, b"\2")), "bool of value 2"),
    "arrays of arrays": (change(a=(gguf_files.ARRAY, struct.pack("<IQ", 9, 1) + bytes(12))), "array of arrays"),
    "an unknown type": (change(a=(99, bytes(8))), "has the type 99"),
    "a key that is not text": (lambda file: file.metadata.update({b"\xff": 1}), "a key is not UTF-8"),
    "no architecture": (lambda file: file.metadata.pop("general.architecture"), "has no general.architecture"),
    "a value that is not text": (change(general__name=b"\xff\xfe"), "is not UTF-8"),
    "no layers": (change(llama__block_count=0), "llama.block_count=0"),
    "many layers": (change(llama__block_count=2**31 - 1), "no tensor 'blk.2147483646.attn_norm.weight'"),
    "text as heads": (change(llama__attention__head_count="2"), "head_count='2'"),
    "many heads": (change(llama__attention__head_count=2**31 - 1), "has 2147483647 heads|has shape"),
    "no context": (change(llama__context_length=0), "context_length=0"),
    "eps of nan": (change(llama__attention__layer_norm_rms_epsilon=float("nan")), "epsilon=nan"),
    "odd heads": (change(llama__rope__dimension_count=17), "even elements"),
    "a bad end": (change(tokenizer__ggml__eos_token_id=10**6), "eos_token_id=1000000"),
    "no embedding": (lambda file: file.tensors.pop(0) and None, "has no matrix 'token_embd.weight'|begins at"),
    "an escape": (lambda file: file.metadata.update({"\x1b]0;x\x07": (99, b"")}), r"\\x1b"),
}


def cut(tensor: gguf_files.Tensor) -> gguf_files.Tensor:
    return gguf_files.Tensor(tensor.name, tensor.kind, tensor.dims, b"")


@pytest.mark.parametrize("case", CASES)
def test_what_a_file_may_not_say(case: str, tmp_path: Path) -> None:
    apply, text = CASES[case]
    file = small()
    apply(file)
    refused(file.write(tmp_path / "m.gguf"), text)


@pytest.mark.parametrize(
    ("change", "text"),
    [({"version": 1}, "GGUF 1; GGUF 2 or 3"), ({"version": 3 << 24}, "is big-endian"), ({"version": 9}, "GGUF 9")],
    ids=str,
)
def test_versions(change: dict[str, int], text: str, tmp_path: Path) -> None:
    file = small()
    file.version = change["version"]
    refused(file.write(tmp_path / "m.gguf"), text, UnsupportedModelError)
    file.version = 2
    load_model(file.write(tmp_path / "m.gguf"), device="cpu")


def test_every_cut_of_the_header_is_found(tmp_path: Path) -> None:
    data = small().build()
    path = tmp_path / "m.gguf"
    for length in [0, 3, 4, 7, 8, 15, 23, *range(24, 400, 7), len(data) // 2, len(data) - 33]:
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            GgufFile(path)


def test_two_keys_of_one_name(tmp_path: Path) -> None:
    data = small().build()
    pair = gguf_files.string("general.name") + struct.pack("<I", 4) + bytes(4)
    count = struct.unpack("<Q", data[16:24])[0]
    path = tmp_path / "m.gguf"
    path.write_bytes(data[:16] + struct.pack("<Q", count + 1) + pair + data[24:])
    refused(path, "'general.name' occurs twice")


def test_names_that_end_in_gguf(tmp_path: Path) -> None:
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    assert not is_gguf(folder) and not is_gguf(tmp_path / "nothing.gguf")
    for path in (folder, tmp_path / "nothing.gguf"):
        for call in (TextTokenizer, lambda p: load_model(p, device="cpu")):
            with pytest.raises(GenerationError):
                call(path)
    small().write(tmp_path / "UPPER.GGUF")
    load_model(tmp_path / "UPPER.GGUF", device="cpu")
