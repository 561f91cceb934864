"""flashkernel.jax: results and gradients beside the same formulas in jax.numpy; jit, vmap, shard_map, refusals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not in the test group: it is large")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
fkj = pytest.importorskip("flashkernel.jax", reason="built without FLASHKERNEL_JAX", exc_type=ImportError)

import jax
import jax.numpy as jnp

ROOT = Path(__file__).resolve().parents[1]
# The formulas run on the CPU: there they are exact, and XLA compiles their many steps in less time than for a GPU.
CPUS = jax.devices("cpu")
DEVICES = jax.devices() if len(jax.devices()) > 1 else CPUS  # those of shard_map


class Op(NamedTuple):
    """An op, the formula that it stands for, and its arguments; all of them have gradients."""

    ours: Callable[..., Any]
    formula: Callable[..., Any]
    arguments: tuple[Any, ...]
    sharded: tuple[bool, ...]  # which arguments are cut in two along their first dim, by shard_map
    batched: tuple[int | None, ...]  # in_axes of vmap


def draw(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def attention(q: Any, k: Any, v: Any, bias: Any = None, sinks: Any = None, *, options: dict[str, Any]) -> Any:
    """The scores in full."""
    group, rows, columns = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = jnp.repeat(k, group, 1), jnp.repeat(v, group, 1)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * options.get("scale", q.shape[-1] ** -0.5)
    if cap := options.get("softcap"):
        scores = cap * jnp.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias
    distance = jnp.arange(columns)[None] - (jnp.arange(rows)[:, None] + columns - rows)
    if slopes := options.get("alibi_slopes"):
        form = options.get("alibi", "distance")
        before = jnp.sqrt(jnp.maximum(-distance, 0.0))
        steps = {"distance": jnp.abs(distance), "signed": -distance, "sqrt": before}[form]
        scores = scores - jnp.asarray(slopes)[:, None, None] * steps
    left, right = options.get("window", (None, None))
    right = 0 if options.get("causal") else right
    seen = jnp.ones_like(distance, bool)
    seen = seen if left is None else seen & (distance >= -left)
    seen = seen if right is None else seen & (distance <= right)
    if (mask := options.get("mask")) is not None:
        seen = seen & mask
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:
        shape = (*scores.shape[:3], 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], shape)], -1)
    lse = jax.nn.logsumexp(scores, -1)
    out = jnp.einsum("bhqk,bhkd->bhqd", jnp.exp(scores - lse[..., None])[..., :columns], v)
    return (out, lse) if options.get("return_lse") else out


def attention_op(extra: tuple[Any, ...] = (), **options: Any) -> Op:
    def ours(q: Any, k: Any, v: Any, *extra: Any) -> Any:
        named = dict(zip(("bias", "sinks"), extra, strict=False))
        return fkj.attention(q, k, v, **named, **options)

    def formula(*arrays: Any) -> Any:
        return attention(*arrays, options=options)

    q, k, v = draw(0, 2, 4, 6, 16), draw(1, 2, 2, 9, 16), draw(2, 2, 2, 9, 8)
    more = len(extra)
    return Op(ours, formula, (q, k, v, *extra), (True, True, True, *[False] * more), (0, None, 0, *[None] * more))


def norm(x: Any, weight: Any = None, bias: Any = None, residual: Any = None, *, center: bool, eps: float) -> Any:
    h = x if residual is None else x + residual
    y = h - h.mean(-1, keepdims=True) if center else h
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + eps)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y if residual is None else (y, h)


def cross_entropy(logits: Any, targets: Any, ignore: int, smoothing: float, reduction: str) -> Any:
    lse = jax.nn.logsumexp(logits, -1)
    counted = targets != ignore
    picked = jnp.take_along_axis(logits, jnp.where(counted, targets, 0)[:, None], 1)[:, 0]
    loss = jnp.where(counted, lse - (1 - smoothing) * picked - smoothing * logits.mean(-1), 0.0)
    return {"none": loss, "sum": loss.sum(), "mean": loss.sum() / counted.sum()}[reduction]


def loss_op(**options: Any) -> Op:
    targets = jnp.asarray([1, 4, 2, 0, 3, 1], jnp.int32)
    ignore, smoothing = options.get("ignore_index", -100), options.get("label_smoothing", 0.0)
    reduction = options.get("reduction", "mean")
    # Under shard_map each device has its own rows, and so its own targets: only what keeps rows apart can be compared.
    return Op(
        lambda logits, rows: fkj.cross_entropy(logits, rows, **options),
        lambda logits, rows: cross_entropy(logits, rows, ignore, smoothing, reduction),
        (draw(0, 6, 5), targets),
        (True, True),
        (0, None),
    )


X, W, B, R = draw(0, 4, 3, 16), draw(1, 16) + 1, draw(2, 16), draw(3, 4, 3, 16)
ROW = (True, False, False, True)
AXES = (0, None, 0, None)
SEEN = jnp.asarray(np.random.default_rng(6).random((4, 6, 9)) < 0.6).at[..., 0].set(True)
OPS = {
    "attention": attention_op(),
    "attention causal": attention_op(causal=True, scale=0.2),
    "attention window": attention_op(window=(3, 1), softcap=5.0, alibi_slopes=(0.5, 0.25, 0.1, 0.05)),
    "attention lse": attention_op(return_lse=True),
    "attention bias": attention_op((draw(4, 4, 6, 9),)),
    "attention mask": attention_op(mask=SEEN, causal=True),
    "attention mask of keys": attention_op(mask=SEEN[0, :1], alibi="signed", alibi_slopes=(0.5, 0.25, 0.1, 0.05)),
    "attention sqrt": attention_op(alibi="sqrt", alibi_slopes=(0.5, 0.25, 0.1, 0.05)),
    "attention sinks": attention_op((draw(4, 1, 4, 1, 9), draw(5, 4)), causal=True, return_lse=True),
    "rms_norm": Op(fkj.rms_norm, lambda x: norm(x, center=False, eps=1e-6), (X,), (True,), (0,)),
    "rms_norm weight": Op(
        lambda x, w, r: fkj.rms_norm(x, w, residual=r),
        lambda x, w, r: norm(x, w, residual=r, center=False, eps=1e-6),
        (X, W, R),
        (True, False, True),
        (0, 0, None),
    ),
    "layer_norm": Op(
        lambda x, w, b: fkj.layer_norm(x, w, b, eps=1e-3),
        lambda x, w, b: norm(x, w, b, center=True, eps=1e-3),
        (X, W, B),
        (True, False, False),
        (0, None, None),
    ),
    "layer_norm residual": Op(
        lambda x, w, b, r: fkj.layer_norm(x, w, b, residual=r),
        lambda x, w, b, r: norm(x, w, b, r, center=True, eps=1e-5),
        (X, W, B, R),
        ROW,
        AXES,
    ),
    "linear": Op(fkj.linear, lambda x, w: x @ w.T, (X, draw(1, 5, 16)), (True, False), (0, None)),
    **{
        f"linear {name}": Op(
            lambda x, w, b, name=name: fkj.linear(x, w, b, name),
            lambda x, w, b, f=f: f(x @ w.T + b),
            (X, draw(1, 5, 16), draw(2, 5)),
            (True, False, False),
            (None, 0, None),
        )
        for name, f in (
            ("gelu_tanh", lambda x: jax.nn.gelu(x, approximate=True)),
            ("gelu", lambda x: jax.nn.gelu(x, approximate=False)),
            ("silu", jax.nn.silu),
        )
    },
    "cross_entropy": loss_op(),
    "cross_entropy rows": loss_op(reduction="none", label_smoothing=0.1, ignore_index=4),
    "cross_entropy sum": loss_op(reduction="sum"),
}
names = pytest.mark.parametrize("name", OPS)


def scalar(function: Callable[..., Any]) -> Callable[..., Any]:
    """A sum in which every element of every result has a gradient of its own."""

    def total(*arguments: Any) -> Any:
        return sum((jnp.sin(out + 0.3) * (1 + i)).sum() for i, out in enumerate(jax.tree.leaves(function(*arguments))))

    return total


def differentiable(op: Op) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(op.arguments) if jnp.issubdtype(x.dtype, jnp.floating))


def same(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    for have, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert have.shape == want.shape and have.dtype == want.dtype
        np.testing.assert_allclose(have, want, rtol=tolerance, atol=tolerance)


def with_gradients(op: Op, function: Callable[..., Any], wrap: Callable[..., Any] = lambda f: f) -> Callable[..., Any]:
    """One program for results and gradients: on a GPU it is the number of programs that takes the time."""
    results, gradients = wrap(function), wrap(jax.grad(scalar(function), differentiable(op)))
    return jax.jit(lambda *arguments: (results(*arguments), gradients(*arguments)))


def on_cpu(arguments: Any) -> Any:
    return jax.device_put(arguments, CPUS[0])


@names
def test_results_and_gradients(name: str) -> None:
    op = OPS[name]
    want = with_gradients(op, op.formula)(*on_cpu(op.arguments))
    same(with_gradients(op, op.ours)(*op.arguments), want)
    same(op.ours(*op.arguments), want[0])


@pytest.mark.parametrize("name", ["attention sinks", "rms_norm weight", "linear silu", "cross_entropy"])
def test_gradients_without_jit(name: str) -> None:
    op = OPS[name]
    want = jax.jit(jax.grad(scalar(op.formula), differentiable(op)))(*on_cpu(op.arguments))
    same(jax.grad(scalar(op.ours), differentiable(op))(*op.arguments), want)


@names
def test_vmap(name: str) -> None:
    """Some arguments batched, others shared; in two dims; gradients too."""
    op = OPS[name]
    scales = jnp.asarray([1.0, 0.5, -2.0])

    def stacked(array: Any, axis: int | None) -> Any:
        return array if axis is None else jnp.stack([array * s.astype(array.dtype) for s in scales])

    def once(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.vmap(function, op.batched)

    arguments = [stacked(x, axis) for x, axis in zip(on_cpu(op.arguments), op.batched, strict=True)]
    placed = jax.device_put(arguments, jax.devices()[0])
    # On a GPU fp32 products are three of TF32 (docs/ops/linear.md). Results are as large as 17, and a gradient adds up
    # their cosines: 6e-5 was found on an H200 where an emulation of such products gives 5e-5, and plain fp32 8e-6.
    same(with_gradients(op, op.ours, once)(*placed), with_gradients(op, op.formula, once)(*arguments), tolerance=1e-4)
    first = on_cpu(op.arguments[0]) if op.batched[0] is None else arguments[0]
    twice = [jnp.stack([first, first + 1]), *arguments[1:]]
    outer = tuple(0 if i == 0 else None for i in range(len(arguments)))
    ours, formula = (jax.jit(jax.vmap(once(f), outer)) for f in (op.ours, op.formula))
    same(ours(*jax.device_put(twice, jax.devices()[0])), formula(*twice), tolerance=1e-4)


@names
def test_shard_map(name: str) -> None:
    """Arguments that are whole on each device get the gradients of all devices' rows."""
    assert len(CPUS) >= 2, "XLA_FLAGS came too late"
    op = OPS[name]
    specs = tuple(jax.P("i") if cut else jax.P() for cut in op.sharded)

    def run(function: Callable[..., Any], devices: list[Any]) -> Any:
        mesh = jax.make_mesh((2,), ("i",), devices=devices[:2], axis_types=(jax.sharding.AxisType.Auto,))

        def local(*arguments: Any) -> Any:
            return jax.lax.psum(scalar(function)(*arguments), "i")

        placed = [
            jax.device_put(np.asarray(x), jax.sharding.NamedSharding(mesh, spec))
            for x, spec in zip(op.arguments, specs, strict=True)
        ]
        total = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P())
        return jax.jit(jax.value_and_grad(total, differentiable(op)))(*placed)

    same(run(op.ours, DEVICES), run(op.formula, CPUS), tolerance=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits(dtype: str) -> None:
    q, k, v = (x.astype(dtype) for x in OPS["attention"].arguments)
    out = fkj.attention(q, k, v, causal=True)
    want = attention(*(x.astype(jnp.float32) for x in on_cpu((q, k, v))), options={"causal": True})
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(jnp.float32), want, atol=2e-2, rtol=2e-2)
    gradient = jax.grad(lambda x, w: fkj.rms_norm(x, w).astype(jnp.float32).sum(), (0, 1))(X.astype(dtype), W)
    assert gradient[0].dtype == dtype and gradient[1].dtype == "float32"


def test_training_goes_down() -> None:
    """A layer of everything, under jit and grad."""
    targets = jnp.asarray([1, 3, 0, 2] * 3, jnp.int32)

    def loss(w: dict[str, Any]) -> Any:
        x = fkj.rms_norm(X.reshape(1, 1, 12, 16), w["norm"])
        x = x + fkj.attention(*(fkj.linear(x, w[name]) for name in "qkv"), causal=True)
        return fkj.cross_entropy(fkj.linear(x, w["out"]).reshape(12, 4), targets)

    weights = {"norm": W, **{name: draw(i, 16, 16) / 4 for i, name in enumerate("qkv")}, "out": draw(9, 4, 16) / 4}
    step = jax.jit(lambda w: jax.tree.map(lambda x, g: x - 0.3 * g, w, jax.grad(loss)(w)))
    first = loss(weights)
    for _ in range(30):
        weights = step(weights)
    assert loss(weights) < first / 2


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fkj.attention(X, X, X), r"q has shape \(4, 3, 16\); \[batch, heads, seq, head_dim\]"),
        (lambda: fkj.attention(X[None], X[None].astype("float16"), X[None]), "k is float16 and q float32"),
        (lambda: fkj.attention(X[None], X[None, :3], X[None, :3]), "4 heads of q and 3 of k"),
        (lambda: fkj.attention(X[None], X[None, :, :2], X[None]), "one seq"),
        (lambda: fkj.rms_norm(X, W[:3]), r"weight has shape \(3,\); \(16,\) is needed"),
        (lambda: fkj.layer_norm(X, residual=W), "the same are needed"),
        (lambda: fkj.linear(X, W), "in_features"),
        (lambda: fkj.linear(X, draw(0, 2, 16), activation="relu"), "'relu'; one of"),
        (lambda: fkj.cross_entropy(X[0], jnp.zeros(4, jnp.int32)), "are needed"),
        (lambda: fkj.cross_entropy(X[0], jnp.zeros(3, jnp.int32), reduction="max"), "'max'; one of"),
    ],
)
def test_refusals(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_the_librarys_own_refusals_come_through() -> None:
    """Values are known when the call runs, on the CPU."""
    with jax.default_device(CPUS[0]):
        _refused_values(on_cpu(X))


def _refused_values(x: Any) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"targets\[1\]=23"):
        jax.block_until_ready(fkj.cross_entropy(x[0], jnp.asarray([0, 7 + 16, 1], jnp.int32)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="bias"):
        jax.block_until_ready(fkj.attention(x[None], x[None], x[None], bias=jnp.zeros((2, 3, 3))))


def test_no_derivative_is_dropped() -> None:
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(fkj.rms_norm, (X,), (X,))
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(lambda x: jax.grad(scalar(fkj.rms_norm))(x).sum())(X)


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the source tree is not beside the tests")
def test_the_pages_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "jax.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    code = "\n".join(blocks)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)
