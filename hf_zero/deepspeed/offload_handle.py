"""Provide the object that TRL and others use to remove DeepSpeed's stage-3 hooks from a model during generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hf_zero.core.schedule.gathered_parameters import external_parameters


class _TraceCoordinator:
    """A placeholder of DeepSpeed's parameter coordinator without a trace: the order of gathers is fixed here."""

    def is_invalid_trace(self) -> bool:
        """Return False: the order of gathers is fixed."""
        return False

    def _invalidate_trace(self) -> None:
        """Do nothing: there is no trace to invalidate."""


class _WalkedModule:
    """A wrapper of the model with the method that DeepSpeed adds to modules to iterate parameters; the model itself does not change."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def ds_external_parameters(self) -> Iterator[tuple[int, nn.Parameter]]:
        """Yield (id, parameter) for parameters that were declared external to the model itself."""
        return ((id(param), param) for param in external_parameters(self._module))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class OffloadHandle:
    """Placeholder for the object in which DeepSpeed keeps its hooks; it does nothing, because the engine's hooks may stay in place.

    Callers remove the hooks, gather all parameters, generate, and put the hooks back. The engine's hooks stay in place with the same
    result: gathered parameters are pinned, so the hooks find every block unsharded and do nothing.

    Attributes:
        module: The model, with the method that iterates its parameters.
        forward_hooks: Removable handles of forward hooks; always empty.
        backward_hooks: Removable handles of backward hooks; always empty.
        param_coordinator: Placeholder of DeepSpeed's parameter coordinator.
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
