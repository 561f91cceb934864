"""Block masks for `flashkernel.attention`: which blocks of queries and keys are computed at all.

`BlockMask` is what `attention(block_mask=)` takes beside a plain array. Its constructors read what other libraries call
block-sparse masks: a boolean array of blocks (MInference, Block-Sparse-Attention), torch FlexAttention's BlockMask, and
the rows of a block-sparse matrix (FlashInfer's BlockSparseAttentionWrapper).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import flashkernel as fk
from flashkernel.typing import SupportsDLPack

__all__ = ["BlockMask"]

HIDDEN, SHOWN, WHOLE = 0, 1, 2


def _is_torch(x: Any) -> bool:
    return type(x).__module__.split(".")[0] == "torch"


def _sizes(block_size: int | tuple[int, int]) -> tuple[int, int]:
    sizes = (block_size, block_size) if isinstance(block_size, int) else tuple(block_size)
    if len(sizes) != 2 or any(size < 64 or size & (size - 1) for size in sizes):
        raise ValueError(f"BlockMask: block_size={block_size!r}; needs a power of two from 64 on, or a pair of them")
    return sizes


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


def _zeros(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    if _is_torch(like):
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype), device=like.device)
    return np.zeros(shape, dtype)


def _where(condition: Any, a: int, b: Any) -> Any:
    """uint8."""
    if _is_torch(condition):
        import torch

        return torch.where(condition, torch.full_like(b, a), b)
    return np.where(condition, np.uint8(a), b)


def _as_uint8(x: Any) -> Any:
    if _is_torch(x):
        import torch

        return x.to(torch.uint8)
    return np.asarray(x).astype(np.uint8)


def _entries(shown: Any, sizes: tuple[int, int]) -> Any:
    """What `blocks` holds of [..., rows, seq_k] booleans."""
    size_q, size_k = sizes
    *leading, rows, keys = shown.shape
    row_blocks, key_blocks = _blocks(rows, size_q), _blocks(keys, size_k)
    padded = _zeros(shown, (*leading, row_blocks * size_q, key_blocks * size_k), "bool")
    padded[..., :rows, :keys] = shown
    counts = padded.reshape(*leading, row_blocks, size_q, key_blocks, size_k).sum(-1).sum(-2)
    pairs = np.minimum(size_q, rows - size_q * np.arange(row_blocks))[:, None] * np.minimum(
        size_k, keys - size_k * np.arange(key_blocks)
    )
    if _is_torch(shown):
        import torch

        pairs = torch.from_numpy(pairs).to(shown.device)
    return _where(counts == pairs, WHOLE, _as_uint8(counts > 0))


class BlockMask(NamedTuple):
    """Blocks of queries by blocks of keys, and what they show; `attention(q, k, v, block_mask=...)` takes it.

    It broadcasts over batch and heads, holds arrays of NumPy or tensors of torch (on the device of q), and serves any
    number of calls and their gradients. Making one costs more than reading it: make it once for a model's layers.

    >>> import numpy as np
    >>> from flashkernel.masks import BlockMask
    >>> band = np.abs(np.arange(4)[:, None] - np.arange(4)) < 2
    >>> BlockMask.from_dense(band).density()
    0.625
    """

    blocks: Any
    """uint8 or bool [batch or 1, heads_q or 1, blocks of queries, blocks of keys]: 0 hides all pairs of a block, 1
    shows those that `mask` shows (all, without a mask), 2 shows all of them, whatever `mask` says."""
    block_size: tuple[int, int] = (128, 128)
    """Queries and keys of a block: powers of two from 64 on."""
    mask: Any = None
    """int32, the bits of `pack_mask`, broadcastable to [batch, heads_q, seq_q, (seq_k + 31) // 32]; or None."""

    def density(self) -> float:
        """The part of the blocks that is not hidden. Waits for the device."""
        shown = self.blocks != HIDDEN
        return float(shown.sum()) / max(1, int(np.prod(shown.shape)))

    @classmethod
    def from_dense(cls, blocks: SupportsDLPack, block_size: int | tuple[int, int] = 128, mask: Any = None) -> BlockMask:
        """From a boolean array of blocks, [batch or 1, heads or 1, blocks of queries, blocks of keys] or its last dims.

        blocks: bool or uint8 (2: the whole block is shown whatever `mask` says); not copied.
        block_size: tokens of a block, or a pair (of queries, of keys).
        mask: bits of `pack_mask` for the pairs in shown blocks.
        """
        return cls(blocks, _sizes(block_size), mask)

    @classmethod
    def from_mask(cls, mask: Any, block_size: int | tuple[int, int] = 128) -> BlockMask:
        """From a boolean mask of single pairs, [batch or 1, heads or 1, seq_q, seq_k] or its last dims; True: seen.

        Blocks of which nothing is seen are left out, and blocks of which all is seen are not looked up bit by bit.

        >>> import numpy as np
        >>> from flashkernel.masks import BlockMask
        >>> document = np.arange(300) // 150
        >>> BlockMask.from_mask(document[:, None] == document[None, :]).blocks
        array([[2, 1, 0],
               [1, 1, 2],
               [0, 2, 2]], dtype=uint8)
        """
        sizes = _sizes(block_size)
        blocks = _entries(mask, sizes)
        partly = bool((blocks == SHOWN).any())
        return cls(blocks, sizes, fk.pack_mask(mask) if partly else None)

    @classmethod
    def from_flex(cls, block_mask: Any) -> BlockMask:
        """From a torch.nn.attention.flex_attention.BlockMask (as create_block_mask makes it), its mask_mod included.

        mask_mod is called for the blocks of queries that have partial blocks. Its bits take seq_q * seq_k / 8 bytes for
        each batch and head that the mask has. Blocks of any size will do; those that are no power of two from 64 on
        become blocks of 128.
        """
        import torch
        from torch.nn.attention.flex_attention import create_mask

        counts, lists = block_mask.kv_num_blocks, block_mask.kv_indices
        batch, heads, rows = counts.shape
        size_q, size_k = block_mask.BLOCK_SIZE
        seq_q, seq_k = block_mask.seq_lengths
        columns = _blocks(seq_k, size_k)
        blocks = torch.zeros(batch, heads, rows, columns + 1, dtype=torch.uint8, device=counts.device)

        def write(counts: Any, lists: Any, entry: int) -> None:
            used = torch.arange(lists.shape[-1], device=lists.device) < counts[..., None]
            at = torch.where(used, lists, columns).long()  # one column more takes what is not in use
            blocks.scatter_(-1, at, entry)

        write(counts, lists, SHOWN)
        if block_mask.full_kv_num_blocks is not None:
            write(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, WHOLE)
        blocks = blocks[..., :columns].contiguous()
        partly = (blocks == SHOWN).any(-1).any(0).any(0).tolist()

        def seen(first: int, last: int) -> Any:
            def shifted(b: Any, h: Any, q: Any, k: Any) -> Any:
                return block_mask.mask_mod(b, h, q + first, k)

            return create_mask(shifted, batch, heads, last - first, seq_k, device=counts.device)

        if any(size < 64 or size & (size - 1) for size in (size_q, size_k)):

            def pairs(first: int, last: int) -> Any:
                wide = blocks[:, :, torch.arange(first, last, device=blocks.device) // size_q]
                wide = wide.repeat_interleave(size_k, -1)[..., :seq_k]
                return (wide == WHOLE) | ((wide == SHOWN) & seen(first, last))

            return _from_pieces(pairs, seq_q)
        if not any(partly):
            return cls(blocks, (size_q, size_k))
        mask = torch.zeros(batch, heads, seq_q, _blocks(seq_k, 32), dtype=torch.int32, device=counts.device)
        for row in range(rows):
            first, last = row * size_q, min(seq_q, row * size_q + size_q)
            if partly[row]:
                mask[:, :, first:last] = fk.pack_mask(seen(first, last))
        return cls(blocks, (size_q, size_k), mask)

    @classmethod
    def from_bsr(
        cls, indptr: Any, indices: Any, seq_q: int, seq_k: int, rows: int, columns: int, mask: Any = None
    ) -> BlockMask:
        """From a block-sparse matrix of seq_q by seq_k, as FlashInfer's BlockSparseAttentionWrapper plans one.

        indptr: integers [seq_q / rows + 1]; block row i has the blocks indices[indptr[i] : indptr[i + 1]].
        indices: integers [indptr[-1]]: block columns.
        rows, columns: queries and keys of a block, any numbers that divide seq_q and seq_k; those that are no powers
            of two from 64 on become blocks of 128 and a mask of single pairs.
        mask: bool [indptr[-1], rows, columns]: the pairs seen in each block; None: all.
        """
        if rows < 1 or columns < 1 or seq_q % rows or seq_k % columns:
            raise ValueError(
                f"BlockMask.from_bsr: blocks of {rows} by {columns} but seq_q={seq_q}, seq_k={seq_k}; blocks must "
                "divide the lengths"
            )
        bounds = [int(x) for x in indptr]
        if len(bounds) != seq_q // rows + 1 or bounds[0] != 0 or bounds[-1] != len(indices):
            raise ValueError(
                f"BlockMask.from_bsr: indptr has {len(bounds)} entries from {bounds[0]} to {bounds[-1]}; needs "
                f"{seq_q // rows + 1}, from 0 to len(indices)={len(indices)}"
            )
        if any(begin > end for begin, end in itertools.pairwise(bounds)):
            raise ValueError("BlockMask.from_bsr: indptr decreases; each entry must be at least the one before")
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < seq_k // columns:
            raise ValueError(
                f"BlockMask.from_bsr: indices from {int(indices.min())} to {int(indices.max())}; block columns in "
                f"[0, {seq_k // columns}) are needed"
            )
        blocks = _zeros(indices, (seq_q // rows, seq_k // columns), "uint8")
        for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
            blocks[row, indices[begin:end]] = SHOWN
        sizes_fit = not any(size < 64 or size & (size - 1) for size in (rows, columns))
        if sizes_fit and mask is None:
            return cls(blocks, (rows, columns))

        def pairs(first: int, last: int) -> Any:
            seen = _zeros(indices, (last - first, seq_k), "bool")
            for row in range(first // rows, _blocks(last, rows)):
                # The rows of this block row that lie in [first, last).
                top, bottom = max(first, row * rows), min(last, row * rows + rows)
                wide = _zeros(indices, (bottom - top, seq_k // columns, columns), "bool")
                of_row = slice(bounds[row], bounds[row + 1])
                inside = slice(top - row * rows, bottom - row * rows)
                if mask is None:
                    wide[:, indices[of_row]] = True
                else:
                    wide[:, indices[of_row]] = mask[of_row, inside].swapaxes(0, 1)
                seen[top - first : bottom - first] = wide.reshape(bottom - top, seq_k)
            return seen

        return _from_pieces(pairs, seq_q)


def _from_pieces(pairs: Callable[[int, int], Any], seq_q: int, size: int = 128) -> BlockMask:
    """From `pairs(first, last)`, the booleans [..., last - first, seq_k] of some rows, block row by block row."""
    blocks, words = [], []
    for first in range(0, seq_q, size):
        seen = pairs(first, min(seq_q, first + size))
        blocks.append(_entries(seen, (size, size)))
        words.append(fk.pack_mask(seen))

    def join(parts: list[Any]) -> Any:
        if _is_torch(parts[0]):
            import torch

            return torch.cat(parts, -2)
        return np.concatenate(parts, -2)

    whole = join(blocks)
    return BlockMask(whole, (size, size), join(words) if bool((whole == SHOWN).any()) else None)
