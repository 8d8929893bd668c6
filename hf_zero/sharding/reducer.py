"""The order in which gradients are reduced: fixed by the units, never by data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_zero.observe import warn_once
from hf_zero.sharding.gradients import UnitGradients

# Reductions in flight at once. Two keep one on the wire while the next fills; more only hold more flat buffers alive.
_IN_FLIGHT = 2


class Reducer:
    """Reduces each unit once per backward, last unit first, in the same order on every rank.

    [Note: order of reductions] A unit is sent off when all its gradients have arrived and all units behind it are gone. What is
    incomplete when backward ends (a branch this rank skipped) goes off then, zeros filling the holes. So every rank sends the
    same sequence whatever its data. At stage 3 a block that backward has passed is ``close``d and goes off incomplete.

    [Note: waiting for reductions] At most ``_IN_FLIGHT`` reductions are in flight; beyond that the oldest is waited for. At stage 3 a
    rank may be waited for by others in a gather while it waits here; where waiting stops the whole process (gloo) it
    only looks whether the oldest is done, and goes on if not.

    Attributes:
        gradients: One entry per trainable unit, in the order of the model.
        enabled: Whether this backward reduces at all; False inside ``no_sync`` and, at stage 0, before the boundary.
        factor: What this backward's gradients are multiplied with.
        local: Gradients are not reduced at all: each rank keeps its own (see ``keep_local``).

    Args:
        gradients: The units.
        overlap: Reductions run while backward goes on.
        patient: Never wait for a reduction before backward ends.
    """

    def __init__(self, gradients: Sequence[UnitGradients], overlap: bool, patient: bool = False) -> None:
        self.gradients = list(gradients)
        self.enabled = True
        self.factor = 1.0
        self.local = False
        self._overlap = overlap
        self._patient = patient
        self._closed: set[int] = set()
        self._next = len(self.gradients) - 1  # index of the next unit to send; counts down
        self._deferred: set[int] = set()
        self._flying: deque[UnitGradients] = deque()
        self._handles: list[Any] = []

    def attach(self, on_first: Callable[[], None]) -> None:
        """Hooks into autograd; ``on_first`` is called with each gradient, to notice a backward the engine did not start."""
        for position, gradients in enumerate(self.gradients):
            for index, param in enumerate(gradients.unit.params):
                if param is not None:
                    hook = _make_hook(self, position, index, on_first)
                    self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        """Takes the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def keep_local(self, local: bool) -> None:
        """Whether each rank keeps its own gradients, whole, for an optimizer that communicates itself."""
        self.local = local
        for gradients in self.gradients:
            gradients.local = local

    def defer(self, gradients: UnitGradients) -> None:
        """Leaves a unit for the end of this backward: its block runs several times, gradients arrive piecemeal."""
        self._deferred.add(id(gradients))

    def close(self, gradients: UnitGradients) -> None:
        """Nothing more comes for this unit in this backward: it may go off as it is."""
        if self.enabled:
            self._closed.add(id(gradients))
            self._send_complete()

    def collect(self, gradients: UnitGradients, index: int) -> None:
        """Takes one gradient; sends off what has become complete."""
        gradients.collect(index, deferred=not self.enabled, factor=self.factor)
        if self.enabled and gradients.complete:
            self._send_complete()

    def _send_complete(self) -> None:
        while self._next >= 0:
            gradients = self.gradients[self._next]
            done = gradients.complete or id(gradients) in self._closed
            if not done or id(gradients) in self._deferred:
                return
            self._next -= 1
            self._send(gradients)

    def _send(self, gradients: UnitGradients) -> None:
        gradients.start_reduce()
        self._flying.append(gradients)
        while len(self._flying) > (_IN_FLIGHT if self._overlap else 0):
            if self._patient and not self._flying[0].ready:
                return
            self._flying.popleft().finish_reduce()

    def flush(self) -> None:
        """Ends a backward: sends what is left, in order; collective if ``enabled``."""
        if self.enabled:
            while self._next >= 0:
                gradients = self.gradients[self._next]
                self._next -= 1
                self._send(gradients)
            for gradients in reversed(self.gradients):
                if gradients.has_local:
                    warn_once(
                        f"gradients of unit {gradients.unit.name} arrived after it was reduced; it is reduced a second time. "
                        "This is exact as long as every rank runs the module equally often"
                    )
                    self._send(gradients)
        while self._flying:
            self._flying.popleft().finish_reduce()
        for gradients in self.gradients:
            gradients.begin_backward()
            gradients.pool.clear()
        self._next = len(self.gradients) - 1
        self._deferred.clear()
        self._closed.clear()

    def clear(self) -> None:
        """Forgets all gradients."""
        for gradients in self.gradients:
            gradients.clear()
        self._flying.clear()
        self._deferred.clear()
        self._closed.clear()
        self._next = len(self.gradients) - 1


def _make_hook(reducer: Reducer, position: int, index: int, on_first: Callable[[], None]) -> Callable[[torch.Tensor], None]:
    gradients = reducer.gradients[position]

    def hook(param: torch.Tensor) -> None:
        on_first()
        reducer.collect(gradients, index)

    return hook
