"""Clip the gradients that a script of Lightning clips itself: Lightning's DeepSpeed precision leaves it out, without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_zero.deepspeed.optimizer import DeepSpeedOptimizer
from hf_zero.errors import UnsupportedError


def clip_gradients(method: Callable[..., Any], precision: Any, optimizer: Any, clip_val: float = 0.0, algorithm: Any = "norm") -> None:
    """Replace ``DeepSpeedPrecision.clip_gradients``, which does nothing: clip to ``clip_val`` unless the engine's step does; collective.

    Lightning calls it from ``LightningModule.clip_gradients`` (manual optimization, ``configure_gradient_clipping``). A number of the
    Trainer is the engine's ``gradient_clipping`` already. In the middle of an accumulation there is nothing to clip yet.

    Raises:
        UnsupportedError: Gradients are to be clipped by value.
    """
    held: Any = optimizer if isinstance(optimizer, DeepSpeedOptimizer) else getattr(optimizer, "optimizer", None)
    engine = held._engine() if isinstance(held, DeepSpeedOptimizer) else None
    if engine is None:
        method(precision, optimizer, clip_val, algorithm)
        return
    if not clip_val or clip_val <= 0:
        return
    if str(getattr(algorithm, "value", algorithm)) != "norm":
        raise UnsupportedError(
            f"clip_gradients(gradient_clip_algorithm={str(getattr(algorithm, 'value', algorithm))!r}) is not supported: gradients are "
            'sharded, and the engine clips by their norm. Use "norm"'
        )
    if clip_val != engine.gradient_clipping() and engine.accumulation.awaits_update:
        torch.nn.utils.clip_grad_norm_([tensor for group in held.param_groups for tensor in group["params"]], clip_val)
