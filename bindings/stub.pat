# What nanobind's stub generator is told beyond the signatures: names used in them (overloads.py needs some), and classes that C++ makes by hand.
flashkernel._C.__prefix__$:
    \from flashkernel.typing import ArrayT, Axis, KvAppendRope, KvAppendRopeWithQ, KvScales, SupportsDLPack, TorchTensor, Window
    \from flashkernel.masks import BlockMask
    \from numpy.typing import NDArray
    \from typing import Any, Literal, overload

flashkernel._C.__suffix__$:
    __version__: str

flashkernel._C.BlockTableError$:
    class BlockTableError(ValueError):
        """A page table that leads out of the pool: entry ``slot`` of ``sequence`` is the page id ``page``."""
        sequence: int
        slot: int
        page: int

flashkernel._C.CudaError$:
    class CudaError(RuntimeError):
        """A CUDA runtime call failed; ``code`` is its cudaError_t."""
        code: int

flashkernel._C.OutOfMemoryError$:
    class OutOfMemoryError(MemoryError):
        """A memory resource could not serve an allocation; nothing changed."""
        requested_bytes: int
        free_bytes: int
        peak_bytes: int

flashkernel._C.OutOfPagesError$:
    class OutOfPagesError(OutOfMemoryError):
        """A page pool ran dry; nothing changed."""
        requested_pages: int
        free_pages: int
        num_pages: int

flashkernel._C.OPS$:
    OPS: dict[str, str]
