"""What a type checker has to say of calls. Nothing here runs: tests_py/test_typing.py gives it to mypy.

A function for each way to an op: `flashkernel` for two kinds of arrays, `flashkernel.torch`, `flashkernel.triton`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import assert_type

import flashkernel as fk
import flashkernel.torch as fkt
import flashkernel.triton as fk_triton
from flashkernel.masks import BlockMask
from flashkernel.typing import KvAppendRopeWithQ

Numpy: TypeAlias = NDArray[Any]
Tensor: TypeAlias = torch.Tensor


class Jax:
    """An array that speaks DLPack, of a package that flashkernel has never heard of."""

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        raise NotImplementedError

    def __dlpack_device__(self) -> tuple[int, int]:
        raise NotImplementedError


def kinds(
    x: np.ndarray[tuple[int, int], np.dtype[np.float32]], t: Tensor, p: torch.nn.Parameter, j: Jax, a: fk.Array
) -> None:
    t.no_such_thing()  # type: ignore[attr-defined]  # torch's types are known; of Any all would be true
    # The kind counts, not the dtype or the number of dims, which a result may have others of.
    assert_type(fk.argmax(x, axis=0), Numpy)
    assert_type(fk.argmax(t), Tensor)
    assert_type(fk.argmax(p), Tensor)
    assert_type(fk.argmax(j), Jax)
    assert_type(fk.argmax(a), fk.Array)
    # The first array decides.
    assert_type(fk.linear(x, t), Numpy)
    assert_type(fk.linear(t, x, out=t), Tensor)
    fk.add(3, x)  # type: ignore[call-overload]
    fk.add(x, x, uot=x)  # type: ignore[call-overload]


def flags(q: Numpy, flag: bool, maybe: Tensor | None, t: Tensor, anything: Any) -> None:
    assert_type(fk.attention(q, q, q, return_lse=flag), Numpy | tuple[Numpy, Numpy])
    assert_type(fk.rms_norm(t, residual=maybe), Tensor | tuple[Tensor, Tensor])
    assert_type(fk.rms_norm(t, return_stats=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(fk.layer_norm(t, return_stats=flag, residual=t), tuple[Tensor, ...])
    assert_type(fk.linear_backward(t, t, t, need_x=flag), tuple[Tensor | None, Tensor | None, Tensor | None])
    assert_type(fk.attention_backward(t, t, t, t, t, t, need_bias=flag), tuple[Tensor, ...])
    assert_type(fk.add(t, t, out=maybe), Tensor)
    fk.add(anything, anything).item()


def numpy(x: Numpy, rope: KvAppendRopeWithQ) -> None:
    assert_type(fk.attention(x, x, x, causal=True), Numpy)
    assert_type(fk.attention(x, x, x, return_lse=False), Numpy)
    assert_type(fk.attention(x, x, x, block_mask=BlockMask.from_dense(x), block_size=(64, 128)), Numpy)
    assert_type(fk.attention(x, x, x, return_lse=True), tuple[Numpy, Numpy])
    assert_type(fk.attention_varlen(x, x, x, x, x, 1, 1), Numpy)
    assert_type(fk.attention_varlen(x, x, x, x, x, 1, 1, return_lse=True), tuple[Numpy, Numpy])
    assert_type(fk.attention_cascade(x, x, x, x, x, x, x), Numpy)
    assert_type(fk.attention_cascade(x, x, x, x, x, x, x, return_lse=True), tuple[Numpy, Numpy])
    assert_type(fk.attention_fp8(x, x, x, 1.0), Numpy)
    assert_type(fk.attention_fp8(x, x, x, return_lse=True), tuple[Numpy, Numpy])
    assert_type(fk.attention_mla_decode(x, x, x, x, scale=1.0, latent_scale=0.5), Numpy)
    assert_type(fk.attention_mla_decode(x, x, x, x, scale=1.0, return_lse=True), tuple[Numpy, Numpy])
    assert_type(fk.latent_append(x, x, x, x, latent_scale=x), None)
    assert_type(fk.attention_paged(x, x, x, x, x), Numpy)
    assert_type(fk.attention_paged(x, x, x, x, x, return_lse=True), tuple[Numpy, Numpy])
    assert_type(fk.pack_mask(x), Numpy)
    assert_type(fk.merge_states(x, x, x, x), tuple[Numpy, Numpy])
    assert_type(fk.attention_backward(x, x, x, x, x, x), tuple[Numpy, Numpy, Numpy])
    assert_type(fk.attention_backward(x, x, x, x, x, x, need_bias=True), tuple[Numpy, Numpy, Numpy, Numpy])
    assert_type(
        fk.attention_backward(x, x, x, x, x, x, need_bias=True, need_sinks=True),
        tuple[Numpy, Numpy, Numpy, Numpy, Numpy],
    )
    assert_type(fk.attention_varlen_backward(x, x, x, x, x, x, x, x, 1, 1), tuple[Numpy, Numpy, Numpy])
    assert_type(
        fk.attention_varlen_backward(x, x, x, x, x, x, x, x, 1, 1, need_sinks=True), tuple[Numpy, Numpy, Numpy, Numpy]
    )
    assert_type(fk.rope(x), Numpy)
    assert_type(fk.rope(x, x), tuple[Numpy, Numpy])
    assert_type(fk.rope_table(x, None, x, x), Numpy)
    assert_type(fk.rope_table(x, x, x, x), tuple[Numpy, Numpy])
    assert_type(fk.linear(x, x), Numpy)
    assert_type(fk.fused_linear(x, x, activation="swiglu"), Numpy)
    assert_type(fk.qkv_append(x, x, x, x, x, rope={"positions": x}), Numpy)
    assert_type(fk.quantized_linear(x, x, x, x, format="int4"), Numpy)
    assert_type(fk.decode_step(x, x, x, x, x, x, x, x, x, x, x, x, x, x, x), Numpy)
    assert_type(fk.linear_fp8(x, x, None, x, out_dtype="float32"), Numpy)
    assert_type(fk.quantize_fp8_blocks(x), tuple[Numpy, Numpy])
    assert_type(fk.linear(x, x, return_preactivation=True), tuple[Numpy, Numpy])
    assert_type(fk.linear_backward(x, x, x), tuple[Numpy, Numpy, Numpy])
    assert_type(fk.linear_backward(x, x, x, need_x=False, need_bias=False), tuple[None, Numpy, None])
    assert_type(fk.add(x, x), Numpy)
    assert_type(fk.swiglu(x, x), Numpy)
    assert_type(fk.swiglu_backward(x, x, x), tuple[Numpy, Numpy])
    assert_type(fk.reduce_sum(x, axis=(0, 1)), Numpy)
    assert_type(fk.reduce_mean(x), Numpy)
    assert_type(fk.reduce_max(x), Numpy)
    assert_type(fk.argmax(x), Numpy)
    assert_type(fk.sample(x), Numpy)
    assert_type(fk.sample(x, temperature=x, seed=x, logprob=x), Numpy)
    assert_type(fk.softmax(x), Numpy)
    assert_type(fk.log_softmax(x), Numpy)
    assert_type(fk.softmax_backward(x, x), Numpy)
    assert_type(fk.log_softmax_backward(x, x), Numpy)
    assert_type(fk.layer_norm(x), Numpy)
    assert_type(fk.layer_norm(x, residual=x), tuple[Numpy, Numpy])
    assert_type(fk.layer_norm(x, return_stats=True), tuple[Numpy, Numpy, Numpy])
    assert_type(fk.layer_norm(x, residual=x, return_stats=True), tuple[Numpy, Numpy, Numpy, Numpy])
    assert_type(fk.rms_norm(x, x), Numpy)
    assert_type(fk.rms_norm(x, residual=x), tuple[Numpy, Numpy])
    assert_type(fk.rms_norm(x, return_stats=True), tuple[Numpy, Numpy])
    assert_type(fk.rms_norm(x, residual=x, return_stats=True), tuple[Numpy, Numpy, Numpy])
    assert_type(fk.rms_norm_quantized(x, x), tuple[Numpy, Numpy])
    assert_type(fk.layer_norm_quantized(x, residual=x), tuple[Numpy, Numpy, Numpy])
    assert_type(fk.layer_norm_backward(x, x, x, x, x), tuple[Numpy, Numpy, Numpy])
    assert_type(fk.layer_norm_backward(x, x, None, x, x), tuple[Numpy, None, Numpy])
    assert_type(fk.layer_norm_backward(x, x, x, x, x, need_bias=False), tuple[Numpy, Numpy, None])
    assert_type(fk.rms_norm_backward(x, x, x, x), tuple[Numpy, Numpy])
    assert_type(fk.rms_norm_backward(x, x, x, x, need_weight=False), tuple[Numpy, None])
    assert_type(fk.cross_entropy(x, x, reduction="sum"), Numpy)
    assert_type(fk.cross_entropy(x, x, return_lse=True), tuple[Numpy, Numpy])
    assert_type(fk.cross_entropy_backward(x, x, x, x), Numpy)
    assert_type(fk.linear_cross_entropy(x, x, x), Numpy)
    assert_type(fk.linear_cross_entropy(x, x, x, return_lse=True), tuple[Numpy, Numpy])
    assert_type(fk.linear_cross_entropy(x, x, x, return_z_loss=True, return_lse=True), tuple[Numpy, Numpy, Numpy])
    assert_type(fk.linear_cross_entropy_backward(x, x, x, x, x, need_bias=False), tuple[Numpy, Numpy, None])
    assert_type(fk.linear_selected_log_prob(x, x, x), Numpy)
    assert_type(fk.linear_selected_log_prob_backward(x, x, x, x, x), tuple[Numpy, Numpy, Numpy])
    assert_type(fk.kv_append(x, x, x, x, x, rope=rope), Numpy)
    assert_type(fk.kv_append(x, x, x, x, x, rope={"positions": x, "q": x}), Numpy)
    assert_type(fk.kv_append(x, x, x, x, x, rope={"positions": x, "q": x, "q_norm": x, "norm_eps": 0.1}), Numpy)
    assert_type(fk.kv_append(x, x, x, x, x), None)
    assert_type(fk.kv_append(x, x, x, x, x, rope={"positions": x}), None)
    assert_type(fk.kv_read(x, x, x, x), tuple[Numpy, Numpy])
    assert_type(fk.kv_copy_pages(x, x, x, x), None)
    assert_type(fk.check_block_table(x, x, 1, 1), None)


def tensors(x: Tensor, rope: KvAppendRopeWithQ) -> None:
    assert_type(fk.attention(x, x, x, causal=True), Tensor)
    assert_type(fk.attention(x, x, x, return_lse=False), Tensor)
    assert_type(fk.attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fk.attention_varlen(x, x, x, x, x, 1, 1), Tensor)
    assert_type(fk.attention_varlen(x, x, x, x, x, 1, 1, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fk.attention_paged(x, x, x, x, x), Tensor)
    assert_type(fk.attention_paged(x, x, x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fk.pack_mask(x), Tensor)
    assert_type(fk.merge_states(x, x, x, x), tuple[Tensor, Tensor])
    assert_type(fk.attention_backward(x, x, x, x, x, x), tuple[Tensor, Tensor, Tensor])
    assert_type(fk.attention_backward(x, x, x, x, x, x, need_bias=True), tuple[Tensor, Tensor, Tensor, Tensor])
    assert_type(
        fk.attention_backward(x, x, x, x, x, x, need_bias=True, need_sinks=True),
        tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    )
    assert_type(fk.attention_varlen_backward(x, x, x, x, x, x, x, x, 1, 1), tuple[Tensor, Tensor, Tensor])
    assert_type(
        fk.attention_varlen_backward(x, x, x, x, x, x, x, x, 1, 1, need_sinks=True),
        tuple[Tensor, Tensor, Tensor, Tensor],
    )
    assert_type(fk.rope(x), Tensor)
    assert_type(fk.rope(x, x), tuple[Tensor, Tensor])
    assert_type(fk.rope_table(x, None, x, x), Tensor)
    assert_type(fk.rope_table(x, x, x, x), tuple[Tensor, Tensor])
    assert_type(fk.linear(x, x), Tensor)
    assert_type(fk.fused_linear(x, x, norm_weight=x, residual=x), Tensor)
    assert_type(fk.quantized_linear(x, x, format="q8_0"), Tensor)
    assert_type(fk.decode_step(x, x, x, x, x, x, x, x, x, x, x, x, x, x, x), Tensor)
    assert_type(fk.linear_fp8(x, x, x, x, x), Tensor)
    assert_type(fk.quantize_fp8_blocks(x), tuple[Tensor, Tensor])
    assert_type(fk.linear(x, x, return_preactivation=True), tuple[Tensor, Tensor])
    assert_type(fk.linear_backward(x, x, x), tuple[Tensor, Tensor, Tensor])
    assert_type(fk.linear_backward(x, x, x, need_x=False, need_bias=False), tuple[None, Tensor, None])
    assert_type(fk.add(x, x), Tensor)
    assert_type(fk.swiglu(x, x), Tensor)
    assert_type(fk.swiglu_backward(x, x, x), tuple[Tensor, Tensor])
    assert_type(fk.reduce_sum(x, axis=(0, 1)), Tensor)
    assert_type(fk.reduce_mean(x), Tensor)
    assert_type(fk.reduce_max(x), Tensor)
    assert_type(fk.argmax(x), Tensor)
    assert_type(fk.sample(x), Tensor)
    assert_type(fk.sample(x, temperature=x, seed=x, logprob=x), Tensor)
    assert_type(fk.softmax(x), Tensor)
    assert_type(fk.log_softmax(x), Tensor)
    assert_type(fk.softmax_backward(x, x), Tensor)
    assert_type(fk.log_softmax_backward(x, x), Tensor)
    assert_type(fk.layer_norm(x), Tensor)
    assert_type(fk.layer_norm(x, residual=x), tuple[Tensor, Tensor])
    assert_type(fk.layer_norm(x, return_stats=True), tuple[Tensor, Tensor, Tensor])
    assert_type(fk.layer_norm(x, residual=x, return_stats=True), tuple[Tensor, Tensor, Tensor, Tensor])
    assert_type(fk.rms_norm(x, x), Tensor)
    assert_type(fk.rms_norm(x, residual=x), tuple[Tensor, Tensor])
    assert_type(fk.rms_norm(x, return_stats=True), tuple[Tensor, Tensor])
    assert_type(fk.rms_norm(x, residual=x, return_stats=True), tuple[Tensor, Tensor, Tensor])
    assert_type(fk.layer_norm_backward(x, x, x, x, x), tuple[Tensor, Tensor, Tensor])
    assert_type(fk.layer_norm_backward(x, x, None, x, x), tuple[Tensor, None, Tensor])
    assert_type(fk.layer_norm_backward(x, x, x, x, x, need_bias=False), tuple[Tensor, Tensor, None])
    assert_type(fk.rms_norm_backward(x, x, x, x), tuple[Tensor, Tensor])
    assert_type(fk.rms_norm_backward(x, x, x, x, need_weight=False), tuple[Tensor, None])
    assert_type(fk.cross_entropy(x, x, reduction="sum"), Tensor)
    assert_type(fk.cross_entropy(x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fk.cross_entropy_backward(x, x, x, x), Tensor)
    assert_type(fk.linear_cross_entropy(x, x, x), Tensor)
    assert_type(fk.linear_cross_entropy(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fk.linear_cross_entropy(x, x, x, return_z_loss=True, return_lse=True), tuple[Tensor, Tensor, Tensor])
    assert_type(fk.linear_cross_entropy_backward(x, x, x, x, x, need_bias=False), tuple[Tensor, Tensor, None])
    assert_type(fk.linear_selected_log_prob(x, x, x), Tensor)
    assert_type(fk.linear_selected_log_prob_backward(x, x, x, x, x), tuple[Tensor, Tensor, Tensor])
    assert_type(fk.kv_append(x, x, x, x, x, rope=rope), Tensor)
    assert_type(fk.kv_append(x, x, x, x, x, rope={"positions": x, "q": x}), Tensor)
    assert_type(fk.kv_append(x, x, x, x, x), None)
    assert_type(fk.kv_append(x, x, x, x, x, rope={"positions": x}), None)
    assert_type(fk.kv_read(x, x, x, x), tuple[Tensor, Tensor])
    assert_type(fk.kv_copy_pages(x, x, x, x), None)
    assert_type(fk.check_block_table(x, x, 1, 1), None)


def pools(pool: fk.KvPagePool) -> None:
    assert_type(pool.k_pages(), Any)  # numpy.ndarray, or flashkernel.Array on a GPU
    assert_type(pool.k_pages(raw=True), fk.Array)
    assert_type(pool.v_pages(0, raw=True), fk.Array)
    assert_type(pool.scales(raw=True), tuple[fk.Array, fk.Array] | None)


def torch_functions(x: Tensor, flag: bool) -> None:
    assert_type(fkt.attention(x, x, x), Tensor)
    assert_type(fkt.attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fkt.attention(x, x, x, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(fkt.attention_varlen(x, x, x, x, x, 1, 1), Tensor)
    assert_type(fkt.attention_varlen(x, x, x, x, x, 1, 1, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fkt.attention_cascade(x, x, x, x, x, x, x), Tensor)
    assert_type(fkt.attention_cascade(x, x, x, x, x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fkt.attention_fp8(x, x, x, 1.0), Tensor)
    assert_type(fkt.attention_fp8(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fkt.attention_mla_decode(x, x, x, x, scale=1.0, latent_scale=x), Tensor)
    assert_type(fkt.attention_mla_decode(x, x, x, x, scale=1.0, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fkt.latent_append(x, x, x, x, latent_scale=0.5), None)
    assert_type(fkt.attention_paged(x, x, x, x, x), Tensor)
    assert_type(fkt.attention_paged(x, x, x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fkt.scaled_dot_product_attention(x, x, x), Tensor)
    assert_type(fkt.kv_append(x, x, x, x, x, rope={"positions": x, "q": x}), Tensor)
    assert_type(fkt.kv_append(x, x, x, x, x), None)
    assert_type(fkt.kv_read(x, x, x, x), tuple[Tensor, Tensor])
    assert_type(fkt.layer_norm(x), Tensor)
    assert_type(fkt.layer_norm(x, residual=x), tuple[Tensor, Tensor])
    assert_type(fkt.rms_norm(x), Tensor)
    assert_type(fkt.rms_norm_quantized(x), tuple[Tensor, ...])
    assert_type(fkt.layer_norm_quantized(x), tuple[Tensor, ...])
    assert_type(fkt.rms_norm(x, residual=x), tuple[Tensor, Tensor])
    assert_type(fkt.rope(x), Tensor)
    assert_type(fkt.rope(x, x), tuple[Tensor, Tensor])
    assert_type(fkt.rope_table(x, None, x, x), Tensor)
    assert_type(fkt.rope_table(x, x, x, x), tuple[Tensor, Tensor])
    assert_type(fkt.quantized_linear(x, x, x), Tensor)
    assert_type(fkt.linear_fp8(x, x, None, x), Tensor)
    assert_type(fkt.quantize_fp8_blocks(x), tuple[Tensor, Tensor])
    assert_type(fkt.linear(x, x), Tensor)
    assert_type(fkt.fused_linear(x, x, norm_weight=x), Tensor)
    assert_type(fkt.swiglu(x, x), Tensor)
    assert_type(fkt.softmax(x), Tensor)
    assert_type(fkt.log_softmax(x), Tensor)
    assert_type(fkt.cross_entropy(x, x), Tensor)
    assert_type(fkt.linear_cross_entropy(x, x, x), Any)
    assert_type(fkt.linear_selected_log_prob(x, x, x), Tensor)
    assert_type(fkt.pack_mask(x), Tensor)
    assert_type(fkt.sample(x, temperature=x, seed=x), Tensor)
    assert_type(fkt.LinearCrossEntropyLoss().forward(x, x, x), Tensor)
    assert_type(fkt.Linear(1, 1).forward(x), Tensor)
    assert_type(fkt.RMSNorm(1).forward(x), Tensor)


def triton(x: Tensor, rope: KvAppendRopeWithQ) -> None:
    assert_type(fk_triton.attention(x, x, x, causal=True), Tensor)
    assert_type(fk_triton.attention(x, x, x, return_lse=False), Tensor)
    assert_type(fk_triton.attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fk_triton.attention_varlen(x, x, x, x, x, 1, 1), Tensor)
    assert_type(fk_triton.attention_varlen(x, x, x, x, x, 1, 1, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fk_triton.attention_paged(x, x, x, x, x), Tensor)
    assert_type(fk_triton.attention_paged(x, x, x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fk_triton.pack_mask(x), Tensor)
    assert_type(fk_triton.merge_states(x, x, x, x), tuple[Tensor, Tensor])
    assert_type(fk_triton.attention_backward(x, x, x, x, x, x), tuple[Tensor, Tensor, Tensor])
    assert_type(fk_triton.attention_backward(x, x, x, x, x, x, need_bias=True), tuple[Tensor, Tensor, Tensor, Tensor])
    assert_type(
        fk_triton.attention_backward(x, x, x, x, x, x, need_bias=True, need_sinks=True),
        tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    )
    assert_type(fk_triton.attention_varlen_backward(x, x, x, x, x, x, x, x, 1, 1), tuple[Tensor, Tensor, Tensor])
    assert_type(
        fk_triton.attention_varlen_backward(x, x, x, x, x, x, x, x, 1, 1, need_sinks=True),
        tuple[Tensor, Tensor, Tensor, Tensor],
    )
    assert_type(fk_triton.rope(x), Tensor)
    assert_type(fk_triton.rope(x, x), tuple[Tensor, Tensor])
    assert_type(fk_triton.rope_table(x, None, x, x), Tensor)
    assert_type(fk_triton.rope_table(x, x, x, x), tuple[Tensor, Tensor])
    assert_type(fk_triton.linear(x, x), Tensor)
    assert_type(fk_triton.linear(x, x, return_preactivation=True), tuple[Tensor, Tensor])
    assert_type(fk_triton.linear_backward(x, x, x), tuple[Tensor, Tensor, Tensor])
    assert_type(fk_triton.linear_backward(x, x, x, need_x=False, need_bias=False), tuple[None, Tensor, None])
    assert_type(fk_triton.add(x, x), Tensor)
    assert_type(fk_triton.swiglu(x, x), Tensor)
    assert_type(fk_triton.swiglu_backward(x, x, x), tuple[Tensor, Tensor])
    assert_type(fk_triton.reduce_sum(x, axis=(0, 1)), Tensor)
    assert_type(fk_triton.reduce_mean(x), Tensor)
    assert_type(fk_triton.reduce_max(x), Tensor)
    assert_type(fk_triton.argmax(x), Tensor)
    assert_type(fk_triton.softmax(x), Tensor)
    assert_type(fk_triton.log_softmax(x), Tensor)
    assert_type(fk_triton.softmax_backward(x, x), Tensor)
    assert_type(fk_triton.log_softmax_backward(x, x), Tensor)
    assert_type(fk_triton.layer_norm(x), Tensor)
    assert_type(fk_triton.layer_norm(x, residual=x), tuple[Tensor, Tensor])
    assert_type(fk_triton.layer_norm(x, return_stats=True), tuple[Tensor, Tensor, Tensor])
    assert_type(fk_triton.layer_norm(x, residual=x, return_stats=True), tuple[Tensor, Tensor, Tensor, Tensor])
    assert_type(fk_triton.rms_norm(x, x), Tensor)
    assert_type(fk_triton.rms_norm(x, residual=x), tuple[Tensor, Tensor])
    assert_type(fk_triton.rms_norm(x, return_stats=True), tuple[Tensor, Tensor])
    assert_type(fk_triton.rms_norm(x, residual=x, return_stats=True), tuple[Tensor, Tensor, Tensor])
    assert_type(fk_triton.layer_norm_backward(x, x, x, x, x), tuple[Tensor, Tensor, Tensor])
    assert_type(fk_triton.layer_norm_backward(x, x, None, x, x), tuple[Tensor, None, Tensor])
    assert_type(fk_triton.layer_norm_backward(x, x, x, x, x, need_bias=False), tuple[Tensor, Tensor, None])
    assert_type(fk_triton.rms_norm_backward(x, x, x, x), tuple[Tensor, Tensor])
    assert_type(fk_triton.rms_norm_backward(x, x, x, x, need_weight=False), tuple[Tensor, None])
    assert_type(fk_triton.cross_entropy(x, x, reduction="sum"), Tensor)
    assert_type(fk_triton.cross_entropy(x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fk_triton.cross_entropy_backward(x, x, x, x), Tensor)
    assert_type(fk_triton.kv_append(x, x, x, x, x, rope=rope), Tensor)
    assert_type(fk_triton.kv_append(x, x, x, x, x, rope={"positions": x, "q": x}), Tensor)
    assert_type(fk_triton.kv_append(x, x, x, x, x), None)
    assert_type(fk_triton.kv_append(x, x, x, x, x, rope={"positions": x}), None)
    assert_type(fk_triton.kv_read(x, x, x, x), tuple[Tensor, Tensor])
    assert_type(fk_triton.kv_copy_pages(x, x, x, x), None)
