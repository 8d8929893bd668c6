"""The order in which gradients are reduced: fixed by the units, never by data."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hf_zero.core.schedule.backward_order import BackwardOrder
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.units.unit import Unit
from hf_zero.observe import warn_once

# Reductions in flight at once. Two keep one on the wire while the next fills; more only hold more flat buffers alive.
_IN_FLIGHT = 2
AT_THE_END = sys.maxsize  # place of what is sent when backward is over


class Reducer:
    """Reduces each unit once per backward, in the same order on every rank: last unit first, until ``arrange`` says another.

    [Note: order of reductions] A unit is sent off when all its gradients have arrived, or backward has passed its block (``close``),
    and all units before it in the queue are gone. What is incomplete when backward ends (a branch this rank skipped) goes off then,
    zeros filling the holes. So every rank sends the same sequence whatever its data. Where backward gathers too, the two have one order
    ([Note: one order]): it may hold a unit back, and may send it off before it is complete.

    At most ``_IN_FLIGHT`` reductions are in flight; beyond that the oldest is waited for.

    Attributes:
        gradients: One entry per trainable unit, in the order of the model.
        enabled: Whether this backward reduces at all; False inside ``no_sync`` and, at stage 0, before the boundary.
        factor: What this backward's gradients are multiplied with.
        local: Gradients are not reduced at all: each rank keeps its own (see ``keep_local``).

    Args:
        gradients: The units.
        overlap: Reductions run while backward goes on.
        agree: Collective; for each flag, whether it is True on any rank.
    """

    def __init__(self, gradients: Sequence[UnitGradients], overlap: bool, agree: Callable[[list[bool]], list[bool]]) -> None:
        self.gradients = list(gradients)
        self.enabled = True
        self.factor = 1.0
        self.local = False
        self._overlap = overlap
        self._agree = agree
        self._queue = self.gradients[::-1]
        self._places: dict[int, int] = {}  # by id of the entry: position of backward's line that completes it
        self._late: set[int] = set()  # ids of entries that were late once: they are sent at the end
        self._order: BackwardOrder | None = None  # of this backward's reductions and gathers; None where it gathers nothing
        self._sent = 0  # entries of the queue that were sent in this backward
        self._closed: set[int] = set()
        self._deferred: set[int] = set()
        self._flying: deque[UnitGradients] = deque()
        self._handles: list[Any] = []

    def arrange(self, place_of: Callable[[Unit], int]) -> None:
        """Takes another order of sending, between backwards; the same on every rank.

        Args:
            place_of: The position of backward's line whose block completes a unit, or ``AT_THE_END``.
        """
        self._places = {id(entry): place_of(entry.unit) for entry in self.gradients}
        self._sort()

    def _sort(self) -> None:
        self._queue = self.gradients[::-1]
        self._queue.sort(key=self._place)  # stable

    def _place(self, entry: UnitGradients) -> int:
        return AT_THE_END if id(entry) in self._late else self._places.get(id(entry), AT_THE_END)

    def begin_backward(self, sizes: Sequence[int], reach: int) -> BackwardOrder | None:
        """Begins a backward that gathers; says in which order gathers and reductions go. None if it gathers nothing.

        Args:
            sizes: Elements gathered at each position of backward's line.
            reach: Elements that may be gathered ahead.
        """
        places = [min(self._place(entry), len(sizes)) for entry in self._queue]
        self._order = BackwardOrder(sizes, places, reach) if any(sizes) else None
        return self._order

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

    def close(self, passed: Iterable[UnitGradients]) -> None:
        """Backward has moved on: nothing more comes for these units in this backward, they may go off as they are."""
        self._closed.update(map(id, passed))
        self.proceed()

    def collect(self, gradients: UnitGradients, index: int) -> None:
        """Takes one gradient; sends off what has become complete."""
        gradients.collect(index, deferred=not self.enabled, factor=self.factor)
        if self.enabled and gradients.complete:
            self.proceed()

    def proceed(self) -> None:
        """Sends off what is complete and whose turn it is."""
        while self.enabled and self._sent < len(self._queue) and self._is_done(self._queue[self._sent]):
            if self._order is not None and not self._order.allows(self._sent):
                return
            self._send_next()

    def _is_done(self, gradients: UnitGradients) -> bool:
        # What was late once came when backward had passed its block: only its gradients tell.
        closed = id(gradients) in self._closed and id(gradients) not in self._late
        return (gradients.complete or closed) and id(gradients) not in self._deferred

    def send(self, count: int) -> None:
        """Sends off the first ``count`` of the queue, complete or not, if this backward reduces: their place in the order has come."""
        while self.enabled and self._sent < count:
            self._send_next()

    def send_all(self) -> None:
        """Sends off what is left; what comes later is late."""
        self.send(len(self._queue))

    def has(self, count: int) -> bool:
        """Whether the first ``count`` of the queue are gone or done."""
        return not self.enabled or all(self._is_done(entry) for entry in self._queue[self._sent : count])

    def _send_next(self) -> None:
        self._sent += 1
        self._send(self._queue[self._sent - 1])

    def _send(self, gradients: UnitGradients) -> None:
        gradients.start_reduce()
        self._flying.append(gradients)
        while len(self._flying) > (_IN_FLIGHT if self._overlap else 0):
            self._flying.popleft().finish_reduce()

    def flush(self) -> None:
        """Ends a backward: sends what is left, in order; collective if ``enabled``."""
        self.send_all()
        if self.enabled:
            self._send_late()
        self._finish()
        for gradients in self.gradients:
            gradients.begin_backward()
            gradients.pool.clear()
        self._reset()

    def _send_late(self) -> None:
        """Reduces once more what arrived behind its place in the order, on any rank."""
        late = [entry for entry in self._queue if entry.has_local]
        if self._order is not None:
            answers = self._agree([entry.has_local for entry in self._queue])
            late = [entry for entry, anywhere in zip(self._queue, answers, strict=True) if anywhere]
            self._late.update(map(id, late))
        elif late:
            names = ", ".join(entry.unit.name for entry in late)
            warn_once(
                f"gradients of {names} arrived after the unit was reduced; it is reduced a second time. "
                "This is exact as long as every rank runs the module equally often"
            )
        if late:
            self._finish()  # a unit has one reduction at a time
        for entry in late:
            self._send(entry)
        if late and self._order is not None:
            self._sort()

    def _finish(self) -> None:
        while self._flying:
            self._flying.popleft().finish_reduce()

    def _reset(self) -> None:
        self._sent = 0
        self._order = None
        self._deferred.clear()
        self._closed.clear()

    def clear(self) -> None:
        """Forgets all gradients."""
        for gradients in self.gradients:
            gradients.clear()
        self._flying.clear()
        self._reset()


def _make_hook(reducer: Reducer, position: int, index: int, on_first: Callable[[], None]) -> Callable[[torch.Tensor], None]:
    gradients = reducer.gradients[position]

    def hook(param: torch.Tensor) -> None:
        on_first()
        reducer.collect(gradients, index)

    return hook
