"""pack_mask in Triton: a boolean mask to the bits that attention reads, a word of 32 keys at a time."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ._host import Call, cdiv

WORDS = 32


@triton.jit
def _pack(
    mask_ptr, out_ptr, rows_1, rows_2, columns, words, mask_0, mask_1, mask_2, mask_c, out_0, out_1, out_2,
    WORDS: tl.constexpr,
):  # fmt: skip
    """A program makes WORDS words of one row of [.., rows_1, rows_2]."""
    pieces = tl.cdiv(words, WORDS)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    word = tl.program_id(0) % pieces * WORDS + tl.arange(0, WORDS)
    x0, x1, x2 = row // rows_2 // rows_1, row // rows_2 % rows_1, row % rows_2
    j = word[:, None] * 32 + tl.arange(0, 32)[None, :]
    from_ptr = mask_ptr + x0 * mask_0 + x1 * mask_1 + x2 * mask_2
    seen = tl.load(from_ptr + j.to(tl.int64) * mask_c, mask=j < columns, other=0) != 0
    bits = tl.sum(seen.to(tl.int32) << tl.arange(0, 32)[None, :], 1)  # each bit once: a sum is an or
    tl.store(out_ptr + x0 * out_0 + x1 * out_1 + x2 * out_2 + word, bits, mask=word < words)


def pack_mask(mask: Any, *, out: Any = None, stream: Any = None) -> Any:
    """A boolean mask as bits, as `flashkernel.pack_mask`: bool or uint8 [..., seq_k] of 1 to 4 dims, any strides.

    Returns out, int32 [..., (seq_k + 31) // 32]. Raises: ValueError for arguments that don't fit, NotImplementedError
    for arrays that Triton does not serve.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> mask = torch.tensor([[True, False, True]], device=fk_triton.default_device())
    >>> fk_triton.pack_mask(mask).tolist()
    [[5]]
    """
    call = Call("pack_mask", stream, None)
    mask = call.any_input("mask", mask)
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    call.need(mask.dtype == torch.uint8, f"mask is {mask.dtype}; bool or uint8 is needed")
    call.need(1 <= mask.dim() <= 4, f"mask has {mask.dim()} dims; 1 to 4 are needed")
    columns = mask.shape[-1]
    words = cdiv(columns, 32)
    result = call.output("out", out, (*mask.shape[:-1], words), torch.int32)
    if result.numel() == 0:
        return result
    full = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    steps = (0,) * (4 - mask.dim()) + mask.stride()
    out_steps = (0,) * (4 - mask.dim()) + result.stride()
    call.launch(
        _pack, full[0] * full[1] * full[2] * cdiv(words, WORDS), mask_ptr=mask, out_ptr=result, rows_1=full[1],
        rows_2=full[2], columns=columns, words=words, mask_0=steps[0], mask_1=steps[1], mask_2=steps[2],
        mask_c=steps[3], out_0=out_steps[0], out_1=out_steps[1], out_2=out_steps[2], WORDS=WORDS,
    )  # fmt: skip
    return result
