"""The same request through stock Transformers and torch: what `--no-flashkernel` runs, and what tests compare with.

Gives the events of `Engine.generate`, drawn by the same sampler, so that a difference lies in the model's arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .errors import CheckpointError, MissingDependencyError
from .files import shown
from .gguf_checkpoint import GgufCheckpoint
from .gguf_file import is_gguf
from .model import stop_tokens
from .request import GenerationStats, TokenEvent, check_request, token_ids
from .sampling import Sampler, SamplingOptions, log_probabilities
from .text_output import TextOutput, check_stop_strings
from .tokenizer import TextTokenizer

__all__ = ["StockEngine"]


class StockEngine:
    """Transformers' model of a local checkpoint (safetensors, or a GGUF file), its eager or SDPA attention, its own KV
    cache."""

    def __init__(self, directory: str | Path, *, device: str = "auto", dtype: str = "float32", attention: str = "sdpa"):
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise MissingDependencyError(
                f"generate: --no-flashkernel runs stock Transformers on torch, and {error.name or error} is not "
                "installed; run `pip install torch transformers`"
            ) from error
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and not torch.cuda.is_available():
            raise NotImplementedError("generate: device 'cuda' was asked for, but torch finds no CUDA device")
        whole = is_gguf(directory)  # the same checks and messages as the engine's:
        checkpoint = GgufCheckpoint(directory) if whole else Checkpoint(directory)
        self.device = device
        try:
            model = (
                AutoModelForCausalLM.from_pretrained(
                    # Transformers makes config and weights from the file itself: no config.json lies beside it.
                    str(Path(directory).parent),
                    gguf_file=Path(directory).name,
                    dtype=getattr(torch, dtype),
                    attn_implementation=attention,
                    local_files_only=True,
                )
                if whole
                else AutoModelForCausalLM.from_pretrained(
                    str(directory),
                    dtype=getattr(torch, dtype),
                    attn_implementation=attention,
                    local_files_only=True,
                    use_safetensors=True,
                    trust_remote_code=False,
                )
            )
        except Exception as error:  # of many types, most of them about the config
            raise CheckpointError(
                f"generate: Transformers does not load {shown(repr(str(directory)))}: {shown(error, 300)}"
            ) from error
        self.model: Any = model.to(device).eval()
        config = self.model.config
        self.vocab_size = int(config.vocab_size)
        self.max_positions = int(config.max_position_embeddings)
        self.stop_tokens = stop_tokens(checkpoint)
        self.stats = GenerationStats()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingOptions | None = None,
        stop_tokens: frozenset[int] | set[int] | None = None,
        n: int = 1,
        stop_strings: Sequence[str] = (),
        tokenizer: TextTokenizer | None = None,
    ) -> Iterator[TokenEvent]:
        """See `Engine.generate`. Prompts are padded on the left, the padding masked."""
        ids = [token_ids(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
        sampling = sampling or SamplingOptions()
        check_request(ids, max_new_tokens, self.vocab_size, self.max_positions, sampling)
        stop = frozenset(self.stop_tokens if stop_tokens is None else stop_tokens)
        strings = check_stop_strings(stop_strings)
        if strings and tokenizer is None:
            raise ValueError(
                "generate: stop_strings without a tokenizer; the tokenizer that decodes the text is needed"
            )
        ids = [prompt for prompt in ids for _ in range(n)]
        texts = [TextOutput(tokenizer, prompt, strings) for prompt in ids] if tokenizer is not None and strings else []
        return self._run(ids, max_new_tokens, sampling, stop, texts)

    def _run(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        sampling: SamplingOptions,
        stop: frozenset[int],
        texts: list[TextOutput],
    ) -> Iterator[TokenEvent]:
        import torch

        self.stats = GenerationStats(prefill_tokens=sum(map(len, prompts)))
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        samplers = [Sampler(sampling, i, prompt) for i, prompt in enumerate(prompts)]
        running = set(range(len(prompts)))
        past = None
        for step in range(max_new_tokens):
            begin = time.perf_counter()
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            with torch.inference_mode():
                result = self.model(
                    input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=past, use_cache=True
                )
            logits = result.logits[:, -1].float().cpu().numpy()
            past = result.past_key_values
            tokens = {i: samplers[i](logits[i]) for i in sorted(running)}
            elapsed = time.perf_counter() - begin
            if step == 0:
                self.stats.prefill_seconds = elapsed
            else:
                self.stats.decode_seconds += elapsed
                self.stats.decode_tokens += len(tokens)
            for i, token in tokens.items():
                ends = token in stop or (bool(texts) and texts[i].until(token))
                finish = "stop" if ends else "length" if step + 1 == max_new_tokens else None
                if finish:
                    running.discard(i)
                yield TokenEvent(i, token, finish, *_scores(logits[i], token, sampling.logprobs))
            if not running:
                return
            ids = torch.tensor([[tokens.get(i, 0)] for i in range(len(prompts))], device=self.device)
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)


def _scores(logits: np.ndarray, token: int, count: int | None) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    """`logprob` and `top` of an event, from float32 logits [vocab]."""
    if count is None:
        return None, ()
    likely = log_probabilities(logits)
    order = np.argsort(-likely, kind="stable")[:count]
    return float(likely[token]), tuple((int(i), float(likely[i])) for i in order)
