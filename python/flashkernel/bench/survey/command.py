"""`flashkernel bench survey`."""

from __future__ import annotations

import argparse
import gc
import gzip
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..case import Case, Settings, Work, wanted
from .tables import FAMILIES, Spec

__all__ = ["cases", "run"]

SECONDS = 2.0  # of a row by default
QUICK = 8  # one row in so many of a family
WRITE_EVERY = 25  # rows, so that a run that is cut off leaves what it has; the file grows with each


def _build(spec: Spec, s: Settings) -> Work:
    work = spec.work(s)
    return work if s.cuda else replace(work, sizes="(scaled down)")


def cases(s: Settings, families: Sequence[str] = ()) -> list[Case]:
    """Every row on a GPU; scaled down on a CPU, where --quick keeps a part of them."""
    unknown = [name for name in families if name not in FAMILIES]
    if unknown:
        raise ValueError(f"bench survey: --family {unknown[0]}; one of {', '.join(FAMILIES)} is needed")
    made = []
    for family, specs in FAMILIES.items():
        if families and family not in families:
            continue
        for spec in specs[::QUICK] if s.quick else specs:
            if s.dtypes and spec.dtype not in s.dtypes:
                continue
            one = spec if s.cuda else spec.shrunk()
            build = partial(_build, one, s)
            made.append(Case(f"survey_{family}", spec.name, spec.dtype, s.device, build, one.shape))
    return made


def _failed(case: Case, error: BaseException) -> dict[str, Any]:
    """The row of a case that could not be made or measured at all."""
    reason = f"FAILS: {(str(error).strip() or type(error).__name__).splitlines()[0][:160]}"
    return {
        "group": case.group, "case": case.name, "dtype": case.dtype, "device": case.device, "shape": case.shape,
        "flop": None, "bytes": None, "limit": None, "agrees": False, "providers": {},
        "refused": {"flashkernel": reason}, "library_peak_bytes": 0, "clocks": {}, "best_peer": None,
    }  # fmt: skip


def _write(path: str, result: dict[str, Any]) -> None:
    """Writes a result as JSON, compressed where the name ends in .gz."""
    from ..results import write_json

    plain = Path(path.removesuffix(".gz"))
    write_json(plain, result)
    if path.endswith(".gz"):
        Path(path).write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()


def run(args: argparse.Namespace, s: Settings) -> int:
    """Exit code 1 if one of our results is wrong or one of our calls fails."""
    import torch

    import flashkernel as fk

    from ...terminal import width
    from ..chosen import device_of, part_of
    from ..machine import gpu_clocks, machine_info
    from ..progress import Progress
    from ..results import check_places
    from ..runner import Session
    from ..timing import Rule
    from . import attention_peers, summary

    chosen = [case for case in cases(s, args.family or ()) if wanted(args.case, case.name)]
    chosen = part_of(args.part, chosen)
    if args.budget:  # what is left out for lack of time is of every family
        chosen = [case for first in range(QUICK) for case in chosen[first::QUICK]]
    if args.list:
        print("\n".join(f"{case.group.removeprefix('survey_')}: {case.name}, {case.dtype}" for case in chosen))
        return 0
    if not chosen:
        raise ValueError("bench: no row is left of what was asked for; --list shows what there is")
    check_places(args.json)
    if args.threads:
        fk.set_num_threads(args.threads)
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rule = Rule(min(args.warmup, 3), min(args.calls, 100), min(args.seconds, SECONDS), 5)
    if args.quick or not s.cuda:
        rule = Rule(1, 5, min(args.seconds, 0.02), 3)
    device = device_of(s, args.steady)
    session = Session(s, device, rule, alone=s.cuda)
    if s.cuda:
        session.asked = float("inf"), gpu_clocks()  # once: asking takes as long as a row
    method = {**asdict(rule), "quick": args.quick, "text": _method(rule)}
    result: dict[str, Any] = {
        "command": f"flashkernel bench survey{''.join(f' --family {name}' for name in args.family or ())}"
        + (f" --part {args.part}" if args.part else ""),
        "method": method,
        "machine": machine_info(s.device),
        "absent": attention_peers.absent(s),
        "left_out": [],
    }
    deadline = time.monotonic() + (args.budget or float("inf"))
    progress = Progress(len(chosen))
    rows: list[dict[str, Any]] = []
    gc.freeze()
    try:
        for done, case in enumerate(chosen):
            left = deadline - time.monotonic()
            if left <= 0 or _is_lost(rows):
                result["left_out"] += [f"{x.name} {x.dtype}" for x in chosen[done:]]
                break
            progress(case)
            # A third of a row's time goes into tensors, checks and captures; half of the rest into calls alone.
            share = min(left / (len(chosen) - done), args.seconds) / 3 if args.budget else None
            try:
                rows.append(session.row(case, share))
            except Exception as error:
                rows.append(_failed(case, error))
            if s.cuda:
                torch.cuda.empty_cache()
            if args.json not in (None, "-") and not args.json.endswith(".gz") and done % WRITE_EVERY == 0:
                _write(args.json, {**result, "ceilings": session.ceilings, "rows": rows})
        progress(None)
    finally:
        gc.unfreeze()
    result |= {"ceilings": session.ceilings, "rows": rows}
    if args.json != "-":
        print(summary.text(rows, width()))
    for name, reason in result["absent"].items():
        print(f"absent: {name}: {reason}", file=sys.stderr)
    if result["left_out"]:
        print(f"left out: {len(result['left_out'])} rows (lack of time, or a GPU in error)", file=sys.stderr)
    if args.json:
        _write(args.json, result)
    return 0 if all(row["agrees"] for row in rows) else 1


def _is_lost(rows: list[dict[str, Any]]) -> bool:
    """Whether the GPU answers nothing any more after an illegal access: every later row would fail for it."""
    sticky = ("illegal memory access", "unspecified launch failure", "misaligned address", "device-side assert")
    return bool(rows) and any(word in reason for reason in rows[-1]["refused"].values() for word in sticky)


def _method(rule: Any) -> str:
    return (
        f"Each call's inputs come from memory; up to {rule.calls} measurements in what fits into {rule.seconds:g} s of "
        "a row; a chain is calls one behind the other in a CUDA graph; alone: each behind an unrelated small kernel, "
        "whose own time is taken off"
    )
