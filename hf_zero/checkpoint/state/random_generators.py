"""Save and restore the states of this rank's random generators: Python's, NumPy's, torch's on the host and the device, and named states."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hf_zero.activation_checkpointing.random_states import random_states

_NUMPY = "MT19937"  # the only kind of NumPy's global generator


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators that a training step draws from, as plain values and tensors on the host.

    Args:
        device: Device of this rank.
    """
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "device": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device),
        "named": {name: state.clone() for name, state in random_states().get_states().items()},
    }


def restore_generators(states: Mapping[str, Any], device: torch.device) -> None:
    """Set all generators to states of ``generator_states``; the device's is left alone where it was saved on another kind of device."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((_NUMPY, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if states["device"] is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"], device)
    random_states().set_states(states["named"])
