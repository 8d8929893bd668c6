"""Reduce gradients in an order that follows from the units and never from data."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol
from weakref import ref

import torch

from hf_zero.core.schedule.gradient_sums import GradientExchange
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.schedule.read_gradients import ShownGradients

_STAYS = nullcontext()


class HomeStream:
    """The stream that was current when a backward began; none if training runs in host memory.

    [Note: one stream for gradients] autograd runs the backward of an operation on the stream of its forward, so a block that computes on
    several streams produces gradients on several streams. They share one flat buffer, small gradients are copied into it some time after
    they arrive, and buffers are reused by other units. So all of this runs on one stream, which waits for the stream of each gradient that
    was computed on another one; the memory of that gradient is not reused earlier (``record_stream`` is expensive, but this case is rare).

    Attributes:
        is_host: Whether there is none.

    Args:
        device: Device where gradients are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_host = device.type == "cpu"
        self._device = device
        self._module: Any = torch.get_device_module(device) if device.type != "cpu" else None
        self._stream: Any = None

    def begin(self) -> None:
        """Begin a backward on the current stream, unless a backward is running already."""
        if self._module is not None and self._stream is None:
            self._stream = self._module.current_stream(self._device)

    def end(self) -> None:
        """End the backward: later work on the current stream waits for the work on this stream."""
        stream, self._stream = self._stream, None
        if stream is not None and (current := self._module.current_stream(self._device)) != stream:
            current.wait_stream(stream)

    def entered(self, grad: torch.Tensor | None = None) -> AbstractContextManager[None]:
        """Return a context in which this stream is the current one. The stream waits for ``grad``, if that was computed on another
        stream.
        """
        if self._stream is None or (current := self._module.current_stream(self._device)) == self._stream:
            return _STAYS
        if grad is not None:
            self._stream.wait_stream(current)
            for part in (grad._indices(), grad._values()) if grad.is_sparse else (grad,):
                part.record_stream(self._stream)
        entered: AbstractContextManager[None] = self._module.stream(self._stream)
        return entered


# Number of reductions in flight: one is on the network while the next buffer fills. A second one would keep another flat buffer allocated.
_IN_FLIGHT = 1
_HOST = torch.device("cpu")
AT_THE_END = sys.maxsize  # position of units that are sent when backward is over


class BackwardOrder:
    """The order of reductions and unshards in a backward.

    [Note: one order] If each unshard and reduction were issued as soon as possible, ranks that skip blocks would issue them in other
    orders: the rank that computes a block reduces it between two unshards, the rank that skipped it at the end. On nccl these two wait for
    each other: an operation also delays all operations that are issued after it, so all operations on several communicators need one order.
    Therefore both kinds have their positions in one order. The unshard of a block may be issued once the block is in use from which
    prefetching reaches it. The reductions of all blocks that backward has passed by then are issued before it, complete or not, and no
    other reduction is. Normally this delays nothing: when a block begins, the blocks before it are complete. Every rank then issues the
    same sequence, and each collective depends only on earlier ones (a rank waits only for collectives that it has issued before), so no
    circular wait is possible. Gradients that arrive after their position are late, [Note: late gradients].

    Attributes:
        issued: Number of positions of the order that have been issued; written by the reducer.

    Args:
        sizes: Elements that the unshard at each position of the order allocates; 0 where nothing is unsharded.
        positions: For each reduction, in the order in which they are sent, the position whose backward completes it, rising; ``len(sizes)``
            for reductions at the end.
        reach: Elements that may be unsharded ahead of use; at least one block unless 0.
    """

    def __init__(self, sizes: Sequence[int], positions: Sequence[int], reach: int) -> None:
        self.issued = 0
        self._before = [0] * len(sizes)
        self._opens = [0] * len(positions)  # for each reduction, the number of issued positions from which on it may be sent
        unshards = [position for position, size in enumerate(sizes) if size]
        first, ahead = 0, 0  # the first unshard that prefetching reaches from here, and the elements up to this one
        for index, position in enumerate(unshards):
            ahead += sizes[position]
            while first < index and ahead > reach:
                ahead -= sizes[unshards[first]]
                first += 1
            user = position if reach <= 0 else unshards[first - 1] if first else 0
            self._before[position] = bisect_left(positions, user)
        passed = 0
        for reduction in range(len(positions)):
            while passed < len(unshards) and self._before[unshards[passed]] <= reduction:
                passed += 1
            self._opens[reduction] = unshards[passed - 1] + 1 if passed else 0

    def before(self, position: int) -> int:
        """Return the number of reductions that are issued before the unshard at ``position``."""
        return self._before[position]

    def allows(self, reduction: int) -> bool:
        """Return whether all unshards that precede ``reduction`` in the order are issued."""
        return self.issued >= self._opens[reduction]


class OutsideGradients(Protocol):
    """Gradients of parameters that require one and that no unit trains."""

    def waits(self) -> bool:
        """Return whether this rank has such a gradient; local."""

    def average(self) -> None:
        """Replace these gradients by their means over ranks, in ``param.grad``; collective."""


class Reducer:
    """Reducer of each unit once per backward, in the same order on every rank: last unit first, or the order of backward's unshards.

    [Note: order of reductions] A unit is sent when all its gradients have arrived, or backward has passed its block (``close``), and all
    units before it in the queue have been sent. Units that are incomplete when backward ends (a branch that this rank skipped) are sent
    then, with zeros for missing gradients. So every rank sends the same sequence whatever its data. Where backward unshards too, unshards
    and reductions have one order ([Note: one order]): it may delay a unit, and may send it before it is complete.

    While backward computes, at most ``_IN_FLIGHT`` reductions are in flight in each hop ([Note: hops of a reduction]); when there is one
    more, the reducer waits for the oldest.

    Attributes:
        gradients: One entry per trainable unit, in the order of the model.
        exchange: Returns the hops of a reduction, except for units with an exchange of their own.
        shown: Gradients that scripts see in ``param.grad``.
        layouts: Number of times that the set of units has changed.
        piecemeal: Whether each parameter gets several gradients in the running backward: they are summed, and units are sent when it ends.
        added_to: Names of parameters whose written gradients a backward has added to, see [Note: a gradient written between micro-steps].
        outside: Refers to the gradients that no unit takes; None if there can be none.
        voted: Whether the vote at the end of the running backward has begun.

    Args:
        gradients: See the attribute.
        exchange: See the attribute.
        overlap: Whether reductions run while backward continues.
        ask: Begins a vote; returns a function that waits for it and returns for each flag whether it is True on any rank.
        gather_texts: Collective function; returns the texts of all ranks.
        device: Device where gradients are computed.
    """

    def __init__(
        self,
        gradients: Sequence[UnitGradients],
        exchange: GradientExchange,
        overlap: bool,
        ask: Callable[[list[bool]], Callable[[], list[bool]]],
        gather_texts: Callable[[str], list[str]],
        device: torch.device = _HOST,
    ) -> None:
        self.gradients = list(gradients)
        self.exchange = exchange
        self.shown = ShownGradients(self.gradients)
        self._reduces = True  # whether the running backward reduces anything
        self._completes = True  # whether its gradients complete an optimizer step
        self._factor = 1.0
        self.layouts = 0
        self.piecemeal = False
        self.added_to: dict[str, None] = {}
        self.outside: ref[OutsideGradients] | None = None
        self.voted = False
        self._home = HomeStream(device)
        self._overlap = overlap
        self._ask = ask
        self._gather_texts = gather_texts
        self._queue: list[UnitGradients] = []
        self._positions: Mapping[int, int] = {}  # by id of the entry
        self._order: BackwardOrder | None = None  # order of this backward's reductions and unshards; None if it unshards nothing
        self._sent = 0  # entries of the queue that were sent in this backward
        self._flying: list[deque[UnitGradients]] = [deque()]  # for each hop, the units whose hop is in flight
        self._sort()

    def _sort(self) -> None:
        self._queue = [entry for entry in self.gradients[::-1] if not entry.unit.rests]
        self._queue.sort(key=lambda entry: (entry.was_late, self._position(entry)))  # stable

    def _position(self, entry: UnitGradients) -> int:
        return AT_THE_END if entry.was_late else self._positions.get(id(entry), AT_THE_END)

    # -- one backward -------------------------------------------------------------------------------------------------

    def begin(self, reduces: bool, factor: float = 1.0, completes: bool = True) -> None:
        """Begin a backward, or record that the running backward is a micro-step.

        Args:
            reduces: The backward reduces its gradients; otherwise each rank sums them up until a backward that reduces.
            factor: Factor of the gradients.
            completes: The gradients complete an optimizer step.
        """
        self._home.begin()
        self._reduces, self._factor, self._completes = reduces and self.exchange.reduces, factor, completes

    def order_with_unshards(self, positions: Mapping[int, int], sizes: Sequence[int], reach: int) -> None:
        """Compute one order for the unshards and reductions of a backward that unshards, the same on every rank.

        Args:
            positions: For each entry of ``gradients``, by id, the position in backward's order whose block completes it; entries that are
                missing are sent at the end.
            sizes: Number of elements unsharded at each position of backward's order; may be 0.
            reach: Number of elements that may be unsharded ahead of use.
        """
        if positions is not self._positions:
            self._positions = positions
            self._sort()
        completed = [min(self._position(entry), len(sizes)) for entry in self._queue]
        self._order = BackwardOrder(sizes, completed, reach) if any(sizes) else None

    def collect(self, entry: UnitGradients, index: int) -> None:
        """Take the gradient of parameter ``index`` of a unit, and send units that have become complete."""
        collected, param = entry.collected, entry.unit.params[index]
        grad = None if param is None else param.grad
        if param is None or grad is None or index in collected.in_place:
            return
        param.grad = None
        collected.piecemeal |= self.piecemeal
        # The gradient of a unit that was frozen until now stays on this rank until the step.
        wide = not self._reduces or self.piecemeal or entry.unit.rests
        if self._home.is_host:
            complete = collected.add(index, grad, entry.exchange.scale * self._factor, wide)
        else:
            with self._home.entered(grad):
                complete = collected.add(index, grad, entry.exchange.scale * self._factor, wide)
        del grad  # its memory is free before units are sent
        if complete and self._reduces:
            self.proceed()

    def close(self, passed: Sequence[UnitGradients]) -> None:
        """Note that backward has passed these units: they get no more gradients in this backward, and may be sent."""
        for entry in passed:
            entry.passed = True
        self.proceed()

    def proceed(self) -> None:
        """Send the units that are complete or passed, as far as the order allows."""
        while self._reduces and self._sent < len(self._queue) and self._queue[self._sent].done:
            if self._order is not None and not self._order.allows(self._sent):
                return
            self._send_up_to(self._sent + 1)

    def send_before_unshard(self, position: int) -> None:
        """Send the units that precede the unshard at ``position`` in the order, complete or not, because this unshard is issued now."""
        if self._order is not None:
            self._send_up_to(self._order.before(position))

    def is_ready_for_unshard(self, position: int) -> bool:
        """Return whether no unit would be sent incomplete if the unshard at ``position`` were issued now."""
        if self._order is None or not self._reduces:
            return True
        return all(entry.done for entry in self._queue[self._sent : self._order.before(position)])

    def issued_up_to(self, count: int) -> None:
        """Note that the unshards of the first ``count`` positions are issued."""
        if self._order is not None:
            self._order.issued = max(self._order.issued, count)

    def send_all(self) -> None:
        """Send all units that were not sent; gradients that arrive later are late."""
        self._send_up_to(len(self._queue))

    def _send_up_to(self, count: int) -> None:
        """Send the first ``count`` units of the queue, complete or not, if this backward reduces."""
        if not self._reduces or self._sent >= count:
            return
        with self._home.entered():
            while self._sent < count:
                self._sent += 1
                self._send(self._queue[self._sent - 1], self._completes)

    def _send(self, entry: UnitGradients, completes: bool, late: bool = False) -> None:
        entry.start_reduce(completes, late)
        self._flying[0].append(entry)
        self._finish(_IN_FLIGHT if self._overlap else 0)

    def _finish(self, leave: int = 0) -> None:
        """Wait for all reductions in flight except the ``leave`` newest ones of each hop, and start their next hops."""
        for hop, flying in enumerate(self._flying):
            while len(flying) > leave:
                entry = flying.popleft()
                entry.finish_hop()
                if entry.start_hop():
                    if len(self._flying) == hop + 1:
                        self._flying.append(deque())
                    self._flying[hop + 1].append(entry)

    def flush(self, error: str = "") -> str:
        """End a backward: send the remaining units, in order; collective if it reduces.

        Args:
            error: The error with which the backward failed on this rank, or "".

        Returns:
            Errors of other ranks, if the ranks have voted; otherwise "".
        """
        self.send_all()
        with self._home.entered():
            answers = self._ask_for_late(error) if self._reduces else None
            self.voted = answers is not None
            self._finish()
            errors = self._reduce_late(answers(), error) if answers is not None else ""
            for entry in self.gradients:
                entry.begin_backward()
                entry.collected.pool.clear()
        self._home.end()
        if self._reduces and self._completes:
            self.shown.begin()
        else:
            self.shown.reads.open(complete=False)
        self._reset()
        return errors

    def complete(self, defers: bool) -> None:
        """Reduce gradients that earlier backwards have kept on this rank, if no backward completes the optimizer step; collective.

        Args:
            defers: Backwards may have deferred all reductions; otherwise only late gradients remain.
        """
        if not defers:
            self._reduce_late(self._ask(self._votes("", completes=True))(), "")
        elif self.exchange.reduces:
            self._reduces = self._completes = True
            self.flush()

    # -- what is trained, see [Note: trained parameters] ------------------------------------------------------------------------

    def train(self, gradients: Sequence[UnitGradients]) -> None:
        """Reduce the units of ``gradients``, in the model's order, from now on, except for units that are frozen at present; local."""
        self.gradients[:] = gradients
        self.layouts += 1
        self._positions = {}
        self._sort()

    def take_waiting(self, entries: Sequence[UnitGradients], waiting: Mapping[int, torch.Tensor]) -> None:
        """Reduce this rank's gradients of units that the backwards of this step have not reduced; collective.

        Args:
            entries: Gradients of these units, in the model's order.
            waiting: Gradients of this rank that are still unsharded, by id of the parameter.
        """
        for entry in entries:
            for index, param in enumerate(entry.unit.params):
                if id(param) in waiting:
                    entry.collected.add(index, waiting[id(param)], entry.exchange.scale * self._factor, wide=True)
        for entry in entries:
            self._send(entry, completes=True)
        self._finish()

    def mean_of_waiting(self, name: str, grad: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
        """Return the mean over ranks of a gradient that no backward of this step reduces, with the loss scale; collective.

        Args:
            name: Name of the parameter.
            grad: The gradient on this rank; None if there is none.
            shape: Its shape.

        Returns:
            A new tensor of that shape, in the type of sums over micro-steps; None if no rank has a gradient.
        """
        if not self.exchange.collectives.data.any_rank(grad is not None, f"{name}: gradient"):
            return None
        return self.mean_of(name, grad, shape, self._factor)

    def mean_of(self, name: str, grad: torch.Tensor | None, shape: torch.Size, factor: float = 1.0) -> torch.Tensor:
        """Return the mean of ``factor * grad`` over ranks; None counts as zeros. Collective; arguments and result as above."""
        network, policy = self.exchange.collectives.data, self.exchange.policy
        mean = torch.zeros(shape, dtype=policy.accumulation_dtype, device=network.topology.device)
        if grad is not None:
            mean.add_(grad.detach().to_dense() if grad.is_sparse else grad.detach()).mul_(self.exchange.scale * factor)
        network.all_reduce(mean, f"{name}: gradient").wait()
        return mean.mul_(policy.post_scale)

    def _ask_for_late(self, error: str) -> Callable[[], list[bool]] | None:
        """Collect late gradients, and begin the vote on all ranks' late gradients; None if another backward will.

        [Note: late gradients] Which gradients are late depends on a rank's data (a layer that is recomputed in pieces, whose number
        varies). So the ranks vote: at the end of each backward that unshards, whose duration hides the cost; otherwise at the end of the
        backward that completes an optimizer step. The vote begins when the last unit has been sent, and is read when the reductions have
        ended, [Note: votes behind data]. Late gradients are then reduced once more, after their position in the order; until then they are
        kept in the accumulation dtype. A unit that was late once is sent when backward is over from then on.
        """
        for entry in self._queue:
            entry.collected.set_aside()
        return self._ask(self._votes(error, self._completes)) if self._order is not None or self._completes else None

    def _votes(self, error: str, completes: bool) -> list[bool]:
        outside = self.outside() if self.outside is not None else None
        waits = outside is not None and completes and outside.waits()
        return [bool(error), waits, *(entry.collected.late for entry in self._queue)]

    def _reduce_late(self, answers: Sequence[bool], error: str) -> str:
        """Reduce the units for which any rank has voted (``answers``); collective. The argument and the result are those of ``flush``."""
        if answers[0]:
            return "; ".join(text for text in self._gather_texts(error) if text)
        if answers[1] and self.outside is not None and (outside := self.outside()) is not None:
            outside.average()
        late = [entry for entry, anywhere in zip(self._queue, answers[2:], strict=True) if anywhere]
        if not late:
            return ""
        self._finish()  # a unit has one reduction at a time
        for entry in late:
            entry.was_late = True
            self._send(entry, self._completes, late=True)
        self._finish()
        self._sort()
        return ""

    def clear(self, shows: bool = False) -> None:
        """Discard all gradients, including gradients that scripts have set; ``shows``: keep gradients that ``param.grad`` shows."""
        self._home.end()
        self.added_to.clear()
        self.shown.reads.drop()
        if not shows:
            self.shown.end()
        self.shown.replaced = False
        for entry in self.gradients:
            entry.clear()
        for flying in self._flying:
            flying.clear()
        self._reset()

    def _reset(self) -> None:
        self._sent, self.voted = 0, False
        self._order = None
        self.piecemeal = False
