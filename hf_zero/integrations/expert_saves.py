"""Whole weights for those who save a model whose experts are divided: accelerate asks each rank for what it has, below stage 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.deepspeed.engine import Engine


def get_state_dict(method: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """``Accelerator.get_state_dict``; of an engine with divided experts the whole weights, on rank 0; collective then."""
    if isinstance(model, Engine) and model.collectives.topology.expert is not None and model.runtime.schedule is None:
        return model._consolidated_16bit_state_dict()
    return method(accelerator, model, *args, **kwargs)
