"""Add an engine's measurements to Trainer's logs, and so to every tracker that Trainer reports to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.core.engine import Engine

_PREFIX = "Train/"  # Trainer's callbacks for trackers add their own prefix


def log(function: Callable[..., Any], trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
    """Replace ``Trainer.log``: add the engine's measurements since the last training log to each log with a loss."""
    engine = getattr(trainer, "model_wrapped", None)
    if isinstance(engine, Engine) and "loss" in logs:
        measured, engine.reports.measured = engine.reports.measured, {}
        logs |= {name.removeprefix(_PREFIX).lower(): value for name, value in measured.items()}
    return function(trainer, logs, *args, **kwargs)
