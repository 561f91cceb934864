"""8-bit KV-caches through Python: pages of every framework, elements bit for bit against the oracle, and the error of
attention over them against the numbers that were appended.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flashkernel as fk
from conftest import HAS_GPU, f64, on_host
from flashkernel import reference, testing

KINDS = ["float8_e4m3fn", "int8"]


def decode(pages: np.ndarray, kv_dtype: str) -> np.ndarray:
    """The numbers of stored bytes."""
    if kv_dtype == "int8":
        return pages.view(np.int8).astype(np.float64)
    bits = pages.view(np.uint8).astype(int)
    field, mantissa = bits >> 3 & 15, bits & 7
    magnitude = np.where(field == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(field - 10.0))
    magnitude = np.where(bits & 127 == 127, np.nan, magnitude)
    return np.where(bits & 128, -magnitude, magnitude)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def zeros(make, *shape: int, dtype: str = "uint8", value: float = 0):
    """An array of the framework's own; 8-bit pages are bytes, which every framework has."""
    array = np.full(shape, value, dtype)
    return array if make.framework == "numpy" else make._place(torch.from_numpy(array))


def scales_of(make, token_scales: bool, pages: int, heads: int, k: np.ndarray, v: np.ndarray, most: int) -> tuple:
    """Room for scales a token, or a scale a head with which the largest magnitude of k and v just fits."""
    if token_scales:
        return tuple(zeros(make, pages, heads, 16, dtype="float32", value=np.nan) for _ in range(2))
    return tuple(make.array(np.abs(x).max((0, 2)) / most, "float32") for x in (k, v))


@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("token_scales", [False, True])
def test_append_and_read_against_the_oracle(make, kv_dtype: str, token_scales: bool) -> None:
    k, v = normal(0, 9, 2, 24), normal(1, 9, 2, 8)
    k[0, 0, 3], k[1, 1, 2], k[2, 0] = np.nan, np.inf, 0
    k[3], k[4] = k[3] * 1e-3, k[4] * 300  # steps of 2^-9, and what is saturated under a scale a head
    k, v = make.array(k), make.array(v)
    k_pages, v_pages = zeros(make, 2, 16, 2, 24), zeros(make, 2, 16, 2, 8)
    if token_scales:
        scales = scales_of(make, True, 2, 2, f64(k), f64(v), 0)
    else:
        scales = make.array([0.01, 0.02], "float32"), make.array([0.03, 0.005], "float32")
    options = {"kv_scales": scales, "kv_dtype": kv_dtype, **make.kwargs}
    fk.kv_append(k, v, k_pages, v_pages, make.index([*range(16, 24), 24]), **options)
    for tokens, pages, scale in ((k, k_pages, scales[0]), (v, v_pages, scales[1])):
        pages, scale = on_host(pages), on_host(scale)
        elements, used = reference.kv_quantize(f64(tokens), kv_dtype, None if token_scales else scale)
        np.testing.assert_array_equal(decode(pages[1, :9], kv_dtype), elements)
        assert not pages[0].any() and not pages[1, 9:].any()
        if token_scales:
            np.testing.assert_array_equal(scale[1, :, :9].T, used)
            assert np.isnan(scale[0]).all() and np.isnan(scale[1, :, 9:]).all()
    table, lengths = make.index([[1]], np.int32), make.index([9])
    for out_dtype in (None, "float16"):
        k_out, _ = fk.kv_read(k_pages, v_pages, table, lengths, max_seq=11, out_dtype=out_dtype, **options)
        elements, used = reference.kv_quantize(f64(k), kv_dtype, None if token_scales else on_host(scales[0]))
        k_out = on_host(k_out)
        with np.errstate(over="ignore"):
            expected = (elements.astype(np.float32) * used.astype(np.float32)[..., None]).astype(k_out.dtype)
        assert k_out.dtype == (out_dtype or "float32")
        np.testing.assert_array_equal(k_out[0, :9], expected)
        assert not k_out[0, 9:].any()


@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("token_scales", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_append_with_rope(make, kv_dtype: str, token_scales: bool, interleaved: bool) -> None:
    """Rotated in float32 and not rounded before the elements are: at most one step from the oracle's."""
    k, v, q = make.normal(4, 3, 12), make.normal(4, 3, 8), make.normal(4, 6, 12)
    k_pages, v_pages = zeros(make, 2, 16, 3, 12), zeros(make, 2, 16, 3, 8)
    most = 448 if kv_dtype == "float8_e4m3fn" else 127
    scales = scales_of(make, token_scales, 2, 3, 1.5 * f64(k), f64(v), most)
    positions = [7, 0, 123456, 3]
    rope = {"positions": make.index(positions), "theta": 500.0, "rotary_dim": 8, "interleaved": interleaved, "q": q}
    rotated = fk.kv_append(
        k,
        v,
        k_pages,
        v_pages,
        make.index([3, 2, -1, 16]),
        rope=rope,
        kv_scales=scales,
        kv_dtype=kv_dtype,
        **make.kwargs,
    )
    options = {"theta": 500.0, "rotary_dim": 8, "interleaved": interleaved}
    true_q, true_k = reference.rope(
        f64(q).transpose(1, 0, 2)[None], f64(k).transpose(1, 0, 2)[None], np.array(positions), **options
    )
    make.check(rotated, true_q[0].transpose(1, 0, 2))
    angles = np.array(positions)[:, None] * 500.0 ** (-np.arange(4) / 4)
    table = {"cos": make.array(np.cos(angles), "float32"), "sin": make.array(np.sin(angles), "float32")}
    by_table = {"positions": make.index(range(4)), **table, "interleaved": interleaved, "q": q}
    others = zeros(make, 2, 16, 3, 12), zeros(make, 2, 16, 3, 8)
    same = fk.kv_append(
        k, v, *others, make.index([3, 2, -1, 16]), rope=by_table, kv_scales=scales, kv_dtype=kv_dtype, **make.kwargs
    )
    make.check(same, true_q[0].transpose(1, 0, 2))
    apart = on_host(others[0]).astype(np.int64) - on_host(k_pages).astype(np.int64)
    assert np.abs(apart).max() <= 1  # the angle's last bit may turn a rounding
    for tokens, pages, scale in ((true_k[0].transpose(1, 0, 2), k_pages, scales[0]), (f64(v), v_pages, scales[1])):
        pages, scale = on_host(pages), on_host(scale)
        assert pages.reshape(32, -1).any(1).nonzero()[0].tolist() == [2, 3, 16]
        for t, slot in ((0, 3), (1, 2), (3, 16)):
            used = scale[slot // 16, :, slot % 16] if token_scales else scale
            _, expected = reference.kv_quantize(tokens[t], kv_dtype, None if token_scales else scale)
            np.testing.assert_allclose(used, expected, rtol=1e-6)
            number = decode(pages[slot // 16, slot % 16], kv_dtype) * used[:, None]
            step = np.maximum(np.abs(tokens[t]) / 8, 2.0**-8 * used[:, None]) if most == 448 else used[:, None]
            assert (np.abs(number - tokens[t]) <= 0.52 * step).all()


# Largest error of the output, and its root mean square, for unit-variance queries, keys and values;
# docs/low_precision.md states them.
LARGEST, MEAN = {"float8_e4m3fn": 0.05, "int8": 0.015}, {"float8_e4m3fn": 0.01, "int8": 0.003}


@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("token_scales", [False, True])
@pytest.mark.parametrize("seq_q", [1, 40])
def test_attention_error(make, kv_dtype: str, token_scales: bool, seq_q: int) -> None:
    length, heads_q, heads_kv, dim = 300, 8, 2, 64
    if make.framework == "triton" and not HAS_GPU:
        length, seq_q = 150, min(seq_q, 5)  # interpreted: a tenth of the time
    k, v = (make.array(normal(seed, length, heads_kv, dim)) for seed in (2, 3))
    q = make.array(normal(4, 1, heads_q, seq_q, dim))
    pool = fk.KvPagePool(24, heads_kv, dim, page_size=16, dtype=kv_dtype, token_scales=token_scales)
    assert (pool.scales() is not None) == token_scales
    cache = fk.KvCache(pool)
    sequence = cache.create()
    slots = make.index(cache.append(sequence, length))
    pages = tuple(zeros(make, 24, 16, heads_kv, dim) for _ in range(2))
    scales = scales_of(make, token_scales, 24, heads_kv, f64(k), f64(v), 448 if kv_dtype == "float8_e4m3fn" else 127)
    options = {"kv_scales": scales, "kv_dtype": kv_dtype, **make.kwargs}
    fk.kv_append(k, v, *pages, slots, **options)
    table, lengths = (make.index(x, np.int32) for x in cache.block_table([sequence]))
    out = fk.attention_paged(q, *pages, table, lengths, causal=True, **options)
    dense = [f64(x).transpose(1, 0, 2)[None] for x in (k, v)]
    exact, _ = reference.attention(f64(q), *dense, causal=True)
    assert np.abs(f64(out) - exact).max() < LARGEST[kv_dtype]
    assert np.sqrt(np.mean((f64(out) - exact) ** 2)) < MEAN[kv_dtype]
    # And next to nothing beyond what rounding the elements costs.
    rounded = []
    for x, scale in zip((k, v), scales, strict=True):
        elements, used = reference.kv_quantize(f64(x), kv_dtype, None if token_scales else on_host(scale))
        rounded.append((elements * used[..., None]).transpose(1, 0, 2)[None])
    truth, _ = reference.attention(f64(q), *rounded, causal=True)
    make.check(out, truth)


@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("token_scales", [False, True])
def test_attention_options(make, kv_dtype: str, token_scales: bool) -> None:
    """Several sequences of their own lengths, a window, softcap, sinks; a NaN that nobody sees stays where it is."""
    heads_kv, dim, dim_v, lengths = 2, 20, 12, [37, 0, 5]
    k, v = (make.array(normal(seed, 42, heads_kv, d)) for seed, d in ((5, dim), (6, dim_v)))
    pages = zeros(make, 6, 16, heads_kv, dim), zeros(make, 6, 16, heads_kv, dim_v)
    scales = scales_of(make, token_scales, 6, heads_kv, f64(k), f64(v), 448 if kv_dtype == "float8_e4m3fn" else 127)
    options = {"kv_scales": scales, "kv_dtype": kv_dtype, **make.kwargs}
    table = np.array([[4, 1, 3], [-1, 1 << 30, 7], [2, 1 << 30, -1]], np.int32)
    slots = [64 + j if j < 16 else 16 + j - 16 if j < 32 else 48 + j - 32 for j in range(37)] + list(range(32, 37))
    fk.kv_append(k, v, *pages, make.index(slots), **options)
    if make.host_reads:
        table[1] = 0  # of a sequence without keys: read by nobody
    q = make.array(normal(7, 3, 6, 3, dim))
    sinks = make.array(normal(8, 6), "float32")
    out, lse = fk.attention_paged(
        q, *pages, make.index(table, np.int32), make.index(lengths), causal=True, window=(18, 0), softcap=2.0,
        sinks=sinks, return_lse=True, **options,
    )  # fmt: skip
    start = 0
    for b, length in enumerate(lengths):
        rounded = []
        for x, scale in zip((k, v), scales, strict=True):
            tokens = f64(x)[start : start + length]
            elements, used = reference.kv_quantize(tokens, kv_dtype, None if token_scales else on_host(scale))
            rounded.append((elements * used[..., None]).transpose(1, 0, 2)[None])
        truth, true_lse = reference.attention(
            f64(q)[b : b + 1], *rounded, causal=True, window=(18, 0), softcap=2.0, sinks=f64(sinks)
        )
        make.check(out[b : b + 1], truth)
        testing.assert_close(lse[b : b + 1], true_lse, "float32", scale=4.0)
        start += length


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_frameworks(kv_dtype: str) -> None:
    k, scale = normal(5, 3, 1, 8), np.ones(1, np.float32)
    bytes_ = np.zeros((1, 16, 1, 8), np.uint8)
    slots = np.arange(3)
    fk.kv_append(k, k, bytes_, bytes_.copy(), slots, kv_scales=(scale, scale), kv_dtype=kv_dtype)
    pages = torch.zeros(1, 16, 1, 8, dtype=getattr(torch, kv_dtype))
    one = torch.ones(1)
    fk.kv_append(torch.from_numpy(k), torch.from_numpy(k), pages, pages.clone(), torch.arange(3), kv_scales=(one, one))
    np.testing.assert_array_equal(pages.view(torch.uint8).numpy(), bytes_)
    if kv_dtype == "int8":
        typed = np.zeros((1, 16, 1, 8), np.int8)
    else:
        typed = np.zeros((1, 16, 1, 8), pytest.importorskip("ml_dtypes").float8_e4m3fn)
    fk.kv_append(k, k, typed, typed.copy(), slots, kv_scales=(scale, scale))
    np.testing.assert_array_equal(typed.view(np.uint8), bytes_)


def test_refusals() -> None:
    k, scale, slots = normal(6, 1, 1, 8), np.ones(1, np.float32), np.zeros(1, np.int64)
    pages = np.zeros((1, 16, 1, 8), np.uint8), np.zeros((1, 16, 1, 8), np.uint8)
    wide = np.zeros((1, 16, 1, 8), np.float32), np.zeros((1, 16, 1, 8), np.float32)
    for arguments, options, text in (
        (pages, {"kv_scales": (scale, scale)}, "k_pages has dtype uint8; pass kv_dtype"),
        (pages, {"kv_dtype": "int8"}, "k_scales is absent"),
        (pages, {"kv_scales": (scale, scale), "kv_dtype": "float16"}, "kv_dtype='float16'"),
        (pages, {"kv_scales": scale, "kv_dtype": "int8"}, "a pair"),
        (pages, {"kv_scales": (scale, np.ones(2, np.float32)), "kv_dtype": "int8"}, r"v_scales.shape\[0\]=2"),
        (wide, {"kv_scales": (scale, scale)}, "k_pages is float32; they are for pages"),
        (wide, {"kv_dtype": "int8"}, "k_pages is float32 but kv_dtype is int8"),
    ):
        with pytest.raises(ValueError, match=text):
            fk.kv_append(k, k, *arguments, slots, **options)
    with pytest.raises(ValueError, match="needs float32, float16 or bfloat16"):
        fk.add(pages[0].view(np.int8), pages[0].view(np.int8))
    with pytest.raises(ValueError, match="out_dtype"):
        fk.kv_read(*wide, np.zeros((1, 1), np.int32), np.ones(1, np.int64), out_dtype="float16")


def test_copies_on_write_and_page_copies_take_scales_along() -> None:
    pool = fk.KvPagePool(4, 2, 8, page_size=16, dtype="float8_e4m3fn", num_layers=2)
    scales = pool.scales(1)
    assert scales is not None and scales[0].shape == (4, 2, 16)
    pages = pool.k_pages(1), pool.v_pages(1)
    k = normal(7, 16, 2, 8)
    options = {"kv_scales": scales, "kv_dtype": pool.dtype}
    fk.kv_append(k, -k, *pages, np.arange(16), **options)
    fk.kv_copy_pages(*pages, np.array([0]), np.array([3]), **options)
    table = np.array([[0], [3]], np.int32)
    k_out, v_out = fk.kv_read(*pages, table, np.array([16, 16]), **options)
    np.testing.assert_array_equal(k_out[0], k_out[1])
    np.testing.assert_array_equal(v_out, -k_out)
    assert np.abs(k_out[0] - k).max() < 0.2


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_generate(kv_dtype: str) -> None:
    pytest.importorskip("safetensors")
    pytest.importorskip("tokenizers")
    from flashkernel.generate import Engine, TextTokenizer, find_model, load_model

    tokenizer = TextTokenizer(find_model("demo"))
    prompts = [tokenizer.encode(text) for text in ("if __name__ == ", "import os\nimport sys\n\ndef main():\n")]
    model = load_model(find_model("demo"), device="cpu")
    texts = []
    for kind in (None, kv_dtype):
        engine = Engine(model, kv_dtype=kind, page_size=16)
        tokens: dict[int, list[int]] = {}
        for event in engine.generate(prompts, max_new_tokens=12, stop_tokens=frozenset()):
            tokens.setdefault(event.sequence, []).append(event.token)
        texts.append(tokens)
    assert texts[0] == texts[1]  # its choices are clear enough for a cache of less accuracy
    with pytest.raises(ValueError, match="kv_dtype='fp4'"):
        Engine(model, kv_dtype="fp4")
