"""FlashKernel: the kernels of the transformer critical path, for NVIDIA GPUs and the CPU.

Arrays of any framework go in through DLPack and come back as the same kind: torch, NumPy, JAX, CuPy. The ops are listed
in ``flashkernel.__all__`` and documented one by one; ``flashkernel.torch`` adds autograd and torch.compile.

>>> import numpy as np, flashkernel as fk
>>> q = k = v = np.ones((1, 8, 128, 64), np.float32)
>>> fk.attention(q, k, v, causal=True).shape
(1, 8, 128, 64)
"""

import os
import sys

if sys.platform == "win32":  # where the library lies in a wheel; other systems find it by RPATH
    _lib = os.path.join(os.path.dirname(__file__), "lib")
    if os.path.isdir(_lib):
        os.add_dll_directory(_lib)

from flashkernel import _dynamo
from flashkernel import ops as _ops
from flashkernel._C import __version__
from flashkernel.ops import *  # noqa: F403

_dynamo.watch({name: getattr(_ops, name) for name in _ops.OPS})

__all__ = ["__version__", *_ops.NAMES]
