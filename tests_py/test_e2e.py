"""Whole models against stock Transformers: on a GPU GPT-2 124M and Llama-3.2-1B's shape with random weights, on the CPU
the same architectures made small; and the demo checkpoint's perplexity.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

from flashkernel.bench.e2e import build
from flashkernel.generate import Engine, SamplingOptions, TextTokenizer, find_model, load_model
from flashkernel.generate.decode import decode_step
from flashkernel.generate.devices import available_devices
from flashkernel.generate.sampling_options import wanted
from flashkernel.integrations.accelerate import accelerate, restore

DEVICES = available_devices()
GPU = pytest.mark.skipif("cuda" not in DEVICES, reason="needs a CUDA build, torch with CUDA and a GPU")
NEW = {"cuda": 48, "cpu": 20}
LENGTHS = {"cuda": (5, 128, 300, 64), "cpu": (3, 16, 30, 9)}
HALF = {"gpt2": torch.float16, "llama-1b": torch.bfloat16}


@pytest.fixture(params=[(device, name) for device in DEVICES for name in HALF], ids="-".join, scope="module")
def stock(request: Any) -> Any:
    """(device, name, float32 model)"""
    device, name = request.param
    model = build(name, "float32", device, quick=device == "cpu")
    with torch.no_grad():  # random weights as they come give nearly the same token everywhere
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return device, name, model


def prompts(device: str, vocab: int) -> tuple[Any, Any]:
    """Ids padded on the left, and their mask."""
    lengths, generator = LENGTHS[device], torch.Generator().manual_seed(5)
    width = max(lengths)
    ids = torch.randint(1, vocab, (len(lengths), width), generator=generator)
    mask = torch.stack([torch.arange(width) >= width - n for n in lengths]).long()
    return (ids * mask).to(device), mask.to(device)


def first_difference_is_a_tie(model: Any, ids: Any, mask: Any, ours: Any, theirs: Any, tolerance: float) -> None:
    """Tokens are equal, or differ first where the two have logits within `tolerance` of the largest one's size."""
    for row in range(len(ours)):
        different = (ours[row] != theirs[row]).nonzero()
        if not len(different):
            continue
        at = int(different[0])
        prompt = ids[row][mask[row].bool()]
        with torch.no_grad():
            logits = model(torch.cat([prompt, theirs[row, :at]])[None]).logits[0, -1]
        gap = (logits[theirs[row, at]] - logits[ours[row, at]]) / logits.abs().max()
        assert 0 <= gap < tolerance, (row, at, float(gap))


def test_greedy_tokens_equal_in_float32(stock: Any) -> None:
    device, _, model = stock
    ids, mask = prompts(device, model.config.vocab_size)
    options: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=NEW[device])
    with torch.inference_mode():
        theirs = model.generate(ids, do_sample=False, **options)[:, ids.shape[1] :]
    accelerate(model, page_size=16, prefill_chunk=200)
    try:
        ours = model.generate(ids, **options)[:, ids.shape[1] :]
        assert model.flashkernel.pages_in_use == 0
    finally:
        restore(model)
    assert len(set(theirs.flatten().tolist())) > 5
    first_difference_is_a_tie(model, ids, mask, ours, theirs, 2e-5)


def logits_of(engine: Engine, ids: list[int]) -> Any:
    """Logits at every position, by the engine's own prefill over pages."""
    found: list[Any] = []
    forward = engine.model.forward

    def spy(*arguments: Any) -> Any:
        found.append(torch.as_tensor(forward(*arguments)).float())
        return found[-1]

    engine.model.forward = spy  # type: ignore[method-assign]
    try:
        engine.score([*ids, 0])
    finally:
        del engine.model.forward
    return torch.cat(found)


def test_half_precision_logits_are_no_worse_than_eagers(stock: Any) -> None:
    """Against the float32 model whose weights are those of the 16-bit one. Most of the difference is the last rounding,
    that of the logits themselves, which both have: the means of a small model scatter by a per cent.
    """
    device, name, model = stock
    half = copy.deepcopy(model).to(HALF[name])
    half.set_attn_implementation("eager")
    exact = copy.deepcopy(half).float()
    ids = torch.randint(1, model.config.vocab_size, (4, 48), generator=torch.Generator().manual_seed(6)).to(device)
    with torch.inference_mode():
        truth = exact(ids).logits
        theirs = (half(ids).logits.float() - truth).abs()
    engine = accelerate(half, prefill_chunk=100).flashkernel
    ours = (torch.stack([logits_of(engine, row) for row in ids.tolist()]) - truth).abs()
    assert 0 < ours.mean() <= 1.02 * theirs.mean()
    assert ours.max() <= 1.3 * theirs.max()


def test_decoded_logits_equal_those_of_a_prefill(stock: Any) -> None:
    """What decode steps choose is what the whole text's logits say, in the model's 16-bit dtype, too."""
    device, name, model = stock
    half = copy.deepcopy(model).to(HALF[name])
    ids, mask = prompts(device, model.config.vocab_size)
    accelerate(half, page_size=16)
    ours = half.generate(ids, attention_mask=mask, max_new_tokens=NEW[device])[:, ids.shape[1] :]
    for row in range(len(ids)):
        prompt = ids[row][mask[row].bool()].tolist()
        logits = logits_of(half.flashkernel, prompt + ours[row].tolist()[:-1])[len(prompt) - 1 :]
        chosen = logits.gather(1, ours[row][:, None])[:, 0]
        gap = (logits.max(dim=1).values - chosen) / logits.abs().amax(dim=1)
        assert gap.max() < 0.05  # some roundings of bfloat16, through all layers


def text() -> str:
    """Python that the demo model has not been trained on: this repository's."""
    root = Path(__file__).resolve().parent
    return "".join((root / name).read_text(encoding="utf-8") for name in ("conftest.py", "test_e2e.py"))


@pytest.mark.parametrize("device", DEVICES)
def test_perplexity_of_the_demo_checkpoint(device: str) -> None:
    import transformers

    ids = TextTokenizer(find_model("demo")).encode(text())[:1024]
    assert len(ids) == 1024
    model = transformers.AutoModelForCausalLM.from_pretrained(find_model("demo"), dtype=torch.float32).to(device).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([ids], device=device)).logits[0, :-1].double().cpu()
        theirs = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).exp().item()
    engine = Engine(load_model(find_model("demo"), device=device), prefill_chunk=300)
    scores = engine.score(ids)
    assert scores.shape == (1023,) and scores.dtype == np.float32
    ours = float(np.exp(-scores.astype(np.float64).mean()))
    assert 2 < theirs < 100  # it knows Python
    assert abs(ours / theirs - 1) < 2e-5
    half = Engine(load_model(find_model("demo"), device=device, dtype="float16")).score(ids).astype(np.float64)
    assert abs(float(np.exp(-half.mean())) / theirs - 1) < 2e-3


def test_score_refuses_what_it_cannot_do() -> None:
    engine = Engine(load_model(find_model("demo"), device="cpu"))
    with pytest.raises(ValueError, match="two or more"):
        engine.score([1])
    with pytest.raises(ValueError, match="1024"):
        engine.score([1] * 1026)
    assert engine.score([1] * 1024).shape == (1023,)


# --- what only a GPU has: CUDA graphs


@GPU
@pytest.mark.parametrize("name", list(HALF))
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_graphs_give_the_tokens_of_eager_steps(name: str, sampled: bool) -> None:
    model = build(name, str(HALF[name]).removeprefix("torch."), "cuda", quick=False)
    sampling = SamplingOptions(temperature=0.9, top_k=50, top_p=0.95, seed=2) if sampled else SamplingOptions()
    lists = [torch.randint(0, 9999, (n,)).tolist() for n in (7, 130, 64, 3, 255, 256, 257, 31, 90, 5)]
    found = []
    for options in ({"graphs": False, "run_ahead": False, "steps": 1}, {"graphs": False}, {}, {"max_batch": 3}):
        engine = accelerate(model, page_size=64, prefix_sharing=False, **options).flashkernel
        got: list[list[int]] = [[] for _ in lists]
        for event in engine.generate(lists, max_new_tokens=40, sampling=sampling, stop_tokens=frozenset()):
            got[event.sequence].append(event.token)
        found.append(got)
        assert engine.pages_in_use == 0
    assert found[0] == found[1] == found[2]
    # Other batch sizes run other kernels, whose roundings may tip a choice: only that all of them run
    assert [len(tokens) for tokens in found[3]] == [40] * len(lists)


@GPU
def test_a_decode_step_never_waits() -> None:
    """torch's own guard against synchronisation, over eager steps; a capture would fail of itself."""
    model = accelerate(build("gpt2", "float16", "cuda", quick=False))
    engine = model.flashkernel
    for sampling in (SamplingOptions(), SamplingOptions(temperature=1.0)):
        list(engine.generate([[1, 2, 3]], max_new_tokens=20, sampling=sampling, stop_tokens=frozenset()))
        scheduler = engine._scheduler
        state = scheduler.decoder.state
        state.park()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            decode_step(engine.model, scheduler.pool, state, 4, wanted([sampling]))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@GPU
def test_memory_of_the_engine_goes_back() -> None:
    model = build("gpt2", "float16", "cuda", quick=False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        accelerate(model)
        model.generate(torch.ones(8, 40, dtype=torch.int64, device="cuda"), max_new_tokens=20)
        restore(model)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 32 << 20
