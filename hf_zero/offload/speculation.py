"""Step units on copies during backward, before it is known whether ``step`` will compute the same update.

On a CPU backward needs the same cores, and the step takes longer: 1.13 (stage 2) and 1.11 (stage 3) of the step without offload, against
0.95 and 0.91 with updates that begin after backward (docs/benchmarks.md, offload on CPU ranks). So speculation is off there. Beside a
device the host is idle in backward, and at stages 1 and 2 nothing else overlaps with an update; no run on a GPU has measured the gain yet
(``xl-no-overlap`` of ``python -m benchmarks.gpu`` does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hf_zero.core.optimizer.clones import clone
from hf_zero.core.optimizer.master_parts import set_memory
from hf_zero.core.optimizer.segments import OwnedSegment, Segments, SubGroupStepper, update_with_lows
from hf_zero.core.units.layout import Range
from hf_zero.core.units.unit import Unit
from hf_zero.errors import StateError
from hf_zero.memory.buffers import HostMemory
from hf_zero.native.ranges import copy
from hf_zero.observe import span
from hf_zero.offload.host_states import SubGroup
from hf_zero.offload.updates import UnitUpdate, UpdateThread, zero_gaps


class Spares:
    """Pool of host memory for the second copies of states, up to a limit.

    Attributes:
        nbytes: Bytes allocated so far.

    Args:
        memory: Allocator of the memory.
        most_bytes: Limit of the pool in bytes.
    """

    def __init__(self, memory: HostMemory, most_bytes: int) -> None:
        self._memory = memory
        self._most_bytes = most_bytes
        self.nbytes = 0
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, wanted: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return a 1D tensor of the size and dtype of each of ``wanted``, with any content; None if that would exceed the limit."""
        found: list[torch.Tensor] = []
        for like in wanted:
            free = self._free.get((like.numel(), like.dtype))
            if free:
                found.append(free.pop())
            elif self.nbytes + like.nbytes <= self._most_bytes:
                self.nbytes += like.nbytes
                found.append(self._memory.empty(like.numel(), like.dtype))
            else:
                self.give(found)
                return None
        return found

    def give(self, tensors: Sequence[torch.Tensor]) -> None:
        """Return tensors to the pool once nothing reads them."""
        for tensor in tensors:
            self._free.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)


@dataclass
class _Shadow:
    """Copy of one segment that is stepped in place of the segment."""

    segment: OwnedSegment
    tensor: torch.Tensor
    present: dict[str, Any]  # states of the segment
    state: dict[str, Any]  # states of the copy: spare tensors, and clones of single numbers

    def fill(self, threads: int) -> None:
        """Copy the segment's states into the copy's states."""
        for name, value in self.present.items():
            if value.ndim:
                copy(self.state[name], value.view(-1), threads=threads)
            else:
                self.state[name] = value.clone()

    def install(self) -> list[torch.Tensor]:
        """Make the copy the segment's state; return the memory of the old state."""
        old = []
        for name, value in self.present.items():
            if value.ndim:
                old.append(value.data)
                value.data = self.state[name].data
            else:
                value.copy_(self.state[name])
        return old


@dataclass
class Speculation:
    """One unit's step on copies of its master and moments; ``begin``, ``run`` and ``finish`` make the copies the unit's state.

    [Note: speculative steps] During the backward that completes an optimizer step a unit is stepped as soon as its gradient is on the
    host, assuming no clipping and no overflow. The present values stay untouched, so nothing has to be undone. ``step`` compares the
    inputs of the speculation (values, gradient, factor, learning rate) with those that it is about to use. It either exchanges the memory
    of the two, or drops the copies and updates as usual. A gradient that was clipped, changed by hand, dropped by ``zero_grad`` or
    completed by another backward fails that comparison like any other change. Both ways do the same arithmetic on the same numbers.

    Attributes:
        unit: The unit.
        grad: The unit's gradient on the host.
        factor: Factor of the gradient, applied first.
        stepper: Object with the optimizer, its hyper-parameters by group, and the maximum number of threads.
        master: (shard_numel,) copy of the master.
        low: (shard_numel,): receives the new shard; None if the master is the shard.
        own_low: ``low`` is a spare tensor, not the buffer of the unit's shard storage.
        shadows: Copies of the unit's segments.
        spares: Pool of the copies' memory.
        future: The running step.
    """

    unit: Unit
    grad: torch.Tensor
    factor: float
    stepper: SubGroupStepper
    master: torch.Tensor
    low: torch.Tensor | None
    own_low: bool
    shadows: list[_Shadow]
    spares: Spares
    future: Future[None] | None = None
    _read: list[tuple[torch.Tensor, int]] = field(init=False)  # the input tensors, with their versions
    _target: torch.Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.unit.master is None:
            raise StateError(f"{self.unit.name} has no master on this rank; a step during backward needs one")
        states = [value for shadow in self.shadows for value in shadow.present.values()]
        parts = [shadow.segment.tensor for shadow in self.shadows]  # a script's writes to them have counts of their own
        with torch._C.DisableTorchFunctionSubclass():
            self._read = [(tensor, tensor._version) for tensor in (self.grad, self.unit.master, *states, *parts)]

    def begun(self) -> Future[None]:
        """Return the future of the step.

        Raises:
            StateError: The step was not submitted to the other thread.
        """
        if self.future is None:
            raise StateError(f"the step of a copy of {self.unit.name} was never begun")
        return self.future

    def step(self, settle: Callable[[Unit], None]) -> None:
        """Step the copies; runs in the other thread.

        Args:
            settle: Function that waits until the gradient can be read.
        """
        threads = self.stepper.threads
        with span("speculate", self.unit.name):
            settle(self.unit)
            copy(self.master, self._read[1][0], threads=threads)
            groups: list[dict[str, Any]] = [{**values, "params": []} for values in self.stepper.values]
            for shadow in self.shadows:
                shadow.fill(threads)
                groups[shadow.segment.group]["params"].append(shadow.tensor)
            other: Any = clone(self.stepper.optimizer, groups, {shadow.tensor: shadow.state for shadow in self.shadows})
            update_with_lows(
                other,
                [shadow.tensor for shadow in self.shadows],
                [shadow.segment.within(self.grad) for shadow in self.shadows],
                [None if self.low is None else shadow.segment.within(self.low) for shadow in self.shadows],
                self.factor,
                threads,
            )

    def fits(self, update: UnitUpdate) -> bool:
        """Return whether the speculation has computed the same as ``update`` would."""
        return (
            update.grad is self.grad
            and update.factor == self.factor
            and update.stepper.values == self.stepper.values
            and self.unit.master is self._read[1][0]
            and all(tensor._version == version for tensor, version in self._read)
            and {id(segment) for segment in update.trained} == {id(shadow.segment) for shadow in self.shadows}
            and all(
                (states := shadow.segment.state).keys() == shadow.present.keys()
                and all(states[name] is value for name, value in shadow.present.items())
                for shadow in self.shadows
            )
        )

    # -- as the unit's update

    def begin(self) -> None:
        self._target = None if self.low is None else self.unit.shard_storage.outgoing(self.unit)

    def run(self) -> None:
        self.begun().result()
        if self.low is None:  # the master is the shard, whose memory must not be exchanged
            copy(self._read[1][0], self.master, threads=self.stepper.threads)
        elif self._target is not None:
            sub_group = SubGroup(self.unit, Range(0, self.unit.layout.shard_numel), tuple(shadow.segment for shadow in self.shadows))
            zero_gaps(self.low, sub_group)
            if self.own_low:
                copy(self._target, self.low, threads=self.stepper.threads)

    def finish(self) -> None:
        unit, old = self.unit, [self.master]
        if self.low is not None:
            old = [self._read[1][0]]
            unit.own.master = self.master
            for shadow in self.shadows:
                set_memory(shadow.segment.tensor, shadow.tensor.data)
        for shadow in self.shadows:
            old += shadow.install()
        if self.low is not None and self._target is not None:
            if self.own_low:
                old.append(self.low)
            unit.shard_storage.send(unit)
        self.spares.give(old)

    def spare_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of ``spares`` that this speculation holds."""
        states = [value for shadow in self.shadows for value in shadow.state.values() if value.ndim]
        return [self.master, *states, *([self.low] if self.own_low and self.low is not None else [])]


class Speculator:
    """Starts speculative steps of units during backward, as long as there is memory for their copies.

    Args:
        thread: Thread of the steps.
        spares: Memory of the copies.
    """

    def __init__(self, thread: UpdateThread, spares: Spares) -> None:
        self._thread = thread
        self._spares = spares
        self._stepper: SubGroupStepper | None = None  # None if this backward completes no step
        self._segments = Segments()
        self._factor = 1.0
        self._speculations: dict[int, Speculation] = {}

    def expect(self, segments: Segments, stepper: SubGroupStepper | None, scale: float) -> None:
        """Prepare for a backward that is about to begin.

        Args:
            segments: Segments that the following step updates.
            stepper: Hyper-parameters of that step; None if another backward comes before it.
            scale: Loss scale of the gradients.
        """
        self._segments, self._stepper = segments, stepper
        self._factor = float(torch.ones((), dtype=torch.float32) / scale)  # bit for bit the divisor of a step without clipping

    def arrived(self, unit: Unit, grad: torch.Tensor, settle: Callable[[Unit], None]) -> None:
        """Start the speculation of ``unit``, whose gradient is reduced and can be read after ``settle(unit)``."""
        former = self._speculations.pop(id(unit), None)
        if former is not None:
            self._drop(former)
        speculation = self._make(unit, grad)
        if speculation is not None:
            speculation.future = self._thread.submit(partial(speculation.step, settle))
            self._speculations[id(unit)] = speculation

    def _make(self, unit: Unit, grad: torch.Tensor) -> Speculation | None:
        stepper, master = self._stepper, unit.master
        if stepper is None or master is None:
            return None
        present = {segment: segment.state for segment in self._segments.of(unit)}
        # Cut segments are views of one master, which a finished step replaces completely.
        if any(segment.rests for segment in present) or not present or not all(_can_be_copied(state) for state in present.values()):
            return None
        low = None if master is unit.shard else unit.shard_storage.outgoing(unit)
        own_low = low is not None and low.data_ptr() == unit.shard.data_ptr()  # backward reads the shard, which must not change
        wanted = [master, *(value for state in present.values() for value in state.values() if value.ndim)]
        taken = self._spares.take([*wanted, low] if low is not None and own_low else wanted)
        if taken is None:
            return None
        copy, rest = taken[0], iter(taken[1:])
        shadows = [
            _Shadow(
                segment,
                torch.nn.Parameter(segment.within(copy), requires_grad=False),
                dict(state),
                {name: next(rest) if value.ndim else value for name, value in state.items()},
            )
            for segment, state in present.items()
        ]
        low = next(rest) if own_low else low
        return Speculation(unit, grad, self._factor, stepper, copy, low, own_low, shadows, self._spares)

    def take(self, update: UnitUpdate) -> Speculation | None:
        """Return the speculation that computes the same as ``update``, if one has begun; else None."""
        speculation = self._speculations.pop(id(update.unit), None)
        if speculation is None:
            return None
        if speculation.fits(update) and not speculation.begun().cancel():  # a speculation that has not begun is dropped
            return speculation
        self._drop(speculation)
        return None

    def halt(self) -> None:
        """Drop speculations that have not begun at the end of backward: an update in place moves less memory, and the norm needs the
        processors.
        """
        for speculation in self._speculations.values():
            speculation.begun().cancel()

    def forget(self) -> None:
        """Drop all speculations, because no step follows."""
        for speculation in self._speculations.values():
            self._drop(speculation)
        self._speculations.clear()
        self._segments, self._stepper = Segments(), None

    def _drop(self, speculation: Speculation) -> None:
        """Free the memory of a speculation for reuse; the only thread that writes to it finishes this work before its next."""
        speculation.begun().cancel()
        self._spares.give(speculation.spare_tensors())


def _can_be_copied(state: Mapping[str, Any]) -> bool:
    """Return whether a segment has states and all of them are tensors."""
    return bool(state) and all(isinstance(value, torch.Tensor) for value in state.values())
