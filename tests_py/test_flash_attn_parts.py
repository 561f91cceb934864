"""flash-attn's functions below autograd, which ring-flash-attention, TransformerEngine, Megatron-LM and DeepSpeed
import: their arguments, layouts, gradients written in place, and gradients of a part of the keys under the whole LSE.
"""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flashkernel.flash_attn import ArgumentError
from flashkernel.flash_attn import flash_attn_3_interface as fa3
from flashkernel.flash_attn import flash_attn_interface as fa

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1), "softcap": 4.0},
    "alibi": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.1])},
}
STARTS_Q, STARTS_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5, 12], [0, 7, 10, 19]))
SHORTEST = {"float32": 2e-6, "bfloat16": 2e-2}


def tensors(dtype: str, *lead: tuple[int, ...]) -> list[Any]:
    """q, k, v and a gradient of out, of 4 and 2 heads of 16."""
    random = torch.Generator().manual_seed(7)
    q, k = lead
    return [
        torch.randn(*shape, 16, generator=random).to(getattr(torch, dtype))
        for shape in ((*q, 4), (*k, 2), (*k, 2), (*q, 4))
    ]


def private(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments that have no default, by name, as TransformerEngine gives them."""
    left, right = options.get("window_size", (-1, -1))
    return {
        "dropout_p": 0.0, "softmax_scale": 0.3, "causal": options.get("causal", False), "window_size_left": left,
        "window_size_right": right, "softcap": options.get("softcap", 0.0),
        "alibi_slopes": options.get("alibi_slopes"),
    }  # fmt: skip


def recorded(function: Any, q: Any, k: Any, v: Any, g: Any, *bounds: Any, **options: Any) -> tuple[Any, ...]:
    """(out, lse, gradients) of a public function."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse, *_ = function(*leaves, *bounds, softmax_scale=0.3, return_attn_probs=True, **options)
    return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, g)


def holes(x: Any) -> Any:
    """Tokens of a longer tensor of NaN: a view that is not contiguous, as a ring's buffers are."""
    return torch.full((*x.shape[:-3], 2 * x.shape[-3], *x.shape[-2:]), torch.nan, dtype=x.dtype)[..., ::2, :, :]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("varlen", [False, True])
def test_they_are_the_public_calls(name: str, dtype: str, varlen: bool) -> None:
    options = OPTIONS[name]
    bounds = (STARTS_Q, STARTS_K, 7, 9) if varlen else ()
    q, k, v, g = tensors(dtype, *(((12,), (19,)) if varlen else ((2, 5), (2, 7))))
    function = fa.flash_attn_varlen_func if varlen else fa.flash_attn_func
    out, lse, grads = recorded(function, q, k, v, g, *bounds, **options)

    forward = fa._flash_attn_varlen_forward if varlen else fa._flash_attn_forward
    found = forward(q, k, v, *bounds, **private(options), return_softmax=False)
    assert len(found) == 4 and torch.equal(found[0], out) and torch.equal(found[1], lse)
    assert found[1].dtype == torch.float32 and found[1].shape == ((4, 12) if varlen else (2, 4, 5))
    assert found[2].numel() == 0 and found[3].shape == (2,) and found[3].dtype == torch.int64

    backward = fa._flash_attn_varlen_backward if varlen else fa._flash_attn_backward
    written = [holes(x) for x in (q, k, v)]
    backward(g, q, k, v, out, lse, *written, *bounds, **private(options), deterministic=False, rng_state=found[3])
    for got, wanted in zip(written, grads, strict=True):
        assert torch.equal(got, wanted)
    written = [None, holes(k), None]  # nobody asks for the others
    backward(g, q, k, v, out, lse, *written, *bounds, **private(options), deterministic=True)
    assert torch.equal(written[1], grads[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_part_of_the_keys_under_the_whole_lse(dtype: str) -> None:
    """What a ring does: forward over each part of the keys, joined by their LSE; backward of each part by the whole
    out and LSE; the gradients of q add up, and those of keys are the whole's.
    """
    q, k, v, g = tensors(dtype, (2, 6), (2, 10))
    out, lse, grads = recorded(fa.flash_attn_func, q, k, v, g)
    others = private({})
    parts = [slice(0, 3), slice(3, 10)]
    states = [fa._flash_attn_forward(q, k[:, p], v[:, p], **others, return_softmax=False)[:2] for p in parts]
    shares = torch.softmax(torch.stack([part for _, part in states]), 0).transpose(2, 3)[..., None]
    joined = sum(share * part.float() for share, (part, _) in zip(shares, states, strict=True))
    torch.testing.assert_close(joined, out.float(), rtol=0, atol=SHORTEST[dtype])
    torch.testing.assert_close(torch.logsumexp(torch.stack([part for _, part in states]), 0), lse)
    dq = torch.zeros_like(q, dtype=torch.float32)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for part in parts:
        of_q = torch.empty_like(q)
        fa._flash_attn_backward(
            g, q, k[:, part], v[:, part], out, lse, of_q, dk[:, part], dv[:, part], **others, deterministic=False
        )
        dq += of_q
    for got, wanted in zip((dq, dk, dv), grads, strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0, atol=2 * SHORTEST[dtype])


def test_keys_of_pages_and_keys_in_use() -> None:
    q, k, v, _ = tensors("float32", (12,), (19,))
    used = torch.tensor([4, 0, 9], dtype=torch.int32)
    bounds, others = (STARTS_Q, STARTS_K, 7, 9), private({"causal": True})
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, *bounds, seqused_k=used, softmax_scale=0.3, causal=True, return_attn_probs=True
    )
    found = fa._flash_attn_varlen_forward(q, k, v, *bounds, **others, seqused_k=used)
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)
    pages = torch.zeros(2, 6, 4, 2, 16)  # k and v of six pages of four tokens
    table = torch.tensor([[5, 1, 0], [3, 3, 3], [2, 0, 4]], dtype=torch.int32)
    for b, (begin, end) in enumerate(itertools.pairwise(STARTS_K.tolist())):
        for i in range(end - begin):
            at = table[b, i // 4], i % 4
            if i < used[b]:
                pages[0][at], pages[1][at] = k[begin + i], v[begin + i]
    found = fa._flash_attn_varlen_forward(q, *pages, *bounds, **others, block_table=table, seqused_k=used)
    torch.testing.assert_close(found[0], out)
    torch.testing.assert_close(found[1], lse)


def test_a_recorded_call_has_gradients() -> None:
    """The package's own give none, and say so in backward alone."""
    q, k, v, g = tensors("float32", (2, 5), (2, 7))
    _, _, grads = recorded(fa.flash_attn_func, q, k, v, g)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, *_ = fa._flash_attn_forward(*leaves, **private({}), return_softmax=False)
    for got, wanted in zip(torch.autograd.grad(out, leaves, g), grads, strict=True):
        assert torch.equal(got, wanted)


# --- flash-attn 3


def third(options: dict[str, Any]) -> dict[str, Any]:
    left, right = options.get("window_size", (-1, -1))
    return {"softmax_scale": 0.3, "window_size_left": left, "window_size_right": right} | {
        "softcap": options.get("softcap", 0.0)
    }


@pytest.mark.parametrize("name", ["plain", "causal", "window"])
@pytest.mark.parametrize("form", ["dense", "varlen", "in use"])
def test_flash_attn_3(name: str, form: str) -> None:
    """Arguments in places, as TransformerEngine gives them: 4 and 9 of None before and behind the lengths."""
    options = OPTIONS[name]
    dense = form == "dense"
    q, k, v, g = tensors("float32", *(((2, 5), (2, 7)) if dense else ((12,), (19,))))
    used = [torch.tensor(x, dtype=torch.int32) if form == "in use" else None for x in ([5, 0, 6], [6, 0, 9])]
    bounds = () if dense else (STARTS_Q, STARTS_K, 7, 9, *used)
    function = fa3.flash_attn_func if dense else fa3.flash_attn_varlen_func
    out, lse, grads = recorded(function, q, k, v, g, *bounds, **options)
    starts_q, starts_k, most_q, most_k = (None, None, 5, 7) if dense else (STARTS_Q, STARTS_K, 7, 9)
    causal = options.get("causal", False)
    places = *[None] * 4, starts_q, starts_k, None, *used, most_q, most_k, *[None] * 9
    found = fa3._flash_attn_forward(q, k, v, *places, causal=causal, **third(options))
    assert len(found) == 4 and torch.equal(found[0], out) and torch.equal(found[1], lse)
    assert found[2].numel() == found[3].numel() == 0
    written = [holes(x) for x in (q, k, v)]
    places = starts_q, starts_k, *used, most_q, most_k, *written
    fa3._flash_attn_backward(g, q, k, v, out, lse, *places, is_causal=causal, **third(options), deterministic=True)
    for got, wanted in zip(written, grads, strict=True):
        assert torch.equal(got, wanted)
    mine = torch.empty_like(out)
    assert fa3._flash_attn_forward(q, k, v, None, None, None, mine, *places[:2], None, *used, most_q, most_k,
                                   causal=causal, **third(options))[0] is mine  # fmt: skip
    assert torch.equal(mine, out)


def test_flash_attn_3_over_a_cache() -> None:
    """Megatron-LM's call: queries side by side over pages, by name; and one that appends."""
    q, k, v, _ = tensors("float32", (3, 1), (3, 8))
    lengths, table = torch.tensor([8, 3, 0], dtype=torch.int32), torch.tensor([[0], [1], [2]], dtype=torch.int32)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, k, v, page_table=table, cache_seqlens=lengths, causal=True, return_softmax_lse=True
    )
    found = fa3._flash_attn_forward(
        q[:, 0], k, v, cu_seqlens_q=torch.arange(4, dtype=torch.int32), seqused_k=lengths, max_seqlen_q=1,
        max_seqlen_k=8, page_table=table, causal=True, num_splits=0,
    )  # fmt: skip
    torch.testing.assert_close(found[0], out[:, 0])
    assert found[1].shape == (4, 3)
    torch.testing.assert_close(found[1], lse[:, :, 0].T)
    caches = [[x.clone() for x in (k, v)] for _ in range(2)]
    new = [torch.randn(3, 1, 2, 16) for _ in range(2)]
    given: dict[str, Any] = {"causal": True}
    lengths = torch.tensor([7, 3, 0], dtype=torch.int32)
    out = fa3.flash_attn_with_kvcache(q, *caches[0], *new, cache_seqlens=lengths, **given)
    found = fa3._flash_attn_forward(q, *caches[1], *new, seqused_k=lengths, **given)
    assert torch.equal(found[0], out)
    assert all(torch.equal(*both) for both in zip(*caches, strict=True)) and not torch.equal(caches[1][0], k)


# --- refusals, arguments, install


def test_refusals() -> None:
    q, k, v, g = tensors("float32", (2, 5), (2, 7))
    others = private({})
    with pytest.raises(NotImplementedError, match=r"_flash_attn_forward: dropout_p=0.1"):
        fa._flash_attn_forward(q, k, v, **{**others, "dropout_p": 0.1}, return_softmax=False)
    with pytest.raises(ArgumentError, match=r"_flash_attn_forward: return_softmax=True; False is needed"):
        fa._flash_attn_forward(q, k, v, **others, return_softmax=True)
    out, lse, *_ = fa._flash_attn_forward(q, k, v, **others, return_softmax=False)
    for wrong in (q[:, :3], torch.empty_like(q, dtype=torch.float16)):
        given = [wrong, torch.empty_like(k), torch.empty_like(v)]
        with pytest.raises(ArgumentError, match=r"_flash_attn_backward: .*dq \[2, [35], 4, 16\]"):
            fa._flash_attn_backward(g, q, k, v, out, lse, *given, **others, deterministic=False)
    with pytest.raises(NotImplementedError, match="_flash_attn_backward: dropout_p"):
        fa._flash_attn_backward(
            g, q, k, v, out, lse, None, None, None, **{**others, "dropout_p": 0.1}, deterministic=False
        )
    bounds = STARTS_Q, STARTS_K, 7, 9
    flat = [x.flatten(0, 1) for x in tensors("float32", (2, 6), (1, 19))]
    with pytest.raises(NotImplementedError, match="leftpad_k is given"):
        fa._flash_attn_varlen_forward(*flat[:3], *bounds, 0.0, 0.3, False, leftpad_k=torch.zeros(3))
    for words, given in (
        ("cu_seqlens_q and cu_seqlens_k", {"cu_seqlens_q": STARTS_Q}),
        ("max_seqlen_q", {"cu_seqlens_q": STARTS_Q, "cu_seqlens_k": STARTS_K}),
    ):
        with pytest.raises(ArgumentError, match=f"_flash_attn_forward: .*{words}"):
            fa3._flash_attn_forward(*flat[:3], **given)
    for words, given in (
        ("qv is given", {"qv": q}),
        ("attention_chunk=4", {"attention_chunk": 4}),
        ("seqused_q without", {"seqused_q": STARTS_Q}),
        ("seqused_q over a cache", {"seqused_q": STARTS_Q, "seqused_k": STARTS_K}),
        ("cu_seqlens_k over a cache", {"page_table": STARTS_Q, "cu_seqlens_k": STARTS_K}),
    ):
        with pytest.raises(NotImplementedError, match=words):
            fa3._flash_attn_forward(q, k, v, **given)
    with pytest.raises(ArgumentError, match=r"out_ is \[2, 5, 4, 8\] torch.float32; \[2, 5, 4, 16\] "):
        fa3._flash_attn_forward(q, k, v, out_=q[..., :8])


HEAD = "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes return_softmax"
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
BACK = HEAD.removeprefix("q k v ").replace("return_softmax", "deterministic rng_state=None")
ARGUMENTS = {
    fa._flash_attn_forward: HEAD,
    fa._flash_attn_varlen_forward: f"q k v {LENGTHS} dropout_p softmax_scale causal window_size_left=-1 "
    "window_size_right=-1 softcap=0.0 alibi_slopes=None return_softmax=False block_table=None leftpad_k=None "
    "seqused_k=None zero_tensors=False num_splits=0",
    fa._flash_attn_backward: f"dout q k v out softmax_lse dq dk dv {BACK}",
    fa._flash_attn_varlen_backward: f"dout q k v out softmax_lse dq dk dv {LENGTHS} {BACK} zero_tensors=False",
    fa3._flash_attn_forward: "q k v k_new=None v_new=None qv=None out_=None cu_seqlens_q=None cu_seqlens_k=None "
    "cu_seqlens_k_new=None seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None page_table=None "
    "kv_batch_idx=None leftpad_k=None rotary_cos=None rotary_sin=None seqlens_rotary=None q_descale=None "
    "k_descale=None v_descale=None softmax_scale=None causal=False window_size_left=-1 window_size_right=-1 "
    "attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=1 pack_gqa=None "
    "sm_margin=0",
    fa3._flash_attn_backward: "dout q k v out softmax_lse cu_seqlens_q=None cu_seqlens_k=None sequed_q=None "
    "sequed_k=None max_seqlen_q=None max_seqlen_k=None dq=None dk=None dv=None softmax_scale=None is_causal=False "
    "window_size_left=-1 window_size_right=-1 softcap=0.0 deterministic=False sm_margin=0",
}


def test_tables_of_arguments() -> None:
    """Of commit 0251105 of flash-attn. Callers read them off a plain function, as `inspect.getfullargspec` does."""
    for function, wanted in ARGUMENTS.items():
        assert inspect.isfunction(function)
        spec = inspect.getfullargspec(function)
        defaults = spec.defaults or ()
        plain = len(spec.args) - len(defaults)
        named = [f"{name}={value}" for name, value in zip(spec.args[plain:], defaults, strict=True)]
        assert " ".join([*spec.args[:plain], *named]) == wanted, function.__name__


IMPORTS = """
import sys
import flashkernel.flash_attn as door
door.install()
# ring-flash-attention, DeepSpeed, TransformerEngine
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward
from flash_attn.flash_attn_interface import _wrapped_flash_attn_forward, _wrapped_flash_attn_varlen_backward
from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
# Megatron-LM
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn_3.flash_attn_interface import _flash_attn_forward as third, flash_attn_with_kvcache
# TransformerEngine
from flash_attn_interface import _flash_attn_backward, _flash_attn_forward as again
from flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
import flash_attn_3.flash_attn_interface as whole
assert third is again is whole._flash_attn_forward and third is not _wrapped_flash_attn_forward
door.uninstall()
assert not {"flash_attn", "flash_attn_3", "flash_attn_3.flash_attn_interface"} & set(sys.modules)
"""


def test_what_the_libraries_import() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
