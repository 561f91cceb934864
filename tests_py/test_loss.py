"""cross_entropy and its gradient against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

import flashkernel as fk
from conftest import f64
from flashkernel import reference, testing


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_cross_entropy(make, reduction, label_smoothing, index):
    logits = make.normal(7, 33)
    targets = np.array([0, 32, -100, 5, 5, 17, -100])
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    given = make.index(targets, index)
    loss, lse = fk.cross_entropy(logits, given, return_lse=True, **options, **make.kwargs)
    truth, true_lse = reference.cross_entropy(f64(logits), targets, **options)
    testing.assert_close(loss, truth, "float32")
    testing.assert_close(lse, true_lse, "float32")
    grad = make.array(make.rng.standard_normal(truth.shape), "float32")
    ours = fk.cross_entropy_backward(grad, logits, given, lse, **options, **make.kwargs)
    make.check(ours, reference.cross_entropy_backward(f64(grad), f64(logits), targets, **options))
    assert fk.cross_entropy_backward(grad, logits, given, lse, out=logits, **options, **make.kwargs) is logits
    np.testing.assert_array_equal(f64(logits), f64(ours))


def test_one_gradient_for_all_rows(make):
    """What autograd hands down for the sum of the losses: one number by a stride of 0."""
    logits, targets = make.normal(5, 33), make.index([0, 32, -100, 5, 17])
    lse = fk.cross_entropy(logits, targets, reduction="none", return_lse=True, **make.kwargs)[1]
    one = make.array(np.array([0.75]), "float32")
    expanded = np.broadcast_to(one, 5) if make.framework == "numpy" else one.expand(5)
    same = make.array(np.full(5, 0.75), "float32")
    got, want = (
        fk.cross_entropy_backward(grad, logits, targets, lse, reduction="none", **make.kwargs)
        for grad in (expanded, same)
    )
    np.testing.assert_array_equal(f64(got), f64(want))
    every_other = make.array(np.arange(10.0), "float32")[::2]
    got, want = (
        fk.cross_entropy_backward(grad, logits, targets, lse, reduction="none", **make.kwargs)
        for grad in (every_other, make.array(np.arange(0.0, 10.0, 2), "float32"))
    )
    np.testing.assert_array_equal(f64(got), f64(want))


def test_nothing_counted(make):
    logits, targets = make.normal(2, 5), make.index([-1, -1])
    mean = fk.cross_entropy(logits, targets, ignore_index=-1, **make.kwargs)
    total = fk.cross_entropy(logits, targets, ignore_index=-1, reduction="sum", **make.kwargs)
    assert np.isnan(f64(mean)) and f64(total) == 0


def test_large_logits(make):
    logits = make.array([[3e4, -3e4, 0.0]])
    assert f64(fk.cross_entropy(logits, make.index([0]), **make.kwargs)) == 0


def test_target_out_of_range(make):
    for bad in (5, -1):
        if not make.host_reads:  # the loss says it
            loss = fk.cross_entropy(make.normal(2, 5), make.index([0, bad]), **make.kwargs)
            assert np.isnan(f64(loss))
            continue
        with pytest.raises(ValueError, match=r"cross_entropy: .*targets"):
            fk.cross_entropy(make.normal(2, 5), make.index([0, bad]), **make.kwargs)
