"""Whole weights for those who save a model whose experts or layers are divided: accelerate asks each rank for what it has, below stage 3.

Imports nothing: every program that saves with accelerate comes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def get_state_dict(method: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """``Accelerator.get_state_dict``; of an engine with divided experts or layers the whole weights, on rank 0; collective then."""
    axes = getattr(getattr(model, "collectives", None), "topology", None)
    divided = getattr(axes, "expert", None) is not None or getattr(axes, "pipe", None) is not None
    if divided and not model.policy.parameters_sharded:
        return model._consolidated_16bit_state_dict()
    return method(accelerator, model, *args, **kwargs)
