"""Choose the device of this rank."""

from __future__ import annotations

import os

import torch


def default_device() -> torch.device:
    """Return the accelerator that the script has made current, otherwise the one of this local rank; the CPU without accelerators."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    return torch.device(accelerator.type, _chosen_index(accelerator) or int(os.environ.get("LOCAL_RANK", "0")) % max(count, 1))


def _chosen_index(accelerator: torch.device) -> int:
    """Return the index of the current device; 0 if the script has not chosen one. Does not initialise the device."""
    started = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return 0 if started is not None and not started() else torch.accelerator.current_device_index()
