"""`deepspeed.OnDevice`, and the wrapper of tensor constructors that transformers reads, replaces and restores around `zero.Init`."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from hf_zero.errors import ConfigError

partitioned_param_data_shape = [0]
"""The shape that a parameter shows while it is divided."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class OnDevice:
    """Context in which tensors are made on ``device`` and floating-point ones in ``dtype``.

    ``device="meta"`` makes parameters without memory, to be filled by a checkpoint; ``zero.Init`` shards them instead.

    Args:
        dtype: Floating-point type.
        device: Device on which tensors are made.
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


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype, target_device: torch.device | str
) -> Callable[..., torch.Tensor]:
    """Wraps a tensor constructor so that it builds on ``target_device`` and floating results take ``target_fp_dtype``.

    hf_zero's own `zero.Init` replaces no constructor (``torch.arange`` in a rotary embedding keeps its dtype by itself), so
    nothing here calls it; it stands in the place where Hugging Face code looks for it and does what it says.

    Args:
        fn: A constructor such as ``torch.empty``; its result has any shape.
        target_fp_dtype: Dtype of floating-point results.
        target_device: Device when the caller names none.

    Returns:
        A function with ``fn``'s arguments.
    """

    def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None:
            kwargs["device"] = target_device
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if tensor.is_floating_point() else tensor

    return construct
