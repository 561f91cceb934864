"""The invariant mode on the CPU: the same tokens give the same bits, whatever stands beside them (docs/invariance.md).

Batches, lengths, chunks, pages and threads are drawn at random from a fixed seed.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import flashkernel as fk
import flashkernel.torch as fkt
from conftest import HAS_GPU, TORCH
from flashkernel.generate import Engine, SamplingOptions, load_model
from flashkernel.generate.model_names import find_model
from flashkernel.quantized import quantize

DTYPES = ("float32", "float16", "bfloat16")
DEVICES = ("cpu", *(("cuda",) if HAS_GPU and fk.num_cuda_devices() else ()))


@pytest.fixture(autouse=True)
def mode() -> Iterator[None]:
    threads = fk.get_num_threads()
    with fk.invariant():
        yield
    fk.set_num_threads(threads)


def normal(dtype: str, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(TORCH[dtype])


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    assert torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [False, True], ids=["in-contiguous", "out-contiguous"])
def test_a_row_of_linear_has_the_same_bits_among_any_others(dtype, turned):
    draw = random.Random(48)
    for features, outputs in ((64, 200), (1000, 77), (800, 513)):
        weight = normal(dtype, features, outputs, seed=1).T if turned else normal(dtype, outputs, features, seed=1)
        bias, x = normal(dtype, outputs, seed=2), normal(dtype, 70, features)
        whole = fk.linear(x, weight, bias, activation="gelu_tanh")
        for rows in (1, 2, 5, 8, 9, 48, 49, draw.randrange(10, 70)):
            fk.set_num_threads(draw.choice((1, 2, 3)))
            ids = [draw.randrange(70) for _ in range(rows)]
            same(fk.linear(x[ids], weight, bias, activation="gelu_tanh"), whole[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["int4", "int8"])
def test_a_row_beside_a_quantised_matrix_has_the_same_bits_among_any_others(format, dtype):
    weight = quantize(normal("float32", 77, 320).numpy(), format)
    arguments = [torch.from_numpy(x) for x in (weight.weight, weight.scales)]
    x = normal(dtype, 40, 320)
    whole = fk.quantized_linear(x, *arguments, format=weight.format)
    for rows in (1, 2, 8, 9, 17):
        same(fk.quantized_linear(x[3 : 3 + rows], *arguments, format=weight.format), whole[3 : 3 + rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_has_the_same_bits_dense_in_chunks_paged_and_decoded(dtype):
    draw = random.Random(49)
    for heads, heads_kv, dim, options in (
        (2, 2, 64, {}),
        (8, 1, 80, {}),
        (4, 2, 128, {"softcap": 5.0}),
        (4, 2, 64, {"window": (70, 0)}),
    ):
        lengths = [draw.randrange(1, 600) for _ in range(3)]
        q = [normal(dtype, length, heads, dim, seed=length) for length in lengths]
        k, v = ([normal(dtype, n, heads_kv, dim, seed=s + n) for n in lengths] for s in (1, 2))
        alone = [
            fk.attention(*(x[i][None].transpose(1, 2) for x in (q, k, v)), causal=True, **options)[0].transpose(0, 1)
            for i in range(3)
        ]
        fk.set_num_threads(draw.choice((1, 2, 3)))
        starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        packed = fk.attention_varlen(
            torch.cat(q), torch.cat(k), torch.cat(v), starts, starts, max(lengths), max(lengths), causal=True, **options
        )
        same(packed, torch.cat(alone))
        for size in (16, 64, 256):
            wide = -(-max(lengths) // size)
            tables = torch.tensor(draw.sample(range(3 * wide), 3 * wide), dtype=torch.int32).reshape(3, wide)
            pages = [torch.full((3 * wide, size, heads_kv, dim), float("nan"), dtype=TORCH[dtype]) for _ in "kv"]
            for i, length in enumerate(lengths):
                for j in range(length):
                    pages[0][tables[i, j // size], j % size] = k[i][j]
                    pages[1][tables[i, j // size], j % size] = v[i][j]
            # The last queries of each sequence: one, a few, or many, beside sequences of other numbers of them.
            counts = [draw.choice((1, 2, 7, 17, 40)) for _ in lengths]
            counts = [min(count, length) for count, length in zip(counts, lengths, strict=True)]
            cut = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
            last = torch.cat([x[-count:] for x, count in zip(q, counts, strict=True)])
            own = torch.tensor(lengths, dtype=torch.int32)
            found = fk.attention_paged(
                last, *pages, tables, own, cu_seqlens_q=cut, max_seqlen_q=max(counts), causal=True, **options
            )
            same(found, torch.cat([x[-count:] for x, count in zip(alone, counts, strict=True)]))
            decoded = fk.attention_paged(
                torch.stack([x[-1] for x in q])[:, :, None], *pages, tables, own, causal=True, **options
            )
            same(decoded[:, :, 0], torch.stack([x[-1] for x in alone]))
        i, end = 0, draw.randrange(1, lengths[0] + 1)  # a chunk that ends anywhere
        begin = draw.randrange(end)
        part = fk.attention(
            *(x[None].transpose(1, 2) for x in (q[i][begin:end], k[i][:end], v[i][:end])), causal=True, **options
        )
        same(part[0].transpose(0, 1), alone[i][begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_sequence_do_not_depend_on_the_others(dtype):
    lengths = [90, 7, 210]
    q, k, v, grad = ([normal(dtype, n, 2, 64, seed=s + n) for n in lengths] for s in range(4))

    def gradients(ids: list[int]) -> list[torch.Tensor]:
        starts = torch.tensor([0, *np.cumsum([lengths[i] for i in ids])], dtype=torch.int32)
        inputs = [torch.cat([x[i] for i in ids]).requires_grad_() for x in (q, k, v)]
        most = max(lengths[i] for i in ids)
        out = fkt.attention_varlen(*inputs, starts, starts, most, most, causal=True)
        return list(torch.autograd.grad(out, inputs, torch.cat([grad[i] for i in ids])))

    whole = [part.split(lengths) for part in gradients([0, 1, 2])]
    for i in range(3):
        for together, alone in zip(whole, gradients([i]), strict=True):
            same(together[i], alone)
    turned = [part.split([lengths[2], lengths[0]]) for part in gradients([2, 0])]
    for together, others in zip(whole, turned, strict=True):
        same(together[2], others[0])
        same(together[0], others[1])


def test_rope_alone_and_within_kv_append_have_the_same_bits():
    positions = torch.tensor([0, 5, 977, 131072, 3, 4])
    q, k = normal("float32", 6, 2, 64), normal("float32", 6, 2, 64, seed=1)
    _, turned = fk.rope(q.transpose(0, 1)[None], k.transpose(0, 1)[None], positions)
    pages = [torch.zeros(1, 16, 2, 64) for _ in "kv"]
    fk.kv_append(k, k, *pages, torch.arange(6), rope={"positions": positions})
    same(pages[0][0, :6], turned[0].transpose(0, 1))


def weights(array: np.ndarray | torch.Tensor | None) -> torch.Tensor | None:
    if array is None or isinstance(array, torch.Tensor):
        return array
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor  # NumPy has no bfloat16


def gpt2(model, tokens: list[int], head: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [len(tokens), vocab] of a GPT-2 by the ops of flashkernel.torch, as a trainer computes them.

    head: the output layer's weight in place of the model's.
    """
    hidden = model.heads_q * model.head_dim
    residual = weights(model.wte)[tokens] + weights(model.wpe)[: len(tokens)]
    residual.requires_grad_()
    norm = lambda x, w, b, r=None: fkt.layer_norm(x, weights(w), weights(b), eps=model.eps, residual=r)
    x = norm(residual, model.layers[0].ln_1_weight, model.layers[0].ln_1_bias)
    for i, layer in enumerate(model.layers):
        qkv = fkt.linear(x, weights(layer.attn_weight), weights(layer.attn_bias))
        q, k, v = qkv.reshape(1, len(tokens), 3, model.heads_q, model.head_dim).permute(2, 0, 3, 1, 4)
        x = fkt.attention(q, k, v, causal=True, scale=layer.scale).transpose(1, 2).reshape(len(tokens), hidden)
        x = fkt.linear(x, weights(layer.attn_proj_weight), weights(layer.attn_proj_bias))
        x, residual = norm(x, layer.ln_2_weight, layer.ln_2_bias, residual)
        x = fkt.linear(x, weights(layer.fc_weight), weights(layer.fc_bias), activation=model.activation)
        x = fkt.linear(x, weights(layer.fc_proj_weight), weights(layer.fc_proj_bias))
        after = model.layers[i + 1] if i + 1 < model.num_layers else None
        weight, bias = (after.ln_1_weight, after.ln_1_bias) if after else (model.ln_f_weight, model.ln_f_bias)
        x, residual = norm(x, weight, bias, residual)
    return fkt.linear(x, weights(model.lm_head) if head is None else head)[:, : model.vocab_size]


def llama(model, tokens: list[int]) -> torch.Tensor:
    """The same of a Llama."""
    heads, heads_kv, dim, rows = model.heads_q, model.heads_kv, model.head_dim, len(tokens)
    residual = weights(model.embedding)[tokens].requires_grad_()
    norm = lambda x, w, r=None: fkt.rms_norm(x, weights(w), eps=model.eps, residual=r)
    x = norm(residual, model.layers[0].input_norm)
    for i, layer in enumerate(model.layers):
        qkv = fkt.linear(x, weights(layer.qkv_weight)).reshape(1, rows, heads + 2 * heads_kv, dim).transpose(1, 2)
        q, k, v = qkv.split((heads, heads_kv, heads_kv), 1)
        q, k = fkt.rope(q, k, theta=layer.rope.theta)
        x = fkt.attention(q, k, v, causal=True, scale=model.scale).transpose(1, 2).reshape(rows, heads * dim)
        x, residual = norm(fkt.linear(x, weights(layer.out_weight)), layer.mlp_norm, residual)
        gate, up = fkt.linear(x, weights(layer.mlp.gate_up_weight)).chunk(2, -1)
        x = fkt.linear(fkt.swiglu(gate, up), weights(layer.mlp.down_weight))
        after = model.layers[i + 1].input_norm if i + 1 < model.num_layers else model.norm
        x, residual = norm(x, after, residual)
    return fkt.linear(x, weights(model.lm_head))[:, : model.vocab_size]


def tiny_llama(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=211, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_rollout_score_and_trainer_agree_to_the_bit(family, dtype, device, tmp_path):
    folder = find_model("demo") if family == "gpt2" else tiny_llama(tmp_path)
    model = load_model(folder, device=device, dtype=dtype)
    forward = gpt2 if family == "gpt2" else llama
    draw = random.Random(7)
    prompts = [[draw.randrange(model.vocab_size) for _ in range(n)] for n in (1, 40, 13, 90)]
    prompts.append([*prompts[1], 5, 6])  # begins with pages that the other one has filled
    found: dict[int, tuple[list[int], bytes]] = {}
    for options in ({"page_size": 16, "prefill_chunk": 11}, {"page_size": 64, "prefix_sharing": False, "max_batch": 2}):
        engine = Engine(model, **options)
        sampling = SamplingOptions(temperature=1.0, seed=3, logprobs=0)
        events = list(engine.generate(prompts, max_new_tokens=12, sampling=sampling, stop_tokens=frozenset()))
        for i, prompt in enumerate(prompts):
            mine = [event for event in events if event.sequence == i]
            tokens, rollout = [event.token for event in mine], np.array([e.logprob for e in mine], np.float32)
            assert found.setdefault(i, (tokens, rollout.tobytes())) == (tokens, rollout.tobytes())
            assert engine.score(prompt + tokens)[len(prompt) - 1 :].tobytes() == rollout.tobytes()
            likely = fkt.log_softmax(forward(model, prompt + tokens).float())[len(prompt) - 1 : -1].cpu()
            trained = likely.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert trained.requires_grad
            assert trained.detach().numpy().tobytes() == rollout.tobytes()
            # What GRPO adds to its loss for a policy that has moved: exactly 0 before the first step.
            moved = torch.from_numpy(rollout) - trained
            assert (moved.exp() - moved - 1).eq(0).all()


def test_a_policy_that_has_just_generated_has_no_divergence_from_its_trainer():
    """A loop as GRPO's: roll out, take the ratio of the trainer's probabilities and the rollout's, step, roll out."""
    model = load_model(find_model("demo"), device="cpu")
    policy = weights(model.lm_head).clone().requires_grad_()
    engine, prompt = Engine(model, page_size=16), [1, 2, 3, 4, 5]
    sampling = SamplingOptions(temperature=1.0, seed=1, logprobs=0)
    for step in range(3):
        model.lm_head = policy.detach().numpy().copy()
        events = list(engine.generate([prompt], n=4, max_new_tokens=6, sampling=sampling, stop_tokens=frozenset()))
        loss = 0.0
        for i in range(4):
            mine = [event for event in events if event.sequence == i]
            tokens, rollout = [e.token for e in mine], torch.tensor([e.logprob for e in mine], dtype=torch.float32)
            logits = gpt2(model, prompt + tokens, policy)[len(prompt) - 1 : -1]
            ratio = fkt.log_softmax(logits).gather(1, torch.tensor(tokens)[:, None])[:, 0] - rollout
            assert torch.equal(ratio, torch.zeros_like(ratio)), step
            loss = loss - (ratio.exp() * (i + 1.0)).sum()
        (gradient,) = torch.autograd.grad(loss, policy)
        assert gradient.abs().max() > 0
        policy = (policy - 0.5 * gradient).detach().requires_grad_()


def test_the_mode_is_told_and_ends():
    x, weight = normal("float32", 1, 64), normal("float32", 8, 64, seed=1)
    inside = fk.explain("linear", x, weight)
    assert inside.invariant and inside.arithmetic and inside.arithmetic in str(inside)
    assert "invariant mode" in str(inside)
    assert fk.explain("linear", x.repeat(50, 1), weight).arithmetic == inside.arithmetic
    with fk.invariant():
        assert fk.is_invariant()
    assert fk.is_invariant()  # of the fixture's block


def in_another_process(code: str, value: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "FLASHKERNEL_INVARIANT": value}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


def test_the_environment_turns_it_on():
    code = "import flashkernel as fk, numpy as np; x = np.ones((2, 8), np.float32); fk.linear(x, x); "
    code += "print(fk.is_invariant())"
    assert in_another_process(code, "1").stdout.strip() == "True"
    assert in_another_process(code, "0").stdout.strip() == "False"
    assert 'FLASHKERNEL_INVARIANT: it is "yes"; needs 1' in in_another_process(code, "yes").stderr


def test_a_kernel_of_another_arithmetic_is_refused():
    x, weight = normal("float32", 2, 64), normal("float32", 8, 64, seed=1)
    own = fk.explain("linear", x, weight).arithmetic
    other = next(row for row in fk.kernels() if row.op == "linear" and row.device == "cpu" and row.arithmetic != own)
    others = [row.id for row in fk.kernels() if row.op == "linear" and row.arithmetic == other.arithmetic]
    with fk.force(",".join(others)), pytest.raises(NotImplementedError, match="in the invariant mode"):
        fk.linear(x, weight)
