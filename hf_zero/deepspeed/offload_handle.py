"""The object that TRL and others reach for to take DeepSpeed's stage-3 hooks off a model during generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hf_zero.core.schedule.external_parameters import external_parameters


class _TraceCoordinator:
    """Has no trace: the order of gathers is fixed, so there is nothing to invalidate."""

    def is_invalid_trace(self) -> bool:
        """Return False: the order of gathers is fixed."""
        return False

    def _invalidate_trace(self) -> None:
        """Do nothing: there is no trace to invalidate."""


class _WalkedModule:
    """The model with the one method that DeepSpeed adds to modules and callers walk its parameters with; the model stays as it is."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def ds_external_parameters(self) -> Iterator[tuple[int, nn.Parameter]]:
        """Yield parameters declared external to the model itself, each with its id."""
        return ((id(param), param) for param in external_parameters(self._module))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class OffloadHandle:
    """Placeholder for the object in which DeepSpeed keeps its hooks; it does nothing, because the engine's hooks may stay in place.

    Callers remove the hooks, gather all parameters, generate, and put the hooks back. With ours left in place the same happens:
    gathered parameters are pinned, so the hooks find every block whole and do nothing.

    Attributes:
        module: The model, to be walked.
        forward_hooks: Removable handles of forward hooks; none.
        backward_hooks: Removable handles of backward hooks; none.
        param_coordinator: Knows whether a trace of gathers is valid.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = _WalkedModule(module)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = _TraceCoordinator()

    def get_param_coordinator(self) -> _TraceCoordinator:
        """Return ``param_coordinator``."""
        return self.param_coordinator

    def _register_deepspeed_module(self, module: Any, count: list[int] | None = None) -> None:
        """Do nothing: the engine's hooks were never removed."""
