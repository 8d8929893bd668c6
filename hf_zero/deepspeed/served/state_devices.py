"""Return the current devices of an engine's state, for scripts that offload it."""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.core.offloaded_states import KINDS
from hf_zero.errors import ConfigError


def get_state_devices(model: Any, state: Any) -> set[torch.device]:
    """Return the current devices of one kind of state of an engine; local.

    Args:
        model: The engine.
        state: A member of ``OffloadStateTypeEnum``, or its name.

    Returns:
        A set of devices; empty if no such state exists now (for example gradients after a step).

    Raises:
        ConfigError: The kind is unknown.
    """
    kind = str(getattr(state, "value", state))
    if kind not in KINDS:
        raise ConfigError(f"get_state_devices(state={kind!r}): not a kind of state; allowed are {', '.join(KINDS)}")
    devices: set[torch.device] = model.offloaded_states.devices(kind)
    return devices
