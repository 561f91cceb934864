"""What only the Triton backend has: how it is chosen, what it refuses, traps in its own tiles, and that it is
optional.

The op tests cover the rest: they run with backend="triton" as with every framework (conftest.py).
"""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch

import flashkernel as fk
from conftest import HAS_GPU, HAS_TRITON_WHEELS, NO_TRITON_WHEELS, Maker, f64
from flashkernel import reference, testing

if not HAS_TRITON_WHEELS:
    pytest.skip(NO_TRITON_WHEELS, allow_module_level=True)
import flashkernel.triton as fk_triton

DEVICE = "cuda" if HAS_GPU else "cpu"


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device=DEVICE)


def index(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def test_interpreted_exactly_without_a_gpu():
    assert fk_triton.IS_INTERPRETED == (not HAS_GPU) and fk_triton.default_device() == DEVICE


@pytest.mark.parametrize("name", fk_triton.OPS)
def test_same_signature_and_an_example(name):
    # Annotations are for people and the stub: these parameters are those of the library's op, less the keyword itself.
    own = [(p.name, p.kind, p.default) for p in inspect.signature(getattr(fk_triton, name)).parameters.values()]
    library = [(p.name, p.kind, p.default) for p in inspect.signature(getattr(fk, name)).parameters.values()]
    assert [*own, ("backend", inspect.Parameter.KEYWORD_ONLY, None)] == library
    doc = getattr(fk_triton, name).__doc__
    assert "Raises:" in doc
    test = doctest.DocTestParser().get_doctest(inspect.cleandoc(doc), {}, name, None, 0)
    report: list[str] = []
    result = doctest.DocTestRunner().run(test, out=report.append)
    assert result.attempted and not result.failed, "".join(report)


def test_every_op_with_kernels_is_there():
    assert set(fk_triton.OPS) == {name for name in fk.__all__ if "backend:" in (getattr(fk, name).__doc__ or "")}


def test_selected_by_backend():
    x = ones(3)
    calls = {row.id: row.calls for row in fk.kernels()}
    assert fk.add(x, x, backend="triton").tolist() == [2.0, 2.0, 2.0]
    assert {row.id: row.calls for row in fk.kernels()} == calls  # none of the library's own
    if not HAS_GPU:
        assert fk.add(x, x, backend=None).tolist() == [2.0, 2.0, 2.0]
        assert {row.id for row in fk.kernels() if row.calls != calls[row.id]} == {fk.explain("add", x, x).kernel}
    with pytest.raises(ValueError, match="add: backend='cuda'; None or 'triton' is needed"):
        fk.add(x, x, backend="cuda")
    with pytest.raises(ValueError, match="explain: backend='triton'"):
        fk.explain("add", x, x, backend="triton")


def test_optional():
    """`import flashkernel` brings neither torch nor triton; without triton the error says what to install."""
    program = """
import sys, flashkernel as fk, numpy as np
assert not {"torch", "triton"} & set(sys.modules)
sys.modules["triton"] = None
try:
    fk.add(np.ones(1), np.ones(1), backend="triton")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'flashkernel[triton]'" in done.stdout


q, pages = ones(1, 4, 3, 8), ones(4, 16, 2, 8)
bytes_, scale = ones(4, 16, 2, 8, dtype=torch.uint8), ones(2)
table = index(0, 1, dtype=torch.int32).view(1, 2)
REFUSED = [
    (lambda: fk_triton.attention(np.ones((1, 4, 3, 8), np.float32), q, q), r"attention: q is a numpy\.ndarray"),
    (lambda: fk_triton.attention_paged(q, pages, pages, table, index(20), check=True), "attention_paged: check=True"),
    (lambda: fk_triton.layer_norm(ones(4, 3, 8).transpose(0, 1)), r"layer_norm: x has strides .* one stride"),
    (lambda: fk_triton.linear(ones(4, 3, 8).transpose(0, 1), ones(2, 8)), "linear: x has strides"),
    (
        lambda: fk_triton.attention(ones(1, 1, 2, 257), ones(1, 1, 2, 257), ones(1, 1, 2, 8)),
        r"q has head_dim 257.* 1 to 256",
    ),
]
INVALID = [
    (lambda: fk_triton.attention(q, ones(1, 2, 5, 6), ones(1, 2, 5, 6)),
     r"attention: k\.shape\[3\]=6 but q\.shape\[3\]=8"),
    (lambda: fk_triton.attention(q, ones(1, 3, 5, 8), ones(1, 3, 5, 8)), "attention: .* a multiple is needed"),
    (lambda: fk_triton.attention(q, q.half(), q), "attention: k is float16 but q is float32"),
    (lambda: fk_triton.attention(ones(1, 1, 2, 513), ones(1, 1, 2, 513), ones(1, 1, 2, 513)), "1 to 512"),
    (lambda: fk_triton.attention(ones(1, 4, 3, 16)[..., ::2], q, q), r"attention: q\.strides\[-1\]=2"),
    (lambda: fk_triton.attention(q, q, q, out=q), "attention: out shares memory with q; a written tensor needs"),
    (lambda: fk_triton.add(q, q, out=ones(1, 4, 3, 1).expand(1, 4, 3, 8)), r"add: out\.stride\[3\]=0 over 8 elements"),
    (lambda: fk_triton.attention(q, q, q, window=(1,)), "attention: window has 1 entries"),
    (lambda: fk_triton.attention(q, q, q, softcap=-1.0), "attention: softcap=-1.0"),
    (lambda: fk_triton.attention(q, q, q, bias=ones(1, 4, 3, 4)), "attention: bias has shape"),
    (lambda: fk_triton.attention_backward(q, q, q, q, q, ones(1, 4, 3), need_bias=True),
     "need_bias=True without a bias"),
    (lambda: fk_triton.kv_read(pages, pages, table, index(20)), "kv_read: max_seq is missing"),
    (lambda: fk_triton.kv_read(pages, pages, table, index(20), max_seq=2**31 - 1),
     "max_seq=2147483647; needs 32 or less"),
    (lambda: fk_triton.kv_read(pages, pages, table, index(20), max_seq=9, out_dtype="float32"), "out_dtype is given"),
    (lambda: fk_triton.kv_read(bytes_, bytes_, table, index(20), max_seq=20, kv_dtype="int8", kv_scales=(scale, scale),
                         out_dtype="int8"), "kv_read: out_dtype='int8'"),
    (lambda: fk_triton.attention_paged(q, pages, pages, table, index(20), kv_scales=(scale, scale)),
     "scales are given but k_pages is float32"),
    (lambda: fk_triton.attention_paged(q, bytes_, bytes_, table, index(20), kv_scales=(scale, scale)),
     "k_pages has dtype uint8; pass kv_dtype"),
    (lambda: fk_triton.attention_paged(q, bytes_, bytes_, table, index(20), kv_dtype="int8"), "k_scales is absent"),
    (lambda: fk_triton.attention_paged(q, bytes_, bytes_, table, index(20), kv_dtype="int8",
                                       kv_scales=(scale, ones(3))),
     r"v_scales\.shape\[0\]=3; 2 is needed"),
    (lambda: fk_triton.attention_paged(q, bytes_, bytes_, table, index(20), kv_dtype="int8", kv_scales=scale),
     "a pair"),
    (lambda: fk_triton.kv_copy_pages(bytes_, bytes_, index(0), index(1), kv_dtype="float16"), "kv_dtype='float16'"),
    (lambda: fk_triton.kv_copy_pages(pages, pages, index(0), index(1), kv_dtype="int8"),
     "float32 but kv_dtype is int8"),
    (lambda: fk_triton.kv_append(ones(1, 2, 8), ones(1, 2, 8), bytes_, bytes_, index(0), kv_dtype="int8",
                           kv_scales=(scale, ones(4, 2, 16))), r"k_scales is \[2\] but v_scales is \[4, 2, 16\]"),
    (lambda: fk_triton.kv_append(ones(1, 2, 8), ones(1, 2, 8), pages, pages, index(0), rope={"theta": 1.0}),
     "positions"),
    (lambda: fk_triton.rope(q, rotary_dim=3), "rope: rotary_dim=3"),
    (lambda: fk_triton.linear(ones(2, 3), ones(4, 5)), r"linear: weight\.shape\[1\]=5 but x\.shape\[1\]=3"),
    (lambda: fk_triton.linear(ones(2, 3), ones(4, 3), activation="relu"), "activation='relu'"),
    (lambda: fk_triton.reduce_sum(ones(2, 3), (0, 0)), "names a dim twice"),
    (lambda: fk_triton.cross_entropy(ones(2, 3), index(0, 1), reduction="max"), "reduction='max'"),
]  # fmt: skip


@pytest.mark.parametrize("call, message", REFUSED, ids=range(len(REFUSED)))
def test_refused(call, message):
    with pytest.raises(NotImplementedError, match=message):
        call()


@pytest.mark.parametrize("call, message", INVALID, ids=range(len(INVALID)))
def test_invalid(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Tiles: the interpreter's are 16 x 16, so that these shapes have whole, cut and partly hidden ones.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (20, 3)},
        {"window": (None, -1)},
        {"causal": True, "window": (17, None), "softcap": 2.0},
    ],
)
def test_many_tiles(options):
    make = Maker("triton", "float32", 1)
    q, k, v = make.normal(1, 2, 37, 33), make.normal(1, 1, 70, 33), make.normal(1, 1, 70, 20)
    out, lse = fk_triton.attention(q, k, v, return_lse=True, **options)
    truth, true_lse = reference.attention(f64(q), f64(k), f64(v), **options)
    make.check(out, truth)
    testing.assert_close(lse, true_lse, "float32")
    grad = make.normal(*out.shape)
    grads = fk_triton.attention_backward(grad, q, k, v, out, lse, **options)
    truth = reference.attention_backward(f64(grad), f64(q), f64(k), f64(v), **options)
    for name, ours in zip(("q", "k", "v"), grads, strict=True):
        make.check(ours, truth[name], scale=4.0, what=f"grad_{name}")
    again = fk_triton.attention_backward(grad, q, k, v, out, lse, **options)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_hidden_does_not_reach_a_gradient(value):
    """Causal: the last key is seen by the last query only, and what is not finite in it reaches nothing else."""
    make = Maker("triton", "float32", 2)
    q, k, v, grad = (make.rng.standard_normal((1, 1, 20, 8)) for _ in range(4))
    out, lse = reference.attention(q, k, v, causal=True)
    clean = reference.attention_backward(grad, q, k, v, causal=True)
    k[0, 0, 19], v[0, 0, 19] = value, value
    arrays = [make.array(x) for x in (grad, q, k, v, out)]
    dq, dk, dv = fk_triton.attention_backward(*arrays, make.array(lse, "float32"), causal=True)
    testing.assert_close(f64(dq)[:, :, :19], clean["q"][:, :, :19], "float32", scale=4.0)
    assert np.isnan(f64(dq)[:, :, 19]).all()
    forward = fk_triton.attention(*arrays[1:4], causal=True)
    testing.assert_close(f64(forward)[:, :, :19], out[:, :, :19], "float32")
    assert not np.isfinite(f64(forward)[:, :, 19]).any()
    assert dk.shape == dv.shape == k.shape


@pytest.mark.parametrize("length", [0, 1, 16, 100])
def test_paged_splits(length):
    """One query per sequence over capacity for several splits, some of which have no key."""
    make = Maker("triton", "float32", 3)
    k_pages, v_pages = make.normal(9, 16, 2, 8), make.normal(9, 16, 2, 8)
    table, lens = index(8, 1, 7, 2, 6, 3, 5, dtype=torch.int32).view(1, 7), index(length)
    q, sinks = make.normal(1, 6, 1, 8), make.array(make.rng.standard_normal(6))
    for options in ({}, {"sinks": sinks}, {"causal": True, "window": (20, 0)}):
        out, lse = fk_triton.attention_paged(q, k_pages, v_pages, table, lens, return_lse=True, **options)
        given = {n: f64(x) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        truth, true_lse = reference.attention_paged(
            f64(q), f64(k_pages), f64(v_pages), table.cpu().numpy(), [length], **given
        )
        make.check(out, truth)
        testing.assert_close(lse, true_lse, "float32")


def test_bad_page_ids_read_no_keys():
    make = Maker("triton", "float32", 4)
    pages, q = make.normal(4, 16, 2, 8), make.normal(2, 2, 1, 8)
    out = fk_triton.attention_paged(q, pages, pages, index(1 << 29, -5, dtype=torch.int32).view(2, 1), index(16, 16))
    assert (out == 0).all()


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8"])
def test_every_element(kv_dtype):
    """All 256 bytes: their numbers, and that a number is stored as itself; the roundings between them."""
    pages = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(1, 16, 1, 16)
    options = {"kv_scales": (ones(1), ones(1)), "kv_dtype": kv_dtype}
    table, lens = index(0, dtype=torch.int32).view(1, 1), index(16)
    values, _ = fk_triton.kv_read(pages, pages, table, lens, max_seq=16, **options)
    expected = pages.cpu().view(getattr(torch, kv_dtype)).float()
    assert torch.equal(values.cpu().view(torch.int32), expected.view(torch.int32)) or torch.equal(
        values.cpu().nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9)
    )
    stored = torch.zeros_like(pages)
    fk_triton.kv_append(values[0], values[0], stored, stored.clone(), index(*range(16)), **options)
    again, _ = fk_triton.kv_read(stored, stored, table, lens, max_seq=16, **options)
    low = -127.0 if kv_dtype == "int8" else -448.0  # int8's -128 is never stored
    np.testing.assert_array_equal(f64(again), np.maximum(f64(values), low))
    known = np.unique(f64(values)[np.isfinite(f64(values))])
    halves = (known[1:] + known[:-1]) / 2
    x = np.concatenate(
        [halves, np.nextafter(halves.astype(np.float32), np.float32(np.inf)), -halves, [1e9, -1e9, np.inf]]
    )
    x = torch.from_numpy(np.resize(x, (-(-len(x) // 16), 1, 16)).astype(np.float32)).to(DEVICE)
    stored = torch.zeros(-(-len(x) // 16), 16, 1, 16, dtype=torch.uint8, device=DEVICE)
    fk_triton.kv_append(x, x, stored, stored.clone(), index(*range(len(x))), **options)
    table = index(*range(len(stored)), dtype=torch.int32).view(1, -1)
    rounded, _ = fk_triton.kv_read(stored, stored, table, index(len(x)), max_seq=len(x), **options)
    elements, _ = reference.kv_quantize(f64(x), kv_dtype, 1.0)
    np.testing.assert_array_equal(f64(rounded)[0], elements)


def test_copies_take_scales_along():
    pages = torch.arange(3 * 16 * 2 * 4, device=DEVICE).remainder(100).to(torch.int8).view(3, 16, 2, 4)
    scales = tuple(torch.rand(3, 2, 16, device=DEVICE) for _ in "kv")
    ours = pages.clone(), pages.clone().neg(), *(x.clone() for x in scales)
    fk_triton.kv_copy_pages(*ours[:2], index(0, 9), index(2, 1), kv_scales=ours[2:])
    for mine, before in zip(ours, (pages, pages.neg(), *scales), strict=True):
        assert torch.equal(mine[:2], before[:2]) and torch.equal(mine[2], before[0])


def test_long_rows():
    """More than one tile along a row: softmax (8192), layer_norm (16384), the loss (4096)."""
    make = Maker("triton", "float32", 5)
    x = make.normal(2, 16400)
    make.check(fk_triton.softmax(x), reference.softmax(f64(x)))
    total, h = fk_triton.layer_norm(x, residual=x)
    assert torch.equal(h, x + x)
    make.check(total, reference.layer_norm(f64(h))[0])
    loss, lse = fk_triton.cross_entropy(x, index(0, 16399), return_lse=True, label_smoothing=0.1)
    truth, true_lse = reference.cross_entropy(f64(x), np.array([0, 16399]), label_smoothing=0.1)
    testing.assert_close(loss, truth, "float32")
    testing.assert_close(lse, true_lse, "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_worse_than_twice_torch(dtype):
    make = Maker("triton", dtype, 6)
    q, k, v = (make.normal(1, 2, 40, 32) for _ in range(3))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    truth, _ = reference.attention(f64(q), f64(k), f64(v), causal=True)
    make.check(fk_triton.attention(q, k, v, causal=True), truth, baseline=theirs)
    x, weight = make.normal(20, 64), make.array(make.rng.standard_normal((24, 64)) / 8)
    theirs = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight), approximate="tanh")
    truth, _ = reference.linear(f64(x), f64(weight), activation="gelu_tanh")
    make.check(fk_triton.linear(x, weight, activation="gelu_tanh"), truth, baseline=theirs)
