"""What the Triton ops that take pages share on the host: checks of pages, scales and tables, the kernels' arguments.

Called by paged_kv_cache.py and paged_attention.py. Invariant: 8-bit pages reach a kernel as uint8 (float8_e4m3fn, so
that neither the interpreter nor a GPU without such numbers has to know them) or int8, always with their scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ._host import Call, name_of, shape_text

E4M3 = "float8_e4m3fn"
QUANTIZED = (E4M3, "int8")
_NEEDED = "float32 [heads_kv] or [num_pages, heads_kv, page_size]"


@dataclass(frozen=True)
class Scales:
    """The scales of 8-bit pages: float32 [heads_kv], or one for each token [num_pages, heads_kv, page_size]."""

    k: torch.Tensor
    v: torch.Tensor
    is_e4m3: bool

    @property
    def per_token(self) -> bool:
        return self.k.dim() == 3

    def arguments(self) -> dict[str, Any]:
        """The kernels' arguments; without scales those of `no_scales`."""
        steps = {
            f"{name}_{s}": (x.stride(d) if self.per_token else int(s == "h") * x.stride(0))
            for name, x in (("k_scales", self.k), ("v_scales", self.v))
            for d, s in enumerate("pht")
        }
        return {"k_scales_ptr": self.k, "v_scales_ptr": self.v, **steps, "IS_E4M3": self.is_e4m3}


def no_scales() -> dict[str, Any]:
    """`Scales.arguments` for pages that need none."""
    steps = {f"{name}_{s}": 0 for name in ("k_scales", "v_scales") for s in "pht"}
    return {"k_scales_ptr": None, "v_scales_ptr": None, **steps, "IS_E4M3": False}


def _bytes_as(call: Call, kv_dtype: Any) -> str | None:
    if kv_dtype is None:
        return None
    name = str(kv_dtype).rsplit(".", 1)[-1]
    if name in ("int4", "float4_e2m1fn_x2"):
        call.refuse(f"kv_dtype={kv_dtype!r}; Triton has no kernel for 4-bit pages")
    call.need(
        name in QUANTIZED,
        f"kv_dtype={kv_dtype!r}; it says how uint8 pages are read and can be 'float8_e4m3fn' or 'int8'",
    )
    return name


def _element_dtype(call: Call, name: str, x: Any, given: str | None) -> str:
    """What the pages hold, by their dtype or by kv_dtype."""
    own = name_of(call.any_input(name, x).dtype)
    if own == "uint8":
        if given is None:
            call.fail(f"{name} has dtype uint8; pass kv_dtype='float8_e4m3fn' or 'int8' to say what its bytes are")
        return given
    call.need(given in (None, own), f"{name} is {own} but kv_dtype is {given}; it is for uint8 pages")
    return own


def _scales(call: Call, kv_scales: Any, k_pages: torch.Tensor, is_e4m3: bool, held: str) -> Scales:
    k_scales, v_scales = call.pair("kv_scales", kv_scales, "a pair (k_scales, v_scales)")
    for name, x in (("k_scales", k_scales), ("v_scales", v_scales)):
        if x is None:
            call.fail(f"{name} is absent but k_pages is {held}; {_NEEDED} is needed")
        x = call.any_input(name, x)
        call.need(x.dtype == torch.float32, f"{name} is {name_of(x.dtype)}; float32 is needed")
        call.need(x.dim() in (1, 3), f"{name} is {shape_text(x)}; {_NEEDED} is needed")
        of = {1: (k_pages.shape[2],), 3: (k_pages.shape[0], k_pages.shape[2], k_pages.shape[1])}[x.dim()]
        for d, size in enumerate(of):
            call.need(x.shape[d] == size, f"{name}.shape[{d}]={x.shape[d]}; {size} is needed, as in k_pages")
        last = x.stride(-1)
        call.need(x.shape[-1] < 2 or last == 1, f"{name}.strides[-1]={last}; a contiguous last dim is needed")
    dims = k_scales.dim(), v_scales.dim()
    call.need(
        dims[0] == dims[1],
        f"k_scales is {list(k_scales.shape)} but v_scales is {list(v_scales.shape)}; both need one scale a head, or "
        "both one a token and head",
    )
    return Scales(k_scales, v_scales, is_e4m3)


def check_pages(
    call: Call, k_pages: Any, v_pages: Any, kv_scales: Any, kv_dtype: Any
) -> tuple[torch.Tensor, torch.Tensor, Scales | None]:
    """Pages [num_pages, page_size, heads_kv, head_dim], values with a head dim of their own; 8-bit ones with scales."""
    given = _bytes_as(call, kv_dtype)
    held = _element_dtype(call, "k_pages", k_pages, given)
    held_v = _element_dtype(call, "v_pages", v_pages, given)
    call.need(held == held_v, f"v_pages is {held_v}; {held} is needed, as of k_pages")
    scales = None
    if held in QUANTIZED:
        stored = torch.uint8 if held == E4M3 else torch.int8
        k_pages, v_pages = k_pages.view(stored), v_pages.view(stored)
        for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
            call.need(x.dim() == 4, f"{name} is {shape_text(x)}; 4 dims are needed")
            step = x.stride(-1)
            call.need(x.shape[-1] < 2 or step == 1, f"{name}.strides[-1]={step}; a contiguous last dim is needed")
    else:
        call.need(
            kv_scales is None,
            f"scales are given but k_pages is {held}; they are for pages of float8_e4m3fn and int8",
        )
        k_pages = call.floats("k_pages", k_pages, 4)
        v_pages = call.floats("v_pages", v_pages, 4, like=k_pages)
    for d in range(3):
        call.need(
            v_pages.shape[d] == k_pages.shape[d],
            f"v_pages.shape[{d}]={v_pages.shape[d]} but k_pages.shape[{d}]={k_pages.shape[d]}; they must match",
        )
    if held in QUANTIZED:
        scales = _scales(call, kv_scales, k_pages, held == E4M3, held)
    return k_pages, v_pages, scales


def write_pages(call: Call, k_pages: torch.Tensor, v_pages: torch.Tensor, scales: Scales | None) -> None:
    """Checks the pages, and scales of tokens, as what a kernel writes."""
    call.writes("k_pages", k_pages)
    call.writes("v_pages", v_pages)
    if scales is not None and scales.per_token:
        call.writes("k_scales", scales.k)
        call.writes("v_scales", scales.v)


def page_arguments(k_pages: torch.Tensor, v_pages: torch.Tensor) -> dict[str, Any]:
    """The kernels' arguments about the pages."""
    steps = {
        f"{name}_{s}": x.stride(d)
        for name, x in (("k_pages", k_pages), ("v_pages", v_pages))
        for d, s in enumerate("pth")
    }
    return {"k_pages_ptr": k_pages, "v_pages_ptr": v_pages, **steps, "page_size": k_pages.shape[1]}


def check_table(call: Call, block_table: Any, seq_lens: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """block_table int32 [batch, max_pages] and seq_lens [batch]."""
    table = call.index("block_table", block_table, 2)
    call.need(table.dtype == torch.int32, "block_table is int64; int32 is needed")
    lens = call.index("seq_lens", seq_lens)
    call.shape("seq_lens", lens, table.shape[:1])
    return table, lens
