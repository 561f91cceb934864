"""attention_cascade against the oracle, and beside paged attention of whole tables; refusals."""

from __future__ import annotations

import numpy as np
import pytest

import flashkernel as fk
from conftest import Maker, f64, on_host
from flashkernel import reference, testing

PREFIXES = [[5, 2, -1], [0, 7, 3]]  # pages of 16; what a row does not use leads nowhere
OWN = [[1], [4], [6], [8], [9]]


def pages_of(make, *shape: int):
    return make.normal(10, 16, *shape)


@pytest.mark.parametrize("heads, dim, dim_v", [((4, 2), 64, 64), ((6, 1), 24, 16)])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_values(framework, dtype, heads, dim, dim_v):
    make = Maker(framework, dtype)
    k, v = pages_of(make, heads[1], dim), pages_of(make, heads[1], dim_v)
    q, sinks = make.normal(5, heads[0], 1, dim), make.array(np.linspace(-1, 1, heads[0]), "float32")
    tables = (
        make.index(PREFIXES, np.int32),
        make.index([20, 48]),
        make.index(OWN, np.int32),
        make.index([3, 0, 16, 7, 1]),
    )
    for groups, options in ((None, {"softcap": 3.0}), (make.index([0, 2, 5]), {"sinks": sinks, "scale": 0.3})):
        own = (tables[0][:1], tables[1][:1], *tables[2:]) if groups is None else tables
        out, lse = fk.attention_cascade(q, k, v, *own, cu_prefix_q=groups, return_lse=True, **options, **make.kwargs)
        assert fk.attention_cascade(q, k, v, *own, cu_prefix_q=groups, out=out, **options, **make.kwargs) is out
        if "sinks" in options:
            options["sinks"] = f64(sinks)
        groups = None if groups is None else on_host(groups)
        truth, true_lse = reference.attention_cascade(
            f64(q), f64(k), f64(v), *map(on_host, own), cu_prefix_q=groups, **options
        )
        make.check(out, truth)
        testing.assert_close(lse, true_lse, "float32")


def test_it_is_paged_attention_of_the_whole_tables():
    make = Maker("numpy", "float32")
    k, v = pages_of(make, 2, 32), pages_of(make, 2, 32)
    q = make.normal(10, 4, 32)
    rows, own = np.array([0, 3, 4, 4, 8, 10]), np.array([5, 1, 9, 4, 16])
    whole = np.array([[5, 2, 1], [5, 2, 4], [5, 2, 6], [0, 7, 8], [0, 7, 9]], np.int32)
    expected, expected_lse = fk.attention_paged(
        q, k, v, whole, own + 32, cu_seqlens_q=rows, causal=True, return_lse=True
    )
    prefixes = np.array([[5, 2], [0, 7]], np.int32), np.array([32, 32])
    found, lse = fk.attention_cascade(
        q, k, v, *prefixes, np.array(OWN, np.int32), own, cu_prefix_q=np.array([0, 4, 10]), cu_seqlens_q=rows,
        causal=True, return_lse=True,
    )  # fmt: skip
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)


def arguments() -> dict[str, object]:
    return {
        "q": np.zeros((2, 4, 1, 8), np.float32),
        "k_pages": np.zeros((4, 16, 2, 8), np.float32),
        "v_pages": np.zeros((4, 16, 2, 8), np.float32),
        "prefix_table": np.array([[2, 0]], np.int32),
        "prefix_lens": np.array([20]),
        "block_table": np.array([[1], [3]], np.int32),
        "seq_lens": np.array([4, 16]),
    }


TWO = {"prefix_table": np.array([[2], [0]], np.int32), "prefix_lens": np.array([16, 3])}
FOUR = {"q": np.zeros((2, 4, 5, 8), np.float32)}


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"prefix_table": np.zeros((1, 2), np.int64)}, "prefix_table is int64"),
        ({"prefix_table": np.zeros(2, np.int32)}, "prefix_table .*2 dims"),
        ({"prefix_lens": np.zeros(2, np.int64)}, "prefix_lens"),
        (TWO, r"prefix_table\.shape\[0\]=2 and cu_prefix_q is absent"),
        ({**TWO, "cu_prefix_q": np.array([0, 2])}, "cu_prefix_q"),
        ({**TWO, "cu_prefix_q": np.array([1, 1, 2])}, r"cu_prefix_q\[0\]=1; the first group's rows start at 0"),
        ({**TWO, "cu_prefix_q": np.array([0, 3, 2])}, r"cu_prefix_q\[2\]=2; the starts of groups must not decrease"),
        ({**TWO, "cu_prefix_q": np.array([0, 1, 3])}, r"cu_prefix_q\[2\]=3; q has 2 rows"),
        (FOUR, "q's strides of batch and seq are 160 and 8 elements; rows at one stride are needed"),
        (
            {"q": np.zeros((2, 5, 4, 8), np.float32).transpose(0, 2, 1, 3), "causal": True},
            r"seq_lens\[0\]=4 but the sequence has 5 queries",
        ),
    ],
)
def test_refusals(change, sentence):
    fk.attention_cascade(**arguments())
    with pytest.raises(ValueError, match=f"^attention_cascade: .*{sentence}"):
        fk.attention_cascade(**{**arguments(), **change})


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"prefix_table": np.array([[2, 4]], np.int32)}, r"prefix_table\[0, 1\]=4; page ids are 0 to 3"),
        ({"prefix_lens": np.array([33])}, r"prefix_lens\[0\]=33; prefix_table has room for 0 to 32"),
        ({"block_table": np.array([[1], [-1]], np.int32)}, r"block_table\[1, 0\]=-1"),
        ({"seq_lens": np.array([17, 1])}, r"seq_lens\[0\]=17; block_table has room for 0 to 16"),
    ],
)
def test_bad_tables_are_refused(change, sentence):
    with pytest.raises(fk.BlockTableError, match=f"^attention_cascade: {sentence}"):
        fk.attention_cascade(**{**arguments(), **change})


def test_explain_tells_of_both_parts():
    found = fk.explain("attention_cascade", **arguments())
    assert found.kernel in {candidate.kernel for candidate in found.candidates if candidate.accepted}
    assert found.workspace_bytes >= 2 * 4 * (8 + 2) * 4  # out, and the LSEs of both parts


def test_torch_op_compiles_and_refuses_gradients_by_name():
    torch = pytest.importorskip("torch")
    import flashkernel.torch as fkt

    tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in arguments().items()}
    for name in ("q", "k_pages", "v_pages"):
        tensors[name] = torch.randn(tensors[name].shape)
    expected, expected_lse = fk.attention_cascade(**tensors, return_lse=True)
    compiled = torch.compile(fkt.attention_cascade, fullgraph=True, backend="aot_eager")
    for call in (fkt.attention_cascade, compiled):
        out, lse = call(**tensors, return_lse=True)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    for name in ("q", "v_pages"):
        needed = {**tensors, name: tensors[name].clone().requires_grad_()}
        with pytest.raises(NotImplementedError, match=r"^attention_cascade: .* requires a gradient"):
            fkt.attention_cascade(**needed)
        with torch.no_grad():
            assert torch.equal(fkt.attention_cascade(**needed), expected)
