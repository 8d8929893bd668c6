"""Implement `deepspeed.OnDevice`, and the wrapper of tensor constructors that transformers replaces and restores around `zero.Init`."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from hf_zero.errors import ConfigError

partitioned_param_data_shape = [0]
"""Shape of a parameter while it is sharded."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class OnDevice:
    """A context in which tensors are created on ``device``, and floating-point tensors in ``dtype``.

    ``device="meta"`` makes parameters without memory, to be filled by a checkpoint; ``zero.Init`` shards them instead.

    Args:
        dtype: Floating-point type.
        device: Device on which tensors are made.
        enabled: Whether the context has an effect.

    Raises:
        ConfigError: ``dtype`` is not a floating-point type.
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
    """Wrap a tensor constructor so that it creates tensors on ``target_device``, and floating-point tensors in ``target_fp_dtype``.

    hf_zero's own `zero.Init` replaces no constructors, so hf_zero does not call this function; it exists because code of Hugging Face
    libraries imports it.

    Args:
        fn: A constructor such as ``torch.empty``.
        target_fp_dtype: Dtype of floating-point results.
        target_device: Device if the caller passes none.

    Returns:
        A function with ``fn``'s arguments.
    """

    def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None:
            kwargs["device"] = target_device
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if tensor.is_floating_point() else tensor

    return construct
