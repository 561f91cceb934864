"""Linear layers of groups: each row of x goes through the weight of its group, in one launch for groups of any sizes.

Rows are sorted by group on the device, and each group's rows are cut into tiles. There are as many programs as the
worst case of sizes needs, and those without a tile end at once: nothing is read on the host, so a CUDA graph of the
call holds for any sizes. A weight that no row needs is not read. As in MegaBlocks (Gale et al., 2022), without padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._device import dot, narrow, widen
from ._host import IS_INTERPRETED, Call, cdiv

__all__ = ["Groups", "group_rows"]


@triton.jit
def _grouped(
    x_ptr, weight_ptr, bias_ptr, out_ptr, tiles_ptr, from_ptr, to_ptr,
    x_m, weight_g, weight_n, weight_k, bias_g, out_m, tiles_row, cols, inner,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[to[i]] = x[from[i]] weight[g]^T + bias[g] for the places i of one tile of group g, and BLOCK_N columns."""
    blocks_n = tl.cdiv(cols, BLOCK_N)
    tile = tl.program_id(0) // blocks_n
    n = tl.program_id(0) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.load(tiles_ptr + tile).to(tl.int64)
    begin = tl.load(tiles_ptr + tiles_row + tile)
    end = tl.load(tiles_ptr + 2 * tiles_row + tile)
    if begin < end:
        place = begin + tl.arange(0, BLOCK_M)
        live = place < end
        row = tl.load(from_ptr + place, mask=live, other=0).to(tl.int64)
        x_row = x_ptr + row[:, None] * x_m
        weight_row = weight_ptr + group * weight_g + n.to(tl.int64)[None, :] * weight_n
        acc = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
        for start in range(0, inner, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_row + k[None, :], mask=live[:, None] & (k[None, :] < inner), other=0.0)
            weight_at = weight_row + k.to(tl.int64)[:, None] * weight_k
            weight = tl.load(weight_at, mask=(k[:, None] < inner) & (n[None, :] < cols), other=0.0)
            acc = dot(x, weight, acc)
        if HAS_BIAS:
            acc += widen(tl.load(bias_ptr + group * bias_g + n, mask=n < cols, other=0.0))[None, :]
        to = tl.load(to_ptr + place, mask=live, other=0).to(tl.int64)
        value = narrow(acc, out_ptr.dtype.element_ty)
        tl.store(out_ptr + to[:, None] * out_m + n[None, :], value, mask=live[:, None] & (n[None, :] < cols))


def _tile(call: Call, dtype: torch.dtype, block: int) -> dict[str, int]:
    """Tile shapes by dtype, rows of a tile and compute capability, within the shared memory of `fused_gelu_linear`."""
    if IS_INTERPRETED:
        return {"BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 1}
    if dtype == torch.float32 or call.capability < 80:  # no tensor cores
        shape = (64, 32, 4, 2) if block == 16 else (64, 16, 4, 2)
    elif 90 <= call.capability < 120:
        shape = (64, 128, 4, 4) if block == 16 else (128, 64, 4, 4)
    else:
        shape = (64, 64, 4, 4) if block == 16 else (128, 32, 4, 4)
    return dict(zip(("BLOCK_N", "BLOCK_K", "num_warps", "num_stages"), shape, strict=True))


@dataclass(frozen=True)
class Groups:
    """Which group each row of something belongs to, in the order of the groups: made by `group_rows`.

    order: int64 [rows], the rows by group, those of a group in their own order.
    tiles: int32 [3, tiles]: group, and the places in `order` where it begins and ends; an empty tile has both 0.
    block: the most rows of a tile.
    """

    num_groups: int
    order: torch.Tensor
    tiles: torch.Tensor
    block: int

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        rows: torch.Tensor | None = None,
        back: bool = False,
    ) -> torch.Tensor:
        """x[rows[i]] weight[g]^T + bias[g] for each place i, with g the group of the row at place i of `order`.

        Args:
            x: [n, inner], float32, float16 or bfloat16, contiguous last dim.
            weight: [groups, out, inner], x's dtype, any strides.
            bias: [groups, out], x's dtype, contiguous last dim.
            rows: int64 [rows], the row of x at each place; None: x has a row at each place.
            back: whether the result is in the order that `group_rows` was given; else by places, as `order` is.

        Returns: [rows, out] in x's dtype; sums are float32.

        Raises ValueError for shapes and dtypes that do not fit, NotImplementedError for tensors of another device.
        """
        call = Call("grouped_linear", None, None)
        x = call.floats("x", x, 2)
        weight = call.floats("weight", weight, 3, like=x, rows=False)
        groups, cols, inner = weight.shape
        call.need(groups == self.num_groups, f"weight is of {groups} groups; {self.num_groups} are needed")
        call.shape("x", x, (x.shape[0], inner))
        if bias is not None:
            bias = call.floats("bias", bias, 2, like=x)
            call.shape("bias", bias, (groups, cols))
        count = self.order.shape[0]
        places = torch.arange(count, device=x.device) if rows is None or not back else None
        if rows is None:
            call.shape("x", x, (count, inner))
        else:
            rows = call.index("rows", rows)
            call.shape("rows", rows, (count,))
        out = call.empty((count, cols), x.dtype)
        shape = _tile(call, x.dtype, self.block)
        call.launch(
            _grouped,
            self.tiles.shape[1] * cdiv(cols, shape["BLOCK_N"]),
            x_ptr=x,
            weight_ptr=weight,
            bias_ptr=x if bias is None else bias,
            out_ptr=out,
            tiles_ptr=self.tiles,
            from_ptr=places if rows is None else rows,
            to_ptr=self.order if back else places,
            x_m=x.stride(0),
            weight_g=weight.stride(0),
            weight_n=weight.stride(1),
            weight_k=weight.stride(2),
            bias_g=0 if bias is None else bias.stride(0),
            out_m=cols,
            tiles_row=self.tiles.shape[1],
            cols=cols,
            inner=inner,
            HAS_BIAS=bias is not None,
            BLOCK_M=self.block,
            **shape,
        )
        return out


def group_rows(group: torch.Tensor, num_groups: int) -> Groups:
    """Sorts rows by their groups, on the device of `group` and without waiting for it.

    group: int32 or int64 [rows], each 0 to num_groups - 1.

    >>> import torch
    >>> from flashkernel.triton import default_device
    >>> groups = group_rows(torch.tensor([2, 0, 2], device=default_device()), 3)
    >>> groups.order.tolist()
    [1, 0, 2]
    >>> x = torch.ones(3, 4, device=default_device())
    >>> weight = torch.arange(3.0, device=default_device())[:, None, None].expand(3, 1, 4)
    >>> groups.linear(x, weight, rows=groups.order, back=True).flatten().tolist()
    [8.0, 0.0, 8.0]
    """
    call = Call("group_rows", None, None)
    group = call.index("group", group)
    call.need(num_groups > 0, f"num_groups={num_groups}; a number above 0 is needed")
    rows, device = group.shape[0], group.device
    # Tiles of 16 rows read each weight once for a few rows; higher tiles do more with what they have read.
    block = 16 if rows <= 16 * num_groups else 64
    by_group, order = torch.sort(group, stable=True)
    edges = torch.searchsorted(by_group, torch.arange(num_groups + 1, device=device, dtype=group.dtype))
    each = (edges.diff() + (block - 1)) // block  # tiles of each group
    ends = each.cumsum(0)
    tile = torch.arange(rows // block + min(rows, num_groups), device=device)
    own = torch.searchsorted(ends, tile, right=True)
    known = own.clamp(max=num_groups - 1)
    begin = edges[known] + (tile - (ends - each)[known]) * block
    end = torch.minimum(edges[known + 1], begin + block)
    empty = own == num_groups
    tiles = torch.stack([known, begin.masked_fill(empty, 0), end.masked_fill(empty, 0)]).to(torch.int32)
    return Groups(num_groups, order, tiles, block)
