"""The wrapper that transformers reads, replaces and restores around `zero.Init`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
