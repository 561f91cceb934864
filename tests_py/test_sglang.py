"""SGLang's attention backend on FlashKernel, with SGLang's own classes: its pools, batches and layers, and its backend
of PyTorch's attention as the oracle. Needs sglang (and what it imports); no engine is started.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (pip install sglang)", allow_module_level=True)

import torch
from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

import flashkernel as fk
from flashkernel.integrations.sglang import register

register()

DEVICE = "cuda" if torch.cuda.is_available() and fk.num_cuda_devices() else "cpu"
HEADS, HEADS_KV, DIM, CONTEXT = 4, 2, 32, 96
LENGTHS, PREFIXES = [37, 50, 16], [0, 33, 7]  # keys of each request, and how many of them an extend finds in the cache
REQUESTS = [3, 1, 2]


class Server:
    """What a ModelRunner has, twice: for this backend and for the oracle. The pages of a request are out of order."""

    def __init__(self, page_size: int, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None):
        self.page_size, self.dtype = page_size, dtype
        rows = torch.zeros(4, CONTEXT, dtype=torch.int32)
        each = CONTEXT // page_size
        pages = torch.randperm(3 * each, generator=torch.Generator().manual_seed(0)) + 1  # page 0 is SGLang's own
        for i, request in enumerate(REQUESTS):
            own = pages[i * each : (i + 1) * each]
            rows[request] = (own[:, None] * page_size + torch.arange(page_size)).flatten()
        self.runners = []
        for _ in range(2):
            requests = ReqToTokenPool(3, CONTEXT, DEVICE, False)
            requests.req_to_token.copy_(rows)
            pool = MHATokenToKVPool(
                3 * CONTEXT, page_size, kv_dtype or dtype, HEADS_KV, DIM, 1, DEVICE, False, enable_alt_stream=False
            )
            self.runners.append(
                SimpleNamespace(
                    device=DEVICE, page_size=page_size, req_to_token_pool=requests, token_to_kv_pool=pool,
                    use_mla_backend=False,
                )
            )  # fmt: skip
        self.rows = rows
        self.ours, self.theirs = (
            ATTENTION_BACKENDS["flashkernel"](self.runners[0]),
            TorchNativeAttnBackend(self.runners[1]),
        )

    def random(self, count: int, heads: int, seed: int) -> torch.Tensor:
        x = torch.randn(count, heads * DIM, generator=torch.Generator().manual_seed(seed))
        return x.to(DEVICE, self.dtype)

    def batch(self, mode: ForwardMode) -> ForwardBatch:
        starts = [n - 1 for n in LENGTHS] if mode.is_decode() else PREFIXES
        slots = torch.cat([self.rows[r, a:b] for r, a, b in zip(REQUESTS, starts, LENGTHS, strict=True)]).long()
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=3,
            input_ids=torch.zeros(len(slots), dtype=torch.int64, device=DEVICE),
            req_pool_indices=torch.tensor(REQUESTS, device=DEVICE),
            seq_lens=torch.tensor(LENGTHS, device=DEVICE),
            out_cache_loc=slots.to(DEVICE),
            seq_lens_sum=sum(LENGTHS),
        )
        if not mode.is_decode():
            news = [b - a for a, b in zip(PREFIXES, LENGTHS, strict=True)]
            batch.extend_prefix_lens = torch.tensor(PREFIXES, device=DEVICE)
            batch.extend_seq_lens = torch.tensor(news, device=DEVICE)
            batch.extend_seq_lens_cpu = news
        return batch

    def run(self, mode: ForwardMode, layer: RadixAttention, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Our output and the oracle's, the cache before the batch's own tokens filled with the same numbers."""
        batch, outs = self.batch(mode), []
        count = len(batch.out_cache_loc)
        q, k, v = (self.random(count, heads, i) for i, heads in enumerate((HEADS, HEADS_KV, HEADS_KV)))
        for runner, backend in zip(self.runners, (self.ours, self.theirs), strict=True):
            pool = runner.token_to_kv_pool
            for i, buffer in enumerate((pool.k_buffer[0], pool.v_buffer[0])):
                past = torch.randn(buffer.shape, generator=torch.Generator().manual_seed(9 + i)).to(DEVICE)
                buffer.copy_(past.to(pool.dtype).view(buffer.dtype) if buffer.dtype != pool.dtype else past)
            backend.init_forward_metadata(batch)
            views = (x.view(count, HEADS_KV, DIM).clone() for x in (k, v))
            more = options if backend is self.ours else {}
            outs.append(backend.forward(q.clone(), *views, layer, batch, **more).view(count, -1).float())
        return outs[0], outs[1]


def layer(**options: Any) -> RadixAttention:
    return RadixAttention(HEADS, DIM, DIM**-0.5, HEADS_KV, 0, **options)


MODES = [ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mode", MODES)
def test_what_torchs_attention_gives(mode: ForwardMode, page_size: int, dtype: torch.dtype) -> None:
    server = Server(page_size, dtype)
    found, expected = server.run(mode, layer())
    assert (found - expected).abs().max() < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    pools = [runner.token_to_kv_pool for runner in server.runners]
    assert torch.equal(pools[0].k_buffer[0], pools[1].k_buffer[0])
    assert torch.equal(pools[0].v_buffer[0], pools[1].v_buffer[0])


@pytest.mark.parametrize("mode", MODES[:2])
def test_a_sliding_window(mode: ForwardMode) -> None:
    server = Server(16)
    found, expected = server.run(mode, layer(sliding_window_size=5))
    assert (found - expected).abs().max() < 1e-5
    assert (found - server.run(mode, layer())[0]).abs().max() > 1e-2


def test_an_encoder() -> None:
    found, expected = Server(16).run(ForwardMode.EXTEND, layer(attn_type=AttentionType.ENCODER_ONLY))
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("mode", MODES[:2])
def test_pages_of_float8(mode: ForwardMode) -> None:
    """The oracle knows no scales."""
    server = Server(16, torch.bfloat16, torch.float8_e4m3fn)
    found, expected = server.run(mode, layer())
    assert (found - expected).abs().max() < 2e-2


def test_scales_of_float8() -> None:
    """Keys of half and values of a quarter of the elements: the scale of the scores halved, a quarter of the output."""
    server = Server(16, torch.float16, torch.float8_e4m3fn)
    server.run(ForwardMode.DECODE, layer())  # fills the cache
    scaled, halved = layer(), layer()
    scaled.k_scale_float, scaled.v_scale_float, halved.scaling = 0.5, 0.25, halved.scaling / 2
    q, batch = server.random(3, HEADS, 5), server.batch(ForwardMode.DECODE)
    found, plain = (
        server.ours.forward(q, None, None, one, batch, save_kv_cache=False).float() for one in (scaled, halved)
    )
    assert torch.allclose(found, plain / 4, rtol=2e-3, atol=1e-5) and found.abs().max() > 1e-2


@pytest.mark.parametrize("mode", MODES[:2])
def test_softcap_and_sinks_count(mode: ForwardMode) -> None:
    server = Server(16)
    plain = server.run(mode, layer())[0]
    capped = server.run(mode, layer(logit_cap=0.5))[0]
    sunk = server.run(mode, layer(), sinks=torch.full((HEADS,), 2.0, dtype=torch.bfloat16, device=DEVICE))[0]
    nothing = server.run(mode, layer(), sinks=torch.full((HEADS,), -torch.inf, device=DEVICE))[0]
    assert torch.equal(nothing, plain)
    assert (capped - plain).abs().max() > 1e-2 and (sunk.abs() < plain.abs() + 1e-6).all()


@pytest.mark.parametrize("page_size", [1, 16])
def test_buffers_of_a_graph_follow_the_batch(page_size: int) -> None:
    """What a CUDA graph records for decode reads the buffers' addresses of its capture."""
    server = Server(page_size)
    ours = server.ours
    ours.init_cuda_graph_state(8, 8)
    expected, _ = server.run(ForwardMode.DECODE, layer())
    batch = server.batch(ForwardMode.DECODE)
    batch.req_pool_indices.zero_()
    batch.seq_lens.fill_(ours.get_cuda_graph_seq_len_fill_value())
    ours.init_forward_metadata_out_graph(batch, in_capture=True)
    ours.init_forward_metadata_in_graph(batch)
    captured = ours.forward_metadata
    batch.req_pool_indices.copy_(torch.tensor(REQUESTS))
    batch.seq_lens.copy_(torch.tensor(LENGTHS))
    ours.init_forward_metadata_out_graph(batch)
    ours.init_forward_metadata_in_graph(batch)
    assert ours.forward_metadata.block_table.data_ptr() == captured.block_table.data_ptr()
    ours.forward_metadata = captured
    out = ours.forward(server.random(3, HEADS, 0), None, None, layer(), batch, save_kv_cache=False)
    assert torch.equal(out.float(), expected)


def test_what_is_refused() -> None:
    server = Server(16)
    batch = server.batch(ForwardMode.EXTEND)
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    with pytest.raises(NotImplementedError, match="forward mode TARGET_VERIFY"):
        server.ours.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match="a CUDA graph of SGLang's forward mode TARGET_VERIFY"):
        server.ours.init_forward_metadata_out_graph(batch)
    for options, message in (
        ({"is_cross_attention": True}, "cross-attention"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "not causal"),
        ({"logit_cap": 1.0, "logit_capping_method": "sigmoid"}, "capped by sigmoid"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            server.run(ForwardMode.DECODE, layer(**options))
    with pytest.raises(NotImplementedError, match="attention with q_rope"):
        server.run(ForwardMode.DECODE, layer(), q_rope=torch.ones(1))
    runner = SimpleNamespace(**{**vars(server.runners[0]), "use_mla_backend": True})
    with pytest.raises(NotImplementedError, match="MLA"):
        ATTENTION_BACKENDS["flashkernel"](runner)


def test_sglangs_command_line_takes_it() -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs

    register()  # a second time changes nothing
    assert choices.ATTENTION_BACKEND_CHOICES.count("flashkernel") == 1
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    words = [
        "--model-path",
        "x",
        "--attention-backend",
        "flashkernel",
        "--page-size",
        "16",
        "--disable-hybrid-swa-memory",
    ]
    assert parser.parse_args(words).attention_backend == "flashkernel"
