"""Values that follow from the shards of all ranks: the copy of a unit that a node keeps, and the scales with which weights are gathered.

[Note: dropped together] All ranks must drop such values together: a rank that has none gathers in another way than a rank that has them,
and both would wait without end. Most changes to shards happen on all ranks (an update, a load, a broadcast) and drop the values at once
(``shard_changed``). But a write by the script is found where a rank compares its own part with the shard, and may lie in the parts of some
ranks only. Such a rank notes it (``changed_here``); the ranks exchange these notes when a context of ``GatheredParameters`` ends, and at
the begin and the end of the pass of a forward, and all drop the values if any rank has noted a change. If a unit is gathered between a
change and the next exchange (a block that is called alone), the values are outdated: the next step raises on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.comm.quantized import Codes
from hf_zero.core.units.shard import SecondaryCopy
from hf_zero.errors import StateError

Gather = Callable[[torch.Tensor, torch.Tensor, str], Pending]


class Derived:
    """Values of one unit that follow from the shards of all ranks, see [Note: dropped together].

    Attributes:
        changed_here: Whether this rank has changed its shard since the ranks last exchanged their notes.
        outdated: Whether a gather has used values that did not fit this rank's shard.

    Args:
        secondary: The unit's copy in the node.
        codes: Codes of its all-gathers.
    """

    def __init__(self, secondary: SecondaryCopy, codes: Codes) -> None:
        self._secondary, self._codes = secondary, codes
        self.changed_here = self.outdated = False

    @property
    def kept(self) -> bool:
        """Return whether such values are ever kept for this unit; the same on all ranks."""
        return self._secondary.kept or self._codes.kept

    def forget(self) -> None:
        """Drop the values, because a shard has changed. Local; every rank must call it."""
        self._secondary.forget()
        self._codes.forget()
        self.changed_here = False

    def gather(self, collectives: Collectives, exact: bool) -> Gather:
        """Return the all-gather of the shards: of ``exact`` values, or of their codes."""
        if not exact:
            self._note_use(self._codes.agreed)
            return partial(self._codes.all_gather, collectives)
        self._codes.forget()  # whoever holds the exact values may write to them, and not every rank would see it
        if not self._secondary.here:
            self.changed_here = False
        return collectives.all_gather

    def from_node(self, full: torch.Tensor, unit: str) -> Pending:
        """Fill ``full`` from the copy that the node keeps; collective over the node."""
        self._note_use(True)
        return self._secondary.all_gather(full, unit)

    def _note_use(self, used: bool) -> None:
        if self.changed_here:
            self.outdated |= used
            self.changed_here = used

    def require_current(self, name: str) -> None:
        """Raise if a gather has used outdated values.

        Raises:
            StateError: See ``outdated``.
        """
        if self.outdated:
            self.outdated = False
            raise StateError(
                f"a parameter of {name} was written while a part of the model ran by itself, and gathered again before the ranks could "
                "exchange this: its gather used the node's copy, or the float8 scales, of the previous values. Write it inside `with "
                "hf_zero.zero.GatheredParameters([parameter], modifier_rank=0):`"
            )


class HasDerived(Protocol):
    """The part of a unit that ``drop_changed`` uses."""

    derived: Derived


def keepers(units: Iterable[HasDerived]) -> list[HasDerived]:
    """Return the units for which values that follow from the shards of all ranks are kept; the same on all ranks."""
    return [unit for unit in units if unit.derived.kept]


def drop_changed(units: Sequence[HasDerived], anywhere: bool) -> None:
    """Drop the values of ``units`` if a shard has changed ``anywhere``; every rank calls it with the same answer."""
    for unit in units if anywhere else ():
        unit.derived.forget()


def exchange_changes(units: Iterable[HasDerived], network: Collectives) -> None:
    """Drop the values of ``units`` if any rank has changed a shard of one; collective if values are kept for any of them."""
    kept = keepers(units)
    if kept:
        drop_changed(kept, network.any_rank(any(unit.derived.changed_here for unit in kept), "changed shards"))
