"""Let TRL take a checksum of a sharded model: it names the cache of precomputed reference log-probabilities by the model's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_zero.core.schedule.gathered_parameters import GatheredParameters
from hf_zero.core.units.unit import is_sharded


class _Gathered:
    """A sharded parameter in a state dict whose ``cpu()`` gathers it.

    Args:
        param: The parameter.
    """

    def __init__(self, param: nn.Parameter) -> None:
        self._param = param

    def cpu(self) -> torch.Tensor:
        """Return the values in host memory; collective."""
        with GatheredParameters([self._param]):
            return self._param.detach().to("cpu", copy=True)


class _Whole:
    """A module whose ``state_dict`` gathers sharded parameters one at a time, when they are read.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state dict, in which each sharded parameter is represented by its ``cpu()``."""
        params = {name: param for name, param in self._module.named_parameters(remove_duplicate=False) if is_sharded(param)}
        return {name: _Gathered(params[name]) if name in params else value for name, value in self._module.state_dict().items()}


def hash_module(original: Callable[[Any], str], module: nn.Module) -> str:
    """Return TRL's checksum of the module's values; collective if parameters are sharded: its trainers call it on all ranks."""
    return original(_Whole(module) if any(is_sharded(param) for param in module.parameters()) else module)
