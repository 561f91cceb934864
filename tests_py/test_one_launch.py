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
from flashkernel.generate.one_launch import pays
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
        ({"eps": -1.0}, "eps=-1.*needs a finite number, 0 or more"),
        ({"scale": float("nan")}, "scale=.*nan; needs a finite number"),
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


@pytest.mark.parametrize("arrays", [HostArrays, TorchArrays])
def test_an_engine_takes_it_on_the_cpu(arrays: type[HostArrays], monkeypatch: pytest.MonkeyPatch) -> None:
    def steps_by_it(model: Any, **options: Any) -> bool:
        engine = Engine(model, **options)
        before = next(kernel.calls for kernel in fk.kernels() if kernel.id == "decode_step/cpu/composed")
        list(engine.generate([[1, 2, 3]] * 9, max_new_tokens=3))  # more rows than a launch on a GPU takes
        return next(kernel.calls for kernel in fk.kernels() if kernel.id == "decode_step/cpu/composed") > before

    assert steps_by_it(llama(arrays()))
    assert not steps_by_it(llama(arrays()), one_launch=False)
    assert not steps_by_it(llama(arrays()), kv_dtype="int8")
    other = llama(arrays())
    other.softcap = 30.0
    assert not steps_by_it(other)
    monkeypatch.setattr("flashkernel.generate.one_launch.MOST_BYTES", 1000)
    assert not steps_by_it(llama(arrays()))


def test_gpus_that_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the model's arrays say that they are on one of this compute capability, with so much memory."""

    def pays_on(capability: tuple[int, int], dtype: str = "bfloat16", free: int = 1 << 30, **changes: Any) -> bool:
        model = llama(TorchArrays(dtype))
        model.arrays.asynchronous, model.head_dim = True, 64
        for layer in model.layers:
            layer.rope.rotary_dim = 64
        model.embedding = np.zeros((1, changes.get("hidden", 64)))
        model.inner = changes.get("inner", 96)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 40))
        return pays(model, dtype)

    assert pays_on((9, 0)) and pays_on((9, 0), "float16")
    assert not pays_on((8, 0)) and not pays_on((10, 0))
    assert not pays_on((9, 0), "float32")
    assert not pays_on((9, 0), hidden=80) and not pays_on((9, 0), inner=80)
    assert not pays_on((9, 0), free=100)


def by_the_ops(given: dict[str, Any], heads_q: int, **options: Any) -> np.ndarray:
    """What `decode_step` computes, op by op as decoder_model.py does."""
    k_pages, v_pages, norms = given["k_pages"], given["v_pages"], given["norms"]
    heads_kv, head_dim = k_pages.shape[3:]
    inner = given["down_weight"].shape[2]
    residual = given["embedding"][given["tokens"]]
    x = fk.rms_norm(residual, norms[0], eps=1e-6, **options)
    for i in range(len(k_pages)):
        qkv = fk.linear(x, given["qkv_weight"][i], **options).reshape(len(x), heads_q + 2 * heads_kv, head_dim)
        q, k, v = np.split(qkv, [heads_q, heads_q + heads_kv], axis=1)
        rope: Any = {"positions": given["positions"], "q": q, "q_out": q, "inv_freq": given["inv_freq"]}
        fk.kv_append(k, v, k_pages[i], v_pages[i], given["slots"], rope=rope, **options)
        pages = k_pages[i], v_pages[i], given["block_table"], given["seq_lens"]
        x = fk.attention_paged(q[:, :, None], *pages, causal=True, **options).reshape(len(x), heads_q * head_dim)
        x = fk.linear(x, given["out_weight"][i], **options)
        x, residual = fk.rms_norm(x, norms[2 * i + 1], residual=residual, eps=1e-6, **options)
        x = fk.linear(x, given["gate_up_weight"][i], **options)
        x = fk.linear(fk.swiglu(x[:, :inner], x[:, inner:], **options), given["down_weight"][i], **options)
        x, residual = fk.rms_norm(x, norms[2 * i + 2], residual=residual, eps=1e-6, **options)
    return fk.linear(x, given["head_weight"], **options)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", selfcheck.DTYPES)
def test_on_the_cpu_its_bits_are_those_of_the_ops(dtype: str, threads: int) -> None:
    arrays = HostArrays(dtype)
    before = fk.get_num_threads()
    fk.set_num_threads(threads)
    try:
        for rows in (1, 3, 8):
            rng = np.random.default_rng(rows)

            def f(*shape: int, rng: np.random.Generator = rng) -> Any:
                return arrays.weight(rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5)

            lengths = np.arange(rows) * 19 % 48 + 1
            given = {
                "tokens": np.arange(rows), "positions": lengths - 1,
                "slots": np.arange(rows) * 48 + lengths - 1, "seq_lens": lengths,
                "block_table": np.arange(3 * rows, dtype=np.int32).reshape(rows, 3), "embedding": f(9, 192),
                "norms": f(5, 192), "qkv_weight": f(2, 512, 192), "out_weight": f(2, 192, 256),
                "gate_up_weight": f(2, 1024, 192), "down_weight": f(2, 192, 512), "head_weight": f(801, 192),
                "inv_freq": rng.random(32).astype(np.float32), "k_pages": f(2, 3 * rows, 16, 2, 64),
                "v_pages": f(2, 3 * rows, 16, 2, 64),
            }  # fmt: skip
            other = {**given, "k_pages": given["k_pages"].copy(), "v_pages": given["v_pages"].copy()}
            step: Any = fk.decode_step
            np.testing.assert_array_equal(
                step(**given, eps=1e-6, **arrays.op_options), by_the_ops(other, 4, **arrays.op_options)
            )
            for name in ("k_pages", "v_pages"):
                np.testing.assert_array_equal(given[name], other[name])
    finally:
        fk.set_num_threads(before)


def test_another_engine_keeps_the_matrices_that_its_graphs_name() -> None:
    model = llama(HostArrays())
    first = Engine(model, one_launch=False)
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
