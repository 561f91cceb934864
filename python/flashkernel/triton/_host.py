"""What the Triton ops share on the host: argument checks in the library's words, outputs, launches.

Every op makes one `Call`. Invariant: tensors are checked before anything is allocated or launched, and nothing on a
device is read by the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.autograd.forward_ad as forward_ad
import triton
from triton.runtime.interpreter import InterpretedFunction

from ._overlap import is_same, overlaps_itself, shared_memory

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INDICES = (torch.int32, torch.int64)


def _probe() -> None:
    """Decorated below: tells how triton.jit decorates, which was settled when triton was imported."""


IS_INTERPRETED = isinstance(triton.jit(_probe), InterpretedFunction)
"""Whether TRITON_INTERPRET=1 was in the environment when triton was imported: kernels then run on the CPU in NumPy."""


def device_function(function: Any) -> Any:
    """triton.jit for functions that kernels call. The interpreter would patch triton.language again at each call of
    one.
    """
    jitted = triton.jit(function)
    return jitted.rewrite() if IS_INTERPRETED else jitted


def name_of(dtype: torch.dtype) -> str:
    """float16 for torch.float16."""
    return str(dtype).removeprefix("torch.")


def shape_text(x: torch.Tensor) -> str:
    """float16[2, 3], for messages."""
    return f"{name_of(x.dtype)}{list(x.shape)}"


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is n or more, and at least `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def merge_dims(shape: Sequence[int], *strides: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The same elements in the same order with as few dims as the strides allow: (shape, strides...), one dim at
    least.
    """
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for d, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(step[-1] == stride[d] * size for step, stride in zip(steps, strides, strict=True)):
            sizes[-1] *= size
            for step, stride in zip(steps, strides, strict=True):
                step[-1] = stride[d]
        else:
            sizes.append(size)
            for step, stride in zip(steps, strides, strict=True):
                step.append(stride[d])
    if not sizes:
        return ((1,), *((0,) for _ in strides))
    return (tuple(sizes), *(tuple(step) for step in steps))


class Call:
    """One call of one op: who speaks in the errors, the device and the stream."""

    def __init__(self, op: str, stream: Any, dtype: Any) -> None:
        self.op, self.stream, self.dtype_hint = op, stream, dtype
        self.device: torch.device | None = None
        self.first = ""
        self.known: dict[str, tuple[torch.Tensor, bool, tuple[str, ...]]] = {}  # name: tensor, written, may be these
        self.writes_given = False

    def fail(self, message: str) -> NoReturn:
        raise ValueError(f"{self.op}: {message}")

    def refuse(self, message: str) -> NoReturn:
        raise NotImplementedError(f"{self.op}: {message}")

    def need(self, condition: bool, message: str) -> None:
        if not condition:
            self.fail(message)

    # --- inputs

    def any_input(self, name: str, x: Any) -> torch.Tensor:
        """A torch tensor on the call's device, apart from what the call writes."""
        x = self._tensor(name, x)
        self._check_memory(name, x, False, ())
        return x

    def _tensor(self, name: str, x: Any) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            self.refuse(f"{name} is a {type(x).__module__}.{type(x).__name__}; the Triton kernels take torch.Tensor")
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError(
                f"{self.op}: {name} requires a gradient, which the Triton kernels do not record; pass "
                f"{name}.detach(), or call under torch.no_grad()"
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(
                f"{self.op}: {name} carries a forward-mode derivative, which the Triton kernels can't follow"
            )
        if self.device is None:
            self.device, self.first = x.device, name
            if not IS_INTERPRETED and x.device.type != "cuda":
                self.refuse(
                    f"{name} is on {x.device}; the Triton kernels need a CUDA device, or TRITON_INTERPRET=1 in the "
                    "environment before triton is imported"
                )
            if self.dtype_hint is not None and str(self.dtype_hint).rsplit(".", 1)[-1] != name_of(x.dtype):
                self.refuse(f"dtype={self.dtype_hint!r} with {name} of {name_of(x.dtype)}; None is needed")
        self.need(x.device == self.device, f"{name} is on {x.device} but {self.first} is on {self.device}")
        return x

    def floats(
        self,
        name: str,
        x: Any,
        dims: int | tuple[int, int] | None = None,
        *,
        like: torch.Tensor | None = None,
        or_float32: bool = False,
        rows: bool = True,
    ) -> torch.Tensor:
        """A tensor of numbers. like: whose dtype it must have (or_float32: or float32); rows: contiguous last dim."""
        x = self.any_input(name, x)
        self.need(x.dtype in FLOATS, f"{name} is {name_of(x.dtype)}; float32, float16 or bfloat16 is needed")
        if like is not None and x.dtype != like.dtype and not (or_float32 and x.dtype == torch.float32):
            also = " or float32" if or_float32 else ""
            self.fail(f"{name} is {name_of(x.dtype)} but {self.first} is {name_of(like.dtype)}; that{also} is needed")
        if dims is not None:
            least, most = (dims, dims) if isinstance(dims, int) else dims
            needed = f"{least}" if least == most else f"{least} to {most}"
            self.need(least <= x.dim() <= most, f"{name} is {shape_text(x)}; {needed} dims are needed")
        if rows and x.numel() and x.dim() and x.shape[-1] > 1:
            self.need(x.stride(-1) == 1, f"{name}.strides[-1]={x.stride(-1)}; a contiguous last dim is needed")
        return x

    def named_float(self, name: str, dtype: Any) -> torch.dtype:
        """A dtype by its name or torch's own."""
        known = {name_of(kind): kind for kind in FLOATS}
        text = str(dtype).rsplit(".", 1)[-1]
        self.need(text in known, f"{name}={dtype!r}; 'float32', 'float16' or 'bfloat16' is needed")
        return known[text]

    def float32(self, name: str, x: Any, shape: Sequence[int]) -> torch.Tensor:
        x = self.any_input(name, x)
        self.need(x.dtype == torch.float32, f"{name} is {name_of(x.dtype)}; float32 is needed")
        self.shape(name, x, shape)
        return x

    def index(self, name: str, x: Any, dims: int | tuple[int, int] = 1) -> torch.Tensor:
        x = self.any_input(name, x)
        self.need(x.dtype in INDICES, f"{name} is {name_of(x.dtype)}; int32 or int64 is needed")
        least, most = (dims, dims) if isinstance(dims, int) else dims
        needed = f"{least}" if least == most else f"{least} to {most}"
        self.need(least <= x.dim() <= most, f"{name} is {shape_text(x)}; {needed} dims are needed")
        return x

    def shape(self, name: str, x: torch.Tensor, shape: Sequence[int]) -> None:
        self.need(tuple(x.shape) == tuple(shape), f"{name} has shape {tuple(x.shape)}; {tuple(shape)} is needed")

    def as_rows(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x [..., n] as a view [rows, n]."""
        try:
            return x.view(-1, x.shape[-1]) if x.shape[-1] else x.new_empty((x[..., :1].numel(), 0))
        except RuntimeError:
            rows = x.numel() // x.shape[-1]
            sizes, _ = merge_dims(x.shape[:-1], x.stride()[:-1])
            if len(sizes) == 1:  # torch's view gives up on some expanded dims of size 1
                return x.as_strided((rows, x.shape[-1]), (merge_dims(x.shape[:-1], x.stride()[:-1])[1][0], 1))
            self.refuse(
                f"{name} has strides {tuple(x.stride())} with shape {tuple(x.shape)}; leading dims that one stride can "
                "walk are needed by the Triton kernel"
            )

    # --- outputs

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """New memory that belongs to the stream of the kernels: torch gives it away again in that stream's order."""
        if self.stream is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        with self.on_device():
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def fill(self, tensor: torch.Tensor, value: float) -> None:
        """On the stream of the kernels, whichever stream is torch's current one."""
        with self.on_device():
            tensor.fill_(value)

    def output(
        self,
        name: str,
        given: Any,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        rows: bool = True,
        may_be: tuple[str, ...] = (),
    ) -> torch.Tensor:
        """The caller's tensor, or a new one. may_be: inputs that it may be, element for element; it must be
        apart from all other arguments.
        """
        if given is None:
            return self.empty(shape, dtype)
        out = self._tensor(name, given)
        self.need(out.dtype == dtype, f"{name} is {name_of(out.dtype)}; {name_of(dtype)} is needed")
        self.shape(name, out, shape)
        if rows and out.numel() and out.dim() and out.shape[-1] > 1:
            self.need(out.stride(-1) == 1, f"{name}.strides[-1]={out.stride(-1)}; a contiguous last dim is needed")
        self.writes(name, out, may_be)
        return out

    def writes(self, name: str, x: torch.Tensor, may_be: tuple[str, ...] = ()) -> None:
        """A tensor of the caller's that a kernel writes: it names no element twice and shares no memory with another
        argument, whichever of them comes first.
        """
        found = overlaps_itself(x)
        if found is not False:
            for d, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
                needed = "a written tensor must not overlap itself"
                self.need(size < 2 or stride != 0, f"{name}.stride[{d}]=0 over {size} elements; {needed}")
            text = f"{name} is {shape_text(x)} with strides {list(x.stride())}"
            if found:
                self.fail(f"{text}, which name an element twice; a written tensor must not overlap itself")
            untold = "it takes too long to tell whether they name an element twice"
            self.fail(f"{text}, of which {untold}; give it simpler strides")
        self.writes_given = True
        self._check_memory(name, x, True, may_be)
        self.changes(x)

    def _check_memory(self, name: str, x: torch.Tensor, is_written: bool, may_be: tuple[str, ...]) -> None:
        """Against every argument so far, where one of the two is written."""
        self.known[name] = x, is_written, may_be
        if not self.writes_given:
            return
        for other_name, (other, other_is_written, other_may_be) in self.known.items():
            if other_name == name:
                continue
            if is_written:
                self._check_apart(name, x, other_name, other, other_name in may_be)
            elif other_is_written:
                self._check_apart(other_name, other, name, x, name in other_may_be)

    def _check_apart(
        self, name: str, written: torch.Tensor, other_name: str, other: torch.Tensor, may_be_same: bool
    ) -> None:
        found = shared_memory(written, other)
        if found is False or (may_be_same and is_same(written, other)):
            return
        if found is None:
            self.fail(
                f"{name} and {other_name} lie between one another, with strides {list(written.stride())} and "
                f"{list(other.stride())}, and it takes too long to tell whether they share memory; make one of them "
                "contiguous"
            )
        if may_be_same:
            self.fail(f"{name} shares part of its memory with {other_name}; they must be the same tensor or apart")
        self.fail(f"{name} shares memory with {other_name}; a written tensor needs memory of its own")

    def changes(self, *tensors: torch.Tensor) -> None:
        """Counts a change of tensors that a kernel writes, as torch does for its own ops: autograd looks at it."""
        for tensor in tensors:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)

    def pair(self, name: str, given: Any, what: str) -> tuple[Any, Any]:
        if given is None:
            return None, None
        if not isinstance(given, tuple | list) or len(given) != 2:
            self.fail(f"{name}={type(given).__name__}; {what} is needed")
        return given[0], given[1]

    # --- work

    @contextlib.contextmanager
    def on_device(self) -> Any:
        """The tensors' device and the caller's stream, within the block."""
        if self.device is None or self.device.type != "cuda":
            yield
            return
        with torch.cuda.device(self.device):
            if self.stream is None:
                yield
                return
            given = self.stream.__cuda_stream__()[1] if hasattr(self.stream, "__cuda_stream__") else int(self.stream)
            with torch.cuda.stream(torch.cuda.ExternalStream(given, device=self.device)):
                yield

    def launch(self, kernel: Any, programs: int, **arguments: Any) -> None:
        """Queues `programs` instances of a kernel; none is fine."""
        if programs:
            with self.on_device():
                kernel[(programs,)](**arguments)

    @property
    def capability(self) -> int:
        """90 for compute capability 9.0; 0 in the interpreter."""
        if IS_INTERPRETED:
            return 0
        major, minor = torch.cuda.get_device_capability(self.device)
        return 10 * major + minor

    @property
    def num_multiprocessors(self) -> int:
        return 4 if IS_INTERPRETED else torch.cuda.get_device_properties(self.device).multi_processor_count
