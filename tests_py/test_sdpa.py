"""flashkernel.torch.scaled_dot_product_attention and "flashkernel" in torch's registry, against torch's own numbers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
functional = torch.nn.functional

import flashkernel as fk
import flashkernel.torch as fkt
from flashkernel.torch import flash_impl

sdpa = functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(got: Any, expected: Any, factor: float = 1.0) -> None:
    limit = factor * {torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}[got.dtype]
    torch.testing.assert_close(got, expected, rtol=limit, atol=limit)


def fresh(*tensors: Any) -> list[Any]:
    return [x.detach().clone().requires_grad_(x.is_floating_point()) for x in tensors]


def same(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> None:
    """Results and gradients of both, the mask's included."""
    ours, theirs = (fresh(q, k, v) + ([] if mask is None else fresh(mask)) for _ in range(2))
    out, expected = fkt.scaled_dot_product_attention(*ours, **options), sdpa(*theirs, **options)
    assert out.shape == expected.shape
    close(out, expected)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad)
    for got, right in zip(ours, theirs, strict=True):
        if right.requires_grad:
            close(got.grad, right.grad, 2.0)


def masks(seq_q: int, seq_k: int) -> dict[str, Callable[[], Any]]:
    ragged = torch.arange(seq_k) < torch.tensor([seq_k, seq_k - 2])[:, None]
    return {
        "bool": lambda: torch.rand(2, 4, seq_q, seq_k) > 0.3,
        "bool-padding": lambda: ragged[:, None, None],
        "bool-padding-expanded": lambda: ragged[:, None, None].expand(2, 4, seq_q, seq_k),
        "bool-rows-without-a-key": lambda: (torch.arange(seq_q) > 1)[:, None].expand(seq_q, seq_k),
        "float": lambda: torch.randn(2, 4, seq_q, seq_k),
        "float-2d": lambda: torch.randn(seq_q, seq_k),
        "float-broadcast": lambda: torch.randn(1, 4, 1, seq_k),
        "float-one-column": lambda: torch.randn(2, 1, seq_q, 1),
        "float-transposed": lambda: torch.randn(seq_k, seq_q).mT,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", masks(3, 5))
def test_masks(name: str, dtype: Any) -> None:
    q, k, v = (torch.randn(2, 4, n, 8, dtype=dtype) for n in (6, 9, 9))
    mask = masks(6, 9)[name]()
    if mask.dtype != torch.bool:
        mask = mask.to(dtype)
    same(q, k, v, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seq_k", [1, 4, 6, 9])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_and_the_top_left(is_causal: bool, seq_k: int, dtype: Any) -> None:
    q, k, v = (torch.randn(2, 4, n, 8, dtype=dtype) for n in (6, seq_k, seq_k))
    same(q, k, v, is_causal=is_causal)
    same(q, k, v, is_causal=is_causal, scale=0.4)


def test_grouped_heads_strided_views_and_other_head_dims() -> None:
    q = torch.randn(2, 5, 8, 16).transpose(1, 2)
    k, v = torch.randn(2, 5, 2, 16).transpose(1, 2), torch.randn(2, 5, 2, 24).transpose(1, 2)
    same(q, k, v, is_causal=True, enable_gqa=True)
    same(q, k, v, torch.rand(5, 5) > 0.2, enable_gqa=True)
    same(q, torch.randn(2, 1, 5, 16), torch.randn(2, 1, 5, 16))  # one head, broadcast
    same(q, torch.randn(1, 8, 5, 16), torch.randn(1, 8, 5, 16))  # one batch, broadcast
    same(torch.randn(2, 3, 16, 5).mT, torch.randn(2, 3, 5, 16), torch.randn(2, 3, 5, 16))  # a strided last dim
    with pytest.raises(ValueError, match="8 heads of queries, 2 of keys and 2 of values; as many are needed"):
        fkt.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
def test_other_numbers_of_dims(lead: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(*lead, n, 8) for n in (4, 6, 6))
    same(q, k, v)
    same(q, k, v, is_causal=True)
    same(q, k, v, torch.rand(*lead, 4, 6) > 0.3)


def test_refusals() -> None:
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match=r"dropout_p=0\.5; 0 is needed"):
        fkt.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    with pytest.raises(ValueError, match="attn_mask beside is_causal=True"):
        fkt.scaled_dot_product_attention(q, q, q, torch.ones(3, 3), is_causal=True)
    with pytest.raises(ValueError, match="float64"):
        fkt.scaled_dot_product_attention(*[q.double()] * 3)


def jagged(lengths: list[int], heads: int) -> Any:
    parts = [torch.randn(n, heads, 8) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_nested(is_causal: bool) -> None:
    q = jagged([3, 1, 6], 4)
    k = torch.nested.nested_tensor_from_jagged(torch.randn(10, 4, 8, requires_grad=True), q.offsets())
    out = fkt.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, k)), is_causal=is_causal)
    out.transpose(1, 2).values().square().sum().backward()
    assert q.grad is not None
    for i, one in enumerate(out.unbind()):
        rows, keys = (x.unbind()[i].detach().transpose(0, 1) for x in (q, k))
        close(one, sdpa(rows, keys, keys, is_causal=is_causal))
    with pytest.raises(ValueError, match="attn_mask beside nested tensors"):
        fkt.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3, torch.ones(1))
    other = jagged([2, 2, 2], 4).transpose(1, 2)
    with pytest.raises(ValueError, match="is_causal=True, but query and key differ"):
        fkt.scaled_dot_product_attention(q.transpose(1, 2), other, other, is_causal=True)


def test_compiles_without_a_break() -> None:
    torch._dynamo.reset()
    call = torch.compile(fkt.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    q, k = torch.randn(2, 4, 5, 8, requires_grad=True), torch.randn(2, 2, 7, 8)
    close(call(q, k, k, is_causal=True, enable_gqa=True), sdpa(q, k, k, is_causal=True, enable_gqa=True))
    mask = torch.rand(5, 7) > 0.3
    out = call(q, k, k, mask, enable_gqa=True)
    close(out, sdpa(q, k, k, mask, enable_gqa=True))
    out.sum().backward()
    assert q.grad is not None


def test_autocast() -> None:
    q = torch.randn(1, 2, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert fkt.scaled_dot_product_attention(q, q, q).dtype == sdpa(q, q, q).dtype == torch.bfloat16


# --- torch's registry


def calls() -> int:
    return sum(kernel.calls for kernel in fk.kernels() if kernel.op.startswith("attention"))


registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="torch before 2.11 has no registry"
)


@pytest.fixture
def active() -> Iterator[None]:
    torch.nn.attention.activate_flash_attention_impl("flashkernel")
    yield
    torch.nn.attention.restore_flash_attention_impl()


@registry
def test_it_is_registered_and_comes_and_goes() -> None:
    assert "flashkernel" in torch.nn.attention.list_flash_attention_impls()
    q = torch.randn(1, 2, 3, 8)
    for _ in range(2):
        before = calls()
        torch.nn.attention.activate_flash_attention_impl("flashkernel")
        assert torch.nn.attention.current_flash_attention_impl() == "flashkernel"
        sdpa(q, q, q)
        assert calls() == before + 1
        torch.nn.attention.restore_flash_attention_impl()
        sdpa(q, q, q)
        assert calls() == before + 1


def with_gradients(f: Callable[..., Any], *tensors: Any) -> list[Any]:
    tensors = tuple(fresh(*tensors))
    out = f(*tensors)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in tensors)]


@registry
@pytest.mark.parametrize("seq_k", [4, 6, 9])
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "bool"])
def test_torchs_function_runs_here(kind: str, seq_k: int, request: pytest.FixtureRequest) -> None:
    options: dict[str, Any] = {"is_causal": kind == "causal"}
    if kind in ("mask", "bool"):
        mask = torch.randn(6, seq_k)
        options = {"attn_mask": mask if kind == "mask" else mask > -0.5}
    tensors = [torch.randn(2, 6, 4, 16).transpose(1, 2), *(torch.randn(2, 4, seq_k, 16) for _ in range(2))]
    expected = with_gradients(lambda *x: sdpa(*x, **options), *tensors)
    request.getfixturevalue("active")
    before = calls()
    got = with_gradients(lambda *x: sdpa(*x, **options), *tensors)
    assert calls() == before + 2  # forward and backward
    for one, right in zip(got, expected, strict=True):
        close(one, right, 2.0)


@registry
def test_what_is_not_served_says_so(active: None) -> None:
    q = torch.randn(1, 2, 3, 8, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"torch.float64; .*restore_flash_attention_impl\(\)"):
        sdpa(q, q, q)


@registry
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0)], ids=str)
def test_varlen_attn(window: tuple[int, int], active: None) -> None:
    from torch.nn.attention.varlen import varlen_attn

    starts = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    q, k = torch.randn(8, 4, 16, requires_grad=True), torch.randn(8, 4, 16, requires_grad=True)
    out = varlen_attn(q, k, k, starts, starts, 5, 5, window_size=window)
    expected = fkt.attention_varlen(
        q.detach(), k.detach(), k.detach(), starts, starts, 5, 5, causal=window[1] == 0, window=window
    )
    close(out, expected)
    before = calls()
    out.sum().backward()
    assert calls() > before
    assert k.grad.abs().sum() > 0
    if "seqused_k" not in inspect.signature(varlen_attn).parameters:
        return  # torch before 2.12: it has no pages
    pages, table = torch.randn(4, 8, 4, 16), torch.tensor([[2, 0], [1, 3], [0, 2]], dtype=torch.int32)
    used = torch.tensor([9, 2, 16], dtype=torch.int32)
    with torch.no_grad():
        paged = varlen_attn(
            q, pages, pages, starts, None, 5, 16, window_size=window, seqused_k=used, block_table=table
        )  # fmt: skip
        right = fkt.attention_paged(
            q, pages, pages, table, used, cu_seqlens_q=starts, max_seqlen_q=5, causal=window[1] == 0, window=window
        )
        close(paged, right)
        some = torch.tensor([2, 0, 4], dtype=torch.int32)
        used_keys = varlen_attn(q, k, k, starts, starts, 5, 5, window_size=window, seqused_k=some)
        rows = [fkt.attention(q[None, a:b].transpose(1, 2), *[k[None, a : a + n].transpose(1, 2)] * 2,
                              causal=window[1] == 0, window=window)[0].transpose(0, 1)
                for a, b, n in ((0, 3, 2), (3, 8, 4))]  # fmt: skip
        close(used_keys, torch.cat(rows))


@pytest.mark.parametrize("seq_k", [4, 6, 9])
@pytest.mark.parametrize("kind", ["plain", "causal", "bias", "bias-expanded"])
def test_the_functions_for_a_gpu(kind: str, seq_k: int) -> None:
    """The ops that torch calls on CUDA alone, called by hand: results, gradients and the shapes that torch expects."""
    q, k, v = torch.randn(2, 4, 6, 16), torch.randn(2, 4, seq_k, 16), torch.randn(2, 4, seq_k, 16)
    bias = torch.randn(2, 4, 6, seq_k) if kind == "bias" else torch.randn(1, 1, 6, seq_k).expand(2, 4, 6, seq_k)
    causal = kind == "causal"
    theirs = fresh(q, k, v, bias)
    expected = sdpa(*theirs[:3], theirs[3] if "bias" in kind else None, is_causal=causal)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    given = bias if "bias" in kind else None
    out, lse, seed, offset = flash_impl.OPS["CUDA"]["_scaled_dot_product_efficient_attention"](
        q, k, v, given, True, is_causal=causal
    )
    assert lse.shape == (2, 4, 32)
    assert out.transpose(1, 2).is_contiguous()
    close(out, expected)
    grads = flash_impl.OPS["CUDA"]["_scaled_dot_product_efficient_attention_backward"](
        grad, q, k, v, given, out, lse, seed, offset, 0.0, [True, True, True, given is not None], causal
    )
    for got, right in zip(grads, theirs, strict=True):
        if right.grad is not None:
            close(got, right.grad, 2.0)
    assert (grads[3] is None) == (given is None)
    if given is not None:
        return
    result = flash_impl.OPS["CUDA"]["_scaled_dot_product_flash_attention"](q, k, v, 0.0, causal)
    assert len(result) == 9
    close(result[0], expected)
    grads = flash_impl.OPS["CUDA"]["_scaled_dot_product_flash_attention_backward"](
        grad, q, k, v, result[0], result[1], None, None, *result[4:6], 0.0, causal, *result[6:8]
    )
    for got, right in zip(grads, theirs, strict=False):
        close(got, right.grad, 2.0)
    seq_first = [x.transpose(1, 2) for x in (q, k, v)]
    if seq_k == 6:
        forward = flash_impl.OPS["CUDA"]["_flash_attention_forward"]
        out, lse, *state = forward(*seq_first, None, None, 6, 6, 0.0, causal, False)
        close(out.transpose(1, 2), expected)
        backward = flash_impl.OPS["CUDA"]["_flash_attention_backward"]
        grads = backward(grad.transpose(1, 2), *seq_first, out, lse, None, None, 6, 6, 0.0, causal, *state[:2])
        for got, right in zip(grads, theirs, strict=False):
            close(got.transpose(1, 2), right.grad, 2.0)


class UNetAttention(torch.nn.Module):
    """The attention of a diffusion model's block: over pixels, or from pixels to a text of another width."""

    def __init__(self, channels: int, text: int | None) -> None:
        super().__init__()
        self.norm = torch.nn.GroupNorm(4, channels)
        self.q = torch.nn.Linear(channels, channels, bias=False)
        self.k, self.v = (torch.nn.Linear(text or channels, channels, bias=False) for _ in range(2))
        self.out = torch.nn.Linear(channels, channels)

    def forward(self, x: Any, text: Any = None, mask: Any = None) -> Any:
        channels, height, width = x.shape[1:]
        tokens = self.norm(x).flatten(2).mT
        source = tokens if text is None else text
        q, k, v = (
            f(y).unflatten(-1, (4, channels // 4)).transpose(1, 2)
            for f, y in ((self.q, tokens), (self.k, source), (self.v, source))
        )
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2)).mT.unflatten(-1, (height, width))


@registry
def test_a_unets_block(request: pytest.FixtureRequest) -> None:
    x, text = torch.randn(2, 32, 4, 6), torch.randn(2, 7, 12)
    mask = (torch.arange(7) < torch.tensor([7, 4])[:, None])[:, None, None]
    own, cross = UNetAttention(32, None), UNetAttention(32, 12)
    expected = with_gradients(lambda x, text: cross(own(x), text, mask), x, text)
    request.getfixturevalue("active")
    before = calls()
    for got, right in zip(with_gradients(lambda x, text: cross(own(x), text, mask), x, text), expected, strict=True):
        close(got, right, 4.0)
    assert calls() == before + 4


@registry
def test_a_stock_model_on_sdpa(request: pytest.FixtureRequest) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 96, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0

    def run() -> tuple[Any, Any]:
        model.zero_grad()
        result = model(ids, attention_mask=mask, labels=ids)
        result.loss.backward()
        with torch.no_grad():
            text = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
        return [result.logits.detach(), *(p.grad.clone() for p in model.parameters())], text

    expected, text = run()
    request.getfixturevalue("active")
    before = calls()
    got, same_text = run()
    assert calls() > before + 4
    assert torch.equal(same_text, text)
    for one, right in zip(got, expected, strict=True):
        close(one, right, 4.0)


def test_the_scale_is_the_default() -> None:
    q = torch.randn(1, 2, 3, 16)
    close(fkt.scaled_dot_product_attention(q, q, q), sdpa(q, q, q, scale=1 / math.sqrt(16)))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (3, 1), (2, 1, 1, 1), (1, 1, 3, 5)])
def test_gradient_of_an_expanded_mask_has_all_entries(shape: tuple[int, ...], kind: Any) -> None:
    """Of the expanded tensor itself, not of what it was expanded from, where only the sum matters."""
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    expanded = torch.randn(shape, dtype=kind).expand(2, 4, 3, 5)
    grads = []
    for call, dtype in ((fkt.scaled_dot_product_attention, torch.float32), (sdpa, torch.float64)):
        mask = (expanded if call is not sdpa else expanded.to(dtype)).detach().requires_grad_()
        out = call(*(x.to(dtype) for x in (q, k, v)), attn_mask=mask)
        grads.append(torch.autograd.grad((out * v[:, :, :3].to(dtype)).sum(), mask)[0].double())
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
