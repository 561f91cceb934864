"""`python -m tools COMMAND`: report, roofline or profile. Exit codes as those of `flashkernel`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import profile, report, roofline
from .places import find_root

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    helps = {
        "report": "write BENCHMARKS.md, lab/tables, lab/plots and README's table from lab/results",
        "roofline": "place every kernel under its machine's limits, from committed runs",
        "profile": "run kernels under Nsight Compute",
    }
    for name, module in (("report", report), ("roofline", roofline), ("profile", profile)):
        sub = commands.add_parser(name, help=helps[name], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        module.add_arguments(sub)
    args = parser.parse_args(argv)
    try:
        if args.command == "report":
            return report.run(args.root or find_root(), check=args.check)
        return (roofline if args.command == "roofline" else profile).run(args)
    except (ValueError, NotImplementedError, ImportError) as error:
        print(f"python -m tools {args.command}: error: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError, OSError) as error:
        print(f"python -m tools {args.command}: failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
