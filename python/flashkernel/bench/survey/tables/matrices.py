"""Norms, SwiGLU, softmax, the loss, merging of partial attention."""

from __future__ import annotations

from typing import Any

from ..matrices import Loss, Matrix, Merge, NormBackward

__all__ = ["ROWS"]

ROWS: tuple[Any, ...] = (
    *(Matrix("rms_norm", rows, columns) for columns in (2048, 4096, 8192) for rows in (1, 32, 512, 8192)),
    *(Matrix("rms_norm + residual", rows, 4096) for rows in (1, 32, 512, 8192)),
    *(Matrix("layer_norm", rows, columns) for rows, columns in ((1, 768), (1024, 768), (8192, 1024), (8192, 4096))),
    Matrix("layer_norm + residual", 8192, 1024),
    *(Matrix("rms_norm", rows, columns) for rows, columns in ((2048, 16384), (512, 65536), (256, 131072))),
    *(Matrix("swiglu", rows, columns) for columns in (8192, 14336) for rows in (1, 32, 512, 4096)),
    Matrix("swiglu_backward", 4096, 8192),
    *(Matrix("softmax", rows, columns) for rows, columns in ((8192, 1024), (4096, 8192), (512, 50257), (256, 128256))),
    *(Matrix("softmax_backward", rows, columns) for rows, columns in ((4096, 4096), (512, 32768))),
    Matrix("add", 8192, 4096),
    *(NormBackward("rms_norm", rows, columns) for rows, columns in ((4096, 2048), (8192, 4096))),
    NormBackward("layer_norm", 8192, 1024),
    *(Loss(rows, classes, backward) for rows, classes in ((4096, 50257), (2048, 128256)) for backward in (False, True)),
    *(Merge(tokens, 32, dim) for tokens, dim in ((16, 128), (512, 128), (8192, 128), (8192, 64))),
)
