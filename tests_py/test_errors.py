"""Each class of error from each op: the sentence names the op, what was got and what is needed; nothing is written."""

from __future__ import annotations

import numpy as np
import pytest

import flashkernel as fk


def f(*shape):
    return np.ones(shape, np.float32)


def i(*values, dtype=np.int64):
    return np.array(values, dtype)


q, k = f(1, 4, 3, 8), f(1, 2, 5, 8)
pages, table, lens = f(4, 16, 2, 8), np.array([[0, 1]], np.int32), i(20)
half = q.astype(np.float16)
odd = np.ones((1, 4, 3, 16), np.float32)[..., ::2]

CASES = [
    # attention
    (lambda: fk.attention(f(8), f(8), f(8)), r"attention: q is float32\[8\] on cpu; needs 2 to 4 dims"),
    (lambda: fk.attention(q, f(1, 2, 5, 6), k), r"attention: .*k\.shape\[3\]=6.*q\.shape\[3\]=8"),
    (lambda: fk.attention(q, f(1, 3, 5, 8), f(1, 3, 5, 8)), "multiple"),
    (lambda: fk.attention(q, k, f(1, 2, 4, 8)), r"v\.shape\[2\]=4"),
    (lambda: fk.attention(half, k, k), "k is float32 but q is float16"),
    (lambda: fk.attention(odd, k, k), "q.*contiguous"),
    (lambda: fk.attention(f(1, 1, 2, 513), f(1, 1, 2, 513), k), "1 to 512"),
    (lambda: fk.attention(q.astype(np.int32), k, k), "q.*int32"),
    (lambda: fk.attention(q, k, k, softcap=-1.0), "softcap"),
    (lambda: fk.attention(q, k, k, softcap=float("nan")), "softcap"),
    (lambda: fk.attention(q, k, k, scale=float("nan")), "scale"),
    (lambda: fk.attention(q, k, k, bias=f(1, 4, 3, 4)), "bias"),
    (lambda: fk.attention(q, k, k, alibi_slopes=f(3)), "alibi_slopes"),
    (lambda: fk.attention(q, k, k, sinks=f(3)), "sinks"),
    (lambda: fk.attention(q, k, k, out=f(1, 4, 3, 7)), "out"),
    (lambda: fk.attention(q, k, k, out=half.copy()), "out"),
    (lambda: fk.attention(q, k, k, out=np.broadcast_to(f(1), (1, 4, 3, 8))), "read-only"),
    (lambda: fk.attention(q, k, k, window=(1,)), "window has 1 entries"),
    (lambda: fk.attention(q, k, k, window=("a", 1)), "window="),
    (lambda: fk.attention(q, k, k, window=3), "window=3"),
    (lambda: fk.attention(q, q, q, out=q), "out"),
    # variable length
    (lambda: fk.attention_varlen(f(5, 4, 8), f(5, 2, 8), f(5, 2, 8), i(0, 3, 2, 5), i(0, 2, 3, 5), 5, 5), "decrease"),
    (lambda: fk.attention_varlen(f(5, 4, 8), f(5, 2, 8), f(5, 2, 8), i(0, 6), i(0, 5), 6, 5), "cu_seqlens_q"),
    (lambda: fk.attention_varlen(f(5, 4, 8), f(5, 2, 8), f(5, 2, 8), i(1, 5), i(0, 5), 5, 5), "start at 0"),
    (lambda: fk.attention_varlen(f(5, 4, 8), f(5, 2, 8), f(5, 2, 8), i(0, 5), i(0, 5), 4, 5), "max_seqlen_q"),
    (lambda: fk.attention_varlen(f(5, 4, 8), f(5, 2, 8), f(5, 2, 8), f(2), i(0, 5), 5, 5), "cu_seqlens_q"),
    (lambda: fk.attention_varlen(f(5, 4, 8), f(5, 2, 8), f(5, 2, 8), i(), i(), 5, 5), "cu_seqlens_q"),
    # paged
    (lambda: fk.attention_paged(q, pages, pages, np.array([[0, 4]], np.int32), lens), "block_table"),
    (lambda: fk.attention_paged(q, pages, pages, np.array([[-1, 0]], np.int32), lens), "block_table"),
    (lambda: fk.attention_paged(q, pages, pages, table, i(33)), "seq_lens"),
    (lambda: fk.attention_paged(q, pages, pages, table, i(-1)), "seq_lens"),
    (lambda: fk.attention_paged(q, pages, pages, table.astype(np.float32), lens), "block_table"),
    (lambda: fk.attention_paged(q, pages, pages, table, i(1, 2)), "seq_lens"),
    (lambda: fk.attention_paged(q, f(4, 16, 2, 6), pages, table, lens), "k_pages"),
    # backward and merge
    (lambda: fk.attention_backward(f(1, 4, 3, 7), q, k, k, q, f(1, 4, 3)), "grad_out"),
    (lambda: fk.attention_backward(q, q, k, k, q, f(1, 4, 2)), "lse"),
    (lambda: fk.attention_backward(q, q, k, k, q, f(1, 4, 3), need_bias=True), "need_bias=True without a bias"),
    (lambda: fk.attention_backward(q, q, k, k, q, f(1, 4, 3), need_sinks=True), "need_sinks=True without sinks"),
    (lambda: fk.merge_states(f(2, 8), f(2), f(2, 7), f(2)), "out_b"),
    (lambda: fk.merge_states(f(2, 8), f(3), f(2, 8), f(2)), "lse_a"),
    (lambda: fk.merge_states(f(2, 8), f(2), f(2, 8), f(2), out=f(2, 8)), "a pair"),
    (lambda: fk.merge_states(f(2, 8), f(2), f(2, 8)), "lse_b is absent; a second part has both"),
    (lambda: fk.merge_states(f(2, 8), f(2), lse_b=f(2)), "out_b is absent; a second part has both"),
    (lambda: fk.merge_states(f(2, 8), f(3)), "lse_a"),
    (lambda: fk.merge_states(f(2, 8), f(2), out=(f(8), f()), out_dtype="float16"), "out_dtype is float16 but out is"),
    # RoPE
    (lambda: fk.rope(q, None, i(0, 1)), "positions"),
    (lambda: fk.rope(q, rotary_dim=3), "rotary_dim"),
    (lambda: fk.rope(q, rotary_dim=10), "rotary_dim"),
    (lambda: fk.rope(q, theta=0.0), "theta"),
    (lambda: fk.rope(q, f(1, 2, 4, 8)), "k"),
    (lambda: fk.rope(q, k[:, :, :3], out=q), "a pair"),
    (lambda: fk.rope_table(q, None, f(4, 4), f(4, 3)), "sin"),
    (lambda: fk.rope_table(q, None, f(4, 4), f(4, 4), i(0, 1, 4)), "positions"),
    # linear
    (lambda: fk.linear(f(2, 3), f(4, 5)), r"weight\.shape\[1\]=5"),
    (lambda: fk.linear(f(2, 3), f(4, 3), f(3)), "bias"),
    (lambda: fk.linear(f(2, 3), f(4, 3), activation="relu"), "activation='relu'"),
    (lambda: fk.linear(f(2, 6)[:, ::2], f(4, 3)), "x.*contiguous"),
    (lambda: fk.linear(f(2, 3), f(8, 6)[::2, ::2]), "weight.*contiguous"),
    (lambda: fk.linear_backward(f(2, 4), f(2, 3), f(4, 3), activation="gelu"), "preactivation"),
    # elementwise, reductions, norms, loss
    (lambda: fk.add(f(2), f(3)), "add: b"),
    (lambda: fk.add(f(2), f(2).astype(np.float16)), "add: b"),
    (lambda: fk.swiglu(f(2), f(2), out=f(3)), "swiglu: out"),
    (lambda: fk.reduce_sum(f(2, 3), 2), r"axis=2 with x of 2 dims"),
    (lambda: fk.reduce_sum(f(2, 3), (0, 0)), "twice"),
    (lambda: fk.reduce_sum(f(2, 3), ()), "reduces nothing"),
    (lambda: fk.reduce_sum(f(2, 3), "a"), "axis='a'"),
    (lambda: fk.softmax(f(2, 3), 2), "axis"),
    (lambda: fk.argmax(f(2, 3), 1, out=f(2)), "argmax: out"),
    (lambda: fk.layer_norm(f(2, 3), f(2)), "weight"),
    (lambda: fk.layer_norm(f(2, 3), eps=-1.0), "eps"),
    (lambda: fk.rms_norm(f(2, 3), weight_offset=1.0), "weight_offset=1.0* but weight is absent"),
    (lambda: fk.rms_norm(f(2, 3), residual=f(3, 3)), "residual"),
    (lambda: fk.rms_norm(f(2, 3), residual_out=f(2, 3)), "residual_out without residual"),
    (lambda: fk.cross_entropy(f(2, 3), i(0, 3)), "targets"),
    (lambda: fk.cross_entropy(f(2, 3), i(0)), "targets"),
    (lambda: fk.cross_entropy(f(2, 3), i(0, 1), reduction="max"), "reduction='max'"),
    (lambda: fk.cross_entropy(f(2, 3), i(0, 1), label_smoothing=1.5), "label_smoothing"),
    # pool and the rest
    (lambda: fk.KvPagePool(0, 1, 8), "num_pages"),
    (lambda: fk.KvPagePool(4, 1, 8, page_size=17), "page_size"),
    (lambda: fk.KvPagePool(4, 1, 8, dtype="int32"), "dtype=int32; needs float32"),
    (lambda: fk.KvPagePool(4, 1, 8, device="xpu"), "device: got 'xpu'"),
    (lambda: fk.set_num_threads(0), "threads"),
    (lambda: fk.force_kernels("attention_fwd/cpu/nothing"), "no kernel matches"),
    (lambda: fk.explain("no_such_op"), "op='no_such_op'"),
    (lambda: fk.explain("set_num_threads", 3), "op='set_num_threads'"),
    (lambda: fk.explain("KvPagePool", 3), "op='KvPagePool'"),
]


@pytest.mark.parametrize("call, message", CASES, ids=range(len(CASES)))
def test_value_error(call, message):
    before = fk.memory_stats().allocated_bytes
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert ": " in str(caught.value)
    assert fk.memory_stats().allocated_bytes == before


def test_outputs_stay_as_they_were():
    out = np.full((1, 4, 3, 8), 7, np.float32)
    with pytest.raises(ValueError):
        fk.attention(q, k, k, out=out, sinks=f(3))
    assert (out == 7).all()


def test_not_implemented_names_each_candidate():
    if fk.num_cuda_devices() == 0:
        with pytest.raises(NotImplementedError):
            fk.memory_stats("cuda:0")
        with pytest.raises(NotImplementedError):
            fk.KvPagePool(4, 1, 8, device="cuda")


def test_out_of_memory_carries_the_numbers():
    with pytest.raises(fk.OutOfMemoryError) as caught:
        fk.KvPagePool(2**20, heads_kv=2**15, head_dim=256, page_size=256, dtype="float32")  # 2**54 bytes
    error = caught.value
    assert isinstance(error, MemoryError) and type(error).__module__ == "flashkernel"
    assert error.requested_bytes >= 2**53 and error.free_bytes >= 0 and error.peak_bytes >= 0


def test_out_of_pages_carries_the_numbers():
    pool = fk.KvPagePool(3, heads_kv=1, head_dim=8, page_size=16)
    pool.take()
    with pytest.raises(fk.OutOfPagesError) as caught:
        pool.take_many(3)
    error = caught.value
    assert (error.requested_pages, error.free_pages, error.num_pages) == (3, 2, 3)
    assert isinstance(error, fk.OutOfMemoryError) and error.requested_bytes == 3 * (error.free_bytes // 2)
    assert pool.num_free == 2


def test_cuda_error_is_a_runtime_error():
    assert issubclass(fk.CudaError, RuntimeError)
