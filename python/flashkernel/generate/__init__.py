"""Text generation without torch: a GPT-2 or Llama checkpoint, or a GGUF file, through FlashKernel's kernels and its
paged KV-cache.

>>> from flashkernel.generate import Engine, TextTokenizer, find_model, load_model
>>> engine = Engine(load_model(find_model("demo")))
>>> tokenizer = TextTokenizer(find_model("demo"))
>>> ids = tokenizer.encode("def main(argv")
>>> events = engine.generate([ids], max_new_tokens=4)  # an iterator: tokens as they come
>>> len([event.token for event in events])
4

Needs the packages numpy, safetensors and tokenizers, the command also tqdm (`pip install flashkernel[generate]`).
"""

from __future__ import annotations

from .decoder_model import DecoderModel as _DecoderModel  # noqa: F401  imported so that `load_model` knows them
from .engine import Engine, GenerationStats, TokenEvent
from .errors import (
    CheckpointError,
    GenerationError,
    MissingDependencyError,
    ModelMemoryError,
    NonFiniteLogitsError,
    PromptError,
    UnsupportedModelError,
)
from .gpt2 import Gpt2 as _Gpt2  # noqa: F401
from .model import Model, load_model
from .model_names import find_model
from .sampling_options import SamplingOptions
from .speculation import DraftModel, PromptLookup
from .text_output import TextOutput
from .tokenizer import TextStream, TextTokenizer

__all__ = [
    "CheckpointError",
    "DraftModel",
    "Engine",
    "GenerationError",
    "GenerationStats",
    "MissingDependencyError",
    "Model",
    "ModelMemoryError",
    "NonFiniteLogitsError",
    "PromptError",
    "PromptLookup",
    "SamplingOptions",
    "TextOutput",
    "TextStream",
    "TextTokenizer",
    "TokenEvent",
    "UnsupportedModelError",
    "find_model",
    "load_model",
]
