"""Latent rows of 8 bits: latent_append against the oracle, attention_mla_decode over what it writes; refusals."""

from __future__ import annotations

import numpy as np
import pytest

import flashkernel as fk
from conftest import Maker, f64, on_host
from flashkernel import reference, testing

TABLE, LENGTHS = [[2, 0, 3], [1, -1, 7]], [37, 9]  # pages of 16; what a sequence does not use leads nowhere
SLOTS = [row[j // 16] * 16 + j % 16 for row, n in zip(TABLE, LENGTHS, strict=True) for j in range(n)]


def empty_pages(rank: int, turned: int, one_scale: bool) -> np.ndarray:
    columns = rank + (turned if one_scale else 4 * -(-rank // 128) + 2 * turned)
    return np.full((4, 16, columns), 255, np.uint8)  # NaN, and a scale of NaN


def as_pages(make: Maker, pages: np.ndarray, float8: bool):
    if make.framework != "torch":
        return pages.copy()
    import torch

    tensor = torch.from_numpy(pages.copy())
    return tensor.view(torch.float8_e4m3fn) if float8 else tensor


def bytes_of(pages) -> np.ndarray:
    if isinstance(pages, np.ndarray):
        return pages
    import torch

    return pages.view(torch.uint8).numpy()


@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("rank, turned", [(512, 64), (132, 6)])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_rows_are_written_and_read(framework, dtype, rank, turned, one_scale):
    make = Maker(framework, dtype)
    latent, key = make.normal(len(SLOTS), rank), make.normal(len(SLOTS), turned)
    empty, scale = empty_pages(rank, turned, one_scale), 0.0171875 if one_scale else None
    pages = as_pages(make, empty, one_scale)
    fk.latent_append(latent, key, pages, make.index(SLOTS), latent_scale=scale, **make.kwargs)
    expected = reference.latent_append(f64(latent), f64(key), empty, np.array(SLOTS), latent_scale=scale)
    np.testing.assert_array_equal(bytes_of(pages), expected)

    q, options = make.normal(2, 20, 2, rank + turned), {"scale": 0.3 * (rank + turned) ** -0.5, "head_dim_v": rank}
    table, lengths = make.index(TABLE, np.int32), make.index(LENGTHS)
    call = {"latent_scale": scale, "causal": True, **options, **make.kwargs}
    out, lse = fk.attention_mla_decode(q, pages, table, lengths, return_lse=True, **call)
    numbers = reference.latent_numbers(expected, rank + turned, rank, scale)
    rounded = f64(make.array(numbers))  # to q's dtype
    truth, true_lse = reference.attention_mla_decode(
        f64(q), rounded, on_host(table), on_host(lengths), causal=True, **options
    )
    make.check(out, truth)
    testing.assert_close(lse, true_lse, "float32")
    with fk.invariant():
        make.check(fk.attention_mla_decode(q, pages, table, lengths, **call), truth)


def test_a_row_of_deepseek_is_656_bytes():
    """The places are those that FlashMLA and vLLM's fp8_ds_mla have; scales are no powers of two."""
    latent = np.zeros((1, 512), np.float32)
    latent[0, ::128] = 3.0, -448.0, 1e-3, 0.0
    key = np.arange(64, dtype=np.float32)[None]
    pages = np.zeros((1, 1, 656), np.uint8)
    fk.latent_append(latent, key, pages, np.array([0]))
    row = pages[0, 0]
    assert row[:512:128].tolist() == [0x7E, 0xFE, 0x7E, 0]  # 448, -448, 448
    scales = np.array([3 / np.float32(448), 1, np.float32(1e-3) / np.float32(448), np.finfo(np.float32).tiny])
    np.testing.assert_array_equal(row[512:528].view(np.float32), scales.astype(np.float32))
    np.testing.assert_array_equal(row[528:].view(np.uint16).astype(np.uint32) << 16, key[0].view(np.uint32))


def test_numbers_that_are_none_and_slots_that_are_skipped():
    latent, key = np.ones((3, 128), np.float32), np.ones((3, 4), np.float32)
    latent[0, 5], latent[1, 7] = np.nan, -np.inf
    pages = np.zeros((2, 16, 140), np.uint8)
    fk.latent_append(latent, key, pages, np.array([3, 20, -1]))
    written = reference.latent_numbers(pages, 132, 128)
    assert np.isnan(written[0, 3, 5]) and np.isfinite(np.delete(written[0, 3], 5)).all()
    assert written[1, 4, 7] < -1e38 and np.count_nonzero(pages.any(-1)) == 2


def arguments() -> dict[str, object]:
    return {
        "latent": np.ones((2, 8), np.float32),
        "key": np.ones((2, 4), np.float32),
        "latent_pages": np.zeros((2, 16, 20), np.uint8),
        "slots": np.array([0, 31]),
    }


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"latent_pages": np.zeros((2, 16, 12), np.float32)}, "latent_pages is float32; needs uint8 or float8_e4m3fn"),
        (
            {"latent_pages": np.zeros((2, 16, 21), np.uint8)},
            r"latent_pages\.shape\[2\]=21; needs 20 bytes for 8 latent",
        ),
        ({"latent_pages": np.zeros((2, 0, 20), np.uint8)}, "a page holds at least one token"),
        ({"latent_pages": np.zeros((2, 16, 20), np.uint8)[:, 0]}, r"latent_pages .*3 dims"),
        ({"latent_scale": 0.5}, "latent_scale is given, but the rows of latent_pages hold their own"),
        ({"key": np.ones((3, 4), np.float32)}, r"key\.shape\[0\]=3"),
        ({"key": np.ones((2, 4), np.float16)}, "key is float16"),
        ({"latent": np.ones((2, 516), np.float32)}, r"latent\.shape\[1\]=516; latent columns must be 1 to 512"),
        ({"key": np.ones((2, 600), np.float32)}, "together they must be at most 576"),
        ({"latent": np.ones((2, 6), np.float32), "latent_pages": np.zeros((2, 16, 18), np.uint8)}, "multiples of 4"),
        ({"slots": np.array([0, 32])}, r"slots\[1\]=32"),
    ],
)
def test_refusals(change, sentence):
    fk.latent_append(**arguments())
    with pytest.raises(ValueError, match=f"^latent_append: .*{sentence}"):
        fk.latent_append(**{**arguments(), **change})


def test_decoding_refuses_scales_without_a_place():
    q, table, lengths = np.ones((1, 2, 1, 12), np.float32), np.zeros((1, 1), np.int32), np.array([3])
    options = {"scale": 0.5, "head_dim_v": 8}
    for pages, sentence in (
        (np.zeros((1, 16, 12), np.float32), "latent_scale is given, but latent_pages is float32"),
        (np.zeros((1, 16, 20), np.uint8), "latent_scale is given, but the rows"),
        (np.zeros((1, 16, 22), np.uint8), r"latent_pages\.shape\[2\]=22; needs 20 bytes"),
    ):
        with pytest.raises(ValueError, match=f"^attention_mla_decode: {sentence}"):
            fk.attention_mla_decode(q, pages, table, lengths, latent_scale=0.5, **options)
    with pytest.raises(ValueError, match=r"latent_scale is float32\[2\].*; needs one float32 number"):
        scales = np.ones(2, np.float32)
        fk.attention_mla_decode(q, np.zeros((1, 16, 12), np.uint8), table, lengths, latent_scale=scales, **options)


def test_torch_ops_compile_and_refuse_gradients():
    torch = pytest.importorskip("torch")
    import flashkernel.torch as fkt

    latent, key, q = torch.randn(3, 8), torch.randn(3, 4), torch.randn(1, 2, 1, 12)
    slots, table, lengths = torch.tensor([0, 1, 2]), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3])

    def both(pages, scale):
        fkt.latent_append(latent, key, pages, slots, latent_scale=scale)
        return fkt.attention_mla_decode(q, pages, table, lengths, scale=0.5, latent_scale=scale, head_dim_v=8)

    for columns, scale in ((20, None), (12, 0.01), (12, torch.tensor(0.01))):
        pages = [torch.zeros(1, 16, columns, dtype=torch.uint8) for _ in range(2)]
        expected = both(pages[0], scale)
        assert torch.equal(torch.compile(both, fullgraph=True, backend="aot_eager")(pages[1], scale), expected)
        assert torch.equal(*pages) and pages[0].any()
    with pytest.raises(NotImplementedError, match=r"^latent_append: an argument requires a gradient"):
        fkt.latent_append(latent.clone().requires_grad_(), key, pages[0], slots)
