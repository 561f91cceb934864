"""attn_implementation="fkernel" over model types of Transformers: what "eager" computes, or a typed refusal.

What a query may see must come from the mask alone: decoders stay causal, encoders do not become so, and windows,
chunks, packed sequences, static caches and masks of the caller's own are kept.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import flashkernel.integrations.transformers as integration
from flashkernel.integrations import attention
from flashkernel.integrations.causal_mask import CausalMask
from test_transformers import IDS, calls, llama
from tiny_models import inputs_of, results, tiny_config, tiny_model

DECODERS = [
    *(
        "gpt2",
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen2_moe",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3_text",
        "phi",
    ),
    *("phi3", "gpt_neox", "gptj", "codegen", "opt", "biogpt", "starcoder2", "stablelm", "olmo2", "cohere", "cohere2"),
    *("granite", "nemotron", "gpt_oss", "llama4_text", "smollm3", "persimmon", "gpt_bigcode", "glm4", "exaone4"),
    *("modernbert-decoder", "diffllama", "doge", "ctrl", "vaultgemma", "minimax", "deepseek_v2", "deepseek_v3"),
]
ENCODERS = [
    *("bert", "roberta", "distilbert", "albert", "electra", "splinter", "esm", "modernbert", "camembert", "layoutlm"),
    *(
        "mobilebert",
        "nomic_bert",
        "bert-generation",
        "dpr",
        "markuplm",
        "roc_bert",
        "eurobert",
        "openai_privacy_filter",
    ),
]
BOTH = [
    *("bart", "mbart", "marian", "m2m_100", "pegasus", "t5", "mt5", "umt5", "switch_transformers", "longt5", "t5gemma"),
    *("blenderbot", "plbart", "nllb-moe", "bigbird_pegasus"),
]
OTHERS = [
    *("whisper", "wav2vec2", "hubert", "unispeech", "sew", "wav2vec2-conformer", "data2vec-audio"),
    *("vit", "deit", "dinov2", "dinov3_vit", "beit", "ijepa", "videomae", "siglip_vision_model", "pixtral"),
    *("clip", "siglip", "altclip", "chinese_clip", "owlvit", "aimv2"),
]
# They compute attention by code of their own; some have a table of their own implementations, without ours.
UNUSED = [
    *("bloom", "falcon", "gpt_neo", "mpt", "mpnet", "xglm", "openai-gpt", "gpt_neox_japanese", "megatron-bert"),
    *("deberta-v2", "funnel", "canine", "squeezebert", "imagegpt", "flava", "big_bird"),
]
KNOWN = set(transformers.CONFIG_MAPPING)  # older releases have fewer


def known(names: list[str]) -> list[str]:
    return [name for name in names if name in KNOWN]


def test_enough_types_are_swept() -> None:
    assert len(known(DECODERS + ENCODERS + BOTH + OTHERS)) >= 40


@pytest.fixture(autouse=True)
def quiet() -> Any:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def close(got: Any, expected: Any, mask: Any = None) -> None:
    for a, b in zip(results(got), results(expected), strict=True):
        if mask is not None and a.shape[: mask.dim()] == mask.shape:
            a, b = a[mask.bool()], b[mask.bool()]
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("model_type", known(DECODERS + ENCODERS + BOTH + OTHERS))
def test_every_type_equals_eager(model_type: str) -> None:
    eager, ours = (tiny_model(model_type, name) for name in ("eager", integration.NAME))
    ran = 0
    for padding in (False, True):
        inputs = inputs_of(eager, padding)
        if inputs is None:
            continue
        with torch.no_grad():
            expected = eager(**inputs)
            before = calls("attention_fwd")
            close(ours(**inputs), expected, inputs.get("attention_mask"))
            assert calls("attention_fwd") > before
        ran += 1
    assert ran


@pytest.mark.parametrize("model_type", known(DECODERS + ENCODERS))
def test_who_sees_what(model_type: str) -> None:
    """Changing the last token changes earlier outputs where eager's change, and nowhere else."""
    outputs = {}
    ids = inputs_of(tiny_model(model_type, "eager"), False)["input_ids"]  # type: ignore[index]
    for name in ("eager", integration.NAME):
        model = tiny_model(model_type, name)
        changed = ids.clone()
        changed[:, -1] = (changed[:, -1] + 1) % 90
        with torch.no_grad():
            a, b = (results(model(input_ids=x))[0] for x in (ids, changed))
        if a.dim() == 3:  # some give a vector for the whole text
            outputs[name] = (a - b).abs().amax(-1)[:, :-1] > 1e-5
            print(model_type, name, (a - b).abs().amax(-1))
    if outputs:
        assert bool(outputs[integration.NAME].any()) == bool(outputs["eager"].any()) == (model_type not in DECODERS)


def test_refusals_are_typed() -> None:
    """Models whose scores are changed by something that no kernel here reads."""
    for model_type, name in (("hy_v4", "indices"), ("inkling2_text", "sinks")):
        if model_type in KNOWN:
            model = tiny_model(model_type, integration.NAME)
            with pytest.raises(NotImplementedError, match=f"passes {name}"), torch.no_grad():
                model(**inputs_of(model, False))


@pytest.mark.parametrize("model_type", known(UNUSED))
def test_models_that_never_ask_say_so_once(model_type: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(attention, "_told", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models = [tiny_model(model_type, integration.NAME) for _ in range(2)]
    told = [str(w.message) for w in caught if "runs without FlashKernel" in str(w.message)]
    assert told and len(told) == len(set(told)) and type(models[0]).__name__ in " ".join(told)
    assert models[0].config._attn_implementation in ("eager", "sdpa")
    inputs = inputs_of(models[0], False)
    with torch.no_grad():
        close(models[0](**inputs), tiny_model(model_type, models[0].config._attn_implementation)(**inputs))


def test_models_that_ask_say_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny_model("llama", integration.NAME)


# --- Caches, packing, masks of the caller's own


def causal_models() -> dict[str, dict[str, Any]]:
    return {
        "gpt2": {},
        "llama": {},
        "mistral": {"sliding_window": 4},
        "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        "gemma2": {"sliding_window": 4},
        "gemma3_text": {"sliding_window": 4},
        "gpt_oss": {"sliding_window": 4},
        "llama4_text": {},
    }


def language_model(model_type: str, implementation: str) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(tiny_config(model_type, **causal_models()[model_type]))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(2)
    return model


PAIRS = [name for name in causal_models() if name in KNOWN]
CACHE = "cache" if "cache" in llama().forward.__doc__ else "past_key_values"


@pytest.mark.parametrize("model_type", PAIRS)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_prefill_chunks_and_decode(model_type: str, static: bool, padding: bool) -> None:
    """A prompt in two chunks, then single tokens, longer than the window, over a growing and a fixed cache."""
    mask = torch.ones(3, 11, dtype=torch.long)
    if padding:
        mask[1, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits: dict[str, list[Any]] = {}
    for name in ("eager", integration.NAME):
        model = language_model(model_type, name)
        cache = (
            transformers.StaticCache(config=model.config, max_cache_len=16)
            if static
            else transformers.DynamicCache(config=model.config)
        )
        logits[name] = []
        for begin, end in ((0, 5), (5, 8), (8, 9), (9, 10), (10, 11)):
            chunk = dict(input_ids=IDS[:, begin:end] % 90, attention_mask=mask[:, :end], use_cache=True)
            if padding:
                chunk["position_ids"] = positions[:, begin:end]
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out = model(past_key_values=cache, **chunk)
            logits[name].append(out.logits[mask[:, begin:end].bool()])
    for got, expected in zip(logits[integration.NAME], logits["eager"], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", PAIRS)
@pytest.mark.parametrize("static", [False, True])
def test_generate(model_type: str, static: bool) -> None:
    ids, mask = IDS % 90, torch.ones_like(IDS)
    ids[1, :4], mask[1, :4] = 0, 0
    options: dict[str, Any] = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    if static:
        options.update(cache_implementation="static", disable_compile=True)
    outputs = [
        language_model(model_type, name).generate(ids, attention_mask=mask, **options)
        for name in ("eager", integration.NAME)
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("model_type", PAIRS)
def test_packed_sequences(model_type: str) -> None:
    """Positions that begin again: each sequence sees itself alone."""
    ids = IDS[:1] % 90
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        expected, got = (
            language_model(model_type, name)(input_ids=ids, position_ids=positions, use_cache=False).logits
            for name in ("eager", integration.NAME)
        )
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        if model_type == "llama":  # not every model keeps packed sequences apart, in eager either
            alone = language_model(model_type, integration.NAME)(input_ids=ids[:, 5:], use_cache=False).logits
            torch.testing.assert_close(got[:, 5:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_the_callers_own(model_type: str, kind: str) -> None:
    """4-D masks, not causal: a prefix that sees itself."""
    seen = torch.ones(11, 11, dtype=torch.bool).tril()
    seen[:4, :4] = True
    seen[7:, 2] = False
    mask = torch.zeros(11, 11).masked_fill_(~seen, torch.finfo(torch.float32).min).expand(3, 1, 11, 11)
    with torch.no_grad():
        expected = language_model(model_type, "eager")(input_ids=IDS % 90, attention_mask=mask).logits
        given = seen.expand(3, 1, 11, 11) if kind == "bool" else mask
        got = language_model(model_type, integration.NAME)(input_ids=IDS % 90, attention_mask=given).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_decoder_made_bidirectional() -> None:
    """config.is_causal=False: attention modules still say is_causal=True, and nobody makes a mask."""
    outputs = []
    for name in ("eager", integration.NAME):
        config = copy.deepcopy(tiny_config("llama"))
        config.is_causal = False
        torch.manual_seed(0)
        model = transformers.LlamaModel._from_config(config, attn_implementation=name).eval()
        with torch.no_grad():
            outputs.append(model(input_ids=IDS).last_hidden_state)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


# --- attention_forward by itself


class Module(torch.nn.Module):
    """An attention module that runs under a name with, or without, a mask function."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__()
        self.config = transformers.LlamaConfig()
        self.config._attn_implementation_internal = name
        for attribute, value in attributes.items():
            setattr(self, attribute, value)


Q = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(4))


def sdpa(mask: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(Q, Q, Q, attn_mask=mask).transpose(1, 2)


def lower() -> Any:
    return torch.ones(6, 6, dtype=torch.bool).tril()


def test_no_mask_means_that_all_is_seen() -> None:
    for flag in ({}, {"is_causal": True}, {"is_causal": False}):
        out, _ = integration.attention_forward(Module(integration.NAME, **flag), Q, Q, Q, None)
        torch.testing.assert_close(out, sdpa(None))


def test_flags_that_contradict_are_refused() -> None:
    module = Module(integration.NAME)
    mask = integration.attention_mask(batch_size=1, q_length=6, kv_length=6)
    assert isinstance(mask, CausalMask)
    with pytest.raises(ValueError, match="is_causal=False beside a causal mask"):
        integration.attention_forward(module, Q, Q, Q, mask, is_causal=False)
    with pytest.raises(ValueError, match="is_causal=True without a mask"):
        integration.attention_forward(module, Q, Q, Q, None, is_causal=True)
    with pytest.raises(ValueError, match="sliding_window=3 over 6 keys without a mask"):
        integration.attention_forward(module, Q, Q, Q, None, sliding_window=3)
    with pytest.raises(ValueError, match=r"shape \(1, 6\)"):
        integration.attention_forward(module, Q, Q, Q, torch.ones(1, 6))
    for name in ("indices", "block_indices", "sinks"):
        with pytest.raises(NotImplementedError, match=name):
            integration.attention_forward(module, Q, Q, Q, None, **{name: Q})


def test_a_name_without_a_mask_function_goes_by_flags() -> None:
    forward = integration.attention_forward
    window = lower() & ~torch.ones(6, 6, dtype=torch.bool).tril(-3)
    for module, options, mask in (
        (Module("mine", is_causal=True), {}, lower()),
        (Module("mine", is_causal=False), {}, None),
        (Module("mine", is_causal=True), {"is_causal": False}, None),
        (Module("mine"), {"is_causal": True}, lower()),
        (Module("mine", is_causal=True), {"sliding_window": 3}, window),
        (Module("mine", is_causal=True), {"sliding_window": 6}, lower()),
    ):
        torch.testing.assert_close(forward(module, Q, Q, Q, None, **options)[0], sdpa(mask))
    last = forward(Module("mine", is_causal=True), Q[:, :, -1:], Q, Q, None, sliding_window=3)[0]
    torch.testing.assert_close(last, sdpa(window)[:, -1:])
    with pytest.raises(ValueError, match="does not set is_causal"):
        forward(Module("mine"), Q, Q, Q, None)
    with pytest.raises(ValueError, match="4 causal queries and 6 keys"):
        forward(Module("mine", is_causal=True), Q[:, :, :4], Q, Q, None)
    with pytest.raises(ValueError, match="not causal"):
        forward(Module("mine", is_causal=False), Q, Q, Q, None, sliding_window=3)


# --- CausalMask


def fresh() -> Any:
    mask = integration.attention_mask(batch_size=1, q_length=6, kv_length=6)
    assert isinstance(mask, CausalMask) and mask.shape == (1, 1, 6, 6) and mask.dtype == torch.float32
    return mask


def written_out() -> Any:
    return torch.zeros(1, 1, 6, 6).masked_fill(~lower(), float("-inf"))


def attend(mask: Any) -> Any:
    return integration.attention_forward(Module(integration.NAME), Q, Q, Q, mask)[0]


@pytest.mark.parametrize(
    "use",
    [
        *(lambda m: m[:, :, 2:, :4], lambda m: m + 1, lambda m: 1 + m, lambda m: m.to(torch.float64), torch.clone),
        *(lambda m: m == 0, lambda m: m.expand(3, -1, -1, -1), lambda m: torch.cat([m, m]), copy.deepcopy),
        *(lambda m: m.masked_fill(m < 0, -5.0), lambda m: m.contiguous(), lambda m: torch.where(m < 0, m, 1.0)),
    ],
)
def test_a_causal_mask_has_the_numbers_when_asked(use: Any) -> None:
    torch.testing.assert_close(use(fresh()), use(written_out()), rtol=0, atol=0)


def test_a_causal_mask_that_is_passed_on_is_not_written() -> None:
    mask = fresh()
    torch.testing.assert_close(attend(mask), sdpa(lower()))
    detached = mask.detach()
    torch.testing.assert_close(attend(detached), sdpa(lower()))
    assert mask._whole is None and type(detached) is CausalMask and detached._whole is None


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_a_causal_mask_that_is_changed_in_place(inference: bool, view: bool) -> None:
    with torch.inference_mode(inference):
        mask, expected = fresh(), lower()
        if view:
            mask[0, 0][:, 1].fill_(0.0)
        else:
            mask[:, :, :, 1] = 0.0
        expected[:, 1] = True
        torch.testing.assert_close(attend(mask), sdpa(expected))
        mask[:, :, :, 1] = float("-inf")
        expected[:, 1] = False
        torch.testing.assert_close(attend(mask), sdpa(expected))


def test_plain_decoders_write_no_mask(monkeypatch: Any) -> None:
    def whole(self: Any) -> Any:
        raise AssertionError("written")

    monkeypatch.setattr(CausalMask, "whole", whole)
    for model_type in known(["gpt2", "llama", "qwen3", "opt", "bart"]):
        model = tiny_model(model_type, integration.NAME)
        with torch.no_grad():
            model(**inputs_of(model, False))
