"""Peers of `flashkernel bench` that are rarely installed: with their modules' functions in torch, over CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flashkernel.bench import baselines, liger, paged_peers, row_peers, runner
from flashkernel.bench import case as bench_case
from flashkernel.bench.case import PEER, Settings
from flashkernel.bench.runner import Session
from flashkernel.bench.suites import GROUPS
from flashkernel.bench.timing import CpuDevice, Rule

pytestmark = pytest.mark.chooses_kernels
LIMIT = 64  # columns; Liger's own is 65536


@dataclass(frozen=True)
class LikeCuda(Settings):
    """The rows and providers of a GPU over CPU tensors."""

    @property
    def cuda(self) -> bool:
        return True


def settings(*without: str) -> Settings:
    return LikeCuda(device="cpu", quick=True, without=frozenset({"triton", "sdpa_cudnn", "sdpa_efficient", *without}))


def calculate_settings(columns: int) -> tuple[int, int]:
    if columns > LIMIT:
        raise RuntimeError(f"Cannot launch Triton kernel since n = {columns} is too many")
    return columns, 4


def gradients(function: Callable[..., Any], grad: Any, *inputs: Any) -> Any:
    return baselines.autograd(function, inputs, grad)()


def rms_norm_backward(dy: Any, x: Any, w: Any, rstd: Any, offset: float, mode: int, *rest: Any) -> Any:
    assert (offset, mode, rest[2], rstd.shape) == (0.0, 0, True, x.shape[:1])
    dx, dw = gradients(baselines.rms_norm, dy, x, w)
    return dy.copy_(dx), dw


def swiglu_backward(gate: Any, up: Any, grad: Any) -> Any:
    d_gate, d_up = baselines.swiglu_backward(grad, gate, up)
    return gate.copy_(d_gate), up.copy_(d_up)


def rope_forward(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    assert q.transpose(1, 2).is_contiguous() and k.transpose(1, 2).is_contiguous()
    rotated = baselines.rope(q, k, cos, sin)
    return q.copy_(rotated[0]), k.copy_(rotated[1]), cos, sin


class CrossEntropyKernel:
    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*, X_ptr: Any, Y_ptr: Any, loss_ptr: Any, n_non_ignore: int, **options: Any) -> None:  # noqa: N803
            assert grid == (n_non_ignore,) and options["reduction"] == "mean" and not options["HAS_GRADIENTS"]
            assert options["n_cols"] <= options["BLOCK_SIZE"] < 2 * options["n_cols"]
            log_probs = X_ptr.float().log_softmax(-1)
            loss_ptr.copy_(-log_probs.gather(1, Y_ptr[:, None])[:, 0] / n_non_ignore)

        return launch


LIGER = {
    "utils": SimpleNamespace(calculate_settings=calculate_settings),
    "rms_norm": SimpleNamespace(
        rms_norm_forward=lambda x, w, eps, offset, mode, row: (baselines.rms_norm(x, w), x, None, 64, 4, 0),
        rms_norm_backward=rms_norm_backward,
        _str_to_casting_mode={"llama": 0},
    ),
    "fused_add_rms_norm": SimpleNamespace(
        fused_add_rms_norm_forward=lambda x, r, w, eps, offset, mode: (*baselines.rms_norm_residual(x, r, w), None)
    ),
    "layer_norm": SimpleNamespace(
        layer_norm_forward=lambda x, w, b, eps: (baselines.layer_norm(x, w, b), x, None, None, 64, 4),
        layer_norm_backward=lambda dy, x, w, b, mean, rstd: gradients(baselines.layer_norm, dy, x, w, b),
    ),
    "softmax": SimpleNamespace(
        _softmax_forward=lambda x: (baselines.softmax(x), 64, 4, False),
        _softmax_backward=lambda dy, y, block, warps, several: baselines.softmax_backward(dy, y),
    ),
    "swiglu": SimpleNamespace(
        swiglu_forward=lambda gate, up: (gate, up, baselines.swiglu(gate, up)), swiglu_backward=swiglu_backward
    ),
    "rope": SimpleNamespace(rope_forward=rope_forward),
    "cross_entropy": SimpleNamespace(liger_cross_entropy_kernel=CrossEntropyKernel(), MAX_FUSED_SIZE=65536),
}


def layernorm_fwd(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    assert weight.dtype == bias.dtype == torch.float32 and eps == 1e-5
    return baselines.layer_norm(x, weight.to(x.dtype), bias.to(x.dtype))


def apply_rotary(x: Any, cos: Any, sin: Any) -> Any:
    assert x.is_contiguous() and cos.is_contiguous() and 2 * cos.shape[-1] == x.shape[-1]
    q, one_head = x.transpose(1, 2), x[:, :, :1].transpose(1, 2)
    return baselines.rope(q, one_head, cos.repeat(1, 2), sin.repeat(1, 2))[0].transpose(1, 2)


def cross_entropy_fwd(x: Any, target: Any) -> Any:
    return torch.nn.functional.cross_entropy(x.float(), target, reduction="none")


def cross_entropy_bwd(x: Any, target: Any, dloss: Any, lse: Any) -> Any:
    grad = (x.float() - lse[:, None]).exp()
    grad[torch.arange(len(x)), target] -= 1
    return (grad * dloss[:, None]).to(x.dtype)


def gemm_act(a: Any, b: Any, bias: Any, activation: str, store_preact: bool) -> tuple[None, Any]:
    assert activation == "gelu_tanh_approx" and not store_preact and b.stride(0) == 1
    return None, baselines.gelu_linear(a, b.t(), bias)


def gemm(a: Any, b: Any, bias: Any, split_k: int | None) -> Any:
    assert split_k is None and b.stride(0) == 1
    return baselines.linear(a, b.t(), bias)


QUACK = {
    "rmsnorm": SimpleNamespace(
        rmsnorm_fwd=lambda x, w, residual=None, eps=0.0: (
            (baselines.rms_norm(x, w), x, None)
            if residual is None
            else (*baselines.rms_norm_residual(x, residual, w), None)
        ),
        rmsnorm_bwd=lambda x, w, dy, rstd: (*gradients(baselines.rms_norm, dy, x, w), None, None),
        layernorm_fwd=layernorm_fwd,
        layernorm_bwd=lambda x, w, dy, rstd, mean: gradients(baselines.layer_norm, dy, x, w, w),
    ),
    "softmax": SimpleNamespace(softmax_fwd=baselines.softmax, softmax_bwd=baselines.softmax_backward),
    "rotary": SimpleNamespace(apply_rotary=apply_rotary),
    "cross_entropy": SimpleNamespace(cross_entropy_fwd=cross_entropy_fwd, cross_entropy_bwd=cross_entropy_bwd),
    "gemm_interface": SimpleNamespace(gemm=gemm, gemm_act=gemm_act),
}


def dense(q: Any, pages: Any, table: Any) -> Any:
    """[batch, heads, head_dim] of one token each."""
    return baselines.paged_attention(q[:, :, None], *pages, table)[:, :, 0]


class Wrapper:
    """FlashInfer's, of BatchDecodeWithPagedKVCache."""

    def __init__(self, workspace: Any, layout: str, use_tensor_cores: bool) -> None:
        assert workspace.dtype == torch.uint8 and layout == "NHD"
        self.tensor_cores = use_tensor_cores

    def plan(self, indptr: Any, indices: Any, last: Any, heads: int, *sizes: int, q_data_type: Any) -> None:
        if not self.tensor_cores and q_data_type == torch.float32:
            raise ValueError("no such type\nand more lines")
        heads_kv, dim, page = sizes
        assert heads % heads_kv == 0 and indptr.tolist() == [0, len(indices) // 2, len(indices)]
        assert last.tolist() == [page, page] and dim == 64
        self.table = indices.reshape(2, -1)

    def run(self, q: Any, pages: Any) -> Any:
        return dense(q, pages, self.table)


def flash_attn_with_kvcache(q: Any, k: Any, v: Any, **options: Any) -> Any:
    assert options["cache_seqlens"].tolist() == [256, 256] and options["scheduler_metadata"] in (None, "made before")
    return dense(q[:, 0], (k, v), options["page_table"])[:, None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    modules: dict[str, Any] = {f"liger_kernel.ops.{name}": module for name, module in LIGER.items()}
    modules |= {f"quack.{name}": module for name, module in QUACK.items()}
    modules["flashinfer"] = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    modules["flash_attn_interface"] = SimpleNamespace(
        flash_attn_with_kvcache=flash_attn_with_kvcache,
        get_scheduler_metadata=lambda *sizes, **options: "made before",
        flash_attn_func=lambda q, k, v, causal: baselines.sdpa(q, k, v, causal),
    )
    monkeypatch.setattr(baselines, "optional", modules.get)
    monkeypatch.setattr(bench_case, "last_level_cache_bytes", lambda: 2**10)  # a few sets of inputs, not 64
    monkeypatch.setattr(paged_peers, "WORKSPACE", 16)
    monkeypatch.setattr(runner, "cuda_peak_bytes", lambda call: 7)
    monkeypatch.setattr(runner, "gpu_clocks", lambda: {})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    yield modules


def rows(group: str, *without: str) -> list[dict[str, Any]]:
    ceilings = {"read": 1e12, "copy": 1e12, **{f"matmul {dtype}": 1e12 for dtype in bench_case.DTYPES}}
    session = Session(settings(*without), CpuDevice(), Rule(0, 2, 1.0), ceilings)
    session.run([*GROUPS[group](session.settings)], None, lambda case: None)
    assert session.rows and all(row["agrees"] for row in session.rows)
    return session.rows


def test_linear_beside_quack(installed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "addmm_gelu", baselines.gelu_linear)  # torch has it on a GPU alone
    for row in rows("linear"):
        assert row["providers"]["quack"]["kind"] == PEER and not row["refused"]
        assert "liger" not in row["providers"]
    assert not any("quack" in row["providers"] for row in rows("linear", "quack"))
    del installed["quack.gemm_interface"]
    assert all("no gemm_interface" in row["refused"]["quack"] for row in rows("linear"))


@pytest.mark.parametrize("group", ["norm", "norm_backward", "elementwise", "rope", "cross_entropy"])
def test_other_libraries_answer_as_torch_does_or_say_why_not(
    group: str, installed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_bench_peers.LIMIT", 128)
    for row in rows(group):
        named = row["shape"].get("op", group)
        if named in ("sum", "add", "layer_norm + residual", "rms_norm_quantized"):  # it has no such op
            assert not {"liger", "quack"} & {*row["providers"], *row["refused"]}
            continue
        if row["case"].startswith("cross_entropy_backward"):
            assert "forward pass" in row["refused"].pop("liger")
        else:
            assert row["providers"]["liger"]["kind"] == PEER and row["providers"]["liger"]["relative_error"] < 0.1
        if not named.startswith("swiglu"):
            assert row["providers"]["quack"]["kind"] == PEER and row["providers"]["quack"]["relative_error"] < 0.1
        assert not row["refused"]
    assert not any({"liger", "quack"} & {*row["providers"]} for row in rows(group, "liger", "quack"))


def test_rows_that_are_too_long_for_liger_are_refused_in_its_words(installed: dict[str, Any]) -> None:
    for row in rows("norm_backward"):
        if row["shape"]["op"] == "rms_norm_backward":
            assert "n = 128 is too many" in row["refused"]["liger"]


def test_what_liger_writes_over_is_its_own() -> None:
    for name, arguments in (
        ("rms_norm_backward", tuple(torch.randn(4, 8) for _ in range(2))),
        ("swiglu_backward", tuple(torch.randn(4, 8) for _ in range(3))),
        ("rope", tuple(torch.randn(1, 1, 4, 8) for _ in range(4))),  # one head: contiguous either way
    ):
        own = liger.OPS[name][1]
        assert own is not None
        written = {"rms_norm_backward": {0}, "swiglu_backward": {1, 2}, "rope": {0, 1}}[name]
        for i, (mine, theirs) in enumerate(zip(own(arguments), arguments, strict=True)):
            assert torch.equal(mine, theirs) and (mine.data_ptr() != theirs.data_ptr()) == (i in written)


def test_decode_over_pages_by_other_libraries(installed: dict[str, Any]) -> None:
    peers = {"fa3_paged", "fa3_planned", "flashinfer", "flashinfer_cuda_cores"}
    for row in rows("decode"):
        paged = bool(row["shape"]["page"])
        found = {*row["providers"], *row["refused"]}
        assert peers & found == (peers if paged else set())
        assert not {"fa3", "fa4"} & found  # they would copy the caches
        assert all(row["providers"][name]["kind"] == PEER for name in peers & set(row["providers"]))
        assert row["refused"] == ({"flashinfer_cuda_cores": "no such type"} if paged and _wide(row) else {})
    assert not any(peers & {*row["providers"], *row["refused"]} for row in rows("decode", *peers))


def _wide(row: dict[str, Any]) -> bool:
    return bool(row["dtype"] == "float32")


def test_a_version_without_a_scheduler_says_so(installed: dict[str, Any]) -> None:
    def fails(*sizes: Any, **options: Any) -> Any:
        raise AttributeError("no get_scheduler_metadata")

    installed["flash_attn_interface"].get_scheduler_metadata = fails
    for row in rows("decode", "flashinfer", "flashinfer_cuda_cores"):
        assert row["refused"] == ({"fa3_planned": "no get_scheduler_metadata"} if row["shape"]["page"] else {})


def test_nothing_of_them_without_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "optional", lambda module: None)
    assert not [*row_peers.providers(settings(), "softmax", [(torch.randn(2, 2),)])]
    q, pages = torch.randn(1, 1, 1, 16), (torch.randn(1, 16, 1, 16),) * 2
    assert not [*paged_peers.providers(settings(), q, [pages], torch.zeros(1, 1).int(), torch.tensor([16]))]
