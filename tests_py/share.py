"""`pytest --share N`: one in N of the cases of a test that has many, and no test marked `long`: .ci/run at a commit.

Registered by conftest.py when the option is given. A test function of up to SMALL cases keeps all of them. Which cases
of the others stay depends on the function's name alone, so that workers agree and a failure comes again. The rest is
reported as deselected; `bash scripts/test.sh` runs everything.
"""

from __future__ import annotations

import zlib

import pytest

SMALL = 6


def keep(function: str, count: int, share: int) -> list[bool]:
    """Which of `count` cases stay: every share-th one, at least one."""
    if count <= SMALL:
        return [True] * count
    first = zlib.crc32(function.encode()) % min(share, count)
    return [i % share == first for i in range(count)]


class Share:
    def __init__(self, share: int) -> None:
        self.share = share

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        functions: dict[str, list[pytest.Item]] = {}
        for item in items:
            functions.setdefault(item.nodeid.split("[")[0], []).append(item)
        dropped = set()
        for name, cases in functions.items():
            stays = keep(name, len(cases), self.share)
            dropped |= {case for case, stay in zip(cases, stays, strict=True) if not stay}
        dropped |= {item for item in items if item.get_closest_marker("long")}
        if dropped:
            items[:] = [item for item in items if item not in dropped]
            config.hook.pytest_deselected(items=list(dropped))
