"""What each rank of test_context_parallel.py does: a function a case, on every rank at the same time (ranks.py)."""

from __future__ import annotations

import os
from typing import Any


def _group(pairs: Any, size: int) -> Any:
    import torch.distributed as dist

    return pairs if size < dist.get_world_size() else None


def inputs(dtype: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Whole tensors, the same on every rank."""
    import torch

    random = torch.Generator().manual_seed(sum(lengths))
    n, kind = sum(lengths), getattr(torch, dtype)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(kind)

    return {
        "q": normal(2, 8, n, 16), "k": normal(2, 4, n, 16), "v": normal(2, 4, n, 24), "g": normal(2, 8, n, 24),
        "grad_lse": normal(2, 8, n).float(), "sinks": torch.randn(8, generator=random),
    }  # fmt: skip


def run(
    pairs: Any, dtype: str, lengths: tuple[int, ...], options: dict[str, Any], with_sinks: bool, cases: list[Any]
) -> Any:
    """Output, LSE and gradients of the whole sequence for each (method, layout) of `cases`, from rank 0."""
    import torch
    import torch.distributed as dist

    import flashkernel.torch.context_parallel as cp

    group = _group(pairs, len(lengths))
    if group is not None and dist.get_rank(group) < 0:
        return None
    data, results = inputs(dtype, lengths), []
    for method, layout in cases:
        cut = {"layout": layout, "seq_lens": lengths}
        q, k, v, g = (cp.shard(data[name], group, dim=2, **cut).requires_grad_() for name in "qkvg")
        sinks = data["sinks"].requires_grad_() if with_sinks else None
        wanted = [x for x in (q, k, v, sinks) if x is not None]

        def once(method=method, cut=cut, q=q, k=k, v=v, g=g, sinks=sinks, wanted=wanted):
            out, lse = cp.attention(q, k, v, group, method=method, sinks=sinks, return_lse=True, **cut, **options)
            grad_lse = cp.shard(data["grad_lse"], group, dim=2, **cut)
            grads = torch.autograd.grad((out, lse), wanted, (g.detach(), grad_lse))
            return [out, lse, *grads]

        mine, again = once(), once()
        for a, b in zip(mine, again, strict=True):
            assert torch.equal(a, b), f"{method} {layout}: another result the second time"
        whole = [cp.unshard(x, group, dim=2, **cut) for x in mine[:5]]
        if with_sinks:
            total = mine[5].clone()
            dist.all_reduce(total, group=group)
            whole.append(total)
        results.append([x.detach() for x in whole])
    return results if dist.get_rank(group) == 0 else "done"


def mesh(pairs: Any) -> Any:
    """A DeviceMesh in place of a group, and one of two dims, which is refused."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    import flashkernel.torch.context_parallel as cp

    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    q = inputs("float32", (8, 8))["q"]
    local = cp.shard(q, whole["context"], dim=2)
    out = cp.unshard(cp.attention(local, local, local, whole["context"], causal=True), whole["context"], dim=2)
    cut = cp.unshard(local.clone().requires_grad_(), whole["context"], dim=2)
    assert cut.requires_grad
    try:
        cut.sum().backward()
    except NotImplementedError as error:
        assert str(error).startswith("unshard: it has no gradient")
    else:
        return "unshard dropped a gradient"
    try:
        cp.attention(local, local, local, whole)
    except ValueError as error:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True), out, str(error)
    return None


def refused(pairs: Any, kind: str) -> Any:
    """Calls that differ between ranks, or that one rank refuses: an error on every one."""
    import torch
    import torch.distributed as dist

    import flashkernel.torch.context_parallel as cp

    odd = dist.get_rank() == 1
    tokens = 5 if kind == "tokens" and odd else 4
    heads = 2 if kind == "heads" and odd else 4
    dtype = torch.bfloat16 if kind == "dtype" and odd else torch.float32
    q = torch.zeros(1, heads, tokens, 8, dtype=dtype)
    options: dict[str, Any] = {"causal": kind == "causal" and odd}
    if kind == "own":
        options["method"] = "rings" if odd else "ring"
    if kind == "alibi":
        options["alibi_slopes"] = torch.ones(4)
    if kind == "packed":
        options["cu_seqlens"] = (0, 4, 9)
    if kind == "window" and odd:
        options["window"] = 3
    if kind == "lens" and odd:
        options["seq_lens"] = ["four"]
    if kind == "sinks":
        options["sinks"] = torch.zeros(4, dtype=torch.int32 if odd else torch.float32)
    if kind == "slopes":
        options |= {"method": "ulysses", "alibi_slopes": torch.zeros(4, dtype=torch.int64 if odd else torch.float32)}
    if kind == "timeout" and odd:
        options["timeout"] = "soon"
    if kind == "nothing" and odd:
        return cp.attention(None, q, q)
    if kind in ("gradients", "no_grad"):
        q.requires_grad_(not odd or kind == "no_grad")
        with torch.set_grad_enabled(not odd):
            return cp.attention(q, q, q)
    if kind == "other gradients":
        return cp.attention(q.clone().requires_grad_(not odd), q.clone().requires_grad_(odd), q, method="ulysses")
    if kind == "dim":
        return cp.unshard(q, dim=9 if odd else 2)
    if kind == "unshard lens":
        return cp.unshard(q, dim=2, seq_lens=["four"] if odd else None)
    if kind == "unshard nothing":
        return cp.unshard(None if odd else q, dim=2)
    if kind == "unshard":
        return cp.unshard(torch.zeros(1, 4, 9 if odd else 8), dim=1)
    if kind == "calls" and odd:
        return cp.unshard(q, dim=2)
    return cp.attention(q, q, q, **options)


def empty(pairs: Any) -> Any:
    """Where no rank has a token: forward and backward, of each method."""
    import torch

    import flashkernel.torch.context_parallel as cp

    shapes = []
    for method in cp.METHODS:
        q = torch.zeros(1, 4, 0, 8, requires_grad=True)
        out, lse = cp.attention(q, q, q, method=method, causal=True, return_lse=True)
        (grad,) = torch.autograd.grad(out.sum() + lse.sum(), q)
        shapes.append([tuple(x.shape) for x in (out, lse, grad)])
    return shapes


def die(pairs: Any, method: str) -> Any:
    """Rank 1 ends in the middle of a call that rank 0 makes."""
    import torch
    import torch.distributed as dist

    import flashkernel.torch.context_parallel as cp

    q = torch.zeros(1, 2, 4, 8)
    cp.attention(q, q, q, method=method)
    if dist.get_rank() == 1:
        os._exit(0)
    return cp.attention(q, q, q, method=method)


def late(pairs: Any) -> Any:
    """Rank 1 never comes; rank 0 has a second's patience."""
    import torch
    import torch.distributed as dist

    import flashkernel.torch.context_parallel as cp

    q = torch.zeros(1, 2, 4, 8)
    return cp.attention(q, q, q, timeout=1.0) if dist.get_rank() == 0 else "late"
