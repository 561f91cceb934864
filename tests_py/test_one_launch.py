"""A decode step as one op: against the oracle, what it refuses, and the engine's tokens with it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flashkernel as fk
from flashkernel import reference, selfcheck, testing
from flashkernel.generate import Engine, UnsupportedModelError
from flashkernel.generate.arrays import HostArrays, TorchArrays
from test_scheduler import KINDS, PROMPTS, STOP, llama

DEVICES = ["cpu", *(["cuda"] if fk.num_cuda_devices() else [])]
# CUDA kernels of it are of 16-bit dtypes.
CALLS = [(d, t) for d in DEVICES for t in selfcheck.DTYPES if (d, t) != ("cuda", "float32")]


@pytest.mark.parametrize("device, dtype", CALLS)
def test_it_is_the_ops_one_after_another(device: str, dtype: str) -> None:
    inputs = selfcheck.Inputs(dtype, device, as_torch=device == "cuda")
    for got, truth in selfcheck.decode_step(inputs):
        testing.assert_close(inputs.get(got), truth, dtype)


def arguments() -> dict[str, Any]:
    """Two rows through one layer of 4, a head of 4."""
    rng = np.random.default_rng(0)

    def f(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "tokens": np.array([2, 0]), "positions": np.array([5, 0]), "slots": np.array([21, -1]),
        "block_table": np.array([[1], [-1]], np.int32), "seq_lens": np.array([6, 0]), "embedding": f(3, 4),
        "norms": f(3, 4), "qkv_weight": f(1, 16, 4), "out_weight": f(1, 4, 8), "gate_up_weight": f(1, 10, 4),
        "down_weight": f(1, 4, 5), "head_weight": f(7, 4), "inv_freq": f(2), "k_pages": f(1, 2, 16, 1, 4),
        "v_pages": f(1, 2, 16, 1, 4),
    }  # fmt: skip


def test_a_row_without_a_sequence_sees_and_writes_nothing() -> None:
    given = arguments()
    before = given["k_pages"].copy()
    logits = fk.decode_step(**given)
    truth, keys, _ = reference.decode_step(**arguments())
    np.testing.assert_allclose(logits, truth, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(given["k_pages"], keys, rtol=1e-5, atol=1e-6)
    changed = np.argwhere((given["k_pages"] != before).any(axis=(3, 4)))
    assert changed.tolist() == [[0, 1, 5]]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": np.array([3, 0])}, r"tokens\[0\]=3.*embedding.shape\[0\]"),
        ({"slots": np.array([32, 0])}, r"slots\[0\]=32.*num_pages \* page_size"),
        ({"seq_lens": np.array([17, 0])}, r"seq_lens\[0\]=17; 0 to 16 tokens fit the block table"),
        ({"seq_lens": np.array([6, 1])}, r"block_table\[1, 0\]=-1; needs 0..1"),
        ({"out_weight": np.zeros((1, 4, 6), np.float32)}, r"out_weight.shape\[2\]=6; a multiple of heads_kv"),
        ({"norms": np.zeros((2, 4), np.float32)}, r"norms.shape\[0\]=2 .*2 layers \+ 1"),
        ({"inv_freq": np.zeros(3, np.float32)}, r"inv_freq.shape\[0\]=3"),
        ({"down_weight": np.zeros((1, 4, 6), np.float32)}, r"gate_up_weight.shape\[1\]=10"),
        ({"head_weight": np.zeros((7, 4), np.float16)}, "head_weight is float16"),
        ({"out": np.zeros((2, 6), np.float32)}, r"logits.shape\[1\]=6|out.shape\[1\]=6"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    given = {**arguments(), **changes}
    before = given["k_pages"].copy()
    with pytest.raises(ValueError, match=rf"^decode_step: {message}"):
        fk.decode_step(**given)
    np.testing.assert_array_equal(given["k_pages"], before)  # refused before anything is written


@pytest.mark.parametrize("arrays", [HostArrays, TorchArrays])
@pytest.mark.parametrize("kind", ["greedy", "everything"])
def test_the_engine_gives_the_same_tokens(arrays: type[HostArrays], kind: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 30, "sampling": KINDS[kind], "stop_tokens": STOP}
    found: list[list[tuple[int, int]]] = []
    for one_launch in (False, True):
        model = llama(arrays())
        engine = Engine(model, page_size=16, one_launch=one_launch, max_batch=4)
        found.append(sorted((event.sequence, event.token) for event in engine.generate(PROMPTS, **options)))
        if one_launch:  # a larger cache takes the same stacks
            weights = model.piled
            engine.reserve(5000)
            assert model.piled is weights and engine.score(PROMPTS[1]).shape == (len(PROMPTS[1]) - 1,)
    assert found[0] == found[1]


def test_another_engine_keeps_the_matrices_that_its_graphs_name() -> None:
    model = llama(HostArrays())
    first = Engine(model)
    first.reserve(100)
    old = weakref.ref(model.layers[0].qkv_weight)
    second = Engine(model, one_launch=True)
    second.reserve(100)
    assert model.layers[0].qkv_weight.base is not None and old() is not None
    del first
    gc.collect()
    assert old() is None


def test_models_that_it_does_not_compute() -> None:
    model = llama(HostArrays())
    model.layers[1].q_norm = model.norm
    with pytest.raises(UnsupportedModelError, match=r"^generate: one_launch=True with norms of q, k or results; "):
        Engine(model, one_launch=True).reserve(100)
    with pytest.raises(UnsupportedModelError, match=r"^generate: one_launch=True with a cache of int8; "):
        Engine(llama(HostArrays()), one_launch=True, kv_dtype="int8").reserve(100)
