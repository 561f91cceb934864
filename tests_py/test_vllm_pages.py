"""vLLM's cache with a scale of each token and head, seen as pages: without vLLM, which test_vllm.py needs."""

from __future__ import annotations

import pytest
import torch

import flashkernel as fk
from flashkernel.integrations.vllm.pages import with_token_scales

BLOCKS, HEADS, TOKENS, DIM = 5, 3, 16, 32
CONTENT = 2 * (DIM + 4)
DEVICE = "cuda" if torch.cuda.is_available() and fk.num_cuda_devices() else "cpu"
TABLE = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32, device=DEVICE)
LENGTHS = torch.tensor([19, 32], dtype=torch.int32, device=DEVICE)
FULL, UNNAMED = [0, 3, 4], 2  # block 1 is filled in part
Scales = tuple[torch.Tensor, torch.Tensor]


def cache(order: str, dtype: torch.dtype, layers: int = 1) -> torch.Tensor:
    """vLLM's cache [layers, blocks, heads, tokens, content] in one of its orders in memory; all bytes are 0x5a."""
    sizes = {"L": layers, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
    raw = torch.full([sizes[dim] for dim in order], 0x5A, dtype=dtype, device=DEVICE)
    return raw.permute([order.index(dim) for dim in "LBHNC"])


def random(count: int, heads: int, seed: int) -> torch.Tensor:
    return torch.randn(count, heads, DIM, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def append(k_pages: torch.Tensor, v_pages: torch.Tensor, scales: Scales, **more: str) -> None:
    at = torch.cat([torch.arange(int(n), device=DEVICE) for n in LENGTHS])
    blocks = TABLE[torch.repeat_interleave(torch.arange(2, device=DEVICE), LENGTHS), at // TOKENS]
    k, v = 3 * random(len(at), HEADS, 0), random(len(at), HEADS, 1)
    fk.kv_append(k, v, k_pages, v_pages, blocks.long() * TOKENS + at % TOKENS, kv_scales=scales, **more)


def attend(
    k_pages: torch.Tensor, v_pages: torch.Tensor, scales: Scales, table: torch.Tensor = TABLE, **more: str
) -> torch.Tensor:
    q = random(2, 2 * HEADS, 2)[:, :, None]
    return fk.attention_paged(q, k_pages, v_pages, table, LENGTHS, kv_scales=scales, **more)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize(("dtype", "more"), [(torch.int8, {}), (torch.uint8, {"kv_dtype": "float8_e4m3fn"})])
def test_the_bits_are_those_of_plain_pages(order: str, dtype: torch.dtype, more: dict[str, str]) -> None:
    k_plain, v_plain = (torch.zeros(BLOCKS, TOKENS, HEADS, DIM, dtype=dtype, device=DEVICE) for _ in range(2))
    plain_scales = (
        torch.zeros(BLOCKS, HEADS, TOKENS, device=DEVICE),
        torch.zeros(BLOCKS, HEADS, TOKENS, device=DEVICE),
    )
    append(k_plain, v_plain, plain_scales, **more)
    both = cache(order, dtype, layers=2)
    k, v, scales = with_token_scales(both[1], DIM)
    append(k, v, scales, **more)
    for found, meant in zip((k, v, *scales), (k_plain, v_plain, *plain_scales), strict=True):
        assert found.data_ptr() % 16 == 0 and torch.equal(found[FULL], meant[FULL])
    assert torch.equal(attend(k, v, scales, **more), attend(k_plain, v_plain, plain_scales, **more))
    assert (both[1, UNNAMED] == 0x5A).all() and (both[0] == 0x5A).all()


def test_a_block_that_is_copied_whole_is_the_same_block() -> None:
    layer = cache("LBNHC", torch.int8)[0]
    k, v, scales = with_token_scales(layer, DIM)
    append(k, v, scales)
    expected = attend(k, v, scales)
    layer[UNNAMED], layer[4] = layer[4].clone(), 0  # as vLLM copies one
    assert torch.equal(attend(k, v, scales, torch.where(TABLE == 4, UNNAMED, TABLE)), expected)
    assert not torch.equal(attend(k, v, scales), expected)


@pytest.mark.parametrize(
    "given",
    [
        cache("LHBNC", torch.int8)[0],
        cache("BHLNC", torch.int8, layers=2)[1],
        cache("LBHNC", torch.int8)[0, ..., :-8],
        cache("LBHNC", torch.int8)[0, :, :, ::2],
        torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT, dtype=torch.float16),
    ],
    ids=["heads outermost", "layers inside", "no room for scales", "every second token", "float16"],
)
def test_what_is_not_one_run_of_bytes_is_refused(given: torch.Tensor) -> None:
    with pytest.raises(NotImplementedError, match=r"strides .* blocks of one run of memory with a content of 72 bytes"):
        with_token_scales(given, DIM)
