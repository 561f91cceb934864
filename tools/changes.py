"""Which measurements are older than the kernel that they speak of; tables mark them. For report.py and roofline.py.

lab/kernel_changes.json is the record: for each folder of kernels, the commits of results after which its code changed.
`python -m tools report` writes it where there is a git history; everything else, `--check` included, only reads it, so
a checkout without history makes the same pages. What counts is statements: comments, messages, blank space, `#include`
lines, declarations, and which file a statement stands in, may change.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashkernel.bench.case import OURS

from .places import KERNEL_CHANGES

__all__ = ["MARK", "NOTE", "Changes", "kernels_of", "read", "record", "sources", "statements"]

MARK = "†"
NOTE = f"{MARK}: measured before the kernel's code last changed, or at a commit that nobody knows."
CUDA, CPU = "src/cuda/", "src/cpu/"
# Id -> the folders or files (by how their paths begin) that a kernel stands in; the first that fits.
SOURCES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"attention_mla_decode/cuda/sm80", (CUDA + "attention/mla/sm80/", CUDA + "attention/decode/sm80/")),
    (r"attention_mla_decode/cuda/(\w+)", (CUDA + r"attention/mla/\1/",)),
    (r"latent_append/cpu/scalar", (CPU + "scalar/attention_mla.",)),
    (r"latent_append/cuda", (CUDA + "kv/latent_append.",)),
    (
        r"attention_mla_decode/cpu/(avx\d+)_widened",
        (CPU + "latent.", CPU + r"\1/attention_fwd", CPU + "simd/attention_"),
    ),
    (r"attention_mla_decode/cpu/scalar", (CPU + "scalar/attention_mla.",)),
    (r"attention_mla_decode/cpu/(avx\d+)", (CPU + r"\1/attention_fwd", CPU + "simd/attention_")),
    (r"attention_fp8/cuda/(?:\w+/widened|generic)", (CUDA + "attention/widened/",)),
    (r"attention_fp8/cuda/(\w+)", (CUDA + r"attention/forward/\1/",)),
    (r"attention_fp8/cpu/scalar", (CPU + "scalar/attention_fwd.",)),
    (r"attention_fp8/cpu/(avx\d+)", (CPU + r"\1/attention_fwd", CPU + "simd/attention_", CPU + "attention_fp8.")),
    (r"attention_fwd/cuda/(\w+)/decode(?:_quantized|_int4)?\b", (CUDA + r"attention/decode/\1/",)),
    (r"attention_fwd/cuda/(\w+)/few_queries", (CUDA + r"attention/few_queries/\1/",)),
    (r"attention_fwd/cuda/(\w+)", (CUDA + r"attention/forward/\1/",)),
    (r"attention_bwd/cuda/(\w+)", (CUDA + r"attention/backward/\1/",)),
    (r"merge_states/cuda", (CUDA + "attention/merge_states.",)),
    (r"linear/cuda/(sm\w+)/\w+/few_rows", (CUDA + r"linear/few_rows/\1/",)),
    (r"linear/cuda/sm90a", (CUDA + "linear/tiles/sm90a/", CUDA + "linear/cluster_k/sm90a/")),
    (r"linear_bwd/cuda/sm90a", (CUDA + "linear/tiles/sm90a/", CUDA + "linear/gradient.")),
    (r"linear(?:_bwd)?/cuda/(sm\w+)", (CUDA + r"linear/tiles/\1/",)),
    (r"linear(?:_bwd)?/cuda/generic", (CUDA + "linear/generic/",)),
    (r"(norm|softmax)(?:_bwd)?/cuda/sm90a", (CUDA + r"\1/sm90a/",)),
    (r"norm_bwd/cuda", (CUDA + "norm/norm_bwd",)),
    (r"norm/cuda/generic/quantized", (CUDA + "norm/norm_quantized",)),
    (r"norm/cuda", (CUDA + "norm/norm_fwd",)),
    (r"softmax(?:_bwd)?/cuda", (CUDA + "softmax/softmax.",)),
    (r"cross_entropy(?:_bwd)?/cuda", (CUDA + "loss/cross_entropy.",)),
    (r"linear_cross_entropy(?:_bwd)?/cuda", (CUDA + "loss/linear_loss.",)),
    (r"(?:add|swiglu|swiglu_bwd)/cuda", (CUDA + "elementwise/",)),
    (r"(reduce|rope)/cuda", (CUDA + r"\1/",)),
    (r"pack_mask/cuda", (CUDA + "mask/",)),
    (r"sample/cuda", (CUDA + "sampling/",)),
    (r"decode_step/cuda/sm90a/(\w+)", (CUDA + "decode_step/",)),
    (r"find_bad_page/cuda", (CUDA + "kv/find_bad_page.",)),
    (r"kv_\w+/cuda", (CUDA + "kv/kv_",)),
    (r"(?:linear_fp8|quantize_fp8_blocks)/cpu/scalar", (CPU + "scalar/linear_fp8.",)),
    (r"(?:kv_\w+|find_bad_page)/cpu/scalar", (CPU + "scalar/kv.",)),
    (r"(?:cross_entropy)(?:_bwd)?/cpu/scalar", (CPU + "scalar/loss.",)),
    (r"linear_cross_entropy(?:_bwd)?/cpu/scalar", (CPU + "scalar/linear_loss.", CPU + "linear_loss_steps.")),
    (r"linear_cross_entropy(?:_bwd)?/cpu/(\w+)", (CPU + r"\1/linear_loss.", CPU + "simd/linear_loss_impl.")),
    (r"(?:add|swiglu|swiglu_bwd)/cpu/scalar", (CPU + "scalar/elementwise.",)),
    (r"(attention_\w+|\w+?)(?:_bwd)?/cpu/scalar", (CPU + r"scalar/\1.",)),
    (
        r"attention_fwd/cpu/([a-z0-9]+)_widened(?:_packed)?$",
        (CPU + "widened.", CPU + r"\1/attention_fwd", CPU + "simd/attention_"),
    ),
    (r"attention_(\w+)/cpu/([a-z0-9]+)(?:_fp16)?(?:_packed)?$", (CPU + r"\2/attention_\1", CPU + "simd/attention_")),
    (r"(?:fused_linear|qkv_append)/cuda/sm80", (CUDA + "linear/fused/sm80/",)),
    (r"(decode_step|fused_linear|qkv_append)/(?:cuda/generic|cpu/composed)", (r"src/ops/\1_composed.",)),
    (r"quantized_linear/cuda/sm80/\w+/few_rows", (CUDA + "linear/quantized/few_rows/sm80/",)),
    (r"linear_fp8/cuda/sm90a/(\w+)", (CUDA + r"linear/fp8/sm90a/\1.", CUDA + "linear/fp8/sm90a/plan.")),
    (r"linear_fp8/cpu/(avx\d+)", (CPU + r"\1/linear_fp8.", CPU + "simd/linear_fp8_impl.")),
    (r"linear_fp8/cuda/generic", (CUDA + "linear/fp8/generic/linear_fp8.", CUDA + "linear/generic/gemm.")),
    (r"quantize_fp8_blocks/cuda", (CUDA + "linear/fp8/generic/quantize.",)),
    (r"quantized_linear/cuda/generic", (CUDA + "linear/quantized/generic/", CUDA + "linear/generic/gemm.")),
    (r"quantized_linear/cpu/(avx512_vnni|amx)$", (CPU + r"\1/quantized_linear.", CPU + "simd/weight_tiles")),
    (r"quantized_linear/cpu/([a-z0-9]+)", (CPU + r"\1/quantized_linear.", CPU + "simd/quantized_linear_impl.")),
    (r"linear(?:_bwd)?/cpu/amx(?:_fp16)?(?:_packed)?$", (CPU + "amx/linear.", CPU + "amx/gemm_amx.")),
    (r"linear/cpu/amx_stream$", (CPU + "amx/linear_stream.", CPU + "amx/gemm_amx.")),
    (r"linear(?:_bwd)?/cpu/([a-z0-9]+)", (CPU + r"\1/linear.", CPU + "simd/linear_impl.", CPU + "simd/gem")),
    (r"kv_append/cpu/(\w+)", (CPU + r"\1/rope.", CPU + "simd/rope_impl.")),
    (r"cross_entropy(?:_bwd)?/cpu/(\w+)", (CPU + r"\1/loss.", CPU + "simd/loss_impl.")),
    (r"(?:add|swiglu|swiglu_bwd)/cpu/(\w+)", (CPU + r"\1/elementwise.", CPU + "simd/elementwise_impl.")),
    (r"(norm|softmax|reduce|rope)(?:_bwd)?/cpu/(\w+)", (CPU + r"\2/\1.", CPU + r"simd/\1_impl.")),
)


def sources(kernel: str) -> tuple[str, ...]:
    """How the paths of a kernel's files begin; nothing for an id that no line above knows."""
    for pattern, paths in SOURCES:
        if matched := re.match(pattern, kernel):
            return tuple(matched.expand(path) for path in paths)
    return ()


def statements(text: str) -> list[str]:
    """C++ without comments, names of headers and what strings say, cut at semicolons and braces."""
    text = re.sub(
        r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"',
        lambda found: '""' if found[0][0] == '"' else " ",
        text,
        flags=re.DOTALL,
    )
    text = re.sub(r"^\s*#\s*(?:include|pragma once)\b[^\n]*", "", text, flags=re.MULTILINE)
    return [part for part in re.split("[;{}]", "".join(text.split())) if part]


def is_code(path: str) -> bool:
    """Whether a file has code of its own: headers of the CUDA kernels declare, but for the plans and orders."""
    is_header = path.startswith(CUDA) and path.endswith(".hpp")
    return "/instances/" not in path and (not is_header or bool(re.search(r"(?:plan|order)\.hpp$", path)))


def kernels_of(row: dict[str, Any]) -> list[str]:
    """Ids of ours that a row of a result timed."""
    return [kernel for p in row["providers"].values() if p["kind"] == OURS for kernel in p.get("kernels") or []]


class Changes:
    """The record."""

    def __init__(self, after: dict[str, dict[str, bool]]) -> None:
        self.after = after  # how a path begins -> commit of a result -> whether code changed after it

    def is_older(self, kernels: Iterable[str], commits: Iterable[Any]) -> bool:
        """Whether one of the kernels changed after one of the commits."""
        known = [_name(commit) for commit in commits]
        return any(
            self.after.get(path, {}).get(commit, True)
            for kernel in kernels
            for path in sources(kernel)
            for commit in known
        )


def read(root: Path) -> Changes:
    file = root / KERNEL_CHANGES
    return Changes(json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {})


def _name(commit: Any) -> str:
    """Seven digits: results hold as many or more, and a plus sign where the tree had changes of its own."""
    return str(commit or "").rstrip("+")[:7]


def record(root: Path, measured: Iterable[tuple[str, Any]]) -> bool:
    """Writes the record for (kernel, commit) pairs; False, and nothing is written, where there is no history."""
    wanted: dict[str, set[str]] = {}
    for kernel, commit in measured:
        for path in sources(kernel):
            wanted.setdefault(path, set()).add(_name(commit))
    history = _History(root)
    if not history.has("HEAD"):
        return False
    after = {
        path: {commit: history.changed(path, commit) for commit in sorted(commits)}
        for path, commits in sorted(wanted.items())
    }
    file = root / KERNEL_CHANGES
    file.write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")
    return True


@dataclass(frozen=True)
class _Tree:
    """The source files of a commit."""

    files: dict[str, tuple[str, Counter[str]]]  # path -> blob, statements
    blobs: frozenset[str]
    everywhere: frozenset[str]  # statements of all files


class _History:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: dict[str, Counter[str]] = {}  # blob -> statements
        self.trees: dict[str, _Tree] = {}

    def git(self, *arguments: str) -> str | None:
        try:
            run = subprocess.run(["git", *arguments], cwd=self.root, capture_output=True, text=True)
        except OSError:
            return None
        return run.stdout if run.returncode == 0 else None

    def has(self, commit: str) -> bool:
        return bool(commit) and self.git("cat-file", "-e", f"{commit}^{{commit}}") is not None

    def changed(self, path: str, commit: str) -> bool:
        """Whether files whose paths begin so have statements that no source file had, or had some that none has."""
        if not self.has(commit):
            return True
        now, then = self._tree("HEAD"), self._tree(commit)
        for file, (blob, mine) in now.files.items():
            if not file.startswith(path) or not is_code(file) or blob in then.blobs:
                continue
            # What the file was then, wherever it stood: that with most of its statements.
            _, old = max(then.files.values(), key=lambda other: sum((other[1] & mine).values()))
            if set(mine) - then.everywhere or set(old) - now.everywhere:
                return True
        return False

    def _tree(self, commit: str) -> _Tree:
        if commit not in self.trees:
            listed = (self.git("ls-tree", "-r", commit, "--", "src") or "").splitlines()
            blobs = {path: entry.split()[2] for entry, _, path in (line.partition("\t") for line in listed)}
            files = {path: (blob, self._statements(blob)) for path, blob in blobs.items()}
            everywhere = frozenset(statement for _, found in files.values() for statement in found)
            self.trees[commit] = _Tree(files, frozenset(blobs.values()), everywhere)
        return self.trees[commit]

    def _statements(self, blob: str) -> Counter[str]:
        if blob not in self.known:
            self.known[blob] = Counter(statements(self.git("cat-file", "blob", blob) or ""))
        return self.known[blob]
