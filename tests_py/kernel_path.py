"""`pytest --kernel-path cuda/sm75`: the same tests with the choice of kernels held to one arch of one backend.

Registered by conftest.py when the option is given. Where the arch accepts a call it runs, whatever stands above it in
the registry; where it refuses, the registry chooses as ever. Launches are counted while the path is in force, so that a
run that never took its path fails. Works under xdist: workers send their counts to the process that reports.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import flashkernel as fk
import flashkernel.ops

# Which backend the arrays of a framework (conftest.Maker) run on; Triton's kernels are not in the registry.
BACKENDS = {"numpy": "cpu", "torch": "cpu", "torch_cuda": "cuda", "triton": ""}


def on_path(kernel: str, path: str) -> bool:
    """Whether a kernel's id is "op/path" or begins with "op/path/"."""
    rest = kernel.split("/", 1)[1]
    return rest == path or rest.startswith(path + "/")


class KernelPath:
    """The plugin: puts the path in force for the session, counts what runs, reports it."""

    def __init__(self, path: str) -> None:
        rows = fk.kernels()
        if not any(row.available and on_path(row.id, path) for row in rows):
            known = sorted({"/".join(row.id.split("/")[1:3]) for row in rows if row.available})
            raise pytest.UsageError(f"--kernel-path {path}: no such kernel runs on this machine; {' '.join(known)} do")
        self.path = path
        self.patterns = f"*/{path}?"
        self.served: Counter[str] = Counter()  # launches while the path was in force, by kernel
        self._force = fk.force_kernels
        self._before: dict[str, int] | None = None  # launches so far, while the path is in force

    # --- forcing and counting

    def force_kernels(self, wanted: str) -> None:
        """Stands for flashkernel.force_kernels: calls while a test forces kernels itself do not count for the path."""
        self.count()
        self._force(wanted)
        self._before = {x.id: x.calls for x in fk.kernels()} if fk.forced_kernels() == self.patterns else None

    def count(self) -> None:
        if self._before is not None:
            now = {x.id: x.calls for x in fk.kernels()}
            self.served.update({name: calls - self._before[name] for name, calls in now.items()})
            self._before = now

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """For tests that choose kernels themselves, or that count what is chosen."""
        os.environ.pop("FLASHKERNEL_FORCE", None)
        self.force_kernels("")
        try:
            yield
        finally:
            self.put_in_force()

    def put_in_force(self) -> None:
        os.environ["FLASHKERNEL_FORCE"] = self.patterns  # for processes that tests start
        self.force_kernels(self.patterns)

    # --- pytest's hooks

    def pytest_sessionstart(self) -> None:
        fk.force_kernels = flashkernel.ops.force_kernels = self.force_kernels
        self.put_in_force()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves out what is known to run on another backend: its kernels are as free as without the option."""
        kept: list[pytest.Item] = []
        left: list[pytest.Item] = []
        for item in items:
            parameters = getattr(getattr(item, "callspec", None), "params", {})
            framework = parameters.get("make", parameters.get("framework"))
            backend = BACKENDS.get(framework) if isinstance(framework, str) else None
            (kept if backend in (None, self.path.split("/")[0]) else left).append(item)
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = kept

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.served.update(getattr(node, "workeroutput", {}).get("kernel_path", {}))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.count()
        self._before = None
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["kernel_path"] = dict(self.served)
        elif not self.by_op() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def by_op(self) -> dict[str, int]:
        ops: Counter[str] = Counter()
        for kernel, calls in self.served.items():
            if calls and on_path(kernel, self.path):
                ops[kernel.split("/")[0]] += calls
        return dict(sorted(ops.items()))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        backend, ops = self.path.split("/")[0], self.by_op()
        others = sum(n for kernel, n in self.served.items() if kernel.split("/")[1] == backend) - sum(ops.values())
        kernels = sum(1 for kernel, n in self.served.items() if n and on_path(kernel, self.path))
        terminalreporter.write_line(
            f"kernel path {self.path}: served {sum(ops.values())} calls by {kernels} kernels, {others} fell back"
            + (f"; {', '.join(f'{op} {n}' for op, n in ops.items())}" if ops else ": the path was never taken, FAILED")
        )
