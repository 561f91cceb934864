"""FlashKernel in Hugging Face Transformers.

Importing this module registers the attention implementation "fkernel" (a name with "flash" in it is taken for one of
Transformers' own):

>>> import flashkernel.integrations.transformers                                              # doctest: +SKIP
>>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="fkernel")         # doctest: +SKIP

What a query may see is said by the mask alone, as in Transformers' "eager": no flag of a module is believed, for models
mean different things by them. A model that never calls the attention function of its configuration (Bloom, Falcon,
GPT-Neo, MPNet, ...) runs as it always does, and a warning says so.

`accelerated(model)` (swap.py) uses it for a while, together with fused MLPs, norms and RoPE, and puts everything back
afterwards. `accelerate(model)` (accelerate.py) lets the model generate by FlashKernel's engine.
"""

from __future__ import annotations

from .accelerate import accelerate, restore
from .attention import NAME, attention_forward, attention_mask, register
from .swap import accelerated

__all__ = ["NAME", "accelerate", "accelerated", "attention_forward", "attention_mask", "register", "restore"]
