"""What providers are called in pages and pictures, their versions in a run, and how each is drawn: the same everywhere.

Colours are Okabe and Ito's and Paul Tol's, which people with colour-blindness tell apart; markers tell lines apart in
print. FlashKernel's line is thick, vermillion and above the others; its kernels of other GPUs are dashed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["FAMILIES", "NAMES", "STYLES", "Style", "has_version", "label", "same_line", "style"]

NAMES = {  # providers by their names for readers
    "flashkernel": "FlashKernel", "any_order": "FlashKernel, any order of sums", "sdpa": "torch SDPA",
    "contiguous": "FlashKernel, contiguous", "sdpa_cudnn": "cuDNN", "sdpa_flash": "FlashAttention-2",
    "fa3": "FlashAttention-3", "fa4": "FlashAttention-4", "sdpa_efficient": "torch's efficient SDPA",
    "sdpa_math": "torch's math SDPA", "flex": "FlexAttention, compiled",
    "eager": "torch eager", "compile": "torch.compile", "cublaslt_gelu": "cuBLASLt", "fa3_paged": "FlashAttention-3",
    "fa3_planned": "FlashAttention-3 with a plan", "flashinfer": "FlashInfer", "liger": "Liger",
    "flashinfer_cuda_cores": "FlashInfer without tensor cores", "triton": "our Triton kernel",
    "naive": "FlashKernel, naive", "tiled": "FlashKernel, tiled", "sm75": "FlashKernel's for 7.5",
    "sm80": "FlashKernel's for 8.0", "sm90a": "FlashKernel's for 9.0", "stock": "stock kernels",
}  # fmt: skip


@dataclass(frozen=True)
class Style:
    colour: str
    marker: str = "o"
    line: str = "-"
    width: float = 1.3


STYLES = {
    "flashkernel": Style("#D55E00", "o", width=2.8),
    "any_order": Style("#D55E00", "h", "--"),
    "contiguous": Style("#D55E00", "p", ":"),
    "sdpa_cudnn": Style("#0072B2", "s"),
    "sdpa_flash": Style("#56B4E9", "^"),
    "fa3": Style("#E69F00", "D"),
    "fa4": Style("#009E73", "v"),
    "sdpa": Style("#0072B2", "s"),
    "sdpa_efficient": Style("#CC79A7", "P"),
    "sdpa_math": Style("#000000", "X"),
    "flex": Style("#999933", "H", "--"),
    "eager": Style("#000000", "X"),
    "compile": Style("#0072B2", "s"),
    "cublaslt_gelu": Style("#0072B2", "s"),
    "liger": Style("#882255", "<"),
    "quack": Style("#117733", ">"),
    "fa3_paged": Style("#E69F00", "D"),
    "fa3_planned": Style("#E69F00", "d", "--"),
    "flashinfer": Style("#882255", "<"),
    "flashinfer_cuda_cores": Style("#882255", ">", "--"),
    "triton": Style("#332288", "*"),
    "naive": Style("#BBBBBB", "1", "--"),
    "tiled": Style("#777777", "2", "--"),
    "sm75": Style("#882255", "<", "--"),
    "sm80": Style("#117733", ">", "--"),
    "sm90a": Style("#000000", "x", "--"),
    "stock": Style("#0072B2", "s", width=4.5),
    "stock, graph": Style("#777777", "2", "--"),
    "stock, compile + graph": Style("#777777", "2", "--"),
}
# For many lines that are no peers (op families of the roofline), in turn with markers.
FAMILIES = (
    "#332288",
    "#88CCEE",
    "#44AA99",
    "#117733",
    "#999933",
    "#DDCC77",
    "#CC6677",
    "#882255",
    "#AA4499",
    "#777777",
)

# Whose version a provider's name goes with.
_OWNERS = {
    "sdpa_cudnn": "cudnn", "sdpa": "torch", "sdpa_flash": "torch", "sdpa_efficient": "torch", "sdpa_math": "torch",
    "eager": "torch", "compile": "torch", "cublaslt_gelu": "torch_cuda", "triton": "triton", "fa3": "flash_attn_3",
    "fa3_paged": "flash_attn_3", "fa3_planned": "flash_attn_3", "fa4": "flash_attn_4", "flashinfer": "flashinfer",
    "flex": "torch",
    "flashinfer_cuda_cores": "flashinfer", "liger": "liger_kernel", "quack": "quack_kernels", "stock": "torch",
}  # fmt: skip
_INSIDE = {"torch": "torch", "torch_cuda": "CUDA", "triton": "Triton"}  # whose version is not the provider's own


def same_line(provider: str) -> str:
    """A forced kernel's id by its rung: each head dim has another one, and they are one line."""
    if provider in STYLES or "/" not in provider:
        return provider
    parts = provider.split("/")
    return next((rung for rung in ("naive", "tiled", "sm75", "sm80", "sm90a") if rung in parts), "tiled")


def style(provider: str) -> Style:
    return STYLES[provider]


def has_version(provider: str) -> bool:
    """Whether it is somebody's library, of which there are versions."""
    return provider in _OWNERS


def _version(owner: str, machine: dict[str, Any]) -> str | None:
    found = machine.get(owner) or (machine.get("peers") or {}).get(owner)
    if owner == "cudnn" and isinstance(found, int):  # 91900: 9.19.0
        return f"{found // 10000}.{found // 100 % 100}.{found % 100}"
    return str(found).partition("+")[0] if found else None


def label(provider: str, machine: dict[str, Any]) -> str:
    """A provider's name and the version that a run has of it, if the run has written it down."""
    name, owner = NAMES.get(provider, provider), _OWNERS.get(provider)
    if provider == "flashkernel" and machine.get("flashkernel"):
        commit = f" ({machine['commit']})" if machine.get("commit") else ""
        return f"{name} {machine['flashkernel']}{commit}"
    version = owner and _version(owner, machine)
    if not owner or not version:
        return name
    if owner in _INSIDE and name not in ("torch SDPA", "torch eager", "torch.compile"):
        return f"{name} ({_INSIDE[owner]} {version})"
    return f"{name} {version}"
