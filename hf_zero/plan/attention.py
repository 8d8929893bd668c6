"""Attention as a GPU's kernels keep it: on a pretended device torch would take its reference, which keeps every score."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hf_zero.errors import ConfigError
from hf_zero.system.planning import DEVICE

_HALF = (torch.bfloat16, torch.float16)
_MOST_WIDTH = 256  # of a head, for the flash kernel


class DeviceAttention(TorchFunctionMode):
    """Answers ``scaled_dot_product_attention`` with the operations that CUDA would choose.

    Half precision without a mask goes to the flash kernel, all else to the memory-efficient one (torch's ``sdp_utils.cpp``). Both keep
    outputs and one number per row of scores.

    Args:
        flash: Refuse what the flash kernel does not take.
    """

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self._flash = flash

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs ``func``; attention on the pretended device with a kernel."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and args and args[0].device.type == DEVICE:
            return self._attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        fits = attn_mask is None and query.dtype in _HALF and query.shape[-1] <= _MOST_WIDTH
        if fits:
            result: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
            return result
        if self._flash:
            raise ConfigError(
                f"--attention flash: the kernel takes 16 bit, no mask and heads of at most {_MOST_WIDTH}; the model asks for {query.dtype}, "
                f"{'a mask' if attn_mask is not None else 'no mask'} and heads of {query.shape[-1]}. Use --attention sdpa"
            )
        if enable_gqa and key.shape[1] != query.shape[1]:
            key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
        mask = attn_mask.to(query.dtype) if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
        if mask is not None:
            mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        result = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, dropout_p, is_causal, scale=scale)[0]
        return result
