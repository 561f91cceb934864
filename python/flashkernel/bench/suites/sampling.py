"""Sampling: the next token of each row of logits, and what builds the bits of a mask. Rows for `bench survey` and
`bench --kernels`.
"""

from __future__ import annotations

from typing import Any

import flashkernel as fk

from .. import baselines
from ..case import BESIDE, ITEM_BYTES, OURS, Inputs, Provider, Settings, Work, each, nbytes

__all__ = ["TEMPERATURE", "TOP_P", "logits_of", "pack_mask_work", "sample_work"]

TEMPERATURE, TOP_P = 0.7, 0.9


def logits_of(s: Settings, dtype: str, rows: int, vocabulary: int) -> list[Any]:
    """Tensors [rows, vocabulary], so many that no call finds its own in a cache."""
    inputs = Inputs(s.device, dtype)
    size = float(rows * vocabulary * ITEM_BYTES[dtype])
    return [inputs.randn(rows, vocabulary) for _ in range(inputs.sets(size, from_memory=s.cuda))]


def sample_work(s: Settings, dtype: str, rows: int, vocabulary: int) -> Work:
    """A step of the engine, at TEMPERATURE and TOP_P. Draws differ by their random numbers, so a token is right where
    top-p lets it in.
    """
    torch = baselines.require_torch()
    logits = logits_of(s, dtype, rows, vocabulary)
    first = logits[0]

    def per_row(value: float, kind: Any = torch.float32) -> Any:
        return torch.full((rows,), value, dtype=kind, device=s.device)

    ordered = torch.softmax(first.double() / TEMPERATURE, -1).sort(-1, descending=True)
    least = ordered.values.gather(1, ((ordered.values.cumsum(-1) < TOP_P).sum(-1, keepdim=True)))[:, 0]

    def let_in(found: Any) -> bool:
        chance = torch.softmax(first.double() / TEMPERATURE, -1).gather(1, found.long().reshape(-1, 1))[:, 0]
        return bool((chance >= least * (1 - 1e-3)).all())  # float32 sums may keep one more of equals

    options = {"temperature": per_row(TEMPERATURE), "top_p": per_row(TOP_P), "seed": per_row(7, torch.int64)}
    sets = [(x,) for x in logits]
    providers = [Provider("flashkernel", each(fk.sample, sets, **options), OURS)]
    if "eager" not in s.without:
        providers.append(Provider("eager", each(_drawn, sets)))
    library = baselines.optional("flashinfer.sampling") if s.cuda and "flashinfer" not in s.without else None
    if library is not None:
        calls = [_by_flashinfer(library.top_p_sampling_from_probs, x) for x in logits]
        providers.append(Provider("flashinfer", calls))
    providers.append(Provider("argmax", each(torch.argmax, [(x, -1) for x in logits]), BESIDE))
    return Work(providers, read=nbytes(first), written=8.0 * rows, valid=let_in)


def _drawn(logits: Any) -> Any:
    """Draws tokens as libraries in torch do: sort, cut off, draw by exponential noise, which waits for nothing."""
    torch = baselines.require_torch()
    likely, ids = torch.softmax(logits.float() / TEMPERATURE, -1).sort(-1, descending=True)
    likely = likely.masked_fill(likely.cumsum(-1) - likely >= TOP_P, 0.0)
    noise = torch.empty_like(likely).exponential_()
    return ids.gather(1, (likely / noise).argmax(-1, keepdim=True))[:, 0]


def _by_flashinfer(sample: Any, logits: Any) -> Any:
    torch = baselines.require_torch()
    return lambda: sample(torch.softmax(logits.float() / TEMPERATURE, -1), TOP_P)


def pack_mask_work(s: Settings, rows: int, keys: int) -> Work:
    torch = baselines.require_torch()
    inputs = Inputs(s.device, "float32")
    count = inputs.sets(float(rows * keys), from_memory=s.cuda)
    sets = [(torch.rand(rows, keys, device=s.device) < 0.5,) for _ in range(count)]
    providers = [*baselines.ours(s, fk.pack_mask, sets), *baselines.stock(s, _packed, sets)]
    return Work(providers, 0.0, read=float(rows * keys), written=float(rows * (keys // 32) * 4))


def _packed(mask: Any) -> Any:
    """Words of 32 bits, by a sum of powers; of a number of keys that is a multiple of 32."""
    torch = baselines.require_torch()
    bits = mask.reshape(*mask.shape[:-1], -1, 32).long() << torch.arange(32, device=mask.device)
    return bits.sum(-1).int()
