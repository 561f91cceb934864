"""What torch records about tensors and ops of `flashkernel` do not: gradients, tangents, changes in place."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import flashkernel as fk
import flashkernel.torch as fkt
from conftest import HAS_GPU, needs_triton
from keyword_calls import arrays, calls, replaced, written

CASES = calls()


def named(case, path):
    return pytest.param(case, path, id=f"{case}-{'.'.join(map(str, path))}")


INPUTS = [
    named(case, path)
    for case, (_, keywords) in CASES.items()
    for path, tensor in arrays(keywords).items()
    if tensor.is_floating_point()
]
WRITTEN = [
    pytest.param(case, path, id=f"{case}-{'.'.join(map(str, path))}") for case in CASES for path in written(case)
]
WITHOUT_GRADIENT = {  # of flashkernel.torch
    "attention_cascade", "attention_fp8", "attention_mla_decode", "attention_paged", "kv_append", "kv_read",
    "latent_append",
    "layer_norm_quantized", "quantize_fp8_blocks", "rms_norm_quantized", "sample",
}  # fmt: skip


def run(case, path=None, value=None):
    op, keywords = calls()[case]
    return getattr(fk, op)(**(keywords if path is None else replaced(keywords, path, value)))


def test_every_op_has_a_call():
    assert {op for op, _ in CASES.values()} == {name for name in fk.__all__ if inspect.isbuiltin(getattr(fk, name))}
    for case in CASES:
        run(case)


@pytest.mark.parametrize("case, path", INPUTS)
def test_gradients_are_not_dropped(case, path):
    op, keywords = CASES[case]
    tensor = arrays(keywords)[path].clone().requires_grad_()
    with pytest.raises(RuntimeError, match=f"^{op}: .* requires a gradient") as caught:
        run(case, path, tensor)
    message = str(caught.value)
    assert "torch.no_grad()" in message and ".detach()" in message
    has_twin = op in fkt.__all__ and op not in WITHOUT_GRADIENT and path not in written(case)
    assert (f"call flashkernel.torch.{op}" in message) == has_twin
    with torch.no_grad():
        run(case, path, tensor)
    with torch.inference_mode():
        run(case, path, tensor)
    run(case, path, tensor.detach())


@pytest.mark.parametrize("case, path", INPUTS)
def test_not_leaves_either(case, path):
    op, keywords = CASES[case]
    tensor = arrays(keywords)[path].clone().requires_grad_().clone()
    with pytest.raises(RuntimeError, match=f"^{op}: .* requires a gradient"):
        run(case, path, tensor)


@pytest.mark.parametrize("case, path", INPUTS)
def test_tangents_are_not_dropped(case, path):
    op, keywords = CASES[case]
    tensor = arrays(keywords)[path]
    with forward_ad.dual_level():
        run(case)  # a level alone is no reason
        with pytest.raises(RuntimeError, match=f"^{op}: .* carries a forward-mode derivative"):
            run(case, path, forward_ad.make_dual(tensor, torch.ones_like(tensor)))
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        run(case, path, forward_ad.make_dual(tensor, torch.ones_like(tensor)))


@pytest.mark.parametrize("case, path", WRITTEN)
def test_changes_are_counted(case, path):
    op, keywords = CASES[case]
    tensor = arrays(keywords)[path].clone()
    others = {at: t._version for at, t in arrays(keywords).items() if at not in written(case)}
    getattr(fk, op)(**replaced(keywords, path, tensor))
    assert tensor._version == 1
    assert others == {at: t._version for at, t in arrays(keywords).items() if at not in written(case)}


def has_products(tensor):
    """torch multiplies no 8-bit floats."""
    return tensor.is_floating_point() and tensor.element_size() > 1


@pytest.mark.parametrize("case, path", [p for p in WRITTEN if has_products(arrays(CASES[p.values[0]][1])[p.values[1]])])
def test_autograd_sees_that_what_it_saved_has_changed(case, path):
    saved = arrays(CASES[case][1])[path].clone()
    factor = torch.ones_like(saved).requires_grad_()
    loss = (factor * saved).sum()
    run(case, path, saved)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


@needs_triton
@pytest.mark.parametrize("case", ["add", "rms_norm", "kv_append", "kv_append, 8 bits", "kv_copy_pages", "merge_states"])
def test_the_triton_twin(case):
    op, keywords = calls()[case]
    device = "cuda" if HAS_GPU else "cpu"

    def run(path, tensor):
        moved = keywords
        for at, t in arrays(keywords).items():
            moved = replaced(moved, at, t.to(device))
        getattr(fk, op)(**replaced(moved, path, tensor), backend="triton")

    for path in written(case):
        tensor = arrays(keywords)[path].to(device).clone()
        run(path, tensor)
        assert tensor._version > 0


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_no_triton_twin_drops_a_gradient(case):
    import flashkernel.triton as fk_triton

    op, keywords = CASES[case]
    if not hasattr(fk_triton, op):
        return  # test_op_tables.py names them
    device = "cuda" if HAS_GPU else "cpu"
    there = keywords
    for at, t in arrays(keywords).items():
        there = replaced(there, at, t.to(device))

    if case.startswith("attention") and "mask" in keywords:
        with pytest.raises(NotImplementedError, match=f"^{op}: mask is given; the Triton kernels read no packed mask"):
            getattr(fk, op)(**there, backend="triton")
        return

    if "block_mask" in keywords:
        with pytest.raises(NotImplementedError, match=f"^{op}: block_mask is given; the Triton kernels read no block"):
            getattr(fk, op)(**there, backend="triton")
        return

    def run(path, tensor):
        getattr(fk, op)(**replaced(there, path, tensor), backend="triton")

    for path, tensor in arrays(there).items():
        if tensor.is_floating_point():
            with pytest.raises(RuntimeError, match=f"^{op}: .* requires a gradient"):
                run(path, tensor.clone().requires_grad_())
            with forward_ad.dual_level(), pytest.raises(RuntimeError, match=f"^{op}: .* forward-mode derivative"):
                run(path, forward_ad.make_dual(tensor, torch.ones_like(tensor)))


def test_in_place_on_an_argument():
    z = torch.ones(3)
    factor = torch.ones(3, requires_grad=True)
    loss = (factor * z).sum()
    assert fk.add(z, z, out=z) is z
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


def test_nothing_is_counted_where_nothing_is_written():
    z = torch.ones(3)
    fk.explain("add", z, z, out=z)
    with pytest.raises(ValueError):
        fk.add(z, torch.ones(4), out=z)
    assert z._version == 0


@pytest.mark.parametrize("case, path", WRITTEN)
def test_inference_tensors_have_no_counter(case, path):
    with torch.inference_mode():
        tensor = arrays(CASES[case][1])[path].clone()
        run(case, path, tensor)
    run(case, path, tensor)
    ordinary = arrays(CASES[case][1])[path].clone()
    with torch.inference_mode():
        run(case, path, ordinary)
    assert ordinary._version == 1


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("kv_append")])
def test_pages_of_the_torch_op(case):
    _, keywords = calls()[case]
    keywords.get("rope", {}).pop("q_out", None)
    pages = [keywords["k_pages"], keywords["v_pages"], *keywords.get("kv_scales", ())]
    before = [page._version for page in pages]
    fkt.kv_append(**keywords)
    after = [page._version for page in pages]
    assert all(a > b for a, b in zip(after, before, strict=True))
    through_the_dispatcher = torch.compile(fkt.kv_append, backend="eager")
    through_the_dispatcher(**keywords)
    assert all(page._version > b for page, b in zip(pages, after, strict=True))
