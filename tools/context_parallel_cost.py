"""`python -m tools.context_parallel_cost`: what context parallel attention costs on 8 to 1024 GPUs, on paper.

Writes the tables of docs/context_parallel.md; `--check` says whether they are what the model gives. A step of the ring
lasts as long as the longer of its compute and its transfer. Nothing here is measured but the rates that it is given.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from .places import find_root

__all__ = ["Rates", "Shape", "fewest_tokens", "render", "ring_seconds"]

GPUS = (2, 8, 32, 128, 512, 1024)
LENGTHS = (1 << 17, 1 << 20, 1 << 23)
NODE = 8  # GPUs that NVLink joins


@dataclass(frozen=True)
class Rates:
    """Rates of one GPU: FLOP/s of attention, and bytes/s that it receives while it sends as many."""

    forward: float = 600e12
    backward: float = 550e12
    nvlink: float = 400e9
    network: float = 45e9

    def link(self, gpus: int) -> float:
        """Bytes/s of a step's slowest message. Some messages leave the node as soon as there is more than one node."""
        return self.nvlink if gpus <= NODE else self.network


@dataclass(frozen=True)
class Shape:
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    element_bytes: int = 2


def step_flops(shape: Shape, tokens: int) -> float:
    """Forward, of a causal zig-zag step: all queries over half of the keys, or half over all. Backward is 2.5 times."""
    return 4 * shape.heads_q * shape.head_dim * tokens * tokens / 2


def step_bytes(shape: Shape, tokens: int) -> float:
    """Keys and values of one rank: what the rank that needs both of its neighbour's pieces receives."""
    return 2.0 * shape.heads_kv * shape.head_dim * tokens * shape.element_bytes


def ring_seconds(shape: Shape, rates: Rates, seq_len: int, gpus: int) -> tuple[float, float, float, float]:
    """Forward and backward of the ring, and what their compute alone takes. The first step waits for nothing; the
    gradients of the last one hide behind nothing."""
    tokens = seq_len // gpus
    flops, moved = step_flops(shape, tokens), step_bytes(shape, tokens) / rates.link(gpus)
    forward, backward = flops / rates.forward, 2.5 * flops / rates.backward
    steps = gpus - 1
    return (
        forward + steps * max(forward, moved),
        backward + steps * max(backward, 2 * moved) + (moved if steps else 0),
        forward * gpus,
        backward * gpus,
    )


def fewest_tokens(shape: Shape, rates: Rates, link: float) -> tuple[float, float]:
    """Tokens of a rank from which on transfer hides behind compute, forward and backward: both are of n tokens' keys,
    but compute grows with n squared."""
    moved = step_bytes(shape, 1) / link
    return moved * rates.forward / step_flops(shape, 1), 2 * moved * rates.backward / (2.5 * step_flops(shape, 1))


def exchange_seconds(shape: Shape, rates: Rates, seq_len: int, gpus: int) -> tuple[float, float | None]:
    """What all-gather and Ulysses move in a forward pass, behind nothing; None where heads are too few."""
    tokens, others = seq_len // gpus, (gpus - 1) / gpus
    gathered = step_bytes(shape, tokens) * (gpus - 1) / rates.link(gpus)
    if shape.heads_q % gpus:
        return gathered, None
    heads = 2 * shape.heads_q + 2 * max(shape.heads_kv, gpus)
    return gathered, others * heads * shape.head_dim * shape.element_bytes * tokens / rates.link(gpus)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def render(shape: Shape | None = None, rates: Rates | None = None) -> str:
    shape, rates = shape or Shape(), rates or Rates()
    lines = ["| link | bytes/s | forward hides from | backward hides from |", "|---|---|---|---|"]
    for name, link in (("NVLink", rates.nvlink), ("network", rates.network)):
        forward, backward = fewest_tokens(shape, rates, link)
        lines.append(f"| {name} | {link / 1e9:.0f} GB/s | {forward:,.0f} tokens a rank | {backward:,.0f} |")
    lines += [
        "",
        "| sequence | GPUs | tokens a rank | MB a step | ring forward | compute's share | ring backward "
        "| compute's share | all-gather moves | Ulysses moves |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for seq_len in LENGTHS:
        for gpus in GPUS:
            forward, backward, alone, alone_back = ring_seconds(shape, rates, seq_len, gpus)
            gathered, dealt = exchange_seconds(shape, rates, seq_len, gpus)
            tokens = seq_len // gpus
            lines.append(
                f"| {seq_len:,} | {gpus} | {tokens:,} | {step_bytes(shape, tokens) / 1e6:.3g} | {_time(forward)} | "
                f"{alone / forward:.0%} | {_time(backward)} | {alone_back / backward:.0%} | {_time(gathered)} | "
                f"{'too few heads' if dealt is None else _time(dealt)} |"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is not what the model gives")
    check = parser.parse_args(argv).check
    page = find_root() / "docs" / "context_parallel.md"
    text = page.read_text(encoding="utf-8")
    begin, end = "<!-- tables: begin -->\n", "<!-- tables: end -->"
    new = text.split(begin)[0] + begin + "\n" + render() + "\n\n" + end + text.split(end)[1]
    if check:
        print("up to date" if new == text else "docs/context_parallel.md is old; run it without --check")
        return int(new != text)
    page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
