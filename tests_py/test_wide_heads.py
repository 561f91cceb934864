"""Head dims over 256, up to 512: the ops, their gradients, pages, and the doors of torch and flash-attn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flashkernel as fk
import flashkernel.flash_attn as fa
from conftest import f64
from flashkernel import reference, testing
from flashkernel.torch import scaled_dot_product_attention

DIMS = [(512, 512), (320, 512), (264, 24)]


@pytest.mark.parametrize("d, dv", DIMS)
def test_forward_and_backward(make, d, dv):
    if make.framework == "triton":
        with pytest.raises(NotImplementedError, match="the Triton kernels take 1 to 256"):
            fk.attention(make.normal(1, 1, 2, 512), make.normal(1, 1, 2, 512), make.normal(1, 1, 2, 8), **make.kwargs)
        return
    q, k, v = make.normal(1, 4, 5, d), make.normal(1, 2, 9, d), make.normal(1, 2, 9, dv)
    out, lse = fk.attention(q, k, v, causal=True, return_lse=True, **make.kwargs)
    truth, true_lse = reference.attention(f64(q), f64(k), f64(v), causal=True)
    make.check(out, truth)
    testing.assert_close(lse, true_lse, "float32")
    grad_out = make.normal(*out.shape)
    grads = fk.attention_backward(grad_out, q, k, v, out, lse, causal=True, **make.kwargs)
    expected = reference.attention_backward(f64(grad_out), f64(q), f64(k), f64(v), causal=True)
    for name, grad in zip("qkv", grads, strict=True):
        make.check(grad, expected[name], scale=4.0, what=f"grad_{name}")


@pytest.mark.parametrize("seq_q", [1, 3])
def test_paged(make, seq_q):
    if make.framework == "triton":
        return  # no kernel: test_forward_and_backward
    k_pages, v_pages = make.normal(6, 16, 2, 512), make.normal(6, 16, 2, 512)
    table, lengths = np.array([[4, 1], [0, 5]], np.int32), np.array([21, 9], np.int32)
    q = make.normal(2, 8, seq_q, 512)
    indices = make.index(table, np.int32), make.index(lengths, np.int32)
    out = fk.attention_paged(q, k_pages, v_pages, *indices, causal=True, **make.kwargs)
    make.check(out, reference.attention_paged(f64(q), f64(k_pages), f64(v_pages), table, lengths, causal=True)[0])


def attention_of_torch(q, k, v):
    scores = (q @ k.repeat_interleave(2, 1).transpose(-1, -2)) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)


@pytest.mark.parametrize("door", ["flash_attn", "sdpa"])
def test_doors_have_gradients(door):
    q, k, v = (torch.randn(1, heads, 6, 512, requires_grad=True) for heads in (4, 2, 2))
    if door == "sdpa":
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        out = fa.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), weights)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = attention_of_torch(*exact)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    for got, want in zip(grads, torch.autograd.grad(expected, exact, weights.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
