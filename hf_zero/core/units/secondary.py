"""A second, wider part of a unit on each rank, so that the ranks of a node can make the unit whole among themselves."""

from __future__ import annotations

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.errors import StateError


class SecondaryCopy:
    """The node's part of one unit that this rank keeps, in the parameters' type (hpZ; Wang et al., arXiv 2306.10209, section 3.2).

    [Note: secondary copies] The first all-gather after an update crosses all ranks; what arrived of it is kept in equal parts by the
    ranks of a node, and further ones stay inside the node until the shard changes. It is kept when it arrives, not when the unit is
    resharded: what a script writes into whole parameters is dropped. All ranks gather a unit together and change it together, so they
    have its copy together. Of a unit whose all-gathers carry codes, what the codes say is kept: what forward sees does not depend on who
    asked for exact values before it.

    Args:
        node: Network of the ranks that keep the unit between them; None keeps nothing.
    """

    def __init__(self, node: Collectives | None) -> None:
        self._node = node
        self._part: torch.Tensor | None = None

    @property
    def here(self) -> bool:
        """Whether the node can make the unit whole."""
        return self._part is not None

    def keep(self, full: torch.Tensor) -> None:
        """Copies this rank's part of ``full`` (padded_numel,), which has just arrived, unless it is here."""
        if self._node is not None and self._part is None:
            numel = full.numel() // self._node.world
            self._part = full[self._node.rank * numel : (self._node.rank + 1) * numel].clone()

    def all_gather(self, full: torch.Tensor, unit: str) -> Pending:
        """Fills ``full`` from the parts of the node; collective over it."""
        if self._node is None or self._part is None:
            raise StateError(f"unit {unit}: no secondary copy is here")
        return self._node.all_gather(full, self._part, unit)

    def forget(self) -> None:
        """The unit's values are others now."""
        self._part = None
