"""What vLLM's compiler puts in place of norms, RoPE and the cache's update, without vLLM (test_vllm.py has its own)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashkernel as fk
from flashkernel.integrations.vllm.fused import FusedUpdates
from flashkernel.integrations.vllm.pages import halves, with_token_scales

HEADS, HEADS_KV, DIM, ROTARY, BLOCKS, BLOCK = 4, 2, 32, 16, 6, 16
DEVICE = "cuda" if torch.cuda.is_available() and fk.num_cuda_devices() else "cpu"


class Layer(FusedUpdates):
    num_heads, num_kv_heads, head_size, _encoder = HEADS, HEADS_KV, DIM, False

    def _pages(self, layer: Any, cache: Any) -> Any:
        if cache.element_size() > 1:
            return (*halves(cache, DIM), {})
        k, v, scales = with_token_scales(cache, DIM)
        return k, v, {"kv_scales": scales}


def turned(x: Any, positions: Any, table: Any, is_neox: bool) -> Any:
    """x [tokens, heads, dim] by the formula, in float64."""
    cos, sin = (part[positions][:, None] for part in table.double().chunk(2, -1))
    turning, rest = x.double()[..., :ROTARY], x.double()[..., ROTARY:]
    pairs = turning.unflatten(-1, (2, -1) if is_neox else (-1, 2))
    first, second = pairs.unbind(-2 if is_neox else -1)
    both = first * cos - second * sin, second * cos + first * sin
    return torch.cat([torch.stack(both, -2 if is_neox else -1).flatten(-2), rest], -1)


def normed(x: Any, weight: Any) -> Any:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()


def near(found: Any, meant: Any, dtype: Any, more: float = 0.0) -> bool:
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype] * max(1.0, float(meant.abs().max())) + more
    return bool((found.double() - meant).abs().max() <= bound)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    ("dtype", "pages"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.int8)]
)
@pytest.mark.parametrize("norms", [True, False])
def test_fused_updates(dtype: Any, pages: Any, is_neox: bool, norms: bool) -> None:
    """9 tokens with a slot, one of padding with slot -1, and two of padding without; blocks in vLLM's layout."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    qkv = random(12, (HEADS + 2 * HEADS_KV) * DIM).to(DEVICE, dtype)
    weights = [(1 + 0.3 * random(DIM)).to(DEVICE, dtype) for _ in range(2)]
    table = random(40, ROTARY).to(DEVICE, dtype)
    positions = torch.randint(0, 40, (12,), generator=generator).to(DEVICE)
    slots = torch.tensor([*torch.randperm(BLOCKS * BLOCK, generator=generator)[:9].tolist(), -1], device=DEVICE)
    content = 2 * DIM if pages is None else 2 * (DIM + 4)
    cache = torch.zeros(BLOCKS, HEADS_KV, BLOCK, content, dtype=pages or dtype, device=DEVICE)
    q, k, v = qkv.view(12, -1, DIM).split([HEADS, HEADS_KV, HEADS_KV], 1)
    given, layer = qkv.clone(), Layer()
    if norms:
        heads = [normed(x, weight) for x, weight in zip((q, k), weights, strict=True)]
        meant_q, meant_k = (turned(x, positions, table, is_neox) for x in heads)
        q_out, k_out = (torch.full((12, n * DIM), torch.nan, dtype=dtype, device=DEVICE) for n in (HEADS, HEADS_KV))
        before = {kernel.id: kernel.calls for kernel in fk.kernels()}
        layer.do_qk_norm_rope_kvcache_update(
            SimpleNamespace(), qkv, q_out, k_out, positions, *weights, 1e-6, table, is_neox, cache, slots
        )
        assert torch.equal(qkv, given)
        if pages is None:  # one kernel of ours
            ran = {kernel.id for kernel in fk.kernels() if kernel.calls > before[kernel.id]}
            assert len(ran) == 1 and ran.pop().startswith("kv_append/")
        found_q = q_out.view_as(q)
    else:
        meant_q, meant_k = (turned(x, positions, table, is_neox) for x in (q, k))
        parts = [x.flatten(1) for x in (q.contiguous(), k, v)]
        layer.do_rope_and_kv_cache_update(SimpleNamespace(), *parts, positions, table, is_neox, cache, slots)
        found_q = parts[0].view_as(q)
    assert near(found_q[:10], meant_q[:10], dtype)
    k_pages, v_pages, elements = layer._pages(None, cache)
    at = slots[:9] // BLOCK, slots[:9] % BLOCK
    for stored, meant, which in ((k_pages, meant_k, 0), (v_pages, v.double(), 1)):
        rows, more = stored[at].double(), 0.0
        if elements:
            scale = elements["kv_scales"][which].permute(0, 2, 1)[at].double()[..., None]
            rows, more = rows * scale, float(scale.max()) / 2
        assert near(rows, meant[:9], dtype, more)
        written = torch.zeros(BLOCKS * BLOCK, dtype=torch.bool, device=DEVICE)
        written[slots[:9]] = True
        assert (stored.reshape(BLOCKS * BLOCK, -1)[~written] == 0).all()


def test_encoders_have_no_cache() -> None:
    layer = Layer()
    assert layer.fused_rope_kvcache_supported() and layer.fused_qk_norm_rope_kvcache_supported()
    layer._encoder = True
    assert not layer.fused_rope_kvcache_supported() and not layer.fused_qk_norm_rope_kvcache_supported()
