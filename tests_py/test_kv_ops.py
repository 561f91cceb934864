"""kv_append (with fused RoPE), kv_read and kv_copy_pages against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

import flashkernel as fk
from conftest import f64
from flashkernel import reference


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_append_writes_its_slots_and_nothing_else(make, index):
    k, v = make.normal(5, 2, 8), make.normal(5, 2, 4)
    k_pages, v_pages = make.array(np.full((3, 16, 2, 8), np.nan)), make.array(np.full((3, 16, 2, 4), np.nan))
    slots = [47, 0, -1, 17, 3]
    truth = reference.kv_append(f64(k), f64(v), f64(k_pages), f64(v_pages), slots)
    assert fk.kv_append(k, v, k_pages, v_pages, make.index(slots, index), **make.kwargs) is None
    np.testing.assert_array_equal(f64(k_pages), truth[0])
    np.testing.assert_array_equal(f64(v_pages), truth[1])


@pytest.mark.parametrize("interleaved", [False, True])
def test_append_with_rope(make, interleaved):
    k, v, q = make.normal(4, 2, 8), make.normal(4, 2, 8), make.normal(4, 6, 8)
    k_pages, v_pages = make.array(np.zeros((1, 16, 2, 8))), make.array(np.zeros((1, 16, 2, 8)))
    positions = [7, 0, 123456, 3]
    rope = {"positions": make.index(positions), "theta": 500.0, "interleaved": interleaved, "rotary_dim": 4, "q": q}
    rotated = fk.kv_append(k, v, k_pages, v_pages, make.index([3, 2, 1, 0]), rope=rope, **make.kwargs)
    options = {"theta": 500.0, "interleaved": interleaved, "rotary_dim": 4}
    true_q, true_k = reference.rope(
        f64(q).transpose(1, 0, 2)[None], f64(k).transpose(1, 0, 2)[None], np.array(positions), **options
    )
    make.check(rotated, true_q[0].transpose(1, 0, 2))
    make.check(k_pages[0, :4], true_k[0].transpose(1, 0, 2)[::-1])
    np.testing.assert_array_equal(f64(v_pages)[0, :4], f64(v)[::-1])
    rope["q_out"] = q
    assert fk.kv_append(k, v, k_pages, v_pages, make.index([3, 2, 1, 0]), rope=rope, **make.kwargs) is q
    np.testing.assert_array_equal(f64(q), f64(rotated))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("table", ["float32", None])
def test_append_with_tables(make, interleaved, table):
    k, v, q = make.normal(4, 2, 8), make.normal(4, 2, 8), make.normal(4, 6, 8)
    k_pages, v_pages = make.array(np.zeros((1, 16, 2, 8))), make.array(np.zeros((1, 16, 2, 8)))
    angles = make.rng.standard_normal((9, 3))
    cos, sin = make.array(np.cos(angles), table), make.array(np.sin(angles), table)
    positions = [7, 0, 8, 3]
    rope = {"positions": make.index(positions), "cos": cos, "sin": sin, "interleaved": interleaved, "q": q}
    rotated = fk.kv_append(k, v, k_pages, v_pages, make.index([3, 2, 1, 0]), rope=rope, **make.kwargs)
    true_q, true_k = (
        reference.rope_table(
            f64(x).transpose(1, 0, 2)[None], None, f64(cos), f64(sin), np.array(positions), interleaved=interleaved
        )[0]
        for x in (q, k)
    )
    make.check(rotated, true_q[0].transpose(1, 0, 2))
    make.check(k_pages[0, :4], true_k[0].transpose(1, 0, 2)[::-1])
    np.testing.assert_array_equal(f64(v_pages)[0, :4], f64(v)[::-1])
    for wrong in ({"sin": None}, {"cos": None}, {"rotary_dim": 8}, {"inv_freq": make.array(np.ones(3), "float32")}):
        with pytest.raises(ValueError, match="kv_append"):
            fk.kv_append(k, v, k_pages, v_pages, make.index([3, 2, 1, 0]), rope={**rope, **wrong}, **make.kwargs)


@pytest.mark.parametrize("weights", ["float32", None])
def test_append_with_norms(make, weights):
    """The bits of rms_norm before kv_append on the CPU; close to the oracle everywhere. Either norm may be absent."""
    k, v, q = make.normal(4, 2, 16), make.normal(4, 2, 8), make.normal(4, 6, 16)
    norms = {name: make.array(1 + 0.3 * make.rng.standard_normal(16), weights) for name in ("q_norm", "k_norm")}
    positions, slots = [7, 0, 123456, 3], make.index([3, 2, 1, 0])
    rope = {"positions": make.index(positions), "theta": 500.0, "rotary_dim": 8, "norm_eps": 1e-5}
    for names in (("q_norm", "k_norm"), ("q_norm",), ("k_norm",)):
        given = {name: norms[name] for name in names}
        pages = [make.array(np.zeros((1, 16, 2, dim))) for dim in (16, 8)]
        turned = fk.kv_append(k, v, *pages, slots, rope={**rope, **given, "q": q}, **make.kwargs)
        meant = [
            reference.rope(
                (reference.rms_norm(f64(x), f64(norms[name]), eps=1e-5)[0] if name in given else f64(x)).transpose(
                    1, 0, 2
                )[None],
                None,
                np.array(positions),
                theta=500.0,
                rotary_dim=8,
            )[0][0].transpose(1, 0, 2)
            for x, name in ((q, "q_norm"), (k, "k_norm"))
        ]
        make.check(turned, meant[0])
        make.check(pages[0][0, :4], meant[1][::-1])
        np.testing.assert_array_equal(f64(pages[1])[0, :4], f64(v)[::-1])
    alone = {"k_norm": norms["k_norm"]}
    fk.kv_append(k, v, *pages, slots, rope={**rope, **alone}, **make.kwargs)
    make.check(pages[0][0, :4], meant[1][::-1])
    wrong = [{"q_norm": norms["q_norm"]}, {"k_norm": make.array(np.ones(8))}]
    wrong += [{**alone, "norm_eps": -1.0}] if make.framework != "triton" else []
    for more in wrong:
        with pytest.raises(ValueError, match=r"kv_append|rms_norm"):
            fk.kv_append(k, v, *pages, slots, rope={**rope, **more}, **make.kwargs)


def test_norms_and_8_bit_pages_are_refused():
    k, pages = np.ones((1, 2, 8), np.float32), np.zeros((1, 16, 2, 8), np.int8)
    scales = np.ones(2, np.float32), np.ones(2, np.float32)
    with pytest.raises(NotImplementedError, match="k_norm with pages of 8 bits"):
        rope = {"positions": np.array([0]), "k_norm": np.ones(8, np.float32)}
        fk.kv_append(k, k, pages, pages.copy(), np.array([0]), rope=rope, kv_scales=scales)


def test_read(make):
    k_pages, v_pages = make.normal(4, 16, 2, 8), make.normal(4, 16, 2, 4)
    table, lengths = np.array([[3, 0], [1, -1], [-1, -1]], np.int32), np.array([20, 16, 0])
    if not make.host_reads:
        with pytest.raises(ValueError, match="max_seq"):
            fk.kv_read(k_pages, v_pages, make.index(table, np.int32), make.index(lengths), **make.kwargs)
    for max_seq in (None, 32) if make.host_reads else (32,):
        ours = fk.kv_read(
            k_pages, v_pages, make.index(table, np.int32), make.index(lengths), max_seq=max_seq, **make.kwargs
        )
        truth = reference.kv_read(f64(k_pages), f64(v_pages), table, lengths, max_seq)
        for mine, theirs in zip(ours, truth, strict=True):
            np.testing.assert_array_equal(f64(mine), theirs)
    out = make.normal(3, 25, 2, 8), make.normal(3, 25, 2, 4)
    result = fk.kv_read(k_pages, v_pages, make.index(table, np.int32), make.index(lengths), out=out, **make.kwargs)
    assert result[0] is out[0] and result[1] is out[1]
    np.testing.assert_array_equal(f64(out[0]), reference.kv_read(f64(k_pages), f64(v_pages), table, lengths, 25)[0])


def test_max_seq_is_bounded_by_the_table(make):
    """It is the size of what `kv_read` allocates: what no table can hold is refused before that."""
    k_pages, v_pages = make.normal(4, 16, 2, 8), make.normal(4, 16, 2, 4)
    table, lengths = make.index([[3, 0], [1, 2]], np.int32), make.index([20, 16])
    for max_seq in (33, 2**31 - 1, 2**40):
        with pytest.raises(ValueError, match=rf"kv_read: max_seq={max_seq}; needs 32 or less, the tokens that block_t"):
            fk.kv_read(k_pages, v_pages, table, lengths, max_seq=max_seq, **make.kwargs)
    out = make.normal(2, 40, 2, 8), make.normal(2, 40, 2, 4)  # what the caller has allocated may be longer
    fk.kv_read(k_pages, v_pages, table, lengths, max_seq=40, out=out, **make.kwargs)
    assert (f64(out[0])[0, 20:] == 0).all() and (f64(out[1])[1, 16:] == 0).all()


def test_copy_pages(make):
    k_pages, v_pages = make.normal(5, 16, 2, 8), make.normal(5, 16, 2, 4)
    truth = reference.kv_copy_pages(f64(k_pages), f64(v_pages), [0, 3], [4, 1])
    fk.kv_copy_pages(k_pages, v_pages, make.index([0, 3]), make.index([4, 1]), **make.kwargs)
    np.testing.assert_array_equal(f64(k_pages), truth[0])
    np.testing.assert_array_equal(f64(v_pages), truth[1])


def test_refusals_change_nothing(make):
    k, v = make.normal(2, 2, 8), make.normal(2, 2, 8)
    k_pages, v_pages = make.normal(2, 16, 2, 8), make.normal(2, 16, 2, 8)
    before = f64(k_pages).copy()
    if not make.host_reads:  # what is out of range there moves nothing and never faults
        fk.kv_append(k, v, k_pages, v_pages, make.index([-7, 32]), **make.kwargs)
        fk.kv_copy_pages(k_pages, v_pages, make.index([0, 9]), make.index([-1, 1]), **make.kwargs)
    else:
        with pytest.raises(ValueError, match="slots"):
            fk.kv_append(k, v, k_pages, v_pages, make.index([0, 32]), **make.kwargs)
        with pytest.raises(ValueError, match="kv_copy_pages"):
            fk.kv_copy_pages(k_pages, v_pages, make.index([0, 1]), make.index([1, 0]), **make.kwargs)
        with pytest.raises(ValueError, match="seq_lens"):
            fk.kv_read(k_pages, v_pages, make.index([[0]], np.int32), make.index([17]), **make.kwargs)
    with pytest.raises(ValueError, match="positions"):
        fk.kv_append(k, v, k_pages, v_pages, make.index([0, 1]), rope={"theta": 1.0}, **make.kwargs)
    with pytest.raises(ValueError, match="angle"):
        rope = {"positions": make.index([0, 1]), "angle": 1}
        fk.kv_append(k, v, k_pages, v_pages, make.index([0, 1]), rope=rope, **make.kwargs)
    np.testing.assert_array_equal(f64(k_pages), before)


def test_check_block_table_names_the_entry():
    table = np.array([[0, 1, 99], [2, -1, 3]], np.int32)
    fk.check_block_table(table, np.array([32, 16]), 4, 16)
    for lengths, found in (([33, 17], (0, 2, 99)), ([32, 17], (1, 1, -1)), ([32, 49], (1, -1, 49))):
        with pytest.raises(fk.BlockTableError) as caught:
            fk.check_block_table(table, np.array(lengths), 4, 16)
        assert (caught.value.sequence, caught.value.slot, caught.value.page) == found
        assert isinstance(caught.value, ValueError)
    q, pages = np.ones((2, 2, 1, 8), np.float32), np.ones((4, 16, 2, 8), np.float32)
    with pytest.raises(fk.BlockTableError) as caught:
        fk.attention_paged(q, pages, pages, table, np.array([32, 17]))
    assert (caught.value.sequence, caught.value.slot, caught.value.page) == (1, 1, -1)
