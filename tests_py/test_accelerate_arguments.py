"""accelerate(model).generate against the stock one, argument by argument: the same ids, or a refusal by name.

A new argument of Transformers is served by its own code or is refused; what must not happen is another answer.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import logits_process, stopping_criteria

import flashkernel as fk
from flashkernel.generate import DraftModel, NonFiniteLogitsError, PromptLookup
from flashkernel.generate.speculate import Speculator
from flashkernel.integrations.transformers import accelerate, restore
from test_accelerate import IDS, LEFT, make

PAIRS: dict[str, tuple[Any, Any]] = {}


def pair(family: str) -> tuple[Any, Any]:
    """A stock model and an accelerated copy of it."""
    if family not in PAIRS:
        stock = make(family)
        PAIRS[family] = stock, accelerate(copy.deepcopy(stock), page_size=16)
    stock, ours = PAIRS[family]
    ours.generation_config = copy.deepcopy(stock.generation_config)
    return stock, ours


class Favour(LogitsProcessor):
    """Depends on all ids so far, padding included, and on the place in the batch."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.clone()
        row = torch.arange(len(scores), device=scores.device)
        scores[row, (input_ids.sum(-1) + row) % 90] += 3.0
        return scores


class Until(StoppingCriteria):
    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return (input_ids.shape[1] >= self.length) | (input_ids[:, -1] % 7 == 0)


class Collector:
    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: Any) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


PADDED = torch.where(LEFT.bool(), IDS, 95)  # 95 is the pad token, 96 the end
NEW = {"max_new_tokens": 9}
BIASES = [((7,), 2.5), ((3, 5), -4.0)]
# name: what generate is given beside ids; `ids` replaces the default ones.
SAME: dict[str, dict[str, Any]] = {
    "nothing": {},
    "one short prompt": dict(ids=IDS[:1, :3]),
    "max_new_tokens": NEW,
    "max_length": dict(max_length=44),
    "both lengths": dict(max_length=39, **NEW),
    "a mask": dict(attention_mask=LEFT, **NEW),
    "padded, no mask": dict(ids=PADDED, **NEW),
    "padded, pad is eos": dict(ids=PADDED, pad_token_id=96, **NEW),
    "padded, pad id given": dict(ids=torch.where(LEFT.bool(), IDS % 90, 94), pad_token_id=94, **NEW),
    "padded, eos none": dict(ids=PADDED, eos_token_id=None, **NEW),
    "a hole in the mask": dict(attention_mask=torch.where(torch.arange(37) == 30, 0, 1).expand(4, 37), **NEW),
    "a mask of bools": dict(attention_mask=LEFT.bool(), **NEW),
    "inputs none": dict(ids=None, **NEW),
    "use_cache": dict(use_cache=False, **NEW),
    "cache_implementation": dict(cache_implementation="static", **NEW),
    "many eos": dict(eos_token_id=list(range(0, 97, 5)), max_new_tokens=30),
    "eos a tensor": dict(eos_token_id=torch.tensor([1, 12, 40, 77, 81, 30]), max_new_tokens=30),
    "eos one": dict(eos_token_id=40, max_new_tokens=30),
    "eos none": dict(eos_token_id=None, max_new_tokens=30),
    "pad none": dict(pad_token_id=None, eos_token_id=list(range(0, 97, 6)), max_new_tokens=30),
    "config without eos": dict(generation_config=GenerationConfig(max_new_tokens=30)),
    "config with eos": dict(generation_config=GenerationConfig(max_new_tokens=30, eos_token_id=list(range(0, 97, 6)))),
    "config and arguments": dict(generation_config=GenerationConfig(max_new_tokens=30), **NEW),
    "config, greedy with sampling's numbers": dict(
        generation_config=GenerationConfig(do_sample=False, temperature=0.7, top_k=20, top_p=0.8, max_new_tokens=9)
    ),
    "an instruct model's config": dict(
        generation_config=GenerationConfig(
            do_sample=True, repetition_penalty=1.05, temperature=0.7, top_p=0.8, top_k=1, max_new_tokens=20
        )
    ),
    "repetition_penalty": dict(repetition_penalty=1.3, max_new_tokens=30),
    "repetition_penalty below 1": dict(repetition_penalty=0.8, max_new_tokens=30),
    "repetition_penalty, a mask": dict(repetition_penalty=1.3, attention_mask=LEFT, max_new_tokens=30),
    "repetition_penalty, padded": dict(ids=PADDED, repetition_penalty=1.3, max_new_tokens=30),
    "repetition_penalty, a hole": dict(
        repetition_penalty=1.3, attention_mask=torch.where(torch.arange(37) == 30, 0, 1).expand(4, 37), **NEW
    ),
    "repetition_penalty, top_k 1": dict(repetition_penalty=1.3, do_sample=True, top_k=1, attention_mask=LEFT, **NEW),
    "top_k 1": dict(do_sample=True, top_k=1, temperature=3.0, **NEW),
    "top_p small": dict(do_sample=True, top_k=0, top_p=1e-6, **NEW),
    "min_p 1": dict(do_sample=True, min_p=1.0, **NEW),
    "typical_p, top_k 1": dict(do_sample=True, typical_p=0.9, top_k=1, **NEW),
    "epsilon_cutoff, top_k 1": dict(do_sample=True, epsilon_cutoff=0.01, top_k=1, **NEW),
    "min_new_tokens": dict(min_new_tokens=6, eos_token_id=list(range(0, 97, 3)), **NEW),
    "min_length": dict(min_length=42, eos_token_id=list(range(0, 97, 3)), **NEW),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=2, max_new_tokens=30),
    "bad_words_ids": dict(bad_words_ids=[[3], [40, 5], [77]], max_new_tokens=20),
    "sequence_bias": dict(sequence_bias=[[list(ids), bias] for ids, bias in BIASES], max_new_tokens=20),
    "suppress_tokens": dict(suppress_tokens=list(range(30, 60)), **NEW),
    "begin_suppress_tokens": dict(begin_suppress_tokens=list(range(0, 60)), **NEW),
    "forced_bos_token_id": dict(ids=IDS[:, :1], forced_bos_token_id=5, **NEW),
    "forced_eos_token_id": dict(forced_eos_token_id=5, **NEW),
    "exponential_decay": dict(exponential_decay_length_penalty=(2, 1.5), max_new_tokens=30),
    "encoder_repetition_penalty": dict(encoder_repetition_penalty=1.5, **NEW),
    "renormalize_logits": dict(renormalize_logits=True, **NEW),
    "remove_invalid_values": dict(remove_invalid_values=True, **NEW),
    "guidance_scale": dict(ids=IDS[:1], guidance_scale=1.5, **NEW),
    "watermarking": dict(watermarking_config=transformers.WatermarkingConfig(bias=2.5), **NEW),
    "prefix_allowed_tokens_fn": dict(prefix_allowed_tokens_fn=lambda i, ids: [i, i + 9, int(ids[-1])], **NEW),
    "num_return_sequences": dict(num_return_sequences=1, **NEW),
    "several sequences, top_k 1": dict(do_sample=True, top_k=1, num_return_sequences=3, attention_mask=LEFT, **NEW),
    "no processors": dict(logits_processor=[], stopping_criteria=[], **NEW),
    "empty lists": dict(logits_processor=LogitsProcessorList(), stopping_criteria=StoppingCriteriaList(), **NEW),
    "a known processor": dict(
        logits_processor=LogitsProcessorList([logits_process.RepetitionPenaltyLogitsProcessor(1.3)]), **NEW
    ),
    "a known processor, a mask": dict(
        logits_processor=[logits_process.RepetitionPenaltyLogitsProcessor(1.3)], attention_mask=LEFT, **NEW
    ),
    "a penalty that ignores the prompt": dict(
        logits_processor=[logits_process.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=37)],
        max_new_tokens=30,
    ),
    "temperature as a processor": dict(logits_processor=[logits_process.TemperatureLogitsWarper(0.5)], **NEW),
    "a processor of mine": dict(logits_processor=LogitsProcessorList([Favour()]), attention_mask=LEFT, **NEW),
    "mine and theirs": dict(logits_processor=[Favour()], repetition_penalty=1.2, do_sample=True, top_k=1, **NEW),
    "a criterion of mine": dict(stopping_criteria=StoppingCriteriaList([Until(43)]), max_new_tokens=30),
    "a criterion of mine, no eos": dict(stopping_criteria=[Until(43)], eos_token_id=None, max_new_tokens=30),
    "a length as a criterion": dict(stopping_criteria=[stopping_criteria.MaxLengthCriteria(41)], max_new_tokens=30),
    "max_time long": dict(max_time=1000.0, **NEW),
    "max_time short": dict(max_time=1e-9, max_new_tokens=30),
    "output_scores without a dict": dict(output_scores=True, **NEW),
    "tokens of int32": dict(ids=IDS.int(), **NEW),
}


def run(model: Any, case: dict[str, Any]) -> Any:
    arguments = copy.deepcopy({key: value for key, value in case.items() if key != "ids"})
    ids = case.get("ids", IDS)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(ids, **arguments) if ids is not None else model.generate(**arguments)


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_same_arguments_same_ids(family: str, name: str) -> None:
    stock, ours = pair(family)
    expected = run(stock, SAME[name])
    for _ in range(2):  # the second time with pages kept
        got = run(ours, SAME[name])
        assert got.dtype == expected.dtype and got.tolist() == expected.tolist()
    assert ours.flashkernel.idle and ours.flashkernel.pages_in_use == 0


def for_the_config(case: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in case.items() if k in vars(GenerationConfig()) and v is not None}


@pytest.mark.parametrize("name", [name for name, case in SAME.items() if for_the_config(case)])
def test_the_models_own_config_counts(name: str) -> None:
    """The same numbers in model.generation_config, beside a prompt alone."""
    case = SAME[name]
    mine = for_the_config(case)
    rest = {k: v for k, v in case.items() if k not in mine}
    stock, ours = pair("llama")
    plain = stock.generation_config
    try:
        stock.generation_config = copy.deepcopy(plain)
        for option, value in mine.items():
            setattr(stock.generation_config, option, value)
        ours.generation_config = copy.deepcopy(stock.generation_config)
        assert run(ours, rest).tolist() == run(stock, rest).tolist()
    finally:
        stock.generation_config = plain


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("more", [{}, {"logits_processor": [Favour()]}], ids=["engine", "steps"])
def test_dict_with_scores_and_logits(sampled: bool, more: dict[str, Any]) -> None:
    """Step by step torch draws, so that even sampled tokens are the stock ones."""
    stock, ours = pair("llama")
    case = dict(
        do_sample=sampled,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        eos_token_id=list(range(0, 97, 9)),
        attention_mask=LEFT,
        **NEW,
        **more,
    )
    expected, got = run(stock, case), run(ours, case)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert len(got.scores) == len(expected.scores) and len(got.logits) == len(expected.logits)
    for a, b in zip((*got.scores, *got.logits), (*expected.scores, *expected.logits), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)
    plain = run(ours, dict(return_dict_in_generate=True, **NEW))
    assert plain.sequences.tolist() == run(stock, NEW).tolist() and plain.scores is None


def test_stop_strings() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = [*(chr(33 + i) for i in range(94)), "<x>", "<pad>", "<end>"]
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    stock, ours = pair("llama")
    free = run(stock, dict(max_new_tokens=30))
    strings = [tokenizer.decode(free[0, 37 + 8 : 37 + 10]), tokenizer.decode(free[1, 37 + 5])]
    case = dict(stop_strings=strings, tokenizer=tokenizer, max_new_tokens=30)
    expected = run(stock, case)
    assert expected.shape[1] < free.shape[1] or expected.tolist() != free.tolist()
    assert run(ours, case).tolist() == expected.tolist()
    with pytest.raises(ValueError, match="tokenizer"):
        run(ours, dict(stop_strings=strings, **NEW))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("more", [{}, {"logits_processor": [Favour()]}], ids=["engine", "steps"])
def test_streamer_gets_what_the_stock_one_gets(rows: int, more: dict[str, Any]) -> None:
    stock, ours = pair("llama")
    found = []
    for model in (stock, ours):
        streamer = Collector()
        torch.manual_seed(0)
        model.generate(IDS[:rows], streamer=streamer, eos_token_id=list(range(0, 97, 9)), max_new_tokens=20, **more)
        found.append(streamer.got)
    assert found[0] == found[1] and found[0][-1] == "end"


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": dict(num_beams=3),
    "assistant_model": dict(assistant_model=object()),
    "custom_generate": dict(custom_generate=lambda *a, **k: None),
    "synced_gpus": dict(synced_gpus=True),
    "cache_implementation": dict(cache_implementation="quantized"),
    "past_key_values": dict(past_key_values=transformers.DynamicCache()),
    "output_attentions": dict(output_attentions=True, return_dict_in_generate=True),
    "output_hidden_states": dict(output_hidden_states=True, return_dict_in_generate=True),
    "inputs_embeds": dict(inputs_embeds=torch.zeros(1, 3, 48)),
    "position_ids": dict(position_ids=torch.arange(37)[None] * 2),
    "token_type_ids": dict(token_type_ids=torch.ones_like(IDS)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    _, ours = pair("gpt2")
    with pytest.raises(NotImplementedError, match=name):
        run(ours, {**REFUSED[name], **NEW})
    assert ours.flashkernel.idle


@pytest.mark.parametrize("sample", [False, True])
def test_speculation_by_the_names_of_transformers(sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """prompt_lookup_num_tokens and assistant_model change no token, of padded batches too, and end with the call."""
    _, ours = pair("llama")
    assistant = accelerate(make("llama"))
    options: dict[str, Any] = dict(attention_mask=LEFT, do_sample=sample, max_new_tokens=30)
    options |= dict(seed=3, temperature=0.6) if sample else {}
    plain, step, used = ours.generate(IDS, **options), Speculator.step, list[Any]()

    def noted(self: Speculator) -> Any:
        used.append(self.speculation)
        return step(self)

    monkeypatch.setattr(Speculator, "step", noted)
    model = assistant.flashkernel.model
    for more, expected in (
        (dict(prompt_lookup_num_tokens=6), PromptLookup(6, 2, 1)),
        (dict(prompt_lookup_num_tokens=99, max_matching_ngram_size=3), PromptLookup(64, 3, 1)),
        (dict(assistant_model=assistant), DraftModel(model)),
        (dict(assistant_model=assistant, num_assistant_tokens=2), DraftModel(model, 2)),
    ):
        used.clear()
        assert torch.equal(ours.generate(IDS, **options, **more), plain)
        assert used and set(used) == {expected} and ours.flashkernel.speculation is None
    with pytest.raises(ValueError, match="one of them is needed"):
        ours.generate(IDS, **options, prompt_lookup_num_tokens=3, assistant_model=assistant)
    smaller = accelerate(make("llama", vocab_size=80, bos_token_id=7, pad_token_id=7, eos_token_id=8))
    with pytest.raises(ValueError, match="vocabulary of 80 tokens"):
        ours.generate(IDS, **options, assistant_model=smaller)
    with pytest.raises(NotImplementedError, match="the model itself"):
        ours.generate(IDS, **options, assistant_model=ours)
    ours.generation_config.prompt_lookup_num_tokens = 3
    with pytest.raises(NotImplementedError, match="prompt_lookup_num_tokens in a generation config"):
        ours.generate(IDS[:1], do_sample=sample, max_new_tokens=3)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (dict(ids=IDS[0]), r"input_ids \[37\]; a tensor \[batch, seq\]"),
        (dict(ids=[[1, 2]]), "input_ids list; a tensor"),
        (dict(attention_mask=LEFT[:, 1:]), r"attention_mask \[4, 36\] for input_ids \[4, 37\]"),
        (dict(no_such_argument=3), "no_such_argument"),
        (dict(max_length=20), "length"),
        (dict(do_sample=True, temperature=0.0), "temperature"),
    ],
)
def test_wrong_arguments_are_value_errors(case: dict[str, Any], text: str) -> None:
    _, ours = pair("llama")
    with pytest.raises(ValueError, match=text):
        run(ours, {**({} if "max_length" in case else NEW), **case})


def test_a_seed_of_torch_or_of_the_caller() -> None:
    """Without `seed` calls differ, and torch.manual_seed repeats them; torch's own state moves on."""
    _, ours = pair("llama")
    options: dict[str, Any] = dict(do_sample=True, max_new_tokens=20)
    first = [ours.generate(IDS, **options).tolist() for _ in range(2)]
    assert first[0] != first[1]
    for more in ({}, {"logits_processor": [Favour()]}):
        found = []
        for _ in range(2):
            torch.manual_seed(5)
            found.append([ours.generate(IDS, **options, **more).tolist() for _ in range(2)])
        assert found[0] == found[1] and found[0][0] != found[0][1]
        seeded = [ours.generate(IDS, **options, **more, seed=seed).tolist() for seed in (3, 3, 4)]
        assert seeded[0] == seeded[1] != seeded[2]
    rows = ours.generate(IDS[:1], **options, num_return_sequences=5, seed=1).tolist()
    assert len({tuple(row) for row in rows}) == 5


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=0.7, top_k=12),
        dict(temperature=1.5, top_k=0, top_p=0.7),
        dict(temperature=1.5, top_k=0, min_p=0.1),
        dict(temperature=0.9, top_k=30, top_p=0.9, min_p=0.05, repetition_penalty=1.4),
    ],
    ids=str,
)
def test_the_engine_samples_from_transformers_distribution(options: dict[str, Any]) -> None:
    """2000 draws of the engine's own sampler after one prompt against the probabilities of Transformers' processors."""
    stock, ours = pair("llama")
    prompt = IDS[:1, :20]
    torch.manual_seed(0)
    scores = stock.generate(
        prompt, do_sample=True, max_new_tokens=1, return_dict_in_generate=True, output_scores=True, **options
    ).scores[0][0]
    likely = torch.softmax(scores.double(), -1)
    calls = {"steps": 0}
    lockstep = ours.flashkernel.lockstep
    ours.flashkernel.lockstep = lambda *a: calls.__setitem__("steps", 1) or lockstep(*a)
    try:
        drawn = ours.generate(
            prompt.expand(2000, -1), do_sample=True, max_new_tokens=1, eos_token_id=None, seed=2, **options
        )[:, -1]
    finally:
        del ours.flashkernel.lockstep
    assert not calls["steps"], "the engine's own sampler covers these"
    counts = torch.bincount(drawn, minlength=97).double()
    assert not counts[likely == 0].any()
    expected = likely * 2000
    spread = (expected * (1 - likely)).sqrt()
    assert (((counts - expected).abs() - 1) <= 5 * spread).all()


def test_known_processors_stay_on_the_engine() -> None:
    """No step-by-step path for what instruct models ship; a warning, once, for a function of the caller."""
    _, ours = pair("llama")
    seen: list[int] = []
    lockstep = ours.flashkernel.lockstep
    ours.flashkernel.lockstep = lambda *a: seen.append(1) or lockstep(*a)
    try:
        config = GenerationConfig(
            do_sample=True, repetition_penalty=1.05, temperature=0.7, top_p=0.8, top_k=20, min_p=0.1
        )
        ours.generate(IDS, generation_config=config, max_new_tokens=3)
        ours.generate(IDS, logits_processor=[], stopping_criteria=[], max_new_tokens=3)
        ours.generate(IDS[:1], streamer=Collector(), max_new_tokens=3)
        assert not seen
        ours.generate(IDS, attention_mask=LEFT, generation_config=config, max_new_tokens=3)
        # Older releases penalise the tokens of the padding, too, which the engine never sees.
        assert bool(seen) == ("prompt_ignore_length" not in inspect.getsource(GenerationMixin._get_logits_processor))
        seen.clear()

        class Mine(Favour):
            pass

        with pytest.warns(UserWarning, match=r"Mine is called between steps"):
            ours.generate(IDS, logits_processor=[Mine()], max_new_tokens=3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours.generate(IDS, logits_processor=[Mine()], max_new_tokens=3)
        assert len(seen) == 2
    finally:
        del ours.flashkernel.lockstep


@pytest.mark.parametrize(
    "more", [{}, {"logits_processor": [Favour()]}, {"do_sample": True}], ids=["greedy", "a processor", "sampled"]
)
def test_nan_weights_are_an_error(more: dict[str, Any]) -> None:
    """The stock greedy search emits token 0 for ever there."""
    model = accelerate(make("llama"), page_size=16)
    with torch.no_grad():
        model.lm_head.weight[17, 3] = float("nan")
    with pytest.raises(NonFiniteLogitsError, match="sequence 0 at step 0 hold a value that is nan"):
        model.generate(IDS, max_new_tokens=3, **more)
    with torch.no_grad():
        model.lm_head.weight[17, 3] = float("inf")
    with pytest.raises(RuntimeError, match=r"hold a value that is (nan|inf)"):
        for ids in (IDS, IDS.flip(1)):  # the sign of a hidden value decides between inf and -inf
            model.generate(ids, max_new_tokens=8, **more)
    assert model.flashkernel.pages_in_use == 0
    with torch.no_grad():
        model.lm_head.weight[17, 3] = 0.1
    got = model.generate(IDS, max_new_tokens=5)
    assert torch.equal(got, restore(model).generate(IDS, max_new_tokens=5))


def test_pages_limit_step_by_step() -> None:
    model = accelerate(make("llama"), page_size=16, num_pages=6)
    with pytest.raises(fk.OutOfPagesError, match="step by step need 12 pages of 16 at once; the cache has num_pages=6"):
        model.generate(IDS, max_new_tokens=3, min_new_tokens=2)
    assert model.generate(IDS, max_new_tokens=3).shape == (4, 40)  # the engine's own way takes turns
