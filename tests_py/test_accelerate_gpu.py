"""accelerate(model) on a GPU: arguments, changes and copies as on the CPU, now with graphs, run-ahead and padded rows.

What each case means stands in test_accelerate_arguments.py and test_accelerate_follow.py, where the CPU runs all of
them.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from flashkernel.generate import NonFiniteLogitsError, SamplingOptions
from flashkernel.generate.devices import available_devices
from flashkernel.integrations.accelerate.fingerprint import Fingerprint
from flashkernel.integrations.transformers import accelerate
from test_accelerate import IDS, LEFT, make
from test_accelerate_arguments import SAME
from test_accelerate_follow import CHANGES, COPIES, SMALL, in_place

pytestmark = pytest.mark.skipif(
    "cuda" not in available_devices(), reason="needs a CUDA build, torch with CUDA and a GPU"
)

FAMILIES = ["gpt2", "llama", "llama-3.2"]
OPTIONS: dict[str, Any] = dict(max_new_tokens=20, do_sample=False, eos_token_id=None)


def on_gpu(value: Any) -> Any:
    return value.cuda() if isinstance(value, torch.Tensor) else value


def run(model: Any, case: dict[str, Any]) -> Any:
    arguments = copy.deepcopy({key: on_gpu(value) for key, value in case.items() if key != "ids"})
    ids = on_gpu(case.get("ids", IDS))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(ids, **arguments) if ids is not None else model.generate(**arguments)


@pytest.fixture(scope="module", params=FAMILIES[:2])
def pair(request: Any) -> Any:
    stock = make(request.param).cuda()
    return stock, accelerate(copy.deepcopy(stock), page_size=16)


@pytest.mark.parametrize("name", SAME)
def test_same_arguments_same_ids(pair: Any, name: str) -> None:
    stock, ours = pair
    expected = run(stock, SAME[name])
    for _ in range(2):
        got = run(ours, SAME[name])
        assert got.device == expected.device and got.tolist() == expected.tolist()


def stock_tokens(model: Any, ids: Any) -> Any:
    return type(model).generate(model, ids, attention_mask=LEFT.cuda(), **OPTIONS).tolist()


def tokens(model: Any, ids: Any) -> Any:
    return model.generate(ids, attention_mask=LEFT.cuda(), **OPTIONS).tolist()


ON_GPU = [name for name in CHANGES if name not in ("AdamW", "load_state_dict", "load_state_dict(assign=True)")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [*ON_GPU, "to the CPU and back"])
def test_generate_change_generate(family: str, name: str) -> None:
    model = accelerate(make(family).cuda(), page_size=16)
    ids = (IDS % 90).cuda()
    before = stock_tokens(model, ids)
    assert tokens(model, ids) == before
    if name == "to the CPU and back":
        model.cpu()
        assert model.generate(ids.cpu(), attention_mask=LEFT, **OPTIONS).tolist()[0][:37] == before[0][:37]
        in_place(model)
    else:
        CHANGES[name](model)
    model.cuda()  # new layers were made on the CPU
    for _ in range(2):
        assert tokens(model, ids) == stock_tokens(model, ids)
    assert name in SMALL or tokens(model, ids) != before


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["copy.deepcopy", "torch.save", "state_dict", "safetensors' save_model"])
def test_copies_are_stock_models(family: str, name: str, tmp_path: Path) -> None:
    model = accelerate(make(family).cuda(), page_size=16)
    ids = IDS.cuda()
    before = tokens(model, ids)
    found = COPIES[name](model, tmp_path)
    assert "flashkernel" not in vars(found)
    assert stock_tokens(found, ids) == before
    in_place(found)
    assert tokens(model, ids) == before


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.2}, {"do_sample": True}, {"min_new_tokens": 2}], ids=str)
def test_nan_is_an_error(more: dict[str, Any]) -> None:
    model = accelerate(make("llama").cuda(), page_size=16)
    ids = IDS.cuda()
    expected = model.generate(ids, **OPTIONS)  # graphs are captured
    weight = model.lm_head.weight
    kept = weight[17, 3].item()
    with torch.no_grad():
        weight[17, 3] = float("nan")
    with pytest.raises(NonFiniteLogitsError, match="sequence 0 at step 0 hold a value that is nan"):
        model.generate(ids, **{**OPTIONS, **more})
    with torch.no_grad():
        weight[17, 3] = kept
    assert torch.equal(model.generate(ids, **OPTIONS), expected)
    assert model.flashkernel.pages_in_use == 0


def test_nan_within_a_graph_names_the_step() -> None:
    """A broken embedding of a token that comes later: the steps before it are given."""
    model = accelerate(make("llama").cuda(), page_size=16)
    ids = IDS[:1].cuda()
    expected = model.generate(ids, **OPTIONS)[0, 37:].tolist()
    at = next(i for i in range(3, 15) if expected[i] not in expected[:i] + IDS[0].tolist())
    with torch.no_grad():
        model.get_input_embeddings().weight[expected[at]] = float("nan")
    got = []
    with pytest.raises(NonFiniteLogitsError, match=rf"sequence 0 at step {at + 1} hold"):
        for event in model.flashkernel.generate([IDS[0].tolist()], max_new_tokens=20, stop_tokens=frozenset()):
            got.append(event.token)
    assert got == expected[: at + 1]


def test_penalised_graphs_give_the_tokens_of_eager_steps() -> None:
    model = make("llama").cuda()
    sampling = SamplingOptions(temperature=0.9, top_k=50, min_p=0.02, repetition_penalty=1.2, seed=2)
    lists = [torch.randint(0, 90, (n,)).tolist() for n in (7, 130, 64, 3, 100, 31, 90, 5)]
    found = []
    for options in ({"graphs": False, "run_ahead": False, "steps": 1}, {"graphs": False}, {}):
        engine = accelerate(model, page_size=16, prefix_sharing=False, **options).flashkernel
        got: list[list[int]] = [[] for _ in lists]
        for event in engine.generate(lists, max_new_tokens=40, sampling=sampling, stop_tokens=frozenset()):
            got[event.sequence].append(event.token)
        found.append(got)
    assert found[0] == found[1] == found[2]


def test_fingerprints() -> None:
    tensors = [torch.randn(300, 257, device="cuda").to(torch.bfloat16), torch.randn(7, device="cuda").half()]
    tensors.append(torch.from_dlpack(torch.randn(5001, device="cuda").half()[1:]))  # at an odd place
    look = Fingerprint(tensors)
    before = look.read()
    assert before == look.read()
    for tensor in tensors:
        flat = tensor.view(-1)
        for at in (0, len(flat) // 2, len(flat) - 1):
            flat[at] = -flat[at]
            assert look.read() != before
            flat[at] = -flat[at]
    assert look.read() == before
