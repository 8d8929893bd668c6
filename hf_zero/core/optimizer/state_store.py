"""Where masters and moments live, and how an update reaches them: all on the training device, unless offload puts them elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from hf_zero.core.optimizer.sub_groups import SubGroupStepper
from hf_zero.core.units.layout import Range
from hf_zero.core.units.state import UnitState
from hf_zero.core.units.unit import Unit
from hf_zero.core.units.values import publish
from hf_zero.memory import host_memory
from hf_zero.native.passes import LOW_TYPES
from hf_zero.ops.host_optimizer import HostOptimizer

if TYPE_CHECKING:
    from hf_zero.core.optimizer.sharded import OwnedSegment, ShardedOptimizer


class StateStore:
    """The training device: every segment is there, and one step of the inner optimizer updates all. Offload has a subclass.

    Attributes:
        threads: The most threads of a native pass over host memory; None is torch's number.
    """

    threads: int | None = None

    def ranges(self, unit: Unit) -> Sequence[Range]:
        """The parts of ``unit``'s shard that are updated at a time; segments do not reach across their bounds."""
        return [Range(0, unit.layout.shard_numel)]

    def update(
        self, optimizer: ShardedOptimizer, grads: Sequence[torch.Tensor], factor: torch.Tensor, updated: Callable[[Unit], None]
    ) -> None:
        """Updates masters and shards; local but for what ``updated`` does.

        Args:
            optimizer: Its inner optimizer does the arithmetic.
            grads: This rank's gradients, (shard_numel,) per unit; may be overwritten.
            factor: 0-dim; what the gradients are multiplied with first.
            updated: Called with each unit in order, the same on every rank, when its shard has its new value. A unit that is not
                gathered may still be under way then.
        """
        by_unit = {id(unit): grad for unit, grad in zip(optimizer.units, grads, strict=True)}
        fresh = not optimizer.inner.state
        if not fresh and _pays_in_turn(optimizer):
            self._update_in_turn(optimizer, by_unit, factor, updated)
            return
        self._update_at_once(optimizer, by_unit, factor)
        if fresh:
            move_to_huge_pages(optimizer)
        for unit in optimizer.units:
            updated(unit)

    def _update_at_once(self, optimizer: ShardedOptimizer, by_unit: Mapping[int, torch.Tensor], factor: torch.Tensor) -> None:
        """One step of the inner optimizer itself."""
        inner = optimizer.inner
        if isinstance(inner, HostOptimizer) and _writes_shards(optimizer):
            lows = {segment.tensor: low for segment in optimizer.segments if (low := _low_of(segment)) is not None}
            _give_gradients(optimizer, by_unit)
            inner.step(grad_factor=float(factor), lows=lows)
            for unit in optimizer.units:
                unit.shard_storage.changed(unit)
        else:
            scale_(list(by_unit.values()), factor)
            _give_gradients(optimizer, by_unit)
            inner.step()
            publish(optimizer.units)
        for segment in optimizer.segments:
            segment.tensor.grad = None

    def _update_in_turn(
        self, optimizer: ShardedOptimizer, by_unit: Mapping[int, torch.Tensor], factor: torch.Tensor, updated: Callable[[Unit], None]
    ) -> None:
        """Unit by unit, so that one travels while the next is updated."""
        stepper = SubGroupStepper(optimizer.inner, next(iter(by_unit.values())).dtype, self.threads)
        writes_shards = _writes_shards(optimizer)
        for unit in optimizer.units:
            segments = optimizer.segments_of(unit)
            if segments:
                grads = [as_gradient(by_unit[id(unit)], segment) for segment in segments]
                stepper.step(segments, grads, float(factor), [_low_of(segment) for segment in segments] if writes_shards else None)
            unit.shard_storage.changed(unit) if writes_shards else publish([unit])
            updated(unit)
        stepper.finish()

    def expect(self, optimizer: ShardedOptimizer, scale: float | None) -> None:
        """A backward begins whose gradients complete a step and carry the loss scale ``scale``; None: another backward follows it."""

    def settle(self) -> None:
        """Waits for updates that are still under way, of all units."""

    def new_state(self, segment: OwnedSegment, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Zeros for the state ``name`` of a segment, of its shape, where such states rest."""
        return torch.zeros_like(segment.tensor, dtype=dtype)

    def adopt_states(self, optimizer: ShardedOptimizer) -> None:
        """Takes in states that somebody else has put into the inner optimizer (``load_state_dict``)."""

    def tiers(self, optimizer: ShardedOptimizer) -> Mapping[str, int]:
        """Bytes of this rank's offloaded state by the tier it rests on: ``host``, ``nvme``."""
        return {}

    def close(self) -> None:
        """Lets go of files and buffers."""


def move_to_huge_pages(optimizer: ShardedOptimizer) -> None:
    """Moments, which the inner optimizer made in its first step, go to huge pages."""
    for state in optimizer.inner.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = host_memory.moved(value)


def scale_(grads: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies in place; a factor of 1 that can be read for nothing costs nothing."""
    # On a CPU reading the factor is free and most steps need none; on a device it would stall, so one that lies there is not looked at.
    if factor.device.type == "cpu":
        value = float(factor)
        if value != 1.0:
            torch._foreach_mul_(list(grads), value)
    else:
        torch._foreach_mul_(list(grads), factor)


def _give_gradients(optimizer: ShardedOptimizer, by_unit: Mapping[int, torch.Tensor]) -> None:
    for segment in optimizer.segments:
        segment.tensor.grad = as_gradient(by_unit[id(segment.unit)], segment)


def _writes_shards(optimizer: ShardedOptimizer) -> bool:
    """Whether native passes unscale, update and write the 16-bit shards at once."""
    # A shard that rests elsewhere has a master of its own in fp32 training too, which no pass writes.
    return (
        isinstance(optimizer.inner, HostOptimizer)
        and _on_host(optimizer)
        and all(low is None or low.dtype in LOW_TYPES for low in map(_low_of, optimizer.segments))
    )


def _pays_in_turn(optimizer: ShardedOptimizer) -> bool:
    """Whether units are spread after the update by a network that the host drives; where it drives itself one launch for all is faster."""
    hooks = optimizer.inner._optimizer_step_pre_hooks or optimizer.inner._optimizer_step_post_hooks  # these expect one step of all
    spreads = any(unit.collectives.blocks_host and unit.layout.world > 1 and unit.state is UnitState.UNSHARDED for unit in optimizer.units)
    return spreads and not hooks and _on_host(optimizer)


def _on_host(optimizer: ShardedOptimizer) -> bool:
    return all(unit.collectives.topology.device.type == "cpu" for unit in optimizer.units[:1])


def _low_of(segment: OwnedSegment) -> torch.Tensor | None:
    """The part of the shard that a segment's new value is cast to; None where the master is the shard."""
    unit = segment.unit
    return None if unit.master is unit.shard else unit.shard[segment.range.start : segment.range.stop]


def as_gradient(shard: torch.Tensor, segment: OwnedSegment) -> torch.Tensor:
    """A segment's part of its unit's gradient, in the segment's type."""
    grad = shard[segment.range.start : segment.range.stop]
    return grad if grad.dtype == segment.tensor.dtype else grad.to(segment.tensor.dtype)
