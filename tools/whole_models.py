"""Pages of whole models that generate, from the committed results of `flashkernel bench e2e`. Called by report.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashkernel.bench.e2e import SCHEMA, table

from .places import RESULTS

__all__ = ["MARKS", "SCHEMA", "headline", "report", "summary"]

COLUMNS = {
    "flashkernel": "FlashKernel",
    "vllm": "vLLM",
    "hf_sdpa": "Transformers",
    "hf_static_compile": "Transformers, static cache and torch.compile",
}
MARKS = "<!-- models:begin -->", "<!-- models:end -->"


def _results(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Committed results of whole models."""
    for path in sorted((root / RESULTS).rglob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(result, dict) and result.get("schema") == SCHEMA:
            yield path, result


def summary(root: Path) -> str:
    """BENCHMARKS.md's table: decode tokens/s on a GPU beside Transformers, batch by batch."""
    lines: list[str] = []
    runs: list[str] = []
    about = ""
    for _, result in _results(root):
        if "gpu" not in result["machine"]:
            continue
        machine = result["machine"]
        runs.append(f"{machine['date'][:10]}, commit {machine['commit']}")
        about = (
            f"Decode tokens/s on one {machine['gpu']} ({'; '.join(dict.fromkeys(runs))}; transformers "
            f"{machine['transformers']}, torch {machine['torch']}), random weights at the true shapes; in brackets the "
            "seconds from a loaded model to the first step. All of it: "
            "[lab/tables/whole_models.md](lab/tables/whole_models.md)."
        )
        for row in result["rows"]:
            cells = [
                f"{p['decode_tokens_per_second']:.0f} ({p['ready_seconds']:.1f} s)" if p else "-"
                for p in (
                    row["providers"].get(name) for name in ("flashkernel", "vllm", "hf_sdpa", "hf_static_compile")
                )
            ]
            lines.append(f"| {row['case']}, {row['dtype']} | {' | '.join(cells)} |")
    if not lines:
        return ""
    head = (
        "| | FlashKernel | vLLM | Transformers | Transformers, static cache and torch.compile |\n|---|---|---|---|---|"
    )
    return "\n".join(["## Whole models on a GPU", "", about, "", head, *lines])


def headline(root: Path) -> str:
    """README's table: tokens/s of greedy rows beside vLLM, the prompt's time included. Of several runs of a row, the
    one in which vLLM was the fastest.
    """
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for _, result in _results(root):
        for row in result["rows"]:
            ours, peer = (row["providers"].get(name) for name in ("flashkernel", "vllm"))
            if "gpu" not in result["machine"] or not ours or not peer or "sampled" in row["case"]:
                continue
            key = f"{row['case']}, {row['dtype']}", result["machine"]["gpu"]
            pair = ours["tokens_per_second"], peer["tokens_per_second"]
            found[key] = max(found.get(key, pair), pair, key=lambda both: both[1])
    if not found:
        return ""
    lines = [
        f"| {case} | {gpu} | {ours:.0f} | {peer:.0f} | **{ours / peer:.1f}** |"
        for (case, gpu), (ours, peer) in found.items()
    ]
    return "\n".join(["| tokens/s | on | FlashKernel | vLLM | ratio |", "|---|---|---|---|---|", *lines])


def report(root: Path) -> str:
    """lab/tables/whole_models.md: a table for each committed result file."""
    parts = []
    for path, result in _results(root):
        machine, name = result["machine"], f"../results/{path.relative_to(root / RESULTS).as_posix()}"
        parts.append(
            f"## Whole models: {path.relative_to(root / RESULTS).with_suffix('').as_posix()}\n\n"
            f"`{result['command']}` on {machine.get('gpu') or machine['cpu']}, {machine['date'][:10]}, commit "
            f"{machine['commit']}; torch {machine['torch']}, transformers {machine['transformers']}. Medians of "
            f"{result['method']['runs']} runs; [{path.name}]({name}); "
            f"[docs/benchmarks.md](../../docs/benchmarks.md#whole-models) says how.\n\n{table(result['rows'])}\n"
        )
    return "".join(f"\n{part}" for part in parts)
