"""Cross-entropy of an output layer's logits, beside the unfused form: forward, backward, and a step of training, in
which Liger and quack are peers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import flashkernel as fk

from .. import baselines
from ..case import OURS, TOLERANCE, Case, Inputs, Provider, Settings, Work, each, nbytes

__all__ = ["linear_cross_entropy", "linear_cross_entropy_work"]


def _unfused(x: Any, weight: Any, targets: Any) -> Any:
    functional = baselines.require_torch().nn.functional
    return functional.cross_entropy(functional.linear(x, weight).float(), targets)


def _unfused_backward(grad: Any, x: Any, weight: Any, targets: Any, lse: Any) -> Any:
    torch = baselines.require_torch()
    p = torch.exp(torch.nn.functional.linear(x, weight).float() - lse[:, None])
    p.scatter_add_(1, targets[:, None], -torch.ones_like(lse)[:, None])
    g = (p * (grad / len(targets))).to(x.dtype)
    return g @ weight, g.T @ x


def _step(loss: Callable[..., Any], x: Any, weight: Any, targets: Any) -> Any:
    """The loss and its gradients; bench calls without recording any."""
    torch = baselines.require_torch()
    with torch.enable_grad():
        value = loss(x, weight, targets)
        return value.detach(), *torch.autograd.grad(value, (x, weight))


def _liger(x: Any, weight: Any, targets: Any) -> Any:
    module = baselines.optional("liger_kernel.transformers.fused_linear_cross_entropy")
    return module.LigerFusedLinearCrossEntropyLoss()(weight, x, targets)


def _quack(x: Any, weight: Any, targets: Any) -> Any:
    return baselines.optional("quack.linear_cross_entropy").chunked_linear_cross_entropy(x, weight, targets)


def _arguments(s: Settings, dtype: str, tokens: int, features: int, classes: int) -> tuple[Any, Any, Any]:
    torch, inputs = baselines.require_torch(), Inputs(s.device, dtype)
    x, weight = inputs.randn(tokens, features), inputs.randn(classes, features, scale=1 / math.sqrt(features))
    return x, weight, torch.randint(classes, (tokens,), device=s.device)


def linear_cross_entropy_work(
    s: Settings, dtype: str, tokens: int, features: int, classes: int, part: str = "forward"
) -> Work:
    """part: "forward", "backward" or "step", both of them through autograd."""
    arguments = x, weight, targets = _arguments(s, dtype, tokens, features, classes)
    flop = 2.0 * tokens * features * classes * {"forward": 1, "backward": 3, "step": 3}[part]  # a step needs no more
    if part == "forward":
        providers = [Provider("flashkernel", each(fk.linear_cross_entropy, [arguments]), OURS)]
        providers += baselines.stock(s, _unfused, [arguments])
        return Work(providers, TOLERANCE[dtype], flop=flop, read=nbytes(*arguments))
    if part == "backward":
        lse = fk.linear_cross_entropy(*arguments, return_lse=True)[1]
        given = (baselines.require_torch().ones((), device=s.device), *arguments, lse)
        ours = each(lambda *given: fk.linear_cross_entropy_backward(*given, need_bias=False)[:2], [given])
        providers = [Provider("flashkernel", ours, OURS), *baselines.stock(s, _unfused_backward, [given])]
        return Work(providers, 4 * TOLERANCE[dtype], flop=flop, read=nbytes(*arguments), written=nbytes(x, weight))
    import flashkernel.torch as fkt

    leaves = (x.requires_grad_(), weight.requires_grad_(), targets)
    providers = [Provider("flashkernel", each(partial(_step, fkt.linear_cross_entropy), [leaves]), OURS)]
    if "eager" not in s.without:
        providers.append(Provider("eager", each(partial(_step, _unfused), [leaves])))
    if "compile" not in s.without and not s.quick:
        compiled = baselines.compiled(_unfused, s.device)
        providers.append(Provider("compile", each(partial(_step, compiled), [leaves])))
    for name, loss, module in (
        ("liger", _liger, "liger_kernel.transformers.fused_linear_cross_entropy"),
        ("quack", _quack, "quack.linear_cross_entropy"),
    ):
        if s.cuda and name not in s.without and baselines.optional(module) is not None:
            providers.append(Provider(name, each(partial(_step, loss), [leaves])))
    return Work(
        providers, 4 * TOLERANCE[dtype], flop=flop, read=nbytes(x, weight), written=nbytes(x, weight), graph=False
    )


def linear_cross_entropy(s: Settings) -> Iterator[Case]:
    """Output layers of a small and of a Llama-3 vocabulary."""
    shapes = s.pick(quick=[(8, 32, 1100)], cpu=[(256, 576, 49152)], cuda=[(4096, 2048, 128256), (8192, 4096, 128256)])
    for tokens, features, classes in shapes:
        for dtype in s.dtypes_of(("bfloat16",) if s.cuda else ("float32",)):
            for part in ("forward", "backward", "step"):
                name = f"linear_cross_entropy {part} {tokens} x {features} -> {classes}"
                named = {"tokens": tokens, "features": features, "classes": classes}
                build = partial(linear_cross_entropy_work, s, dtype, tokens, features, classes, part)
                yield Case("linear_cross_entropy", name, dtype, s.device, build, named)
