"""Gradients of units whose shards several groups of ranks hold: summed inside the group, and once per optimizer step over the groups."""

from __future__ import annotations

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.core.schedule.gradients import BufferPool, GradientExchange, GradientPlace, UnitGradients
from hf_zero.core.units.unit import Unit
from hf_zero.errors import StateError


class ReplicatedGradients(UnitGradients):
    """The flat gradient of one trainable unit, whose shard other groups hold too.

    [Note: two sums] A reduction sums over the ranks of the shard group, and micro-steps are added up there (``_partial``). The backward
    that completes an optimizer step sends each unit's sum to the replicas as soon as its reduction has ended, as a further part of it
    ([Note: parts of a reduction]). What is late comes through both parts once more. One
    micro-step's sum travels in the type that its reduction had, that of several in the accumulation type. ``post_scale`` comes last:
    until then fp16 has the headroom that ``pre_scale`` gave it.

    Args:
        unit: The unit.
        exchange: How gradients become one inside the shard group.
        pool: Of flat buffers.
        place: Where sums are kept.
        replicas: The network of the ranks that hold this shard.
    """

    def __init__(
        self, unit: Unit, exchange: GradientExchange, pool: BufferPool, place: GradientPlace | None, replicas: Collectives
    ) -> None:
        super().__init__(unit, exchange, pool, place)
        self._replicas = replicas
        self._partial = False  # ``shard`` is a sum over the shard group alone, without ``post_scale``
        self._waiting: torch.Tensor | None = None  # what goes to the replicas next, in the type in which it goes
        self._replicating: Pending | None = None

    def _take(self, received: torch.Tensor, travelled: torch.dtype) -> None:
        wide = self._policy.accumulation_dtype
        if not self.exchange.completes:
            self._make_partial()
            self.shard = self.place.add(self.unit, self.shard, received, wide)
            self._partial = True
            return
        if self._partial:
            received, travelled = self._fetch_partial(wide).add_(received), wide
        self._waiting = received.to(self._policy.message_dtype or travelled)

    def _fetch_partial(self, dtype: torch.dtype) -> torch.Tensor:
        """The sum over the shard group so far, which is forgotten here."""
        if self.shard is None:
            raise StateError(f"unit {self.unit.name}: no sum to send to the replicas")
        total, self.shard, self._partial = self.place.fetch(self.unit, self.shard, dtype), None, False
        return total

    def _make_partial(self) -> None:
        """Makes a sum over all ranks one to which micro-steps can be added: one replica keeps it, the others have none of it."""
        if self.shard is None or self._partial:
            return
        if self._replicas.rank > 0:
            self.shard = None
        elif self._policy.post_scale != 1.0:
            self.shard.div_(self._policy.post_scale)

    def start_next_part(self) -> bool:
        if super().start_next_part():
            return True
        if self._waiting is None or self._replicating is not None:
            return False
        self._replicating = self._replicas.all_reduce(self._waiting, self.unit.name)
        return True

    def finish_reduce(self) -> None:
        """As ``UnitGradients.finish_reduce``, for the part that is in flight."""
        super().finish_reduce()
        if self._replicating is not None and self._waiting is not None:
            self._replicating.wait()
            received, self._replicating, self._waiting = self._waiting, None, None
            super()._take(received, received.dtype)

    def reduced(self) -> torch.Tensor:
        """As ``UnitGradients.reduced``; collective where no boundary has brought the sum to the replicas."""
        self.finish_reduce()
        if self._partial:
            wide = self._policy.accumulation_dtype
            self._waiting = self._fetch_partial(wide).to(self._policy.message_dtype or wide)
            self.start_next_part()
        return super().reduced()

    def held(self) -> torch.Tensor | None:
        """As ``UnitGradients.held``; collective in the middle of an accumulation, where the sum is a copy."""
        held = super().held()
        if held is None or not self._partial:
            return held
        total = self.place.fetch(self.unit, held, self._policy.accumulation_dtype).clone()
        self._replicas.all_reduce(total, f"{self.unit.name}: gradient so far").wait()
        return total.mul_(self._policy.post_scale)

    def clear(self) -> None:
        self.finish_reduce()
        self._partial, self._waiting = False, None
        super().clear()
