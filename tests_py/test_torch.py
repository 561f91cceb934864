"""flashkernel.torch: gradients against float64, autocast, and the direct path."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
functional = torch.nn.functional

import flashkernel as fk
import flashkernel.torch as fkt


def randn(*shape: int, grad: bool = True, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- float64 references


def attention64(
    q: Any,
    k: Any,
    v: Any,
    *,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    scale: float | None = None,
) -> tuple[Any, Any]:
    """(out, lse) by the numerics contract, in the inputs' own dtype."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seq_q, seq_k = scores.shape[-2:]
    at = torch.arange(seq_q)[:, None] + seq_k - seq_q - torch.arange(seq_k)  # how far key j lies behind query i
    if bias is not None:
        scores = scores + bias
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.reshape(1, -1, 1, 1) * at.abs()
    left, right = window
    right = 0 if causal and right < 0 else right
    hidden = torch.zeros(seq_q, seq_k, dtype=torch.bool)
    if left >= 0:
        hidden |= at > left
    if right >= 0:
        hidden |= -at > right
    scores = scores.masked_fill(hidden, float("-inf"))
    columns = scores
    if sinks is not None:
        columns = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    lse = columns.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(hidden, 0.0)
    return weights @ v, lse


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal-longer-keys": {"causal": True, "seq_k": 13},
    "window": {"window": (3, 1)},
    "causal-window-softcap": {"causal": True, "window": (4, -1), "softcap": 2.0},
    "scale": {"scale": 0.3},
    "bias": {"bias": (2, 4, 7, 7)},
    "bias-broadcast": {"bias": (1, 4, 1, 7), "causal": True},
    "bias-2d": {"bias": (7, 7)},
    "alibi": {"alibi": True, "causal": True},
    "sinks": {"sinks": True, "causal": True},
    "everything": {
        "sinks": True,
        "bias": (1, 1, 7, 7),
        "alibi": True,
        "softcap": 3.0,
        "causal": True,
        "window": (5, 0),
    },
    "head-dim-v": {"head_dim_v": 5},
}


def attention_case(
    seq_k: int = 7,
    bias: tuple[int, ...] | None = None,
    alibi: bool = False,
    sinks: bool = False,
    head_dim_v: int = 8,
    **options: Any,
) -> tuple[list[Any], dict[str, Any]]:
    tensors = [randn(2, 4, 7, 8), randn(2, 2, seq_k, 8), randn(2, 2, seq_k, head_dim_v)]
    if bias is not None:
        options["bias"] = randn(*bias)
    if sinks:
        options["sinks"] = randn(4)
    if alibi:
        options["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.1, 0.05])
    return tensors, options


def check_against_float64(
    ours: Callable[..., Any],
    reference: Callable[..., Any],
    tensors: list[Any],
    options: dict[str, Any],
    tolerance: float = 2e-5,
) -> None:
    """Results and all gradients, from a random cotangent on each result; NaN and Inf must agree first."""
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    wide_options = {
        name: value.detach().double().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in options.items()
    }
    got, expected = ours(*tensors, **options), reference(*wide, **wide_options)
    got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
    cotangents = [torch.randn(x.shape, dtype=torch.float64) for x in expected]
    leaves = [t for t in (*tensors, *options.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
    wide_leaves = [t for t in (*wide, *wide_options.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
    grads = torch.autograd.grad(
        got, leaves, [c.to(g.dtype) for c, g in zip(cotangents, got, strict=True)], materialize_grads=True
    )
    wide_grads = torch.autograd.grad(expected, wide_leaves, cotangents, materialize_grads=True)
    for a, b in zip((*got, *grads), (*expected, *wide_grads), strict=True):
        assert a.shape == b.shape
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())
        finite = b.isfinite()
        error = (a.double() - b)[finite].abs().max().item() if finite.any() else 0.0
        assert error <= tolerance * max(1.0, b[finite].abs().max().item() if finite.any() else 1.0)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_gradients(name: str) -> None:
    """Also through the LSE."""
    tensors, options = attention_case(**ATTENTION[name])
    check_against_float64(lambda *a, **o: fkt.attention(*a, return_lse=True, **o), attention64, tensors, options)


def test_attention_gradient_of_one_result_only() -> None:
    for index in (0, 1):
        tensors, options = attention_case(causal=True)
        check_against_float64(
            lambda *a, i=index, **o: fkt.attention(*a, return_lse=True, **o)[i],
            lambda *a, i=index, **o: attention64(*a, **o)[i],
            tensors,
            options,
        )


def test_results_lie_in_the_order_of_their_tensors() -> None:
    """Heads split off one projection: output and gradients join again without a copy, and are what they were."""
    packed = torch.randn(2, 5, 3, 4, 16, dtype=torch.float32, requires_grad=True)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    out = fkt.attention(q, k, v, causal=True)
    grad_out = torch.randn(2, 5, 4, 16).transpose(1, 2)
    grads = torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)
    with torch.no_grad():
        outside_autograd = fkt.attention(q, k, v, causal=True)
    for x in (out, outside_autograd, *grads):
        assert x.transpose(1, 2).is_contiguous()
    rows = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    expected = fkt.attention(*rows, causal=True)
    assert expected.is_contiguous()
    assert torch.equal(out, expected) and torch.equal(outside_autograd, expected)
    for mine, theirs in zip(grads, torch.autograd.grad(expected, rows, grad_out), strict=True):
        assert theirs.is_contiguous() and torch.equal(mine, theirs)
    wide = torch.randn(2, 5, 4, 24).transpose(1, 2)  # another head_dim of v: no order to take over
    assert fkt.attention(q.detach(), k.detach(), wide).is_contiguous()


def test_rows_that_see_nothing_have_gradient_zero() -> None:
    q, k, v = randn(1, 1, 5, 8), randn(1, 1, 3, 8), randn(1, 1, 3, 8)
    out, lse = fkt.attention(q, k, v, causal=True, return_lse=True)
    assert (out[0, 0, :2] == 0).all() and (lse[0, 0, :2] == -math.inf).all()
    out.sum().backward()
    assert (q.grad[0, 0, :2] == 0).all() and q.grad[0, 0, 2:].isfinite().all() and k.grad.isfinite().all()


@pytest.mark.parametrize("sinks", [False, True])
def test_varlen_gradients(sinks: bool) -> None:
    """Against dense attention of each sequence; one of them is empty."""
    lengths_q, lengths_k = [3, 0, 5], [4, 2, 5]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    tensors = [randn(8, 4, 8), randn(11, 2, 8), randn(11, 2, 8)]
    options = {"sinks": randn(4)} if sinks else {}

    def ours(*args: Any, **o: Any) -> Any:
        return fkt.attention_varlen(*args, cu_q, cu_k, 5, 5, causal=True, return_lse=True, **o)

    def reference(q: Any, k: Any, v: Any, **o: Any) -> Any:
        parts = []
        for b in range(3):
            at_q, at_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            parts.append(attention64(*(x.transpose(0, 1)[None] for x in (q[at_q], k[at_k], v[at_k])), causal=True, **o))
        return torch.cat([out[0].transpose(0, 1) for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)

    check_against_float64(ours, reference, tensors, options)


def paged_arguments(length: int = 21) -> tuple[Any, ...]:
    pages = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    return (
        randn(2, 4, 1, 8, grad=False),
        randn(4, 16, 2, 8, grad=False),
        randn(4, 16, 2, 8, grad=False),
        pages,
        torch.tensor([length, 7], dtype=torch.int32),
    )


def test_paged_equals_dense() -> None:
    q, k_pages, v_pages, table, lengths = paged_arguments()
    out = fkt.attention_paged(q, k_pages, v_pages, table, lengths)
    for b, length in enumerate(lengths.tolist()):
        k, v = (pages[table[b].long()].reshape(32, 2, 8)[:length].transpose(0, 1)[None] for pages in (k_pages, v_pages))
        torch.testing.assert_close(out[b : b + 1], fkt.attention(q[b : b + 1], k, v))
    with pytest.raises(NotImplementedError, match="no_grad"):
        fkt.attention_paged(q.requires_grad_(), k_pages, v_pages, table, lengths)
    with torch.no_grad():
        torch.testing.assert_close(fkt.attention_paged(q, k_pages, v_pages, table, lengths), out)


ACTIVATIONS: dict[str | None, Callable[[Any], Any]] = {
    None: lambda x: x,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "silu": functional.silu,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_gradients(activation: str | None, bias: bool) -> None:
    tensors = [randn(2, 5, 16), randn(12, 16), *([randn(12)] if bias else [])]
    check_against_float64(
        lambda *a: fkt.linear(*a, activation=activation),
        lambda *a: ACTIVATIONS[activation](functional.linear(*a)),
        tensors,
        {},
    )


def test_linear_with_transposed_weight() -> None:
    """GPT-2's layout: the gradient arrives in the parameter's own [in, out]."""
    tensors = [randn(5, 16), randn(16, 12), randn(12)]
    check_against_float64(
        lambda x, w, b: fkt.linear(x, w.t(), b, activation="gelu_tanh"),
        lambda x, w, b: functional.gelu(x @ w + b, approximate="tanh"),
        tensors,
        {},
    )


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_linear_gradient_of_what_needs_one(frozen: str) -> None:
    tensors = {"x": randn(5, 16), "weight": randn(12, 16), "bias": randn(12)}
    tensors[frozen].requires_grad_(False)
    check_against_float64(
        lambda *a: fkt.linear(*a, activation="gelu"),
        lambda *a: functional.gelu(functional.linear(*a)),
        list(tensors.values()),
        {},
    )


@pytest.mark.parametrize("residual", [False, True])
def test_norm_gradients(residual: bool) -> None:
    extra = {"residual": randn(3, 5, 16)} if residual else {}

    def layer64(x: Any, w: Any, b: Any, residual: Any = None) -> Any:
        h = x if residual is None else x + residual
        out = functional.layer_norm(h, (16,), w, b, 1e-5)
        return out if residual is None else (out, h)

    def rms64(x: Any, w: Any, residual: Any = None) -> Any:
        h = x if residual is None else x + residual
        out = functional.rms_norm(h, (16,), w, 1e-6)
        return out if residual is None else (out, h)

    check_against_float64(fkt.layer_norm, layer64, [randn(3, 5, 16), randn(16), randn(16)], extra)
    check_against_float64(fkt.rms_norm, rms64, [randn(3, 5, 16), randn(16)], extra)


def test_norm_gradient_through_the_residual_only() -> None:
    x, residual = randn(3, 16), randn(3, 16)
    _, hidden = fkt.rms_norm(x, randn(16), residual=residual)
    hidden.sum().backward()
    assert (x.grad == 1).all() and (residual.grad == 1).all()


@pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"rotary_dim": 4}, {"inverse": True}])
def test_rope_gradients(options: dict[str, Any]) -> None:
    """Rotations keep lengths: the gradient of half the squared length is the input itself. And against tables in
    float64.
    """
    q, k = randn(2, 4, 7, 8), randn(2, 2, 7, 8)
    positions = torch.tensor([5, 0, 9, 1, 2, 30, 4])
    q_out, k_out = fkt.rope(q, k, positions, **options)
    ((q_out**2).sum() / 2 + (k_out**2).sum() / 2).backward()
    torch.testing.assert_close(q.grad, q.detach())
    torch.testing.assert_close(k.grad, k.detach())
    if not options:
        angles = positions[:, None].double() * 10000.0 ** (-torch.arange(4).double() / 4)

        def rotate64(q: Any, k: Any) -> Any:
            def one(x: Any) -> Any:
                a, b = x.chunk(2, -1)
                return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

            return one(q), one(k)

        cos, sin = angles.cos().float()[None], angles.sin().float()[None]
        check_against_float64(
            lambda q, k: fkt.rope(q, k, positions), rotate64, [randn(2, 4, 7, 8), randn(2, 2, 7, 8)], {}
        )
        check_against_float64(
            lambda q, k: fkt.rope_table(q, k, cos, sin), rotate64, [randn(2, 4, 7, 8), randn(2, 2, 7, 8)], {}
        )
        check_against_float64(
            lambda q: fkt.rope(q, None, positions), lambda q: rotate64(q, q)[0], [randn(2, 4, 7, 8)], {}
        )


def test_rope_table_has_no_gradient_of_the_table() -> None:
    cos = randn(1, 7, 4)
    with pytest.raises(NotImplementedError, match="cos requires a gradient"):
        fkt.rope_table(randn(1, 1, 7, 8), None, cos, cos.detach())[0].sum().backward()


def test_elementwise_gradients() -> None:
    check_against_float64(fkt.swiglu, lambda a, b: functional.silu(a) * b, [randn(5, 9), randn(5, 9)], {})
    for axis in (-1, 0):
        check_against_float64(lambda x, a=axis: fkt.softmax(x, a), lambda x, a=axis: x.softmax(a), [randn(5, 9)], {})
        check_against_float64(
            lambda x, a=axis: fkt.log_softmax(x, a), lambda x, a=axis: x.log_softmax(a), [randn(5, 9)], {}
        )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy_gradients(reduction: str, label_smoothing: float) -> None:
    targets = torch.tensor([3, 0, -100, 8, 3])
    options: dict[str, Any] = dict(reduction=reduction, label_smoothing=label_smoothing)
    check_against_float64(
        lambda x: fkt.cross_entropy(x, targets, **options),
        lambda x: functional.cross_entropy(x, targets, **options),
        [randn(5, 9)],
        {},
    )


# --- gradcheck: finite differences. Inputs are float64, the op in between is float32: a step of 1e-2 keeps the
# rounding of the
# results (1e-6) below 1e-4 in the quotient, and the tolerance below the size of the gradients (about 1) by a factor of
# 50.


def gradcheck(function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
    inputs = [randn(*shape, dtype=torch.float64) for shape in shapes]

    def narrow(*wide: Any) -> Any:
        results = function(*(x.float() for x in wide))
        return tuple(r.double() for r in results) if isinstance(results, tuple) else results.double()

    assert torch.autograd.gradcheck(narrow, inputs, eps=1e-2, atol=2e-3, rtol=2e-2)


def test_gradcheck() -> None:
    qkv = [(1, 2, 4, 4), (1, 1, 5, 4), (1, 1, 5, 4)]
    gradcheck(
        lambda q, k, v, b, s: fkt.attention(q, k, v, bias=b, sinks=s, causal=True, return_lse=True),
        *qkv,
        (1, 1, 4, 5),
        (2,),
    )
    cu_q, cu_k = torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([0, 2, 5], dtype=torch.int32)
    gradcheck(
        lambda q, k, v: fkt.attention_varlen(q, k, v, cu_q, cu_k, 3, 3, causal=True), (4, 2, 4), (5, 1, 4), (5, 1, 4)
    )
    for activation in ACTIVATIONS:
        gradcheck(lambda x, w, b, a=activation: fkt.linear(x, w, b, activation=a), (3, 4), (2, 4), (2,))
    gradcheck(lambda x, w, b, r: fkt.layer_norm(x, w, b, residual=r, eps=0.1), (3, 4), (4,), (4,), (3, 4))
    gradcheck(lambda x, w, r: fkt.rms_norm(x, w, residual=r, eps=0.1), (3, 4), (4,), (3, 4))
    gradcheck(lambda x, w, b: fkt.layer_norm(x, w, b, eps=0.1, weight_offset=1.0), (3, 4), (4,), (4,))
    gradcheck(lambda x, w: fkt.rms_norm(x, w, eps=0.1, weight_offset=1.0), (3, 4), (4,))
    gradcheck(lambda q, k: fkt.rope(q, k), (1, 2, 3, 4), (1, 1, 3, 4))
    gradcheck(fkt.swiglu, (3, 4), (3, 4))
    gradcheck(fkt.softmax, (3, 4))
    gradcheck(fkt.log_softmax, (3, 4))
    gradcheck(lambda x: fkt.cross_entropy(x, torch.tensor([1, 0, 3])), (3, 4))


def test_gradcheck_would_see_a_wrong_gradient() -> None:
    """The tolerances above are able to fail: 5 % on one gradient is too much."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return 1.05 * grad

    from torch.autograd.gradcheck import GradcheckError

    with pytest.raises(GradcheckError):
        gradcheck(lambda a, b: fkt.swiglu(Wrong.apply(a), b), (3, 4), (3, 4))


def test_second_derivative_is_refused() -> None:
    x = randn(3, 4)
    (grad,) = torch.autograd.grad(fkt.softmax(x)[0, 0], x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        grad.sum().backward()


# --- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_take_autocasts_dtype(dtype: torch.dtype) -> None:
    x, w, b = randn(5, 16), randn(24, 16), randn(24)
    q, k, v = (randn(2, 3, 7, 16) for _ in range(3))
    with torch.autocast("cpu", dtype):
        got = fkt.linear(x, w, b, activation="gelu_tanh"), fkt.attention(q, k.to(dtype), v, causal=True)
        expected = torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b), approximate="tanh")
        with torch.no_grad():
            assert fkt.linear(x, w).dtype == dtype
        with torch.autocast("cpu", enabled=False):
            assert fkt.linear(x, w).dtype == torch.float32
    assert [t.dtype for t in got] == [dtype, dtype]
    torch.testing.assert_close(got[0].float(), expected.float(), rtol=2e-2, atol=2e-2)
    (got[0].float().sum() + got[1].float().sum()).backward()
    for t in (x, w, b, q, k, v):
        assert t.grad is not None and t.grad.dtype == torch.float32 and t.grad.isfinite().all()


# --- the direct path, modules, half precision


def test_direct_path_skips_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    import flashkernel.torch.elementwise as module

    used: list[str] = []
    monkeypatch.setattr(module, "_softmax", lambda x, axis: used.append("dispatcher") or fk.softmax(x.detach(), axis))
    x = randn(3, 4, grad=False)
    fkt.softmax(x)
    assert used == []
    fkt.softmax(x.clone().requires_grad_())
    assert used == ["dispatcher"]


def test_parameters_work_where_no_gradient_is_recorded() -> None:
    weight = torch.nn.Parameter(torch.randn(6, 8))
    x = torch.randn(3, 8)
    expected = functional.linear(x, weight)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out = fkt.linear(x, weight)
            assert not out.requires_grad
            torch.testing.assert_close(out, expected.detach())


def test_modules() -> None:
    layer = fkt.Linear(8, 6, activation="gelu_tanh")
    x = torch.randn(3, 8)
    torch.testing.assert_close(
        layer(x), functional.gelu(functional.linear(x, layer.weight, layer.bias), approximate="tanh")
    )
    assert "gelu_tanh" in repr(layer)
    norm = fkt.RMSNorm(8, eps=1e-5)
    torch.testing.assert_close(norm(x), functional.rms_norm(x, (8,), norm.weight, 1e-5))
    assert set(layer.state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients(dtype: Any) -> None:
    """At most twice the error of torch's own attention in the same dtype, plus one rounding; both against float64."""
    tensors = [randn(1, 2, 16, 32, dtype=dtype) for _ in range(3)]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    cotangent = torch.randn(1, 2, 16, 32)
    expected = attention64(*wide, causal=True)[0]
    results = {}
    for name, function in [
        ("ours", fkt.attention),
        ("torch", lambda q, k, v, causal: functional.scaled_dot_product_attention(q, k, v, is_causal=causal)),
    ]:
        out = function(*tensors, causal=True)
        assert out.dtype == dtype
        results[name] = [out, *torch.autograd.grad(out, tensors, cotangent.to(dtype))]
    reference = [expected, *torch.autograd.grad(expected, wide, cotangent.to(dtype).double())]
    for ours, theirs, exact in zip(results["ours"], results["torch"], reference, strict=True):
        assert ours.isfinite().all()
        floor = torch.finfo(dtype).eps * exact.abs().max()
        assert (ours.double() - exact).abs().max() <= 2 * (theirs.double() - exact).abs().max() + floor


def test_errors_name_the_op() -> None:
    with pytest.raises(ValueError, match="attention"):
        fkt.attention(randn(1, 3, 5, 8), randn(1, 2, 5, 8), randn(1, 2, 5, 8))
    with pytest.raises(ValueError, match="linear"):
        fkt.linear(randn(3, 8), randn(6, 9))


def test_documentation_examples_run() -> None:
    import doctest
    import importlib

    attempted = 0
    for name in ("attention", "linear"):
        result = doctest.testmod(importlib.import_module(f"flashkernel.torch.{name}"))
        assert result.failed == 0
        attempted += result.attempted
    assert attempted >= 8
    for name in fkt.__all__:
        assert getattr(fkt, name).__doc__
