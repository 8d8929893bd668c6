"""The object that TRL and others reach for to take DeepSpeed's stage-3 hooks off a model during generation."""

from __future__ import annotations

from typing import Any

from torch import nn


class _TraceCoordinator:
    """Has no trace: the order of gathers is fixed, so there is nothing to invalidate."""

    def is_invalid_trace(self) -> bool:
        """Always False."""
        return False

    def _invalidate_trace(self) -> None:
        """Nothing to do."""


class OffloadHandle:
    """Stands where DeepSpeed keeps its hooks; empty, because ours may stay in place.

    Callers remove the hooks, gather all parameters, generate, and put the hooks back. With ours left in place the same happens:
    gathered parameters are pinned, so the hooks find every block whole and do nothing.

    Attributes:
        module: The model.
        forward_hooks: Removable handles of forward hooks; none.
        backward_hooks: Removable handles of backward hooks; none.
        param_coordinator: Knows whether a trace of gathers is valid.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = _TraceCoordinator()

    def _register_deepspeed_module(self, module: nn.Module, count: list[int] | None = None) -> None:
        """Nothing to register: the engine's hooks were never taken off."""
