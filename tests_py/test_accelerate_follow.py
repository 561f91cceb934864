"""accelerate(model) and a model that changes: every generate is that of the model as it is now, or a refusal.

What is right comes from the stock generate on the same model. Prompts are longer than a page, so that pages kept from
before a change would be found.
"""

from __future__ import annotations

import copy
import io
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flashkernel.generate.arrays import TorchArrays
from flashkernel.integrations.accelerate.follow import Watch
from flashkernel.integrations.transformers import accelerate, accelerated, restore
from test_accelerate import IDS, LEFT, make

OPTIONS: dict[str, Any] = dict(attention_mask=LEFT, max_new_tokens=20, do_sample=False, eos_token_id=None)


def stock(model: Any, ids: Any = IDS) -> Any:
    return type(model).generate(model, ids, **OPTIONS).tolist()


def ours(model: Any, ids: Any = IDS) -> Any:
    return model.generate(ids, **OPTIONS).tolist()


def other(model: Any) -> dict[str, Any]:
    """Weights of the same shapes."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: value + 0.1 * torch.randn(value.shape, generator=generator).to(value)
        for name, value in model.state_dict().items()
    }


def in_place(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.07)


def one_row(model: Any) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight[IDS[1, 2]] += 1.0


def data_in_place(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.07)


def data_of_one(model: Any) -> None:
    model.get_input_embeddings().weight.data[int(IDS[1, 2]), 3] += 5.0


def data_rows_swapped(model: Any) -> None:
    """No sum of the values changes."""
    weight = model.get_input_embeddings().weight.data
    weight.copy_(weight.roll(1, 0))


def data_columns_swapped(model: Any) -> None:
    weight = model.get_input_embeddings().weight.data
    weight.copy_(weight.roll(2, 1))


def data_replaced(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.07


def train(model: Any, steps: int = 2) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}


def load(model: Any) -> None:
    model.load_state_dict(other(model))


def load_assign(model: Any) -> None:
    model.load_state_dict(other(model), assign=True)
    model.tie_weights()


def swap_layers(model: Any) -> None:
    layers = model.model.layers if hasattr(model, "model") else model.transformer.h
    first, second = (next(p for p in layers[i].parameters() if p.dim() == 2) for i in (0, 1))
    first.data, second.data = second.data, first.data


def new_layer(model: Any) -> None:
    layers = model.model.layers if hasattr(model, "model") else model.transformer.h
    layers[1] = copy.deepcopy(layers[1])
    with torch.no_grad():
        next(p for p in layers[1].parameters() if p.dim() == 2).mul_(-1)


def new_head(model: Any) -> None:
    torch.manual_seed(3)
    model.lm_head = torch.nn.Linear(48, 97, bias=False)


def new_head_weight(model: Any) -> None:
    """What was tied is not any more, whatever the config says."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())


def tied(model: Any) -> None:
    model.lm_head.weight = model.get_input_embeddings().weight


def new_embeddings(model: Any) -> None:
    torch.manual_seed(3)
    model.set_input_embeddings(torch.nn.Embedding(97, 48))


def resized(model: Any) -> None:
    torch.manual_seed(3)
    model.resize_token_embeddings(130)


def shrunk(model: Any) -> None:
    model.resize_token_embeddings(97 - 2)


def there_and_back(dtype: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:  # RoPE's frequencies are rounded on the way, too
        model.to(dtype).float()

    return change


def lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    kind = model.config.model_type
    config = peft.LoraConfig(
        r=4,
        target_modules=["c_attn", "c_proj"] if kind == "gpt2" else ["q_proj", "v_proj", "down_proj"],
        fan_in_fan_out=kind == "gpt2",
    )
    torch.manual_seed(4)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return adapted.eval()


def lora_merged(model: Any) -> None:
    assert lora(model).merge_and_unload() is model


def to_float64_and_back(model: Any) -> None:
    in_place(model)
    model.double().float()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": in_place,
    "one row in place": one_row,
    ".data in place": data_in_place,
    ".data of one value": data_of_one,
    ".data, rows swapped": data_rows_swapped,
    ".data, columns swapped": data_columns_swapped,
    ".data replaced": data_replaced,
    "AdamW": train,
    "load_state_dict": load,
    "load_state_dict(assign=True)": load_assign,
    "matrices swapped": swap_layers,
    "a new layer": new_layer,
    "a new head": new_head,
    "a head that is not tied": new_head_weight,
    "a head that is tied": tied,
    "new embeddings": new_embeddings,
    "resized": resized,
    "shrunk": shrunk,
    "half and back": there_and_back(torch.float16),
    "bfloat16 and back": there_and_back(torch.bfloat16),
    "float64 and back": to_float64_and_back,
    "LoRA merged": lora_merged,
}
# May leave the tokens as they were.
SMALL = ("half and back", "bfloat16 and back", "a head that is tied", "resized", "shrunk")


@pytest.fixture(params=["gpt2", "gpt2 as on a GPU", "llama", "llama-3.2 as on a GPU", "qwen2"])
def family(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model kept as on a GPU: Conv1D's matrices are transposed, and the output layer's rows are a multiple of 64."""
    if request.param.endswith("GPU"):
        rows = TorchArrays.output_rows

        def padded(self: Any, weight: Any) -> Any:
            self.asynchronous = True
            try:
                return rows(self, weight)
            finally:
                self.asynchronous = False

        monkeypatch.setattr(TorchArrays, "output_rows", padded)
        monkeypatch.setattr(TorchArrays, "transposed", lambda _, weight: weight.T.contiguous())
    return str(request.param).split()[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHANGES)
def test_generate_change_generate(family: str, name: str) -> None:
    """Twice, so that what was made anew is followed, too; with other prompts in between that keep pages."""
    model = accelerate(make(family), page_size=16)
    before = stock(model)
    assert ours(model) == before
    for first in (True, False):
        ids = IDS.clone()
        if name == "shrunk":
            ids = ids % 90
        CHANGES[name](model)
        expected = stock(model, ids)
        assert ours(model, ids) == expected
        assert ours(model, ids) == expected  # from kept pages
        assert model.flashkernel.stats.prefix_tokens > 0
        assert expected != before or name in SMALL or not first
        before = expected
    restore(model)
    assert model.generate(ids, **OPTIONS).tolist() == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_another_dtype(family: str, dtype: Any) -> None:
    """The tokens are those of an engine made in that dtype; the test above compares Transformers' own in float32."""
    model = accelerate(make(family), page_size=16)
    ours(model)
    model.to(dtype)
    got = ours(model)
    assert model.flashkernel.model.arrays.dtype in str(dtype)
    assert got == ours(accelerate(copy.deepcopy(model), page_size=16))
    model.float()
    assert ours(model) == stock(model)


def test_training_goes_on_as_without() -> None:
    """The optimizer's parameters and moments are those of the model; losses are those of a stock twin."""
    for family in ("gpt2", "llama"):
        twin, model = make(family), make(family)
        accelerate(model, page_size=16)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (twin, model)]
        for _ in range(3):
            losses = []
            for m, optimizer in zip((twin, model), optimizers, strict=True):
                optimizer.zero_grad()
                loss = m(IDS, labels=IDS).loss
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            assert abs(losses[0] - losses[1]) < 1e-5 * losses[0]
            assert ours(model) == stock(model)


def test_a_model_that_is_swapped_by_accelerated() -> None:
    """`accelerated` makes other classes for a while; they compute the same."""
    model = accelerate(make("llama"), page_size=16)
    before = ours(model)
    with accelerated(model):
        assert ours(model) == before
    assert ours(model) == before


class MyLinear(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


def my_linear(model: Any) -> Callable[[], None]:
    mlp = model.model.layers[1].mlp
    kept = mlp.up_proj
    mlp.up_proj = MyLinear(48, 112, bias=False)
    return lambda: setattr(mlp, "up_proj", kept)


def hook(model: Any) -> Callable[[], None]:
    return model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 2).remove


def pre_hook(model: Any) -> Callable[[], None]:
    return model.model.norm.register_forward_pre_hook(lambda module, args: None).remove


def global_hook(model: Any) -> Callable[[], None]:
    return torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: None).remove


def own_forward(model: Any) -> Callable[[], None]:
    model.lm_head.forward = lambda x: torch.zeros(*x.shape[:-1], 97)
    return lambda: delattr(model.lm_head, "forward")


def parametrisation(model: Any) -> Callable[[], None]:
    parametrize = torch.nn.utils.parametrize
    parametrize.register_parametrization(model.lm_head, "weight", torch.nn.ReLU())
    return lambda: parametrize.remove_parametrizations(model.lm_head, "weight", leave_parametrized=False)


def pruned(model: Any) -> Callable[[], None]:
    from torch.nn.utils import prune

    prune.l1_unstructured(model.lm_head, "weight", amount=0.5)
    return lambda: prune.remove(model.lm_head, "weight")


def adapter(model: Any) -> Callable[[], None]:
    adapted = lora(model)
    return adapted.unload


def merged_adapter(model: Any) -> Callable[[], None]:
    adapted = lora(model)
    adapted.merge_adapter()
    return adapted.unload


def head_with_bias(model: Any) -> Callable[[], None]:
    kept = model.lm_head
    model.lm_head = torch.nn.Linear(48, 97)
    return lambda: setattr(model, "lm_head", kept)


def another_epsilon(model: Any) -> Callable[[], None]:
    norm = model.model.norm
    kept, norm.variance_epsilon = norm.variance_epsilon, 0.1
    model.config.pad_token_id = 94  # numbers of a module are looked at when something else changed
    return lambda: setattr(norm, "variance_epsilon", kept)


def float64(model: Any) -> Callable[[], None]:
    model.double()
    return model.float


def one_in_half(model: Any) -> Callable[[], None]:
    model.lm_head.half()
    return model.lm_head.float


def quantised(model: Any) -> Callable[[], None]:
    kept = model.model.layers[0].mlp.down_proj
    model.model.layers[0].mlp.down_proj = torch.ao.nn.quantized.dynamic.Linear(112, 48)
    return lambda: setattr(model.model.layers[0].mlp, "down_proj", kept)


REFUSED: dict[str, tuple[Callable[[Any], Callable[[], Any]], str]] = {
    "a subclass of Linear": (my_linear, r"layers\.1\.mlp\.up_proj is a .*MyLinear; the stock layer"),
    "a hook": (hook, r"layers\.0\.mlp has forward hooks"),
    "a pre-hook": (pre_hook, r"model\.norm has forward hooks"),
    "a global hook": (global_hook, "global forward hooks"),
    "a forward of its own": (own_forward, "lm_head has a forward function of its own"),
    "a parametrisation": (parametrisation, "lm_head is a .*ParametrizedLinear"),
    "pruned": (pruned, "lm_head has forward hooks"),
    "LoRA": (adapter, r"q_proj is a peft\..*Linear; merge the adapter"),
    "LoRA merged, not unloaded": (merged_adapter, r"q_proj is a peft\..*Linear; merge the adapter"),
    "a head with a bias": (head_with_bias, r"has lm_head\.bias, which"),
    "another epsilon": (another_epsilon, r"model\.norm has eps=0\.1"),
    "float64": (float64, "dtype is float64"),
    "two dtypes": (one_in_half, "one dtype on one device"),
    "a quantised layer": (quantised, r"down_proj is a .*dynamic.*Linear; the stock layer"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_sentence_until_it_is_undone(name: str) -> None:
    change, text = REFUSED[name]
    model = accelerate(make("llama"), page_size=16)
    ours(model)
    undo = change(model)
    try:
        for _ in range(2):
            with pytest.raises(NotImplementedError, match=rf"accelerate: the model changed \(.*\): .*{text}"):
                ours(model)
        with pytest.raises(NotImplementedError, match=text):
            model.flashkernel.submit([1, 2, 3])
        if name != "another epsilon":
            fresh = make("llama")
            undo_fresh = change(fresh)
            with pytest.raises(NotImplementedError, match=text):
                accelerate(fresh)
            undo_fresh()
    finally:
        undo()
    assert ours(model) == stock(model)


def test_dropout_is_refused_when_it_would_happen() -> None:
    """`accelerate` does not refuse it, nor does a call that drops nothing; switching the mode rebuilds nothing."""
    model = accelerate(make("gpt2").train(), page_size=16)
    inner = model.flashkernel.model
    with pytest.raises(NotImplementedError, match=r"drop drops out 0\.1 of its values .*call model\.eval"):
        ours(model)
    model.eval()
    assert ours(model) == stock(model) and model.flashkernel.model is inner
    model = accelerate(make("llama"), page_size=16)
    model.train()
    assert ours(model) == stock(model)
    model.model.layers[1].self_attn.attention_dropout = 0.2
    with pytest.raises(NotImplementedError, match=r"layers\.1\.self_attn drops out 0\.2"):
        ours(model)


def test_a_plain_subclass_of_the_model_is_served() -> None:
    class Mine(transformers.LlamaForCausalLM):
        def shout(self) -> str:
            return "!"

    class Doubled(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = make("llama")
    model.__class__ = Mine
    accelerate(model, page_size=16)
    assert ours(model) == stock(model) and model.shout() == "!"
    model.__class__ = Doubled
    with pytest.raises(NotImplementedError, match=r"the model is a .*Doubled"):
        ours(model)


def test_changes_while_requests_run_are_refused() -> None:
    model = accelerate(make("llama"), page_size=16)
    engine = model.flashkernel
    request = engine.submit(IDS[0].tolist(), max_new_tokens=20)
    engine.step()
    in_place(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the model changed \(its weights\) while requests run"):
            engine.submit([1, 2, 3])
    model.half()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the model changed \(model\..*\) while requests run"):
            ours(model)
    engine.cancel(request)
    model.float()
    assert ours(model) == stock(model)


def test_the_engine_itself_follows() -> None:
    """submit, score and lockstep, as generate."""
    model = accelerate(make("llama"), page_size=16)
    engine = model.flashkernel
    ids = IDS[0].tolist()
    for change in (in_place, data_replaced, resized):
        change(model)
        fresh = accelerate(copy.deepcopy(model), page_size=16).flashkernel
        assert list(engine.generate([ids], max_new_tokens=9)) == list(fresh.generate([ids], max_new_tokens=9))
        assert engine.score(ids).tolist() == fresh.score(ids).tolist()
        with engine.lockstep([ids], 3) as got, fresh.lockstep([ids], 3) as expected:
            assert torch.equal(got.prefill(), expected.prefill())


def test_what_a_look_costs() -> None:
    """350 modules and parameters, as many as a Llama of 1B has: some 0.3 ms on a quiet machine."""
    model = make("llama", num_hidden_layers=16)
    watch = Watch(model)
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        assert watch.changed() is None and not watch.written()
        times.append(time.perf_counter() - begin)
    assert min(times) < 5e-3


def test_fingerprints_see_bits_and_places() -> None:
    model = make("gpt2", torch.bfloat16)
    watch = Watch(model)
    before = watch.fingerprint()
    assert before == watch.fingerprint()
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        for at in (0, flat.numel() - 1, flat.numel() // 2):
            kept = flat[at].clone()
            flat[at] = -kept
            assert watch.fingerprint() != before
            flat[at] = kept
        if flat.numel() > 2000:
            for a, b in ((0, 1), (7, 1028), (5, flat.numel() - 1)):
                flat[[a, b]] = flat[[b, a]]
                assert flat[a] == flat[b] or watch.fingerprint() != before
                flat[[a, b]] = flat[[b, a]]
    assert watch.fingerprint() == before


# --- copies, pickles and files


def saved_by_torch(model: Any, folder: Path) -> Any:
    torch.save(model, folder / "model.pt")
    bytes_of_weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert (folder / "model.pt").stat().st_size < 1.5 * bytes_of_weights + 300_000
    return torch.load(folder / "model.pt", weights_only=False)


def saved_state(model: Any, folder: Path) -> Any:
    torch.save(model.state_dict(), folder / "state.pt")
    found = copy.deepcopy(restore(copy.deepcopy(model)))
    in_place(found)
    found.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    return found


def saved_by_safetensors(model: Any, folder: Path) -> Any:
    from safetensors.torch import load_model, save_model

    save_model(model, str(folder / "model.safetensors"))
    found = copy.deepcopy(model)
    in_place(found)
    load_model(found, str(folder / "model.safetensors"))
    return found


def saved_pretrained(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()


COPIES: dict[str, Callable[[Any, Path], Any]] = {
    "copy.deepcopy": lambda model, folder: copy.deepcopy(model),
    "pickle": lambda model, folder: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_by_torch,
    "state_dict": saved_state,
    "safetensors' save_model": saved_by_safetensors,
    "save_pretrained": saved_pretrained,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("generated", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("name", COPIES)
def test_copies_are_stock_models(family: str, name: str, generated: bool, tmp_path: Path) -> None:
    model = accelerate(make(family), page_size=16)
    before = stock(model)
    if generated:
        ours(model)
    found = COPIES[name](model, tmp_path)
    assert type(found) is type(model) and "flashkernel" not in vars(found) and "generate" not in vars(found)
    assert found.generate(IDS, **OPTIONS).tolist() == before
    places = [(p.untyped_storage().data_ptr(), p.untyped_storage().nbytes()) for p in found.parameters()]
    assert len(set(places)) == len(places)
    accelerate(found, page_size=16)
    in_place(found)
    assert ours(found) == stock(found) and ours(model) == before  # neither is the other's
    assert model.flashkernel is not found.flashkernel
    restore(model)
    assert not {"generate", "flashkernel", "__reduce_ex__"} & vars(model).keys()
    assert copy.deepcopy(model).generate(IDS, **OPTIONS).tolist() == before


def test_parameters_are_separate_tensors(family: str) -> None:
    """Saving sees no shared memory, though matrices lie one behind the other."""
    model = accelerate(make(family), page_size=16)
    places = [(p.untyped_storage().data_ptr(), p.untyped_storage().nbytes()) for p in model.parameters()]
    assert len(set(places)) == len(places)
    for parameter in model.parameters():
        assert parameter.storage_offset() == 0 and parameter.is_leaf and parameter.requires_grad
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    bytes_of_weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert buffer.tell() < bytes_of_weights + 100_000
