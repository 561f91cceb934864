"""FlashKernel as an attention backend of vLLM.

vLLM finds `register` by the entry point "vllm.general_plugins" and calls it in each of its processes. A user then says

    vllm serve MODEL --attention-backend FLASHKERNEL

or CUSTOM in place of FLASHKERNEL where a release of vLLM knows no names of plugins. Nothing changes for who does not.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]

_CLASSES = {"FLASHKERNEL": "FlashKernelBackend", "CUSTOM": "CustomBackend"}


def register() -> None:
    """Makes the backends "FLASHKERNEL" and "CUSTOM" known to vLLM. May be called any number of times.

    CUSTOM stays with another plugin that has taken it before.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, class_name in _CLASSES.items():
        path = f"{__name__}.backend.{class_name}"
        member = AttentionBackendEnum.__members__.get(name)
        if member is not None:
            if not (member.value or member.is_overridden()):
                register_backend(member, path)
        elif hasattr(AttentionBackendEnum, "register"):
            AttentionBackendEnum.register(name, path)
    _obey_on_cpu()


def _obey_on_cpu() -> None:
    """vLLM on a CPU takes its own backend whatever the user says; now it takes this one where the user names it."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.get_attn_backend_cls.__func__
    if getattr(stock, "obeys_flashkernel", False):
        return

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        name = getattr(selected_backend, "name", None)
        path = selected_backend.get_path() if name in _CLASSES else ""
        if not path.startswith(f"{__name__}."):
            return stock(cls, selected_backend, attn_selector_config, *args, **kwargs)
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(f"{name}: {'; '.join(reasons)}: {attn_selector_config}")
        return path

    get_attn_backend_cls.obeys_flashkernel = True  # type: ignore[attr-defined]
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
