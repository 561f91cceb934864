"""JAX's arrays through DLPack: right results as JAX arrays, none written to, and no derivative that is dropped."""

from __future__ import annotations

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
jnp = jax.numpy

import flashkernel as fk
from keyword_calls import arrays, calls, replaced, written

# What an op writes to by its nature, and what only torch's tensors can be.
IN_PLACE = {"kv_append", "kv_copy_pages"}
OUTPUTS = ("out", "residual_out", "grads", "q_out", "logprob")
CASES = calls()


def to_jax(value):
    return jnp.asarray(value.numpy())


def given(name):
    """(op, keywords of torch tensors) without what a caller may leave out to be written."""
    op, keywords = CASES[name]
    needed = ("out",) if op.endswith("_backward") and op != "linear_backward" else ()
    return op, {k: v for k, v in keywords.items() if k not in OUTPUTS or k in needed}


def leaves(value):
    return [x for part in value for x in leaves(part)] if isinstance(value, tuple | list) else [value]


READ_ONLY = [name for name, case in CASES.items() if case[0] not in IN_PLACE and case[0] != "check_block_table"]


@pytest.mark.parametrize("name", READ_ONLY)
def test_results(name):
    op, keywords = given(name)
    if op == "cross_entropy_backward":
        del keywords["out"]
    expected = getattr(fk, op)(**keywords)
    ours = keywords
    for path, tensor in arrays(keywords).items():
        ours = replaced(ours, path, to_jax(tensor))
    found = getattr(fk, op)(**ours)
    for have, want in zip(leaves(found), leaves(expected), strict=True):
        assert (have is None) == (want is None)
        if want is not None:
            assert isinstance(have, jax.Array)
            np.testing.assert_array_equal(np.asarray(have), want.numpy())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits(dtype):
    x = jnp.linspace(-2, 2, 8, dtype=dtype).reshape(2, 4)
    found = fk.softmax(x)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(found.astype("float32"), jax.nn.softmax(x.astype("float32")), atol=4e-3)


@pytest.mark.parametrize("name, path", [(name, path) for name in CASES for path in written(name)])
def test_arrays_are_not_written_to(name, path):
    """JAX's arrays can't change, so that one is no place for a result."""
    op, keywords = CASES[name]
    before = to_jax(arrays(keywords)[path])
    kept = np.array(before)
    with pytest.raises(ValueError, match=rf"^{op}: .*jax"):
        getattr(fk, op)(**replaced(keywords, path, before))
    np.testing.assert_array_equal(np.asarray(before), kept)


@pytest.mark.parametrize("name", CASES)
def test_tracers_are_refused(name):
    op, keywords = CASES[name]
    path, tensor = next((p, t) for p, t in arrays(keywords).items() if p not in written(name))
    array = to_jax(tensor)

    def run(value):
        return getattr(fk, op)(**replaced(keywords, path, value))

    transforms = [lambda: jax.jit(run)(array), lambda: jax.vmap(run)(array[None])]
    if torch.is_floating_point(tensor):
        transforms += [
            lambda: jax.grad(lambda value: jnp.sum(run(value)))(array),
            lambda: jax.jvp(run, (array,), (array,)),
        ]
    for transform in transforms:
        with pytest.raises(TypeError, match=rf"^{op}: .* JAX tracer .*can't run under jax\.jit, grad or vmap"):
            transform()
