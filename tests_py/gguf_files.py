"""GGUF files for tests, written field by field so that any of them can be wrong."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
_FORMATS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    U32: "<I",
    5: "<i",
    F32: "<f",
    BOOL: "<?",
    U64: "<Q",
    11: "<q",
    12: "<d",
}

# ggml's tensor types: elements and bytes of a block.
SIZES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
}  # fmt: skip


def string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def typed(value: Any) -> tuple[int, bytes]:
    """A value as GGUF's type of it and its bytes; integers are u32, lists are arrays of their first element's type."""
    if isinstance(value, bool):
        return BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return U32, struct.pack("<I", value)
    if isinstance(value, float):
        return F32, struct.pack("<f", value)
    if isinstance(value, (str, bytes)):
        return STRING, string(value)
    kinds = [typed(one) for one in value]
    # Types of token_type in real files are i32.
    kind = kinds[0][0] if kinds else U32
    return ARRAY, struct.pack("<IQ", kind, len(kinds)) + b"".join(data for _, data in kinds)


@dataclass
class Tensor:
    name: str
    kind: int
    dims: tuple[int, ...]  # fastest first, as the file has them
    data: bytes
    offset: int | None = None  # None: behind the one before


@dataclass
class File:
    """What a file is made of; `build` gives its bytes."""

    metadata: dict[str, Any]
    tensors: list[Tensor]
    version: int = 3
    magic: bytes = b"GGUF"
    alignment: int = 32
    counts: dict[str, int] = field(default_factory=dict)  # "tensors", "pairs": other numbers than there are

    def build(self) -> bytes:
        counts = (self.counts.get("tensors", len(self.tensors)), self.counts.get("pairs", len(self.metadata)))
        out = self.magic + struct.pack("<IQQ", self.version, *counts)
        for key, value in self.metadata.items():
            kind, data = value if isinstance(value, tuple) else typed(value)
            out += string(key) + struct.pack("<I", kind) + data
        at, data = 0, b""
        for tensor in self.tensors:
            offset = at if tensor.offset is None else tensor.offset
            dims = struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
            out += string(tensor.name) + dims + struct.pack("<IQ", tensor.kind, offset)
            data += tensor.data + bytes(-len(tensor.data) % self.alignment)
            at = len(data)
        return out + bytes(-len(out) % self.alignment) + data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path


def blocks(rng: np.random.Generator, kind: str, count: int) -> bytes:
    """Blocks of a K type with random quants, and scales that give weights around 0."""
    size = SIZES[kind][2]
    raw = rng.integers(0, 256, (count, size), dtype=np.uint8)
    if kind == "Q6_K":
        raw[:, -2:] = np.full(count, 5e-5, np.float16).view(np.uint8).reshape(count, 2)
    else:
        scale = 4e-4 if kind == "Q4_K" else 2e-4
        middle = 7.5 if kind == "Q4_K" else 15.5
        raw[:, :2] = np.full(count, scale, np.float16).view(np.uint8).reshape(count, 2)
        raw[:, 2:4] = np.full(count, scale * middle, np.float16).view(np.uint8).reshape(count, 2)
    return raw.tobytes()


def encoded(rng: np.random.Generator, values: np.ndarray, kind: str) -> bytes:
    """Values in a tensor type; for the K types, which no package writes, random ones of that size instead."""
    if kind.endswith("_K"):
        return blocks(rng, kind, values.size // 256)
    if kind == "F32":
        return values.astype("<f4").tobytes()
    import gguf

    return np.ascontiguousarray(gguf.quantize(values, gguf.GGMLQuantizationType(SIZES[kind][0]))).tobytes()


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """The rows of Q or K as llama.cpp's converter lays them for its architecture "llama"."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def byte_tokens(extra: list[str]) -> tuple[list[str], list[int], list[str]]:
    """A byte-level vocabulary: special tokens, all bytes, a few merges. Tokens, token types, merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in printable)}
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2"]
    tokens = extra + [alphabet[byte] for byte in range(256)] + [merge.replace(" ", "") for merge in merges]
    return tokens, [3] * len(extra) + [1] * (len(tokens) - len(extra)), merges


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def decoder(
    kind: str = "F32",
    architecture: str = "llama",
    *,
    hidden: int = 64,
    heads: int = 4,
    heads_kv: int = 2,
    inner: int = 96,
    layers: int = 2,
    context: int = 256,
    tied: bool = False,
    biases: bool = False,
    seed: int = 0,
    **metadata: Any,
) -> File:
    """A small decoder with a byte-level tokenizer and a chat template; matrices in the tensor type `kind`."""
    rng = np.random.default_rng(seed)
    tokens, types, merges = byte_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    head_dim = hidden // heads
    tensors: list[Tensor] = []

    def add(name: str, *shape: int, heads: int = 0) -> None:
        values = rng.normal(size=shape, scale=0.3).astype(np.float32)
        if len(shape) == 1:
            values = values * 0.2 + (0 if name.endswith("bias") else 1)
        values = permuted(values, heads) if heads and architecture == "llama" else values
        own = kind if len(shape) == 2 else "F32"
        tensors.append(Tensor(name, SIZES[own][0], shape[::-1], encoded(rng, values.astype(np.float32), own)))

    add("token_embd.weight", len(tokens), hidden)
    for i in range(layers):
        at = f"blk.{i}."
        for name, rows, count in (("q", hidden, heads), ("k", heads_kv * head_dim, heads_kv)):
            add(f"{at}attn_{name}.weight", rows, hidden, heads=count)
            if biases:
                add(f"{at}attn_{name}.bias", rows, heads=count)
            if architecture == "qwen3":
                add(f"{at}attn_{name}_norm.weight", head_dim)
        add(at + "attn_v.weight", heads_kv * head_dim, hidden)
        add(at + "attn_output.weight", hidden, hidden)
        if biases:
            add(at + "attn_v.bias", heads_kv * head_dim)
            if architecture == "llama":
                add(at + "attn_output.bias", hidden)
        for name in ("attn_norm", "ffn_norm"):
            add(f"{at}{name}.weight", hidden)
        for name in ("ffn_gate", "ffn_up"):
            add(f"{at}{name}.weight", inner, hidden)
        add(at + "ffn_down.weight", hidden, inner)
    add("output_norm.weight", hidden)
    if not tied:
        add("output.weight", len(tokens), hidden)
    fields = {
        "general.architecture": architecture,
        "general.name": "tiny",
        f"{architecture}.block_count": layers,
        f"{architecture}.context_length": context,
        f"{architecture}.embedding_length": hidden,
        f"{architecture}.feed_forward_length": inner,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": heads_kv,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        f"{architecture}.rope.dimension_count": head_dim,
        **({"qwen3.attention.key_length": head_dim} if architecture == "qwen3" else {}),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }
    return File({**fields, **metadata}, tensors)
