"""Attention as a run has it: with the masks that tokens of one sequence per sample need, and as a GPU's kernels keep it.

On a pretended device torch would take its reference, which keeps every score.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from hf_zero.errors import ConfigError
from hf_zero.system.planning import DEVICE

_HALF = (torch.bfloat16, torch.float16)
_MOST_WIDTH = 256  # of a head, for the flash kernel


@contextmanager
def masks_by_values() -> Iterator[None]:
    """Inside, transformers decides by values whether a mask is needed, as in a run, where tensors without values would always get one.

    Truth values that nobody knows are true, here: positions without a break, tokens without padding.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if not hasattr(masking, "is_tracing"):
        yield
        return
    with mock.patch.object(masking, "is_tracing", lambda *_: False):
        yield


@contextmanager
def device_attention(flash: bool) -> Iterator[None]:
    """Inside, ``scaled_dot_product_attention`` on the pretended device is the operation that CUDA would choose.

    Half precision without a mask goes to the flash kernel, all else to the memory-efficient one (torch's ``sdp_utils.cpp``). Both keep
    outputs and one number per row of scores. The function is exchanged, not a mode entered: modes are off in a backward that recomputes.

    Args:
        flash: Refuse what the flash kernel does not take.
    """
    functional = torch.nn.functional
    with mock.patch.object(functional, "scaled_dot_product_attention", partial(_attend, functional.scaled_dot_product_attention, flash)):
        yield


@dataclass(frozen=True)
class _Rules:
    """Arguments of ``scaled_dot_product_attention`` behind query, key and value, with its names and defaults."""

    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def _attend(usual: Any, flash: bool, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if query.device.type != DEVICE:
        return usual(query, key, value, *args, **kwargs)
    rules = _Rules(*args, **kwargs)
    mask = rules.attn_mask
    if mask is None and query.dtype in _HALF and query.shape[-1] <= _MOST_WIDTH:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return kernel(query, key, value, rules.dropout_p, rules.is_causal, False, scale=rules.scale)[0]
    if flash:
        raise ConfigError(
            f"--attention flash: the kernel takes 16 bit, no mask and heads of at most {_MOST_WIDTH}; the model asks for {query.dtype}, "
            f"{'a mask' if mask is not None else 'no mask'} and heads of {query.shape[-1]}. Use --attention sdpa"
        )
    if rules.enable_gqa and key.shape[1] != query.shape[1]:
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    if mask is not None:
        mask = (mask.to(query.dtype) if mask.dtype == torch.bool else mask).expand(*query.shape[:3], key.shape[2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, mask, True, rules.dropout_p, rules.is_causal, scale=rules.scale)[0]
