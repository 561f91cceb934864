"""A program: every op with an index array, while another thread writes it without pause, in range and far out of it.

A call may refuse, and otherwise gives what it gives for the values in range: it must not use a value that it has not
checked. Prints how often each did; a fault of memory ends the process.
"""

from __future__ import annotations

import sys
import threading
import time

import numpy as np

import flashkernel as fk
from op_calls import OpCall, op_calls

# Integers that are numbers, not places: any value is served, or gives another result.
NUMBERS = {"history", "seed", "k_pages", "v_pages", "weight"}
# In-kernel angles take any position: there is no range to leave.
ANY = {("rope", "positions"), ("kv_append_with_rope", "positions")}
# Numbers whose row is walked until a sum of theirs is reached: any token of the row is served.
WALKED = {("sample", "logits")}
PASS = 20000  # writes of each element in one call of NumPy, which lets other Python threads run meanwhile
SECONDS = float(sys.argv[1])


def write_without_pause(indices: np.ndarray, good: np.ndarray, stop: threading.Event) -> None:
    rng = np.random.default_rng(0)
    far = 2**30 if indices.dtype == np.int32 else 2**40 if indices.dtype == np.int64 else 1e4
    pattern = np.broadcast_to(good, (PASS, *good.shape)).copy()
    pattern[rng.random(PASS) < 0.5] = far
    pattern[rng.random(PASS) < 0.1] = -far  # a slot to skip, elsewhere a fault
    pattern[-1] = good
    again = np.lib.stride_tricks.as_strided(indices, pattern.shape, (0, *indices.strides))
    while not stop.is_set():
        again[...] = pattern


def stress(call: OpCall, name: str) -> tuple[int, int]:
    want = call.results(call.arguments())
    arguments = call.arguments()
    stop, served, refused = threading.Event(), 0, 0
    writer = threading.Thread(target=write_without_pause, args=(arguments[name], call.arguments()[name], stop))
    writer.start()
    end = time.monotonic() + SECONDS
    try:
        while time.monotonic() < end:
            try:
                got = call.results(arguments)
            except ValueError:
                refused += 1
                continue
            served += 1
            if (call.name, name) in WALKED:
                vocab = arguments[name].shape[1]
                assert (got[0] >= -vocab).all() and (got[0] < vocab).all(), got[0]
                continue
            if name == "slots":  # a negative slot is skipped, so pages may lack tokens
                continue
            for ours, theirs in zip(got, want, strict=True):
                assert ours.tobytes() == theirs.tobytes(), f"{call.name}: {name} changed, and the result is of neither"
    finally:
        stop.set()
        writer.join()
    return served, refused


fk.set_num_threads(1)
for call in op_calls():
    for name, value in call.inputs.items():
        is_number = value.dtype.itemsize == 1 or name in NUMBERS  # bytes are elements of 8 and 4 bits
        is_index = value.dtype.kind in "iu" and not is_number and (call.name, name) not in ANY
        if is_index or (call.name, name) in WALKED:
            print(call.name, name, *stress(call, name), flush=True)
