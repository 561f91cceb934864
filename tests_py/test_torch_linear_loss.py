"""flashkernel.torch's fused losses: gradients beside torch's own, torch.compile, autocast, the module."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import flashkernel.torch as fkt
from flashkernel.torch import _linear_loss_at_once

F = torch.nn.functional


def parts(dtype=torch.float32, tokens=(2, 30), features=16, classes=1100, seed=0):
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(*tokens, features, generator=make).to(dtype).requires_grad_()
    weight = (torch.randn(classes, features, generator=make) / 4).to(dtype).requires_grad_()
    bias = torch.randn(classes, generator=make).to(dtype).requires_grad_()
    targets = torch.randint(classes, tokens, generator=make)
    targets[0, ::5] = -100
    return x, weight, bias, targets


def gradients(loss, *tensors):
    grads = torch.autograd.grad(loss, tensors)
    return [loss.detach(), *grads]


def theirs(x, weight, targets, bias, class_weights=None, **options):
    logits = F.linear(x, weight, bias).flatten(0, -2).float()
    return F.cross_entropy(logits, targets.flatten(), class_weights, **options)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_as_torch(weighted, smoothing, reduction):
    x, weight, bias, targets = parts()
    class_weights = torch.rand(1100) + 0.1 if weighted else None
    options = {"label_smoothing": smoothing, "reduction": reduction}
    ours = gradients(
        fkt.linear_cross_entropy(x, weight, targets, bias, class_weights=class_weights, **options), x, weight, bias
    )
    wanted = gradients(theirs(x, weight, targets, bias, class_weights, **options), x, weight, bias)
    for got, want in zip(ours, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(("rows", "classes"), [(1024, 5000), (32, 500), (7, 5000)])
def test_gradients_with_the_loss(monkeypatch, rows, classes, reduction, smoothing):
    """Without computing the logits again, in one chunk of rows or more, and x's in one of classes or more."""
    monkeypatch.setattr(_linear_loss_at_once, "_rows_of_a_chunk", lambda x: rows)
    monkeypatch.setattr(_linear_loss_at_once, "MOST_CLASSES", classes)
    x, weight, bias, targets = parts(classes=1101)
    options = {"label_smoothing": smoothing, "reduction": reduction}
    loss, lse = fkt.linear_cross_entropy(x, weight, targets, bias, **options, return_lse=True, recompute=False)
    wanted = gradients(3 * theirs(x, weight, targets, bias, **options), x, weight, bias)
    for _ in range(2):  # the gradients that were kept are not scaled in place
        ours = [3 * loss.detach(), *torch.autograd.grad(3 * loss, (x, weight, bias), retain_graph=True)]
        for got, want in zip(ours, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse, F.linear(x, weight, bias).logsumexp(-1), rtol=2e-5, atol=2e-5)
    assert not lse.requires_grad
    (alone,) = torch.autograd.grad(fkt.linear_cross_entropy(x.detach(), weight, targets, recompute=False), weight)
    (theirs_alone,) = torch.autograd.grad(theirs(x.detach(), weight, targets, None), weight)
    torch.testing.assert_close(alone, theirs_alone, rtol=2e-5, atol=2e-5)
    with torch.no_grad():
        torch.testing.assert_close(
            fkt.linear_cross_entropy(x, weight, targets, bias, **options, recompute=False), wanted[0] / 3
        )


def test_what_needs_its_logits_again():
    x, weight, _, targets = parts()
    for options, reason in (
        ({"reduction": "none"}, "reduction='none'"),
        ({"z_loss": 0.1}, "z_loss"),
        ({"softcap": 5.0}, "softcap"),
        ({"class_weights": torch.ones(1100)}, "class_weights"),
    ):
        with pytest.raises(NotImplementedError, match=f"recompute=False with {reason}"):
            fkt.linear_cross_entropy(x, weight, targets, **options, recompute=False)


def test_gradients_with_the_loss_under_compile_and_transforms():
    x, weight, bias, targets = parts(classes=50)
    flat, indices = x.detach().flatten(0, 1), targets.flatten()

    def step(flat, weight):
        return fkt.linear_cross_entropy(flat, weight, indices, recompute=False)

    wanted = torch.func.grad(lambda f, w: theirs(f, w, indices, None), argnums=(0, 1))(flat, weight.detach())
    torch.testing.assert_close(
        torch.func.grad(step, argnums=(0, 1))(flat, weight.detach()), wanted, rtol=2e-5, atol=2e-5
    )
    flat.requires_grad_()
    loss = torch.compile(step, fullgraph=True, backend="aot_eager")(flat, weight)
    torch.testing.assert_close(torch.autograd.grad(loss, (flat, weight)), wanted, rtol=2e-5, atol=2e-5)
    torch.library.opcheck(
        torch.ops.flashkernel.linear_cross_entropy_at_once.default,
        (flat, weight, indices, bias, -100, 0.1, "mean", True, True, True),
    )


def test_a_loss_a_token_and_the_returned_parts():
    x, weight, bias, targets = parts()
    loss, z, lse = fkt.linear_cross_entropy(
        x, weight, targets, bias, z_loss=0.1, softcap=8.0, reduction="none", return_z_loss=True, return_lse=True
    )
    logits = 8 * torch.tanh(F.linear(x, weight, bias) / 8)
    lse_wanted = logits.logsumexp(-1)
    counted = targets != -100
    z_wanted = torch.where(counted, 0.1 * lse_wanted**2, 0)
    wanted = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view_as(targets) + z_wanted
    torch.testing.assert_close(loss, wanted, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(z, z_wanted, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse, lse_wanted, rtol=2e-5, atol=2e-5)
    assert not z.requires_grad and not lse.requires_grad
    scale = torch.randn_like(wanted)
    for got, want in zip(
        gradients((loss * scale).sum(), x, weight), gradients((wanted * scale).sum(), x, weight), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_log_prob_as_trainers_compute_it():
    x, weight, _, targets = parts()
    targets = targets.clamp(min=0)
    ours = fkt.linear_selected_log_prob(x, weight, targets, temperature=0.8)
    logits = F.linear(x, weight) / 0.8
    wanted = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(ours, wanted, rtol=2e-5, atol=2e-5)
    scale = torch.randn_like(ours)
    for got, want in zip(
        gradients((ours * scale).sum(), x, weight), gradients((wanted * scale).sum(), x, weight), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    with torch.no_grad():  # without a recorded gradient the same bits, past the dispatcher
        assert torch.equal(fkt.linear_selected_log_prob(x, weight, targets, temperature=0.8), ours)


def test_half_precision_is_as_good_as_torchs():
    x, weight, _, targets = parts(torch.bfloat16)
    exact = F.linear(x.detach().double(), weight.detach().double()).flatten(0, -2)
    truth = F.cross_entropy(exact, targets.flatten(), reduction="none")
    ours = fkt.linear_cross_entropy(x, weight, targets, reduction="none").flatten().double()
    own = theirs(x, weight, targets, None, reduction="none").double()
    assert (ours - truth).norm() <= 1.1 * (own - truth).norm() > 0


@pytest.mark.parametrize("op", ["loss", "log_prob"])
def test_compiled(op):
    x, weight, bias, targets = parts()

    def run(x, weight, bias):
        if op == "loss":
            return fkt.linear_cross_entropy(x, weight, targets, bias, z_loss=1e-3) * 2
        return fkt.linear_selected_log_prob(x, weight, targets, bias, ignore_index=-100).sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for got, want in zip(
        gradients(compiled(x, weight, bias), x, weight, bias), gradients(run(x, weight, bias), x, weight, bias),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(got, want)


def test_opcheck():
    x, weight, bias, targets = parts(tokens=(1, 6), classes=40)
    x = x[0].detach().requires_grad_()
    options = (-100, 0.1, 0.01, 5.0, "mean")
    torch.library.opcheck(
        torch.ops.flashkernel.linear_cross_entropy.default, (x, weight, targets[0], bias, None, *options)
    )
    torch.library.opcheck(
        torch.ops.flashkernel.linear_selected_log_prob.default, (x, weight, targets[0], bias, 0.0, 1.0, -100)
    )


def test_only_what_needs_a_gradient():
    x, weight, _, targets = parts()
    loss = fkt.linear_cross_entropy(x.detach(), weight, targets)
    loss.backward()
    assert weight.grad is not None and x.grad is None
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(fkt.linear_cross_entropy(x, weight, targets), x, create_graph=True)[0].sum().backward()


def test_autocast():
    x, weight, bias, targets = parts()
    with torch.autocast("cpu", torch.bfloat16):
        loss = fkt.linear_cross_entropy(x, weight, targets, bias)
    assert loss.dtype == torch.float32
    loss.backward()
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(loss, theirs(x, weight, targets, bias), rtol=2e-2, atol=2e-2)


def test_module():
    x, weight, bias, targets = parts()
    loss = fkt.LinearCrossEntropyLoss(torch.rand(1100), label_smoothing=0.1, z_loss=1e-3)
    assert "z_loss=0.001" in repr(loss) and "class_weights" in loss.state_dict()
    wanted = fkt.linear_cross_entropy(
        x, weight, targets, bias, class_weights=loss.class_weights, label_smoothing=0.1, z_loss=1e-3
    )
    assert torch.equal(loss(x, weight, targets, bias), wanted)
