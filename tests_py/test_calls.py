"""How ops are called: signatures that `inspect` reads, the keyword `backend`, and sentences about wrong calls."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import numpy as np
import pytest
from flashkernel._C import OPS

import flashkernel as fk
from test_op_tables import NO_TWIN

x = np.ones((2, 4), np.float32)


def test_every_op_is_bound_and_every_bound_one_is_listed():
    assert set(OPS) == {name for name in fk.__all__ if inspect.isbuiltin(getattr(fk, name))}
    assert set(OPS.values()) == {kernel.op for kernel in fk.kernels()}


@pytest.mark.parametrize("name", OPS)
def test_signature(name):
    parameters = inspect.signature(getattr(fk, name)).parameters
    assert parameters["stream"].default is None and parameters["stream"].kind is inspect.Parameter.KEYWORD_ONLY
    if name in NO_TWIN:
        assert "backend" not in parameters
        return
    if name == "pack_mask":  # whose masks are bool or uint8: no storage needs a dtype to be told
        assert [*parameters][-2:] == ["stream", "backend"] and "dtype" not in parameters
    else:
        assert [*parameters][-3:] == ["stream", "dtype", "backend"]
    assert parameters["backend"].default is None and parameters["backend"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "backend:" in getattr(fk, name).__doc__


def test_defaults_of_each_kind():
    shown = str(inspect.signature(fk.cross_entropy))
    assert shown.startswith(
        "(logits, targets, *, ignore_index=-100, label_smoothing=0.0, reduction='mean', return_lse=F"
    )
    assert inspect.signature(fk.rms_norm).parameters["eps"].default == 1e-6
    assert str(inspect.signature(fk.rms_norm_backward)).startswith(
        "(grad_out, h, weight, rstd, *, grad_residual_out=None"
    )


@pytest.mark.parametrize("name", OPS)
def test_ops_are_named_values(name):
    op = getattr(fk, name)
    assert op.__name__ == op.__qualname__ == name and op.__module__ == "flashkernel"
    assert pickle.loads(pickle.dumps(op)) is op and copy.deepcopy(op) is op


@pytest.mark.parametrize("name", OPS)
def test_wrong_calls(name):
    op = getattr(fk, name)
    parameters = inspect.signature(op).parameters.values()
    positional = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    needed = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    given = dict.fromkeys(needed, x)

    def refused(message, *args, **kwargs):
        with pytest.raises(TypeError, match=f"^{name}: {message}") as caught:
            op(*args, **kwargs)
        assert "\n" not in str(caught.value) and f"{name}(" in str(caught.value)

    for i, missing in enumerate(needed):
        refused(f"'{missing}' is missing", *([x] * i), **dict.fromkeys(needed[i + 1 :], x))
    refused(f"'{needed[0]}' is given twice", *([x] * len(needed)), **{needed[0]: x})
    refused(
        f"{len(positional) + 1} positional arguments are given and at most {len(positional)} are",
        *(x, *[x] * len(positional)),
    )
    refused("unknown keyword 'no_such_thing'; the call is", **given, no_such_thing=1)
    refused("unknown keyword 'streem'; did you mean 'stream'", **given, streem=None)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: fk.rms_norm(x, epsilon=1e-5), "rms_norm: unknown keyword 'epsilon'; did you mean 'eps'?"),
        (lambda: fk.attention(x, x, x, softmax_scale=1.0), "did you mean 'scale'?"),
        (lambda: fk.attention(x, x, x, is_causal=True), "did you mean 'causal'?"),
        (lambda: fk.attention(x, x, x, **{"ca" + "sal": True}), "did you mean 'causal'?"),
        (lambda: fk.rms_norm(x, eps="small"), "rms_norm: eps is a str ('small'); float is needed"),
        (lambda: fk.attention(x, x, x, scale="big"), "attention: scale is a str ('big'); float or None is needed"),
        (lambda: fk.attention(x, x, x, causal=1), "attention: causal is an int (1); bool is needed"),
        (lambda: fk.attention(x, x, x, causal=None), "attention: causal is None; bool is needed"),
        (lambda: fk.softmax(x, 1.5), "softmax: axis is a float (1.5); int is needed"),
        (lambda: fk.softmax(x, 2**80), "softmax: axis is an int (1208925819614629174706176); int is needed"),
        (lambda: fk.linear(x, x, activation=3), "linear: activation is an int (3); str or None is needed"),
        (
            lambda: fk.cross_entropy(x, x, reduction=2),
            "cross_entropy: reduction is an int (2); Literal['none', 'sum', 'mean'] is needed",
        ),
        (lambda: fk.rms_norm(None), "rms_norm: x is None; an array that speaks DLPack is needed"),
    ],
)
def test_sentences(call, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        call()


def test_backend_is_a_keyword():
    out = np.zeros_like(x)
    assert fk.add(x, x, out=out, backend=None) is out and out.max() == 2
    for wrong in ("cuda", 3, b"triton"):
        with pytest.raises(ValueError, match=r"^add: backend=.*; None or 'triton' is needed"):
            fk.add(x, x, backend=wrong)
    with pytest.raises(TypeError, match=r"^check_block_table: unknown keyword 'backend'"):
        fk.check_block_table(x, x, 1, 16, backend=None)


def test_keywords_need_not_be_interned():
    name = "".join(["e", "ps"])
    assert fk.rms_norm(2 * x, **{name: 0.0}).tolist() == x.tolist()


# --- the order of dims


def test_heads_come_first():
    import flashkernel.torch as fkt

    for text in (fk.attention.__doc__, fkt.attention.__doc__):
        beginning = " ".join(text[:600].split())
        assert "Heads come before seq: [batch, heads, seq, head_dim]" in beginning
        assert "``q.transpose(1, 2)``" in beginning and "[batch, seq, heads, head_dim]" in beginning


def test_flash_attns_order_is_recognised_where_it_is_refused():
    def made(*shape):
        return np.ones(shape, np.float32)

    q, k = made(2, 1, 8, 16), made(2, 100, 2, 16)  # [batch, seq, heads, head_dim]: one token, 8 heads over 2
    for other in (k, made(2, 100, 8, 16)):
        with pytest.raises(ValueError, match=r"^attention: .*; heads come before seq here: pass q.transpose\(1, 2\)"):
            fk.attention(q, other, other)
    assert fk.attention(*(a.transpose(0, 2, 1, 3) for a in (q, k, k))).shape == (2, 8, 1, 16)
    for other in (made(2, 3, 5, 16), made(2, 3, 100, 16)):  # wrong in both orders, or in another way
        with pytest.raises(ValueError, match=r"^attention: ") as caught:
            fk.attention(made(2, 4, 8, 16), other, other)
        assert "heads come before seq here" not in str(caught.value)
