"""Processes that fork, and processes that get no more threads: a child of any moment works, and so does one thread."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fork() beside threads, and glibc's thread attributes")

OPS = """
import numpy as np, flashkernel as fk

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 4, 64, 32)).astype(np.float32) for _ in range(3))
x, w = rng.standard_normal((64, 96)).astype(np.float32), np.ones(96, np.float32)
weight = rng.standard_normal((48, 96)).astype(np.float32)
pool = fk.KvPagePool(64, 1, 8, page_size=16, dtype="float32")
cache = fk.KvCache(pool)

def use_cache():
    sequence = cache.create()
    slots = cache.append(sequence, 20)
    other = cache.fork(sequence)
    cache.append(other, 5)
    table, lengths = cache.block_table([sequence, other])
    assert lengths.tolist() == [20, 25] and len(cache.pages(other)) == 2 and len(slots) == 20
    cache.free(sequence)
    cache.free(other)

def results():
    return [fk.attention(q, k, v, causal=True), fk.attention(q, k, v), fk.rms_norm(x, w), fk.softmax(x),
            fk.linear(x, weight), fk.cross_entropy(x, np.arange(64) % 96)]

def same(a, b):
    return all(np.array_equal(one, other) for one, other in zip(a, b))
"""


def run(program: str, timeout: float = 240) -> str:
    done = subprocess.run(
        [sys.executable, "-c", OPS + textwrap.dedent(program)], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_child_of_any_moment_works(threads: int) -> None:
    """150 children of a process whose other threads are inside the library; one that hangs is killed by a signal."""
    program = f"""
        import os, signal, threading

        fk.set_num_threads({threads})
        expected, stop = results(), False

        def work(body):
            while not stop:
                body()

        bodies = [results, results, use_cache, lambda: fk.rms_norm(x, w), lambda: fk.force_kernels(""), fk.kernels]
        workers = [threading.Thread(target=work, args=(body,)) for body in bodies]
        for worker in workers:
            worker.start()
        statuses = []
        for _ in range(150):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                use_cache()
                ok = same(results(), expected) and fk.kernels() and fk.memory_stats().allocated_bytes >= 0
                os._exit(0 if ok else 1)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            if statuses[-1] == -signal.SIGALRM:
                break  # a few of these would take longer than anybody waits
        stop = True
        for worker in workers:
            worker.join()
        assert set(statuses) == {{0}}, (len(statuses), statuses[-1])
        print("good")
    """
    assert run(program) == "good\n"


def test_multiprocessing_by_fork() -> None:
    program = """
        import multiprocessing, threading

        expected, stop = results(), threading.Event()

        def work():
            while not stop.is_set():
                use_cache()
                results()

        def job(i):
            use_cache()
            return same(results(), expected)

        worker = threading.Thread(target=work)
        worker.start()
        with multiprocessing.get_context("fork").Pool(2) as processes:
            good = processes.map_async(job, range(8)).get(timeout=120)
        stop.set()
        worker.join()
        assert all(good) and len(good) == 8
        print("good")
    """
    assert run(program) == "good\n"


def test_no_more_threads_to_be_had() -> None:
    """The system refuses threads (stacks of 64 TiB, which not even root gets): ops run with those that are there."""
    program = """
        import ctypes, os

        pthread, attributes = ctypes.CDLL(None), (ctypes.c_char * 256)()

        def set_stack_bytes(count):
            assert pthread.pthread_attr_init(attributes) == 0
            assert pthread.pthread_attr_setstacksize(attributes, ctypes.c_size_t(count)) == 0
            assert pthread.pthread_setattr_default_np(attributes) == 0

        def num_tasks():
            return len(os.listdir("/proc/self/task"))

        fk.set_num_threads(1)
        alone, before = results(), num_tasks()
        for wanted in (2, 4):  # none of the pool's threads, then one of three
            fk.set_num_threads(wanted)
            set_stack_bytes(1 << 56)
            assert same(results(), alone)
            present = num_tasks() - before
            assert present == (0 if wanted == 2 else 1), present
            use_cache()
            set_stack_bytes(8 << 20)
            fk.set_num_threads(2)
            for _ in range(1001):
                fk.attention(q, k, v)  # after some time the pool asks again
            assert same(results(), alone) and num_tasks() - before == 1
        fk.set_num_threads(4)
        for _ in range(1001):
            fk.attention(q, k, v)
        assert same(results(), alone) and num_tasks() - before == 3
        print("good")
    """
    assert run(program) == "good\n"
