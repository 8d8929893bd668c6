"""Packed weights: bytes of a quantized weight under whatever element type a library keeps them in."""

from __future__ import annotations

import torch

_PACKED = "_hf_zero_packed"


def mark_packed(param: torch.Tensor) -> None:
    """Says that the elements of ``param`` are no numbers to compute with: they are sharded and gathered as they are, and never cast."""
    setattr(param, _PACKED, True)


def is_packed(param: torch.Tensor) -> bool:
    """Whether ``param`` was marked."""
    return getattr(param, _PACKED, False)
