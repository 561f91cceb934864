"""flash-attn's Python API over FlashKernel: same names, arguments, defaults and layouts [batch, seq, heads, head_dim].

>>> import torch
>>> from flashkernel.flash_attn import flash_attn_func
>>> q = torch.ones(1, 5, 4, 8)
>>> k = v = torch.ones(1, 5, 2, 8)
>>> flash_attn_func(q, k, v, causal=True).shape
torch.Size([1, 5, 4, 8])

`install()` makes `import flash_attn` find it in code that can't be changed. flash-attn 3's functions, which have the
same names, are in `flashkernel.flash_attn.flash_attn_3_interface`; docs/moving_from_flash_attn.md has a table of all
names.
"""

from __future__ import annotations

from ._errors import ArgumentError
from ._install import VERSION, install, installed, uninstall
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "VERSION",
    "ArgumentError",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "installed",
    "uninstall",
]
