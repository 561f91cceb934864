#!/usr/bin/env python3
"""Train a small GPT-2 on several processes: parameters by FSDP2, each sequence by context parallel attention.

The model is a stock one of Transformers. Its parameters, gradients and optimizer state are sharded over all processes
(torch's `fully_shard`); each sequence is cut among the processes of a context group, whose attention goes through
`flashkernel.torch.context_parallel`. What else a GPT-2 does, it does token by token, so it needs no change but the
positions of a process's tokens. The losses are those of one process, up to rounding:

    torchrun --nproc-per-node 2 examples/train_context_parallel.py
    python examples/train_context_parallel.py --plain

The text is this Python's standard library, byte by byte. Needs flashkernel, torch >= 2.6 and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel

import flashkernel.torch as fkt
import flashkernel.torch.context_parallel as cp


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=20, help="optimizer steps")
    add("--batch-size", type=int, default=4, help="sequences a step, over all processes")
    add("--context", type=int, default=256, help="tokens of a sequence, over the processes of its context group")
    add("--ranks", type=int, help="processes that share a sequence; all of them if not given")
    add("--method", default="ring", choices=("ring", "all_gather", "ulysses"), help="of context parallel attention")
    add("--lr", type=float, default=3e-3)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--plain", action="store_true", help="one process, no sharding: torch's own attention, to compare with")
    add("--json", action="store_true", help="print [loss, norm of the gradient] of all steps as JSON")
    return parser.parse_args()


def text() -> torch.Tensor:
    """Bytes of the standard library, the same on every process."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    return torch.frombuffer(bytearray(b"\0".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def attention_over(group: Any, method: str) -> Any:
    """Transformers' attention function over the ranks of a context group."""

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, **options: Any) -> Any:
        out = cp.attention(q, k, v, group, method=method, causal=True, scale=scaling)
        return out.transpose(1, 2), None

    return attend


def main() -> None:
    args = parse_args()
    if "RANK" in os.environ:  # torchrun
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    size = dist.get_world_size()
    ranks = args.ranks or size
    if size % ranks or args.batch_size % (size // ranks) or args.context % ranks or (args.plain and size > 1):
        raise SystemExit(
            f"{size} processes, --ranks {ranks}, --batch-size {args.batch_size}, --context {args.context}: "
            "ranks must divide the processes and the context, and groups the batch; --plain is one process"
        )
    device = torch.device(args.device)
    meshes = init_device_mesh(device.type, (size // ranks, ranks), mesh_dim_names=("data", "context"))
    context, which = meshes["context"], meshes["data"].get_local_rank()

    torch.manual_seed(0)  # the same weights on every process
    config = GPT2Config(
        vocab_size=256,
        n_positions=args.context,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config).to(device)
    if args.plain:
        model.set_attn_implementation("sdpa")
    else:
        # There is no mask function of this name, so Transformers makes no mask: `attend` is causal by itself.
        AttentionInterface.register("context_parallel", attention_over(context, args.method))
        model.set_attn_implementation("context_parallel")
        shards = init_device_mesh(device.type, (size,))
        for block in model.transformer.h:
            fully_shard(block, mesh=shards)
        fully_shard(model, mesh=shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    corpus, random = text(), torch.Generator().manual_seed(1)
    own = args.batch_size // (size // ranks)  # sequences of this context group
    places = cp.positions(args.context, context).to(device)[None]
    told = []
    for step in range(args.steps):
        begins = torch.randint(len(corpus) - args.context - 1, (args.batch_size,), generator=random)
        batch = torch.stack([corpus[at : at + args.context + 1] for at in begins[which * own : (which + 1) * own]])
        inputs, targets = (cp.shard(part, context, dim=1).to(device) for part in (batch[:, :-1], batch[:, 1:]))
        logits = model(inputs, position_ids=places.expand(own, -1), use_cache=False).logits
        summed = fkt.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        mean = summed / (args.batch_size * args.context)
        # FSDP averages gradients over all processes, whose parts of the mean have to be added.
        (mean * size).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = mean.detach().clone()
        dist.all_reduce(total)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # every process takes part in it
        told.append([total.item(), norm.item()])
        if dist.get_rank() == 0 and not args.json:
            print(f"step {step:3d}  loss {told[-1][0]:.6f}  gradient {told[-1][1]:.4f}")
    if dist.get_rank() == 0 and args.json:
        print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
