"""Integrations with other frameworks; each name loads on first use, so that only the framework in use is imported."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "ZeroPlugin": "hf_zero.integrations.accelerate_plugin",
    "DummyOptim": "hf_zero.integrations.accelerate_plugin",
    "DummyScheduler": "hf_zero.integrations.accelerate_plugin",
    "ZeroStrategy": "hf_zero.integrations.lightning",
    "FabricZeroStrategy": "hf_zero.integrations.lightning",
    "AveragedWeightsCallback": "hf_zero.integrations.averages",
}

__all__ = [*_NAMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'hf_zero.integrations' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
