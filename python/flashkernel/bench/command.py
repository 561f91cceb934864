"""`flashkernel bench`: the command line."""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

__all__ = ["add_arguments", "run"]

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "group",
        nargs="*",
        help="what to measure: groups and suites that --list names (default: all); or `e2e`: whole models that "
        "generate; or `survey`: shapes of many models and servers, ending in one number",
    )
    add("--list", action="store_true", help="list groups, rows, providers and kernels; nothing is measured")
    add(
        "--kernels",
        metavar="ID",
        help="each kernel forced at a representative shape: all, or ids and prefixes by comma",
    )
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if build and machine have one")
    add(
        "--case", action="append", metavar="TEXT", help="only rows whose name contains this; may be given several times"
    )
    add("--family", action="append", metavar="NAME", help="survey: only this family; may be given several times")
    add("--dtype", action="append", choices=DTYPES, help="only these dtypes; may be given several times")
    add("--without", default="", metavar="NAMES", help="providers to leave out, by comma, as --list names them")
    add("--part", metavar="I/N", help="every N-th row from the I-th on, so that N runs make the whole")
    add("--threads", type=int, help="CPU threads of both sides")
    add("--warmup", type=int, default=100, help="measurements of a provider before timing")
    add("--calls", type=int, default=1000, help="timed measurements of a provider in a row")
    add("--seconds", type=float, default=2.0, help="most seconds of a provider in a row once 30 measurements are taken")
    add(
        "--steady",
        type=float,
        metavar="SECONDS",
        help="on a GPU, what a measurement lasts (default: 0.0001): some thousandths have a provider's calls run one "
        "after the other at the clock that its own power leaves, not at that of all providers in turn",
    )
    add("--budget", type=float, metavar="SECONDS", help="for the whole run: rows share it evenly")
    add("--quick", action="store_true", help="small shapes and few calls: a look at whether all of it runs")
    add("--full-shapes", action="store_true", help="with --quick: few calls, but the shapes of a full run")
    add("--json", metavar="FILE", help="write the results as JSON; -: to stdout, in place of the table")
    add("--verbose", action="store_true", help="print the table of all columns, in Markdown, however wide")
    add("--note", metavar="TEXT", help="a sentence about the circumstances, kept with the results")
    add("--csv", metavar="FILE", help="write the results as CSV")


def _device(wanted: str, only_list: bool = False) -> str:
    import flashkernel as fk

    from . import baselines

    torch = baselines.require_torch()
    found = fk.num_cuda_devices() > 0 and torch.cuda.is_available()
    if wanted == "cuda" and only_list:
        return wanted
    if wanted == "cuda" and not found:
        raise ValueError("bench: --device cuda, but this build or torch finds no CUDA device")
    return "cuda" if found and wanted != "cpu" else "cpu"


def _settings(args: argparse.Namespace) -> Any:
    from . import baselines
    from .case import Settings

    for name, least in (("warmup", 0), ("calls", 1), ("threads", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"bench: --{name} {value}; an integer >= {least} is needed")
    without = frozenset(x for x in args.without.split(",") if x)
    unknown = without - set(baselines.NAMES)
    if unknown:
        raise ValueError(f"bench: --without {sorted(unknown)[0]}; one of {', '.join(baselines.NAMES)} is needed")
    if args.quick and args.full_shapes:
        without |= {"compile"}
    settings = Settings(
        device=_device(args.device, args.list),
        quick=args.quick and not args.full_shapes,
        dtypes=tuple(args.dtype or ()),
        without=without,
        only=frozenset((args.kernels or "").split(",")) - {""},
    )
    if args.steady is not None and not (settings.cuda and args.steady > 0):
        raise ValueError(f"bench: --steady {args.steady}; a number > 0, and a GPU, are needed")
    return settings


def _cases(args: argparse.Namespace, settings: Any) -> list[Any]:
    import flashkernel as fk

    from .case import wanted
    from .chosen import part_of
    from .suites import GROUPS, select

    if args.kernels is not None:
        known = [kernel.id + "/" for kernel in fk.kernels()]
        for asked in settings.only - {"all"}:
            if not any(name.startswith(asked.rstrip("/") + "/") for name in known):
                raise ValueError(f"bench: --kernels {asked}: no such kernel; `flashkernel kernels` lists them")
    names = select(args.group) if args.group or args.kernels is None else []
    names += ["kernels"] if args.kernels is not None and "kernels" not in names else []
    cases = [case for name in names for case in GROUPS[name](settings)]
    cases = [case for case in cases if wanted(args.case, case.name)]
    return part_of(args.part, cases)


def _list(cases: list[Any], device: str) -> None:
    from . import baselines
    from .suites import SUITES

    groups: dict[str, list[Any]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    print("Suites: " + "; ".join(f"{name} = {', '.join(of)}" for name, of in SUITES.items()))
    print("\nProviders:")
    for name, meaning in baselines.NAMES.items():
        print(f"  {name:16} {meaning}")
    print(f"\nRows on {device}:")
    for name, rows in groups.items():
        print(f"{name} ({len(rows)})")
        for case in rows:
            print(f"  {case.name} {case.dtype}")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if one of our results differs from its baseline's."""
    from . import baselines

    torch = baselines.require_torch()
    if args.group == ["e2e"]:
        from .e2e import run as e2e

        return e2e(args, _device(args.device, args.list))
    if args.family and args.group != ["survey"]:
        raise ValueError(f"bench: --family {args.family[0]}; it goes with `bench survey` alone")

    import flashkernel as fk

    settings = _settings(args)
    if args.group == ["survey"]:
        from .survey.command import run as survey

        return survey(args, settings)
    cases = _cases(args, settings)
    if args.list:
        _list(cases, settings.device)
        return 0
    if not cases:
        raise ValueError("bench: no row is left of what was asked for; --list shows what there is")

    from ..terminal import facts, width
    from .chosen import device_of
    from .machine import machine_info
    from .progress import Progress
    from .results import check_places, write_csv, write_json
    from .runner import Session
    from .tables import listing, table
    from .timing import Rule

    check_places(args.json, args.csv)
    if args.threads:
        fk.set_num_threads(args.threads)
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rule = Rule(args.warmup, args.calls, args.seconds)
    if args.quick:
        rule = Rule(min(args.warmup, 2), min(args.calls, 20 if settings.cuda else 5), min(args.seconds, 0.2), 3)
    session = Session(settings, device_of(settings, args.steady), rule)
    head: dict[str, Any] = {"command": _command(args), "method": {**asdict(rule), "quick": args.quick}}
    head["method"] |= {"steady": args.steady} if args.steady else {}
    head |= {"note": args.note} if args.note else {}
    head["machine"] = machine_info(settings.device)

    def result() -> dict[str, Any]:
        return {**head, "ceilings": session.ceilings, "left_out": session.left_out, "rows": session.rows}

    progress = Progress(len(cases))

    def step(case: Any) -> None:
        if args.json not in (None, "-") and session.rows:
            write_json(Path(args.json), result())
        progress(case)

    gc.freeze()  # capturing a graph collects garbage: not what imports have made
    try:
        session.run(cases, args.budget, step)
    finally:
        gc.unfreeze()
    if args.json != "-":
        machine = ", ".join(f"{key} {value}" for key, value in head["machine"].items() if value is not None)
        ceilings = ", ".join(f"{name} {rate * 1e-12:.3g} T/s" for name, rate in session.ceilings.items())
        print(facts([("machine", machine), ("ceilings", ceilings)], width()) + "\n")
        print(table(session.rows) if args.verbose else listing(session.rows, width()))
    for name in session.left_out:
        print(f"left out for lack of time: {name}", file=sys.stderr)
    if args.json:
        write_json(Path(args.json), result())
    if args.csv:
        write_csv(Path(args.csv), [result()])
    return 0 if all(row["agrees"] for row in session.rows) else 1


def _command(args: argparse.Namespace) -> str:
    """The command line of this run, without paths of files."""
    words = ["flashkernel bench", *args.group]
    for name in ("kernels", "without", "part", "threads", "budget", "steady"):
        if getattr(args, name):
            words.append(f"--{name} {getattr(args, name)}")
    words += [f'--case "{text}"' for text in args.case or ()]
    words += [f"--dtype {dtype}" for dtype in args.dtype or ()]
    words += ["--quick"] * args.quick + ["--full-shapes"] * args.full_shapes
    return " ".join(words)
