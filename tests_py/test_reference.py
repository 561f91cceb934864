"""The oracle against PyTorch in float64: values, and gradients from autograd. An oracle that is wrong tests nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flashkernel import reference, testing

RNG = np.random.default_rng(1)


def t(x):
    return torch.tensor(x, dtype=torch.float64, requires_grad=True)


def close(a, b):
    np.testing.assert_allclose(a, b.detach().numpy() if isinstance(b, torch.Tensor) else b, rtol=1e-9, atol=1e-11)


def torch_attention(q, k, v, causal, window, softcap, scale, bias, slopes, sinks):
    """Attention by another route than the oracle's: masks as additive -inf, sinks as a column, loops left to torch."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (scale if scale is not None else q.shape[-1] ** -0.5)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    i = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2])[None]
    if slopes is not None:
        s = s - slopes[:, None, None] * (i - j).abs()
    hidden = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool)
    if causal:
        hidden |= j > i
    if window is not None:
        hidden |= (j < i - window[0]) | (j > i + window[1])
    s = s.masked_fill(hidden, float("-inf"))
    column = [] if sinks is None else [sinks[None, :, None, None].expand(*s.shape[:3], 1)]
    lse = torch.cat([s, *column], -1).logsumexp(-1)
    return torch.exp(s - lse[..., None]) @ v, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (3, 1)])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("extras", [(), ("bias",), ("slopes", "sinks"), ("bias", "slopes", "sinks")])
def test_attention(causal, window, softcap, extras):
    q, k, v = (t(RNG.standard_normal(s)) for s in [(2, 4, 5, 6), (2, 2, 7, 6), (2, 2, 7, 3)])
    bias = t(RNG.standard_normal((1, 4, 5, 1))) if "bias" in extras else None
    sinks = t(RNG.standard_normal(4)) if "sinks" in extras else None
    slopes = torch.tensor([0.5, 0.25, 0.1, 1.0], dtype=torch.float64) if "slopes" in extras else None
    out, lse = torch_attention(q, k, v, causal, window, softcap, 0.3, bias, slopes, sinks)
    options = dict(causal=causal, window=window, softcap=softcap, scale=0.3, alibi_slopes=slopes)
    options |= {n: None if x is None else x.detach().numpy() for n, x in (("bias", bias), ("sinks", sinks))}
    arrays = [x.detach().numpy() for x in (q, k, v)]
    ours, our_lse = reference.attention(*arrays, **options)
    close(ours, out)
    close(our_lse, lse)
    grad_out, grad_lse = RNG.standard_normal(out.shape), RNG.standard_normal(lse.shape)
    torch.autograd.backward([out, lse], [torch.tensor(grad_out), torch.tensor(grad_lse)])
    grads = reference.attention_backward(grad_out, *arrays, grad_lse=grad_lse, **options)
    for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias), ("sinks", sinks)):
        if x is not None:
            close(grads[name], x.grad)


def test_attention_rows_that_see_nothing():
    q, k = RNG.standard_normal((1, 1, 3, 4)), RNG.standard_normal((1, 1, 1, 4))
    out, lse = reference.attention(q, k, k, causal=True)
    assert (out[0, 0, :2] == 0).all() and np.isneginf(lse[0, 0, :2]).all() and np.isfinite(lse[0, 0, 2])
    grads = reference.attention_backward(np.ones_like(q), q, k, k, causal=True)
    assert (grads["q"][0, 0, :2] == 0).all()


def test_varlen_and_paged_are_dense_attention_per_sequence():
    q, k = RNG.standard_normal((9, 4, 8)), RNG.standard_normal((12, 2, 8))
    cu_q, cu_k = [0, 4, 4, 9], [0, 5, 8, 12]
    out, lse = reference.attention_varlen(q, k, k, cu_q, cu_k, causal=True)
    for b in range(3):
        s = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        o, own_lse = reference.attention(q[s[0]].transpose(1, 0, 2), *[k[s[1]].transpose(1, 0, 2)] * 2, causal=True)
        close(out[s[0]], o.transpose(1, 0, 2))
        close(lse[:, s[0]], own_lse)
    pages = np.zeros((4, 4, 2, 8))
    table = np.array([[3, 1], [2, -1], [0, -1]])
    lengths = np.array([5, 3, 4])
    for b, n in enumerate(lengths):
        for j in range(n):
            pages[table[b, j // 4], j % 4] = k[cu_k[b] + j]
    close(reference.attention_paged(q, pages, pages, table, lengths, cu_seqlens_q=cu_q, causal=True)[0], out)


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu"])
def test_linear(activation):
    x, w, b = t(RNG.standard_normal((2, 3, 5))), t(RNG.standard_normal((4, 5))), t(RNG.standard_normal(4))
    functions = {
        None: lambda y: y,
        "gelu": F.gelu,
        "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
        "silu": F.silu,
    }
    out = functions[activation](F.linear(x, w, b))
    ours, pre = reference.linear(*(y.detach().numpy() for y in (x, w, b)), activation=activation)
    close(ours, out)
    g = RNG.standard_normal(out.shape)
    out.backward(torch.tensor(g))
    grads = reference.linear_backward(g, x.detach().numpy(), w.detach().numpy(), pre, activation=activation)
    for ours, theirs in zip(grads, (x, w, b), strict=True):
        close(ours, theirs.grad)


def test_norms():
    x, w, b = t(RNG.standard_normal((2, 3, 6))), t(RNG.standard_normal(6)), t(RNG.standard_normal(6))
    g = RNG.standard_normal(x.shape)
    out = F.layer_norm(x, (6,), w, b, 1e-3)
    ours, mean, rstd = reference.layer_norm(*(y.detach().numpy() for y in (x, w, b)), eps=1e-3)
    close(ours, out)
    out.backward(torch.tensor(g))
    arrays = x.detach().numpy(), w.detach().numpy()
    for ours, theirs in zip(reference.layer_norm_backward(g, *arrays, mean, rstd), (x, w, b), strict=True):
        close(ours, theirs.grad)
    x.grad = w.grad = None
    out = F.rms_norm(x, (6,), w, 1e-3)
    ours, rstd = reference.rms_norm(*arrays, eps=1e-3)
    close(ours, out)
    out.backward(torch.tensor(g))
    for ours, theirs in zip(reference.rms_norm_backward(g, *arrays, rstd), (x, w), strict=True):
        close(ours, theirs.grad)


def test_softmax_and_swiglu():
    x, u = t(RNG.standard_normal((3, 4, 5))), t(RNG.standard_normal((3, 4, 5)))
    g = RNG.standard_normal(x.shape)
    for name, function in (("softmax", F.softmax), ("log_softmax", F.log_softmax)):
        out = function(x, 1)
        ours = getattr(reference, name)(x.detach().numpy(), 1)
        close(ours, out)
        x.grad = None
        out.backward(torch.tensor(g))
        close(getattr(reference, name + "_backward")(g, ours, 1), x.grad)
    x.grad = None
    out = F.silu(x) * u
    out.backward(torch.tensor(g))
    close(reference.swiglu(x.detach().numpy(), u.detach().numpy()), out)
    for ours, theirs in zip(reference.swiglu_backward(g, x.detach().numpy(), u.detach().numpy()), (x, u), strict=True):
        close(ours, theirs.grad)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy(reduction, label_smoothing):
    x, targets = t(RNG.standard_normal((6, 5))), np.array([0, 4, -100, 2, 2, -100])
    options = dict(reduction=reduction, label_smoothing=label_smoothing)
    loss = F.cross_entropy(x, torch.tensor(targets), **options)
    ours, lse = reference.cross_entropy(x.detach().numpy(), targets, **options)
    close(ours, loss)
    close(lse, x.logsumexp(-1))
    g = RNG.standard_normal(loss.shape)
    loss.backward(torch.as_tensor(g))
    close(reference.cross_entropy_backward(g, x.detach().numpy(), targets, **options), x.grad)


def test_rope_is_a_complex_rotation():
    q = RNG.standard_normal((1, 1, 3, 6))
    positions = np.array([5, 0, 1000])
    angle = positions[:, None] * 100.0 ** (-np.arange(0, 4, 2) / 4)
    turned = (q[..., 0:4:2] + 1j * q[..., 1:4:2]) * np.exp(1j * angle)
    ours, _ = reference.rope(q, None, positions, theta=100.0, rotary_dim=4, interleaved=True)
    close(ours[..., 0:4:2], turned.real)
    close(ours[..., 1:4:2], turned.imag)
    close(ours[..., 4:], q[..., 4:])
    turned = (q[..., 0:2] + 1j * q[..., 2:4]) * np.exp(-1j * angle)
    ours, _ = reference.rope(q, None, positions, theta=100.0, rotary_dim=4, inverse=True)
    close(ours[..., 0:2], turned.real)
    close(ours[..., 2:4], turned.imag)
    close(reference.rope_table(q, None, np.cos(angle)[None], np.sin(angle)[None], inverse=True)[0], ours)


class TestToleranceRule:
    """The rule must be able to fail."""

    def test_masks_come_first(self):
        one = np.ones(3)
        for bad in (np.nan, np.inf, -np.inf):
            with pytest.raises(AssertionError, match="differs"):
                testing.assert_close(np.array([1, bad, 1]), one, "float32")
            with pytest.raises(AssertionError, match="differs"):
                testing.assert_close(one, np.array([1, bad, 1]), "float32", baseline=np.array([1, bad, 1]))

    def test_cap_holds_whatever_the_baseline(self):
        with pytest.raises(AssertionError, match="cap"):
            testing.assert_close(np.ones(2) + 1e-4, np.ones(2), "float32", baseline=np.ones(2) + 1.0)

    def test_twice_the_baseline(self):
        truth = np.ones(2)
        testing.assert_close(truth + 4e-6, truth, "float32", baseline=truth + 3e-6)
        with pytest.raises(AssertionError, match="framework"):
            testing.assert_close(truth + 4e-6, truth, "float32", baseline=truth + 1e-6)

    def test_shape(self):
        with pytest.raises(AssertionError, match="shape"):
            testing.assert_close(np.ones(2), np.ones(3), "float32")

    def test_bfloat16_bits_are_torchs(self):
        x = np.concatenate([RNG.standard_normal(1000), [0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-40]])
        x = x.astype(np.float32)
        theirs = torch.from_numpy(x).bfloat16()
        np.testing.assert_array_equal(testing.from_bfloat16_bits(testing.bfloat16_bits(x)), theirs.float().numpy())


@pytest.mark.parametrize("sink", [float(torch.finfo(torch.float32).min), -1e9, 0.5, float("-inf")])
@pytest.mark.parametrize("fill", [float(torch.finfo(torch.float32).min), -1e9, 0.0, float("-inf")])
def test_gradients_of_sinks_and_bias_far_from_0(sink, fill):
    """Against autograd in float64: rows whose bias is `fill` throughout, beside a sink as far from 0."""
    generator = torch.Generator().manual_seed(0)

    def f(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v, grad = f(1, 2, 3, 4), f(1, 2, 5, 4), f(1, 2, 5, 4), f(1, 2, 3, 4)
    sinks = torch.tensor([sink, sink], dtype=torch.float64, requires_grad=True)
    bias = torch.full((1, 1, 3, 5), fill, dtype=torch.float64)
    bias[0, 0, 1] = 0.0
    bias.requires_grad_()
    score = q @ k.transpose(2, 3) / 2 + bias
    score = torch.cat([score, sinks[None, :, None, None].expand(1, 2, 3, 1)], 3)
    seen = ~score.isneginf().all(3)  # eager gives NaN to a row that sees nothing, we give 0
    weight = torch.softmax(torch.where(seen[..., None], score, 0.0), 3)[..., :-1] * seen[..., None]
    (weight @ v).backward(grad)
    found = reference.attention_backward(
        grad.numpy(), q.numpy(), k.numpy(), v.numpy(), bias=bias.detach().numpy(), sinks=sinks.detach().numpy()
    )
    np.testing.assert_allclose(found["sinks"], sinks.grad.numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found["bias"], bias.grad.numpy(), rtol=1e-12, atol=1e-14)
