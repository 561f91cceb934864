"""Boolean masks as packed bits, and the forms of ALiBi: attention, its gradients, scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashkernel as fk
from conftest import Maker, f64, on_host
from flashkernel import reference, testing

SHAPES = [(9,), (3, 1), (2, 33), (2, 1, 4, 64), (3, 70)]


def _arrays(seq_q: int, seq_k: int, heads_kv: int = 2) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(7)
    q = rng.standard_normal((2, 4, seq_q, 48)).astype(np.float32)
    k, v = (rng.standard_normal((2, heads_kv, seq_k, 48)).astype(np.float32) for _ in range(2))
    return q, k, v


def _masks(seq_q: int, seq_k: int) -> dict[str, np.ndarray]:
    i, j = np.arange(seq_q)[:, None], np.arange(seq_k)[None, :]
    draft = j - (seq_k - seq_q)
    tree = (draft < 0) | (draft == i) | (draft == (i - 1) // 2) | (draft == 0)
    scattered = np.random.default_rng(3).random((2, 4, seq_q, seq_k)) < 0.4
    scattered[1, 2, 3] = False  # a row that sees nothing
    return {
        "padding": (j < np.array([seq_k - 37, 5])[:, None])[:, None, None, :],
        "blocks": (i // 16 == j // 24),
        "tree": tree[None],
        "scattered": scattered,
        "rows_of_heads": scattered[:1, :, :1],
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_pack_mask(shape: tuple[int, ...]) -> None:
    mask = np.random.default_rng(1).random(shape) < 0.5
    bits = fk.pack_mask(mask)
    assert bits.dtype == np.int32
    np.testing.assert_array_equal(bits, reference.pack_mask(mask))
    as_bytes = np.packbits(mask, axis=-1, bitorder="little")
    np.testing.assert_array_equal(np.ascontiguousarray(bits).view(np.uint8)[..., : as_bytes.shape[-1]], as_bytes)
    # Any strides, and uint8 of any value.
    turned = np.moveaxis(np.ascontiguousarray(np.moveaxis(mask, -1, 0)), 0, -1)
    np.testing.assert_array_equal(fk.pack_mask(turned), bits)
    np.testing.assert_array_equal(fk.pack_mask(mask.astype(np.uint8) * 192), bits)
    expanded = np.broadcast_to(mask, (3, *shape)) if len(shape) < 4 else mask
    np.testing.assert_array_equal(fk.pack_mask(expanded), np.broadcast_to(bits, (*expanded.shape[:-1], bits.shape[-1])))


@pytest.mark.parametrize("kind", ["padding", "blocks", "tree", "scattered", "rows_of_heads"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_gradients(kind: str, causal: bool) -> None:
    q, k, v = _arrays(70, 133)
    mask = fk.pack_mask(_masks(70, 133)[kind])
    options: dict[str, Any] = {"mask": mask, "causal": causal}
    out, lse = fk.attention(q, k, v, **options, return_lse=True)
    truth, true_lse = reference.attention(q, k, v, **options)
    np.testing.assert_allclose(out, truth, atol=3e-6)
    np.testing.assert_allclose(lse, true_lse, atol=3e-6)
    grad = np.random.default_rng(9).standard_normal(out.shape).astype(np.float32)
    expected = reference.attention_backward(grad, q, k, v, **options)
    for name, given in zip("qkv", fk.attention_backward(grad, q, k, v, out, lse, **options), strict=True):
        np.testing.assert_allclose(given, expected[name], atol=1e-5)


def test_what_a_mask_hides_is_not_read() -> None:
    q, k, v = _arrays(20, 65)
    seen = np.ones((20, 65), bool)
    seen[:, 40] = False
    k[:, :, 40], v[:, :, 40] = np.nan, np.inf
    without = [np.delete(x, 40, 2) for x in (k, v)]
    np.testing.assert_allclose(fk.attention(q, k, v, mask=fk.pack_mask(seen)), fk.attention(q, *without), atol=2e-6)
    nothing = fk.pack_mask(np.zeros((1, 65), bool))
    out, lse = fk.attention(q, k, v, mask=nothing, return_lse=True)
    assert not out.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("form", ["distance", "signed", "sqrt"])
@pytest.mark.parametrize("causal", [False, True])
def test_forms_of_alibi(form: str, causal: bool) -> None:
    q, k, v = _arrays(33, 70)
    options: dict[str, Any] = {"alibi": form, "alibi_slopes": np.linspace(0.05, 0.5, 4).astype(np.float32)}
    options["causal"] = causal
    out, lse = fk.attention(q, k, v, **options, return_lse=True)
    distance = np.arange(33)[:, None] + 70 - 33 - np.arange(70)[None, :]
    term = {"distance": np.abs(distance), "signed": distance, "sqrt": np.sqrt(np.maximum(distance, 0))}[form]
    bias = (-options["alibi_slopes"][:, None, None] * term).astype(np.float32)
    truth, true_lse = fk.attention(q, k, v, bias=bias, causal=causal, return_lse=True)
    np.testing.assert_allclose(out, truth, atol=3e-6)
    np.testing.assert_allclose(lse, true_lse, atol=1e-5)
    grad = np.ones_like(out)
    expected = reference.attention_backward(grad, q, k, v, **options)
    for name, given in zip("qkv", fk.attention_backward(grad, q, k, v, out, lse, **options), strict=True):
        np.testing.assert_allclose(given, expected[name], atol=2e-5)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"mask": np.ones((5, 9), bool)}, r"^attention: mask"),
    ({"mask": np.ones((5, 2), np.int32)}, r"^attention: mask\.shape\[1\]=2; needs 1 to broadcast"),
    ({"mask": np.ones((4, 1), np.int32)}, r"^attention: mask\.shape\[0\]=4; needs 1 or 5 to broadcast"),
    ({"alibi": "slope"}, r'^attention: alibi="slope"; needs "distance", "signed" or "sqrt"'),
]


@pytest.mark.parametrize(("options", "message"), REFUSALS)
def test_refusals(options: dict[str, Any], message: str) -> None:
    q, k, v = _arrays(5, 9)
    with pytest.raises(ValueError, match=message):
        fk.attention(q, k, v, **options)


def test_pack_mask_refuses() -> None:
    with pytest.raises(ValueError, match=r"^pack_mask: mask is float32"):
        fk.pack_mask(np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match=r"^pack_mask: out\.shape\[1\]=2 but the words of 32 keys"):
        fk.pack_mask(np.ones((2, 3), bool), out=np.zeros((2, 2), np.int32))


@pytest.mark.parametrize("kind", ["padding", "blocks", "tree", "scattered"])
def test_sdpa_reads_the_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's results and gradients, by way of the packed mask alone: no tensor of floats of the mask's size."""
    torch = pytest.importorskip("torch")
    fkt = pytest.importorskip("flashkernel.torch")

    given: list[dict[str, Any]] = []
    ours = fk.attention

    def attention(*args: Any, **options: Any) -> Any:
        given.append(options)
        return ours(*args, **options)

    monkeypatch.setattr(fk, "attention", attention)
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in _arrays(70, 133))
    mask = torch.from_numpy(_masks(70, 133)[kind])
    mask = mask | (torch.arange(133) == 0)  # torch gives NaN for a row that sees nothing
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    grad = torch.ones_like(theirs)
    expected = torch.autograd.grad(theirs, (q, k, v), grad)
    out = fkt.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, theirs, atol=3e-6, rtol=0)
    for ours_, other in zip(torch.autograd.grad(out, (q, k, v), grad), expected, strict=True):
        torch.testing.assert_close(ours_, other, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(fkt.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), out.detach())
    assert len(given) == 2
    for options in given:
        assert options.get("bias") is None
        assert options["mask"].dtype == torch.int32 and options["mask"].shape == (*mask.shape[:-1], 5)


def test_sdpa_masks_that_were_expanded() -> None:
    """A mask expanded over batch, heads and rows is packed once; one of a single column holds for every key."""
    torch = pytest.importorskip("torch")
    from flashkernel.torch.sdpa import mask_option

    mask = torch.rand(1, 1, 1, 133) < 0.5
    assert mask_option(mask.expand(2, 4, 70, 133), torch.float32, 133)["mask"].shape == (1, 1, 1, 5)
    assert mask_option(torch.ones(70, 1, dtype=torch.bool), torch.float32, 133)["mask"].shape == (70, 5)
    assert mask_option(torch.tensor(True), torch.float32, 40)["mask"].tolist() == [-1, 255]


def test_torch_compile_packs_too() -> None:
    torch = pytest.importorskip("torch")
    fkt = pytest.importorskip("flashkernel.torch")

    q, k, v = (torch.from_numpy(x) for x in _arrays(9, 40))
    mask = torch.rand(9, 40) < 0.5
    compiled = torch.compile(fkt.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(q, k, v, mask, enable_gqa=True), fkt.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    )


def _tree(count: int) -> np.ndarray:
    """Query i sees its ancestors i // 2, i // 4, .. and itself, counted from 1."""
    seen = np.zeros((count, count), bool)
    for i in range(count):
        at = i + 1
        while at:
            seen[i, at - 1] = True
            at //= 2
    return seen


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_trees_over_pages(framework: str, dtype: str) -> None:
    """Bits of the last keys, alone and beside other options; of queries side by side, rows lie below each other."""
    make = Maker(framework, dtype)
    k, v = make.normal(8, 16, 2, 32), make.normal(8, 16, 2, 32)
    table, lengths = make.index([[3, 0, 5], [7, 1, 2]], np.int32), make.index([47, 9])
    q, words = make.normal(2, 4, 40, 32), reference.pack_mask(_tree(40))
    packed = make.normal(14, 4, 32)
    rows = np.zeros((1, 14, 2), np.int32)  # one word more than the 9 queries need
    rows[0, :9, :1], rows[0, 9:, :1] = reference.pack_mask(_tree(9)), reference.pack_mask(_tree(5))
    heads = reference.pack_mask(np.random.default_rng(3).random((4, 40, 40)) < 0.4)
    calls: list[tuple[Any, dict[str, Any]]] = [
        (q, {"mask": words}),
        (q, {"mask": heads, "softcap": 3.0, "causal": True}),
        (packed, {"mask": rows, "cu_seqlens_q": np.array([0, 9, 14])}),
    ]
    for queries, options in calls:
        given = {
            name: make.index(value, value.dtype) if isinstance(value, np.ndarray) else value
            for name, value in options.items()
        }
        out, lse = fk.attention_paged(queries, k, v, table, lengths, return_lse=True, **given, **make.kwargs)
        truth, true_lse = reference.attention_paged(
            f64(queries), f64(k), f64(v), on_host(table), on_host(lengths), **options
        )
        make.check(out, truth)
        testing.assert_close(lse, true_lse, "float32")


def test_a_mask_over_pages_is_one_of_dense_keys() -> None:
    rng = np.random.default_rng(4)
    pages = rng.standard_normal((4, 16, 2, 24)).astype(np.float32)
    q, table = rng.standard_normal((1, 4, 6, 24)).astype(np.float32), np.array([[2, 0, 3]], np.int32)
    keys = pages[table[0]].reshape(1, 48, 2, 24)[:, :37].transpose(0, 2, 1, 3)
    whole = np.concatenate([np.ones((6, 31), bool), _tree(6)], 1)
    expected = fk.attention(q, keys, keys, mask=fk.pack_mask(whole))
    found = fk.attention_paged(q, pages, pages, table, np.array([37]), mask=fk.pack_mask(_tree(6)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "mask, varlen, sentence",
    [
        (np.zeros((33, 1), np.int32), False, r"mask\.shape\[0\]=33; needs 1 or 40 to broadcast to"),
        (np.zeros((3, 40, 2), np.int32), False, r"mask\.shape\[0\]=3; needs 1 or 4 "),
        (np.zeros((40, 1), np.int32), False, r"mask\.shape\[1\]=1; needs 2 or more to hold the bits of 40 keys"),
        (np.zeros((1, 2), np.int32), True, r"mask\.shape\[0\]=1; needs 40 to broadcast to \[heads_q, total_q"),
        (np.zeros((1, 1, 40, 2), np.int32), True, "needs 2 to 3 dims"),
        (np.zeros((40, 2), bool), False, "mask has dtype bool"),
    ],
)
def test_masks_over_pages_that_do_not_fit(mask: np.ndarray, varlen: bool, sentence: str) -> None:
    pages, table = np.zeros((2, 16, 2, 8), np.float32), np.array([[0, 1]], np.int32)
    shape = (40, 4, 8) if varlen else (1, 4, 40, 8)
    options = {"cu_seqlens_q": np.array([0, 40])} if varlen else {}
    with pytest.raises((ValueError, TypeError), match=sentence):
        fk.attention_paged(np.zeros(shape, np.float32), pages, pages, table, np.array([20]), mask=mask, **options)
