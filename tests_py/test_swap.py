"""`accelerated`: what is swapped, what is left out, and that everything goes back whatever the order.

Kinds of parts times kinds of changes: whatever is changed, the model computes what stock computes, and a hook is called
as often.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.nn.utils.parametrize as parametrize
import torch.nn.utils.prune as prune
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import CheckpointError, checkpoint
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama

from flashkernel.integrations.attention import NAME
from flashkernel.integrations.swap import _configs, _held, accelerated
from test_transformers import IDS, gpt2, llama

MODELS: dict[str, Callable[..., Any]] = {"gpt2": gpt2, "llama": llama}
# A module of each class that a fused kernel stands for, and the parts whose weights or function it takes over.
PARTS = {
    "gpt2": [
        *("transformer.h.1.mlp", "transformer.h.1.mlp.c_fc", "transformer.h.1.mlp.c_proj", "transformer.h.1.mlp.act"),
        *("transformer.h.1.mlp.dropout", "transformer.h.1.ln_1", "transformer.ln_f"),
    ],
    "llama": [
        *("model.layers.1.mlp", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"),
        *("model.layers.1.mlp.down_proj", "model.layers.1.mlp.act_fn", "model.layers.1.input_layernorm", "model.norm"),
        *("model.layers.1.self_attn", "model.layers.1.self_attn.q_proj", "model.rotary_emb"),
    ],
}
CASES = [(family, part) for family, parts in PARTS.items() for part in parts]


def owner(part: str) -> str:
    """The name of the module that a fused class would take over, given one of its parts."""
    at = part.find(".mlp")
    return part if at < 0 else part[: at + 4]


def outcome(model: Any) -> Any:
    """Logits and the embeddings' gradient."""
    model.zero_grad()
    logits = model(input_ids=IDS).logits
    logits.square().mean().backward()
    return logits.detach().clone(), model.get_input_embeddings().weight.grad.clone()


def agree(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-3, atol=1e-5)


# --- Changes. Each takes the model, the name of a part, and a list that every call of a hook or a new forward adds to.


def forward_hook(model: Any, part: str, calls: list[str]) -> None:
    def hook(module: Any, args: Any, out: Any) -> Any:
        calls.append(part)
        return tuple(1.25 * o for o in out[:1]) + tuple(out[1:]) if isinstance(out, tuple) else 1.25 * out

    model.get_submodule(part).register_forward_hook(hook)


def forward_pre_hook(model: Any, part: str, calls: list[str]) -> None:
    def hook(module: Any, args: Any) -> Any:
        calls.append(part)
        return (args[0] * 1.25, *args[1:]) if args else None

    model.get_submodule(part).register_forward_pre_hook(hook)


def full_backward_hook(model: Any, part: str, calls: list[str]) -> None:
    model.get_submodule(part).register_full_backward_hook(lambda module, grads, outs: calls.append(part))


def full_backward_pre_hook(model: Any, part: str, calls: list[str]) -> None:
    model.get_submodule(part).register_full_backward_pre_hook(lambda module, outs: calls.append(part))


def subclass(model: Any, part: str, calls: list[str]) -> None:
    module = model.get_submodule(part)
    stock = type(module)

    class Other(stock):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(part)
            out = super().forward(*args, **kwargs)
            return (out[0] * 1.25, *out[1:]) if isinstance(out, tuple) else out * 1.25

    module.__class__ = Other


def instance_forward(model: Any, part: str, calls: list[str]) -> None:
    module = model.get_submodule(part)
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(part)
        out = stock(*args, **kwargs)
        return (out[0] * 1.25, *out[1:]) if isinstance(out, tuple) else out * 1.25

    module.forward = forward


class _Halved(torch.nn.Module):
    def forward(self, weight: Any) -> Any:
        return weight / 2


def parametrised(model: Any, part: str, calls: list[str]) -> None:
    parametrize.register_parametrization(model.get_submodule(part), "weight", _Halved())


def pruned(model: Any, part: str, calls: list[str]) -> None:
    prune.random_unstructured(model.get_submodule(part), "weight", amount=0.5)


class _Lora(torch.nn.Module):
    def __init__(self, base: Any, calls: list[str], part: str) -> None:
        super().__init__()
        self.base, self.calls, self.part = base, calls, part
        weight = base.weight
        rows, columns = weight.shape if isinstance(base, torch.nn.Linear) else weight.T.shape
        self.a = torch.nn.Parameter(torch.randn(2, columns))
        self.b = torch.nn.Parameter(torch.randn(rows, 2))
        self.weight = base.weight  # as adapters of PEFT show it

    def forward(self, x: Any) -> Any:
        self.calls.append(self.part)
        return self.base(x) + x @ self.a.T @ self.b.T


def adapter(model: Any, part: str, calls: list[str]) -> None:
    parent, _, name = part.rpartition(".")
    torch.manual_seed(5)
    setattr(model.get_submodule(parent), name, _Lora(model.get_submodule(part), calls, part))


CHANGES = [
    *(forward_hook, forward_pre_hook, full_backward_hook, full_backward_pre_hook, subclass, instance_forward),
    *(parametrised, pruned, adapter),
]


def applies(change: Any, model: Any, part: str) -> bool:
    module = model.get_submodule(part)
    if change in (parametrised, pruned, adapter) and not hasattr(module, "weight"):
        return False
    if change is adapter and module.weight.dim() != 2:
        return False
    # The rotary embedding has no gradients, so torch has no place for hooks of its backward pass.
    return not (part == "model.rotary_emb" and change in (full_backward_hook, full_backward_pre_hook))


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize(("family", "part"), CASES)
def test_changed_parts_do_what_they_do_in_stock(family: str, part: str, change: Any, when: str) -> None:
    model = MODELS[family]()
    if not applies(change, model, part):
        return
    calls: list[str] = []
    reference = MODELS[family]()
    change(reference, part, calls)
    torch.manual_seed(7)
    expected, expected_calls = outcome(reference), len(calls)
    calls.clear()
    torch.manual_seed(7)
    if when == "before":
        change(model, part, calls)
    with accelerated(model) as swapped:
        if when == "inside":
            change(model, part, calls)
        copied = {name: p.data for name, p in reference.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.data.copy_(copied[name])
        for name, buffer in model.named_buffers():
            buffer.copy_(dict(reference.named_buffers())[name])
        got = outcome(model)
    assert len(calls) == expected_calls
    agree(got, expected)
    taken = owner(part)
    if when == "before" and "self_attn" not in part and not part.endswith("dropout") and part != "model.rotary_emb":
        assert taken in swapped.left_out, "the reason is told"
    assert not _held and not _configs
    # Afterwards nothing of ours is left.
    assert not [m for m in model.modules() for kind in type(m).__mro__ if "flashkernel" in kind.__module__]
    calls.clear()
    agree(outcome(model), expected)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize(
    "register",
    [
        torch_module.register_module_forward_hook,
        torch_module.register_module_forward_pre_hook,
        torch_module.register_module_full_backward_hook,
        torch_module.register_module_full_backward_pre_hook,
    ],
    ids=lambda register: register.__name__,
)
def test_hooks_of_all_modules(family: str, when: str, register: Any) -> None:
    """The same calls, of the same modules, as in stock."""
    model = MODELS[family]()
    names = {module: name for name, module in model.named_modules()}
    calls: list[str] = []

    def hook(module: Any, *rest: Any) -> None:
        calls.append(names[module])

    handle = register(hook)
    try:
        expected, expected_calls = outcome(model), sorted(calls)
        calls.clear()
        if when == "inside":
            handle.remove()
        with accelerated(model):
            if when == "inside":
                handle = register(hook)
            agree(outcome(model), expected)
        assert sorted(calls) == expected_calls
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("family", "name"),
    [("gpt2", "GPT2MLP"), ("llama", "LlamaMLP"), ("llama", "LlamaRMSNorm"), ("llama", "LlamaAttention")],
)
def test_a_class_whose_forward_was_patched(family: str, name: str, monkeypatch: Any) -> None:
    kind = getattr(modeling_gpt2 if family == "gpt2" else modeling_llama, name)
    stock = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = stock(self, *args, **kwargs)
        return (out[0] * 1.25, *out[1:]) if isinstance(out, tuple) else out * 1.25

    monkeypatch.setattr(kind, "forward", forward)
    model = MODELS[family]()
    expected = outcome(model)
    with accelerated(model) as swapped:
        agree(outcome(model), expected)
    assert name not in swapped and any("forward was replaced" in why for why in swapped.left_out.values())


@pytest.mark.parametrize("what", ["linear", "gelu", "silu"])
def test_torch_classes_whose_forward_was_patched(what: str, monkeypatch: Any) -> None:
    model = gpt2() if what == "gelu" else llama()
    kind = {"linear": torch.nn.Linear, "silu": type(llama().model.layers[0].mlp.act_fn)}.get(what)
    kind = kind or type(model.transformer.h[0].mlp.act)
    stock = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: stock(self, x) * 1.25)
    expected = outcome(model)
    with accelerated(model) as swapped:
        agree(outcome(model), expected)
    assert "GPT2MLP" not in swapped and "LlamaMLP" not in swapped


class _Tagged(torch.Tensor):
    """Stands for a quantised weight: a subclass that computes something else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return (out * 1.25).as_subclass(torch.Tensor) if func is torch.nn.functional.linear else out


def test_weights_of_a_subclass_of_tensor() -> None:
    model = llama()
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = torch.nn.Parameter(linear.weight.data.as_subclass(_Tagged), requires_grad=False)
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        with accelerated(model) as swapped:
            got = model(input_ids=IDS).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert swapped["LlamaMLP"] == 1 and "model.layers.0.mlp" in swapped.left_out


@pytest.mark.parametrize("family", MODELS)
def test_other_dtypes_stay_stock(family: str) -> None:
    model = MODELS[family]().double()
    expected = outcome(model)
    with accelerated(model, attention=False) as swapped:
        agree(outcome(model), expected)
    assert not swapped and all("float64" in why for why in swapped.left_out.values())


def test_layer_norms_that_are_not_plain() -> None:
    model = gpt2()
    block = model.transformer.h[0]
    block.ln_1 = torch.nn.LayerNorm(48, elementwise_affine=False)
    block.ln_2 = torch.nn.LayerNorm(48, bias=False)
    model.transformer.ln_f = torch.nn.LayerNorm((11, 48))
    expected = outcome(model)
    with accelerated(model) as swapped:
        agree(outcome(model), expected)
    assert swapped["LayerNorm"] == 4 and "one dim" in swapped.left_out["transformer.ln_f"]


def test_dropout_is_as_stock() -> None:
    """The fused MLP of GPT-2 calls the model's own dropout."""
    model = gpt2(resid_pdrop=0.5).train()
    torch.manual_seed(3)
    expected = outcome(model)
    with accelerated(model):
        torch.manual_seed(3)
        agree(outcome(model), expected)


# --- RoPE


def test_other_llamas_and_patches_of_rope_survive(monkeypatch: Any) -> None:
    stock = modeling_llama.apply_rotary_pos_emb
    model, other = llama(), llama()
    calls: list[int] = []

    def patch(q: Any, k: Any, *rest: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return tuple(x * 1.25 for x in stock(q, k, *rest, **kwargs))

    expected = outcome(model)
    with accelerated(model):
        with torch.no_grad():
            assert torch.equal(other(input_ids=IDS).logits, expected[0]), "not swapped, bit by bit"
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", patch)
        patched = outcome(model)
        assert len(calls) == 2
    assert modeling_llama.apply_rotary_pos_emb is patch
    calls.clear()
    agree(patched, outcome(model))
    assert len(calls) == 2
    with accelerated(model) as swapped:  # patched before
        agree(outcome(model), patched)
    assert "apply_rotary_pos_emb" not in swapped and len(calls) == 4
    assert swapped.left_out["model.layers.0.self_attn"] == "apply_rotary_pos_emb was replaced"


# --- Overlap


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("options", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_contexts_end_in_any_order(family: str, options: tuple[bool, bool], order: tuple[int, int]) -> None:
    model = MODELS[family]()
    stock = [type(m) for m in model.modules()]
    name = model.config._attn_implementation
    contexts = [accelerated(model, attention=attention) for attention in options]
    counts = [context.__enter__() for context in contexts]
    assert {**counts[0], "attention": 2} == {**counts[1], "attention": 2}
    assert model.config._attn_implementation == NAME
    contexts[order[0]].__exit__(None, None, None)
    still = options[order[1]]
    assert (model.config._attn_implementation == NAME) == still and [type(m) for m in model.modules()] != stock
    contexts[order[1]].__exit__(None, None, None)
    assert [type(m) for m in model.modules()] == stock and model.config._attn_implementation == name
    assert not _held and not _configs


def test_contexts_of_threads_and_tasks() -> None:
    model = llama()
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    stock, name = [type(m) for m in model.modules()], model.config._attn_implementation
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(12):
                with accelerated(model, attention=(seed + i) % 3 > 0), torch.no_grad():
                    got = model(input_ids=IDS).logits
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert [type(m) for m in model.modules()] == stock and model.config._attn_implementation == name

    async def task(seed: int) -> None:
        with accelerated(model):
            for _ in range(seed):
                await asyncio.sleep(0)
            with torch.no_grad():
                torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)

    async def tasks() -> None:
        await asyncio.gather(*(task(seed) for seed in (3, 1, 4, 2)))

    asyncio.run(tasks())
    assert [type(m) for m in model.modules()] == stock and model.config._attn_implementation == name


def test_an_attention_chosen_meanwhile_stays() -> None:
    model = llama()
    with accelerated(model):
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation(NAME)
    with accelerated(model):
        pass
    assert model.config._attn_implementation == NAME


def test_models_that_share_a_config() -> None:
    config = llama().config
    one, two = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    first, second = accelerated(one), accelerated(two)
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert config._attn_implementation == NAME
    second.__exit__(None, None, None)
    assert config._attn_implementation == "sdpa"


# --- Copies


def _through_torch_save(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), _through_torch_save]
)
def test_copies_are_stock(family: str, copied: Any) -> None:
    model = MODELS[family]()
    stock, name = [type(m) for m in model.modules()], model.config._attn_implementation
    expected = outcome(model)
    with accelerated(model):
        other = copied(model)
        assert [type(m) for m in other.modules()] == stock and other.config._attn_implementation == name
        got = outcome(other)
        agree(outcome(model), expected)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_save_pretrained_inside(tmp_path: Any) -> None:
    model = llama()
    with accelerated(model):
        model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(outcome(again), outcome(model))


# --- Gradient checkpointing


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("enabled", ["before", "inside"])
def test_backward_after_the_context_has_closed(family: str, use_reentrant: bool, attention: bool, enabled: str) -> None:
    model = MODELS[family]().train()
    stock, name = [type(m) for m in model.modules()], model.config._attn_implementation
    expected = outcome(model)
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    if enabled == "before":
        model.gradient_checkpointing_enable(**options)
    model.zero_grad()
    with accelerated(model, attention=attention):
        if enabled == "inside":
            model.gradient_checkpointing_enable(**options)
        if use_reentrant:
            model.enable_input_require_grads()
        logits = model(input_ids=IDS, use_cache=False).logits
    assert [type(m) for m in model.modules()] == stock
    logits.square().mean().backward()
    agree((logits.detach(), model.get_input_embeddings().weight.grad), expected)
    assert [type(m) for m in model.modules()] == stock and model.config._attn_implementation == name
    assert not _held and not _configs
    model.zero_grad()
    agree(outcome(model), expected)


def checkpointed(kind: str, model: Any, x: Any, use_reentrant: bool) -> Any:
    """x through `torch.utils.checkpoint` of the caller's own, around a part of the model or all of it."""
    parts: dict[str, Callable[[Any], Any]] = {
        "model": lambda x: model(inputs_embeds=x, use_cache=False).logits,
        "layer": lambda x: layer_of(model)(x, **rotary(model, x)),
        "mlp": lambda x: layer_of(model).mlp(x),
        "norm": lambda x: norm_of(model)(x),
    }
    return checkpoint(parts[kind], x, use_reentrant=use_reentrant)


def layer_of(model: Any) -> Any:
    return model.transformer.h[0] if hasattr(model, "transformer") else model.model.layers[0]


def norm_of(model: Any) -> Any:
    return model.transformer.ln_f if hasattr(model, "transformer") else model.model.norm


def rotary(model: Any, x: Any) -> dict[str, Any]:
    if hasattr(model, "transformer"):
        return {}
    return {"position_embeddings": model.model.rotary_emb(x, torch.arange(x.shape[1])[None])}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["model", "layer", "mlp", "norm"])
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_checkpoints_of_the_callers_own(family: str, use_reentrant: bool, kind: str, closed: bool) -> None:
    """Where the context has closed before the backward pass, torch computes the part again by stock modules: their
    gradients, or torch's error that other tensors were saved.
    """
    model = MODELS[family]().train()
    x = torch.randn(2, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))

    def gradients(context: Any, closed: bool) -> list[Any]:
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        with context:
            out = checkpointed(kind, model, leaf, use_reentrant)
            out = out[0] if isinstance(out, tuple) else out
            if not closed:
                out.square().mean().backward()
        if closed:
            out.square().mean().backward()
        return [leaf.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    expected = gradients(contextlib.nullcontext(), False)
    if closed and not use_reentrant:
        try:
            found = gradients(accelerated(model), True)
        except CheckpointError as error:
            assert "saved" in str(error)
            return
    else:
        found = gradients(accelerated(model), closed)
    assert len(found) == len(expected)
    for ours, stock in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-6)
    assert not _held and not _configs


# --- torch.compile


@pytest.mark.parametrize("family", MODELS)
def test_compiled(family: str) -> None:
    model = MODELS[family]()
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            with accelerated(model):
                torch.testing.assert_close(compiled(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)
            assert torch.equal(compiled(input_ids=IDS).logits, expected)
