"""Optimizers that users may construct themselves; each is imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {"OneBitAdam": "hf_zero.optim.onebit_adam", "Lion": "hf_zero.optim.lion"}

__all__ = ["Lion", "OneBitAdam"]  # noqa: F822  # served by __getattr__


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'hf_zero.optim' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_NAMES[name]), name)
