"""Rows that are not attention: linear, row ops, the loss, merging, sampling. Their peers are those of the suites."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import flashkernel as fk

from .. import baselines, row_peers
from ..case import ITEM_BYTES, LIMIT, TOLERANCE, Inputs, Provider, Settings, Work, each, nbytes
from ..suites.linear import linear_work
from ..suites.rows import ELEMENTWISE, NORMS, cross_entropy_work, norm_backward_work, row_work
from ..suites.sampling import TEMPERATURE, TOP_P, logits_of, sample_work

__all__ = ["Argmax", "Linear", "Loss", "Matrix", "Merge", "NormBackward", "Sample"]


@dataclass(frozen=True)
class Linear:
    model: str
    layer: str
    rows: int
    features: int
    outputs: int
    bias: bool = False
    gelu: bool = False
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        options = ", bias" * self.bias + ", GELU" * self.gelu
        return f"{self.model} {self.layer}: {self.rows} x {self.features} -> {self.outputs}{options}"

    @property
    def shape(self) -> dict[str, Any]:
        return {"rows": self.rows, "features": self.features, "outputs": self.outputs}

    def shrunk(self) -> Linear:
        odd = self.outputs % 8
        return replace(
            self, rows=min(self.rows, 16), features=min(self.features, 256), outputs=min(self.outputs, 512) + odd
        )

    def work(self, s: Settings) -> Work:
        if self.bias:
            return linear_work(s, self.dtype, self.rows, self.features, self.outputs, self.gelu)
        inputs = Inputs(s.device, self.dtype)
        moved = float(self.rows * self.features + self.features * self.outputs + self.rows * self.outputs)
        moved *= ITEM_BYTES[self.dtype]
        sets = [
            (
                inputs.randn(self.rows, self.features),
                inputs.randn(self.outputs, self.features, scale=1 / math.sqrt(self.features)),
            )
            for _ in range(inputs.sets(moved, from_memory=s.cuda))
        ]
        providers = [*baselines.ours(s, fk.linear, sets)]
        if "matmul" not in s.without:
            torch = baselines.require_torch()
            providers.append(Provider("matmul", each(torch.mm, [(x, weight.t()) for x, weight in sets])))
        if not s.quick:
            providers += row_peers.providers(s, "linear", [(*one, None) for one in sets])
        return Work(
            providers,
            TOLERANCE[self.dtype],
            flop=2.0 * self.rows * self.features * self.outputs,
            read=nbytes(*sets[0]),
            written=float(self.rows * self.outputs * ITEM_BYTES[self.dtype]),
        )


@dataclass(frozen=True)
class Matrix:
    """An op of the suites over [rows, columns]."""

    op: str
    rows: int
    columns: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.op} {self.rows} x {self.columns}"

    @property
    def shape(self) -> dict[str, Any]:
        return {"op": self.op, "rows": self.rows, "columns": self.columns}

    def shrunk(self) -> Matrix:
        return replace(self, rows=min(self.rows, 16), columns=min(self.columns, 1024))

    def work(self, s: Settings) -> Work:
        return row_work(s, self.dtype, (NORMS | ELEMENTWISE)[self.op], self.rows, self.columns)


@dataclass(frozen=True)
class NormBackward(Matrix):
    @property
    def name(self) -> str:
        return f"{self.op}_backward {self.rows} x {self.columns}"

    def work(self, s: Settings) -> Work:
        return norm_backward_work(s, self.dtype, self.op, self.rows, self.columns)


@dataclass(frozen=True)
class Loss:
    rows: int
    classes: int
    backward: bool
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"cross_entropy{'_backward' if self.backward else ''} {self.rows} x {self.classes}"

    @property
    def shape(self) -> dict[str, Any]:
        return {"rows": self.rows, "classes": self.classes}

    def shrunk(self) -> Loss:
        return replace(self, rows=min(self.rows, 16), classes=min(self.classes, 1001))

    def work(self, s: Settings) -> Work:
        return cross_entropy_work(s, self.dtype, self.rows, self.classes, self.backward)


@dataclass(frozen=True)
class Merge:
    """Two partial results of as many tokens."""

    tokens: int
    heads: int
    dim: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"merge_states {self.tokens} tokens, heads {self.heads}, d {self.dim}"

    @property
    def shape(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "heads": self.heads, "head_dim": self.dim}

    def shrunk(self) -> Merge:
        return replace(self, tokens=min(self.tokens, 16), heads=min(self.heads, 4))

    def work(self, s: Settings) -> Work:
        torch = baselines.require_torch()
        inputs, size = Inputs(s.device, self.dtype), (self.tokens, self.heads, self.dim)
        moved = 3.0 * math.prod(size) * ITEM_BYTES[self.dtype]

        def states() -> tuple[Any, Any]:
            return inputs.randn(*size), torch.randn(size[:2], device=s.device)

        sets = [(*states(), *states()) for _ in range(inputs.sets(moved, from_memory=s.cuda))]
        providers = [*baselines.ours(s, fk.merge_states, sets), *baselines.stock(s, baselines.merge_states, sets)]
        if s.cuda:  # as many bytes, without arithmetic
            copies = [torch.empty_like(one[0]) for one in sets]
            calls = [(one[0], one[2], copy) for one, copy in zip(sets, copies, strict=True)]
            providers.append(Provider("add", [_added(*one) for one in calls], LIMIT))
        lse = 4.0 * math.prod(size[:2])
        return Work(providers, TOLERANCE[self.dtype], read=moved * 2 / 3 + 2 * lse, written=moved / 3 + lse)


def _added(a: Any, b: Any, out: Any) -> Any:
    torch = baselines.require_torch()
    return lambda: torch.add(a, b, out=out)


@dataclass(frozen=True)
class Argmax:
    rows: int
    vocabulary: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"argmax {self.rows} x {self.vocabulary}"

    @property
    def shape(self) -> dict[str, Any]:
        return {"rows": self.rows, "vocabulary": self.vocabulary}

    def shrunk(self) -> Argmax:
        return replace(self, rows=min(self.rows, 4), vocabulary=min(self.vocabulary, 1001))

    def work(self, s: Settings) -> Work:
        torch = baselines.require_torch()
        logits = logits_of(s, self.dtype, self.rows, self.vocabulary)
        first = logits[0]

        def largest(found: Any) -> bool:  # equal ones may stand at several places
            chosen = first.gather(1, torch.as_tensor(found).long().reshape(-1, 1))[:, 0]
            return torch.equal(chosen, first.amax(-1))

        providers = [*baselines.ours(s, fk.argmax, [(x, -1) for x in logits])]
        providers.append(Provider("eager", each(torch.argmax, [(x, -1) for x in logits])))
        return Work(providers, read=nbytes(first), written=8.0 * self.rows, valid=largest)


@dataclass(frozen=True)
class Sample(Argmax):
    """What the engine does in a step. Draws differ by their random numbers: a token must be one that top-p lets in."""

    @property
    def name(self) -> str:
        return f"sample {self.rows} x {self.vocabulary}, temperature {TEMPERATURE}, top-p {TOP_P}"

    def work(self, s: Settings) -> Work:
        return sample_work(s, self.dtype, self.rows, self.vocabulary)
