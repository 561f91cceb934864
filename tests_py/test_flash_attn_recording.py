"""What torch records about tensors, through every function of `flashkernel.flash_attn`: gradients, tangents, changes in
place, and torch.func's transforms. Nothing is dropped without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.autograd.forward_ad as forward_ad

from flashkernel.flash_attn import bert_padding, flash_attn_interface, rotary
from flashkernel.flash_attn import flash_attn_3_interface as fa3
from flashkernel.flash_attn import flash_attn_interface as fa

NO_GRADIENT = "requires a gradient|has no gradients"


def int32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Case -> (function, keywords) with new tensors; every tensor that a function takes is in one."""
    generator = torch.Generator().manual_seed(0)

    def r(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    starts, angle = int32(0, 2, 6), torch.linspace(0.1, 2, 64).view(16, 4)
    dense = {"q": r(2, 4, 4, 8), "k": r(2, 4, 2, 8), "v": r(2, 4, 2, 8)}
    packed = {"q": r(6, 4, 8), "k": r(6, 2, 8), "v": r(6, 2, 8)}
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 4, "max_seqlen_k": 4}
    slopes, sinks = {"alibi_slopes": r(4).abs()}, {"s_aux": r(4)}
    tables = {"cos": angle.cos(), "sin": angle.sin()}
    turned = {f"rotary_{name}": table for name, table in tables.items()}
    cache = {"k_cache": r(2, 16, 2, 8), "v_cache": r(2, 16, 2, 8)}
    appended = {**dense, **cache, "cache_seqlens": int32(3, 5)}
    beside = {**packed, **cache, "cache_seqlens": int32(3, 5), "cu_seqlens_q": starts, "cu_seqlens_k_new": starts}
    pages = {"q": packed["q"], "k": r(4, 8, 2, 8), "v": r(4, 8, 2, 8), **lengths, "block_table": int32(0, 1).view(2, 1)}
    used = {"seqused_q": int32(1, 3), "seqused_k": int32(2, 2)}
    parts = {"out_partial": r(3, 2, 4, 4, 8), "lse_partial": r(3, 2, 4, 4)}
    turn, turn_k = rotary.apply_rotary_emb, {f"{name}_k": table.clone() for name, table in tables.items()}
    of_qkv = {"alibi_slopes": r(2).abs()}
    return {
        "func": (fa.flash_attn_func, {**dense, **slopes}),
        "kvpacked": (fa.flash_attn_kvpacked_func, {"q": dense["q"], "kv": r(2, 4, 2, 2, 8), **slopes}),
        "qkvpacked": (fa.flash_attn_qkvpacked_func, {"qkv": r(2, 4, 3, 2, 8), **of_qkv}),
        "varlen": (fa.flash_attn_varlen_func, {**packed, **lengths, **slopes}),
        "varlen of pages": (fa.flash_attn_varlen_func, {**pages, **slopes}),
        "varlen kvpacked": (
            fa.flash_attn_varlen_kvpacked_func,
            {"q": packed["q"], "kv": r(6, 2, 2, 8), **lengths, **slopes},
        ),
        "varlen qkvpacked": (
            fa.flash_attn_varlen_qkvpacked_func,
            {"qkv": r(6, 3, 2, 8), "cu_seqlens": starts, "max_seqlen": 4, **of_qkv},
        ),
        "cache": (fa.flash_attn_with_kvcache, {"q": dense["q"], **cache, **slopes}),
        "cache, appended": (fa.flash_attn_with_kvcache, {**appended, **slopes}),
        "cache, turned": (fa.flash_attn_with_kvcache, {**appended, **turned, "causal": True}),
        "3 func": (fa3.flash_attn_func, {**dense, **sinks}),
        "3 qkvpacked": (fa3.flash_attn_qkvpacked_func, {"qkv": r(2, 4, 3, 2, 8)}),
        "3 varlen": (fa3.flash_attn_varlen_func, {**packed, **lengths, **sinks}),
        "3 varlen, used": (fa3.flash_attn_varlen_func, {**packed, **lengths, **used, **sinks}),
        "3 cache": (fa3.flash_attn_with_kvcache, {**appended, **turned, **sinks, "causal": True}),
        "3 cache, varlen": (fa3.flash_attn_with_kvcache, {**beside, **turned, **sinks, "max_seqlen_q": 4}),
        "3 combine": (fa3.flash_attn_combine, {**parts, "out": r(2, 4, 4, 8)}),
        "rotary": (turn, {"x": dense["q"], **tables}),
        "rotary, varlen": (turn, {"x": packed["q"], "cu_seqlens": starts, **tables}),
        "rotary, in place": (turn, {"x": dense["q"], **tables, "inplace": True}),
        "rotary, varlen, in place": (turn, {"x": packed["q"], "cu_seqlens": starts, **tables, "inplace": True}),
        "rotary of kv": (rotary.apply_rotary_emb_kv_, {"kv": r(2, 4, 2, 2, 8), **tables}),
        "rotary of qkv": (rotary.apply_rotary_emb_qkv_, {"qkv": r(2, 4, 3, 2, 8), **tables, **turn_k}),
        "pad": (
            bert_padding.pad_input,
            {"hidden_states": r(6, 8), "indices": torch.arange(6), "batch": 2, "seqlen": 4},
        ),
        "unpad": (
            bert_padding.unpad_input,
            {"hidden_states": r(2, 4, 8), "attention_mask": torch.ones(2, 4, dtype=bool)},
        ),
        "index": (bert_padding.index_first_axis, {"x": r(6, 8), "indices": torch.arange(3)}),
        "put": (
            bert_padding.index_put_first_axis,
            {"values": r(3, 8), "indices": torch.arange(3), "first_axis_dim": 6},
        ),
    }


TENSORS = [
    pytest.param(case, name, id=f"{case}-{name}")
    for case, (_, keywords) in calls().items()
    for name, value in keywords.items()
    if isinstance(value, torch.Tensor) and value.is_floating_point()
]
OF_TORCH = {"pad", "unpad", "index", "put"}  # by ops of torch alone
WRITTEN = {
    **{(case, "x"): True for case in calls() if case.startswith("rotary") and case.endswith("in place")},
    **{("rotary of kv", "kv"): True, ("rotary of qkv", "qkv"): True, ("3 combine", "out"): False},
    **{
        (case, name): False
        for case, (_, keywords) in calls().items()
        for name in ("k_cache", "v_cache")
        if name in keywords and "k" in keywords
    },
}  # and whether a gradient passes through


def run(case: str, name: str, value: Any) -> Any:
    function, keywords = calls()[case]
    result = function(**{**keywords, name: value})
    return result[0] if isinstance(result, tuple) else result


def test_every_function_is_here() -> None:
    functions = {function for function, _ in calls().values()}
    without_tensors = {"get_scheduler_metadata", "apply_rotary_emb_torch"}  # and a reference, by ops of torch
    for module in (flash_attn_interface, fa3, rotary, bert_padding):
        for name in set(module.__all__) - without_tensors:
            assert getattr(module, name) in functions, f"{module.__name__}.{name}"


@pytest.mark.parametrize("case, name", TENSORS)
def test_a_gradient_is_there_or_refused(case: str, name: str) -> None:
    tensor = calls()[case][1][name]
    leaf = tensor.clone().requires_grad_()
    try:
        loss = run(case, name, leaf).square().sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
    except (NotImplementedError, RuntimeError) as error:
        assert any(text in str(error) for text in NO_GRADIENT.split("|")), error
        gradient = None
    assert gradient is None or gradient.abs().sum() > 0
    for transform in (torch.func.grad, lambda f: lambda x: torch.func.vjp(f, x)[1](torch.ones(()))[0]):
        try:
            by_func = transform(lambda x: run(case, name, x * 1).square().sum())(tensor)
        except (NotImplementedError, RuntimeError, ValueError):
            continue  # each says why, the ops' tests look
        assert gradient is not None
        torch.testing.assert_close(by_func, gradient)
    with torch.no_grad():
        run(case, name, leaf)


@pytest.mark.parametrize("case, name", TENSORS)
def test_a_tangent_is_never_dropped(case: str, name: str) -> None:
    tensor = calls()[case][1][name]
    for grad in (True, False):
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            dual = forward_ad.make_dual(tensor.clone(), torch.ones_like(tensor))
            if case in OF_TORCH:
                assert forward_ad.unpack_dual(run(case, name, dual)).tangent is not None
                continue
            with pytest.raises((NotImplementedError, RuntimeError), match="carries a forward-mode derivative"):
                run(case, name, dual)


@pytest.mark.parametrize("case, name", WRITTEN)
def test_changes_are_counted(case: str, name: str) -> None:
    tensor = calls()[case][1][name].clone()
    factor = torch.ones_like(tensor).requires_grad_()
    loss = (factor * tensor).sum()
    before = tensor.clone()
    run(case, name, tensor)
    assert not torch.equal(tensor, before) and tensor._version > 0
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("case, name", [key for key, passes in WRITTEN.items() if not passes])
def test_what_requires_a_gradient_is_not_written(case: str, name: str) -> None:
    leaf = calls()[case][1][name].clone().requires_grad_()
    before = leaf.detach().clone()
    with pytest.raises((NotImplementedError, RuntimeError), match="requires a gradient"):
        run(case, name, leaf)
    assert torch.equal(leaf.detach(), before) and leaf._version == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_queries_side_by_side_turn_to_their_places(heads: int, causal: bool) -> None:
    """Without a mask that moves with the query, all of a sequence's stand where its first one does. Their number is no
    dim's extent: one head is not one token.
    """
    keywords = calls()["3 cache, varlen"][1] | {"causal": causal}
    keywords |= {"q": keywords["q"][:, :heads].contiguous(), "s_aux": None}
    keywords |= {name: keywords[name][..., :1, :].contiguous() for name in ("k", "v", "k_cache", "v_cache")}
    cos, sin = keywords.pop("rotary_cos"), keywords.pop("rotary_sin")
    at = torch.tensor([3, 4, 5, 6, 7, 8])
    places = {"q": at if causal else torch.tensor([3, 3, 5, 5, 5, 5]), "k": at}
    turned = {
        name: rotary.apply_rotary_emb_torch(keywords[name][None], cos[place][None], sin[place][None], True)[0]
        for name, place in places.items()
    }
    expected = fa3.flash_attn_with_kvcache(**{**keywords, **turned, "k_cache": keywords["k_cache"].clone()})
    got = fa3.flash_attn_with_kvcache(**keywords, rotary_cos=cos, rotary_sin=sin)
    torch.testing.assert_close(got, expected)
