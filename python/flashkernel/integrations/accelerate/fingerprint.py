"""A number for all bits of some tensors and their places: what tells of writes that torch counts nowhere.

Writes through `.data` leave version counters as they are. Reading everything is the one way to see them; it takes about
as long as a decode step or two, which read every weight, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

__all__ = ["Fingerprint"]

# Words are added up on lanes, as they come round. A prime: values that change places, in rows or columns of any width,
# come to lie on other lanes.
LANES = 1021
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_SMALL = 1 << 24  # bytes that one thread reads sooner than others start


class Fingerprint:
    """The tensors may change their values between two calls of `read`, not where they lie."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        self._views: list[Any] = []  # [words / LANES, LANES]
        self._rests: list[Any] = []  # the bytes behind
        for tensor in tensors:
            flat = tensor.detach()
            if not flat.is_contiguous() and flat.dim() == 2:
                flat = flat.t()
            if not flat.is_contiguous() or flat.numel() == 0:
                if flat.numel():
                    self._rests.append(flat)  # nothing of a stock model; copied when it is read
                continue
            octets = flat.view(-1).view(torch.uint8)
            size = next(size for size in _WORDS if octets.data_ptr() % size == 0)
            whole = len(octets) // (size * LANES) * size * LANES
            if whole:
                words = torch.from_dlpack(octets[:whole]).view(_WORDS[size])  # from offset 0: whatever the size divides
                self._views.append(words.view(-1, LANES))
            if whole < len(octets):
                self._rests.append(octets[whole:])
        self._bytes = sum(view.numel() * view.element_size() for view in self._views)
        self._on_host = all(t.device.type == "cpu" for t in (*self._views, *self._rests))
        if self._on_host:
            self._views = [view.numpy() for view in self._views]

    @torch.no_grad()
    def read(self) -> list[int]:
        rests = [rest.contiguous().view(-1).view(torch.uint8) for rest in self._rests]
        rest = torch.cat(rests).to(torch.int64) if rests else torch.zeros(1, dtype=torch.int64)
        places = torch.arange(1, 2 * len(rest), 2, device=rest.device)
        lanes = self._lanes_on_host() if self._on_host else self._lanes_on_device()
        return [*lanes, int((rest * places).sum())]

    def _lanes_on_host(self) -> list[int]:
        places = np.arange(1, 2 * LANES, 2)

        def read(view: Any) -> int:
            return int(np.add.reduce(view, axis=0, dtype=np.int64) @ places)

        workers = min(8, torch.get_num_threads()) if self._bytes > _SMALL else 1
        if workers > 1:
            try:
                with ThreadPoolExecutor(workers) as pool:
                    return list(pool.map(read, self._views))
            except RuntimeError:  # no thread can be had: this one can read them all
                pass
        return [read(view) for view in self._views]

    def _lanes_on_device(self) -> list[int]:
        if not self._views:
            return []
        sums = torch.empty(len(self._views), LANES, dtype=torch.int64, device=self._views[0].device)
        for i, view in enumerate(self._views):
            torch.sum(view, 0, dtype=torch.int64, out=sums[i])
        return (sums * torch.arange(1, 2 * LANES, 2, device=sums.device)).sum(1).tolist()
