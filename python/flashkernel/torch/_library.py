"""How FlashKernel's ops are registered with torch: one `Library`, and helpers for fakes, gradients and the direct path.

Called by the op modules of this package. Invariant: every op's kernel runs below autograd, on plain tensors and on
their device, and returns new tensors that alias none of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

__all__ = [
    "LIBRARY",
    "autocast",
    "define",
    "dense",
    "direct",
    "empty",
    "like",
    "no_second_derivative",
    "one_number",
    "refuse_gradient",
    "refuse_tangents",
    "refuse_transforms",
]

LIBRARY = torch.library.Library("flashkernel", "DEF")


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    constants: tuple[str, ...] = (),
) -> Any:
    """Registers `flashkernel::<schema>` for the CPU and CUDA and returns a function that calls it, also under
    torch.func's transforms. An op with floats is registered a second time, as `dynamic_<name>` (below).

    constants: tensors that `backward` has no gradient for; where one is asked for, the call is refused.
    """
    op, setup = _register(schema, kernel, fake, backward, setup_context, constants)
    name, floats = schema.split("(", 1)[0], _floats(op)
    function = None if backward is None else _function(name, op, backward, setup)
    dynamic: Any = None
    if floats:
        widened = _of_float_tensors(kernel, op, floats)
        dynamic, _ = _register(_float_tensors(schema), widened, fake, backward, setup_context, constants)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            if floats and _any_dynamic(args, floats):
                return dynamic(*_as_tensors(args, floats))
            return op(*args)
        if function is None:
            refuse_transforms(name, *args)
            return op(*args)
        if forward_ad._current_level >= 0:
            refuse_tangents(name, *args)
        for place in floats:  # a gradient of `dynamic`, while torch's compiler traces it
            if place < len(args) and isinstance(args[place], torch.Tensor):
                return dynamic(*_as_tensors(args, floats))
        if torch._C._functorch.peek_interpreter_stack() is None:
            return op(*args)
        return function.apply(*args)

    return call


def _register(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None,
    setup_context: Callable[..., Any] | None,
    constants: tuple[str, ...],
) -> tuple[Any, Any]:
    """The op of a schema, and its setup_context, which refuses gradients of constants."""
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"flashkernel::{name}", fake, lib=LIBRARY)
    op = getattr(torch.ops.flashkernel, name).default
    if constants and setup_context is not None:
        setup_context = _refusing_gradients(name, op, constants, setup_context)
    if backward is None:
        LIBRARY.impl(name, _refusing(name, _below_autograd(name, op)), "Autograd", with_keyset=True)
    else:
        lib: Any = _RefusingTangents(name)
        torch.library.register_autograd(f"flashkernel::{name}", backward, setup_context=setup_context, lib=lib)
    return op, setup_context


# --- numbers that change between the calls of a compiled function
#
# torch's compiler makes one graph for the first value of a Python float, and one for all others, which reads the float
# from a tensor. An argument `float` of an op would force the compiler back to a graph for each value. So an op that has
# one is registered a second time, as `dynamic_<name>`, with a tensor on the CPU for each float. A compiled call takes
# that op where one of its floats may change. Integers that may change are `SymInt` in the schemas.


def _floats(op: Any) -> tuple[int, ...]:
    """Which arguments are `float` or `float?`."""
    kinds = ("float", "Optional[float]")
    return tuple(i for i, argument in enumerate(op._schema.arguments) if str(argument.type) in kinds)


def _float_tensors(schema: str) -> str:
    """The schema of `dynamic_<name>`: with a tensor for each float, which None stands for where it has a default."""
    schema = re.sub(r"\bfloat (\w+)=[^,)]+", r"Tensor? \1=None", f"dynamic_{schema}")
    return re.sub(r"\bfloat(\??) ", r"Tensor\1 ", schema)


def _of_float_tensors(kernel: Callable[..., Any], op: Any, floats: tuple[int, ...]) -> Callable[..., Any]:
    """The kernel of `dynamic_<name>`."""
    fill = [op._schema.arguments[place].default_value for place in floats]

    def of_float_tensors(*args: Any) -> Any:
        given = list(args)
        for place, default in zip(floats, fill, strict=True):
            if place < len(given):
                given[place] = default if given[place] is None else given[place].item()
        return kernel(*given)

    return of_float_tensors


def _any_dynamic(args: tuple[Any, ...], floats: tuple[int, ...]) -> bool:
    """Under torch's compiler: whether a float among the arguments stands for any value."""
    from torch.fx.experimental import symbolic_shapes

    if not hasattr(symbolic_shapes, "has_static_value"):
        return False  # torch before 2.9
    for place in floats:
        number = args[place] if place < len(args) else None
        if isinstance(number, torch.Tensor) or (number is not None and not symbolic_shapes.has_static_value(number)):
            return True
    return False


def _as_tensors(args: tuple[Any, ...], floats: tuple[int, ...]) -> list[Any]:
    given = list(args)
    for place in floats:
        if place < len(given) and given[place] is not None and not isinstance(given[place], torch.Tensor):
            # A product: that is what the compiler can turn into one of tensors. It is exact.
            given[place] = torch.ones((), dtype=torch.float64, device="cpu") * given[place]
    return given


class _RefusingTangents:
    """`LIBRARY` as register_autograd sees it: the kernel that it registers looks for tangents first.

    A caller of `torch.ops.flashkernel.<name>` passes `call` by, and what register_autograd makes drops tangents.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def impl(self, op_name: Any, kernel: Callable[..., Any], key: str, **options: Any) -> None:
        LIBRARY.impl(op_name, _refusing(self._name, kernel), key, **options)


def one_number(number: float, like: torch.Tensor) -> torch.Tensor:
    """A tensor of float32 beside `like`; under torch's compiler of any value."""
    if torch.compiler.is_compiling():
        return torch.ones((), dtype=torch.float32, device=like.device) * number
    return torch.full((), number, dtype=torch.float32, device=like.device)


def _refusing_gradients(
    name: str, op: Any, constants: tuple[str, ...], setup_context: Callable[..., Any]
) -> Callable[..., Any]:
    arguments = [argument.name for argument in op._schema.arguments]
    places = {constant: arguments.index(constant) for constant in constants}

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        for constant, place in places.items():
            if ctx.needs_input_grad[place]:
                raise NotImplementedError(
                    f"{name}: {constant} requires a gradient, and this op has none of it; detach it"
                )
        setup_context(ctx, inputs, output)

    return setup


def _refusing(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def refusing(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:
            refuse_tangents(name, *args, *kwargs.values())
        return kernel(keyset, *args, **kwargs)

    return refusing


def _below_autograd(name: str, op: Any) -> Callable[..., Any]:
    """The kernel of autograd's key for an op that has no gradient: the op itself, where none is asked for."""

    def below(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (*args, *kwargs.values())):
            raise NotImplementedError(
                f"{name}: an argument requires a gradient, and this op has none; call it under torch.no_grad()"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    return below


def _function(name: str, op: Any, backward: Callable[..., Any], setup_context: Callable[..., Any] | None) -> Any:
    """The op as torch.func's grad, vjp and vmap want it: what register_autograd makes knows none of them."""

    def keep_nothing(ctx: Any, inputs: Any, output: Any) -> None:
        """For ops whose gradient is refused."""

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_no_tangents(name))

    members = {
        "forward": staticmethod(lambda *args: op(*args)),
        "setup_context": staticmethod(setup_context or keep_nothing),
        "backward": staticmethod(backward),
        "jvp": staticmethod(jvp),
        "generate_vmap_rule": True,  # through the dispatcher's fallback, one example after the other
    }
    return type(f"Transformed_{name}", (torch.autograd.Function,), members)


def _no_tangents(name: str) -> str:
    return (
        f"{name}: an argument carries a forward-mode derivative (jvp, jacfwd, forward_ad), and flashkernel.torch has "
        "reverse mode only; use backward(), torch.func.vjp or jacrev"
    )


def refuse_tangents(name: str, *args: Any) -> None:
    """Raises where a forward-mode derivative would be dropped without a word."""
    for arg in args:
        if isinstance(arg, torch.Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
            raise NotImplementedError(_no_tangents(name))


def refuse_transforms(name: str, *args: Any) -> None:
    """For what writes to its arguments: raises where forward mode or torch.func would not see it."""
    if torch.compiler.is_compiling():
        return
    if forward_ad._current_level >= 0:
        refuse_tangents(name, *args)
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            f"{name}: it writes to its arguments, which vmap, grad and jvp can't follow; call it outside of them"
        )


def refuse_gradient(message: str) -> Callable[..., Any]:
    """The `backward` of an op without one: an error instead of a gradient that is silently missing."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(message)

    return refuse


def no_second_derivative(name: str) -> Callable[..., Any]:
    """The `backward` of an op that itself computes gradients."""
    return refuse_gradient(
        f"flashkernel::{name}: second derivatives are not implemented; call backward without create_graph=True"
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def direct(*tensors: torch.Tensor | None) -> bool:
    """Whether the compiled op may be called at once: nothing traces, transforms or records, and all are plain tensors.

    Going through torch's dispatcher costs a few microseconds that a call without a gradient need not pay.
    """
    if (
        torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return False
    grad = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or (grad and tensor.requires_grad)):
            return False
    return True  # where none is recorded, the compiled ops take parameters as they are


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """The operands of a product, as torch's own products take them under autocast: float16, bfloat16 and float32
    tensors in its dtype, with their gradients; all else, and everything outside autocast, as it is.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    lower = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(t.to(dtype) if t is not None and t.dtype in lower else t for t in tensors)


def dense(tensor: Any) -> Any:
    """A gradient as autograd gives it may be expanded (`sum().backward()`); kernels need a contiguous last dim."""
    if tensor is None or tensor.dim() == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous()


def empty(like: torch.Tensor) -> torch.Tensor:
    """Stands for an absent result: an op's schema can't return None."""
    return like.new_empty(0)


def like(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor whose dims lie in memory in the order of `tensor`'s, its last one contiguous: heads that were split
    off a projection [batch, seq, heads * dim] get results, and gradients, that join again without a copy.
    """
    new = torch.empty_like(tensor)
    return new if new.stride(-1) == 1 else torch.empty_like(tensor, memory_format=torch.contiguous_format)
