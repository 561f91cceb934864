"""What the engine knows about a model: its limits, its cache geometry, and one forward step over a ragged batch.

Architectures (gpt2.py, decoder_model.py) subclass `Model` and say which model_types of config.json they compute;
`load_model` picks one by that. This file imports none of them: `flashkernel.generate` does.
"""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

import flashkernel as fk

from .arrays import HostArrays
from .checkpoint import Checkpoint, MemoryCheckpoint
from .config import array, integer, read_field, token_ids
from .devices import arrays_for
from .errors import CheckpointError, ModelMemoryError, UnsupportedModelError
from .files import describe, shown
from .gguf_checkpoint import GgufCheckpoint
from .gguf_file import is_gguf

if TYPE_CHECKING:
    from .tensor_parallel import TensorParallel

__all__ = ["ONCE", "HostBatch", "Model", "PagedBatch", "Split", "build_model", "load_model", "stop_tokens"]

# Hugging Face's names of activations, by the fused epilogue of `linear` that computes them.
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
}

# Where steps are made of `flashkernel.fused_linear` and `qkv_append`: up to how many rows, and numbers in a matrix, a
# GPU ran them faster than the ops that they stand for (lab/notebooks/linear_fused.md).
FUSED_ROWS, FUSED_NUMBERS = 1, 1 << 22

# Masks and tables that older versions of Transformers saved beside the weights.
_BUFFERS = re.compile(r"(^|\.)(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")


@dataclass
class CommonPages:
    """The pages that all sequences of a step begin with, and what follows them in each."""

    table: Any  # int32 [1, max_pages]
    lens: Any  # int64 [1]: tokens in them
    own_table: Any  # int32 [batch, max_pages]
    own_lens: Any  # int64 [batch]


@dataclass
class HostBatch:
    """What the host knows of a ragged batch: the values of `PagedBatch`'s arrays of the same names."""

    cu_seqlens: np.ndarray  # [batch + 1]
    block_table: np.ndarray  # int32 [batch, max_pages]
    seq_lens: np.ndarray  # [batch]


@dataclass
class PagedBatch:
    """The new tokens of some sequences side by side, and where their keys and values go and stand."""

    tokens: Any  # int64 [total] ids
    positions: Any  # int32 or int64 [total]
    slots: Any  # int64 [total]: page * page_size + offset of each new token
    cu_seqlens: Any  # int32 [batch + 1]: the new tokens of each sequence; None: one of each
    max_seqlen: int  # most new tokens of a sequence
    block_table: Any  # int32 [batch, max_pages]
    seq_lens: Any  # int32 or int64 [batch]: tokens in the cache, the new ones included
    last_rows: Any  # int64, on the host or the device: rows of `tokens` whose logits are wanted; None: all
    common: CommonPages | None = None  # of sequences with one new token each: read the common pages once
    # None: lengths and pages are known to the device alone, and every sequence has max_seqlen new tokens (some of which
    # may be empty places with slot -1), as where the batch is part of a CUDA graph.
    host: HostBatch | None = None


class Split(NamedTuple):
    """How the ranks of a tensor-parallel model share a tensor: which dim, and the sizes of the parts that lie one
    behind the other in it, each of which is shared; () is one part. A rank's sizes, not the whole ones.
    """

    dim: int
    parts: tuple[int, ...] = ()


ONCE = Split(-1)  # the first rank has it and others have zeros: a bias of what is added up over the ranks


class Model(ABC):
    """A decoder whose weights are held in the arrays of one device.

    A subclass names the model_types that it computes: ``class Gpt2(Model, model_types=("gpt2",))``.
    """

    architectures: ClassVar[dict[str, type[Model]]] = {}  # by model_type

    num_layers: int
    heads_q: int
    heads_kv: int
    head_dim: int  # of the cache, as heads_kv
    head_dim_v: int | None = None  # of the values in the cache; None: head_dim
    latent_cache: bool = False  # whether the cache holds latent rows
    max_positions: int
    vocab_size: int
    window: int | None = None  # most keys that a query of any layer sees, its own included; None: all
    # Whether decode steps of few rows take norms, gates and residuals with the linears beside them; None: where that is
    # faster, on a GPU in 16 bits.
    fused: bool | None = None
    splits: Mapping[str, Split] = {}  # by the last two parts of a tensor's name, as "q_proj.weight"

    def __init_subclass__(cls, model_types: Iterable[str] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Model.architectures.update(dict.fromkeys(model_types, cls))

    def __init__(self, checkpoint: Checkpoint | MemoryCheckpoint, arrays: HostArrays):
        self.config: Mapping[str, Any] = checkpoint.config
        self.arrays = arrays
        self.stop_tokens = stop_tokens(checkpoint)
        self.parallel = checkpoint.parallel
        self.ranks = 1 if self.parallel is None else self.parallel.size

    @abstractmethod
    def forward(self, batch: PagedBatch, pool: fk.KvPagePool) -> Any:
        """Appends the batch's keys and values to `pool` and returns logits [len(last_rows), vocab_size]."""

    def attend(
        self,
        q: Any,
        pool: fk.KvPagePool,
        layer: int,
        batch: PagedBatch,
        scale: float,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: Any = None,
    ) -> Any:
        """Causal attention of q [total, heads_q, head_dim] over the pages of one layer; [total, heads_q * head_dim].

        window: most keys that a query sees, its own included.
        softcap: scores are softcap * tanh(score / softcap); 0: they stay.
        sinks: float32 [heads_q], the logit of one more key without a value; None: there is none.
        """
        one_each = batch.cu_seqlens is None  # then q is [batch, heads_q, 1, head_dim]
        k_pages, v_pages = self.pages(pool, layer)
        options = {"causal": True, "scale": scale, "softcap": softcap, "sinks": sinks}
        options |= {**self.kv_options(pool, layer), **self.arrays.op_options}
        if batch.common is not None and window is None:
            common = batch.common
            tables = common.table, common.lens, common.own_table, common.own_lens
            out = fk.attention_cascade(q[:, :, None], k_pages, v_pages, *tables, **options)
        else:
            out = fk.attention_paged(
                q[:, :, None] if one_each else q,
                k_pages,
                v_pages,
                batch.block_table,
                batch.seq_lens,
                cu_seqlens_q=batch.cu_seqlens,
                max_seqlen_q=None if one_each else batch.max_seqlen,
                window=None if window is None else (window - 1, 0),
                **options,
            )
        return out.reshape(out.shape[0], self.heads_q * self.head_dim)

    def fuses(self, batch: PagedBatch, pool: fk.KvPagePool, *weights: Any) -> bool:
        """Whether this step's linears, with these weights and others like them, are `flashkernel.fused_linear`. Not in
        the invariant mode, where a token's bits must not depend on how many rows there are, and not before pages of
        8 bits.
        """
        few = batch.cu_seqlens is None and batch.last_rows is None and batch.tokens.shape[0] <= FUSED_ROWS
        if not few or self.parallel is not None or pool.dtype != self.arrays.dtype or fk.is_invariant():
            return False
        if self.fused is not None:
            return self.fused
        # The kernel takes chunks of 32 of k.
        fit = all(w.shape[0] * w.shape[1] <= FUSED_NUMBERS and w.shape[1] % 32 == 0 for w in weights)
        return self.arrays.asynchronous and self.arrays.dtype != "float32" and fit

    def check_kv_dtype(self, kv_dtype: str | None) -> None:
        """Raises UnsupportedModelError for elements that the model's cache can't have."""
        if kv_dtype not in (None, "fp8", "float8_e4m3fn") and self.latent_cache:
            raise UnsupportedModelError(
                f"generate: kv_dtype={kv_dtype!r} with model_type={describe(self.config.get('model_type'))}, whose "
                "cache holds latent rows; None or fp8 is needed"
            )

    def pool_options(self, kv_dtype: str | None) -> dict[str, Any]:
        """What the pages of the model's cache are, as `KvPagePool` takes it."""
        return {
            "heads_kv": self.heads_kv,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "dtype": kv_dtype or self.arrays.dtype,
        }

    # --- one model over several ranks; heads_q, heads_kv and the inner size are then those of this rank

    def share(self, count: int, field: str) -> int:
        """This rank's part of what a field of the config counts."""
        if count % self.ranks:
            raise UnsupportedModelError(
                f"load_model: config.json has {field}={count}, which {self.ranks} ranks of tensor_parallel can't "
                f"share; a multiple of {self.ranks} is needed"
            )
        return count // self.ranks

    def read(self, checkpoint: Checkpoint | MemoryCheckpoint, name: str, shape: tuple[int, ...]) -> Any:
        """A tensor of the checkpoint, or this rank's part of it, which then has that shape."""
        split = None if self.parallel is None else self.splits.get(".".join(name.rsplit(".", 2)[-2:]))
        if self.parallel is None or split is None:
            return checkpoint.read(name, shape)
        rank = self.parallel.rank
        if split == ONCE:
            whole = checkpoint.read(name, shape)
            return whole if rank == 0 else self.arrays.zeros(shape, "float32")
        full = tuple(n * self.ranks if dim == split.dim else n for dim, n in enumerate(shape))
        whole = checkpoint.read(name, full)
        pieces, begin = [], 0
        for size in split.parts or (shape[split.dim],):
            at: list[slice] = [slice(None)] * len(shape)
            at[split.dim] = slice(begin + rank * size, begin + (rank + 1) * size)
            pieces.append(self.arrays.copied(whole[tuple(at)]))
            begin += size * self.ranks
        return pieces[0] if len(pieces) == 1 else self.arrays.joined(pieces, split.dim)

    def same_batch(self, batch: PagedBatch) -> None:
        """The first thing of every `forward`: raises ValueError where the ranks are about to work on other tokens."""
        if self.parallel is not None:
            self.parallel.same_batch(batch)

    def summed(self, x: Any) -> Any:
        """x added up over the ranks."""
        return x if self.parallel is None else self.parallel.sum(x)

    def head(self, checkpoint: Checkpoint | MemoryCheckpoint, name: str, hidden: int) -> Any:
        """This rank's rows of the output layer."""
        assert self.parallel is not None
        return self.parallel.head_rows(self.arrays, checkpoint.read(name, (self.vocab_size, hidden)))

    def whole(self, logits: Any) -> Any:
        """[rows, vocab_size] of the logits that this rank's rows of the output layer give."""
        if self.parallel is not None:
            logits = self.parallel.join_columns(logits)
        return logits[:, : self.vocab_size]

    def pages(self, pool: fk.KvPagePool, layer: int) -> tuple[Any, Any]:
        """The pages of one layer, keys and values."""
        options = self.arrays.pool_views
        return pool.k_pages(layer, **options), pool.v_pages(layer, **options)

    def kv_options(self, pool: fk.KvPagePool, layer: int) -> dict[str, Any]:
        """What ops that take the pages of one layer need to know of an 8-bit cache."""
        scales = pool.scales(layer, **self.arrays.pool_views)
        return {} if scales is None else {"kv_scales": scales, "kv_dtype": pool.dtype}


def stop_tokens(checkpoint: Checkpoint | MemoryCheckpoint) -> frozenset[int]:
    """End-of-text ids: generation_config.json's where there is such a file, as in Transformers, else config.json's."""
    if checkpoint.generation_config is not None:
        return token_ids(checkpoint.generation_config, "eos_token_id", "generation_config.json")
    return token_ids(checkpoint.config, "eos_token_id", "config.json")


def base_prefix(checkpoint: Checkpoint | MemoryCheckpoint, base: str) -> str:
    """What the names of the decoder's tensors begin with: "transformer." or "model." as saved from a model with a head,
    nothing as saved from the bare decoder."""
    prefix = base + "."
    inside = [name for name in checkpoint.names if name.startswith(prefix)]
    for name in inside:
        if name[len(prefix) :] in checkpoint:
            raise CheckpointError(
                f"load_model: the checkpoint has both {shown(name)} and {shown(name[len(prefix) :])}, two names of one "
                "tensor; one of them must go"
            )
    return prefix if inside else ""


def require_layers(checkpoint: Checkpoint | MemoryCheckpoint, pattern: str, count: int, field: str) -> None:
    """Refuses more layers than the checkpoint has before anything is made for each of them."""
    last = pattern.format(count - 1)
    if last not in checkpoint:
        raise CheckpointError(f"load_model: config.json has {field}={count}; the checkpoint has no tensor {last!r}")


def refuse_windows(config: Mapping[str, Any], max_positions: int, *others: str) -> None:
    """Refuses windows that a model_type does not have: attention_chunk_size, and those fields that `others` names.

    Transformers' cache obeys these fields in any config, while the attention of such a model does not: its decode steps
    see fewer keys than its prefill.
    """
    for name in ("attention_chunk_size", *others):
        if name == "layer_types":
            kinds = read_field(config, name, array()) or []
            small = any(kind != "full_attention" for kind in kinds)
        else:
            size = read_field(config, name, integer(None, null=True))
            small = size is not None and size < max_positions
        if small:
            raise UnsupportedModelError(
                f"load_model: config.json has {name}={describe(config[name])}, which model_type="
                f"{config.get('model_type')!r} does not compute with; null is needed"
            )


def embedding_and_head(
    checkpoint: Checkpoint | MemoryCheckpoint, embedding: str, prefix: str, tied: bool
) -> tuple[str, str]:
    """The tensors of the first and the last layer by name, the same where the config ties them.

    Of tied ones a checkpoint may hold either or both. Two that differ say that the config is wrong; what Transformers
    makes of that depends on its version.
    """
    head = next((name for name in ("lm_head.weight", prefix + "lm_head.weight") if name in checkpoint), None)
    if not tied:
        return embedding, head or "lm_head.weight"
    if head is None or embedding not in checkpoint:
        return head or embedding, head or embedding
    if checkpoint.same(embedding, head):
        return embedding, embedding
    if isinstance(checkpoint, MemoryCheckpoint):  # the model computes with both, whatever its config says
        return embedding, head
    raise CheckpointError(
        f"load_model: config.json has tie_word_embeddings=true, but {embedding} and {head} differ; set it to false, or "
        f"save the model again without {head}"
    )


def load_model(
    directory: str | Path,
    *,
    device: str = "auto",
    dtype: str = "float32",
    weights: str | None = None,
    tensor_parallel: TensorParallel | None = None,
) -> Model:
    """Loads a local Hugging Face checkpoint of one of the families in docs/generate.md (GPT-2, Llama, Mistral, Mixtral,
    Qwen2, Qwen3, Gemma 2 and 3, Phi-3, SmolLM3, OLMo2, Granite, GPT-OSS, DeepSeek-V2 and V3), or a GGUF file.

    directory: holds config.json and model.safetensors, or shards with model.safetensors.index.json; pickles are
        refused. The files are those that Transformers would read; tensors that the config has no use for are left out
        with a warning. Or the path of one .gguf file of llama.cpp's architectures llama, qwen2 or qwen3, whose
        quantised tensors (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K) become `dtype` here, or stay as they are:
        see weights.
    device: "auto" (a CUDA device if this build and machine have one), "cpu" or "cuda".
    dtype: "float32", "float16" or "bfloat16", of weights, activations and cache.
    weights: of a GGUF file, "quantized" (matrices of Q4_0, Q4_1 and Q8_0 stay in their blocks, less than a third of
        the memory of 16 bits) or "dequantized"; None: the first on the CPU, where the tokens in float32 are the
        same, and the second on a GPU. Sums are float32 either way. Of a checkpoint in fp8 with a scale for each
        128 x 128 (DeepSeek-V3, Qwen3-FP8), "quantized" (matrices but those of experts stay in 8 bits, and what they
        multiply is rounded to 8 bits, as such models are meant to run) or "dequantized"; None: the first on GPUs of
        9.0, the second elsewhere.
    tensor_parallel: the ranks that share the model (docs/tensor_parallel.md), whose matrices are dequantised; every one
        of them makes this call. None: this process has all of it.

    Raises CheckpointError (missing or broken files, a config that does not fit the weights), UnsupportedModelError
    (another architecture, an adapter, quantised weights), ModelMemoryError, NotImplementedError (device).
    """
    arrays = arrays_for(device, dtype)
    if tensor_parallel is None:
        checkpoint, model = _load(directory, arrays, weights, None)
    else:
        tensor_parallel.prepare(arrays)
        try:
            checkpoint, model = _load(directory, arrays, weights, tensor_parallel)
        except Exception as error:
            tensor_parallel.agree("load_model", refusal=error)  # raises it, when the other ranks have heard of it
            raise
        config = sorted(map(repr, model.config.items()))
        tensor_parallel.agree("load_model", (arrays.dtype, arrays.asynchronous, config))
    unread = [name for name in checkpoint.unread if not _BUFFERS.search(name)]
    if unread:
        warnings.warn(
            f"load_model: the config has no use for {len(unread)} of the checkpoint's tensors "
            f"({shown(', '.join(unread[:3]))}), which are left out, as in Transformers",
            stacklevel=2,
        )
    return model


def _keeps_blocks(weights: str | None, gguf: bool, fp8: bool, device: str) -> bool:
    """Whether a file's quantised matrices stay in their blocks."""
    if weights == "quantized" and not gguf and not fp8:
        raise UnsupportedModelError(
            "load_model: weights='quantized' with a checkpoint that is no GGUF file and not in fp8; one of these is "
            "needed"
        )
    if weights is not None:
        return weights == "quantized"
    if fp8:  # other devices have no fast kernel for it
        return device == "cuda" and any(
            kernel.available and kernel.id.startswith("linear_fp8/cuda/sm90a") for kernel in fk.kernels()
        )
    return gguf and device == "cpu"


def _load(
    directory: str | Path, arrays: HostArrays, weights: str | None, parallel: TensorParallel | None
) -> tuple[Checkpoint | GgufCheckpoint, Model]:
    if parallel is not None and weights == "quantized":
        raise UnsupportedModelError(
            "load_model: weights='quantized' with tensor_parallel; 'dequantized' or None is needed"
        )
    if weights not in (None, "quantized", "dequantized"):
        raise ValueError(f"load_model: weights={weights!r}; 'quantized', 'dequantized' or None is needed")
    whole = is_gguf(directory)
    try:
        checkpoint = GgufCheckpoint(directory) if whole else Checkpoint(directory)
        keep = _keeps_blocks(weights, whole, checkpoint.is_fp8, arrays.device)
        checkpoint.keep_blocks = keep and parallel is None
        checkpoint.parallel = parallel
        return checkpoint, build_model(checkpoint, arrays)
    except MemoryError as error:
        raise ModelMemoryError(
            f"load_model: {shown(repr(str(directory)))} needs more memory than there is; a machine with more, or a "
            "16-bit dtype, is needed"
        ) from error


def build_model(checkpoint: Checkpoint | MemoryCheckpoint, arrays: HostArrays) -> Model:
    """The model of a checkpoint's config. Raises UnsupportedModelError for another architecture."""
    architectures = Model.architectures
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str) or model_type not in architectures:
        raise UnsupportedModelError(
            f"load_model: config.json has model_type={describe(model_type)}; one of "
            f"{', '.join(architectures)} is needed"
        )
    if checkpoint.config.get("per_layer_config") is not None:
        raise UnsupportedModelError("load_model: config.json has a per_layer_config; layers of one kind are needed")
    return architectures[model_type](checkpoint, arrays)
