"""`deepspeed.OnDevice`: builds a model on a device, or without memory, in a given type."""

from __future__ import annotations

from types import TracebackType

import torch

from hf_zero.errors import ConfigError

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class OnDevice:
    """Context in which tensors are made on ``device`` and floating-point ones in ``dtype``.

    ``device="meta"`` makes parameters without memory, to be filled by a checkpoint; ``zero.Init`` shards them instead.

    Args:
        dtype: Floating-point type.
        device: Where tensors are made.
        enabled: False leaves everything as it is.

    Raises:
        ConfigError: ``dtype`` is no floating-point type.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        if dtype not in _FLOATS:
            raise ConfigError(f"OnDevice: dtype is {dtype}; allowed: {', '.join(map(str, _FLOATS))}")
        self.dtype = dtype
        self.device = torch.device(device)
        self.enabled = enabled

    def __enter__(self) -> OnDevice:
        if self.enabled:
            self._former = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self.device.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.enabled:
            self.device.__exit__(kind, error, trace)
            torch.set_default_dtype(self._former)
