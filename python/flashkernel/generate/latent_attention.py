"""Multi-head latent attention (DeepSeek-AI, DeepSeek-V2, 2024): one latent row of a token makes the keys and values of
all heads.

Called by decoder_model.py. The cache holds the rows alone: the normed latent, and beside it the rotated part of the
key, which all heads share. There are two ways to the same numbers:

absorbed   each head's query goes through the half of kv_b_proj that makes keys, attends to the rows as they are
           (`attention_mla_decode`), and what comes goes through the half that makes values. For few queries.
expanded   the rows are read back, kv_b_proj makes keys and values of them, and `attention_varlen` is that of any other
           model. For many queries of a sequence, over which that work is shared.

The cache may hold the rows in 8 bits, with a scale for each 128 columns of the latent (`latent_append`). Pages are then
of bytes, and expanded rows are their numbers in the model's dtype, as the absorbed way's are.

A step that is part of a CUDA graph is absorbed, and so is everything in the invariant mode, where a query must have one
order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashkernel as fk

from ..quantized import latent_numbers
from .arrays import HostArrays
from .config import NEEDED, Field, integer, number, read_field, text
from .errors import CheckpointError, UnsupportedModelError
from .model import PagedBatch
from .rope_scaling import Rope

__all__ = [
    "EPS",
    "LATENT_FIELDS",
    "LatentAttention",
    "LatentSizes",
    "Way",
    "latent_scale",
    "latent_sizes",
    "read_latent",
    "way",
]

LATENT_FIELDS: dict[str, Field] = {
    "kv_lora_rank": integer(512),
    "q_lora_rank": integer(1536, null=True),
    "qk_nope_head_dim": integer(128),
    "qk_rope_head_dim": integer(64),
    "v_head_dim": integer(128),
}
EPS = 1e-6  # of the norms in here, whatever rms_norm_eps says
FEW = 16  # most queries of a sequence that are absorbed where there is a choice
MOST_COLUMNS = (512, 576)  # what `attention_mla_decode` takes: of the latent, and of a row


@dataclass(frozen=True)
class LatentSizes:
    """Columns of each part."""

    rank: int  # the latent of keys and values
    q_rank: int | None  # that of queries; None: they are made from the hidden state
    plain: int  # the part of a head's query and key that is not rotated
    turned: int  # the part that is
    value: int  # a head's value

    @property
    def query(self) -> int:
        return self.plain + self.turned

    @property
    def row(self) -> int:
        return self.rank + self.turned

    @property
    def row_bytes(self) -> int:
        """Of a row in 8 bits."""
        return self.rank + 4 * -(-self.rank // 128) + 2 * self.turned


def latent_sizes(config: Mapping[str, Any]) -> LatentSizes:
    """The sizes of a config whose fields have been read."""
    sizes = LatentSizes(*(config[name] for name in LATENT_FIELDS))
    if sizes.rank > MOST_COLUMNS[0] or sizes.row > MOST_COLUMNS[1]:
        raise UnsupportedModelError(
            f"load_model: config.json has kv_lora_rank={sizes.rank} and qk_rope_head_dim={sizes.turned}; at most "
            f"{MOST_COLUMNS[0]}, and {MOST_COLUMNS[1]} together, are needed"
        )
    heads, heads_kv = config["num_attention_heads"], config["num_key_value_heads"]
    if heads_kv not in (None, heads):
        raise CheckpointError(
            f"load_model: config.json has num_attention_heads={heads} and num_key_value_heads={heads_kv}; one number "
            "is needed"
        )
    if config["attention_bias"] and sizes.q_rank is None:
        raise UnsupportedModelError(
            "load_model: config.json has attention_bias=true and q_lora_rank=null, a bias beside a matrix without one; "
            "attention_bias=false is needed"
        )
    return sizes


def latent_scale(sizes: LatentSizes, parameters: Mapping[str, Any]) -> float:
    """What scores are multiplied with. parameters: RoPE's fields; YaRN's mscale_all_dim enlarges scores, as it does
    under any other rope_type in Transformers."""
    scale, where = float(sizes.query) ** -0.5, "RoPE of config.json"
    kind = read_field(parameters, "rope_type", text(parameters.get("type", "default")), where)
    enlarged = read_field(parameters, "mscale_all_dim", number(None, 0.0, 1e6, null=True), where)
    if kind == "default" or not enlarged:
        return scale
    factor = read_field(parameters, "factor", number(NEEDED, 1e-6), where)
    return scale * (0.1 * enlarged * float(np.log(factor)) + 1.0) ** 2 if factor > 1 else scale


@dataclass
class Way:
    """How the queries of a batch attend, the same in all layers.

    Absorbed: `each` queries of every row of `table` and `lengths`. Expanded: the rows at `places`, int64 [keys], are
    the keys, of which sequence i has cu_seqlens[i] .. cu_seqlens[i + 1] - 1, at most `longest`.
    """

    table: Any = None
    lengths: Any = None
    each: int = 0
    places: Any = None
    cu_seqlens: Any = None
    longest: int = 0


def way(arrays: HostArrays, batch: PagedBatch, page_size: int) -> Way:
    """The way of a batch: see the head of this file."""
    host = batch.host
    if host is None:
        return Way(batch.block_table, batch.seq_lens, batch.max_seqlen)
    if fk.is_invariant() or batch.max_seqlen <= FEW:  # every query is a row of its own
        of = np.repeat(np.arange(len(host.seq_lens)), np.diff(host.cu_seqlens))
        behind = host.cu_seqlens[1:][of] - 1 - np.arange(len(of))  # queries of the sequence behind this one
        return Way(arrays.index(host.block_table[of]), arrays.index(host.seq_lens[of] - behind), 1)
    places = []
    for pages, length in zip(host.block_table, host.seq_lens, strict=True):
        at = np.arange(length)
        places.append(pages[at // page_size].astype(np.int64) * page_size + at % page_size)
    ends = np.concatenate([[0], np.cumsum(host.seq_lens)])
    return Way(
        places=arrays.index(np.concatenate(places), "int64"),
        cu_seqlens=arrays.index(ends),
        longest=int(host.seq_lens.max()),
    )


@dataclass
class LatentAttention:
    """The attention of one layer, up to its output projection."""

    arrays: HostArrays
    sizes: LatentSizes
    heads: int
    rope: Rope
    interleaved: bool  # pairs of RoPE are neighbours
    in_weight: Any  # rows of the query (or its latent), of the latent, and of the key's rotated part
    in_bias: Any
    q_norm: Any  # None where q_rank is
    q_weight: Any
    norm: Any
    up_weight: Any  # [heads * (plain + value), rank]

    def __call__(self, x: Any, batch: PagedBatch, way: Way, pages: Any, scale: float) -> Any:
        """x [tokens, hidden] to [tokens, heads * value].

        pages: [num_pages, page_size, 1, row], or of bytes; they get new rows.
        """
        arrays, sizes, options = self.arrays, self.sizes, self.arrays.op_options
        tokens, rank = x.shape[0], sizes.rank
        x = arrays.linear(x, self.in_weight, self.in_bias)
        behind = x.shape[1] - sizes.row
        q = x[:, :behind]
        if self.q_weight is not None:
            q = arrays.linear(fk.rms_norm(q, self.q_norm, eps=EPS, **options), self.q_weight)
        q = q.reshape(tokens, self.heads, sizes.query)
        latent = fk.rms_norm(x[:, behind : behind + rank], self.norm, eps=EPS, **options)
        wide = None if way.table is None else arrays.space((tokens, self.heads, sizes.row))
        turned = q[..., sizes.plain :]
        q_out = turned if wide is None else wide[..., rank:]
        key = x[:, behind + rank :]
        if self.in_bytes(pages):
            self._append_bytes(key, latent, turned, q_out, batch, pages)
        else:
            rope: Any = {"positions": batch.positions, "q": turned, "q_out": q_out, **self._rope_options()}
            # The two parts of a row are to the op a value, which is copied, and a key, which is rotated.
            fk.kv_append(
                key[:, None], latent[:, None], pages[..., rank:], pages[..., :rank], batch.slots, rope=rope, **options
            )
        if self.rope.factor != 1.0:  # a factor of q and k each counts twice in their product
            arrays.scale_in_place(q_out, self.rope.factor**2)
        if wide is None:
            return self._expanded(q, batch, way, pages, scale)
        arrays.per_head(q[..., : sizes.plain], self._up()[:, : sizes.plain], wide[..., :rank])
        return self._absorbed(wide, way, pages, scale)

    def in_bytes(self, pages: Any) -> bool:
        """Whether the cache's rows have 8 bits."""
        return bool(pages.shape[-1] == self.sizes.row_bytes)

    def _rope_options(self) -> dict[str, Any]:
        return {
            "theta": self.rope.theta,
            "rotary_dim": self.sizes.turned,
            "interleaved": self.interleaved,
            "inv_freq": self.rope.given,
        }

    def _append_bytes(self, key: Any, latent: Any, turned: Any, q_out: Any, batch: PagedBatch, pages: Any) -> None:
        """Rotates queries (into q_out) and keys, and writes new rows in 8 bits."""
        options = self.arrays.op_options
        rotated = self.arrays.space((key.shape[0], self.sizes.turned))
        heads = lambda x: x.swapaxes(0, 1)[None]  # [1, heads, tokens, columns]
        fk.rope(
            heads(turned), heads(key[:, None]), batch.positions, out=(heads(q_out), heads(rotated[:, None])),
            **self._rope_options(), **options,
        )  # fmt: skip
        fk.latent_append(latent, rotated, pages[:, :, 0], batch.slots, **options)

    def _up(self) -> Any:
        return self.up_weight.reshape(self.heads, self.sizes.plain + self.sizes.value, self.sizes.rank)

    def _absorbed(self, q: Any, way: Way, pages: Any, scale: float) -> Any:
        sizes, tokens = self.sizes, q.shape[0]
        out = fk.attention_mla_decode(
            q.reshape(-1, way.each, self.heads, sizes.row).swapaxes(1, 2),
            pages[:, :, 0],
            way.table,
            way.lengths,
            scale=scale,
            head_dim_v=sizes.rank,
            causal=way.each > 1,
            **self.arrays.op_options,
        )
        out = out.swapaxes(1, 2).reshape(tokens, self.heads, sizes.rank)
        result = self.arrays.space((tokens, self.heads, sizes.value))
        self.arrays.per_head(out, self._up()[:, sizes.plain :].swapaxes(1, 2), result)
        return result.reshape(tokens, -1)

    def _expanded(self, q: Any, batch: PagedBatch, way: Way, pages: Any, scale: float) -> Any:
        arrays, sizes, options = self.arrays, self.sizes, self.arrays.op_options
        rows = arrays.take(pages.reshape(-1, pages.shape[-1]), way.places)
        if self.in_bytes(pages):
            rows = arrays.rounded(latent_numbers(rows, sizes.rank))
        kv = fk.linear(rows[:, : sizes.rank], self.up_weight, **options)
        kv = kv.reshape(-1, self.heads, sizes.plain + sizes.value)
        k = arrays.space((kv.shape[0], self.heads, sizes.query))
        k[..., : sizes.plain] = kv[..., : sizes.plain]
        k[..., sizes.plain :] = rows[:, None, sizes.rank :]
        out = fk.attention_varlen(
            q,
            k,
            kv[..., sizes.plain :],
            batch.cu_seqlens,
            way.cu_seqlens,
            batch.max_seqlen,
            way.longest,
            causal=True,
            scale=scale,
            **options,
        )
        return out.reshape(q.shape[0], -1)


def read_latent(
    arrays: HostArrays,
    config: Mapping[str, Any],
    sizes: LatentSizes,
    at: str,
    rope: Rope,
    stack: Callable[..., Any],
    norm: Callable[[str, int], Any],
) -> LatentAttention:
    """The attention of the layer whose tensors' names begin with `at`.

    stack: some projections of one input as one matrix or bias: (name, rows) of each, "weight" or "bias", whether it is
        there, its columns. norm: the weight of a norm, by its name and size.
    """
    heads, hidden, q_rank = config["num_attention_heads"], config["hidden_size"], sizes.q_rank
    q_size = heads * sizes.query
    first = (at + "q_proj", q_size) if q_rank is None else (at + "q_a_proj", q_rank)
    inputs = [first, (at + "kv_a_proj_with_mqa", sizes.row)]
    up = [(at + "kv_b_proj", heads * (sizes.plain + sizes.value))]
    return LatentAttention(
        arrays,
        sizes,
        heads,
        rope,
        config.get("rope_interleave", True),
        stack(inputs, "weight", True, hidden),
        stack(inputs, "bias", config["attention_bias"]),
        None if q_rank is None else norm(at + "q_a_layernorm", q_rank),
        None if q_rank is None else stack([(at + "q_b_proj", q_size)], "weight", True, q_rank),
        norm(at + "kv_a_layernorm", sizes.rank),
        stack(up, "weight", True, sizes.rank, blocks=False),  # its halves meet queries and values of each head
    )
