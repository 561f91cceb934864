"""flashkernel.integrations.transformers: "fkernel" attention equals eager, padding included; `accelerated` and its
undoing.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import flashkernel as fk
import flashkernel.integrations.transformers as integration
from flashkernel.integrations import swap
from flashkernel.integrations.attention import MINIMUM
from flashkernel.integrations.transformers import accelerated

LLAMA: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
GPT2: dict[str, Any] = dict(
    vocab_size=97,
    n_positions=128,
    n_embd=48,
    n_layer=2,
    n_head=3,
    bos_token_id=0,
    eos_token_id=0,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
)


def gpt2(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, **changes})).eval()


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **changes})).eval()


def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(
        transformers.BertConfig(
            vocab_size=97,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=64,
            max_position_embeddings=64,
        )
    ).eval()


def gemma2() -> Any:
    """Softcap, a sliding window in every other layer, and a query scale of its own."""
    torch.manual_seed(0)
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            max_position_embeddings=64,
            sliding_window=4,
            attn_logit_softcapping=2.0,
            query_pre_attn_scalar=7,
        )
    ).eval()


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "gemma2": gemma2}
IDS = torch.randint(1, 97, (3, 11), generator=torch.Generator().manual_seed(1))
LENGTHS = [11, 4, 7]


def padded(side: str) -> Any:
    at = torch.arange(11)
    return torch.stack([(at < n if side == "right" else at >= 11 - n).long() for n in LENGTHS])


def hidden(model: Any, implementation: str, **inputs: Any) -> Any:
    model.set_attn_implementation(implementation)
    result = model(**inputs)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def calls(op: str) -> int:
    return sum(kernel.calls for kernel in fk.kernels() if kernel.op == op)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_attention_equals_eager(name: str, padding: str | None) -> None:
    model = MODELS[name]()
    inputs: dict[str, Any] = {"input_ids": IDS}
    visible = torch.ones_like(IDS).bool()
    if padding:
        inputs["attention_mask"] = padded(padding)
        visible = inputs["attention_mask"].bool()
        if name != "bert":
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = hidden(model, "eager", **inputs)
        before = calls("attention_fwd")
        got = hidden(model, integration.NAME, **inputs)
        assert calls("attention_fwd") == before + 2  # one per layer
    torch.testing.assert_close(got[visible], expected[visible], rtol=1e-5, atol=1e-5)
    assert got.isfinite().all()


@pytest.mark.parametrize("make", [gpt2, llama, gemma2])
@pytest.mark.parametrize("padding", ["left", None])
def test_generate_equals_eager(make: Any, padding: str | None) -> None:
    """Prefill and decode over a cache, with left padding as generation needs it."""
    model = make()
    for parameter in model.parameters():
        parameter.data.mul_(3)  # spread the logits, so that greedy choices vary
    inputs = {"input_ids": IDS, "attention_mask": padded("left") if padding else torch.ones_like(IDS)}
    options: dict[str, Any] = dict(max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=None)
    model.set_attn_implementation("eager")
    expected = model.generate(**inputs, **options)
    model.set_attn_implementation(integration.NAME)
    assert torch.equal(model.generate(**inputs, **options), expected)
    assert torch.equal(
        model.generate(**inputs, cache_implementation="static", disable_compile=True, **options), expected
    )


def test_chunked_prefill_equals_eager() -> None:
    """New tokens after a cache of earlier ones: more keys than queries, causal."""
    model = llama()
    outputs = {}
    for implementation in ("eager", integration.NAME):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            first = model(input_ids=IDS[:, :6], use_cache=True)
            outputs[implementation] = model(input_ids=IDS[:, 6:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(outputs[integration.NAME], outputs["eager"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_gradients_equal_eager(make: Any) -> None:
    model = make().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    mask = padded("right")
    grads = {}
    for implementation in ("eager", integration.NAME):
        model.zero_grad()
        out = hidden(model, implementation, input_ids=IDS, attention_mask=mask)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        (out * cotangent * mask[..., None]).sum().backward()
        grads[implementation] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(grads["eager"]) == len(grads[integration.NAME]) > 10
    for a, b in zip(grads[integration.NAME], grads["eager"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, float(b.abs().max())))


def test_float_masks_are_taken_as_they_are() -> None:
    """A 4-D additive mask of the caller, with the dtype's lowest value in place of -inf."""
    model = llama()
    mask = torch.full((3, 1, 11, 11), torch.finfo(torch.float32).min).triu(1)
    mask[:, :, :, 2] = torch.finfo(torch.float32).min
    mask[:, :, 2, 2] = 0
    with torch.no_grad():
        expected = hidden(model, "eager", input_ids=IDS, attention_mask=mask)
        torch.testing.assert_close(
            hidden(model, integration.NAME, input_ids=IDS, attention_mask=mask), expected, rtol=1e-5, atol=1e-5
        )


def test_what_is_not_supported_is_refused() -> None:
    model = gpt2(attn_pdrop=0.1).train()
    model.set_attn_implementation(integration.NAME)
    with pytest.raises(NotImplementedError, match="dropout"):
        model(input_ids=IDS)
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="eager"):
        integration.attention_forward(torch.nn.Identity(), q, q, q, None, output_attentions=True)


def test_sinks_reach_the_kernel() -> None:
    q, sinks = torch.randn(1, 2, 3, 8), torch.tensor([0.5, -1.0])
    out, _ = integration.attention_forward(torch.nn.Identity(), q, q, q, None, is_causal=True, s_aux=sinks)
    expected = fk.attention(q, q, q, causal=True, sinks=sinks).transpose(1, 2)
    torch.testing.assert_close(out, expected)


# --- accelerated


def classes(model: Any) -> list[type]:
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize(
    ("make", "swapped"),
    [
        (gpt2, {"GPT2MLP": 2, "LayerNorm": 5, "attention": 2}),
        (llama, {"LlamaMLP": 2, "LlamaRMSNorm": 5, "attention": 2, "apply_rotary_pos_emb": 2}),
        (
            lambda: llama(attention_bias=True, mlp_bias=True),
            {"LlamaMLP": 2, "LlamaRMSNorm": 5, "attention": 2, "apply_rotary_pos_emb": 2},
        ),
    ],
)
def test_accelerated_equals_stock_and_is_undone(make: Any, swapped: dict[str, int]) -> None:
    model = make()
    stock_classes, implementation = classes(model), model.config._attn_implementation
    inputs = {"input_ids": IDS, "attention_mask": padded("left")}
    visible = inputs["attention_mask"].bool()
    ops = ["attention_fwd", "linear", "norm"] + (["swiglu", "rope"] if "LlamaMLP" in swapped else [])
    with torch.no_grad():
        expected = model(**inputs).logits
        before = {op: calls(op) for op in ops}
        with accelerated(model) as counts:
            assert counts == swapped
            got = model(**inputs).logits
        after = {op: calls(op) for op in ops}
        again = model(**inputs).logits
    assert all(after[op] > before[op] for op in ops)
    assert {op: calls(op) for op in ops} == after  # the stock model runs none of ours
    torch.testing.assert_close(got[visible], expected[visible], rtol=1e-5, atol=1e-5)
    assert torch.equal(again, expected)
    assert classes(model) == stock_classes and model.config._attn_implementation == implementation


@pytest.mark.parametrize("make", [gpt2, llama])
def test_everything_is_restored_after_an_exception(make: Any) -> None:
    from transformers.models.llama import modeling_llama

    rope = modeling_llama.apply_rotary_pos_emb
    model = make()
    stock_classes = classes(model)
    with pytest.raises(KeyError), accelerated(model), accelerated(model):  # nested, too
        assert modeling_llama.apply_rotary_pos_emb is rope  # other models of the process keep theirs
        raise KeyError
    assert classes(model) == stock_classes and modeling_llama.apply_rotary_pos_emb is rope
    assert model.config._attn_implementation != integration.NAME


@pytest.mark.parametrize("make", [gpt2, llama])
def test_training_accelerated_equals_stock(make: Any) -> None:
    """Three steps of SGD: losses and weights stay together."""
    losses, weights = {}, {}
    for name in ("stock", "fused"):
        model = make().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(model: Any = model, optimizer: Any = optimizer) -> float:
            optimizer.zero_grad()
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        if name == "fused":
            with accelerated(model):
                losses[name] = [step() for _ in range(3)]
        else:
            losses[name] = [step() for _ in range(3)]
        weights[name] = [p.detach().clone() for p in model.parameters()]
    assert losses["stock"][2] < losses["stock"][0] - 0.01
    torch.testing.assert_close(losses["fused"], losses["stock"], rtol=1e-5, atol=1e-5)
    for a, b in zip(weights["fused"], weights["stock"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_accelerated_keeps_unknown_activations_and_refuses_unknown_models() -> None:
    model = gpt2(activation_function="relu")
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        with accelerated(model) as counts:
            assert "GPT2MLP" not in counts
            torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="bert"), accelerated(bert()):
        pass


def test_accelerated_without_attention() -> None:
    model = llama()
    with accelerated(model, attention=False) as counts:
        assert "attention" not in counts and model.config._attn_implementation != integration.NAME


def test_rope_both_layouts() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    angles = torch.randn(2, 5, 4).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    for got, expected in zip(swap.rotate(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(got, expected)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    for got, expected in zip(
        swap.rotate(q, k, cos, sin, 2),
        apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2),
        strict=False,
    ):
        torch.testing.assert_close(got, expected)


def test_the_lowest_release() -> None:
    """pyproject.toml declares what the import checks, and an older release is refused by a sentence."""
    text = (pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text()
    declared = set(re.findall(r'"transformers>=([0-9.]+)"', text))
    assert declared == {MINIMUM}
    code = "import transformers; transformers.__version__ = '4.57.6'; import flashkernel.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = f"ImportError: flashkernel.integrations.transformers: transformers 4.57.6; {MINIMUM} or later is needed"
    assert said in done.stderr
