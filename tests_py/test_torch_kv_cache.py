"""The KV-cache through flashkernel.torch: pages of 8 bits with their scales, opcheck, torch.compile(fullgraph=True).

On the CPU, and on CUDA where there is one.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashkernel as fk
import flashkernel.torch as fkt

DEVICES = ["cpu", *(["cuda"] if fk.num_cuda_devices() and torch.cuda.is_available() else [])]
KINDS = ["float32", "float8_e4m3fn", "int8"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Cache:
    """Pages of two sequences of 21 and 7 tokens; k and v were appended, by the library's own kv_append."""

    def __init__(self, kind: str, device: str, per_token: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Any:
            return torch.randn(*shape, generator=generator).to(device)

        self.q, self.k, self.v = normal(2, 4, 1, 8), normal(28, 2, 8), normal(28, 2, 8)
        self.k_pages, self.v_pages = (torch.zeros(4, 16, 2, 8, device=device).to(getattr(torch, kind)) for _ in "kv")
        self.scales: Any = None
        if kind != "float32" and per_token:
            self.scales = tuple(torch.zeros(4, 2, 16, device=device) for _ in "kv")
        elif kind != "float32":
            self.scales = (
                torch.tensor([0.035, 0.04], device=device),
                torch.tensor([0.04, 0.035], device=device),
            )
        self.table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32, device=device)
        self.lengths = torch.tensor([21, 7], dtype=torch.int32, device=device)
        slots = [*range(32, 48), *range(5), *range(16, 23)]
        self.slots = torch.tensor(slots, device=device)

    def append(self, append: Any = fk.kv_append) -> Cache:
        append(self.k, self.v, self.k_pages, self.v_pages, self.slots, kv_scales=self.scales)
        return self

    @property
    def pages(self) -> tuple[Any, ...]:
        return self.k_pages, self.v_pages, self.table, self.lengths

    def stored(self) -> list[Any]:
        """All that kv_append writes, as bytes."""
        return [x.view(torch.uint8) for x in (self.k_pages, self.v_pages, *(self.scales or ()))]


def cases(test: Any) -> Any:
    kinds = [(kind, per_token) for kind in KINDS for per_token in ((False, True) if kind != "float32" else (False,))]
    return pytest.mark.parametrize("kind, per_token", kinds)(test)


@cases
def test_the_dispatcher_gives_what_the_library_gives(kind: str, per_token: bool, device: str) -> None:
    """Attention, append and read, by the ops themselves: bit for bit what the direct path returns."""
    ops = torch.ops.flashkernel
    ours, theirs = Cache(kind, device, per_token), Cache(kind, device, per_token).append()
    scales = ours.scales or (None, None)
    ops.kv_append(
        ours.k, ours.v, ours.k_pages, ours.v_pages, ours.slots, *scales, None, None, 1e4, None, False, None, None
    )
    for mine, other in zip(ours.stored(), theirs.stored(), strict=True):
        assert torch.equal(mine, other)
    out, lse = ops.attention_paged(
        ours.q, *ours.pages, None, None, *scales, None, None, None, None, True, -1, -1, 0.0, None, "distance"
    )
    expected = fkt.attention_paged(ours.q, *ours.pages, causal=True, return_lse=True, kv_scales=ours.scales)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    for mine, other in zip(
        ops.kv_read(*ours.pages, 21, *scales, None, None),
        fkt.kv_read(*ours.pages, max_seq=21, kv_scales=ours.scales),
        strict=True,
    ):
        assert mine.dtype == other.dtype == torch.float32 and torch.equal(mine, other)


@cases
def test_attention_equals_dense_over_what_was_read(kind: str, per_token: bool, device: str) -> None:
    cache = Cache(kind, device, per_token).append(fkt.kv_append)
    out = fkt.attention_paged(cache.q, *cache.pages, kv_scales=cache.scales)
    k, v = fkt.kv_read(*cache.pages, max_seq=21, kv_scales=cache.scales)
    # Half a step: none, 2^-4 of the number (and of what is smallest), half a scale.
    bound = {"float32": 0 * cache.k, "float8_e4m3fn": cache.k.abs() / 16 + 1e-4, "int8": 0 * cache.k + 0.02}[kind]
    assert ((k[0] - cache.k[:21]).abs() <= bound[:21]).all()
    for b, length in enumerate(cache.lengths.tolist()):
        dense = (x[b : b + 1, :length].transpose(1, 2) for x in (k, v))
        torch.testing.assert_close(out[b : b + 1], fkt.attention(cache.q[b : b + 1], *dense), rtol=1e-4, atol=1e-5)


def test_rotation_on_the_way(device: str) -> None:
    """The rotated q comes back as a new tensor from both paths; pages get the rotated k."""
    ours, theirs = Cache("int8", device), Cache("int8", device)
    positions = torch.arange(28, device=device)
    q = torch.randn(28, 4, 8, device=device)
    rope: Any = {"positions": positions, "theta": 500.0, "rotary_dim": 4, "interleaved": True, "q": q}
    direct = fkt.kv_append(
        theirs.k, theirs.v, theirs.k_pages, theirs.v_pages, theirs.slots, rope=rope, kv_scales=theirs.scales
    )
    out = torch.ops.flashkernel.kv_append(
        ours.k, ours.v, ours.k_pages, ours.v_pages, ours.slots, *ours.scales, None, positions, 500.0, 4, True, None, q
    )
    assert torch.equal(out, direct) and not torch.equal(out, q)
    assert torch.equal(ours.k_pages, theirs.k_pages) and ours.k_pages.any()
    angles = torch.rand(28, 2, device=device)
    tables = angles.cos(), angles.sin()
    rope = {"positions": positions, "cos": tables[0], "sin": tables[1], "q": q}
    direct = fkt.kv_append(
        theirs.k, theirs.v, theirs.k_pages, theirs.v_pages, theirs.slots, rope=rope, kv_scales=theirs.scales
    )
    token = (ours.k, ours.v, ours.k_pages, ours.v_pages, ours.slots, *ours.scales, None)
    out = torch.ops.flashkernel.kv_append(*token, positions, 1e4, None, False, None, q, *tables)
    assert torch.equal(out, direct)
    assert torch.equal(ours.k_pages, theirs.k_pages)
    turned = fkt.rope_table(q.transpose(0, 1)[None], None, *tables, positions)[0].transpose(0, 1)
    torch.testing.assert_close(out, turned)


@pytest.mark.parametrize("name", ["attention_paged", "kv_append", "kv_append_rope", "kv_append_tables", "kv_read"])
@pytest.mark.parametrize("per_token", [False, True])
def test_opcheck(name: str, per_token: bool, device: str) -> None:
    """float8_e4m3fn goes the same way; opcheck itself can't compare it (no torch.allclose of float8)."""
    ops = torch.ops.flashkernel
    cache = Cache("int8", device, per_token)
    if name != "kv_append":
        cache.append()
    token = (cache.k, cache.v, cache.k_pages, cache.v_pages, cache.slots, *cache.scales, None)
    positions, q = torch.arange(28, device=device), torch.randn(28, 4, 8, device=device)
    op, arguments = {
        "attention_paged": (
            ops.attention_paged,
            (
                cache.q,
                *cache.pages,
                None,
                None,
                *cache.scales,
                None,
                None,
                None,
                None,
                True,
                -1,
                -1,
                0.0,
                None,
                "distance",
            ),
        ),
        "kv_append": (ops.kv_append, (*token, None, 1e4, None, False, None, None)),
        "kv_append_rope": (ops.kv_append, (*token, positions, 1e4, None, False, None, q)),
        "kv_append_tables": (
            ops.kv_append,
            (*token, positions, 1e4, None, False, None, q, *torch.rand(2, 28, 2, device=device)),
        ),
        "kv_read": (ops.kv_read, (*cache.pages, 21, *cache.scales, None, torch.float16)),
    }[name]
    torch.library.opcheck(op.default, arguments)


def test_append_with_norms(device: str) -> None:
    """As an op of a graph: the bits of the plain call, and of norms beforehand."""
    torch.manual_seed(0)
    k, q = torch.randn(5, 2, 8, device=device), torch.randn(5, 4, 8, device=device)
    weights = [torch.randn(8, device=device) for _ in range(2)]
    positions, slots = torch.arange(5, device=device), torch.arange(5, device=device)
    pages = [torch.zeros(2, 16, 2, 8, device=device) for _ in range(6)]
    rope: Any = {"positions": positions, "q": q, "q_norm": weights[0], "k_norm": weights[1], "norm_eps": 1e-4}
    plain = fkt.kv_append(k, k, *pages[:2], slots, rope=rope)
    arguments = (positions, 1e4, None, False, None, q, None, None, *weights, 1e-4)
    op = torch.ops.flashkernel.kv_append
    assert torch.equal(op(k, k, *pages[2:4], slots, None, None, None, *arguments), plain)
    normed = [fkt.rms_norm(x, weight, eps=1e-4) for x, weight in zip((q, k), weights, strict=True)]
    apart = fkt.kv_append(normed[1], k, *pages[4:], slots, rope={"positions": positions, "q": normed[0]})
    torch.testing.assert_close(apart, plain)
    torch.testing.assert_close(pages[4], pages[0])
    assert torch.equal(pages[2], pages[0]) and torch.equal(pages[3], pages[1])
    torch.library.opcheck(op.default, (k, k, *pages[2:4], slots, None, None, None, *arguments))


def decode_step(cache: tuple[Any, ...], k: Any, v: Any, slots: Any, positions: Any, q: Any, scales: Any) -> Any:
    """Append with RoPE, attention over the pages, and what a page holds afterwards, in one graph."""
    k_pages, v_pages, table, lengths = cache
    rope: Any = {"positions": positions, "q": q}
    turned = fkt.kv_append(k, v, k_pages, v_pages, slots, rope=rope, kv_scales=scales)
    out = fkt.attention_paged(turned[:, :, None], k_pages, v_pages, table, lengths, causal=True, kv_scales=scales)
    return out * 2, fkt.kv_read(k_pages, v_pages, table, lengths, max_seq=21, kv_scales=scales)[0]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@cases
def test_compile_fullgraph(kind: str, per_token: bool, backend: str, device: str) -> None:
    """A step that writes the cache and reads it: what is written in place is seen by what follows and by the caller."""
    if backend == "inductor" and device == "cpu":
        import shutil

        if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
            pytest.skip("torch's inductor needs a C++ compiler")
    torch._dynamo.reset()
    eager, compiled = (Cache(kind, device, per_token).append() for _ in range(2))
    slots = torch.tensor([4, 22], device=device)  # each sequence's last token anew
    positions = torch.tensor([20, 6], device=device)
    q, k = torch.randn(2, 4, 8, device=device), torch.randn(2, 2, 8, device=device)
    step = torch.compile(decode_step, fullgraph=True, backend=backend)
    with torch.no_grad():
        expected = decode_step(eager.pages, k, -k, slots, positions, q, eager.scales)
        got = step(compiled.pages, k, -k, slots, positions, q, compiled.scales)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(compiled.stored(), eager.stored(), strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(eager.stored()[0], Cache(kind, device, per_token).append().stored()[0])


def test_bytes_and_refusals(device: str) -> None:
    cache = Cache("float8_e4m3fn", device).append()
    k_pages, v_pages, *rest = cache.pages
    expected = fkt.attention_paged(cache.q, *cache.pages, kv_scales=cache.scales)
    as_bytes = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    for kind in ("float8_e4m3fn", torch.float8_e4m3fn):
        options: Any = {"kv_scales": cache.scales, "kv_dtype": kind}
        assert torch.equal(fkt.attention_paged(cache.q, *as_bytes, *rest, **options), expected)
        torch._dynamo.reset()
        compiled = torch.compile(fkt.attention_paged, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(cache.q, *as_bytes, *rest, **options), expected)
    wide = k_pages.float(), v_pages.float()
    for pages, options, text in (
        ((k_pages, v_pages), {}, "k_scales is absent"),
        (wide, {"kv_scales": cache.scales}, "scales are given but k_pages is float32"),
        ((k_pages, v_pages), {"kv_scales": (cache.scales[0], cache.scales[1][:1])}, r"v_scales\.shape\[0\]=1"),
        ((k_pages, v_pages), {"kv_scales": (cache.scales[0].half(), cache.scales[1])}, "k_scales"),
        ((k_pages, v_pages), {"kv_scales": cache.scales[0]}, "a pair"),
        (as_bytes, {"kv_scales": cache.scales}, "kv_dtype"),
    ):
        for call in (
            lambda p=pages, o=options: fkt.attention_paged(cache.q, *p, *rest, **o),
            lambda p=pages, o=options: fkt.kv_append(cache.k, cache.v, *p, cache.slots, **o),
            lambda p=pages, o=options: fkt.kv_read(*p, *rest, max_seq=21, **o),
        ):
            with pytest.raises(ValueError, match=text):
                call()
    needed = tuple(scale.clone().requires_grad_() for scale in cache.scales)
    for call in (
        lambda: fkt.attention_paged(cache.q, *cache.pages, kv_scales=needed),
        lambda: fkt.kv_append(cache.k, cache.v, k_pages, v_pages, cache.slots, kv_scales=needed),
        lambda: fkt.kv_read(*cache.pages, max_seq=21, kv_scales=needed),
    ):
        with pytest.raises(NotImplementedError, match="no_grad"):
            call()
        with torch.no_grad():
            call()
    with pytest.raises(ValueError, match="'q_out'"):
        rope: Any = {"positions": cache.slots, "q_out": cache.q}
        fkt.kv_append(cache.k, cache.v, k_pages, v_pages, cache.slots, rope=rope, kv_scales=cache.scales)


def test_documentation_examples_run() -> None:
    import doctest
    import importlib

    result = doctest.testmod(importlib.import_module("flashkernel.torch.kv_cache"))
    assert result.failed == 0 and result.attempted >= 12
