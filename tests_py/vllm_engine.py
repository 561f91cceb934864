"""Greedy text of a real vLLM engine, as JSON on stdout; run by test_vllm.py in a process of its own.

python tests_py/vllm_engine.py '{"backend": "FLASHKERNEL" or null, "prompts": [...], "tokens": 24, "engine": {...}}'
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that the calls are counted here
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main() -> None:
    asked = json.loads(sys.argv[1])
    stdout, sys.stdout = sys.stdout, sys.stderr  # the engine's own lines
    from vllm import LLM, SamplingParams

    options = dict(asked["engine"])
    if asked["backend"]:
        options["attention_backend"] = asked["backend"]
    calls = {"append": 0, "attend": 0}
    if asked["backend"]:
        from flashkernel.integrations.vllm.backend import Implementation

        for name, method in (("append", "do_kv_cache_update"), ("attend", "forward")):
            original = getattr(Implementation, method)

            def counted(*args: object, _name: str = name, _original: object = original, **kwargs: object) -> object:
                calls[_name] += 1
                return _original(*args, **kwargs)  # type: ignore[operator]

            setattr(Implementation, method, counted)
    engine = LLM(**options)
    starting = dict(calls)  # those of the start: captures of graphs, where there are graphs
    calls.update(append=0, attend=0)
    sampling = SamplingParams(temperature=0, max_tokens=asked["tokens"])
    answers = [engine.generate(batch, sampling, use_tqdm=False) for batch in asked["batches"]]
    found = [[list(answer.outputs[0].token_ids) for answer in batch] for batch in answers]
    cached = [[answer.num_cached_tokens for answer in batch] for batch in answers]
    print(json.dumps({"tokens": found, "cached": cached, "calls": calls, "starting": starting}), file=stdout)


if __name__ == "__main__":
    main()
