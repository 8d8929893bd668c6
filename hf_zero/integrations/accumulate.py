"""accelerate's ``no_sync`` around an engine: of releases that enter it at every stage, and step inside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hf_zero.core.engine import Engine as CoreEngine
from hf_zero.deepspeed.engine import Engine


def no_sync(method: Callable[..., AbstractContextManager[None]], accelerator: Any, model: Any) -> AbstractContextManager[None]:
    """``Accelerator.no_sync``: of an engine that shards gradients nothing, as accelerate has it since it asks for the stage.

    accelerate 1.6 does not, and its ``backward`` steps every time: the engine counts, and a step off the boundary is none.
    """
    if not isinstance(model, Engine):
        return method(accelerator, model)
    return CoreEngine.no_sync(model) if model.stage_policy.allows_deferral else nullcontext()
