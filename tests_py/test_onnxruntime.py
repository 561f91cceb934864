"""The custom operator of ONNX Runtime, in real sessions, beside attention written with NumPy.

Needs onnx and onnxruntime, and the module: `bash scripts/test_onnxruntime.sh` builds it, where ONNX Runtime's headers
are, and runs this file with FLASHKERNEL_ONNXRUNTIME, the module's file.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

if "FLASHKERNEL_ONNXRUNTIME" not in os.environ:
    pytest.skip(
        "FLASHKERNEL_ONNXRUNTIME is not set (scripts/test_onnxruntime.sh builds the module)", allow_module_level=True
    )

import onnxruntime as ort
from onnx import TensorProto, helper

LIBRARY = os.environ["FLASHKERNEL_ONNXRUNTIME"]


def session(kind: int = TensorProto.FLOAT, rank: int = 4, **attributes: Any) -> ort.InferenceSession:
    """A model of one node, with shapes that are known when it runs."""
    values = [helper.make_tensor_value_info(name, kind, [None] * rank) for name in ("q", "k", "v", "out")]
    node = helper.make_node("Attention", ["q", "k", "v"], ["out"], domain="flashkernel", **attributes)
    graph = helper.make_graph([node], "graph", values[:3], values[3:])
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("flashkernel", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=8)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(LIBRARY)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def arrays(dtype: Any = np.float32, queries: int = 9, keys: int = 21) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(queries)
    shapes = {"q": (2, 4, queries, 32), "k": (2, 2, keys, 32), "v": (2, 2, keys, 16)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: int = 0, window_left: int = -1, softcap: float = 0.0,
    scale: float | None = None,
) -> np.ndarray:  # fmt: skip
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    scores = np.einsum("bhid,bhjd->bhij", q, k.repeat(groups, 1)) * (
        1 / np.sqrt(q.shape[-1]) if scale is None else scale
    )
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    place = np.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]  # the last query stands at the last key
    key = np.arange(k.shape[2])[None]
    hidden = np.zeros((q.shape[2], k.shape[2]), bool)
    if causal:
        hidden |= key > place
    if window_left >= 0:
        hidden |= key < place - window_left
    weights = np.exp(np.where(hidden, -np.inf, scores - scores.max(-1, keepdims=True)))
    return np.einsum("bhij,bhjd->bhid", weights / weights.sum(-1, keepdims=True), v.repeat(groups, 1))


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": 1}, {"causal": 1, "window_left": 5}, {"softcap": 2.0}, {"scale": 0.5}, {"scale": 0.0}],
)
def test_float32(options: dict[str, Any]) -> None:
    model = session(**options)
    for queries, keys in ((9, 21), (1, 64), (33, 33)):  # one session, several shapes
        given = arrays(queries=queries, keys=keys)
        (out,) = model.run(None, given)
        assert out.dtype == np.float32 and np.abs(out - attention(**given, **options)).max() < 5e-6


def test_float16() -> None:
    given = arrays(np.float16)
    (out,) = session(TensorProto.FLOAT16, causal=1).run(None, given)
    assert out.dtype == np.float16 and np.abs(out - attention(**given, causal=1)).max() < 2e-3


def test_bfloat16() -> None:
    given = {name: (x.view(np.uint32) >> 16).astype(np.uint16) for name, x in arrays().items()}
    exact = {name: (x.astype(np.uint32) << 16).view(np.float32) for name, x in given.items()}
    model = session(TensorProto.BFLOAT16)
    binding = model.io_binding()
    for name, bits in given.items():
        value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
        binding.bind_ortvalue_input(name, value)
    out = np.zeros((2, 4, 9, 16), np.uint16)
    result = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(out, TensorProto.BFLOAT16)
    binding.bind_ortvalue_output("out", result)
    model.run_with_iobinding(binding)
    found = (out.astype(np.uint32) << 16).view(np.float32)
    assert np.abs(found - attention(**exact)).max() < 2e-2 and np.abs(found).max() > 0.1


def test_what_the_library_refuses_is_the_sessions_error() -> None:
    given = arrays()
    given["k"] = given["k"][..., :8]
    with pytest.raises(Exception, match="head dims must match"):
        session().run(None, given)
    three = {name: x[0] for name, x in arrays().items()}
    with pytest.raises(Exception, match="q has 3 dims; 4"):
        session(rank=3).run(None, three)


@pytest.mark.parametrize(
    ("options", "needed"),
    [({"causal": 1.0}, "an integer"), ({"causal": "yes"}, "an integer"), ({"softcap": 2}, "a float")],
)
def test_an_attribute_of_another_type_is_refused(options: dict[str, Any], needed: str) -> None:
    with pytest.raises(Exception, match=f"{next(iter(options))} is .*; {needed} is needed"):
        session(**options)


def test_sessions_side_by_side() -> None:
    given = arrays()
    first, second = session(causal=1), session()
    for model, causal in ((first, 1), (second, 0), (first, 1)):
        (out,) = model.run(None, given)
        assert np.abs(out - attention(**given, causal=causal)).max() < 2e-6
