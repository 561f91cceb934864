"""JAX's arrays through DLPack: right results as JAX arrays, none written to, and no derivative that is dropped."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
jnp = jax.numpy

import flashkernel as fk
from keyword_calls import arrays, calls, replaced, written

# What an op writes to by its nature, and what only torch's tensors can be.
IN_PLACE = {"decode_step", "kv_append", "kv_copy_pages", "qkv_append"}
# What NumPy itself has none of: integers of the same size, and the dtype that JAX gives NumPy.
FOREIGN = {torch.bfloat16: (torch.int16, jnp.bfloat16), torch.float8_e4m3fn: (torch.uint8, jnp.float8_e4m3fn)}
CASES = calls()
PLATFORMS = ["cpu", *(["gpu"] if fk.num_cuda_devices() and jax.devices()[0].platform == "gpu" else [])]


def to_jax(value, platform="cpu"):
    if value.dtype in FOREIGN:
        bits, kind = FOREIGN[value.dtype]
        value = value.view(bits).numpy().view(kind)
    return jax.device_put(np.asarray(value), jax.devices(platform)[0])


def given(name):
    """(op, keywords of torch tensors) without what a caller may leave out to be written."""
    op, keywords = CASES[name]
    needed = ("out",) if op.endswith("_backward") and op != "linear_backward" else ()
    outputs = {path[0] for path in written(name)}
    return op, {k: v for k, v in keywords.items() if k not in outputs or k in needed}


def values(array):
    """NumPy's; of what NumPy has none of, as float32."""
    if isinstance(array, torch.Tensor):
        return (array.float() if array.dtype in FOREIGN else array).cpu().numpy()
    return np.asarray(array.astype("float32") if array.dtype in (jnp.bfloat16, jnp.float8_e4m3fn) else array)


def leaves(value):
    return [x for part in value for x in leaves(part)] if isinstance(value, tuple | list) else [value]


READ_ONLY = [name for name, case in CASES.items() if case[0] not in IN_PLACE and case[0] != "check_block_table"]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", READ_ONLY)
def test_results(name, platform):
    """The results of torch's tensors on the same device; what is refused of those is refused of JAX's arrays, too."""
    op, keywords = given(name)
    if op == "cross_entropy_backward":
        del keywords["out"]
    theirs = ours = keywords
    with jax.enable_x64(op == "sample"):  # its seed is int64, of which JAX makes int32 otherwise
        for path, tensor in arrays(keywords).items():
            # XLA may change the current device.
            theirs = replaced(theirs, path, tensor.to("cuda:0" if platform == "gpu" else "cpu"))
            ours = replaced(ours, path, to_jax(tensor, platform))
    try:
        expected = getattr(fk, op)(**theirs)
    except (ValueError, RuntimeError) as error:
        assert platform == "gpu"
        with pytest.raises(type(error), match=re.escape(str(error)[:20])):
            getattr(fk, op)(**ours)
        return
    found = getattr(fk, op)(**ours)
    for have, want in zip(leaves(found), leaves(expected), strict=True):
        assert (have is None) == (want is None)
        if want is not None:
            assert isinstance(have, jax.Array) and have.devices() == {jax.devices(platform)[0]}
            np.testing.assert_allclose(values(have), values(want), rtol=1e-6 if platform == "gpu" else 0)


@pytest.mark.skipif("gpu" not in PLATFORMS, reason="needs a CUDA build, JAX with CUDA and a GPU")
def test_calls_follow_xlas_work_and_xla_follows_theirs():
    """Arrays that XLA is still writing, and that are dropped while they are read, in both directions."""
    gpu = jax.devices("gpu")[0]
    x = jax.device_put(np.random.default_rng(0).standard_normal((2048, 2048)).astype(np.float32) / 2048**0.5, gpu)
    work = jax.jit(lambda x: jnp.clip(jax.lax.fori_loop(0, 20, lambda _, y: y @ x, x), -1, 1))
    softmax = jax.jit(lambda x: jax.nn.softmax(x) - x)
    want = np.asarray(softmax(work(x)))
    for _ in range(20):
        soft, late = fk.softmax(work(x)), work(x)
        found = soft - late
        del soft, late
        np.testing.assert_allclose(np.asarray(found), want, atol=1e-6)


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
