"""What each rank of test_tensor_parallel.py does: a function a case, on every rank at the same time (ranks.py)."""

from __future__ import annotations

import os
import time
from typing import Any


def _model(folder: str, group: Any, dtype: str = "float32", timeout: float | None = None) -> Any:
    from flashkernel.generate import load_model
    from flashkernel.generate.tensor_parallel import TensorParallel

    shared = TensorParallel(group, timeout=timeout)
    return load_model(folder, device="cpu", dtype=dtype, tensor_parallel=shared)


def tokens_of(engine: Any, prompts: list[list[int]], new: int, **options: Any) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in prompts]
    for event in engine.generate(prompts, max_new_tokens=new, stop_tokens=frozenset(), **options):
        tokens[event.sequence].append(event.token)
    return tokens


def everything(model: Any, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """What an engine answers: greedy and drawn tokens, in small pages and chunks, and log-probabilities of a text."""
    from flashkernel.generate import Engine, SamplingOptions

    engine = Engine(model, page_size=16, prefill_chunk=17, max_batch=3)
    drawn = SamplingOptions(temperature=0.9, top_p=0.95, seed=3)
    return {
        "greedy": tokens_of(engine, prompts, new),
        "drawn": tokens_of(engine, prompts, new, sampling=drawn),
        "scores": engine.score(max(prompts, key=len)),
        "pages": engine.pages_in_use,
    }


def answers(pairs: Any, folder: str, dtype: str, prompts: list[list[int]], new: int) -> dict[str, Any]:
    return everything(_model(folder, None, dtype), prompts, new)


def refused(pairs: Any, kind: str, folder: str, other: str) -> Any:
    """Calls that differ between ranks, or that one of them refuses: an error on every one."""
    import torch.distributed as dist

    from flashkernel.generate import Engine

    odd = dist.get_rank() == 1
    if kind in ("folder", "config", "heads"):
        return _model(other if odd or kind == "heads" else folder, None)
    if kind == "dtype":
        return _model(folder, None, "float16" if odd else "float32")
    engine = Engine(_model(folder, None), page_size=16 if not odd or kind != "engine" else 32)
    if kind in ("cancel", "between"):
        requests = [engine.submit([1, 2, 3], max_new_tokens=9, stop_tokens=frozenset()) for _ in range(2)]
        for _ in range(3):
            engine.step()
        if odd and kind == "cancel":
            engine.cancel(requests[0])
        return engine.score([1, 2, 3]) if odd and kind == "between" else engine.step()
    prompt = [1, 2, 3, 4] if kind == "prompt" and odd else [1, 2, 3]
    if kind == "call" and odd:
        return engine.score(prompt)
    return tokens_of(engine, [prompt], 2)


def die(pairs: Any, folder: str) -> Any:
    """Rank 1 ends while both generate."""
    import torch.distributed as dist

    from flashkernel.generate import Engine

    engine = Engine(_model(folder, None), page_size=16)
    for count, _ in enumerate(engine.generate([[1, 2, 3]], max_new_tokens=20, stop_tokens=frozenset())):
        if count == 3 and dist.get_rank() == 1:
            os._exit(0)
    return "no error"


def late(pairs: Any, folder: str) -> Any:
    """Rank 1 stops making steps; rank 0 has a second's patience."""
    import torch.distributed as dist

    from flashkernel.generate import Engine

    engine = Engine(_model(folder, None, timeout=1.0), page_size=16)
    for count, _ in enumerate(engine.generate([[1, 2, 3]], max_new_tokens=20, stop_tokens=frozenset())):
        if count == 3 and dist.get_rank() == 1:
            return "late"
    return "no error"


def leads(pairs: Any, folder: str, asked: list[tuple[str, dict[str, Any], tuple[str, ...]]]) -> Any:
    """Rank 0 submits, cancels and steps; rank 1 repeats it. What rank 0 got, and what is left at each."""
    import torch.distributed as dist

    from flashkernel.generate import Engine, PromptError, TextOutput, TextTokenizer
    from flashkernel.generate.leading import LeadingEngine, follow

    tokenizer, options = TextTokenizer(folder), {"page_size": 16, "num_pages": 12, "max_batch": 2}
    model = _model(folder, None)
    if dist.get_rank() > 0:
        engine = Engine(model, **options)
        follow(engine, tokenizer)
        return {"idle": engine.idle, "pages": engine.pages_in_use, "preemptions": engine.stats.preemptions}
    refusals, requests = [], []
    with LeadingEngine(model, **options).leading() as engine:
        engine.reserve(64)
        for prompt, more, strings in asked:
            ids = tokenizer.encode(prompt)
            until = TextOutput(tokenizer, ids, strings).until
            requests.append(engine.submit(ids, until=until, stop_strings=strings, **more))
        cancelled = engine.submit(tokenizer.encode("x"), max_new_tokens=40)
        for call in (
            lambda: engine.submit([1], max_new_tokens=10**6),
            lambda: engine.submit([10**6]),
            lambda: engine.reserve(64),
            lambda: engine.generate([[1]]),
            lambda: engine.score([1, 2]),
        ):
            try:
                call()
            except (PromptError, ValueError) as error:
                refusals.append(str(error))
        for step in range(1000):
            if engine.idle:
                break
            engine.step()
            if step == 2:
                engine.cancel(cancelled)
        found = [(request.generated, request.finish) for request in requests]
        left = {"idle": engine.idle, "pages": engine.pages_in_use, "preemptions": engine.stats.preemptions}
    return {"found": found, "refusals": refusals, "left": left, "cancelled": cancelled.finish}


def leader_dies(pairs: Any, folder: str) -> Any:
    """Rank 0 ends while rank 1 waits for its next call."""
    import os

    import torch.distributed as dist

    from flashkernel.generate import Engine
    from flashkernel.generate.leading import LeadingEngine, follow

    model = _model(folder, None)
    if dist.get_rank() > 0:
        follow(Engine(model))
        return "no error"
    with LeadingEngine(model).leading() as engine:
        engine.submit([1, 2, 3], max_new_tokens=4)
        engine.step()
        os._exit(0)


def patience(pairs: Any, folder: str) -> Any:
    """An idle leader says that it is still there, more often than its followers lose patience."""

    import torch.distributed as dist

    from flashkernel.generate import Engine, load_model
    from flashkernel.generate.leading import LeadingEngine, follow
    from flashkernel.generate.tensor_parallel import TensorParallel

    model = load_model(folder, device="cpu", tensor_parallel=TensorParallel(timeout=2.0))
    if dist.get_rank() > 0:
        follow(Engine(model))
        return "dismissed"
    with LeadingEngine(model).leading() as engine:
        time.sleep(5.0)
        request = engine.submit([1, 2, 3], max_new_tokens=2, stop_tokens=frozenset())
        while request.finish is None:
            engine.step()
        return len(request.generated)


def prepared(**options: Any) -> Any:
    """A TensorParallel of NCCL on a GPU of each rank, without NVLink's multicast, which nothing here needs."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    import torch
    import torch.distributed as dist

    from flashkernel.generate.devices import arrays_for
    from flashkernel.generate.tensor_parallel import TensorParallel

    torch.cuda.set_device(dist.get_rank())
    shared = TensorParallel(dist.new_group(backend="nccl"), **options)
    shared.prepare(arrays_for("cuda", "float32"))
    return shared


def on_gpus(
    pairs: Any, folder: str, dtype: str, prompts: list[list[int]], new: int, options: dict[str, Any]
) -> dict[str, Any]:
    from flashkernel.generate import load_model

    model = load_model(folder, device="cuda", dtype=dtype, tensor_parallel=prepared(**options))
    return everything(model, prompts, new)


def late_sum(pairs: Any) -> Any:
    """Rank 1 makes no sum; rank 0 has a second's patience, and its GPU is free again."""
    import torch
    import torch.distributed as dist

    shared = prepared(fused=True, timeout=1.0)
    if dist.get_rank() == 1:
        return "late"
    begin = time.monotonic()
    for _ in range(20):
        shared.sum(torch.ones(1, 64, device="cuda"))
    torch.cuda.synchronize()
    assert time.monotonic() - begin > 1.0  # a rank that is a little late is waited for
    done = torch.cuda.Event()
    done.record()
    shared.watch(done)
    return "no error"
