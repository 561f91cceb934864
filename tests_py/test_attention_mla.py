"""attention_mla_decode against the oracle, and beside paged attention; refusals."""

from __future__ import annotations

import numpy as np
import pytest

import flashkernel as fk
from conftest import Maker, f64, on_host
from flashkernel import reference, testing

TABLE, LENGTHS = [[2, 0, 3], [1, -1, 7]], [37, 9]  # pages of 16; what a sequence does not use leads nowhere


def cache(make, dim: int):
    pages = np.full((4, 16, dim), np.nan)
    for row, length in zip(TABLE, LENGTHS, strict=True):
        for j in range(length):
            pages[row[j // 16], j % 16] = make.rng.standard_normal(dim)
    return make.array(pages), make.index(TABLE, np.int32), make.index(LENGTHS)


@pytest.mark.parametrize("heads, seq_q, dim, dim_v", [(16, 1, 576, 512), (3, 4, 24, 16), (20, 2, 40, 40)])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_values(framework, dtype, heads, seq_q, dim, dim_v):
    make = Maker(framework, dtype)
    pages, table, lengths = cache(make, dim)
    q = make.normal(2, heads, seq_q, dim)
    options = {"scale": 0.3 * dim**-0.5, "head_dim_v": dim_v, "causal": seq_q != 2}
    out, lse = fk.attention_mla_decode(q, pages, table, lengths, return_lse=True, **options, **make.kwargs)
    truth, true_lse = reference.attention_mla_decode(f64(q), f64(pages), on_host(table), on_host(lengths), **options)
    make.check(out, truth)
    testing.assert_close(lse, true_lse, "float32")


def test_it_is_paged_attention_of_one_head():
    rng = np.random.default_rng(1)
    pages = rng.standard_normal((4, 16, 48)).astype(np.float32)
    q = rng.standard_normal((2, 6, 3, 48)).astype(np.float32)
    table, lengths = np.array([[2, 0, 3], [1, 0, 0]], np.int32), np.array([37, 9], np.int32)
    out, lse = fk.attention_mla_decode(q, pages, table, lengths, scale=0.2, head_dim_v=32, causal=True, return_lse=True)
    paged, paged_lse = fk.attention_paged(
        q, pages[:, :, None], pages[:, :, None, :32], table, lengths, scale=0.2, causal=True, return_lse=True
    )
    np.testing.assert_allclose(out, paged, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, paged_lse, rtol=1e-6, atol=1e-6)


def test_the_invariant_mode_gives_a_token_its_bits():
    rng = np.random.default_rng(2)
    pages = rng.standard_normal((4, 16, 64)).astype(np.float32)
    q = rng.standard_normal((2, 5, 4, 64)).astype(np.float32)
    table, lengths = np.array([[2, 0, 3], [1, 0, 0]], np.int32), np.array([37, 9], np.int32)
    options = {"scale": 0.2, "head_dim_v": 48, "causal": True}
    with fk.invariant():
        whole = fk.attention_mla_decode(q, pages, table, lengths, **options)
        for i in range(4):
            one = fk.attention_mla_decode(q[:1, :, i : i + 1], pages, table[:1], lengths[:1] - 3 + i, **options)
            np.testing.assert_array_equal(one[0, :, 0], whole[0, :, i])


def arguments() -> dict[str, object]:
    zeros = lambda *shape: np.zeros(shape, np.float32)
    return {
        "q": zeros(2, 4, 1, 24),
        "latent_pages": zeros(4, 16, 24),
        "block_table": np.array([[2, 0], [1, 3]], np.int32),
        "seq_lens": np.array([20, 7], np.int32),
        "scale": 0.2,
        "head_dim_v": 16,
    }


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"q": np.zeros((2, 4, 1, 577), np.float32)}, r"q\.shape\[3\]=577; a head dim must be 1 to 576"),
        ({"q": np.zeros((2, 4, 24), np.float32)}, r"q .*4 dims"),
        ({"latent_pages": np.zeros((4, 16, 32), np.float32)}, r"latent_pages\.shape\[2\]=32"),
        ({"latent_pages": np.zeros((4, 16, 1, 24), np.float32)}, r"latent_pages .*3 dims"),
        ({"latent_pages": np.zeros((4, 0, 24), np.float32)}, "a page holds at least one token"),
        ({"latent_pages": np.zeros((4, 16, 24), np.float16)}, "latent_pages is float16 but q is float32"),
        ({"latent_pages": np.zeros((4, 16, 24), np.int8)}, "latent_pages is int8"),
        ({"head_dim_v": 25}, r"out\.shape\[3\]=25; the head dim of values must be 1 to 24"),
        ({"head_dim_v": 0}, "head_dim_v=0"),
        ({"scale": float("inf")}, "scale=inf; needs a finite number"),
        ({"block_table": np.zeros((1, 2), np.int32)}, r"block_table\.shape\[0\]=1"),
        ({"seq_lens": np.zeros(3, np.int32)}, "seq_lens"),
    ],
)
def test_refusals(change, sentence):
    fk.attention_mla_decode(**arguments())
    with pytest.raises(ValueError, match=f"^attention_mla_decode: .*{sentence}"):
        fk.attention_mla_decode(**{**arguments(), **change})


def test_bad_tables_and_missing_scales_are_refused():
    with pytest.raises(fk.BlockTableError, match=r"^attention_mla_decode: block_table\[1, 0\]=4; page ids are 0 to 3"):
        fk.attention_mla_decode(**{**arguments(), "block_table": np.array([[2, 0], [4, 3]], np.int32)})
    with pytest.raises(fk.BlockTableError, match=r"^attention_mla_decode: seq_lens\[0\]=33"):
        fk.attention_mla_decode(**{**arguments(), "seq_lens": np.array([33, 7], np.int32)})
    with pytest.raises(TypeError, match="scale"):
        fk.attention_mla_decode(**{name: value for name, value in arguments().items() if name != "scale"})


def test_torch_op_compiles_and_refuses_gradients_by_name():
    torch = pytest.importorskip("torch")
    import flashkernel.torch as fkt

    tensors = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in arguments().items()
    }
    tensors["q"], tensors["latent_pages"] = torch.randn(2, 4, 1, 24), torch.randn(4, 16, 24)
    expected, expected_lse = fk.attention_mla_decode(**tensors, return_lse=True)
    compiled = torch.compile(fkt.attention_mla_decode, fullgraph=True, backend="aot_eager")
    for call in (fkt.attention_mla_decode, compiled):
        out, lse = call(**tensors, return_lse=True)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    for name in ("q", "latent_pages"):
        needed = {**tensors, name: tensors[name].clone().requires_grad_()}
        with pytest.raises(NotImplementedError, match=r"^attention_mla_decode: .* requires a gradient"):
            fkt.attention_mla_decode(**needed)
        with torch.no_grad():
            assert torch.equal(fkt.attention_mla_decode(**needed), expected)
