"""Where the engine's tensors live: the one module that knows the array type of a device.

The models call FlashKernel ops on what this module makes and otherwise only slice, reshape and gather. What a decode
step does between ops works in place on arrays that stay where they are, so that a CUDA graph of it can be replayed. A
device is added by one more class with the same methods. bfloat16 has no NumPy dtype: on the CPU it travels as uint16
bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

import flashkernel as fk

from ..quantized import FP8, TILE_ROWS, QuantizedWeight, dequantize, dequantize_tensor, tiled
from .checkpoint import bfloat16_to_float32, float32_to_bfloat16
from .sampling import draw, log_probabilities, penalise

__all__ = ["DTYPES", "CudaArrays", "HostArrays", "TorchArrays"]

DTYPES = ("float32", "float16", "bfloat16")
ALIASES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


class HostArrays:
    """NumPy arrays on the CPU."""

    device = "cpu"
    asynchronous = False  # whether work goes on after a call has returned
    pool_views: ClassVar[dict[str, Any]] = {}  # keyword arguments of KvPagePool.k_pages
    watch: Callable[[Any], None] | None = None  # waits for an event behind work that waits for other processes

    def __init__(self, dtype: str = "float32"):
        dtype = ALIASES.get(dtype, dtype)
        if dtype not in DTYPES:
            raise ValueError(f"generate: dtype {dtype!r}; one of {', '.join(DTYPES)} is needed")
        self.dtype = dtype
        # Keyword arguments of every op: the meaning of uint16 arrays, where needed.
        self.op_options: dict[str, Any] = {"dtype": "bfloat16"} if dtype == "bfloat16" else {}

    # --- making arrays

    def weight(self, values: Any) -> Any:
        """Float32 values in the model's dtype, contiguous."""
        if self.dtype == "bfloat16":
            return float32_to_bfloat16(values)
        return np.ascontiguousarray(values, dtype=self.dtype)

    def float_weight(self, values: Any, offset: float = 0.0) -> Any:
        """Float32 values plus an offset, in float32 whatever the model's dtype."""
        return np.ascontiguousarray(values, dtype=np.float32) + np.float32(offset)

    def stack(self, parts: Sequence[Any]) -> Any:
        """Some weights as one, rows one below the other."""
        return self.weight(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def copied(self, values: Any) -> Any:
        """A part of a tensor as `stack` and `weight` take it, in memory of its own."""
        return values.clone() if hasattr(values, "clone") else np.array(values, order="C")

    def joined(self, parts: Sequence[Any], dim: int) -> Any:
        """Parts as `copied` gives them, one behind the other in a dim."""
        if not isinstance(parts[0], np.ndarray):
            import torch

            return torch.cat(list(parts), dim)
        return np.concatenate(parts, dim)

    def blocks(self, weight: QuantizedWeight) -> QuantizedWeight:
        """A matrix of a file that stays in its blocks, whose rows `take_blocks` looks up."""
        return weight

    def for_linear(self, weight: QuantizedWeight) -> QuantizedWeight:
        """What `blocks` gave, in the layout that `quantized_linear` likes best here."""
        return tiled(weight) if weight.format != FP8 and _likes_tiles() and weight.shape[0] % TILE_ROWS == 0 else weight

    def linear(self, x: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        """`linear` of a weight of numbers, or of one that `for_linear` gave."""
        options.update(self.op_options)
        if isinstance(weight, QuantizedWeight):
            return weight.linear(x, bias, **options)
        return fk.linear(x, weight, bias, **options)

    def take_blocks(self, weight: QuantizedWeight, rows: Any) -> Any:
        """Rows of it, as numbers."""
        return self.weight(dequantize(weight[rows]))

    def transposed(self, weight: Any) -> Any:
        """A weight [in, out] as [out, in], in the layout that `linear` likes best on this device."""
        return weight.T

    def output_rows(self, weight: Any) -> Any:
        """A weight [out, in] in the layout that `linear` likes best on this device; rows of 0 may be added."""
        return weight

    def index(self, values: Any, dtype: str = "int32") -> Any:
        return np.ascontiguousarray(values, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.zeros(shape, dtype)

    def activations(self, shape: tuple[int, ...]) -> Any:
        """Zeros in the model's dtype."""
        return np.zeros(shape, np.uint16 if self.dtype == "bfloat16" else self.dtype)

    def space(self, shape: tuple[int, ...]) -> Any:
        """An array in the model's dtype, to be written whole before it is read."""
        return np.empty(shape, np.uint16 if self.dtype == "bfloat16" else self.dtype)

    # --- reading and writing them; nothing here waits for the device but `to_host` and the functions that `fetch` and
    # `fetch_float` give

    def take(self, table: Any, rows: Any) -> Any:
        """table[rows]: the rows of an embedding table, or some rows of an activation."""
        return np.take(table, rows, axis=0)

    def row(self, table: Any, index: Any) -> Any:
        """table[index[0]], with an index that may lie on the device."""
        return np.take(table, index, axis=0)[0]

    def store_row(self, table: Any, index: Any, values: Any) -> None:
        """table[index[0]] = values"""
        table[index] = values

    def increase(self, target: Any, by: Any) -> None:
        np.add(target, by, out=target)

    def write(self, target: Any, values: np.ndarray) -> None:
        """Host values into an array that stays where it is; queued behind the work so far."""
        target[...] = values

    def fetch(self, values: Any) -> Callable[[], np.ndarray]:
        """Starts a copy to the host; the function returned waits for it and gives it."""
        copy = values.copy()
        return lambda: copy

    def fetch_float(self, values: Any) -> Callable[[], np.ndarray]:
        """`fetch` of values in the model's dtype, as float32."""
        copy = self.to_float32(values.copy())
        return lambda: copy

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """While steps run: the device's own streams and graphs are the current ones, whatever was current before."""
        return contextlib.nullcontext()

    def wait(self) -> None:
        """Returns when all work that was queued is done."""

    def at(self, table: Any, columns: Any) -> Any:
        """table[i, columns[i]] for every row."""
        return np.take_along_axis(table, columns[:, None], axis=1)[:, 0]

    def add_at(self, table: Any, columns: Any, values: Any) -> None:
        """table[i, columns[i, j]] += values[i, j]: [rows, n], int64 [rows, m], [rows, m] of the table's dtype."""
        np.add.at(table, (np.arange(len(table))[:, None], columns), values)

    def floats(self, values: Any) -> Any:
        """Values as float32, on the device."""
        return bfloat16_to_float32(values) if values.dtype == np.uint16 else values.astype(np.float32)

    # --- arithmetic that no op has; computed in float32 and rounded once

    def rounded(self, values: Any) -> Any:
        """Float32 values on the device in the model's dtype."""
        return self.weight(values)

    def scaled(self, values: Any, factor: float) -> Any:
        """values * factor"""
        return self.rounded(self.floats(values) * np.float32(factor))

    def scale_in_place(self, values: Any, factor: float) -> None:
        values[...] = self.scaled(values, factor)

    def multiplied(self, a: Any, b: Any) -> Any:
        """a * b, element by element."""
        return self.rounded(self.floats(a) * self.floats(b))

    def softcapped(self, values: Any, cap: float) -> Any:
        """cap * tanh(values / cap)"""
        return self.rounded(np.float32(cap) * np.tanh(self.floats(values) / np.float32(cap)))

    def clamped_gate(self, gate: Any, up: Any, alpha: float, limit: float) -> Any:
        """(up + 1) * gate / (1 + exp(-alpha * gate)), with gate at most limit and up within +-limit: GPT-OSS's gate."""
        gate = np.minimum(self.floats(gate), np.float32(limit))
        up = np.clip(self.floats(up), np.float32(-limit), np.float32(limit))
        with np.errstate(over="ignore"):  # exp gives infinity, and the gate 0
            return self.rounded((up + 1) * gate / (1 + np.exp(np.float32(-alpha) * gate)))

    def route(self, logits: Any, count: int, softmax_first: bool, normalised: bool) -> tuple[Any, Any]:
        """The `count` largest of each row as float32 weights [rows, count], and their places, int64 [rows, count].

        softmax_first: weights are those of a softmax over all of a row, which add up to 1 only where `normalised`; else
            of one over the largest alone.
        """
        values = self.floats(logits)
        if softmax_first:
            values = np.exp(values - values.max(axis=-1, keepdims=True))
            values /= values.sum(axis=-1, keepdims=True)
        chosen, weights = self.best(values, count)
        if not softmax_first:
            weights = np.exp(weights - weights[:, :1])
        if normalised or not softmax_first:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return weights, chosen

    def probabilities(self, values: Any, sigmoid: bool) -> Any:
        """Softmax, or sigmoid, of float32 rows."""
        if sigmoid:
            with np.errstate(over="ignore"):  # exp gives infinity, and the sigmoid 0
                return 1 / (1 + np.exp(-values))
        values = np.exp(values - values.max(axis=-1, keepdims=True))
        return values / values.sum(axis=-1, keepdims=True)

    def masked(self, values: Any, mask: Any) -> Any:
        """Float32 values where the mask is true, -inf elsewhere."""
        return np.where(mask, values, np.float32(-np.inf))

    def columns(self, table: Any, columns: Any) -> Any:
        """table[i, columns[i, j]]: [rows, n], int64 [rows, m]."""
        return np.take_along_axis(table, columns, axis=-1)

    def view(self, pages: Any) -> Any:
        """A pool's pages as an array that can be sliced."""
        return pages

    def per_head(self, x: Any, weight: Any, out: Any) -> None:
        """out[:, h] = x[:, h] weight[h]: [rows, heads, k], [heads, k, n], [rows, heads, n], of any strides."""
        for h in range(weight.shape[0]):
            fk.linear(x[:, h], weight[h].T, out=out[:, h], **self.op_options)

    def groups(self, chosen: Any, count: int) -> Any:
        """Pairs of a row and one of its `chosen` places, int64 [rows, n], sorted by place: a `Groups` of `count`,
        whose `linear` needs nothing of the host. None: there is no such kernel here."""
        return None

    def weighted_sum(self, values: Any, weights: Any) -> Any:
        """sum over j of values[i n + j] weights[i, j]: [rows n, size], float32 [rows, n] to [rows, size]."""
        parts = self.floats(values).reshape(*weights.shape, -1)
        return self.rounded((parts * weights[..., None]).sum(axis=1))

    def add_rows(self, total: Any, rows: Any, values: Any, weights: Any) -> None:
        """total[rows] += values * weights: float32 [all, n], int64 [some] on the host, [some, n], float32 [some]."""
        total[rows] += self.floats(values) * weights[:, None]

    def add_chosen(self, total: Any, values: Any, weights: Any, chosen: Any, place: int) -> None:
        """total += values * weights where `place` is among the chosen ones of a row: float32 [rows, n], [rows, n],
        float32 and int64 [rows, count]."""
        weight = np.where(chosen == place, weights, np.float32(0)).sum(axis=-1, keepdims=True)
        total += np.where(weight == 0, np.float32(0), self.floats(values) * weight)

    def log_probabilities(self, logits: Any) -> Any:
        """float32 log-softmax [rows, vocab] of logits; in the invariant mode that of `flashkernel.log_softmax`."""
        if fk.is_invariant():
            return fk.log_softmax(self.floats(logits))
        return log_probabilities(self.to_float32(logits))

    def best(self, values: Any, count: int) -> tuple[Any, Any]:
        """The places of the `count` largest values of each row, int64 [rows, count], and those values, best first."""
        order = np.argsort(-values, axis=-1, kind="stable")[:, :count]
        return order, np.take_along_axis(values, order, axis=-1)

    def penalise(self, logits: Any, seen: Any, penalty: Any) -> Any:
        """float32 [rows, vocab]: `sampling.penalise` of each row. seen: bool [rows, vocab]; penalty: float32 [rows]."""
        rows = enumerate(self.to_float32(logits))
        return np.stack([penalise(row, np.flatnonzero(seen[i]), float(penalty[i])) for i, row in rows])

    def sample(self, logits: Any, out: Any, **options: Any) -> None:
        """out [rows] int64: a token for each row of logits, as `flashkernel.sample` draws it; for a row that it
        refuses, the place of the logit that is why.
        """
        fk.sample(logits, out=out, **options, **self.op_options)
        np.maximum(out, ~out, out=out)

    def draw_typical(
        self,
        scores: Any,
        temperature: Any,
        top_k: Any,
        top_p: Any,
        uniform: Any,
        min_p: Any,
        typical_p: Any,
        out: Any,
    ) -> None:
        """out [rows] int64: a token for each row of float32 scores whose typical_p is below 1, as `sampling.draw` draws
        it; others stay.
        """
        for i, row in enumerate(scores):
            if typical_p[i] < 1:
                limits = float(temperature[i]), int(top_k[i]), float(top_p[i])
                out[i] = draw(row, *limits, float(uniform[i]), float(min_p[i]), float(typical_p[i]))

    def to_float32(self, values: Any) -> np.ndarray:
        """Values in the model's dtype, or float32 ones."""
        return bfloat16_to_float32(values) if values.dtype == np.uint16 else values.astype(np.float32, copy=False)

    def to_host(self, values: Any) -> np.ndarray:
        return values


class TorchArrays(HostArrays):
    """torch tensors on the CPU or a CUDA device: torch is the array type there, not the engine."""

    pool_views: ClassVar[dict[str, Any]] = {"raw": True}

    def __init__(self, dtype: str = "float32", device: str = "cpu"):
        super().__init__(dtype)
        import torch

        self._torch = torch
        self._dtype = getattr(torch, self.dtype)
        self.device = device
        self.asynchronous = device != "cpu"
        self.op_options = {}  # torch has a bfloat16 of its own
        # Matrices that hold some weights one below the other already, by the address of the first.
        self.stacks: dict[int, Any] = {}

    def _place(self, values: Any) -> Any:
        if not isinstance(values, self._torch.Tensor):
            values = self._torch.from_numpy(np.ascontiguousarray(values))
        return values.detach().to(self.device)

    def weight(self, values: Any) -> Any:
        """A tensor that is on the device in the dtype already is taken as it is, not copied."""
        return self._place(values).to(self._dtype)

    def float_weight(self, values: Any, offset: float = 0.0) -> Any:
        """A float32 tensor that is on the device already is taken as it is where the offset is 0."""
        whole = self._place(values).float()
        return whole + offset if offset else whole

    def stack(self, parts: Sequence[Any]) -> Any:
        """Parts that lie one behind the other already, in one of `stacks`, are taken as they are."""
        weights = [self.weight(part) for part in parts]
        if len(weights) == 1:
            return weights[0]
        whole = self._stacked(weights)
        rows = sum(len(part) for part in weights)
        return self._torch.cat(weights) if whole is None or len(whole) != rows else whole

    def _stacked(self, weights: Sequence[Any]) -> Any:
        """The matrix of `stacks` that begins with these weights, or None."""
        first = weights[0]
        whole = self.stacks.get(first.data_ptr())
        if whole is None or (whole.dtype, whole.device, whole.shape[1:]) != (
            first.dtype,
            first.device,
            first.shape[1:],
        ):
            return None
        behind = whole.data_ptr()
        for part in weights:
            if not (part.data_ptr() == behind and part.is_contiguous()):
                return None
            behind += part.numel() * part.element_size()
        return whole

    def blocks(self, weight: QuantizedWeight) -> QuantizedWeight:
        """On the device, rows at multiples of 16 bytes: what the kernel for a decode step's rows reads."""
        rows, size = weight.weight.shape
        if weight.format == FP8:
            import torch

            whole = np.zeros((rows, size + -size % 16), np.uint8)
            whole[:, :size] = weight.weight
            packed = self._place(whole)[:, :size].view(torch.float8_e4m3fn)
            return QuantizedWeight(packed, self._place(np.ascontiguousarray(weight.scales)), None, FP8)
        whole = np.zeros((rows, size + -size % 16), np.uint8)
        whole[:, :size] = weight.weight
        return QuantizedWeight(self._place(whole)[:, :size], None, None, weight.format)

    def for_linear(self, weight: QuantizedWeight) -> QuantizedWeight:
        return weight

    def take_blocks(self, weight: QuantizedWeight, rows: Any) -> Any:
        return dequantize_tensor(self.take(weight.weight, rows), None, None, weight.format, self._dtype)

    def transposed(self, weight: Any) -> Any:
        """On a GPU along in, where the kernels for a decode step's few rows are fastest: a copy, unless it lies so."""
        return weight.T.contiguous() if self.asynchronous else weight.T

    def output_rows(self, weight: Any) -> Any:
        """Rows to a multiple of 64, in memory of their own only where some are missing: the vocabularies of GPT-2
        (50257) and others would keep the tensor-core kernels from writing whole vectors."""
        missing = -weight.shape[0] % 64
        if not missing or not self.asynchronous:
            return weight
        whole = self._stacked([weight])
        if whole is not None and len(whole) == len(weight) + missing:
            return whole
        return self._torch.cat([weight, weight.new_zeros(missing, weight.shape[1])])

    def index(self, values: Any, dtype: str = "int32") -> Any:
        return self._place(np.asarray(values, dtype=dtype))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._torch.zeros(shape, dtype=getattr(self._torch, dtype), device=self.device)

    def activations(self, shape: tuple[int, ...]) -> Any:
        return self._torch.zeros(shape, dtype=self._dtype, device=self.device)

    def space(self, shape: tuple[int, ...]) -> Any:
        return self._torch.empty(shape, dtype=self._dtype, device=self.device)

    def take(self, table: Any, rows: Any) -> Any:
        rows = rows if isinstance(rows, self._torch.Tensor) else self.index(rows, "int64")
        return self._torch.index_select(table, 0, rows)

    def row(self, table: Any, index: Any) -> Any:
        return self._torch.index_select(table, 0, index)[0]

    def store_row(self, table: Any, index: Any, values: Any) -> None:
        table.index_copy_(0, index, values[None])

    def increase(self, target: Any, by: Any) -> None:
        target.add_(by)

    def write(self, target: Any, values: np.ndarray) -> None:
        source = self._torch.from_numpy(np.ascontiguousarray(values))
        if self.asynchronous:  # torch keeps the pinned copy until the device has read it
            source = source.pin_memory()
        target.copy_(source, non_blocking=True)

    def fetch(self, values: Any) -> Callable[[], np.ndarray]:
        if not self.asynchronous:
            copy = values.clone()
            return lambda: copy.numpy()
        host = self._torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        done = self._torch.cuda.Event()
        done.record()

        def wait() -> np.ndarray:
            if self.watch is not None:
                self.watch(done)
            done.synchronize()
            return host.numpy()

        return wait

    def fetch_float(self, values: Any) -> Callable[[], np.ndarray]:
        if values.dtype == self._torch.bfloat16:  # NumPy has no such type
            bits = self.fetch(values.view(self._torch.int16))
            return lambda: bfloat16_to_float32(bits().view(np.uint16))
        wait = self.fetch(values)
        return lambda: wait().astype(np.float32, copy=False)

    def active(self) -> contextlib.AbstractContextManager[Any]:
        return self._torch.cuda.device(self.device) if self.asynchronous else contextlib.nullcontext()

    def wait(self) -> None:
        if self.asynchronous:
            if self.watch is not None:
                done = self._torch.cuda.Event()
                done.record()
                self.watch(done)
            self._torch.cuda.synchronize(self.device)

    def at(self, table: Any, columns: Any) -> Any:
        return table.gather(1, columns[:, None])[:, 0]

    def add_at(self, table: Any, columns: Any, values: Any) -> None:
        table.scatter_add_(1, columns, values)

    def floats(self, values: Any) -> Any:
        return values.float()

    def rounded(self, values: Any) -> Any:
        return values.to(self._dtype)

    def scaled(self, values: Any, factor: float) -> Any:
        return values * factor  # torch multiplies 16-bit values by a number in float32

    def scale_in_place(self, values: Any, factor: float) -> None:
        values.mul_(factor)

    def multiplied(self, a: Any, b: Any) -> Any:
        return a * b

    def softcapped(self, values: Any, cap: float) -> Any:
        return self.rounded(self._torch.tanh(values.float() / cap) * cap)

    def clamped_gate(self, gate: Any, up: Any, alpha: float, limit: float) -> Any:
        gate, up = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
        return self.rounded((up + 1) * gate * self._torch.sigmoid(gate * alpha))

    def route(self, logits: Any, count: int, softmax_first: bool, normalised: bool) -> tuple[Any, Any]:
        values = logits.float()
        if softmax_first:
            values = self._torch.softmax(values, dim=-1)
        chosen, weights = self.best(values, count)
        if not softmax_first:
            weights = self._torch.softmax(weights, dim=-1)
        elif normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen

    def probabilities(self, values: Any, sigmoid: bool) -> Any:
        return self._torch.sigmoid(values) if sigmoid else self._torch.softmax(values, dim=-1)

    def masked(self, values: Any, mask: Any) -> Any:
        return values.masked_fill(~mask, float("-inf"))

    def columns(self, table: Any, columns: Any) -> Any:
        return table.gather(1, columns)

    def view(self, pages: Any) -> Any:
        # -1: work on pages is queued on whichever stream is current, also while a graph is captured.
        return self._torch.utils.dlpack.from_dlpack(pages.__dlpack__(stream=-1))

    def per_head(self, x: Any, weight: Any, out: Any) -> None:
        """One batched product, which the invariant mode does not know."""
        if fk.is_invariant():
            super().per_head(x, weight, out)
        else:
            self._torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))

    def groups(self, chosen: Any, count: int) -> Any:
        try:
            from ..triton.grouped_linear import group_rows
        except ImportError:
            return None
        return group_rows(chosen.flatten(), count)

    def add_rows(self, total: Any, rows: Any, values: Any, weights: Any) -> None:
        total.index_add_(0, self.index(rows, "int64"), values.float() * weights[:, None])

    def add_chosen(self, total: Any, values: Any, weights: Any, chosen: Any, place: int) -> None:
        weight = (weights * (chosen == place)).sum(dim=-1, keepdim=True)
        total.add_((values.float() * weight).masked_fill_(weight == 0, 0.0))

    def log_probabilities(self, logits: Any) -> Any:
        if fk.is_invariant():
            return fk.log_softmax(logits.float())
        return self._torch.log_softmax(logits.float(), dim=-1)

    def best(self, values: Any, count: int) -> tuple[Any, Any]:
        found, order = self._torch.sort(values, dim=-1, descending=True, stable=True)
        return order[:, :count], found[:, :count]

    def penalise(self, logits: Any, seen: Any, penalty: Any) -> Any:
        from .device_sampling import penalise_rows

        return penalise_rows(logits, seen, penalty)

    def sample(self, logits: Any, out: Any, **options: Any) -> None:
        fk.sample(logits, out=out, **options)
        self._torch.maximum(out, ~out, out=out)

    def draw_typical(
        self,
        scores: Any,
        temperature: Any,
        top_k: Any,
        top_p: Any,
        uniform: Any,
        min_p: Any,
        typical_p: Any,
        out: Any,
    ) -> None:
        from .device_sampling import draw_rows

        drawn = draw_rows(scores, temperature, top_k, top_p, uniform, min_p, typical_p)
        out.copy_(self._torch.where(typical_p < 1, drawn, out))

    def to_float32(self, values: Any) -> np.ndarray:
        return values.float().cpu().numpy()

    def to_host(self, values: Any) -> np.ndarray:
        return values.cpu().numpy()


class CudaArrays(TorchArrays):
    """torch tensors on the current CUDA device."""

    def __init__(self, dtype: str = "float32"):
        import torch

        super().__init__(dtype, f"cuda:{torch.cuda.current_device()}")

    @staticmethod
    def usable() -> bool:
        """torch is there and sees a GPU."""
        try:
            import torch
        except ImportError:
            return False
        return bool(torch.cuda.is_available())


def _likes_tiles() -> bool:
    """Whether a kernel here reads blocks of 16 rows side by side."""
    return any(kernel.id == "quantized_linear/cpu/avx512_vnni" and kernel.available for kernel in fk.kernels())
