"""What flash_attn's functions ask of torch besides one call of a kernel: ops that its dispatcher runs, counted by the
profiler. (A TorchDispatchMode would count other calls: under a mode the functions take the path that it can follow.)
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashkernel as fk
import flashkernel.torch as fkt
from flashkernel import flash_attn as fa
from flashkernel.flash_attn import _cache
from flashkernel.flash_attn import flash_attn_3_interface as fa3


def ops_of(call: Callable[[], Any]) -> dict[str, int]:
    """How often each op of torch runs in a call. Allocations are left out: every result needs one."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as record:
        call()
    names = collections.Counter(event.name for event in record.events() if "::" in event.name)
    return {name: n for name, n in names.items() if not name.startswith(("aten::empty", "profiler::"))}


def int32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def decode(**given: Any) -> Callable[[], Any]:
    """Three sequences, a token each, in rows of a cache."""
    q, k = torch.randn(3, 1, 4, 16), torch.randn(3, 1, 2, 16)
    cache = torch.zeros(2, 5, 32, 2, 16)
    if "block_table" in given:
        cache = cache.view(2, 20, 8, 2, 16)
    caches = list(cache)
    given = {"k": k, "v": k, "cache_seqlens": int32(7, 0, 30), "causal": True} | given
    return lambda: fa.flash_attn_with_kvcache(q, *caches, **given)


ANGLES = torch.rand(32, 8)
TABLES = {"rotary_cos": ANGLES.cos(), "rotary_sin": ANGLES.sin()}
USUAL: dict[str, dict[str, Any]] = {
    "rows": {},
    "rotary": TABLES,
    "read": {"k": None, "v": None},
    "leftpad": {"cache_leftpad": int32(2, 0, 29)},
    "leftpad-rotary": {"cache_leftpad": int32(2, 0, 29), **TABLES},
    "pages": {"block_table": torch.arange(12, dtype=torch.int32).view(3, 4)},
    "pages-rotary": {"block_table": torch.arange(12, dtype=torch.int32).view(3, 4), **TABLES},
    "window-lse": {"window_size": (5, 0), "return_softmax_lse": True},
}


@pytest.mark.parametrize("name", USUAL)
def test_a_step_over_a_cache_runs_no_op_of_torch(name: str) -> None:
    assert ops_of(decode(**USUAL[name])) == {}


def test_rows_by_index_are_a_view() -> None:
    assert set(ops_of(decode(cache_batch_idx=int32(4, 0, 2)))) == {"aten::unsqueeze", "aten::as_strided"}


def test_tokens_of_various_lengths_run_no_op_of_torch() -> None:
    q, k, caches = torch.randn(6, 4, 16), torch.randn(6, 2, 16), list(torch.zeros(2, 3, 32, 2, 16))
    starts = int32(0, 1, 1, 6)
    given = {"cu_seqlens_q": starts, "cu_seqlens_k_new": starts, "max_seqlen_q": 5, "causal": True}
    given |= {"cache_seqlens": int32(7, 0, 3), **TABLES}
    assert ops_of(lambda: fa3.flash_attn_with_kvcache(q, *caches, k, k, **given)) == {}


def test_both_ways_over_a_cache_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that torch can trace, by ops of torch, and the one by kernels."""

    def results() -> list[Any]:
        torch.manual_seed(5)
        return [decode(**given)() for given in USUAL.values()]

    by_kernels = results()
    monkeypatch.setattr(_cache, "direct", lambda *tensors: False)
    for left, right in zip(by_kernels, results(), strict=True):
        torch.testing.assert_close(left, right)


def test_a_page_table_of_rows_in_order_is_made_once() -> None:
    device = torch.device("cpu")
    table = _cache._rows_in_order(3, device)
    assert table.tolist() == [[0], [1], [2]]
    assert _cache._rows_in_order(3, device) is table


def test_recorded_attention_is_one_step() -> None:
    """Fewer ops of torch than the plain op has, which is recorded by way of its dispatcher."""
    q, k = torch.randn(2, 5, 4, 16, requires_grad=True), torch.randn(2, 5, 2, 16, requires_grad=True)
    forward = ops_of(lambda: fa.flash_attn_func(q, k, k, causal=True))
    plain = ops_of(lambda: fkt.attention(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), causal=True))
    assert sum(forward.values()) <= 2 < sum(plain.values()), (forward, plain)
    out = fa.flash_attn_func(q, k, k, causal=True)
    assert type(out.grad_fn).__name__ == "_RecordedBackward"
    assert {type(step).__name__ for step, _ in out.grad_fn.next_functions if step} == {"AccumulateGrad"}


@pytest.mark.parametrize("grad_of", ["out", "lse", "both"])
def test_gradients_of_the_one_step(grad_of: str) -> None:
    q, k, v = (torch.randn(2, 7, heads, 16) for heads in (4, 2, 2))
    sinks = torch.randn(4)

    def gradients(call: Callable[..., Any]) -> tuple[Any, ...]:
        given = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
        out, lse = call(*given)
        loss = {"out": out.sin().sum(), "lse": lse.sin().sum(), "both": out.sin().sum() + lse.sin().sum()}[grad_of]
        return torch.autograd.grad(loss, given, create_graph=False, allow_unused=True)

    def ours(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return fa3.flash_attn_func(q, k, v, causal=True, s_aux=sinks, return_attn_probs=True)

    def plain(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = fkt.attention(*heads_first, causal=True, sinks=sinks, return_lse=True)
        return out.transpose(1, 2), lse

    for left, right in zip(gradients(ours), gradients(plain), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("which", ["q", "k", "both"])
def test_tokens_in_use_are_bounded_in_kernels(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients are those of the way that copies what counts, and nothing is copied."""
    q, k, v, sinks = torch.randn(10, 4, 8), torch.randn(13, 2, 8), torch.randn(13, 2, 8), torch.randn(4)
    starts = int32(0, 3, 8, 10), int32(0, 4, 10, 13)
    used = int32(2, 5, 0) if which != "k" else None, int32(4, 2, 3) if which != "q" else None

    def call(*given: Any) -> Any:
        *rest, last = given
        return fa3.flash_attn_varlen_func(
            *rest, *starts, 5, 6, *used, causal=True, s_aux=last, return_attn_probs=True
        )  # fmt: skip

    def gradients() -> list[Any]:
        given = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
        out, lse = call(*given)
        loss = out.sin().sum() + lse[lse.isfinite()].sin().sum()
        return [out.detach(), lse.detach(), *torch.autograd.grad(loss, given)]

    by_kernels = gradients()
    assert not {"aten::index", "aten::nonzero", "aten::index_copy"} & set(ops_of(lambda: call(q, k, v, sinks)))
    monkeypatch.setattr(fa3.door, "plain", lambda *tensors: False)
    assert "aten::index" in ops_of(lambda: call(q.clone().requires_grad_(), k, v, sinks))
    for left, right in zip(by_kernels, gradients(), strict=True):
        torch.testing.assert_close(left, right)


def test_a_second_derivative_is_refused() -> None:
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    starts, used = int32(0, 3), int32(2)
    for op, call in {
        "flash_attn_func": lambda: fa.flash_attn_func(q, q, q),
        "flash_attn_varlen_func": lambda: fa3.flash_attn_varlen_func(
            q[0], q[0], q[0], starts, starts, 3, 3, used, used
        ),
    }.items():
        (grad,) = torch.autograd.grad(call().sum(), q, create_graph=True)
        (plain,) = torch.autograd.grad(call().sum(), q)
        assert torch.equal(grad, plain)
        with pytest.raises(NotImplementedError, match=f"^{op}: second derivatives are not implemented"):
            grad.sum().backward()


def test_errors_are_of_both_kinds() -> None:
    """ValueError as in the rest of the library, RuntimeError as the package has it; with the numbers of their class."""
    assert issubclass(fa.ArgumentError, ValueError) and issubclass(fa.ArgumentError, RuntimeError)
    q, pages, table = torch.zeros(1, 1, 2, 8), torch.zeros(2, 16, 2, 8), torch.zeros(1, 1, dtype=torch.int32)
    for of, length in ((table, 17), (table + 7, 16)):
        with pytest.raises(fa.ArgumentError, match="block_table") as raised:
            fa.flash_attn_with_kvcache(q, pages, pages, block_table=of, cache_seqlens=length)
        assert isinstance(raised.value, fk.BlockTableError) and raised.value.sequence == 0


def test_padding_on_the_left_of_pages_of_one_token_of_any_strides() -> None:
    """The stride of a dim of one element says nothing, as that of a transposed cache."""
    q, table = torch.randn(2, 1, 2, 8), torch.tensor([[3, 0, 4], [1, 5, 2]], dtype=torch.int32)
    k, v = torch.randn(6, 2, 1, 8).transpose(1, 2), torch.randn(6, 1, 2, 8)
    lengths, left = torch.tensor([3, 2], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    options: dict[str, Any] = dict(block_table=table, cache_seqlens=lengths, cache_leftpad=left)
    expected = fa.flash_attn_with_kvcache(q, k, v, **options)
    with torch.no_grad():
        alone = [
            fa.flash_attn_func(q[b : b + 1], *(x[table[b, begin:end].long(), 0][None] for x in (k, v)))
            for b, (begin, end) in enumerate(((1, 3), (0, 2)))
        ]
    torch.testing.assert_close(expected, torch.cat(alone))
    q.requires_grad_()  # by torch's ops
    torch.testing.assert_close(fa.flash_attn_with_kvcache(q, k, v, **options), expected)
    torch.testing.assert_close(torch.compile(fa.flash_attn_with_kvcache, backend="eager")(q, k, v, **options), expected)
