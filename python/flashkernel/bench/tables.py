"""Tables of rows: one line for each kernel of ours, its baselines beside it. Markdown of all columns for reports and
files, a listing as wide as there is room for people.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from ..terminal import fitted_rows
from .case import BESIDE, LIMIT, OURS, VARIANT

__all__ = ["ABOVE", "listing", "markdown", "seconds", "table"]

ABOVE = (
    "* more than 100 %: the limit was measured in this run with the same noise as the row, or caches kept what the "
    "limit takes from memory; read it as: at the limit"
)

HEAD = (
    "kernel", "case", "dtype", "mean", "std", "min", "p50", "p95", "p99", "max", "rate", "of limit", "x baseline",
    "peak memory",
)  # fmt: skip
BRIEF = ("kernel", "case", "dtype", "p50", "rate", "of limit", "x baseline", "peak memory")


def seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 999.5 * scale else f"{value / scale:.0f} {unit}"
    return f"{value * 1e9:.0f} ns"


def _rate(row: dict[str, Any], provider: dict[str, Any]) -> str:
    """FLOP/s or bytes/s, by what the row is bound by."""
    memory = row["limit"] is not None and row["limit"]["bound"] == "memory"
    if provider["tflops"] and not memory and row["group"] != "decode":
        tera = provider["tflops"]
        return f"{tera:.3g} TFLOP/s" if tera >= 1 else f"{tera * 1e3:.3g} GFLOP/s"
    giga = provider["gbytes_per_second"]
    return "-" if not giga else f"{giga:.3g} GB/s" if giga < 999.5 else f"{giga * 1e-3:.3g} TB/s"


def _bytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:.3g} MiB"


def _memory(row: dict[str, Any], provider: dict[str, Any]) -> str:
    workspace = provider.get("workspace_bytes")
    if provider["peak_bytes"] is None and workspace is None:
        return "-"
    return f"{_bytes(provider['peak_bytes'])} + {_bytes(workspace)}"


def _line(row: dict[str, Any], name: str) -> dict[str, str]:
    p = row["providers"][name]
    others = {
        other: q["p50"] / p["p50"]
        for other, q in row["providers"].items()
        if other != name and q["kind"] not in (OURS, LIMIT)
    }
    ran = " ".join(p.get("kernels") or [])
    shown = [f"{other} {ratio:.2f}" + (" (less work)" if row["providers"][other]["kind"] == BESIDE else "")
             for other, ratio in others.items()]  # fmt: skip
    if "over_plain" in p:
        shown = [f"{p['over_plain'] * 1e6:+.2f} us over the plain op"]
    return {
        "kernel": ran if name == "flashkernel" and ran else name if name == ran or not ran else f"{name} ({ran})",
        "case": row["case"],
        "dtype": row["dtype"],
        **{key: seconds(p[key]) for key in ("mean", "std", "min", "p50", "p95", "p99", "max")},
        "rate": _rate(row, p),
        "of limit": f"{p['share_of_limit']:.0%} {row['limit']['bound']}" if p.get("share_of_limit") else "-",
        "x baseline": ", ".join(shown) or "-",
        "peak memory": _memory(row, p),
    }


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Aligned, the first line its head."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    ruled = [lines[0], ["-" * max(3, width) for width in widths], *lines[1:]]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in ruled
    )


def table(rows: Iterable[dict[str, Any]], head: Sequence[str] = HEAD) -> str:
    """Times are of one call. "of limit": of what this machine reached in the same run, by the larger of products and
    bytes. "x baseline" above 1: faster than it. Peak memory: the framework's, result included, + the op's workspace.
    """
    lines: list[Sequence[str]] = [head]
    for row in rows:
        for name, provider in row["providers"].items():
            if provider["kind"] in (OURS, VARIANT):
                cells = _line(row, name)
                lines.append([cells[column] for column in head])
        for name, reason in _failures(row):
            cells = {"kernel": name, "case": row["case"], "dtype": row["dtype"], "x baseline": reason}
            lines.append([cells.get(column, "-").replace("|", "/") for column in head])
    return markdown(lines)


def _share(row: dict[str, Any], provider: dict[str, Any]) -> str:
    """The share of the limit, with a star where it is more than 100 %."""
    share = provider.get("share_of_limit")
    return f"{share:.0%} {row['limit']['bound']}{' *' if round(share * 100) > 100 else ''}" if share else "-"


def listing(rows: Iterable[dict[str, Any]], columns: int) -> str:
    """What `flashkernel bench` prints: a heading for each row, and its lines below, within `columns`. Times are the
    medians of one call; "x baseline" above 1: ours is faster.
    """
    lines = [["kernel", "time", "rate", "of limit", "x baseline"]]
    headings: dict[int, str] = {}
    for row in rows:
        headings[len(lines)] = f"{row['case']}, {row['dtype']}"
        for name, provider in row["providers"].items():
            if provider["kind"] in (OURS, VARIANT):
                cells = _line(row, name)
                lines.append(
                    [f"  {cells['kernel']}", cells["p50"], cells["rate"], _share(row, provider), cells["x baseline"]]
                )
        lines += [[f"  {name}", "-", "-", "-", reason] for name, reason in _failures(row)]
    text: list[str] = []
    for i, found in enumerate(fitted_rows(lines, columns)):
        if i in headings:
            text += textwrap.wrap(headings[i], columns, break_on_hyphens=False)
        text += found
    if any(line[3].endswith("*") for line in lines):
        text += ["", *textwrap.wrap(ABOVE, columns)]
    return "\n".join(text)


def _failures(row: dict[str, Any]) -> list[tuple[str, str]]:
    """The failures that are printed: refusals of our own, and whatever is wrong."""
    return [
        (name, reason)
        for name, reason in row["refused"].items()
        if "/" in name or name == "flashkernel" or reason.startswith(("DIFFERS", "FAILS"))
    ]
