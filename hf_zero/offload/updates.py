"""Update single units, and run updates in a thread beside the training loop."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hf_zero.core.optimizer.segments import OwnedSegment, SubGroupStepper
from hf_zero.core.units.unit import Unit
from hf_zero.observe import span, waiting
from hf_zero.offload.host_states import HostStates, SubGroup


class Work(Protocol):
    """An update in three parts: ``begin`` and ``finish`` run in the training thread, ``run`` may run in another thread."""

    def begin(self) -> None:
        """Reserve the memory that ``run`` writes to."""

    def run(self) -> None:
        """Compute the update, without using a device or changing the unit."""

    def finish(self) -> None:
        """Move the new shard to its storage."""


@dataclass
class UnitUpdate:
    """The update of one unit in place.

    Attributes:
        unit: The unit.
        sub_groups: The unit's sub-groups, each with the next one.
        grad: (shard_numel,), in host memory.
        factor: Factor of the gradient, applied first.
        stepper: Object that steps a sub-group.
        states: Store of masters and moments.
    """

    unit: Unit
    sub_groups: Sequence[tuple[SubGroup, SubGroup | None]]
    grad: torch.Tensor
    factor: float
    stepper: SubGroupStepper
    states: HostStates
    _target: torch.Tensor | None = field(default=None, init=False)  # (shard_numel,): buffer of the new shard; None: it is the master

    @property
    def trained(self) -> list[OwnedSegment]:
        """Return the segments that are updated, in order."""
        return [segment for sub_group, _ in self.sub_groups for segment in sub_group.segments if not segment.rests]

    def begin(self) -> None:
        self._target = None if self.unit.master is self.unit.shard else self.unit.shard_storage.outgoing(self.unit)

    def run(self) -> None:
        with span("update", self.unit.name):
            for sub_group, upcoming in self.sub_groups:
                self._step(sub_group, upcoming)

    def _step(self, sub_group: SubGroup, upcoming: SubGroup | None) -> None:
        target = self._target
        self.states.open(sub_group)
        if upcoming is not None:
            self.states.prepare(upcoming)
        trained = [segment for segment in sub_group.segments if not segment.rests]
        grads = [segment.within(self.grad) for segment in trained]
        lows = [None if target is None else segment.within(target) for segment in trained]
        self.stepper.step(trained, grads, self.factor, lows)
        if target is not None:
            for segment in sub_group.segments:
                if segment.rests:  # the complete shard is sent
                    segment.within(target).copy_(segment.tensor)
        self.states.close(sub_group)
        if target is not None:
            zero_gaps(target, sub_group)

    def finish(self) -> None:
        if self._target is not None:
            self.unit.shard_storage.send(self.unit)


def zero_gaps(flat: torch.Tensor, sub_group: SubGroup) -> None:
    """Zero the elements of ``sub_group`` outside its segments; a buffer may have any content there."""
    end = sub_group.range.start
    for segment in sorted(sub_group.segments, key=lambda segment: segment.range.start):
        flat[end : segment.range.start].zero_()
        end = segment.range.stop
    flat[end : sub_group.range.stop].zero_()


@dataclass(frozen=True)
class Underway:
    """The running update of a unit in the update thread, with the work of the training thread that follows it."""

    future: Future[None]
    finish: Callable[[], None]

    def wait(self) -> BaseException | None:
        """Wait until the update has ended; return its error."""
        with span("await_update"), waiting("offload", "update"):
            return self.future.exception()


class UpdateThread:
    """One thread that runs updates in the order of submission.

    The kernels divide a range over several threads themselves and release Python's lock while they run; this thread holds the lock
    only for a few calls per unit.

    Args:
        device: The training device. It becomes the thread's current one: waiting for a copy would otherwise initialise the first device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run ``work`` after all work that was submitted before; return its future."""
        with self._lock:
            if self._pool is None or self._process != os.getpid():  # a forked child has the object but no thread
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="hf_zero update", initializer=self._enter)
                self._process = os.getpid()
            return self._pool.submit(_without_grad, work)

    def _enter(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device.index)

    def drain(self) -> None:
        """Wait for all submitted work; its errors are those of its futures."""
        if self._pool is not None and self._process == os.getpid():
            self.submit(lambda: None).result()

    def close(self) -> None:
        """End the thread after all submitted work."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown(wait=True)
        self._pool = None


def in_update_thread() -> bool:
    """Return whether the caller runs in the thread of an engine's updates."""
    return getattr(_here, "updates", False)


_here = threading.local()


def _without_grad(work: Callable[[], None]) -> None:
    _here.updates = True
    # Each thread has modes of its own. Tensors of a script's groups are ordinary ones here: the script waits for this thread.
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        work()
