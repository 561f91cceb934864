"""Seeded mutations of small checkpoint folders: what test_checkpoint_hostile.py runs in a process of its own.

    python checkpoint_fuzz.py SEED COUNT

Each case changes one file of a sound folder (config.json, generation_config.json, the index, the header of a
safetensors file, tokenizer.json, a GGUF file), then loads it and, if it loads, generates two tokens. Only the
package's own errors may come out, within a bound of time and memory. Prints a JSON object: cases, how many loaded,
and the failures.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gguf_files

SECONDS = 10.0  # of a case; one takes milliseconds
BYTES = 1 << 29  # of address space beyond what the process has at the start

HUGE = "<5000 digits>"  # stands in a JSON tree for what json.dumps would not write
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 16, 10**6, 2**31 - 1, 2**31, 2**63, 10**12, 10**300, HUGE,
    2.0, 2.5, -0.5, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"),
    "", "2", "silu", "llama", "gelu_new", "\x1b]0;title\x07", "\ud800", "a" * 5000, "../x", "/dev/zero", "a\0b",
    [], [1], [[]], ["a"], [None], [2.5], [10**30], {}, {"a": 1}, {"rope_type": "linear"}, {"rope_type": ["x"]},
    {"quant_method": "gptq"}, list(range(300)), {"rope_type": "yarn", "factor": 1e-300}, "yarn", "longrope", "dynamic",
]  # fmt: skip
NAMES = [
    "model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "eos_token_id",
    "original_max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions", "n_inner", "activation_function",
    "layer_norm_epsilon", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention",
    "quantization_config", "transformers_weights", "per_layer_config", "attention_chunk_size", "dtype", "torch_dtype",
    "pad_token_id", "final_logit_softcapping", "num_experts", "residual_multiplier", "use_bidirectional_attention",
]  # fmt: skip
ROPE = ["rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"]
ROPE += ["original_max_position_embeddings", "full_attention", "beta_fast", "beta_slow", "attention_factor", "mscale"]
ROPE += ["mscale_all_dim", "truncate", "short_factor"]


def llama_config(kind: str) -> dict[str, Any]:
    return {
        "model_type": kind,
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 100.0, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        **({} if kind == "llama" else {"sliding_window": 4}),
        "eos_token_id": [3, 4],
    }  # fmt: skip


def llama_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (24, 16), "model.norm.weight": (16,), "lm_head.weight": (24, 16)
    }  # fmt: skip
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= {at + "input_layernorm.weight": (16,), at + "post_attention_layernorm.weight": (16,)}
        shapes |= {at + f"self_attn.{n}_proj.weight": (s, 16) for n, s in (("q", 16), ("k", 8), ("v", 8), ("o", 16))}
        shapes |= {at + "mlp.gate_proj.weight": (24, 16), at + "mlp.up_proj.weight": (24, 16)}
        shapes |= {at + "mlp.down_proj.weight": (16, 24)}
        if kind == "qwen2":
            shapes |= {at + f"self_attn.{n}_proj.bias": (s,) for n, s in (("q", 16), ("k", 8), ("v", 8))}
        if kind == "qwen3":
            shapes |= {at + f"self_attn.{n}_norm.weight": (8,) for n in "qk"}
    return shapes


def gpt2_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (24, 16), "wpe.weight": (64, 16)}
    shapes |= {"ln_f.weight": (16,), "ln_f.bias": (16,)}
    for i in range(2):
        at = f"h.{i}."
        for name, shape in (
            ("ln_1", (16,)), ("ln_2", (16,)), ("attn.c_attn", (16, 48)), ("attn.c_proj", (16, 16)),
            ("mlp.c_fc", (16, 64)), ("mlp.c_proj", (64, 16)),
        ):  # fmt: skip
            shapes |= {at + name + ".weight": shape, at + name + ".bias": shape[-1:]}
    return {"transformer." + name: shape for name, shape in shapes.items()}


def save(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape, scale=0.2).astype(dtype) for name, shape in shapes.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def make(directory: Path, kind: str, sharded: bool) -> Path:
    """A sound folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    directory.mkdir()
    gpt2 = {"model_type": kind, "vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config = gpt2 if kind == "gpt2" else llama_config(kind)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 3, "pad_token_id": 0}))
    shapes = gpt2_shapes() if kind == "gpt2" else llama_shapes(kind)
    if sharded:
        names = sorted(shapes)
        parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
        for file, part in parts.items():
            save(directory / file, {name: shapes[name] for name in part}, "float16")
        weight_map = {name: file for file, part in parts.items() for name in part}
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save(directory / "model.safetensors", shapes)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(20)} | {"[UNK]": 20}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def dumps(value: Any) -> bytes:
    text = json.dumps(value)
    return text.replace(json.dumps(HUGE), "7" * 5000).encode()


def paths(tree: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all values of a JSON tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [here, *(path for key, value in items for path in paths(value, (*here, key)))]


def mutate_tree(rng: random.Random, tree: Any, names: list[str]) -> Any:
    """One or two values replaced, added or removed."""
    for _ in range(rng.choice([1, 1, 1, 2])):
        path = rng.choice(paths(tree))
        what = rng.random()
        if not path or what < 0.3:
            if isinstance(tree, dict):
                tree[rng.choice(names)] = rng.choice(VALUES)
            continue
        holder = tree
        for key in path[:-1]:
            holder = holder[key]
        if what < 0.4:
            del holder[path[-1]]
        elif what < 0.5 and isinstance(holder, dict):
            holder[rng.choice(names)] = holder.pop(path[-1])
        else:
            holder[path[-1]] = rng.choice(VALUES)
    return tree


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Text that is no JSON any more, or not what it seems."""
    at = rng.randrange(len(data) + 1)
    choices: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
        lambda: data[:at] + bytes(rng.randrange(256) for _ in range(8)) + data[at:],
        lambda: b"[" * 100_000,
        lambda: b'{"a":' * 50_000,
        lambda: data.replace(b"{", b'{"a": ' + b"[" * 3000 + b"]" * 3000 + b", ", 1),
        lambda: data.replace(b'": ', b'": 1, "a": 1, "a": ', 1),
        lambda: data.replace(b"{", b'{"model_type": "gpt2", "weight_map": {}, ', 1),
        lambda: data.decode("utf-8", "replace").encode("utf-16"),
        lambda: b"",
        lambda: rng.choice([b"null", b"[]", b"3", b'"x"', b"NaN", b"{}", b"7" * 5000, b"-", b"\0" * 100]),
    ]
    return rng.choice(choices)()


def mutate_json(rng: random.Random, data: bytes, names: list[str]) -> bytes:
    if rng.random() < 0.2:
        return mutate_bytes(rng, data)
    return dumps(mutate_tree(rng, json.loads(data), names))


def mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    length = struct.unpack("<Q", data[:8])[0]
    header, values = data[8 : 8 + length], data[8 + length :]
    kind = rng.random()
    if kind < 0.15:
        numbers = [0, 1, length - 1, length + 1, len(data), 10**8, 2**31, 2**63, 2**64 - 1]
        return struct.pack("<Q", rng.choice(numbers)) + data[8:]
    if kind < 0.25:
        return data[: rng.randrange(len(data))]
    if kind < 0.35:
        return data + bytes(rng.randrange(1, 64))
    if kind < 0.5:
        header = mutate_bytes(rng, header)
    else:
        tree = json.loads(header)
        for _ in range(rng.choice([1, 1, 2])):
            name = rng.choice([name for name in tree if name != "__metadata__"])
            entry = tree[name]
            what = rng.choice(["dtype", "shape", "data_offsets", "name", "copy", "remove", "value", "metadata"])
            if what == "name":
                tree[rng.choice(["x" * 10**6, "\x1b[2J", "", "a\0b", "lm_head.weight", "norm.weight"])] = tree.pop(name)
            elif what == "copy":
                tree[name + "x"] = entry
            elif what == "remove" and len(tree) > 2:
                del tree[name]
            elif what == "value":
                tree[name] = rng.choice(VALUES)
            elif what == "metadata":
                tree["__metadata__"] = rng.choice(VALUES)
            elif isinstance(entry, dict) and what == "dtype":
                entry["dtype"] = rng.choice(["F16", "BF16", "I64", "F8_E4M3", "F4", "BOOL", "C64", "X", 3, None])
            elif isinstance(entry, dict):
                numbers: list[Any] = [-1, 0, 1, 16, 2**31, 2**62, 2**63, 2**64 - 1, 10**30, 2.5, None, "1", []]
                entry[what] = [rng.choice(numbers) for _ in range(rng.choice([0, 1, 2, 2, 3, 60]))]
        header = dumps(tree)
    return struct.pack("<Q", len(header)) + header + values


NUMBERS = [0, 1, 2, 3, 7, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1, 2**64 - 8]


def gguf(kind: str) -> gguf_files.File:
    """A sound file of the smallest size; Q8_0 because no package is needed to read it back."""
    file = gguf_files.decoder(hidden=32, heads=2, heads_kv=1, inner=32, context=64)
    if kind == "Q8_0":
        tensor = next(tensor for tensor in file.tensors if tensor.name == "blk.0.ffn_up.weight")
        tensor.kind, tensor.data = 8, bytes([0, 40] + [7] * 32) * 32
    return file


def gguf_value(rng: random.Random) -> tuple[int, bytes]:
    """A value of any type, known or not, with counts that may promise more than there is."""
    kind = rng.choice([*range(14), 2**31, 2**32 - 1])
    raw = bytes(rng.randrange(256) for _ in range(rng.choice([0, 1, 4, 8, 40])))
    if kind == gguf_files.STRING:
        return kind, struct.pack("<Q", rng.choice([len(raw), *NUMBERS])) + raw
    if kind == gguf_files.ARRAY:
        return kind, struct.pack("<IQ", rng.randrange(14), rng.choice([len(raw), *NUMBERS])) + raw
    return kind, rng.choice([struct.pack("<Q", rng.choice(NUMBERS)), raw, struct.pack("<f", float("nan")), b"\1"])


def gguf_plain(rng: random.Random) -> Any:
    """A value that is written as it should be, of a type or a size that a field may not have."""
    return rng.choice(
        [0, 1, 2, 3, 16, 63, 2**31 - 1, 2**32 - 1, True, False, 0.0, -1.0, 1e30, float("nan"), "", "llama", "gpt2",
         "\x1b", b"\xff", "a" * 5000, [], [1, 2], ["a", "b"], [1.0], [True], ["a b"] * 300, [""] * 300,
         list(range(267)),
         "{{ 'a' * 999999999 }}", "{% for %}", "{{ messages[0].content * 99999999 }}", "{{ raise_exception('\x1b') }}"]
    )  # fmt: skip


def mutate_gguf(rng: random.Random, kind: str) -> bytes:
    file = gguf(kind)
    for _ in range(rng.choice([1, 1, 1, 2])):
        what = rng.choice(["value", "value", "plain", "plain", "remove", "add", "tensor", "tensor", "header", "bytes"])
        key = rng.choice(list(file.metadata) or ["a"])
        tensor = rng.choice(file.tensors)
        if what == "value":
            file.metadata[key] = gguf_value(rng)
        elif what == "plain":
            file.metadata[key] = gguf_plain(rng)
        elif what == "remove":
            file.metadata.pop(key, None)
        elif what == "add":
            names = ["general.alignment", "split.count", "llama.expert_count", "llama.attention.key_length", "\x1b", "",
                     "llama.rope.scaling.type", "llama.rope.scaling.factor", "tokenizer.ggml.scores"]  # fmt: skip
            file.metadata[rng.choice(names)] = rng.choice([gguf_value, gguf_plain])(rng)
        elif what == "tensor":
            part = rng.choice(["name", "kind", "dims", "data", "offset", "copy", "remove"])
            if part == "name":
                tensor.name = rng.choice(
                    ["", "a" * 300, "\x1b[2J", "output.weight", "rope_freqs.weight", "blk.0.x.weight"]
                )
            elif part == "kind":
                tensor.kind = rng.choice([*range(40), 2**31, 2**32 - 1])
            elif part == "dims":
                tensor.dims = tuple(
                    rng.choice([*NUMBERS, 32]) % 2**64 for _ in range(rng.choice([0, 1, 2, 2, 3, 5, 90]))
                )
            elif part == "data":
                tensor.data = tensor.data[: rng.randrange(len(tensor.data))]
            elif part == "offset":
                tensor.offset = rng.choice(NUMBERS)
            elif part == "copy":
                file.tensors.append(tensor)
            elif len(file.tensors) > 1:
                file.tensors.remove(tensor)
        elif what == "header":
            part = rng.choice(["version", "magic", "tensors", "pairs"])
            if part == "version":
                file.version = rng.choice([0, 1, 2, 4, 3 << 24, 2**32 - 1])
            elif part == "magic":
                file.magic = rng.choice([b"GGML", b"\0\0\0\0", b"FUGG"])
            else:
                file.counts[part] = rng.choice([*NUMBERS, len(file.metadata) - 1, len(file.tensors) + 1])
    data = file.build()
    if rng.random() < 0.3:
        at = rng.randrange(min(len(data), rng.choice([32, 2000, len(data)])))
        number = struct.pack("<Q", rng.choice(NUMBERS))
        data = rng.choice(
            [data[:at], data[:at] + number + data[at + 8 :], data[:at] + number + data[at:], data[:at] + data[at + 1 :]]
        )
    return data


class Fuzzer:
    def __init__(self, root: Path):
        kinds = [("llama", False), ("llama", True), ("mistral", False), ("qwen2", False), ("qwen3", True)]
        kinds += [("gpt2", False), ("gpt2", True)]
        self.folders = [make(root / f"{kind}-{sharded}", kind, sharded) for kind, sharded in kinds]
        self.gguf_files = []
        for kind in ("F32", "Q8_0"):
            folder = root / f"gguf-{kind}"
            folder.mkdir()
            self.gguf_files.append(gguf(kind).write(folder / "model.gguf"))

    def case(self, rng: random.Random) -> tuple[Path, str, bytes]:
        """A folder, the file of it that is replaced, and by what."""
        directory = rng.choice(self.folders)
        file = rng.choices(
            ["config.json", "generation_config.json", "weights", "index", "tokenizer.json"], [10, 2, 6, 3, 3]
        )[0]
        if file == "weights":
            path = rng.choice(sorted(directory.glob("*.safetensors")))
            return directory, path.name, mutate_safetensors(rng, path.read_bytes())
        if file == "index":
            directory = next(d for d in rng.sample(self.folders, len(self.folders)) if d.name.endswith("True"))
            file = "model.safetensors.index.json"
        names = {"config.json": NAMES + ROPE, "generation_config.json": ["eos_token_id", "pad_token_id"]}.get(
            file, ["weight_map", "metadata", "model", "added_tokens", "normalizer", "decoder", "type", "unk_token"]
        )
        return directory, file, mutate_json(rng, (directory / file).read_bytes(), names)

    def any_case(self, rng: random.Random) -> tuple[Path, str, bytes]:
        """`case`, or a GGUF file, no name, and what replaces it."""
        if rng.random() < 0.75:
            return self.case(rng)
        path = rng.choice(self.gguf_files)
        return path, "", mutate_gguf(rng, path.parent.name[5:])


def attempt(directory: Path) -> bool:
    """Whether the folder loads. Raises what the package's own errors do not cover."""
    from flashkernel.generate import Engine, GenerationError, ModelMemoryError, TextTokenizer, load_model
    from flashkernel.generate.chat_template import ChatTemplate

    try:
        tokenizer = TextTokenizer(directory)
        ids = [token for token in tokenizer.encode("w1 w2 other") if token < 24] or [1]
        engine = Engine(load_model(directory, device="cpu"), page_size=16)
        for event in engine.generate([ids], max_new_tokens=2):
            tokenizer.decode([event.token])
        if directory.suffix == ".gguf":
            ChatTemplate.load(directory).render([{"role": "user", "content": "hello"}])
        return True
    except ModelMemoryError as error:
        raise AssertionError(f"memory was asked for: {error}") from error
    except GenerationError as error:
        if "\n" in str(error) or "\x1b" in str(error) or len(str(error)) > 1000:
            raise AssertionError(f"not a sentence: {str(error)[:300]!r}") from error
        return False


def run(seed: int, count: int) -> dict[str, Any]:
    def out_of_time(*_: Any) -> None:
        raise AssertionError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, out_of_time)
    warnings.simplefilter("ignore")
    failures, loaded = [], 0
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        fuzzer = Fuzzer(Path(root))
        for folder in [*fuzzer.folders, *fuzzer.gguf_files]:
            assert attempt(folder), folder
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, resource.RLIM_INFINITY))
        for number in range(count):
            directory, name, data = fuzzer.any_case(random.Random(f"{seed}-{number}"))
            path = directory / name
            sound = path.read_bytes()
            path.write_bytes(data)
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                loaded += attempt(directory)
            except BaseException as error:
                failures.append(f"case {seed}-{number}, {directory.name}/{name}: {type(error).__name__}: {error}"[:400])
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                path.write_bytes(sound)
    return {"cases": count, "loaded": loaded, "seconds": time.perf_counter() - begin, "failures": failures}


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]))))
