"""Block masks: attention and its gradients, and BlockMask's constructors against the masks of pairs that they mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashkernel as fk
from conftest import HAS_GPU, on_host
from flashkernel import reference
from flashkernel.masks import BlockMask


def _arrays(seq_q: int, seq_k: int, heads_kv: int = 2, head_dim: int = 48) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(7)
    q = rng.standard_normal((2, 4, seq_q, head_dim)).astype(np.float32)
    k, v = (rng.standard_normal((2, heads_kv, seq_k, head_dim)).astype(np.float32) for _ in range(2))
    return q, k, v


def _pairs(mask: BlockMask, seq_q: int, seq_k: int) -> np.ndarray:
    """The pairs that a mask shows, pair by pair as its definition says."""
    rows, keys = np.arange(seq_q) // mask.block_size[0], np.arange(seq_k) // mask.block_size[1]
    entries = on_host(mask.blocks).astype(int)[..., rows[:, None], keys[None, :]]
    if mask.mask is None:
        return entries > 0
    j = np.arange(seq_k)
    bits = (on_host(mask.mask).view(np.uint32)[..., j // 32] >> (j % 32).astype(np.uint32) & 1) != 0
    return (entries == 2) | ((entries == 1) & bits)


def _masks() -> dict[str, BlockMask]:
    rng = np.random.default_rng(3)
    bits = fk.pack_mask(rng.random((1, 4, 150, 333)) < 0.5)
    entries = rng.integers(0, 3, (2, 4, 3, 3)).astype(np.uint8)
    entries[1, 2, 1] = 0  # rows that see nothing
    band = np.abs(np.arange(3)[:, None] - np.arange(6)) < 2
    return {
        "band": BlockMask.from_dense(band, 64),
        "heads": BlockMask(entries, (64, 128)),
        "partial": BlockMask(entries, (64, 128), bits),
        "transposed": BlockMask(np.ascontiguousarray(entries.T).T, (64, 128), bits[:, :1]),
    }


@pytest.mark.parametrize("kind", ["band", "heads", "partial", "transposed"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_gradients(kind: str, causal: bool) -> None:
    q, k, v = _arrays(150, 333)
    mask = _masks()[kind]
    seen = np.broadcast_to(_pairs(mask, 150, 333), (2, 4, 150, 333))
    out, lse = fk.attention(q, k, v, block_mask=mask, causal=causal, return_lse=True)
    truth, true_lse = reference.attention(q, k, v, mask=reference.pack_mask(seen), causal=causal)
    np.testing.assert_allclose(out, truth, atol=3e-6)
    np.testing.assert_allclose(lse, true_lse, atol=3e-6)
    again = fk.attention(q, k, v, block_mask=mask.blocks, block_size=mask.block_size, mask=mask.mask, causal=causal)
    np.testing.assert_array_equal(out, again)
    oracle, _ = reference.attention(q, k, v, block_mask=mask, causal=causal)
    np.testing.assert_allclose(oracle, truth, atol=1e-12)
    grad = np.random.default_rng(9).standard_normal(out.shape).astype(np.float32)
    expected = reference.attention_backward(grad, q, k, v, block_mask=mask, causal=causal)
    grads = fk.attention_backward(grad, q, k, v, out, lse, block_mask=mask, causal=causal)
    for name, given in zip("qkv", grads, strict=True):
        np.testing.assert_allclose(given, expected[name], atol=1e-5)


def test_what_a_block_hides_is_not_read() -> None:
    q, k, v = _arrays(70, 200)
    k[:, :, 64:128], v[:, :, 64:128] = np.nan, np.inf
    without = [np.delete(x, slice(64, 128), 2) for x in (k, v)]
    blocks = np.array([[True, False, True, True]] * 2)
    np.testing.assert_allclose(
        fk.attention(q, k, v, block_mask=blocks, block_size=64), fk.attention(q, *without), atol=2e-6
    )
    out, lse = fk.attention(q, k, v, block_mask=np.zeros((2, 4), bool), block_size=64, return_lse=True)
    assert not out.any() and np.isneginf(lse).all()


def test_from_mask() -> None:
    rng = np.random.default_rng(2)
    seen = rng.random((2, 1, 300, 500)) < 0.4
    seen[:, :, :128, 128:256] = False
    seen[:, :, 128:256, :128] = seen[:, :, 256:, 384:] = True
    mask = BlockMask.from_mask(seen)
    assert mask.blocks[0, 0].tolist() == [[1, 0, 1, 1], [2, 1, 1, 1], [1, 1, 1, 2]]
    np.testing.assert_array_equal(_pairs(mask, 300, 500), seen)
    assert mask.density() == 11 / 12
    assert BlockMask.from_mask(np.ones((130, 70), bool), (64, 128)).mask is None


@pytest.mark.parametrize("size", [(64, 64), (128, 64), (40, 20), (1, 4)])
def test_from_bsr(size: tuple[int, int]) -> None:
    rows, columns = size
    rng = np.random.default_rng(5)
    blocks = rng.random((640 // rows, 320 // columns)) < 0.4
    indptr = np.concatenate([[0], np.cumsum(blocks.sum(1))])
    indices = np.nonzero(blocks)[1]
    wide = np.repeat(np.repeat(blocks, rows, 0), columns, 1)
    found = BlockMask.from_bsr(indptr, indices, 640, 320, rows, columns)
    np.testing.assert_array_equal(np.broadcast_to(_pairs(found, 640, 320), wide.shape), wide)
    inside = rng.random((len(indices), rows, columns)) < 0.5
    for n, (i, j) in enumerate(zip(*np.nonzero(blocks), strict=True)):
        wide[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = inside[n]
    found = BlockMask.from_bsr(indptr, indices, 640, 320, rows, columns, mask=inside)
    np.testing.assert_array_equal(np.broadcast_to(_pairs(found, 640, 320), wide.shape), wide)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("size", [128, (64, 256), 96])
def test_from_flex(size: Any) -> None:
    """FlexAttention's own results, from the same mask."""
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    fkt = pytest.importorskip("flashkernel.torch")
    device = "cuda" if HAS_GPU else "cpu"
    document = torch.arange(500, device=device) // 130

    def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (document[i] == document[j]) & (j <= i + 40 * h)

    theirs = flex.create_block_mask(sees, None, 4, 300, 500, device=device, BLOCK_SIZE=size)
    mask = BlockMask.from_flex(theirs)
    i, j, h = (torch.arange(n, device=device) for n in (300, 500, 4))
    np.testing.assert_array_equal(_pairs(mask, 300, 500)[0], on_host(sees(0, h[:, None, None], i[:, None], j)))
    q, k, v = (torch.from_numpy(x).to(device) for x in _arrays(300, 500))
    expected = flex.flex_attention(q, k, v, block_mask=theirs, enable_gqa=True)
    torch.testing.assert_close(fkt.attention(q, k, v, block_mask=mask), expected, atol=3e-6, rtol=0)


def test_torch_gradients_and_compile() -> None:
    torch = pytest.importorskip("torch")
    fkt = pytest.importorskip("flashkernel.torch")
    device = "cuda" if HAS_GPU else "cpu"
    q, k, v = (torch.from_numpy(x).to(device).requires_grad_() for x in _arrays(150, 333))
    blocks = (torch.rand(4, 3, 3, generator=torch.Generator().manual_seed(1)) < 0.6).to(device)
    blocks[:, :, 0] = True
    wide = blocks.repeat_interleave(64, 1)[:, :150].repeat_interleave(128, 2)[..., :333]
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=wide, enable_gqa=True)
    expected = torch.autograd.grad(theirs.sin().sum(), (q, k, v))
    mask = BlockMask.from_dense(blocks, (64, 128))

    def call(q: Any, k: Any, v: Any) -> Any:
        return fkt.attention(q, k, v, block_mask=mask)

    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        out = function(q, k, v)
        torch.testing.assert_close(out, theirs, atol=3e-6, rtol=0)
        for ours, other in zip(torch.autograd.grad(out.sin().sum(), (q, k, v)), expected, strict=True):
            torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(call(q, k, v), out.detach())


REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {"block_mask": np.ones((2, 3), bool), "block_size": 96},
        r"^attention: block_size_q=96; blocks of a block mask",
    ),
    ({"block_mask": np.ones((2, 3), bool), "block_size": (64, 32)}, r"^attention: block_size_k=32; blocks"),
    ({"block_mask": np.ones((2, 3), bool), "block_size": "64"}, r"^attention: block_size"),
    ({"block_mask": np.ones((2, 4), bool)}, r"^attention: block_mask\.shape\[0\]=2; needs 1 to broadcast to \[batch"),
    ({"block_mask": np.ones((3, 1, 1, 2), bool)}, r"^attention: block_mask\.shape\[0\]=3; needs 1 or 2 to broadcast"),
    ({"block_mask": np.ones((1, 2), np.int32)}, r"^attention: block_mask is int32; "),
    (
        {
            "block_mask": BlockMask(np.ones((1, 2), bool), mask=np.ones((9, 5), np.int32)),
            "mask": np.ones(5, np.int32),
        },
        r"^attention: mask is given, but block_mask has one already",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSALS)
def test_refusals(options: dict[str, Any], message: str) -> None:
    q, k, v = _arrays(9, 150)
    with pytest.raises((ValueError, TypeError), match=message):
        fk.attention(q, k, v, **options)


def test_constructors_refuse() -> None:
    with pytest.raises(ValueError, match="block_size=100; needs a power of two from 64 on"):
        BlockMask.from_dense(np.ones((2, 2), bool), 100)
    with pytest.raises(ValueError, match=r"blocks of 30 by 64 but seq_q=100, seq_k=128; blocks must divide"):
        BlockMask.from_bsr([0, 1], [0], 100, 128, 30, 64)
    with pytest.raises(ValueError, match=r"indptr has 2 entries from 0 to 1; needs 3, from 0 to len\(indices\)=1"):
        BlockMask.from_bsr([0, 1], [0], 128, 128, 64, 64)


@pytest.mark.parametrize(
    "indptr, indices, message",
    [
        ([0, 2, 1, 2], [0, 1], "indptr decreases"),
        ([0, 1, 1, 2], [0, -1], r"indices from -1 to 0; block columns in \[0, 2\) are needed"),
        ([0, 1, 1, 2], [0, 2], r"indices from 0 to 2; block columns in \[0, 2\) are needed"),
    ],
)
def test_from_bsr_refuses_what_is_no_matrix(indptr: list[int], indices: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^BlockMask.from_bsr: {message}"):
        BlockMask.from_bsr(np.array(indptr), np.array(indices), 192, 128, 64, 64)
