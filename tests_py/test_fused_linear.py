"""fused_linear and qkv_append against the oracle and the ops that they stand for; refusals; steps made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashkernel as fk
from conftest import FRAMEWORKS, TRITON, Maker, f64
from flashkernel import reference

ROUNDINGS = 3  # of the norm, the product and what follows it
PARTS: dict[str, dict[str, Any]] = {
    "rms": {"norm": "rms"},
    "layer": {"norm": "layer", "bias": True, "norm_bias": True, "activation": "gelu_tanh"},
    "swiglu": {"norm": "rms", "activation": "swiglu"},
    "residual": {"bias": True, "residual": True},
    "all": {"norm": "layer", "bias": True, "activation": "swiglu", "residual": True},
}


@pytest.fixture(params=[framework for framework in FRAMEWORKS if framework is not TRITON])
def make(request, dtype) -> Maker:
    return Maker(request.param, dtype)


def arguments(make: Any, rows: int, inner: int, out: int, parts: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    features = 2 * out if parts.get("activation") == "swiglu" else out
    given = [
        make.normal(rows, inner),
        make.normal(features, inner),
        make.normal(features) if parts.get("bias") else None,
        make.normal(inner) if "norm" in parts else None,
        make.normal(inner) if parts.get("norm_bias") else None,
        make.normal(rows, out) if parts.get("residual") else None,
    ]
    return given, {"norm": parts.get("norm", "rms"), "activation": parts.get("activation"), "eps": 1e-5}


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("rows", [1, 19])
def test_values(make, parts, rows):
    given, options = arguments(make, rows, 64, 24, PARTS[parts])
    expected = reference.fused_linear(*(None if x is None else f64(x) for x in given), **options)
    make.check(fk.fused_linear(*given, **options, **make.kwargs), expected, scale=ROUNDINGS * np.abs(expected).max())


@pytest.mark.parametrize("rows", [2, 19])
def test_bits_of_the_ops_on_the_cpu(rows):
    """The composed call is those ops, whatever they round."""
    random = np.random.default_rng(0)
    x, weight, norm, residual = (
        random.standard_normal(shape).astype(np.float16) for shape in ((rows, 64), (96, 64), 64, (rows, 48))
    )
    got = fk.fused_linear(x, weight, None, norm, None, residual, activation="swiglu", eps=1e-5)
    product = fk.linear(fk.rms_norm(x, norm, eps=1e-5), weight)
    np.testing.assert_array_equal(got, fk.add(fk.swiglu(product[:, :48], product[:, 48:]), residual))
    assert fk.fused_linear(x, weight[:48], residual=residual, out=residual) is residual


def test_refusals():
    x, weight, norm = np.ones((2, 8), np.float32), np.ones((6, 8), np.float32), np.ones(8, np.float32)
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((x, weight[:5]), {"activation": "swiglu"}, r"weight.shape\[0\]=5 with gated"),
        ((x, weight), {"activation": "geglu"}, "activation='geglu'; None, "),
        ((x, weight), {"norm": "batch"}, "norm='batch'; 'rms' or 'layer' is needed"),
        ((x, weight, None, None, norm), {"norm": "layer"}, "norm_bias is given without a LayerNorm"),
        ((x, weight, None, norm, norm), {}, "norm_bias is given without a LayerNorm"),
        ((x, weight, None, norm[:5]), {}, r"norm_weight.shape\[0\]=5"),
        ((x, weight, np.ones(5, np.float32)), {}, r"bias.shape\[0\]=5"),
        ((x, weight, None, None, None, x), {}, r"residual.shape\[1\]=8"),
        ((x, weight[:, :7]), {}, r"weight.shape\[1\]=7"),
        ((x, weight.astype(np.float16)), {}, "weight is float16"),
        ((x, weight), {"out": np.ones((2, 5), np.float32)}, r"out.shape\[1\]=5"),
    ]
    for positional, options, message in cases:
        with pytest.raises(ValueError, match=f"^fused_linear: {message}"):
            fk.fused_linear(*positional, **options)


def test_gradients():
    """Of each part, beside those of the ops one after the other."""
    torch = pytest.importorskip("torch")
    import flashkernel.torch as fkt

    torch.manual_seed(0)
    for norm, activation in (("rms", "swiglu"), ("layer", "gelu"), (None, None)):
        made = [torch.randn(3, 16), torch.randn(12, 16), torch.randn(12), torch.randn(16), torch.randn(16)]
        made.append(torch.randn(3, 6 if activation == "swiglu" else 12))
        used = [i for i in range(6) if norm == "layer" or (i != 4 and (norm or i != 3))]
        leaves = [x.clone().requires_grad_() if i in used else None for i, x in enumerate(made)]
        twins = [None if x is None else x.detach().clone().requires_grad_() for x in leaves]
        out = fkt.fused_linear(*leaves, norm=norm or "rms", eps=1e-5, activation=activation)
        x, weight, bias, norm_weight, norm_bias, residual = twins
        if norm == "layer":
            x = fkt.layer_norm(x, norm_weight, norm_bias, eps=1e-5)
        elif norm:
            x = fkt.rms_norm(x, norm_weight, eps=1e-5)
        y = fkt.linear(x, weight, bias, activation=None if activation == "swiglu" else activation)
        expected = (fkt.swiglu(*y.chunk(2, -1)) if activation == "swiglu" else y) + residual
        torch.testing.assert_close(out, expected)
        seed = torch.randn_like(out)
        out.backward(seed)
        expected.backward(seed)
        for leaf, twin in zip(leaves, twins, strict=True):
            if leaf is not None:
                torch.testing.assert_close(leaf.grad, twin.grad)


@pytest.mark.parametrize("name", ["gpt2", "llama-1b"])
def test_steps_of_a_model(name, monkeypatch):
    """Greedy tokens are those of the ops one after the other, in float32 to the last one; more rows, and the invariant
    mode, run as ever. A step has three of these ops and a qkv_append a layer.
    """
    pytest.importorskip("transformers")
    from flashkernel.bench.e2e import build
    from flashkernel.generate.model import FUSED_ROWS, Model
    from flashkernel.integrations.accelerate import accelerate, restore

    model = build(name, "float32", "cpu", quick=True)
    prompts = [[1, 2, 3], [5], [7, 8]]

    def generate(fused: bool | None, rows: int) -> tuple[list[list[int]], int]:
        monkeypatch.setattr(Model, "fused", fused)
        engine = accelerate(model, max_batch=16, one_launch=False).flashkernel
        calls = lambda: sum(kernel.calls for kernel in fk.kernels() if kernel.op in ("fused_linear", "qkv_append"))
        before = calls()
        found: list[list[int]] = [[] for _ in range(rows)]
        for event in engine.generate((prompts * 4)[:rows], max_new_tokens=12):
            found[event.sequence].append(event.token)
        restore(model)
        return found, calls() - before

    plain, none = generate(False, FUSED_ROWS)
    tokens, calls = generate(True, FUSED_ROWS)
    assert tokens == plain and none == 0
    assert calls > 0 and calls % 8 == 0  # three and one in each of two layers
    assert generate(True, FUSED_ROWS + 1)[1] == 0
    with fk.invariant():
        assert generate(True, FUSED_ROWS)[1] == 0


@pytest.mark.parametrize("rope", ["theta", "table", None])
@pytest.mark.parametrize("tokens", [1, 12])
def test_append_values(make, rope, tokens):
    heads_q, heads_kv, dim = 4, 2, 16
    x, weight = make.normal(tokens, 32), make.normal((heads_q + 2 * heads_kv) * dim, 32)
    bias, norm = make.normal((heads_q + 2 * heads_kv) * dim), make.normal(32)
    pages = make.normal(3, 8, heads_kv, dim), make.normal(3, 8, heads_kv, dim)
    slots = [(5 * i + 3) % 24 if i != 1 else -1 for i in range(tokens)]
    positions = [(7 * i) % 30 for i in range(tokens)]
    turned: dict[str, Any] = {"positions": make.index(positions)}
    plain: dict[str, Any] = {"positions": np.array(positions)}
    if rope == "table":
        cos, sin = make.normal(30, dim // 2), make.normal(30, dim // 2)
        turned |= {"cos": cos, "sin": sin}
        plain |= {"cos": f64(cos), "sin": f64(sin)}
    truth = reference.qkv_append(
        *map(f64, (x, weight, *pages)), slots, f64(bias), f64(norm), rope=plain if rope else None
    )
    q = fk.qkv_append(x, weight, *pages, make.index(slots), bias, norm, rope=turned if rope else None, **make.kwargs)
    for got, expected in zip((q, *pages), truth, strict=True):
        make.check(got, expected, scale=ROUNDINGS * np.abs(expected).max())


def test_append_refusals():
    x, weight = np.ones((2, 8), np.float32), np.ones((16, 8), np.float32)
    pages, slots = [np.zeros((1, 16, 1, 4), np.float32) for _ in range(2)], np.array([0, 1])
    positions = np.array([0, 1])
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((x, weight[:15], *pages, slots), {}, r"weight.shape\[0\]=15"),
        ((x[None], weight, *pages, slots), {}, "x has 3 dims|x is float32"),
        ((x, weight, pages[0], pages[1][..., :3], slots), {}, r"v_pages.shape\[3\]=3"),
        ((x, weight, *pages, np.array([0, 16])), {}, r"slots\[1\]=16"),
        ((x, weight, *pages, slots), {"rope": {"positions": positions, "q": np.ones((2, 2, 4), np.float32)}}, "rope.q"),
        ((x, weight, *pages, slots), {"rope": {"positions": positions[:1]}}, r"rope.positions"),
        ((x, weight, *pages, slots), {"out": np.ones((2, 3, 4), np.float32)}, r"weight.shape\[0\]=16"),
        ((x, weight, *pages, slots), {"norm": "batch"}, "norm='batch'"),
    ]
    for positional, options, message in cases:
        with pytest.raises(ValueError, match=f"^qkv_append: .*({message})"):
            fk.qkv_append(*positional, **options)
    assert not pages[0].any() and not pages[1].any()
