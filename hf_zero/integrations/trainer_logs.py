"""What an engine measures, in Trainer's own logs and so in every tracker that Trainer reports to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.core.engine import Engine

_PREFIX = "Train/"  # Trainer's callbacks for trackers put one of their own before each name


def log(function: Callable[..., Any], trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
    """``Trainer.log``, with what the engine has measured since the last log of training beside the loss."""
    engine = getattr(trainer, "model_wrapped", None)
    if isinstance(engine, Engine) and "loss" in logs:
        measured, engine.reports.measured = engine.reports.measured, {}
        logs |= {name.removeprefix(_PREFIX).lower(): value for name, value in measured.items()}
    return function(trainer, logs, *args, **kwargs)
