"""vLLM as a peer of `flashkernel bench e2e`: an engine in a process of its own.

What vLLM sets for a whole process, and the memory that it keeps, then touch no other provider's figures. One engine
serves all rows of a model, since it compiles and captures graphs for long. It has vLLM's own defaults but for the cache
of prefixes, which would answer a repeated prompt, and its share of a GPU's memory. Weights are random ones of vLLM's
making: tokens are not compared.

As a program, `python -m flashkernel.bench.vllm_peer` reads requests as lines of JSON and answers each with a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

__all__ = ["VllmError", "VllmPeer"]

MEMORY_SHARE = 0.3  # of a GPU's memory, the other providers' models lie beside it


class VllmError(RuntimeError):
    """vLLM's process has said why it cannot go on, or has ended."""


class VllmPeer:
    """Starts with the first call of `generate`. max_model_len: tokens of the longest sequence, new ones included."""

    def __init__(self, max_model_len: int):
        self._max_model_len = max_model_len
        self._process: subprocess.Popen[str] | None = None
        self._failed = ""
        self.started_seconds = 0.0  # from nothing to an engine that takes prompts

    def __enter__(self) -> VllmPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self, model: Any, prompts: list[list[int]], new: int, sampling: dict[str, float]
    ) -> tuple[list[list[int]], float]:
        """The new tokens of each prompt, and the seconds that vLLM took from prompts of token ids to all tokens.

        model: a model of Transformers, whose config and dtype the engine gets. Raises: VllmError.
        """
        if self._failed:
            raise VllmError(self._failed)
        if self._process is None:
            self._start(model)
        answer = self._ask({"prompts": prompts, "new": new, "sampling": sampling})
        return answer["tokens"], answer["seconds"]

    def close(self) -> None:
        """Ends the process and frees its memory."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _start(self, model: Any) -> None:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            config = type(model.config).from_dict(model.config.to_dict())
            config.architectures = [type(model).__name__]
            config.save_pretrained(folder)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            engine = {
                "model": folder,
                "skip_tokenizer_init": True,
                "load_format": "dummy",
                "dtype": str(model.dtype).removeprefix("torch."),
                "max_model_len": self._max_model_len,
                "gpu_memory_utilization": MEMORY_SHARE,
                "enable_prefix_caching": False,
            }
            self._ask({"engine": engine})
        self.started_seconds = time.perf_counter() - begin

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"its process ended, code {process.wait()}"}
        if "error" in answer:
            self._failed = str(answer["error"])
            self.close()
            raise VllmError(self._failed)
        return answer


def main() -> None:
    """Answers requests until there are no more. What vLLM prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine: Any = None
    for line in sys.stdin:
        try:
            import vllm

            request = json.loads(line)
            answer: dict[str, Any] = {}
            if "engine" in request:
                engine = vllm.LLM(**request["engine"])
            else:
                sampling = vllm.SamplingParams(
                    max_tokens=request["new"], ignore_eos=True, detokenize=False, **request["sampling"]
                )
                prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
                begin = time.perf_counter()
                found = engine.generate(prompts, sampling, use_tqdm=False)
                answer["seconds"] = time.perf_counter() - begin
                answer["tokens"] = [list(one.outputs[0].token_ids) for one in found]
        except Exception as error:  # whatever an engine raises is told to the bench
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
