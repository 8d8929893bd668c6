"""The flat arrays of a rank: values of a unit and optimizer states of a segment, wherever they live.

Saving and loading ask for them here and nowhere else. An engine that keeps them outside of memory hands over a subclass of ``Arrays``
that answers with ``Elsewhere`` rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import TypeIs

from hf_zero.checkpoint.tensor_file import Elsewhere, Row
from hf_zero.core.optimizer.sharded import OwnedSegment, ShardedOptimizer
from hf_zero.core.units.unit import Unit


class Arrays:
    """Arrays that are tensors on any device: masters of the units, and the state of the inner optimizer."""

    def values(self, unit: Unit) -> Row:
        """(shard_numel,): the master of a trained unit, else its shard in the training type."""
        return unit.master if unit.master is not None else unit.shard

    def states(self, optimizer: ShardedOptimizer, segment: OwnedSegment) -> Mapping[str, Any]:
        """Optimizer states of a segment by name: rows of its length, and single numbers; empty before the first step."""
        state: Mapping[str, Any] = optimizer.state.get(segment.tensor, {})
        return state

    def place(self, optimizer: ShardedOptimizer, segment: OwnedSegment, state: str, dtype: torch.dtype, whole: bool) -> Row:
        """Where a saved state of a segment is to be read into, until ``install``.

        Args:
            optimizer: Whose state it is.
            segment: Its segment.
            state: Name of the state.
            dtype: Type it was saved in.
            whole: Every element but the gaps will be written; else the rest must be zeros.
        """
        # The present tensor where possible: moments are not held twice.
        present = self.states(optimizer, segment).get(state)
        fits = isinstance(present, torch.Tensor) and present.shape == segment.tensor.shape and present.dtype == dtype
        return present if whole and fits and present is not None else optimizer.state_store.new_state(segment, state, dtype)

    def install(self, optimizer: ShardedOptimizer, segment: OwnedSegment, states: Mapping[str, Any]) -> None:
        """Makes ``states``, rows from ``place`` and single numbers, the state of a segment; none when empty."""
        optimizer.state.pop(segment.tensor, None)
        if states:
            optimizer.state[segment.tensor] = dict(states)

    def settle(self, optimizer: ShardedOptimizer) -> None:
        """After the last ``install``: the states go where they rest."""
        optimizer.state_store.adopt_states(optimizer)


def is_row(value: Any) -> TypeIs[Row]:
    """Whether an optimizer state has a number per element."""
    return isinstance(value, Elsewhere) or (isinstance(value, torch.Tensor) and value.ndim > 0)
