"""Carry over values that a script has written to parameters since the last step, or refuse them on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NoReturn

from hf_zero.comm.collectives import Collectives
from hf_zero.core.step.agreement import Alike, agree
from hf_zero.core.units.registration import take_written_loose
from hf_zero.core.units.unit import Unit
from hf_zero.core.units.values import adopt_writes
from hf_zero.errors import StateError


class WrittenValues:
    """Carries values that a script has written over to shards and masters, once before each step. See docs/parameters.md.

    A rank cannot raise alone, so the writes that it refuses, and the parameters that it has seen written inside forwards and contexts
    that were not compared at their end, are in a digest that the ranks compare in the vote of the step.

    Attributes:
        refused: Error of a write that is refused; empty if there is none.
        digest: Digest of refused and recorded writes; 0 if there are none.

    Args:
        units: All units of the engine, in the same order on all ranks.
        network: Network of the ranks that hold the engine's parameters that belong to no unit.
        idle: No backward of the forwards so far can follow.
    """

    def __init__(self, units: Sequence[Unit], network: Collectives, idle: bool) -> None:
        self.refused = ""
        self._names: list[str] = []
        for unit in units:
            try:
                adopt_writes(unit, idle)
            except StateError as error:
                self.refused = self.refused or str(error)
            self._names += [f"{unit.layout.slots[index].name} {checksum}" for index, checksum in sorted(unit.written.take().items())]
        self._names += [f"{name} {checksum}" for name, checksum in sorted(take_written_loose(network).items())]
        noted = self.refused or self._names
        self.digest = zlib.crc32(repr((self.refused, self._names)).encode()) if noted else 0

    def alike(self) -> Alike:
        """Return the digest for a vote, with the error that names parameter and ranks."""
        return Alike([self.digest], self.refuse)

    def refuse(self, collectives: Collectives) -> NoReturn:
        """Raise the error of a write that was refused on any of the ranks, or was made on some only; collective.

        Raises:
            StateError: On all ranks.
        """
        told: list[tuple[str, list[str]]] = collectives.gather_objects((self.refused, self._names), "written parameters")
        for rank, (refused, _) in enumerate(told):
            if refused:
                raise StateError(f"{refused} (rank {rank})")
        everywhere = set(told[0][1]).intersection(*(names for _, names in told[1:]))
        written = next(name for _, names in told for name in names if name not in everywhere)
        ranks = ", ".join(str(rank) for rank, (_, names) in enumerate(told) if written in names)
        raise StateError(
            f"parameter {written.rpartition(' ')[0]} was written on rank(s) {ranks} of {len(told)}, and not written, or "
            "written with other values or at another time, on the remaining ranks: the ranks would train different models. Write the same "
            "values on all ranks, or write inside `with hf_zero.zero.GatheredParameters([parameter], modifier_rank=0):`"
        )

    def agree(self, collectives: Collectives) -> None:
        """Compare the digests outside of a step; collective.

        Raises:
            StateError: On all ranks, if a write was refused, or made on some ranks only.
        """
        if collectives.world > 1:
            agree(collectives, [self.alike()])
        if self.refused:
            raise StateError(self.refused)
