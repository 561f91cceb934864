"""DeepSeek's latent attention in the engine: each way of it gives the same, over a cache of latent rows alone.

That logits and tokens equal stock Transformers' is in test_model_families.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import flashkernel as fk
from flashkernel import reference
from flashkernel.generate import (
    Engine,
    PromptLookup,
    SamplingOptions,
    UnsupportedModelError,
    latent_attention,
    load_model,
)
from flashkernel.generate.arrays import HostArrays, TorchArrays
from flashkernel.generate.checkpoint import MemoryCheckpoint
from flashkernel.generate.fixed_step import TokenRow
from flashkernel.generate.model import HostBatch, PagedBatch, build_model
from flashkernel.generate.verify import Verifier
from flashkernel.integrations.transformers import accelerate
from model_families import family_model
from test_model_families import IDS, LEFT, NEW, PROMPTS, logits_of, stock_tokens, tokens_of

CASES = ["deepseek-v2-lite", "deepseek-v3"]
KINDS = {"numpy": HostArrays, "torch": lambda dtype: TorchArrays(dtype, "cpu")}


def engine_model(case: str, kind: str = "numpy", dtype: str = "float32") -> Any:
    stock = family_model(case)
    tensors = {name: tensor.numpy() for name, tensor in stock.state_dict().items()}
    return build_model(MemoryCheckpoint(stock.config.to_dict(), tensors), KINDS[kind](dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_absorbed_and_expanded_are_the_same(case: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks, the cache written by one way and read by the other, and a prompt token by token."""
    model = engine_model(case, kind)
    found, calls = {}, []
    for op in ("attention_mla_decode", "attention_varlen"):
        run = getattr(fk, op)
        monkeypatch.setattr(fk, op, lambda *a, op=op, run=run, **o: (calls.append(op), run(*a, **o))[1])
    for few in (0, 16, 100):  # chunks are of 17, 17 and 6 tokens
        monkeypatch.setattr(latent_attention, "FEW", few)
        calls.clear()
        found[few] = logits_of(model, PROMPTS[1])
        layers = {few: calls.count("attention_mla_decode"), "varlen": calls.count("attention_varlen")}
        assert layers == {few: 3 * {0: 0, 16: 1, 100: 3}[few], "varlen": 3 * {0: 3, 16: 2, 100: 0}[few]}
    for few in (16, 100):
        np.testing.assert_allclose(found[few], found[0], rtol=0, atol=3e-5 * np.abs(found[0]).max())
    decoded = Engine(model, page_size=16, prefill_chunk=1).score([*PROMPTS[1], 0])
    np.testing.assert_allclose(decoded, Engine(model, page_size=16).score([*PROMPTS[1], 0]), rtol=0, atol=3e-4)


@pytest.mark.parametrize("few", [0, 100], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_close_to_float32_as_eagers(kind: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the median: where rounding sends a token to another expert, all of its logits are others, in eager too."""
    monkeypatch.setattr(latent_attention, "FEW", few)
    stock = family_model("deepseek-v3").to(torch.bfloat16)
    with torch.no_grad():
        low = stock(IDS[1:2]).logits[0].float().numpy()
        exact = family_model("deepseek-v3").to(torch.bfloat16).float()(IDS[1:2]).logits[0].numpy()
    tensors = {name: tensor.float().numpy() for name, tensor in stock.state_dict().items()}
    model = build_model(MemoryCheckpoint(stock.config.to_dict(), tensors), KINDS[kind]("bfloat16"))
    ours = np.abs(logits_of(model, PROMPTS[1]) - exact)
    assert 0 < np.median(ours) <= np.median(np.abs(low - exact))


def test_the_cache_holds_latent_rows_alone() -> None:
    model = engine_model("deepseek-v2-lite")
    engine = Engine(model, page_size=16)
    tokens_of(engine, PROMPTS[:1])
    pool = engine._scheduler.pool
    assert pool.k_pages(0).shape[1:] == (16, 1, 48) and pool.v_pages(0).shape[1:] == (16, 1, 1)
    with pytest.raises(UnsupportedModelError, match="kv_dtype='int8' with model_type='deepseek_v2'"):
        Engine(model, kv_dtype="int8")


def test_the_server_counts_pages_of_latent_rows() -> None:
    pages_of = pytest.importorskip("flashkernel.serve.command", exc_type=ImportError).pages_of
    model = engine_model("deepseek-v2-lite")
    assert pages_of(model, 64, 16, 1, None, 1e9) == 4
    assert pages_of(model, 16, 16, 99, None, 2 * 3 * 16 * 49 * 4 + 9) == 2  # two pages of 49 columns in 3 layers
    # 40 elements, a scale and 8 columns in bfloat16, and values of one column in 16 bits
    assert pages_of(model, 16, 16, 99, "float8_e4m3fn", 2 * 3 * 16 * (60 + 2) + 9) == 2


def rounded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache in float32 gets the numbers that one in 8 bits holds."""
    append = fk.kv_append

    def rounding(key: Any, latent: Any, k_pages: Any, v_pages: Any, slots: Any, **options: Any) -> None:
        append(key, latent, k_pages, v_pages, slots, **options)
        rank = latent.shape[2]
        for slot in np.asarray(slots).tolist():
            at = divmod(slot, v_pages.shape[1])
            row = np.zeros((1, 1, rank + 4 * -(-rank // 128) + 2 * k_pages.shape[3]), np.uint8)
            row = reference.latent_append(v_pages[at], k_pages[at], row, np.array([0]))
            numbers = reference.latent_numbers(row, rank + k_pages.shape[3], rank)[0]
            v_pages[at], k_pages[at] = numbers[:, :rank], numbers[:, rank:]

    monkeypatch.setattr(fk, "kv_append", rounding)


@pytest.mark.parametrize("few", [0, 100], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("case", CASES)
def test_a_cache_in_8_bits_holds_rounded_rows(case: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and scores are those of a model whose cache has the same numbers in float32, and near the model's own."""
    monkeypatch.setattr(latent_attention, "FEW", few)
    for kind in KINDS:
        model, found = engine_model(case, kind), {}
        for kv_dtype in (None, "fp8"):
            engine = Engine(model, page_size=16, kv_dtype=kv_dtype)
            found[kv_dtype] = tokens_of(engine, PROMPTS), engine.score([*PROMPTS[1], 0])
        pool = engine._scheduler.pool
        assert pool.k_pages(0).shape[1:] == (16, 1, 30) and pool.dtype == "float16"  # 60 bytes
        exact, ours = (np.asarray(found[kv_dtype][1]) for kv_dtype in (None, "fp8"))
        # Random weights make little of what is left: an element's error is up to 6 %, and scores spread by 1.7.
        assert 0 < np.median(np.abs(ours - exact)) < 0.1 * exact.std()
        if kind != "numpy":
            continue
        with monkeypatch.context() as patch:
            rounded_rows(patch)
            engine = Engine(model, page_size=16)
            expected = tokens_of(engine, PROMPTS), engine.score([*PROMPTS[1], 0])
        assert found["fp8"][0] == expected[0]
        np.testing.assert_allclose(ours, expected[1], rtol=0, atol=3e-4)


@pytest.mark.parametrize("case", CASES)
def test_speculation_preemption_and_waiting_change_nothing(case: str) -> None:
    model = engine_model(case)
    expected = stock_tokens(family_model(case))
    for options in (dict(speculation=PromptLookup(tokens=5)), dict(num_pages=5), dict(max_batch=2, steps=3)):
        engine = Engine(model, page_size=16, prefill_chunk=17, **options)
        assert tokens_of(engine, PROMPTS) == expected


def test_common_pages_are_read_by_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step over latent rows has no second form, which would be captured for nothing."""
    monkeypatch.setattr("flashkernel.generate.decode.WORTH_SHARING_BYTES", {False: 0, True: 0})
    engine = Engine(engine_model("deepseek-v3"), page_size=16)
    alone = tokens_of(engine, PROMPTS[1:2])
    assert tokens_of(engine, PROMPTS[1:2] * 3) == alone * 3
    steps = engine._scheduler.decoder._steps
    assert steps and not any(cascade for *_, cascade in steps)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_verification_gives_the_logits_of_single_steps(fixed: bool) -> None:
    """Drafts of several lengths; `fixed` is the form that a CUDA graph is made of."""
    model = engine_model("deepseek-v3", "torch")
    scheduler = Engine(model, page_size=16)._make(16, 64, speculation=None)
    whole = [logits_of(model, ids) for ids in PROMPTS]
    rows, expected = [], []
    for ids, logits, new in zip(PROMPTS, whole, (2, 4, 1, 3), strict=True):
        known = len(ids) - new
        handle = scheduler.cache.create()
        slots = scheduler.cache.append(handle, len(ids))
        if known > 0:
            fill(model, scheduler.pool, ids[:known], slots[:known], scheduler.cache.block_table([handle])[0])
        rows.append(TokenRow(ids[known:], known, slots[known:], scheduler.cache.block_table([handle])[0][0]))
        expected.append(logits[known:])
    got = Verifier(model, scheduler.pool, rows=5, width=4, fixed=fixed).run(rows)
    want = np.concatenate(expected)
    np.testing.assert_allclose(model.arrays.to_float32(got), want, rtol=0, atol=3e-5 * np.abs(want).max())


def fill(model: Any, pool: Any, ids: list[int], slots: Any, table: Any) -> None:
    arrays, n = model.arrays, len(ids)
    host = HostBatch(np.array([0, n]), table, np.array([n]))
    model.forward(
        PagedBatch(
            arrays.index(ids, "int64"), arrays.index(np.arange(n)), arrays.index(slots, "int64"),
            arrays.index([0, n]), n, arrays.index(table), arrays.index([n]), None, host,
        ),
        pool,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_invariant_mode_gives_the_same_bits(kind: str) -> None:
    """Batches, chunks, kept prefixes and single steps; `score` gives the log-probabilities of generation."""
    model = engine_model("deepseek-v3", kind)
    with fk.invariant():
        rollouts = []
        for options in (dict(page_size=16, prefill_chunk=17), dict(page_size=32, prefill_chunk=5, max_batch=3)):
            engine = Engine(model, **options)
            found: list[list[tuple[int, float]]] = [[] for _ in PROMPTS]
            sampling = SamplingOptions(logprobs=0)
            for event in engine.generate(PROMPTS, max_new_tokens=6, sampling=sampling, stop_tokens=frozenset()):
                found[event.sequence].append((event.token, event.logprob))
            rollouts.append(found)
        assert rollouts[0] == rollouts[1]
        for ids, found_row in zip(PROMPTS, rollouts[0], strict=True):
            tokens, likely = zip(*found_row, strict=True)
            scores = Engine(model, page_size=16).score([*ids, *tokens])[len(ids) - 1 :]
            assert scores.tobytes() == np.array(likely, np.float32).tobytes()


def test_tensor_parallel_is_refused_by_name(tmp_path: Any) -> None:
    family_model("deepseek-v2-lite").save_pretrained(tmp_path)

    class Ranks:
        rank, size = 0, 2

        def prepare(self, _arrays: Any) -> None: ...

        def agree(self, _name: str, _arguments: Any = None, refusal: Any = None) -> None:
            if refusal is not None:
                raise refusal

    with pytest.raises(UnsupportedModelError, match="tensor_parallel with model_type='deepseek_v2', which has experts"):
        load_model(tmp_path, device="cpu", tensor_parallel=Ranks())


def test_accelerate_on_a_model_whose_router_stays_in_float32(tmp_path: Any) -> None:
    """`from_pretrained` keeps that of V3 so in a 16-bit model; not every release does."""
    family_model("deepseek-v3").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    if model.model.layers[1].mlp.gate.weight.dtype != torch.float32:
        pytest.skip("this release of Transformers keeps no router in float32")
    inner = accelerate(model).flashkernel.model
    assert inner.layers[1].mlp.routing.weight.data_ptr() == model.model.layers[1].mlp.gate.weight.data_ptr()
    out = model.generate(IDS, attention_mask=LEFT, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert out.shape == (4, 40 + NEW)
    model.model.layers[1].mlp.shared_experts.up_proj.weight.data = torch.zeros(24, 48)
    with pytest.raises(NotImplementedError, match="one dtype on one device"):
        model.generate(IDS, attention_mask=LEFT, max_new_tokens=2, do_sample=False)
