"""4-bit KV-caches through Python: int4 bit for bit against the oracle, the error of attention over it, NVFP4 as it is
read, and the engine with such a cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import flashkernel as fk
import flashkernel.torch as fkt
from conftest import f64
from flashkernel import reference


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def int4_cache(pages: int, page_size: int, heads: int, *dims: int) -> tuple[Any, Any]:
    """Pages of keys and values, and their scales: NaN until they are written."""
    stored = [np.zeros((pages, page_size, heads, dim // 2), np.uint8) for dim in dims]
    scales = tuple(np.full((pages, heads, page_size, -(-dim // 32), 2), np.nan, np.float16) for dim in dims)
    return stored, scales


@pytest.mark.parametrize("dims", [(24, 8), (64, 128), (96, 34)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_append_and_read_against_the_oracle(dims: tuple[int, int], dtype: str) -> None:
    k, v = (normal(seed, 9, 2, dim).astype(dtype) for seed, dim in enumerate(dims))
    k[0, 0, 3], k[1, 1, 2], k[2, 0], k[3, 0], k[5, 1] = np.nan, np.inf, 0, 0.1, 1e-7
    k[4] *= 300
    (k_pages, v_pages), scales = int4_cache(2, 16, 2, *dims)
    options: dict[str, Any] = {"kv_scales": scales, "kv_dtype": "int4"}
    fk.kv_append(k, v, k_pages, v_pages, np.array([*range(16, 24), 24]), **options)
    for tokens, pages, stored in ((k, k_pages, scales[0]), (v, v_pages, scales[1])):
        packed, expected = reference.kv_quantize_int4(tokens)
        np.testing.assert_array_equal(pages[1, :9], packed)
        np.testing.assert_array_equal(stored[1, :, :9].swapaxes(0, 1), expected)
        assert not pages[0].any() and not pages[1, 9:].any() and np.isnan(stored[0]).all()
        # Half a step of the group, and what float16 rounds of scale and zero.
        numbers = reference.kv_numbers(packed, expected, "int4")
        groups = np.repeat(f64(expected)[..., 0], 32, -1)[..., : tokens.shape[-1]]
        finite = np.isfinite(numbers) & (np.abs(f64(tokens)) < 65024)
        error = np.abs(numbers - f64(tokens))[finite]
        assert (error <= 0.51 * groups[finite] + 1e-3 * np.abs(f64(tokens))[finite] + 1e-6).all()
    table, lengths = np.array([[1]], np.int32), np.array([9])
    for out_dtype in (None, "float16"):
        k_out, v_out = fk.kv_read(k_pages, v_pages, table, lengths, max_seq=11, out_dtype=out_dtype, **options)
        for out, tokens in ((k_out, k), (v_out, v)):
            expected = reference.kv_numbers(*reference.kv_quantize_int4(tokens), "int4").astype(np.float32)
            assert out.shape == (1, 11, 2, tokens.shape[-1]) and out.dtype == (out_dtype or "float32")
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(out[0, :9], expected.astype(out.dtype))
            assert not out[0, 9:].any()


def test_append_with_rope_is_a_step_from_the_oracle_at_most() -> None:
    k, v, q = normal(4, 4, 3, 64), normal(5, 4, 3, 64), normal(6, 4, 6, 64)
    (k_pages, v_pages), scales = int4_cache(2, 16, 3, 64, 64)
    positions = np.array([7, 0, 12345, 3])
    rope: Any = {"positions": positions, "theta": 500.0, "q": q}
    fk.kv_append(k, v, k_pages, v_pages, np.array([3, 2, -1, 16]), rope=rope, kv_scales=scales, kv_dtype="int4")
    true_k: Any
    _, true_k = reference.rope(q.transpose(1, 0, 2)[None], k.transpose(1, 0, 2)[None], positions, theta=500.0)
    numbers, _ = fk.kv_read(
        k_pages, v_pages, np.array([[0, 1]], np.int32), np.array([17]), kv_scales=scales, kv_dtype="int4"
    )
    for t, slot in ((0, 3), (1, 2), (3, 16)):
        step = np.repeat(f64(scales[0][slot // 16, :, slot % 16])[..., 0], 32, -1)
        assert (np.abs(numbers[0, slot] - true_k[0, :, t]) <= 0.52 * step + 2e-3).all()


# The largest error of the output, and its root mean square, for unit-variance queries, keys and values;
# docs/low_precision.md states them.
LARGEST, MEAN = 0.12, 0.03


@pytest.mark.parametrize("seq_q", [1, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_error(seq_q: int, dtype: str) -> None:
    length, heads_q, heads_kv, dim = 300, 8, 2, 64
    k, v, q = normal(2, length, heads_kv, dim), normal(3, length, heads_kv, dim), normal(4, 1, heads_q, seq_q, dim)
    pool = fk.KvPagePool(24, heads_kv, dim, page_size=16, dtype="int4")
    cache = fk.KvCache(pool)
    sequence = cache.create()
    slots = cache.append(sequence, length)
    pages: Any
    pages, scales = (pool.k_pages(), pool.v_pages()), pool.scales()
    assert pool.dtype == "int4" and scales is not None
    assert pages[0].shape == (24, 16, 2, 32) and scales[0].shape == (24, 2, 16, 2, 2)
    options: dict[str, Any] = {"kv_scales": scales, "kv_dtype": pool.dtype}
    fk.kv_append(k, v, pages[0], pages[1], slots, **options)
    table, lengths = cache.block_table([sequence])
    given: Any
    tensors: Any
    given, tensors = torch.from_numpy(q).to(getattr(torch, dtype)), [torch.from_numpy(p) for p in pages]
    out = f64(fk.attention_paged(given, tensors[0], tensors[1], table, lengths, **options).float().numpy())
    exact = reference.attention(f64(given.float().numpy()), *(f64(x).transpose(1, 0, 2)[None] for x in (k, v)))[0]
    stored = [reference.kv_numbers(*reference.kv_quantize_int4(x), "int4").transpose(1, 0, 2)[None] for x in (k, v)]
    over_stored = reference.attention(f64(given.float().numpy()), *stored)[0]
    np.testing.assert_allclose(out, over_stored, atol=2e-5 if dtype == "float32" else 2e-2)
    error = np.abs(out - exact)
    assert error.max() < LARGEST and 0.002 < np.sqrt((error**2).mean()) < MEAN
    # Copies on write take elements and scales along.
    fork = cache.fork(sequence)
    fk.kv_append(k[:1], v[:1], pages[0], pages[1], cache.append(fork, 1), **options)
    again = fk.attention_paged(given, tensors[0], tensors[1], table, lengths, **options)
    np.testing.assert_array_equal(f64(again.float().numpy()), out)


def test_nvfp4_is_read() -> None:
    """e2m1 pairs, an e4m3 scale for 16 neighbours, a number for each tensor; attention against the numbers."""
    rng = np.random.default_rng(7)
    pages = [rng.integers(0, 256, (6, 16, 2, dim // 2)).astype(np.uint8) for dim in (64, 48)]
    scales = [rng.uniform(0.1, 0.6, (6, 2, 16, dim // 16)).astype(np.float32) for dim in (64, 48)]
    stored = [torch.from_numpy(s).to(torch.float8_e4m3fn) for s in scales]
    factors = (0.5, 2.0)
    table, lengths = np.array([[4, 1, 3]], np.int32), np.array([37])
    options: dict[str, Any] = {"kv_scales": (*stored, *factors), "kv_dtype": "float4_e2m1fn_x2"}
    numbers = [
        reference.kv_numbers(p, s.float().numpy().swapaxes(1, 2), "float4_e2m1fn_x2", f)[table[0]]
        for p, s, f in zip(pages, stored, factors, strict=True)
    ]
    rows = [n.reshape(48, *n.shape[2:])[:37] for n in numbers]
    tensors: Any = [torch.from_numpy(p) for p in pages]
    for given in (tensors, [t.view(torch.float4_e2m1fn_x2) for t in tensors]):
        read = fk.kv_read(given[0], given[1], table, lengths, max_seq=37, **options)
        for out, expected in zip(read, rows, strict=True):
            np.testing.assert_array_equal(f64(out.numpy())[0], expected)
    q = normal(8, 1, 4, 3, 64)
    out = fk.attention_paged(torch.from_numpy(q), tensors[0], tensors[1], table, lengths, causal=True, **options)
    expected, _ = reference.attention(f64(q), *(r.transpose(1, 0, 2)[None] for r in rows), causal=True)
    np.testing.assert_allclose(f64(out.numpy()), expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"^kv_append: k_pages is float4_e2m1fn_x2, which is read and copied"):
        tokens: Any = (torch.zeros(1, 2, 64), torch.zeros(1, 2, 48))
        fk.kv_append(tokens[0], tokens[1], tensors[0], tensors[1], torch.tensor([0]), **options)


def test_torch_ops_under_compile_and_refusals() -> None:
    k, v = torch.from_numpy(normal(1, 5, 2, 64)), torch.from_numpy(normal(2, 5, 2, 64))
    q = torch.from_numpy(normal(3, 1, 4, 1, 64))
    stored, scales = int4_cache(2, 16, 2, 64, 64)
    pages: Any
    pages, scales = [torch.from_numpy(p) for p in stored], tuple(torch.from_numpy(s) for s in scales)
    table, lengths = torch.tensor([[1]], dtype=torch.int32), torch.tensor([5])

    def step(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        options: dict[str, Any] = {"kv_scales": scales, "kv_dtype": "int4"}
        fkt.kv_append(k, v, pages[0], pages[1], torch.arange(16, 21), **options)
        out = fkt.attention_paged(q, pages[0], pages[1], table, lengths, **options)
        return out, fkt.kv_read(pages[0], pages[1], table, lengths, max_seq=5, **options)[0]

    out, read = step(q)
    traced_out, traced_read = torch.compile(step, backend="aot_eager", fullgraph=True)(q)
    assert traced_read.shape == (1, 5, 2, 64)
    assert torch.equal(out, traced_out) and torch.equal(read, traced_read)
    with pytest.raises(ValueError, match=r"^attention_paged: k_scales is float32.*; needs float16|k_scales"):
        fk.attention_paged(
            q, pages[0], pages[1], table, lengths, kv_scales=(torch.ones(2), torch.ones(2)), kv_dtype="int4"
        )
    with pytest.raises(ValueError, match=r"elements of k_pages.shape\[3\]=64 but q.shape\[3\]=32"):
        fk.attention_paged(q[..., :32], pages[0], pages[1], table, lengths, kv_scales=scales, kv_dtype="int4")
    with pytest.raises(ValueError, match=r"scales of whole tensors are given but k_pages is int4"):
        fk.attention_paged(q, pages[0], pages[1], table, lengths, kv_scales=(*scales, 2.0, 1.0), kv_dtype="int4")
    with pytest.raises(ValueError, match=r"^attention_paged: k_pages has dtype uint8; pass kv_dtype="):
        fk.attention_paged(q, pages[0], pages[1], table, lengths, kv_scales=scales)
    with pytest.raises(ValueError, match=r"^KvPagePool: head_dim=33; needs an even number with int4"):
        fk.KvPagePool(2, 1, 33, page_size=16, dtype="int4")


def test_the_engine_runs_over_an_int4_cache() -> None:
    """The tokens of an exact cache at first; where a choice is close they may part."""
    pytest.importorskip("safetensors")
    pytest.importorskip("tokenizers")
    from flashkernel.generate import Engine, TextTokenizer, find_model, load_model

    tokenizer = TextTokenizer(find_model("demo"))
    prompts = [tokenizer.encode(text) for text in ("if __name__ == ", "import os\nimport sys\n\ndef main():\n")]
    model = load_model(find_model("demo"), device="cpu")
    tokens: dict[str | None, list[int]] = {}
    for kind in (None, "int4"):
        engine = Engine(model, kv_dtype=kind, page_size=16)
        events = engine.generate(prompts, max_new_tokens=12, stop_tokens=frozenset())
        tokens[kind] = [event.token for event in sorted(events, key=lambda e: e.sequence)]  # stable
    same = sum(a == b for a, b in zip(tokens[None], tokens["int4"], strict=True))
    assert len(tokens["int4"]) == 24 and same >= 12
