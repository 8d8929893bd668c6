"""One step of a learning rate schedule."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


def step_schedule(scheduler: Any, arguments: Mapping[str, Any] | None, samples: int) -> None:
    """Steps ``scheduler``. One that counts samples itself has a ``step`` that asks for a number, and is given ``samples``.

    torch's own are never given any: what ``ReduceLROnPlateau.step`` asks for is a metric, which only a script has.

    Args:
        scheduler: Has ``step``.
        arguments: Keyword arguments for it; None or none where nobody gave any.
        samples: Of one optimizer step, on all ranks.
    """
    if not arguments and not isinstance(scheduler, LRScheduler) and _asks(scheduler.step):
        scheduler.step(samples)
    else:
        scheduler.step(**(arguments or {}))


def _asks(step: Any) -> bool:
    """Whether ``step`` has a positional parameter without a default."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # of a function that is not Python's
        return False
    return any(one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)
