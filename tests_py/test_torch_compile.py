"""flashkernel.torch under torch's own checks: opcheck, torch.compile(fullgraph=True), fake tensors."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashkernel as fk
import flashkernel.torch as fkt
from test_torch import paged_arguments, randn


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def cascade_tables() -> tuple[Any, ...]:
    """Prefix table and length, own tables and lengths."""
    index = torch.tensor([[2]], dtype=torch.int32), torch.tensor([[1], [3]], dtype=torch.int32)
    return index[0], torch.tensor([16]), index[1], torch.tensor([3, 16])


def opcheck_cases() -> dict[str, tuple[Any, ...]]:
    ops = torch.ops.flashkernel
    q, k, v = randn(1, 4, 5, 8), randn(1, 2, 6, 8), randn(1, 2, 6, 8)
    bias, sinks, slopes = randn(1, 1, 5, 6), randn(4), torch.rand(4)
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    options = (True, -1, -1, 0.0, None, "distance")
    mask = fk.pack_mask(torch.rand(1, 4, 5, 6) < 0.7)
    x, w, b = randn(3, 8), randn(6, 8), randn(6)
    cos = torch.randn(1, 5, 4)
    return {
        "attention": (ops.attention, (q, k, v, bias, None, None, slopes, sinks, *options, 128, 128)),
        "attention_masked": (
            ops.attention,
            (q, k, v, bias, mask, None, slopes, sinks, *options[:-1], "signed", 128, 128),
        ),
        "attention_blocks": (
            ops.attention,
            (q, k, v, None, mask, torch.ones(4, 1, 1, dtype=torch.bool), None, None, *options, 64, 128),
        ),
        "attention_plain": (ops.attention, (q, k, v, *[None] * 5, *options, 128, 128)),
        "pack_mask": (ops.pack_mask, (torch.rand(2, 5, 40) < 0.7,)),
        "attention_varlen": (
            ops.attention_varlen,
            (randn(5, 4, 8), randn(5, 2, 8), randn(5, 2, 8), cu, cu, 3, 3, slopes, sinks, *options),
        ),
        "attention_cascade": (
            ops.attention_cascade,
            (*paged_arguments()[:3], *cascade_tables(), *[None] * 7, True, 0.5, None),
        ),
        "attention_fp8": (
            ops.attention_fp8,
            (
                *(torch.randn(2, heads, 5, 16).to(torch.float8_e4m3fn).view(torch.uint8) for heads in (4, 2, 2)),
                *[torch.rand(2, 2) + 0.5, None, torch.tensor(0.5), None, None, None, None, True, -1, -1, 0.0, 0.3],
                *[torch.rand(4), "distance", torch.rand(4), None, None, torch.bfloat16],
            ),
        ),
        "attention_mla_decode": (
            ops.attention_mla_decode,
            (
                randn(2, 4, 1, 24, grad=False),
                randn(4, 16, 24, grad=False),
                *paged_arguments()[3:],
                0.25,
                None,
                16,
                True,
            ),
        ),
        "latent_append": (
            ops.latent_append,
            (
                *[randn(3, 8, grad=False), randn(3, 4, grad=False), torch.zeros(2, 16, 20, dtype=torch.uint8)],
                *[torch.tensor([3, -1, 17]), None],
            ),
        ),
        "attention_paged": (ops.attention_paged, (*paged_arguments(), *[None] * 8, *options)),
        "linear": (ops.linear, (x, w, b, "gelu_tanh", True)),
        "quantized_linear": (
            ops.quantized_linear,
            (randn(3, 64), torch.randint(256, (6, 32), dtype=torch.uint8), torch.rand(6, 2), None, b, "int4", "silu"),
        ),
        "linear_fp8": (
            ops.linear_fp8,
            (randn(3, 64), torch.full((6, 64), 0x38, dtype=torch.uint8), None, torch.rand(1, 1), b, "silu", None),
        ),
        "quantize_fp8_blocks": (ops.quantize_fp8_blocks, (randn(3, 130, grad=False),)),
        "fused_linear": (ops.fused_linear, (x, w, b, randn(8), None, randn(3, 3), "rms", 1e-6, "swiglu")),
        "fused_linear_layer": (ops.fused_linear, (x, w, b, randn(8), randn(8), None, "layer", 1e-5, "gelu_tanh")),
        "fused_linear_plain": (ops.fused_linear, (x, w, None, None, None, randn(3, 6), "rms", 1e-6, None)),
        "linear_plain": (ops.linear, (x, w, None, None, True)),
        "layer_norm": (ops.layer_norm, (x, None, randn(8), randn(8), 1e-5)),
        "layer_norm_residual": (ops.layer_norm, (x, randn(3, 8), randn(8), randn(8), 1e-5)),
        "rms_norm": (ops.rms_norm, (x, None, randn(8), 1e-6)),
        "rms_norm_residual": (ops.rms_norm, (x, randn(3, 8), randn(8), 1e-6)),
        "rms_norm_quantized": (ops.rms_norm_quantized, (x.detach(), None, torch.ones(8), None, torch.int8, 1e-6)),
        "layer_norm_quantized": (
            ops.layer_norm_quantized,
            (x.detach(), randn(3, 8, grad=False), *[torch.ones(8)] * 2, torch.tensor(0.1), torch.int8, 1e-5, 1.0),
        ),
        "rms_norm_weight_offset": (ops.rms_norm, (x, None, torch.ones(8, dtype=torch.bfloat16), 1e-6, 1.0)),
        "rope": (ops.rope, (q, randn(1, 2, 5, 8), None, None, 1e4, None, False, False)),
        "rope_table": (ops.rope_table, (q, randn(1, 2, 5, 8), cos, cos, None, False, False)),
        "swiglu": (ops.swiglu, (x, randn(3, 8))),
        "softmax": (ops.softmax, (x, -1)),
        "log_softmax": (ops.log_softmax, (x, 0)),
        "sample": (ops.sample, (x, torch.ones(3), None, torch.full((3,), 0.9), *[None] * 8)),
        "cross_entropy": (ops.cross_entropy, (x, torch.tensor([1, 2, 3]), -100, 0.1, "mean")),
    }


@pytest.mark.parametrize("name", opcheck_cases())
def test_opcheck(name: str) -> None:
    op, arguments = opcheck_cases()[name]
    torch.library.opcheck(op.default, arguments)


def test_quantized_norm_compiles() -> None:
    x, weight = torch.randn(5, 64), torch.randn(64)
    expected = fk.rms_norm_quantized(x, weight, weight_offset=1.0)
    norm = lambda x: fkt.rms_norm_quantized(x * 1, weight, weight_offset=1.0)
    got = torch.compile(norm, fullgraph=True, backend="aot_eager")(x)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours.float(), theirs.float())


def test_sample_compiles_and_has_no_gradient() -> None:
    logits, heat = torch.randn(5, 40), torch.ones(5)
    expected = fk.sample(logits, heat, offset=torch.arange(5))
    draw = lambda x: fkt.sample(x * 1, heat, offset=torch.arange(5))
    assert torch.equal(draw(logits), expected)
    assert torch.equal(torch.compile(draw, fullgraph=True, backend="aot_eager")(logits), expected)
    tokens = draw(logits.requires_grad_())
    assert torch.equal(tokens, expected) and not tokens.requires_grad


def transformer_block(x: Any, residual: Any, w_qkv: Any, w_norm: Any, w_fc: Any, b_fc: Any, targets: Any) -> Any:
    """Every op in one graph."""
    h, residual = fkt.rms_norm(x, w_norm, residual=residual)
    q, k, v = fkt.linear(h, w_qkv).reshape(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4)
    q, k = fkt.rope(q, k)
    h = fkt.attention(q, k, v, causal=True).transpose(1, 2).reshape(2, 5, 32)
    h = fkt.layer_norm(h + residual, w_norm)
    h = fkt.linear(h, w_fc, b_fc, activation="gelu_tanh")
    h = fkt.swiglu(h, h) + fkt.softmax(h) + fkt.log_softmax(h)
    return fkt.cross_entropy(h.flatten(0, 1), targets)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph(backend: str) -> None:
    if backend == "inductor":
        import shutil

        if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
            pytest.skip("torch's inductor needs a C++ compiler")
    arguments = [randn(2, 5, 32), randn(2, 5, 32), randn(96, 32), randn(32), randn(16, 32), randn(16)]
    targets = torch.arange(10)
    torch._dynamo.reset()
    compiled = torch.compile(transformer_block, fullgraph=True, backend=backend)
    expected = transformer_block(*arguments, targets)
    got = compiled(*arguments, targets)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(got, arguments), torch.autograd.grad(expected, arguments), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*arguments, targets), expected.detach(), rtol=1e-5, atol=1e-5)


def test_compile_keeps_shapes_dynamic() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q: fkt.attention(q, q, q, causal=True), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for seq in (4, 9, 17):
        q = randn(1, 2, seq, 8, grad=False)
        torch.testing.assert_close(compiled(q), fkt.attention(q, q, q, causal=True))


def test_compile_keeps_the_longest_length_dynamic() -> None:
    """A new bound of the lengths compiles nothing anew: a training loop has another one each step."""
    from torch._dynamo.testing import CompileCounterWithBackend

    table, lengths = torch.arange(8, dtype=torch.int32).reshape(2, 4), torch.tensor([20, 30])
    pages, prefix = randn(8, 16, 2, 8, grad=False), (torch.tensor([[6]], dtype=torch.int32), torch.tensor([16]))

    def paged(x: Any, starts: Any, longest: int) -> Any:
        return fkt.attention_paged(x, pages, pages, table, lengths, cu_seqlens_q=starts, max_seqlen_q=longest)

    def cascade(x: Any, starts: Any, longest: int) -> Any:
        given: dict[str, Any] = dict(cu_seqlens_q=starts, max_seqlen_q=longest)
        return fkt.attention_cascade(x, pages, pages, *prefix, table[:, :3], lengths, **given)

    def varlen(x: Any, starts: Any, longest: int) -> Any:
        return fkt.attention_varlen(x, x, x, starts, starts, longest, longest)

    def eight_bits(x: Any, starts: Any, longest: int) -> Any:
        x, lengths = x.to(torch.float8_e4m3fn), (starts, starts, longest, longest)
        return fkt.attention_fp8(x, x, x, None, None, None, **dict(zip(names, lengths, strict=True)))

    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    for call in (paged, cascade, varlen, eight_bits):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(call, fullgraph=True, backend=counter)
        for longest in (3, 5, 6, 7, 9):
            x, starts = randn(2 * longest, 2, 8, grad=call is varlen), torch.tensor([0, longest, 2 * longest])
            torch.testing.assert_close(compiled(x, starts, longest), call(x, starts, longest))
        assert counter.frame_count <= 2, call.__name__


def number_cases() -> dict[str, Any]:
    """Calls by (x, number): x is [1, 4, 6, 8]."""
    kv, targets, rows = randn(1, 2, 6, 8), torch.arange(6), lambda x: x.reshape(-1, 8)[:6]
    weight, bias, norm = randn(16, 8), randn(16), randn(8)
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    q, *paged = paged_arguments()
    tables = cascade_tables()
    latents = randn(4, 16, 24, grad=False)

    def eight_bits(x: Any, *scales: Any, **options: Any) -> Any:
        x = torch.cat([x, x], -1).detach().to(torch.float8_e4m3fn)
        return fkt.attention_fp8(x, x, x, *scales, **options)

    def varlen(x: Any, **options: Any) -> Any:
        x = x[0].transpose(0, 1).contiguous()
        return fkt.attention_varlen(x, x, x, starts, starts, 4, 4, **options)

    def loss(x: Any, **options: Any) -> Any:
        return fkt.linear_cross_entropy(rows(x), weight, targets, bias, **options)

    def log_prob(x: Any, **options: Any) -> Any:
        return fkt.linear_selected_log_prob(rows(x), weight, targets, bias, **options)

    def latent(scale: Any, **options: Any) -> Any:
        return fkt.attention_mla_decode(randn(2, 4, 1, 24, grad=False) * 0 + 1, latents, *paged[2:], scale, **options)

    attend = lambda x, **options: fkt.attention(x, kv, kv, **options)
    of_pages = lambda **options: fkt.attention_paged(q, *paged, **options)
    shared = lambda **options: fkt.attention_cascade(q, *paged[:2], *tables, **options)
    return {
        "attention window int": lambda x, n: attend(x, window=(n, 0)),
        "attention both sides int": lambda x, n: attend(x, window=(n, n)),
        "attention scale": lambda x, s: attend(x, scale=s),
        "attention softcap": lambda x, s: attend(x, softcap=s),
        "attention scale and softcap": lambda x, s: attend(x, softcap=s, scale=s / 2),
        "attention_varlen window int": lambda x, n: varlen(x, window=(n, 0)),
        "attention_varlen scale": lambda x, s: varlen(x, scale=s),
        "attention_paged window int": lambda x, n: of_pages(window=(n, 0)),
        "attention_paged softcap": lambda x, s: of_pages(softcap=s),
        "attention_cascade scale": lambda x, s: shared(scale=s),
        "attention_fp8 window int": lambda x, n: eight_bits(x, window=(n, 0)),
        "attention_fp8 scale": lambda x, s: eight_bits(x, scale=s),
        "attention_fp8 q_scale": lambda x, s: eight_bits(x, s, None, 0.5),
        "attention_mla_decode scale": lambda x, s: latent(s, head_dim_v=16),
        "attention_mla_decode head_dim_v int": lambda x, n: latent(0.2, head_dim_v=n),
        "cross_entropy ignore_index int": lambda x, n: fkt.cross_entropy(rows(x), targets, ignore_index=n),
        "cross_entropy label_smoothing": lambda x, s: fkt.cross_entropy(rows(x), targets, label_smoothing=s),
        "linear_cross_entropy ignore_index int": lambda x, n: loss(x, ignore_index=n),
        "linear_cross_entropy z_loss": lambda x, s: loss(x, z_loss=s),
        "linear_cross_entropy softcap": lambda x, s: loss(x, softcap=s),
        "linear_cross_entropy at once": lambda x, s: loss(x, label_smoothing=s, recompute=False),
        "linear_cross_entropy at once int": lambda x, n: loss(x, ignore_index=n, recompute=False),
        "linear_selected_log_prob ignore_index int": lambda x, n: log_prob(x, ignore_index=n),
        "linear_selected_log_prob temperature": lambda x, s: log_prob(x, temperature=s),
        "rms_norm eps": lambda x, s: fkt.rms_norm(x, norm, eps=s),
        "layer_norm weight_offset": lambda x, s: fkt.layer_norm(x, norm, weight_offset=s),
        "fused_linear eps": lambda x, s: fkt.fused_linear(x, weight, norm_weight=norm, eps=s),
        "rope theta": lambda x, s: fkt.rope(x, theta=s),
        "rope rotary_dim int": lambda x, n: fkt.rope(x, rotary_dim=2 * (n // 2)),
        "scaled_dot_product_attention scale": lambda x, s: fkt.scaled_dot_product_attention(x, x, x, scale=s),
    }


@pytest.mark.parametrize("name", number_cases())
def test_compile_keeps_numbers_dynamic(name: str) -> None:
    """Another value of a number compiles nothing anew: there is a graph for the first one, and one for all others."""
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch.fx.experimental import symbolic_shapes

    whole = name.endswith(" int")
    if not whole and not hasattr(symbolic_shapes, "has_static_value"):
        pytest.skip("torch before 2.9 has a graph for each float")
    call = number_cases()[name]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for number in (2, 3, 4, 5, 7) if whole else (0.5, 0.3, 0.7, 0.9, 0.8):
        x = randn(1, 4, 6, 8)
        got, expected = compiled(x, number), call(x, number)
        torch.testing.assert_close(got, expected)
        if expected.requires_grad:
            grads = (torch.autograd.grad(out.float().square().sum(), x) for out in (got, expected))
            torch.testing.assert_close(*grads)
    assert counter.frame_count <= 2


def test_fake_tensors_are_not_touched() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(1, 4, 5, 8)
        assert fkt.attention(q, q, q).shape == (1, 4, 5, 8)
