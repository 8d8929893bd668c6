"""Update offloaded state unit by unit in the order of forward; each unit's new shard is copied back while the next unit is updated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from hf_zero.core.optimizer.nested import set_state
from hf_zero.core.optimizer.script_states import NamedStates
from hf_zero.core.optimizer.segments import OwnedSegment, Segments, SubGroupStepper, master_of
from hf_zero.core.optimizer.state_store import StateStore, cast_runs, scale_
from hf_zero.core.units.layout import Range, UnitState
from hf_zero.core.units.unit import Unit, trained_of
from hf_zero.core.units.values import publish
from hf_zero.errors import StateError
from hf_zero.memory.buffers import HostMemory
from hf_zero.observe import logger, waiting
from hf_zero.offload.host_states import HostStates, SubGroup
from hf_zero.offload.script_states import WaitingStates
from hf_zero.offload.speculation import Spares, Speculator
from hf_zero.offload.updates import Underway, UnitUpdate, UpdateThread, Work
from hf_zero.ops.host_optimizers import HostOptimizer


@dataclass(frozen=True)
class OverlapPolicy:
    """Policy that selects when units are updated; the numbers are the same with every policy.

    Attributes:
        forward: Updates of sharded units continue after ``step``, while the next forward runs. Only for optimizers whose step changes
            only tensors of its own unit (``HostOptimizer``), and shard storages with an ``outgoing`` buffer for each unit.
        spare_bytes: Host memory for steps on copies during backward; 0 for none.
        threads: See ``StateStore``.
    """

    forward: bool = False
    spare_bytes: int = 0
    threads: int | None = None


class OffloadedStateStore(StateStore):
    """Store in which masters and moments of some units are on the host or in a file, and those of other units on the device.

    Attributes:
        speculator: Object that is notified of arriving gradients; None without steps during backward.

    Args:
        states: Store of the offloaded state.
        accumulation_dtype: Dtype of gradients.
        policy: Selects when units are updated.
        memory: Allocator for copies of states.
    """

    def __init__(self, states: HostStates, accumulation_dtype: torch.dtype, policy: OverlapPolicy, memory: HostMemory) -> None:
        self.states = states
        self.policy = policy
        self.threads = policy.threads
        self._offloaded: set[int] = set()  # ids of units
        self._accumulation_dtype = accumulation_dtype
        self._sub_groups: dict[int, list[SubGroup]] | None = None  # by id of the unit
        self._thread = UpdateThread(memory.device)
        self._spares = Spares(memory, policy.spare_bytes)
        self.speculator = Speculator(self._thread, self._spares) if policy.spare_bytes else None
        self._underway: list[Unit] = []
        self._last: Future[None] | None = None

    def take(self, unit: Unit) -> None:
        """Move the master of a new unit to its tier."""
        self._offloaded.add(id(unit))
        if self.states.tier != "host":
            self.in_files = self.in_files | {id(unit)}
        self.states.rest(unit)

    def holds(self, unit: Unit) -> bool:
        """Return whether ``unit``'s state is offloaded."""
        return id(unit) in self._offloaded

    def ranges(self, unit: Unit) -> Sequence[Range]:
        return self.states.ranges(unit) if self.holds(unit) else super().ranges(unit)

    def divides(self, unit: Unit) -> bool:
        return self.states.tier == "host" or not self.holds(unit)

    def bind(self, inner: torch.optim.Optimizer, units: Sequence[Unit], segments: Segments) -> None:
        super().bind(inner, units, segments)
        self._sub_groups = None
        self._watch_states()
        if self.speculator is not None:
            self.speculator.halt()
            self.speculator.forget()

    def _watch_states(self) -> None:
        """Let a script's looks at ``optimizer.state`` wait for updates that continue after a step."""
        state: Any = self.inner.state
        if self.policy.forward and type(state) in (defaultdict, NamedStates):
            set_state(self.inner, WaitingStates(state.default_factory, state))
            self.inner.state.settle = self.settle  # type: ignore[attr-defined]

    # -- updates ------------------------------------------------------------------------------------------------------

    def expect(self, scale: float | None) -> None:
        if self.speculator is not None:
            steps = scale is not None and self._overlaps()
            self.speculator.expect(self.segments, self._stepper() if steps else None, scale or 1.0)

    def halt(self) -> None:
        if self.speculator is not None:
            self.speculator.halt()

    def _stepper(self) -> SubGroupStepper:
        return SubGroupStepper(self.inner, self._accumulation_dtype, self.threads)

    def _overlaps(self) -> bool:
        """Return whether this step's updates may run in the other thread: not in the first step, which creates the states, nor if a
        learning rate is a tensor, which a scheduler changes in place, nor if a script sees the step or the memory of masters.
        """
        in_tensors = any(isinstance(value, torch.Tensor) for group in self.inner.param_groups for value in group.values())
        return self.policy.forward and bool(self.inner.state) and not (in_tensors or self.before_step or self.shares_masters())

    def update(self, grads: Sequence[torch.Tensor], factor: torch.Tensor, updated: Callable[[Unit], None]) -> None:
        self._update(grads, factor)
        for unit in trained_of(self.units):
            if not self.holds(unit):
                publish([unit])
            elif unit.state is UnitState.UNSHARDED:
                unit.own.settle()
            updated(unit)

    def _update(self, grads: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        self.settle()
        if self.in_files and self.inner.state:  # tensors that a script has put into the states
            self.adopt_states()
        by_unit = {id(unit): grad for unit, grad in zip(trained_of(self.units), grads, strict=True)}
        if self.before_step is not None:
            by_unit, factor = self._seen_by_hooks(by_unit, float(factor), self.before_step), torch.ones(())
        stepper, fresh = self._stepper(), not self.inner.state
        self._update_device(stepper, by_unit, factor)
        updates = self._updates(stepper, by_unit, float(factor))
        if self._overlaps():
            self._start(updates)
            return
        with self._noting_breaks():
            with waiting("offload", "updates on the host"):
                for update in updates:
                    update.begin()
                    update.run()
                    update.finish()
                self.states.settle()
            stepper.finish()
            if fresh and self.states.tier == "host":
                self.move_to_huge_pages()
            for unit in self.units:
                unit.shard_storage.flush()

    @contextmanager
    def _noting_breaks(self) -> Iterator[None]:
        """Refuse further steps if an update of states or shards in files breaks off inside the ``with``, by an error or an interrupt."""
        try:
            yield
        except BaseException as error:
            if self.in_files or any(unit.shard_storage.on_disk for unit in self.units):
                self.broken = (
                    f"an update of masters, moments or parameters in files broke off ({type(error).__name__}: {error}), and a part of them "
                    "has its new values: neither another step nor a save is possible. Load a checkpoint with its optimizer states "
                    "(engine.load_checkpoint), or start the run again"
                )
            self.states.put_back(self._all_sub_groups())
            raise

    def _seen_by_hooks(
        self, by_unit: Mapping[int, torch.Tensor], factor: float, before_step: Callable[[], None]
    ) -> dict[int, torch.Tensor]:
        """Return copies of the gradients in the masters' dtype, times ``factor``, which a script's pre-step hooks have seen and changed.

        Raises:
            StateError: A hook has removed a gradient.
        """
        seen = {}
        for unit in trained_of(self.units):
            grad, dtype = by_unit[id(unit)], master_of(unit).dtype
            seen[id(unit)] = grad.to(torch.promote_types(self._accumulation_dtype, dtype), copy=True).mul_(factor).to(dtype)
        for segment in self.segments.trained:
            segment.tensor.grad = segment.within(seen[id(segment.unit)])
        before_step()
        for segment in self.segments.trained:
            found, segment.tensor.grad = segment.tensor.grad, None
            if found is None:
                raise StateError(
                    "a step pre-hook set a gradient in optimizer.param_groups to None, which is not supported with an offloaded optimizer: "
                    "freeze the parameter (requires_grad_(False)), or fill the gradient with zeros"
                )
            segment.within(seen[id(segment.unit)]).copy_(found)
        return seen

    def _updates(self, stepper: SubGroupStepper, by_unit: Mapping[int, torch.Tensor], factor: float) -> list[UnitUpdate]:
        """Return the updates in the order of forward, but with unsharded units, for which ``step`` waits, first."""
        by_id = self._sub_groups_by_unit()
        units = [unit for unit in trained_of(self.units) if id(unit) in by_id]
        units.sort(key=lambda unit: unit.state is UnitState.SHARDED)  # stable
        sub_groups = [sub_group for unit in units for sub_group in by_id[id(unit)]]
        following = {id(sub_group): upcoming for sub_group, upcoming in zip_longest(sub_groups, sub_groups[1:])}
        return [
            UnitUpdate(
                unit,
                [(sub_group, following[id(sub_group)]) for sub_group in by_id[id(unit)]],
                by_unit[id(unit)],
                factor,
                stepper,
                self.states,
            )
            for unit in units
        ]

    def _start(self, updates: Sequence[UnitUpdate]) -> None:
        """Submit the updates to the update thread."""
        for update in updates:
            work: Work = (self.speculator.take(update) if self.speculator is not None else None) or update
            work.begin()
            self._underway.append(update.unit)
            update.unit.own.expect(Underway(self._thread.submit(partial(self._run, work)), work.finish))
        self._last = self._thread.submit(self._end)

    def _run(self, work: Work) -> None:
        with self._noting_breaks():
            work.run()
            self.states.flush()  # code that waits for the unit may read its master in the file

    def _end(self) -> None:
        with self._noting_breaks():
            self.states.settle()

    def settle(self) -> None:
        for unit in self._underway:  # an interrupt, or an error, leaves the others to the next call
            unit.own.settle()
        self._underway = []
        if self._last is not None:
            failure, self._last = self._last.exception(), None
            if failure is not None:
                raise failure

    def abandon_updates(self) -> None:
        self._thread.drain()
        self._await_all()
        for unit in self.units:
            with suppress(Exception):  # the load writes the shard again
                unit.shard_storage.flush()
        if self.broken:
            self.states.put_back(self._all_sub_groups())

    def _await_all(self) -> None:
        """Wait for the updates that are under way; log their first error instead of raising it."""
        failures = []
        while self._underway or self._last is not None:
            try:
                self.settle()
            except Exception as error:
                failures.append(error)
        if failures:
            logger.warning("an update that was under way has failed: %s", failures[0])

    def _update_device(self, stepper: SubGroupStepper, by_unit: Mapping[int, torch.Tensor], factor: torch.Tensor) -> None:
        segments = [segment for segment in self.segments.trained if not self.holds(segment.unit)]
        if segments:
            # As in ``_updates``, a native pass multiplies in fp32; in 16 bits the products would be rounded.
            native = isinstance(self.inner, HostOptimizer) and factor.device.type == "cpu"
            if not native:
                scale_([by_unit[id(unit)] for unit in trained_of(self.units) if not self.holds(unit)], factor)
            for run in cast_runs(segments, by_unit):
                grads = [segment.gradient(by_unit[id(segment.unit)]) for segment in run]
                stepper.step(run, grads, float(factor) if native else 1.0)

    def _sub_groups_by_unit(self) -> dict[int, list[SubGroup]]:
        """Return the sub-groups by id of their unit, in the order of forward; without units that have no segment on this rank."""
        if self._sub_groups is None:
            self._sub_groups = {
                id(unit): [_sub_group(unit, part, segments) for part in self.ranges(unit)]
                for unit in self.units
                if self.holds(unit) and (segments := self.segments.of(unit))
            }
        return self._sub_groups

    def _all_sub_groups(self) -> list[SubGroup]:
        return [sub_group for sub_groups in self._sub_groups_by_unit().values() for sub_group in sub_groups]

    # -- state from outside -------------------------------------------------------------------------------------------

    def new_state(self, segment: OwnedSegment, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.states.new_state(segment, name, dtype) if self.holds(segment.unit) else super().new_state(segment, name, dtype)

    def adopt_states(self) -> None:
        self._watch_states()
        self.states.adopt(self._all_sub_groups())

    def tiers(self, kept: Callable[[Unit], Sequence[torch.Tensor]]) -> Mapping[str, int]:
        held = [unit for unit in self.units if self.holds(unit)]
        tensors = [tensor for unit in held for tensor in kept(unit)]
        tensors += [unit.master for unit in held if unit.master is not None and unit.master is not unit.shard]
        return {self.states.tier: self.states.nbytes(sum(tensor.nbytes for tensor in tensors)) + self._spares.nbytes}

    def close(self) -> None:
        self._await_all()  # the states are not needed any more, and destroy() must not fail
        if self.speculator is not None:
            self.speculator.forget()
        self._thread.close()
        self._sub_groups = None
        self.states.close_all()
        super().close()


def _sub_group(unit: Unit, part: Range, segments: Sequence[OwnedSegment]) -> SubGroup:
    return SubGroup(unit, part, tuple(segment for segment in segments if segment.range.intersect(part).numel))
