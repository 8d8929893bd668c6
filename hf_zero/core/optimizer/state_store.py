"""Where masters and moments live, and how an update reaches them: all on the training device, unless offload puts them elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hf_zero.core.optimizer.segments import OwnedSegment, Segments, SubGroupStepper
from hf_zero.core.units.layout import Range, UnitState
from hf_zero.core.units.unit import Unit, trained_of
from hf_zero.core.units.values import publish, shard_changed
from hf_zero.memory import host_memory
from hf_zero.native.passes import LOW_TYPES
from hf_zero.ops.host_optimizer import HostOptimizer

# Elements of gradients that are cast to the masters' type at a time, a segment at least: 128 MiB in fp32.
_CAST_NUMEL = 1 << 25


class StateStore:
    """The training device: every segment is there, and one step of the inner optimizer updates all. Offload has a subclass.

    ``ranges`` is asked first; ``bind`` then gives it what it updates, until ``close``.

    Attributes:
        threads: The most threads of a native pass over host memory; None is torch's number.
        inner: The torch optimizer that does the arithmetic.
        units: Trained units, in order.
        segments: Their segments.
        in_files: Ids of the units whose masters and states rest in files.
    """

    threads: int | None = None
    in_files: frozenset[int] = frozenset()
    inner: torch.optim.Optimizer
    units: Sequence[Unit] = ()
    segments: Segments

    def ranges(self, unit: Unit) -> Sequence[Range]:
        """Return the parts of ``unit``'s shard that are updated at a time; segments do not reach across their bounds."""
        return [Range(0, unit.layout.shard_numel)]

    def divides(self, unit: Unit) -> bool:
        """Return whether segments of ``unit`` can be cut after they were laid out."""
        return True

    def bind(self, inner: torch.optim.Optimizer, units: Sequence[Unit], segments: Segments) -> None:
        """Says what is updated; again after segments were cut or units added."""
        self.inner, self.units, self.segments = inner, units, segments

    def update(self, grads: Sequence[torch.Tensor], factor: torch.Tensor, updated: Callable[[Unit], None]) -> None:
        """Update masters and shards; local except for the calls of ``updated``.

        Args:
            grads: This rank's gradients, (shard_numel,) per unit that does not rest; may be overwritten.
            factor: 0-dim; what the gradients are multiplied with first.
            updated: Called with each of these units in order, the same on every rank, when its shard has its new value. The update of a
                sharded unit may still be under way then.
        """
        by_unit = {id(unit): grad for unit, grad in zip(trained_of(self.units), grads, strict=True)}
        fresh = not self.inner.state
        if not fresh and self._pays_in_turn():
            self._update_in_turn(by_unit, factor, updated)
            return
        self._update_at_once(by_unit, factor)
        if fresh:
            self.move_to_huge_pages()
        for unit in trained_of(self.units):
            updated(unit)

    def _update_at_once(self, by_unit: Mapping[int, torch.Tensor], factor: torch.Tensor) -> None:
        """One step of the inner optimizer itself, or, where gradients need a copy in the masters' type, several over runs of segments."""
        writes_shards = isinstance(self.inner, HostOptimizer) and self._writes_shards()
        if not writes_shards:
            scale_(list(by_unit.values()), factor)
        segments = self.segments.trained
        runs = cast_runs(segments, by_unit)
        if len(runs) > 1 and not self._has_hooks():
            self._update_runs(runs, by_unit, factor, writes_shards)
            return
        for segment in segments:
            segment.tensor.grad = segment.gradient(by_unit[id(segment.unit)])
        if isinstance(self.inner, HostOptimizer) and writes_shards:
            lows = {segment.tensor: low for segment in segments if (low := segment.low) is not None}
            self.inner.step(grad_factor=float(factor), lows=lows)
            for unit in trained_of(self.units):
                shard_changed(unit)
        else:
            self.inner.step()
            publish(trained_of(self.units))
        for segment in segments:
            segment.tensor.grad = None

    def _update_runs(
        self, runs: Sequence[Sequence[OwnedSegment]], by_unit: Mapping[int, torch.Tensor], factor: torch.Tensor, writes_shards: bool
    ) -> None:
        """Run by run, so that there is a second copy of the gradients of one run only; those that no pass scales are scaled already."""
        stepper = SubGroupStepper(self.inner, next(iter(by_unit.values())).dtype, self.threads)
        scale = float(factor) if writes_shards else 1.0  # a pass runs on the host, where reading the factor is free
        for run in runs:
            grads = [segment.gradient(by_unit[id(segment.unit)]) for segment in run]
            stepper.step(run, grads, scale, [segment.low for segment in run] if writes_shards else None)
            del grads  # else they last until those of the next run are made
        stepper.finish()
        if writes_shards:
            for unit in trained_of(self.units):
                shard_changed(unit)
        else:
            publish(trained_of(self.units))

    def _update_in_turn(self, by_unit: Mapping[int, torch.Tensor], factor: torch.Tensor, updated: Callable[[Unit], None]) -> None:
        """Unit by unit, so that one is all-gathered while the next is updated."""
        stepper = SubGroupStepper(self.inner, next(iter(by_unit.values())).dtype, self.threads)
        writes_shards = self._writes_shards()
        for unit in trained_of(self.units):
            segments = self.segments.trained_of(unit)
            if segments:
                grads = [segment.gradient(by_unit[id(unit)]) for segment in segments]
                stepper.step(segments, grads, float(factor), [segment.low for segment in segments] if writes_shards else None)
            shard_changed(unit) if writes_shards else publish([unit])
            updated(unit)
        stepper.finish()

    def _writes_shards(self) -> bool:
        """Return whether native passes unscale, update and write the 16-bit shards at once."""
        # A shard that rests elsewhere has a master of its own in fp32 training too, which no pass writes.
        return (
            isinstance(self.inner, HostOptimizer)
            and self._on_host()
            and all((low := segment.low) is None or low.dtype in LOW_TYPES for segment in self.segments)
        )

    def _pays_in_turn(self) -> bool:
        """Whether the all-gather of updated parameters needs the host, and can overlap with updates; else one launch for all is faster."""
        gathers = any(unit.collectives.blocks_host and unit.layout.world > 1 and unit.state is UnitState.UNSHARDED for unit in self.units)
        return gathers and not self._has_hooks() and self._on_host()

    def _has_hooks(self) -> bool:
        """Return whether hooks of the inner optimizer expect one step of all."""
        return bool(self.inner._optimizer_step_pre_hooks or self.inner._optimizer_step_post_hooks)

    def _on_host(self) -> bool:
        return all(unit.collectives.topology.device.type == "cpu" for unit in self.units[:1])

    def move_to_huge_pages(self) -> None:
        """Moments, which the inner optimizer made in its first step, go to huge pages."""
        for state in self.inner.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = host_memory.moved(value)

    def expect(self, scale: float | None) -> None:
        """A backward begins whose gradients complete a step and carry the loss scale ``scale``; None: another backward follows it."""

    def halt(self) -> None:
        """All gradients of the step are reduced; their norm comes next."""

    def settle(self) -> None:
        """Waits for updates that are still under way, of all units."""

    def new_state(self, segment: OwnedSegment, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Zeros for the state ``name`` of a segment, of its shape, where such states rest."""
        return torch.zeros_like(segment.tensor, dtype=dtype)

    def adopt_states(self) -> None:
        """Moves states that were put into the inner optimizer from outside (``load_state_dict``) to where they rest."""

    def tiers(self, kept: Callable[[Unit], Sequence[torch.Tensor]]) -> Mapping[str, int]:
        """Return bytes of this rank's offloaded state by the tier it rests on: ``host``, ``nvme``. ``kept``: the states of a unit."""
        return {}

    def close(self) -> None:
        """Frees files and buffers, and forgets what ``bind`` gave."""
        self.units, self.segments = (), Segments()


def cast_runs(segments: Sequence[OwnedSegment], by_unit: Mapping[int, torch.Tensor]) -> list[list[OwnedSegment]]:
    """Return ``segments`` in order, cut into runs whose gradients are cast at a time; one run where they fit or nothing is cast.

    Args:
        segments: What is updated.
        by_unit: The gradient of each unit, (shard_numel,), by the unit's id.
    """
    runs: list[list[OwnedSegment]] = [[]]
    total = 0
    for segment in segments:
        numel = segment.range.numel if by_unit[id(segment.unit)].dtype != segment.tensor.dtype else 0
        if total and total + numel > _CAST_NUMEL:
            runs.append([])
            total = 0
        runs[-1].append(segment)
        total += numel
    return runs


def scale_(grads: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies in place, if there is anything; a factor of 1 that can be read for nothing costs nothing."""
    if not grads:
        return
    # On a CPU reading the factor is free and most steps need none; on a device it would stall, so one that lies there is not looked at.
    if factor.device.type == "cpu":
        value = float(factor)
        if value != 1.0:
            torch._foreach_mul_(list(grads), value)
    else:
        torch._foreach_mul_(list(grads), factor)
