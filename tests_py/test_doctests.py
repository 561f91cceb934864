"""Every public name is documented, and every example in the documentation runs."""

from __future__ import annotations

import doctest
import importlib
import inspect

import pytest

import flashkernel as fk

OPS = [
    name
    for name in fk.__all__
    if inspect.isbuiltin(getattr(fk, name)) and "stream" in inspect.signature(getattr(fk, name)).parameters
]
MODULES = ("flashkernel", "flashkernel.ops", "flashkernel.testing", "flashkernel.typing", "flashkernel.reference")


def run(text: str, name: str) -> int:
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
    assert result.failed == 0, "".join(report)
    return result.attempted


@pytest.mark.parametrize("name", [n for n in fk.__all__ if n != "__version__"])
def test_documented(name):
    thing = getattr(fk, name)
    assert thing.__doc__ and thing.__doc__.strip()
    attempted = run(thing.__doc__, name)
    if name in OPS:
        assert attempted, "an op without an example"
    if inspect.isclass(thing):
        for attribute in vars(thing):
            if not attribute.startswith("_"):
                assert getattr(thing, attribute).__doc__, f"{name}.{attribute}"


@pytest.mark.parametrize("name", OPS)
def test_ops_say_what_matters(name):
    text = getattr(fk, name).__doc__
    for needed in ("stream:", "dtype:", "Raises:", "Arrays:", ">>> "):
        assert needed in text, needed


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    module = importlib.import_module(name)
    assert module.__doc__
    run(module.__doc__, name)


def test_the_surface_is_there():
    surface = """
    attention attention_varlen attention_paged attention_backward attention_varlen_backward merge_states rope
    rope_table linear linear_backward softmax softmax_backward log_softmax log_softmax_backward layer_norm
    layer_norm_backward rms_norm rms_norm_backward cross_entropy cross_entropy_backward reduce_sum reduce_max
    reduce_mean argmax add swiglu swiglu_backward kv_append kv_read kv_copy_pages KvPagePool KvCache kernels
    explain force memory_stats set_num_threads get_num_threads cpu_features
    """
    assert set(surface.split()) <= set(fk.__all__)
    assert set(fk.__all__) <= set(dir(fk))
