"""Where a run is: a bar of tqdm on a terminal that has it, else a line for each row. To stderr."""

from __future__ import annotations

import sys
from typing import Any

from .case import Case

__all__ = ["Progress"]


class Progress:
    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._bar: Any = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm

                self._bar = tqdm(total=total, unit="row", dynamic_ncols=True)
            except ImportError:
                pass

    def __call__(self, case: Case | None) -> None:
        """Before each case; None after the last."""
        if self._bar is not None:
            if self._done or case is None:
                self._bar.update(1)
            if case is None:
                self._bar.close()
            else:
                self._bar.set_description(f"{case.group}: {case.name} {case.dtype}")
        elif case is not None:
            line = f"[{self._done + 1}/{self._total}] {case.group}: {case.name} {case.dtype} ..."
            print(line, file=sys.stderr, flush=True)
        self._done += 1
