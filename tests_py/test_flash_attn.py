"""flashkernel.flash_attn: flash-attn's names against a plain float32 reference, cache forms, refusals and install()."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashkernel.flash_attn as fa
from flashkernel.flash_attn import flash_attn_3_interface as fa3
from flashkernel.flash_attn import rotary
from flashkernel.flash_attn.bert_padding import pad_input, unpad_input


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def reference(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
) -> tuple[Any, Any]:
    """(out [batch, seq, heads, dim], lse [batch, heads, seq]) in float64, of what flash-attn's documentation says."""
    dtype = q.dtype
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seq_q, seq_k = scores.shape[-2:]
    ahead = torch.arange(seq_k) - (torch.arange(seq_q)[:, None] + seq_k - seq_q)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double().reshape(-1, q.shape[1], 1, 1) * ahead.abs()
    hidden = torch.zeros(seq_q, seq_k, dtype=torch.bool)
    left, right = window
    if causal:
        right = 0
    if left >= 0:
        hidden |= -ahead > left
    if right >= 0:
        hidden |= ahead > right
    scores = scores.masked_fill(hidden, float("-inf"))
    columns = scores
    if sinks is not None:
        columns = torch.cat([scores, sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    lse = columns.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
    return (weights @ v).transpose(1, 2).to(dtype), lse


def close(got: Any, expected: Any) -> None:
    limit = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[got.dtype]
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=limit, atol=limit)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal-fewer-keys": {"causal": True, "seq_k": 4},
    "causal-more-keys": {"causal": True, "seq_k": 13},
    "window": {"window_size": (3, 1)},
    "window-left-alone": {"window_size": (2, -1), "causal": True},
    "window-below-0": {"window_size": (-2, 1)},
    "softcap": {"softcap": 3.0},
    "softcap-below-0-is-off": {"softcap": -1.0},
    "scale": {"softmax_scale": 0.3},
    "alibi": {"alibi": True, "causal": True, "seq_k": 9},
    "odd-head-dim": {"dim": 13},
}


def call(case: dict[str, Any], dtype: Any) -> tuple[Any, Any, Any, dict[str, Any], dict[str, Any]]:
    case = dict(case)
    dim, seq_k = case.pop("dim", 16), case.pop("seq_k", 7)
    q = torch.randn(2, 7, 4, dim, dtype=dtype)
    k, v = (torch.randn(2, seq_k, 2, dim, dtype=dtype) for _ in range(2))
    if case.pop("alibi", False):
        case["alibi_slopes"] = torch.rand(2, 4)
    plain = {"window": case.get("window_size", (-1, -1)), "scale": case.get("softmax_scale")}
    plain |= {"causal": case.get("causal", False), "alibi_slopes": case.get("alibi_slopes")}
    return q, k, v, case, {**plain, "softcap": max(case.get("softcap", 0.0), 0.0)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_flash_attn_func(name: str, dtype: Any) -> None:
    q, k, v, options, plain = call(CASES[name], dtype)
    tensors = [x.requires_grad_() for x in (q, k, v)]
    copies = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse, dropped = fa.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    expected, expected_lse = reference(*copies, **plain)
    assert out.is_contiguous() or out.shape[1] == 1
    assert dropped.numel() == 0
    close(out, expected)
    close(lse, expected_lse)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad)
    for got, right in zip(tensors, copies, strict=True):
        close(got.grad, right.grad)
    with torch.no_grad():
        again = fa.flash_attn_func(q, k, v, **options)
    assert torch.equal(again, out)
    assert again.is_contiguous()


def test_packed_forms_are_the_same_call() -> None:
    qkv = torch.randn(2, 5, 3, 4, 8, requires_grad=True)
    q, k, v = (x.detach().clone().requires_grad_() for x in qkv.unbind(2))
    expected = fa.flash_attn_func(q, k, v, causal=True)
    out = fa.flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(out, expected)
    assert torch.equal(fa.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), expected)
    expected.sum().backward()
    out.sum().backward()
    torch.testing.assert_close(qkv.grad, torch.stack([q.grad, k.grad, v.grad], 2))
    joined = qkv.detach().flatten(2, 3)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(joined, causal=True, num_heads_q=4), expected)


LENGTHS = [(3, 5), (0, 4), (2, 0), (6, 6)]


def starts(lengths: list[int]) -> Any:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def by_sequence(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, used_q: Any = None, used_k: Any = None, **options: Any):
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), float("-inf"))
    for i in range(len(cu_q) - 1):
        a, c = int(cu_q[i]), int(cu_k[i])
        b = int(cu_q[i + 1]) if used_q is None else a + int(used_q[i])
        d = int(cu_k[i + 1]) if used_k is None else c + int(used_k[i])
        one, one_lse = reference(q[None, a:b], k[None, c:d], v[None, c:d], **options)
        out[a:b], lse[:, a:b] = one[0], one_lse[0].float()
    return out, lse


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window_size": (2, 0)}], ids=str)
def test_varlen(options: dict[str, Any]) -> None:
    cu_q, cu_k = starts([a for a, _ in LENGTHS]), starts([b for _, b in LENGTHS])
    q = torch.randn(int(cu_q[-1]), 4, 8, requires_grad=True)
    kv = torch.randn(int(cu_k[-1]), 2, 2, 8, requires_grad=True)
    k, v = kv.unbind(1)
    plain = {"causal": options.get("causal", False), "window": options.get("window_size", (-1, -1))}
    expected, expected_lse = by_sequence(q.detach(), k.detach(), v.detach(), cu_q, cu_k, **plain)
    for out, lse, _ in (
        fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 6, return_attn_probs=True, **options),
        fa.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 6, 6, return_attn_probs=True, **options),
    ):
        close(out, expected)
        close(lse, expected_lse)
    out.square().sum().backward()
    assert q.grad.abs().sum() > 0
    assert kv.grad.abs().sum() > 0
    qkv = torch.randn(int(cu_q[-1]), 3, 4, 8)
    out = fa.flash_attn_varlen_qkvpacked_func(qkv, cu_q, 6, **options)
    close(out, by_sequence(*qkv.unbind(1), cu_q, cu_q, **plain)[0])


@pytest.mark.parametrize("which", ["q", "k", "both"])
@pytest.mark.parametrize("grad", [False, True])
def test_tokens_in_use(which: str, grad: bool) -> None:
    cu_q, cu_k = starts([3, 5, 2]), starts([4, 6, 3])
    used_q = torch.tensor([2, 5, 0], dtype=torch.int32) if which != "k" else None
    used_k = torch.tensor([4, 2, 3], dtype=torch.int32) if which != "q" else None
    q = torch.randn(10, 4, 8, requires_grad=grad)
    k, v = (torch.randn(13, 2, 8, requires_grad=grad) for _ in range(2))
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 5, 6, used_q, used_k, causal=True, return_attn_probs=True
    )
    expected, expected_lse = by_sequence(q.detach(), k.detach(), v.detach(), cu_q, cu_k, used_q, used_k, causal=True)
    close(out, expected)
    close(lse, expected_lse)
    if grad:
        out.sum().backward()
        if used_k is not None:
            assert torch.equal(v.grad[6:10], torch.zeros(4, 2, 8))  # past the second sequence's 2 keys
        assert v.grad.abs().sum() > 0


def test_sinks_have_a_gradient() -> None:
    q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8)
    sinks, copy = torch.randn(4, requires_grad=True), None
    copy = sinks.detach().clone().requires_grad_()
    out = fa3.flash_attn_func(q, k, k, causal=True, s_aux=sinks)
    expected, _ = reference(q, k, k, causal=True, sinks=copy)
    close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    close(sinks.grad, copy.grad)


# --- the cache


def rotated(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool) -> Any:
    return rotary.apply_rotary_emb_torch(x[None], cos[positions][None], sin[positions][None], interleaved)[0]


CACHES: dict[str, dict[str, Any]] = {
    "read": {"new": False},
    "append": {},
    "append-rotary": {"turn": True, "interleaved": False},
    "append-rotary-interleaved": {"turn": True, "interleaved": True},
    "append-rotary-not-causal": {"turn": True, "interleaved": True, "causal": False},
    "append-rotary-one-token": {"turn": True, "interleaved": False, "causal": False, "tokens": 1},
    "append-rotary-tables-of-16-bits": {"turn": True, "interleaved": True, "table": torch.bfloat16},
    "batch-idx": {"rows": [3, 0, 2]},
    "leftpad": {"leftpad": [1, 0, 4]},
    "leftpad-strided-rows": {"leftpad": [1, 0, 4], "strided": True},
    "pages": {"pages": True},
    "pages-batch-idx": {"pages": True, "rows": [2, 1, 2], "new": False},
    "pages-leftpad-rotary": {"pages": True, "leftpad": [1, 0, 4], "turn": True, "interleaved": False},
    "alibi-softcap-window": {"alibi": True, "softcap": 5.0, "window_size": (6, 0)},
    "length-int": {"lengths": 5},
    "lengths-none": {"new": False, "lengths": None},
}


@pytest.mark.parametrize("name", CACHES)
def test_with_kvcache(name: str) -> None:
    case = dict(CACHES[name])
    batch, seq, new, size = 3, 16, case.get("tokens", 2), 4
    new_tokens, leftpad, rows = case.get("new", True), case.get("leftpad"), case.get("rows")
    lengths = case.get("lengths", [7, 5, 9])
    at = [seq] * batch if lengths is None else [lengths] * batch if isinstance(lengths, int) else lengths
    caches = [torch.randn(4, 2 * seq, 2, 16)[:, : 2 * seq : 2 if case.get("strided") else 1][:, :seq] for _ in range(2)]
    table = torch.randperm(12)[: batch * seq // size].reshape(batch, -1).to(torch.int32)
    if case.get("pages"):
        caches = [torch.randn(12, size, 2, 16) for _ in range(2)]

    def of_sequence(cache: Any, i: int) -> Any:
        row = i if rows is None else rows[i]
        return cache[table[row].long()].flatten(0, 1) if case.get("pages") else cache[row]

    before = [[of_sequence(cache, i).clone() for i in range(batch)] for cache in caches]
    q = torch.randn(batch, new, 4, 16)
    k, v = (torch.randn(batch, new, 2, 16) for _ in range(2))
    angle = torch.rand(32, 4) * 6
    cos, sin = (table.to(case.get("table", torch.float32)) for table in (angle.cos(), angle.sin()))
    options = {"causal": case.get("causal", True), "softcap": case.get("softcap", 0.0)}
    options["alibi_slopes"] = torch.rand(4) if case.get("alibi") else None
    out, lse = fa.flash_attn_with_kvcache(
        q,
        *caches,
        k if new_tokens else None,
        v if new_tokens else None,
        cos if case.get("turn") else None,
        sin if case.get("turn") else None,
        torch.tensor(lengths, dtype=torch.int32) if isinstance(lengths, list) else lengths,
        None if rows is None else torch.tensor(rows, dtype=torch.int32),
        None if leftpad is None else torch.tensor(leftpad, dtype=torch.int32),
        table if case.get("pages") else None,
        window_size=case.get("window_size", (-1, -1)),
        rotary_interleaved=case.get("interleaved", True),
        num_splits=2,
        return_softmax_lse=True,
        **options,
    )
    for i in range(batch):
        keys, values = before[0][i], before[1][i]
        end, query, key = at[i], q[i], k[i]
        if case.get("turn"):
            places = torch.arange(new) + at[i]
            key = rotated(key, cos, sin, places, case["interleaved"])
            query = rotated(
                query, cos, sin, places if options["causal"] else places[:1].expand(new), case["interleaved"]
            )
        if new_tokens:
            keys[end : end + new], values[end : end + new] = key, v[i]
            end += new
            close(of_sequence(caches[0], i), keys)
            assert torch.equal(of_sequence(caches[1], i), values)
        first = 0 if leftpad is None else leftpad[i]
        window = case.get("window_size", (-1, -1))
        expected, expected_lse = reference(
            query[None], keys[None, first:end], values[None, first:end], window=window, **options
        )
        close(out[i], expected[0])
        close(lse[i], expected_lse[0])


def test_cache_turns_queries_and_keys_in_the_call_that_appends(monkeypatch: pytest.MonkeyPatch) -> None:
    import flashkernel.torch as fkt

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("a pass over memory of its own")

    monkeypatch.setattr(fkt, "rope_table", refuse)
    q, cache, angle = torch.randn(2, 3, 4, 16), torch.zeros(2, 8, 2, 16), torch.rand(8, 4)
    k = torch.randn(2, 3, 2, 16)
    lengths = torch.tensor([2, 0], dtype=torch.int32)
    tables = angle.cos(), angle.sin()
    fa.flash_attn_with_kvcache(q, cache, cache.clone(), k, k, *tables, lengths, causal=True)
    close(cache[0, 2:5], rotated(k[0], *tables, torch.arange(3) + 2, True))
    with pytest.raises(ValueError, match=r"rope.positions\[0\]=9; needs a value from 0 to 7"):  # the table has 8 rows
        fa.flash_attn_with_kvcache(
            q, torch.zeros(2, 16, 2, 16), torch.zeros(2, 16, 2, 16), k, k, *tables, lengths + 7, causal=True
        )


def test_a_query_with_a_gradient_stays_recorded() -> None:
    """Turned with the keys that are appended, it would lose its gradient without a word."""
    q, cache, angle = torch.randn(1, 1, 4, 16, requires_grad=True), torch.zeros(1, 8, 2, 16), torch.rand(8, 4)
    k = torch.randn(1, 1, 2, 16)
    out = fa.flash_attn_with_kvcache(q, cache, cache.clone(), k, k, angle.cos(), angle.sin(), 2, causal=True)
    with pytest.raises(NotImplementedError, match="has no gradients"):
        out.sum().backward()


def test_values_of_another_head_dim() -> None:
    q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 24)
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    expected, expected_lse = reference(q, k, v, causal=True)
    assert out.is_contiguous()
    close(out, expected)
    close(lse, expected_lse)
    strided = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v))  # the last dim strided: copies
    assert torch.equal(fa.flash_attn_func(*strided, causal=True), out)


@pytest.mark.parametrize("varlen", [False, True])
def test_queries_that_see_no_key_have_gradients_of_0(varlen: bool) -> None:
    q, k, v = (torch.randn(1, n, h, 16, requires_grad=True) for n, h in ((9, 4), (4, 2), (4, 2)))
    if varlen:
        cu_q, cu_k = starts([9]), starts([4])
        out = fa.flash_attn_varlen_func(q[0], k[0], v[0], cu_q, cu_k, 9, 4, causal=True)[None]
    else:
        out = fa.flash_attn_func(q, k, v, causal=True)  # the last 4 of 9 queries see keys
    out.backward(torch.randn_like(out))
    assert torch.equal(out[:, :5], torch.zeros(1, 5, 4, 16))
    assert torch.equal(q.grad[:, :5], torch.zeros(1, 5, 4, 16))
    assert q.grad[:, 6:].abs().sum() > 0


def test_cache_with_lengths_of_queries_and_new_tokens() -> None:
    """flash-attn 3: queries and new tokens side by side, rotary positions of their own, a page table, sinks."""
    pages = [torch.randn(6, 8, 2, 16) for _ in range(2)]
    table = torch.tensor([[4, 1], [0, 5]], dtype=torch.int32)
    cu = starts([1, 3])
    q, k, v = torch.randn(4, 4, 16), torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    angle = torch.rand(32, 4)
    cos, sin, at, turn, sinks = angle.cos(), angle.sin(), [5, 9], [7, 0], torch.randn(4)
    out, lse, *rest = fa3.flash_attn_with_kvcache(
        q,
        *pages,
        k,
        v,
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=torch.tensor(at, dtype=torch.int32),
        page_table=table,
        cu_seqlens_q=cu,
        cu_seqlens_k_new=cu,
        max_seqlen_q=3,
        rotary_seqlens=torch.tensor(turn, dtype=torch.int32),
        causal=True,
        return_softmax_lse=True,
        s_aux=sinks,
    )
    assert [x.numel() for x in rest] == [0, 0]
    for i, (a, b) in enumerate(((0, 1), (1, 4))):
        places = torch.arange(b - a) + turn[i]
        keys, values = (x[table[i].long()].flatten(0, 1) for x in pages)
        close(keys[at[i] : at[i] + b - a], rotated(k[a:b], cos, sin, places, True))
        end = at[i] + b - a
        query = rotated(q[a:b], cos, sin, places, True)
        expected, expected_lse = reference(query[None], keys[None, :end], values[None, :end], causal=True, sinks=sinks)
        close(out[a:b], expected[0])
        close(lse[:, a:b], expected_lse[0])


def test_pages_of_varlen_have_no_gradient_and_say_so() -> None:
    pages, table = torch.randn(4, 8, 2, 16), torch.tensor([[2, 0]], dtype=torch.int32)
    q = torch.randn(3, 4, 16, requires_grad=True)
    out = fa.flash_attn_varlen_func(q, pages, pages, starts([3]), starts([11]), 3, 11, causal=True, block_table=table)
    keys = pages[table[0].long()].flatten(0, 1)[None, :11]
    close(out.detach(), reference(q[None].detach(), keys, keys, causal=True)[0][0])
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func: attention over a cache has no gradients"):
        out.sum().backward()


def test_combine() -> None:
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 12, 4, 8), torch.randn(2, 12, 4, 8)
    parts = [reference(q, k[:, i : i + 4], v[:, i : i + 4]) for i in (0, 4, 8)]
    outs = torch.stack([*(out for out, _ in parts), torch.full_like(q, float(7))])
    lses = torch.stack([*(lse.mT for _, lse in parts), torch.full((2, 3, 4), float("-inf"))]).float()
    expected, expected_lse = reference(q, k, v)
    out, lse = fa3.flash_attn_combine(outs, lses)
    close(out, expected)
    close(lse, expected_lse.mT)
    for dtype in (torch.bfloat16, torch.float16):
        narrow, _ = fa3.flash_attn_combine(outs, lses, out_dtype=dtype)
        assert narrow.dtype == dtype
        assert torch.equal(narrow, out.to(dtype))  # summed in float32, rounded once
    wide, _ = fa3.flash_attn_combine(outs.bfloat16(), lses, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    given = torch.empty_like(q, dtype=torch.bfloat16)
    assert fa3.flash_attn_combine(outs, lses, out=given)[0] is given
    assert torch.equal(given, out.bfloat16())
    swapped = outs.transpose(3, 4).contiguous().transpose(3, 4)  # a strided last dim
    assert torch.equal(fa3.flash_attn_combine(swapped, lses)[0], out)
    nothing = fa3.flash_attn_combine(outs, torch.full_like(lses, float("-inf")))
    assert torch.equal(nothing[0], torch.zeros_like(q))


# --- rotary, padding


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, [1, 4]], ids=str)
def test_rotary(offsets: Any, inplace: bool, interleaved: bool) -> None:
    x = torch.randn(2, 5, 3, 16, requires_grad=True)
    copy = x.detach().clone().requires_grad_()
    angle = torch.rand(12, 4)
    cos, sin = angle.cos(), angle.sin()
    at = torch.tensor(offsets if isinstance(offsets, list) else [offsets] * 2)
    given = at if isinstance(offsets, list) else offsets
    out = rotary.apply_rotary_emb(x, cos, sin, interleaved, inplace, given)
    places = torch.arange(5) + at[:, None]
    expected = rotary.apply_rotary_emb_torch(copy, cos[places], sin[places], interleaved)
    close(out, expected)
    assert (out.data_ptr() == x.data_ptr()) == inplace
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad)
    close(x.grad, copy.grad)
    with torch.no_grad():
        close(rotary.apply_rotary_emb(copy.clone(), cos, sin, interleaved, inplace, given), expected)
    tokens = copy.detach()[0, :4]
    out = rotary.apply_rotary_emb(tokens, cos, sin, interleaved, cu_seqlens=starts([1, 3]))
    close(out, rotated(tokens, cos, sin, torch.tensor([0, 0, 1, 2]), interleaved))


def test_rotary_of_packed_tensors() -> None:
    angle = torch.rand(9, 4)
    cos, sin = angle.cos(), angle.sin()
    qkv = torch.randn(2, 5, 3, 2, 8)
    expected = qkv.clone()
    for part in (0, 1):
        expected[:, :, part] = rotary.apply_rotary_emb(qkv[:, :, part], cos, sin)
    given = qkv.clone().requires_grad_()
    out = rotary.apply_rotary_emb_qkv_(given, cos, sin)
    close(out.detach(), expected)
    out.backward(out.detach())
    close(given.grad[:, :, 2], expected[:, :, 2])
    close(given.grad[:, :, 0], qkv[:, :, 0])  # turned back
    joined = torch.cat([qkv[:, :, 0], qkv[:, :, 1, :1], qkv[:, :, 2, :1]], 2)
    out = rotary.apply_rotary_emb_qkv_(joined.clone(), cos, sin, num_heads_q=2)
    close(out[:, :, :3], torch.cat([expected[:, :, 0], expected[:, :, 1, :1]], 2))
    out = rotary.apply_rotary_emb_kv_(qkv[:, :, 1:].clone(), cos, sin)
    close(out, expected[:, :, 1:])


def test_padding_and_back() -> None:
    x = torch.randn(3, 4, 2, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    tokens, indices, cu, longest, used = unpad_input(x, mask, unused)
    assert (cu.tolist(), longest, used.tolist()) == ([0, 3, 3, 6], 3, [2, 0, 3])
    back = pad_input(tokens, indices, 3, 4)
    assert torch.equal(back, x * (mask + unused)[..., None])
    back.sum().backward()
    assert torch.equal(x.grad[..., 0], (mask + unused).float())


# --- refusals, signatures, install


def test_refusals() -> None:
    q = torch.randn(1, 4, 2, 8)
    cu = starts([4])
    qkv = torch.randn(1, 4, 3, 2, 8)
    for refused in (
        lambda: fa.flash_attn_func(q, q, q, 0.1),
        lambda: fa.flash_attn_kvpacked_func(q, qkv[:, :, 1:], 0.1),
        lambda: fa.flash_attn_qkvpacked_func(qkv, 0.1),
        lambda: fa.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 4, 4, 0.1),
        lambda: fa.flash_attn_varlen_kvpacked_func(q[0], qkv[0, :, 1:], cu, cu, 4, 4, 0.1),
        lambda: fa.flash_attn_varlen_qkvpacked_func(qkv[0], cu, 4, 0.1),
    ):
        with pytest.raises(NotImplementedError, match=r"flash_attn_\w+: dropout_p=0.1; 0 is needed"):
            refused()
    with pytest.raises(NotImplementedError, match="qv is given"):
        fa3.flash_attn_func(q, q, q, qv=q)
    with pytest.raises(NotImplementedError, match="attention_chunk=4; 0 is needed"):
        fa3.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 4, 4, attention_chunk=4)
    # Shapes are those that the caller gave, in the caller's layout.
    with pytest.raises(fa.ArgumentError, match=r"flash_attn_func: q \[1, 4, 2, 8\] torch.float32, k \[1, 4, 3, 8\]"):
        fa.flash_attn_func(q, *[torch.randn(1, 4, 3, 8)] * 2)
    with pytest.raises(fa.ArgumentError, match=r"qkv has shape \[1, 4, 2, 8\]; \[batch, seq, 3, heads, head_dim\]"):
        fa.flash_attn_qkvpacked_func(q)
    with pytest.raises(fa.ArgumentError, match="a token is appended at position 4 of a cache of 4 tokens"):
        fa.flash_attn_with_kvcache(q[:, :1], q.clone(), q.clone(), q[:, :1], q[:, :1], cache_seqlens=4)
    with pytest.raises(fa.ArgumentError, match="k and v without cache_seqlens"):
        fa.flash_attn_with_kvcache(q, q, q, q, q)
    with pytest.raises(fa.ArgumentError, match="v is missing"):
        fa.flash_attn_with_kvcache(q, q, q, q, cache_seqlens=0)
    with pytest.raises(fa.ArgumentError, match="rotary tables without k and v"):
        fa.flash_attn_with_kvcache(q, q, q, rotary_cos=torch.ones(4, 4), rotary_sin=torch.ones(4, 4))


def test_tables_of_arguments() -> None:
    """Parameters have the order of the package, since calls pass them by position."""
    assert list(inspect.signature(fa.flash_attn_func).parameters) == (
        "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs".split()
    )
    assert list(inspect.signature(fa.flash_attn_varlen_func).parameters)[3:9] == (
        "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale".split()
    )
    assert list(inspect.signature(fa.flash_attn_with_kvcache).parameters) == (
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table "
        "softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse".split()
    )
    assert list(inspect.signature(fa3.flash_attn_func).parameters) == (
        "q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits "
        "pack_gqa deterministic sm_margin return_attn_probs s_aux".split()
    )


INSTALL = """
import sys, types
import flashkernel.flash_attn as door
door.install(); door.install()
import flash_attn, flash_attn_interface
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import flash_attn_varlen_func
from flash_attn.bert_padding import unpad_input
from flash_attn.layers.rotary import apply_rotary_emb
import importlib.util
assert importlib.util.find_spec("flash_attn") is not None
assert flash_attn_func is door.flash_attn_func and flash_attn.__version__ == door.VERSION
assert flash_attn_interface.flash_attn_func is not flash_attn_func
assert door.installed()
try:
    import flash_attn.losses
    raise SystemExit("there is no such module here")
except ModuleNotFoundError:
    pass
door.uninstall()
assert not door.installed() and "flash_attn" not in sys.modules and "flash_attn.layers.rotary" not in sys.modules
real = sys.modules["flash_attn"] = types.ModuleType("flash_attn")
try:
    door.install()
    raise SystemExit("it was already imported")
except RuntimeError as error:
    assert "flash_attn is already imported from elsewhere" in str(error), error
door.install(force=True)
assert sys.modules["flash_attn"] is not real
door.uninstall()
assert sys.modules["flash_attn"] is real
"""


def test_install() -> None:
    subprocess.run([sys.executable, "-c", INSTALL], check=True)


@pytest.mark.parametrize("name", ["func", "varlen", "kvcache"])
def test_compiles_without_a_break(name: str) -> None:
    q, kv = torch.randn(1, 6, 4, 8, requires_grad=True), torch.randn(1, 6, 2, 8)
    cu = starts([6])

    def attend(q: Any, kv: Any) -> Any:
        if name == "func":
            return fa.flash_attn_func(q, kv, kv, causal=True)
        if name == "varlen":
            return fa.flash_attn_varlen_func(q[0], kv[0], kv[0], cu, cu, 6, 6, causal=True)
        with torch.no_grad():
            return fa.flash_attn_with_kvcache(q, kv, kv, cache_seqlens=5, causal=True)

    torch._dynamo.reset()
    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, kv)
    torch.testing.assert_close(out, attend(q, kv))
    if name != "kvcache":
        out.sum().backward()
        assert q.grad.abs().sum() > 0
