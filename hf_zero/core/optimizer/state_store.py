"""Store masters and moments, and run updates on them: all on the training device, unless offload puts them elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hf_zero.core.optimizer.common_states import states_by_param
from hf_zero.core.optimizer.segments import OwnedSegment, Segments, SubGroupStepper, stepped
from hf_zero.core.units.layout import Range, UnitState
from hf_zero.core.units.unit import Unit, trained_of
from hf_zero.core.units.values import publish, shard_changed
from hf_zero.memory import host_memory
from hf_zero.native.passes import LOW_TYPES
from hf_zero.ops.host_optimizers import HostOptimizer

# Number of gradient elements that are cast to the masters' dtype at a time, at least one segment: 128 MiB in fp32.
_CAST_NUMEL = 1 << 25


class StateStore:
    """Store on the training device: every segment is there, and one step of the inner optimizer updates all. Offload has a subclass.

    ``ranges`` is called first; ``bind`` then sets the segments that it updates, until ``close``.

    Attributes:
        threads: Largest number of threads of a native pass over host memory; None is torch's number.
        inner: The torch optimizer that does the arithmetic.
        units: Trained units, in order.
        segments: Segments of the units.
        in_files: Ids of the units whose masters and states are kept in files.
        broken: Error of further steps, because an update in files has broken off and no load has followed; empty otherwise.
        before_step: Calls the script's pre-step hooks, when all segments have their gradients; None if there are none.
        shares_masters: Returns whether the script has tensors that share the memory of masters.
    """

    _may_skip = False  # inside ``updates_only_if``
    before_step: Callable[[], None] | None = None
    shares_masters: Callable[[], bool] = bool

    threads: int | None = None
    broken = ""
    in_files: frozenset[int] = frozenset()
    inner: torch.optim.Optimizer
    units: Sequence[Unit] = ()
    segments: Segments

    def ranges(self, unit: Unit) -> Sequence[Range]:
        """Return the ranges of ``unit``'s shard that are updated at a time; no segment crosses their bounds."""
        return [Range(0, unit.layout.shard_numel)]

    def divides(self, unit: Unit) -> bool:
        """Return whether segments of ``unit`` can be cut after they were laid out."""
        return True

    def bind(self, inner: torch.optim.Optimizer, units: Sequence[Unit], segments: Segments) -> None:
        """Set the segments that are updated; called again after segments were cut or units added."""
        self.inner, self.units, self.segments = inner, units, segments

    def update(self, grads: Sequence[torch.Tensor], factor: torch.Tensor, updated: Callable[[Unit], None]) -> None:
        """Update masters and shards; local except for ``updated``.

        Args:
            grads: This rank's gradients, (shard_numel,) per unit that is trained now; may be overwritten.
            factor: 0-dim factor by which the gradients are multiplied first.
            updated: Called with each of these units in order, the same on every rank, when its shard has its new value. The update of a
                sharded unit may still be running then.
        """
        by_unit = {id(unit): grad for unit, grad in zip(trained_of(self.units), grads, strict=True)}
        if not by_unit:  # all parameters are frozen now
            return
        fresh = not self.inner.state
        if not fresh and self._is_faster_by_unit():
            self._update_in_turn(by_unit, factor, updated)
            return
        self._update_at_once(by_unit, factor)
        if fresh:
            self.move_to_huge_pages()
        for unit in trained_of(self.units):
            updated(unit)

    def can_skip(self) -> bool:
        """Return whether ``updates_only_if`` serves the inner optimizer: torch's fused Adam or AdamW without hooks, stepped once for all
        segments. A skipped step makes no state, so all states must be there.
        """
        inner = self.inner
        if type(self) is not StateStore or type(inner) not in (torch.optim.Adam, torch.optim.AdamW) or self._is_faster_by_unit():
            return False
        seen = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks or hasattr(inner, "found_inf")
        fused = all(group["fused"] for group in inner.param_groups)
        return fused and not seen and all(segment.state for segment in self.segments.trained)

    @contextmanager
    def updates_only_if(self, finite: torch.Tensor | None) -> Iterator[None]:
        """Let updates inside the ``with`` leave masters and states as they are if ``finite``, 0-dim on their device, is false. The caller
        publishes the masters of a step that is taken: a skipped one must not write to shards (a zero may have another sign there).
        """
        if finite is None:
            yield
            return
        inner: Any = self.inner
        inner.grad_scale, inner.found_inf = None, finite.logical_not().float()  # torch.amp.GradScaler's interface
        self._may_skip = True
        try:
            yield
        finally:
            del inner.grad_scale, inner.found_inf
            self._may_skip = False

    def _publish(self) -> None:
        if not self._may_skip:
            publish(trained_of(self.units))

    def _update_at_once(self, by_unit: Mapping[int, torch.Tensor], factor: torch.Tensor) -> None:
        """Step the inner optimizer itself once; or over several runs of segments if gradients need a copy in the masters' dtype."""
        writes_shards = isinstance(self.inner, HostOptimizer) and self._writes_shards() and self.before_step is None
        if not writes_shards:
            scale_(list(by_unit.values()), factor)
        segments = self.segments.trained
        runs = cast_runs(segments, by_unit)
        if len(runs) > 1 and self.before_step is None:
            self._update_runs(runs, by_unit, factor, writes_shards)
            return
        for segment in segments:
            segment.tensor.grad = segment.gradient(by_unit[id(segment.unit)])
        if self.before_step is not None:
            self.before_step()
        if isinstance(self.inner, HostOptimizer) and writes_shards:
            lows: dict[torch.Tensor, torch.Tensor] = {segment.tensor: low for segment in segments if (low := segment.low) is not None}
            self.inner.step(grad_factor=float(factor), lows=lows)
            for unit in trained_of(self.units):
                shard_changed(unit)
        else:
            with stepped(segments):
                self.inner.step()
            self._publish()
        for segment in segments:
            segment.tensor.grad = None

    def _update_runs(
        self, runs: Sequence[Sequence[OwnedSegment]], by_unit: Mapping[int, torch.Tensor], factor: torch.Tensor, writes_shards: bool
    ) -> None:
        """Update run by run, so that a second copy exists for the gradients of one run only. Gradients that no native pass scales have been
        scaled already.
        """
        stepper = SubGroupStepper(self.inner, next(iter(by_unit.values())).dtype, self.threads)
        scale = float(factor) if writes_shards else 1.0  # a native pass runs on the host, where reading the factor costs nothing
        for run in runs:
            grads = [segment.gradient(by_unit[id(segment.unit)]) for segment in run]
            stepper.step(run, grads, scale, [segment.low for segment in run] if writes_shards else None)
            del grads  # otherwise these copies would live until the copies of the next run exist
        stepper.finish()
        if writes_shards:
            for unit in trained_of(self.units):
                shard_changed(unit)
        else:
            self._publish()

    def _update_in_turn(self, by_unit: Mapping[int, torch.Tensor], factor: torch.Tensor, updated: Callable[[Unit], None]) -> None:
        """Update unit by unit, so that one unit is all-gathered while the next is updated."""
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
        """Return whether native passes unscale, update and write the 16-bit shards in one pass."""
        # A shard that is kept on another tier has its own master in fp32 training too, which no native pass writes.
        return (
            isinstance(self.inner, HostOptimizer)
            and self._on_host()
            and all((low := segment.low) is None or low.dtype in LOW_TYPES for segment in self.segments)
        )

    def _is_faster_by_unit(self) -> bool:
        """Return whether updating unit by unit is faster: the all-gather of updated parameters needs the host and can overlap with updates.
        Otherwise one launch for all units is faster.
        """
        gathers = any(unit.collectives.blocks_host and unit.layout.world > 1 and unit.state is UnitState.UNSHARDED for unit in self.units)
        return gathers and self.before_step is None and self._on_host()

    def _on_host(self) -> bool:
        return all(unit.collectives.topology.device.type == "cpu" for unit in self.units[:1])

    def move_to_huge_pages(self) -> None:
        """Move the moments, which the inner optimizer made in its first step, to huge pages."""
        for state in states_by_param(self.inner).values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = host_memory.moved(value)

    def expect(self, scale: float | None) -> None:
        """Note that a backward begins whose gradients complete a step and have the loss scale ``scale``; None: another backward follows
        it.
        """

    def halt(self) -> None:
        """Note that all gradients of the step are reduced; their norm is computed next."""

    def settle(self) -> None:
        """Wait for running updates of all units."""

    def abandon_updates(self) -> None:
        """Wait for running updates whether they fail or not, because a load is about to replace their values; local."""

    def new_state(self, segment: OwnedSegment, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros of the segment's shape for its state ``name``, on the tier where such states are kept."""
        return torch.zeros_like(segment.tensor, dtype=dtype)

    def adopt_states(self) -> None:
        """Move states that were put into the inner optimizer from outside (``load_state_dict``) to their tier."""

    def tiers(self, kept: Callable[[Unit], Sequence[torch.Tensor]]) -> Mapping[str, int]:
        """Return the bytes of this rank's offloaded state by tier: ``host``, ``nvme``. ``kept`` returns the states of a unit."""
        return {}

    def close(self) -> None:
        """Free files and buffers, and drop the units and segments that ``bind`` set."""
        self.units, self.segments = (), Segments()


def cast_runs(segments: Sequence[OwnedSegment], by_unit: Mapping[int, torch.Tensor]) -> list[list[OwnedSegment]]:
    """Divide ``segments``, in order, into runs whose gradients are cast at a time; one run if they fit or nothing is cast.

    Args:
        segments: Segments that are updated.
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
    """Multiply ``grads`` in place, if there are any; a factor of 1 is skipped if reading the factor needs no wait for a device."""
    if not grads:
        return
    # On a CPU reading the factor costs nothing and most steps need no multiplication; on a device the host would have to wait for it, so
    # it is not read.
    if factor.device.type == "cpu":
        value = float(factor)
        if value != 1.0:
            torch._foreach_mul_(list(grads), value)
    else:
        torch._foreach_mul_(list(grads), factor)
