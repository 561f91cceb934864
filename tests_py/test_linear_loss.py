"""linear_cross_entropy, linear_selected_log_prob and their gradients: against the oracle, the oracle against its own
differences, and what the ops promise of memory and of bits.
"""

from __future__ import annotations

import numpy as np
import pytest

import flashkernel as fk
from conftest import Maker, f64
from flashkernel import reference, testing

OPTIONS = [
    {},
    {"reduction": "none"},
    {"reduction": "sum", "label_smoothing": 0.2},
    {"class_weights": True, "ignore_index": 5},
    {"class_weights": True, "label_smoothing": 0.1, "reduction": "mean"},
    {"z_loss": 0.02},
    {"softcap": 2.5},
    {"class_weights": True, "label_smoothing": 0.1, "z_loss": 0.02, "softcap": 2.5, "ignore_index": 5, "bias": True},
]


def inputs(make: Maker, tokens: int = 9, features: int = 16, classes: int = 1300):
    """x, weight and bias whose logits are exact in every dtype: what linear rounds is another test's business."""
    x = make.array(make.rng.integers(-1, 2, (tokens, features)).astype(float))
    weight = make.array(make.rng.integers(-2, 3, (classes, features)) / 4)
    bias = make.array(make.rng.integers(-2, 3, classes) / 4)
    targets = make.rng.integers(0, classes, tokens)
    targets[::4] = 5
    return x, weight, targets, bias


def split(make: Maker, options: dict, classes: int = 1300):
    """The options of a call, and those of the oracle."""
    options = dict(options)
    with_bias = options.pop("bias", False)
    if options.pop("class_weights", False):
        weights = np.abs(make.rng.standard_normal(classes)).astype(np.float32)
        return (
            with_bias,
            {**options, "class_weights": make.array(weights, "float32")},
            {
                **options,
                "class_weights": weights,
            },
        )
    return with_bias, options, options


@pytest.fixture(params=["numpy", "torch"])
def make(request, dtype) -> Maker:
    return Maker(request.param, dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values(make, options):
    x, weight, targets, bias = inputs(make)
    with_bias, given, known = split(make, options)
    bias = bias if with_bias else None
    ours = fk.linear_cross_entropy(
        x, weight, make.index(targets, np.int32), bias, **given, return_z_loss=True, return_lse=True, **make.kwargs
    )
    bias64 = None if bias is None else f64(bias)
    truth = reference.linear_cross_entropy(f64(x), f64(weight), targets, bias64, **known)
    for got, want in zip(ours, truth, strict=True):
        testing.assert_close(got, want, "float32")
    alone = fk.linear_cross_entropy(x, weight, make.index(targets), bias, **given, **make.kwargs)
    np.testing.assert_array_equal(f64(alone), f64(ours[0]))

    grad = make.array(make.rng.standard_normal(truth[0].shape), "float32")
    arguments = x, weight, make.index(targets), ours[2], bias
    grads = fk.linear_cross_entropy_backward(grad, *arguments, **given, **make.kwargs)
    wanted = reference.linear_cross_entropy_backward(f64(grad), f64(x), f64(weight), targets, None, bias64, **known)
    for got, want in zip(grads, wanted, strict=True):
        testing.assert_close(got, want, make.dtype)
    wide = fk.linear_cross_entropy_backward(
        grad, *arguments, **given, need_x=False, need_bias=False, float32_weight=True, **make.kwargs
    )
    assert wide[0] is None and wide[2] is None and str(wide[1].dtype).endswith("float32")
    testing.assert_close(wide[1], wanted[1], "float32" if make.dtype == "float32" else make.dtype)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"softcap": 2.0, "temperature": 1.7}], ids=str)
def test_log_prob(make, options):
    x, weight, targets, bias = inputs(make)
    options = {**options, "ignore_index": 5}
    ours = fk.linear_selected_log_prob(x, weight, make.index(targets), bias, **options, return_lse=True, **make.kwargs)
    known = f64(x), f64(weight), targets
    for got, want in zip(ours, reference.linear_selected_log_prob(*known, f64(bias), **options), strict=True):
        testing.assert_close(got, want, "float32")
    grad = make.array(make.rng.standard_normal(len(targets)), "float32")
    grads = fk.linear_selected_log_prob_backward(
        grad, x, weight, make.index(targets), ours[1], bias, **options, **make.kwargs
    )
    wanted = reference.linear_selected_log_prob_backward(f64(grad), *known, None, f64(bias), **options)
    for got, want in zip(grads, wanted, strict=True):
        testing.assert_close(got, want, make.dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_oracle_by_central_differences(options):
    make = Maker("numpy", "float32")
    x, weight, bias = make.rng.standard_normal((6, 5)), make.rng.standard_normal((8, 5)), make.rng.standard_normal(8)
    targets = np.array([0, 5, 7, 3, 5, 1])
    _, _, known = split(make, options, 8)
    grad = make.rng.standard_normal(reference.linear_cross_entropy(x, weight, targets, bias, **known)[0].shape)
    ours = reference.linear_cross_entropy_backward(grad, x, weight, targets, None, bias, **known)
    point = [x, weight, bias]
    for which, gradient in enumerate(ours):
        for i in range(gradient.size):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [p.copy() for p in point]
                moved[which].flat[i] += step
                loss = reference.linear_cross_entropy(moved[0], moved[1], targets, moved[2], **known)[0]
                ends.append((loss * grad).sum())
            assert abs((ends[0] - ends[1]) / 2e-5 - gradient.flat[i]) < 1e-7


def test_a_row_does_not_depend_on_the_others(dtype):
    """Bits of losses, lse and gradients of x, alone and among others, whose numbers cross every threshold of linear."""
    make = Maker("numpy", dtype)
    tokens, features, classes = 700, 48, 2100
    x, weight = make.normal(tokens, features), make.normal(classes, features)
    targets = make.index(make.rng.integers(0, classes, tokens))

    def run(rows: slice) -> tuple:
        given = x[rows], weight, targets[rows]
        options = {"softcap": 20.0, "reduction": "none", "label_smoothing": 0.1}
        loss, lse = fk.linear_cross_entropy(*given, **options, return_lse=True, **make.kwargs)
        log_prob = fk.linear_selected_log_prob(*given, **make.kwargs)
        grad = np.ones(len(given[0]), np.float32)
        more = {"need_weight": False, "need_bias": False}
        grad_x = fk.linear_cross_entropy_backward(grad, *given, lse, **options, **more, **make.kwargs)[0]
        return loss, lse, log_prob, grad_x

    whole = run(slice(0, tokens))
    for begin, count in [(0, 1), (5, 2), (3, 8), (690, 9), (100, 33), (7, 48), (40, 63), (40, 64), (1, 65), (0, 513)]:
        for got, want in zip(run(slice(begin, begin + count)), whole, strict=True):
            np.testing.assert_array_equal(got, want[begin : begin + count])


def test_threads_change_no_bit(dtype):
    make = Maker("numpy", dtype)
    x, weight, targets, bias = inputs(make, tokens=600, classes=1100)
    before = fk.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            fk.set_num_threads(threads)
            loss, lse = fk.linear_cross_entropy(x, weight, targets, bias, return_lse=True, **make.kwargs)
            grads = fk.linear_cross_entropy_backward(
                np.ones((), np.float32), x, weight, targets, lse, bias, **make.kwargs
            )
            results.append((loss, lse, *grads))
    finally:
        fk.set_num_threads(before)
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(got, want)


def test_memory_is_a_chunk():
    """Workspace does not grow with the number of classes, and with tokens by what a token needs of its own."""
    features = 32

    def bytes_of(tokens: int, classes: int, backward: bool = False, **options) -> int:
        x, weight = np.zeros((tokens, features), np.float16), np.zeros((classes, features), np.float16)
        targets, rows = np.zeros(tokens, np.int64), np.zeros(tokens, np.float32)
        if not backward:
            return fk.explain("linear_cross_entropy", x, weight, targets, **options).workspace_bytes
        return fk.explain(
            "linear_cross_entropy_backward", rows[:1].reshape(()), x, weight, targets, rows, **options
        ).workspace_bytes

    chunk = 512 * 1024 * 2
    for backward in (False, True):
        assert bytes_of(4096, 4096, backward) == bytes_of(4096, 262144, backward)
        least, most = bytes_of(4096, 128256, backward), bytes_of(8192, 128256, backward)
        a_token = 20 + 4 * features if backward else 20
        assert most - least == 4096 * a_token
        chunks = chunk + 64 * features * 2 + 4096 * a_token
        if backward:  # the parts of gradients of x, weight and bias, and the sums of the latter two
            chunks += 512 * features * 2 + 1024 * features * 2 + 1024 * features * 4 + 1024 * 4 + 1024 * 4
        assert chunks <= least <= chunks + 8 * 256
    assert bytes_of(4096, 128256, True) < 4096 * 128256 * 2 / 100


def test_peak_is_what_explain_says():
    x, weight = np.ones((600, 16), np.float32), np.ones((5000, 16), np.float32)
    targets = np.arange(600)
    said = fk.explain("linear_cross_entropy", x, weight, targets).workspace_bytes
    fk.linear_cross_entropy(x, weight, targets)
    stats = fk.memory_stats()
    peak = stats["peak_allocated_bytes"] if isinstance(stats, dict) else stats.peak_allocated_bytes
    assert said < 600 * 5000 * 4 / 4 and peak >= said


def test_nothing_counted_and_no_tokens():
    x, weight = np.ones((2, 4), np.float32), np.ones((3, 4), np.float32)
    ignored = np.array([-100, -100])
    assert np.isnan(fk.linear_cross_entropy(x, weight, ignored))
    assert fk.linear_cross_entropy(x, weight, ignored, reduction="sum", z_loss=0.1) == 0
    assert fk.linear_selected_log_prob(x, weight, ignored).tolist() == [0, 0]
    none = np.zeros(0, np.int64)
    loss, lse = fk.linear_cross_entropy(x[:0], weight, none, reduction="sum", return_lse=True)
    assert loss == 0 and lse.shape == (0,)
    grads = fk.linear_cross_entropy_backward(np.ones((), np.float32), x[:0], weight, none, lse)
    assert grads[0].shape == (0, 4) and not grads[1].any() and not grads[2].any()


def test_far_logits():
    """A bias of -inf hides a class; one of 1e6 is a row's only class, and the loss of another is their distance."""
    x, weight = np.zeros((2, 4), np.float32), np.zeros((1200, 4), np.float32)
    bias = np.zeros(1200, np.float32)
    bias[7], bias[3:5] = 1e6, -np.inf
    loss = fk.linear_cross_entropy(x, weight, np.array([7, 1100]), bias, reduction="none")
    assert loss.tolist() == [0.0, 1e6]
    bias[7] = -np.inf
    assert np.isclose(fk.linear_selected_log_prob(x, weight, np.array([0, 1]), bias), -np.log(1197)).all()


def test_refusals():
    x, weight, targets = np.ones((2, 4), np.float32), np.ones((3, 4), np.float32), np.array([0, 1])

    def refused(match: str, *arguments, **options) -> None:
        with pytest.raises(ValueError, match=match):
            fk.linear_cross_entropy(*arguments, **options)

    refused(r"^linear_cross_entropy: targets\[1\]=3; needs 0 to 2, or ignore_index=-100", x, weight, np.array([0, 3]))
    refused(r"weight\.shape\[1\]=3.* x\.shape\[1\]", x, weight[:, :3], targets)
    refused(r"weight is float16.*; .*float32", x, weight.astype(np.float16), targets)
    refused(r"label_smoothing=1\.5.*; needs a number from 0 to 1$", x, weight, targets, label_smoothing=1.5)
    refused(r"z_loss=-0\.1.*; needs a finite number of at least 0", x, weight, targets, z_loss=-0.1)
    refused(r"softcap=-1\.0.*; needs a finite number above 0", x, weight, targets, softcap=-1.0)
    refused(r"class_weights is float16.*; needs float32", x, weight, targets,
            class_weights=np.ones(3, np.float16))  # fmt: skip
    refused(r"class_weights\.shape\[0\]=2.* weight\.shape\[0\]", x, weight, targets,
            class_weights=np.ones(2, np.float32))  # fmt: skip
    refused(r"targets\.shape\[0\]=1", x, weight, targets[:1])
    refused(r"weight\.shape\[0\]=0; needs at least one class", x, weight[:0], targets)
    refused(r"reduction='max'; ", x, weight, targets, reduction="max")
    with pytest.raises(ValueError, match=r"^linear_selected_log_prob: temperature=0\.0.*; needs a finite number above"):
        fk.linear_selected_log_prob(x, weight, targets, temperature=0.0)
    with pytest.raises(ValueError, match=r"^linear_cross_entropy_backward: lse\.shape\[0\]=1"):
        fk.linear_cross_entropy_backward(np.ones((), np.float32), x, weight, targets, np.ones(1, np.float32))
