"""Objects that lie about DLPack, tracers of other frameworks, and classes that come and go."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest
import torch

import flashkernel as fk

x = np.ones((2, 4), np.float32)
JUNK = [None, (), (1,), (1, 0, 0), "ab", b"ab", 3, 1.5, (None, None), ("a", 0), (1.5, 0), (2**70, 0), (1, 2**70)]
JUNK += [(1, -1), (-(2**31) - 1, 0), (99, 0), [1, "x"], {1: 0}, object(), (1, None), (float("nan"), 0), ("\ud800", 0)]


class Lender:
    def __init__(self, device=(1, 0), capsule=None):
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        return self.capsule() if callable(self.capsule) else self.capsule


def used_capsule():
    capsule = x.__dlpack__()
    np.from_dlpack(Lender(capsule=capsule))
    return capsule


def foreign_capsule():
    return x.__array_struct__  # a capsule of another kind


def refused(thing, **options):
    with pytest.raises((ValueError, TypeError), match=r"^(add|softmax): "):
        fk.add(thing, x, **options)
    with pytest.raises((ValueError, TypeError), match=r"^(add|softmax): "):
        fk.softmax(x, out=thing)


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_devices(junk):
    refused(Lender(device=junk))


@pytest.mark.parametrize("junk", [*JUNK, used_capsule, foreign_capsule], ids=range(len(JUNK) + 2))
def test_capsules(junk):
    refused(Lender(capsule=junk))


def test_fuzz():
    rng = random.Random(0)
    parts = [
        None,
        0,
        1,
        2,
        -1,
        2**31,
        2**63,
        1.5,
        "1",
        b"",
        (),
        [],
        object(),
        True,
        float("inf"),
        np.int64(1),
        np.ones(2),
    ]
    for _ in range(2000):
        device = rng.choice([tuple(rng.choices(parts, k=rng.randrange(4))), rng.choices(parts, k=2), rng.choice(parts)])
        thing = Lender(device, rng.choice([*parts, used_capsule, foreign_capsule]))
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=r"^add: "):
            fk.add(thing, thing)


def test_the_message_shows_what_was_given():
    with pytest.raises(ValueError, match=r"Lender.__dlpack_device__\(\) gave \('a', 0\); a pair of ints"):
        fk.add(Lender(("a", 0)), x)
    with pytest.raises(ValueError, match=r'Lender.__dlpack__\(\) gave 5; a capsule "dltensor"'):
        fk.add(Lender(capsule=5), x)
    with pytest.raises(ValueError, match=r'gave <capsule object "used_dltensor'):
        fk.add(Lender(capsule=used_capsule), x)


def test_what_the_lender_raises_arrives():
    class Broken(Lender):
        def __dlpack_device__(self):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fk.add(Broken(), x)


@pytest.mark.parametrize("name", ["max_version", "dl_device", "stream"])
@pytest.mark.parametrize("junk", ["a", (1,), (None, 0), 1.5], ids=range(4))
def test_array_is_asked_for_junk(name, junk):
    array = fk.add(Lender(capsule=x.__dlpack__), Lender(capsule=x.__dlpack__))
    assert isinstance(array, fk.Array)
    if name == "stream":  # not looked at on the CPU
        array.__dlpack__(stream=junk)
        return
    with pytest.raises(TypeError, match=f"{name}="):
        array.__dlpack__(**{name: junk})


def make_class(base):
    return type("Mine", (base,), {})


@pytest.mark.parametrize(
    "base, array",
    [(np.ndarray, lambda cls: x.view(cls)), (torch.Tensor, lambda cls: torch.ones(2, 4).as_subclass(cls))],
    ids=["numpy", "torch"],
)
def test_classes_die(base, array):
    references = []
    for _ in range(1000):
        cls = make_class(base)
        thing = array(cls)
        assert np.asarray(fk.add(thing, thing)).tolist() == (2 * x).tolist()
        references.append(weakref.ref(cls))
        del cls, thing
    gc.collect()
    assert not any(reference() for reference in references)


def test_lenders_die_too():
    references = []
    for _ in range(100):
        cls = type("Mine", (Lender,), {})
        assert fk.add(cls(capsule=x.__dlpack__), cls(capsule=x.__dlpack__)) is not None
        references.append(weakref.ref(cls))
        del cls
    gc.collect()
    assert not any(reference() for reference in references)


def test_an_address_that_comes_to_mean_another_class():
    for _ in range(300):
        array = x.view(make_class(np.ndarray))
        assert fk.add(array, array).tolist() == (2 * x).tolist()
        del array
        tensor = torch.ones(2, 4).as_subclass(make_class(torch.Tensor))
        assert fk.add(tensor, tensor).tolist() == (2 * x).tolist()
        del tensor
        gc.collect(0)


# --- JAX


def jax_like(name, module):
    tracer = type("Tracer", (), {"__module__": "jax._src.core", "__dlpack__": None, "__dlpack_device__": None})
    return type(name, (tracer,), {"__module__": module})


@pytest.mark.parametrize(
    "name, module",
    [
        ("DynamicJaxprTracer", "jax._src.interpreters.partial_eval"),
        ("JVPTracer", "jax._src.interpreters.ad"),
        ("BatchTracer", "jax._src.interpreters.batching"),
    ],
)
def test_tracers_by_name(name, module):
    message = rf"^add: b is a JAX tracer \({module}.{name}\); FlashKernel's ops can't run under jax.jit, grad or vmap"
    with pytest.raises(TypeError, match=message):
        fk.add(x, jax_like(name, module)())


def test_real_tracers():
    jax = pytest.importorskip("jax")
    array = jax.numpy.ones((2, 4))
    for call in (
        jax.jit(lambda a: fk.add(a, a)),
        jax.grad(lambda a: fk.reduce_sum(a)),
        jax.vmap(lambda a: fk.add(a, a)),
    ):
        with pytest.raises(TypeError, match=r"can't run under jax\.jit, grad or vmap"):
            call(array)


def test_a_class_named_like_a_tracer_is_none():
    cls = type("Tracer", (Lender,), {"__module__": "mine"})
    assert fk.add(cls(capsule=x.__dlpack__), cls(capsule=x.__dlpack__)) is not None
