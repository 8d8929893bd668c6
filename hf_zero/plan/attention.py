"""Give plans the attention of a run: masks only where a run needs them, and the memory of a GPU's kernels.

On the simulated device torch would select its reference implementation, which keeps all scores.
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
_MOST_WIDTH = 256  # largest width of a head that the flash kernel accepts


@contextmanager
def masks_by_values() -> Iterator[None]:
    """Make transformers decide like in a run, inside the ``with``, whether attention needs a mask; fake tensors would always get one.

    The decision reads values of tensors. Unknown booleans count as true in a plan: positions are consecutive, and tokens are not padding.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if not hasattr(masking, "is_tracing"):
        yield
        return
    with mock.patch.object(masking, "is_tracing", lambda *_: False):
        yield


@contextmanager
def device_attention(flash: bool) -> Iterator[None]:
    """Replace ``scaled_dot_product_attention`` on the simulated device, inside the ``with``, by the operation that CUDA would select.

    Half precision without a mask uses the flash kernel, everything else the memory-efficient kernel (torch's ``sdp_utils.cpp``). Both keep
    the outputs and one number per row of scores. This patches the function, because dispatch modes are off in a backward that recomputes.

    Args:
        flash: Whether to raise for inputs that the flash kernel does not accept.
    """
    functional = torch.nn.functional
    with mock.patch.object(functional, "scaled_dot_product_attention", partial(_attend, functional.scaled_dot_product_attention, flash)):
        yield


@dataclass(frozen=True)
class _Rules:
    """Arguments of ``scaled_dot_product_attention`` after query, key and value, with torch's names and defaults."""

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
            f"--attention flash: the kernel takes 16 bit, no mask and heads of width up to {_MOST_WIDTH}; the model has {query.dtype}, "
            f"{'a mask' if mask is not None else 'no mask'} and heads of width {query.shape[-1]}. Use --attention sdpa"
        )
    if rules.enable_gqa and key.shape[1] != query.shape[1]:
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    if mask is not None:
        mask = (mask.to(query.dtype) if mask.dtype == torch.bool else mask).expand(*query.shape[:3], key.shape[2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, mask, True, rules.dropout_p, rules.is_causal, scale=rules.scale)[0]
