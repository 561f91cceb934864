"""attention_fp8 against the oracle, with every kind of scale; the door to it; refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

import flashkernel as fk
from conftest import TORCH, on_host
from flashkernel import reference, testing

torch = pytest.importorskip("torch")
E4M3 = getattr(torch, "float8_e4m3fn", None)
pytestmark = pytest.mark.skipif(E4M3 is None, reason="this torch has no float8_e4m3fn")


def elements(*shape: int, seed: int = 0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(E4M3)


def f64(x):
    return x.float().numpy().astype(np.float64)


def operands(batch: int = 2, heads: int = 4, heads_kv: int = 2, seq_q: int = 17, seq_k: int = 33, dim: int = 16):
    return (
        elements(batch, heads, seq_q, dim, seed=1),
        elements(batch, heads_kv, seq_k, dim, seed=2),
        elements(batch, heads_kv, seq_k, dim, seed=3),
    )


PER_HEAD = torch.tensor([[0.5, 1.5], [2.0, 0.75]])
SCALES = {
    "none": (None, None, None),
    "numbers": (0.5, 2, 1.25),
    "one": (torch.tensor(0.5), torch.tensor([2.0]), torch.tensor([[1.25]])),
    "per head": (PER_HEAD, PER_HEAD + 0.25, PER_HEAD * 3),
    "expanded": (PER_HEAD[:1].expand(2, 2), PER_HEAD[:, :1], PER_HEAD[0]),
}


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scales", SCALES.values(), ids=list(SCALES))
def test_values(scales, out_dtype):
    q, k, v = operands()
    options = {"causal": True, "window": (20, None), "sinks": np.linspace(-1, 1, 4).astype(np.float32)}
    truth, true_lse = reference.attention_fp8(
        *map(f64, (q, k, v)), *(1.0 if x is None else np.asarray(x) for x in scales), **options
    )
    options["sinks"] = torch.from_numpy(options["sinks"])
    out, lse = fk.attention_fp8(q, k, v, *scales, out_dtype=out_dtype, return_lse=True, **options)
    assert out.dtype == TORCH[out_dtype]
    testing.assert_close(out, truth, out_dtype)
    testing.assert_close(lse, true_lse, "float32")


def test_bytes_of_numpy_and_a_given_output():
    q, k, v = operands()
    expected = fk.attention_fp8(q, k, v, 0.5, out_dtype="float16")
    out = np.zeros(expected.shape, np.float16)
    assert fk.attention_fp8(*(x.view(torch.uint8).numpy() for x in (q, k, v)), 0.5, out=out) is out
    np.testing.assert_array_equal(out, expected.numpy())


def test_sequences_side_by_side_and_tokens_in_use():
    lengths_q, lengths_k = [3, 0, 5], [7, 4, 5]
    starts_q, starts_k = ([0, *np.cumsum(x).tolist()] for x in (lengths_q, lengths_k))
    q, k, v = elements(8, 4, 16, seed=1), elements(16, 2, 16, seed=2), elements(16, 2, 16, seed=3)
    scale = torch.tensor([[0.5, 1.0], [2.0, 3.0], [1.5, 0.25]])
    given = {
        "cu_seqlens_q": torch.tensor(starts_q, dtype=torch.int32),
        "cu_seqlens_k": torch.tensor(starts_k, dtype=torch.int32),
        "causal": True,
    }
    truth, true_lse = reference.attention_fp8(
        *map(f64, (q, k, v)),
        on_host(scale),
        1.0,
        on_host(scale),
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
        causal=True,
    )
    out, lse = fk.attention_fp8(q, k, v, scale, None, scale, return_lse=True, out_dtype="float16", **given)
    testing.assert_close(out, truth, "float16")
    testing.assert_close(lse, true_lse, "float32")
    used = torch.tensor([2, 0, 4])
    part = fk.attention_fp8(
        q, k, v, scale, None, scale, seqused_q=used, out=torch.full_like(out, 7.0), **{**given, "causal": False}
    )
    assert (part[[2, 7]] == 7).all() and not (part[[0, 1, 3, 6]] == 7).all(-1).any()


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"q": torch.zeros(2, 4, 17, 16)}, "q is float32; needs float8_e4m3fn"),
        ({"v": torch.zeros(2, 2, 33, 16, dtype=torch.int8)}, "v is int8; needs float8_e4m3fn"),
        ({"q_scale": torch.ones(2, 4)}, r"q_scale.shape\[1\]=4; needs 1 or 2 to broadcast to \[batch, heads_kv\]"),
        ({"k_scale": torch.ones(2, 2, 1)}, "k_scale is .*; needs 0 to 2 dims"),
        ({"v_scale": torch.ones(2, 2).half()}, "v_scale is float16"),
        ({"out_dtype": "float32"}, "out_dtype is float32; needs float16 or bfloat16"),
        ({"out": torch.zeros(2, 4, 17, 16)}, "out is float32; needs float16 or bfloat16"),
        ({"cu_seqlens_q": torch.tensor([0, 1])}, "cu_seqlens_k is absent"),
    ],
)
def test_refusals(change, sentence):
    arguments = dict(zip("qkv", operands(), strict=True))
    with pytest.raises(ValueError, match=f"^attention_fp8: .*({sentence})"):
        fk.attention_fp8(**{**arguments, **change})


def test_torch_op_compiles_and_refuses_gradients():
    import flashkernel.torch as fkt

    q, k, v = operands()
    scale = torch.tensor([[0.5, 1.5], [2.0, 0.75]])
    expected, expected_lse = fk.attention_fp8(q, k, v, scale, 2.0, causal=True, return_lse=True)
    compiled = torch.compile(fkt.attention_fp8, fullgraph=True, backend="aot_eager")
    for call in (fkt.attention_fp8, compiled):
        out, lse = call(q, k, v, scale, 2.0, causal=True, return_lse=True)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    with pytest.raises(NotImplementedError, match=r"^attention_fp8: .* requires a gradient"):
        fkt.attention_fp8(q, k, v, scale.requires_grad_())


@pytest.mark.parametrize("varlen", [False, True])
def test_flash_attn_3(varlen):
    """Layout and scales of its functions: descale [batch, heads_kv], output bfloat16."""
    from flashkernel.flash_attn import flash_attn_3_interface as fa3

    q, k, v = (x.transpose(1, 2).contiguous() for x in operands(seq_q=9, seq_k=9))
    scales = {"q_descale": PER_HEAD, "k_descale": PER_HEAD[:1].expand(2, 2), "v_descale": PER_HEAD + 1}
    truth, true_lse = reference.attention_fp8(
        *(f64(x.transpose(1, 2)) for x in (q, k, v)), *(x.numpy() for x in scales.values()), causal=True, scale=0.3
    )
    options = {"causal": True, "softmax_scale": 0.3, "return_attn_probs": True, **scales}
    if varlen:
        starts = torch.tensor([0, 9, 18], dtype=torch.int32)
        out, lse = fa3.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), starts, starts, 9, 9, **options)
        out, lse = out.unflatten(0, (2, 9)), lse.unflatten(1, (2, 9)).transpose(0, 1)
    else:
        out, lse = fa3.flash_attn_func(q, k, v, **options)
    assert out.dtype == torch.bfloat16
    testing.assert_close(out.transpose(1, 2), truth, "bfloat16")
    testing.assert_close(lse, true_lse, "float32")
    with pytest.raises(NotImplementedError, match=r"flash_attn_func: q_descale is given but q is torch.float32"):
        fa3.flash_attn_func(q.float(), k.float(), v.float(), q_descale=PER_HEAD)
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache: q_descale is given; float8"):
        fa3.flash_attn_with_kvcache(q, k, v, q_descale=PER_HEAD)
    with pytest.raises(NotImplementedError, match=r"flash_attn_with_kvcache: q is torch.float8_e4m3fn; float8 over a"):
        fa3.flash_attn_with_kvcache(q, k, v)
    with pytest.raises(NotImplementedError, match=r"flash_attn_func: q is torch.int8; of 8 bits, float8_e4m3fn"):
        fa3.flash_attn_func(*[x.to(torch.int8) for x in (q, k, v)])


def test_hadamard_keeps_products_and_helps_where_a_column_is_large():
    from flashkernel.quantized import hadamard

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 128, generator=generator) for _ in range(3))
    for x in (q, k):
        x[..., 5] *= 10
    signs = torch.randint(0, 2, (128,), generator=generator) * 2.0 - 1
    turned = hadamard(q, signs), hadamard(k, signs)
    products = (q @ k.mT).numpy()
    np.testing.assert_allclose(turned[0] @ turned[1].mT, products, rtol=0, atol=1e-5 * np.abs(products).max())
    np.testing.assert_allclose(hadamard(q.numpy()), hadamard(q), rtol=1e-5, atol=1e-5)
    truth, _ = reference.attention(*(x.double().numpy() for x in (q, k, v)))

    def error(*operands):
        scales = [x.abs().amax((-1, -2)) / 448 for x in operands]
        bits = [(x / scale[..., None, None]).to(E4M3) for x, scale in zip(operands, scales, strict=True)]
        return np.sqrt(np.square(f64(fk.attention_fp8(*bits, *scales, out_dtype="float16")) - truth).mean())

    assert error(*turned, v) < 0.5 * error(q, k, v)
    with pytest.raises(ValueError, match=r"^hadamard: x.shape\[-1\]=12; must be a power of two"):
        hadamard(np.ones(12))


@pytest.mark.parametrize("varlen", [False, True])
def test_e5m2_goes_by_way_of_16_bits(varlen):
    import flashkernel.torch as fkt

    q, k, v = (x.float().to(torch.float8_e5m2) for x in operands(seq_q=9, seq_k=9))
    truth, _ = reference.attention_fp8(*map(f64, (q, k, v)), PER_HEAD.numpy(), 0.5, PER_HEAD.numpy(), causal=True)
    options = {"causal": True, "out_dtype": torch.float16}
    if varlen:
        starts = torch.tensor([0, 9, 18], dtype=torch.int32)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 9, "max_seqlen_k": 9}
    out = fkt.attention_fp8(q, k, v, PER_HEAD, 0.5, PER_HEAD, **options)
    if varlen:
        out = out.unflatten(0, (2, 9)).transpose(1, 2)
    testing.assert_close(out, truth, "float16", scale=4)  # operands are rounded once more


def test_weights_are_powers_of_two_where_scores_are_whole():
    """What the tests of kernels rely on: scores times ln 2, whose weights e4m3 has."""
    q, k, v = operands()
    q, k = (torch.sign(x.float()).to(E4M3) for x in (q, k))
    out = fk.attention_fp8(q, k, v, scale=math.log(2.0), out_dtype="float16")
    scores = np.einsum("bhid,bhjd->bhij", f64(q), np.repeat(f64(k), 2, 1))
    weights = 2.0 ** (scores - scores.max(-1, keepdims=True))
    truth = weights @ np.repeat(f64(v), 2, 1) / weights.sum(-1, keepdims=True)
    testing.assert_close(out, truth, "float16")


def test_the_lse_of_tokens_not_in_use_is_minus_infinity():
    import flashkernel.torch as fkt

    elements = torch.ones(12, 2, 16).to(torch.float8_e4m3fn)
    starts, used = torch.tensor([0, 5, 5, 12], dtype=torch.int32), torch.tensor([2, 0, 4])
    keep = torch.empty(1 << 16).fill_(7.0)  # memory that the next result may get
    del keep
    for compiled in (False, True):
        call = torch.compile(fkt.attention_fp8, backend="eager") if compiled else fkt.attention_fp8
        with torch.no_grad():
            _, lse = call(
                elements, elements, elements, cu_seqlens_q=starts, cu_seqlens_k=starts, seqused_q=used, return_lse=True
            )
        unused = [2, 3, 4, 9, 10, 11]
        assert (lse[:, unused] == -math.inf).all() and lse[:, [0, 1, 5, 8]].isfinite().all()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("varlen", [False, True])
def test_a_scale_of_one_element_keeps_the_dtype_of_e5m2(shape, varlen):
    import flashkernel.torch as fkt

    x = torch.ones(1, 2, 4, 16).to(torch.float8_e5m2)
    options = {}
    if varlen:
        starts = torch.tensor([0, 4], dtype=torch.int32)
        x, options = x[0].transpose(0, 1).contiguous(), {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    out = fkt.attention_fp8(x, x, x, torch.full(shape, 0.5), None, torch.full(shape, 0.25), **options)
    assert out.dtype == torch.bfloat16 and (out == 0.25).all()
