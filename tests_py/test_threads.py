"""Classes that are called thread-safe, used by threads: every public method beside every other one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import flashkernel as fk

PAGE_SIZE = 16
TOKENS = list(range(3 * PAGE_SIZE + 1))


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Shared:
    """A pool and a cache that two threads use, with one sequence that both of them change."""

    def __init__(self) -> None:
        self.pool = fk.KvPagePool(256, 1, 4, page_size=PAGE_SIZE, dtype="float32")
        self.cache = fk.KvCache(self.pool)
        self.sequence = self.cache.create()
        self.page = self.pool.take()

    def append(self) -> None:
        """Grows by many pages at once, and starts again where the pool is full: sizes asked for before don't hold."""
        try:
            slots = self.cache.append(self.sequence, 31 * PAGE_SIZE + 5)
            assert slots.shape == (31 * PAGE_SIZE + 5,) and len(np.unique(slots)) == len(slots)
        except fk.OutOfPagesError:
            self.truncate()

    def truncate(self) -> None:
        try:
            self.cache.truncate(self.sequence, self.cache.length(self.sequence) // 3)
        except ValueError as error:  # what another thread dropped or truncated since
            assert "KvCache.truncate" in str(error)

    def drop_before(self) -> None:
        try:
            self.cache.drop_before(self.sequence, min(PAGE_SIZE, self.cache.length(self.sequence)))
        except ValueError as error:
            assert "KvCache.drop_before" in str(error)

    def publish(self) -> None:
        own = self.cache.create(TOKENS)
        try:
            self.cache.append(own, len(TOKENS) - self.cache.length(own))
            self.cache.publish(own, TOKENS)
        except fk.OutOfPagesError:
            pass
        self.cache.free(own)

    def fork(self) -> None:
        self.cache.free(self.cache.fork(self.sequence))

    def pages(self) -> None:
        pages = self.cache.pages(self.sequence)
        assert pages.dtype == np.int32 and (pages >= -1).all() and (pages < 256).all()
        kept = pages[pages >= 0]
        assert len(np.unique(kept)) == len(kept)

    def block_table(self) -> None:
        table, lengths = self.cache.block_table([self.sequence])
        used = -(-int(lengths[0]) // PAGE_SIZE)
        assert table.shape[1] >= used and (table[0, used:] == -1).all() and (table < 256).all()

    def length(self) -> None:
        assert self.cache.length(self.sequence) >= 0

    def num_pages(self) -> None:
        assert 0 <= self.cache.num_pages(self.sequence) <= 256

    def drop_cached(self) -> None:
        assert self.cache.drop_cached() >= 0

    def stats(self) -> None:
        stats = self.cache.stats()
        assert stats.num_pages_used + stats.num_pages_cached <= 256 and "num_sequences" in repr(stats)

    def pool_of_the_cache(self) -> None:
        assert self.cache.pool.num_pages == 256

    def take_and_give_back(self) -> None:
        try:
            page = self.pool.take()
        except fk.OutOfPagesError:
            return
        self.pool.give_back(page)

    def take_many(self) -> None:
        try:
            pages = self.pool.take_many(20)
        except fk.OutOfPagesError:
            return
        assert len(set(pages)) == 20
        for page in pages:
            self.pool.give_back(page)

    def retain(self) -> None:
        self.pool.retain(self.page)
        assert self.pool.num_references(self.page) >= 1
        self.pool.give_back(self.page)

    def arrays(self) -> None:
        shape = (256, PAGE_SIZE, 1, 4)
        assert self.pool.k_pages().shape == self.pool.v_pages().shape == shape and self.pool.scales() is None

    def counts(self) -> None:
        assert 0 <= self.pool.num_free <= 256 and 0 <= self.pool.num_used <= 256 and "KvPagePool" in repr(self.pool)

    def memory_stats(self) -> None:
        assert fk.memory_stats().allocated_bytes > 0

    def registry(self) -> None:
        assert fk.kernels() and fk.forced_kernels() == ""

    def force(self) -> None:
        fk.force_kernels("")

    def threads(self) -> None:
        fk.set_num_threads(1 + fk.get_num_threads() % 2)

    def read(self) -> None:
        pages = self.pool.k_pages(), self.pool.v_pages()
        fk.kv_read(*pages, np.array([[self.page]], np.int32), np.array([PAGE_SIZE]))


METHODS = sorted(name for name in vars(Shared) if not name.startswith("_"))


def beside(first: Callable[[], None], second: Callable[[], None], seconds: float) -> None:
    """Runs both again and again for a while, in a thread each; their first exception is raised here."""
    end, errors = time.monotonic() + seconds, []

    def work(method: Callable[[], None]) -> None:
        try:
            while time.monotonic() < end and not errors:
                method()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(method,)) for method in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_every_method_is_in_the_table() -> None:
    """A new method of a class that is called thread-safe belongs above."""
    public = {name for cls in (fk.KvCache, fk.KvPagePool) for name in vars(cls) if not name.startswith("_")}
    constants = {"num_pages", "page_size", "num_layers", "heads_kv", "head_dim", "head_dim_v", "dtype", "device"}
    by_another_name = {"pool", "create", "free", "take", "give_back", "k_pages", "v_pages", "scales"} | {
        "k_layers", "v_layers", "num_references", "num_free", "num_used"
    }  # fmt: skip
    assert public - constants - by_another_name <= set(METHODS)
    for cls in (fk.KvCache, fk.KvPagePool):
        assert "Thread-safe" in (cls.__doc__ or "")


@pytest.mark.parametrize("first", METHODS)
def test_every_method_beside_every_other(first: str) -> None:
    threads = fk.get_num_threads()
    try:
        for second in METHODS:
            shared = Shared()
            beside(getattr(shared, first), getattr(shared, second), 0.02)
            shared.cache.free(shared.sequence)
            shared.cache.drop_cached()
            assert shared.pool.num_used == 1
    finally:
        fk.set_num_threads(threads)


@pytest.mark.parametrize(("reader", "writer"), [*itertools.product(["pages", "block_table"], ["append", "truncate"])])
def test_a_sequence_is_read_while_it_grows(reader: str, writer: str) -> None:
    shared = Shared()

    def write() -> None:
        shared.append()
        getattr(shared, writer)()

    beside(getattr(shared, reader), write, 0.5)


FIRST_CALLS = """
import faulthandler, sys, threading, time, types
import numpy as np
import {framework} as framework
import flashkernel as fk

faulthandler.dump_traceback_later(60, exit=True)
empty = framework.empty
x = framework.ones(4, dtype=framework.float32)


class Slow(types.ModuleType):
    @property
    def empty(self):
        time.sleep(0.3)  # without the GIL, so that the other thread's first call comes to the same place
        return empty


framework.__class__ = Slow
results = []
threads = [threading.Thread(target=lambda: results.append(fk.add(x, x).tolist())) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert results == [[2.0] * 4] * 2, results
"""


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_two_first_calls_at_once_do_not_wait_for_one_another(framework: str) -> None:
    """What an op looks up in the framework it looks up at its first call: Python code, which lets others run."""
    pytest.importorskip(framework)
    program = FIRST_CALLS.format(framework=framework)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]


TINY_CALLS = """
import os, sys
import numpy as np
import flashkernel as fk
sys.path.insert(0, {folder!r})
from op_calls import op_calls

def threads():
    return len(os.listdir("/proc/self/task"))

fk.set_num_threads(4)
before = threads()
for call in op_calls():
    call.results(call.arguments())
    assert threads() == before, f"{{call.name}} started a thread"
x = np.ones((1 << 11, 1 << 10), np.float32)
fk.add(x, x)
assert threads() == before + 3, "a large call has its threads"
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
def test_no_op_wakes_a_thread_for_a_tiny_call() -> None:
    """To wake one takes longer than such a call."""
    program = TINY_CALLS.format(folder=str(Path(__file__).parent))
    environment = {name: value for name, value in os.environ.items() if name != "FLASHKERNEL_STEPS_PER_THREAD"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
