"""Keep a second, wider part of a unit on each rank, so that the ranks of a node can unshard the unit among themselves."""

from __future__ import annotations

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.comm.quantized import message_of, values_of
from hf_zero.errors import StateError


class SecondaryCopy:
    """The node's part of one unit that this rank keeps, in the parameters' type (hpZ; Wang et al., arXiv 2306.10209, section 3.2).

    [Note: secondary copies] The first all-gather after an update crosses all ranks. The ranks of a node keep the gathered values in equal
    parts, and further all-gathers stay inside the node until the shard changes. The copy is made when the values arrive, not when the unit
    is resharded, so it has no writes of a script to unsharded parameters. All ranks gather a unit together and change it together, so they
    have its copy together. If the all-gathers of a unit carry codes, the copy holds the values of the codes: the values in forward do not
    depend on an earlier request for exact ones.

    [Note: parameters in the node] If the copy is to last, an update fills it again: each rank sends its new shard to the one rank of every
    node that keeps it. So a node receives each element once, and no gather leaves the node until the shard is changed in another way.

    Attributes:
        lasts: Whether updates fill the copy again.

    Args:
        node: Network of the ranks that keep the unit between them; None keeps nothing.
        lasts: See the attribute.
    """

    def __init__(self, node: Collectives | None, lasts: bool = False) -> None:
        self._node = node
        self.lasts = lasts and node is not None
        self._part: torch.Tensor | None = None

    @property
    def part(self) -> torch.Tensor | None:
        """Return the part of the copy that this rank keeps now; None if there is none."""
        return self._part

    @property
    def here(self) -> bool:
        """Return whether the node can unshard the unit by itself."""
        return self._part is not None

    def keep(self, full: torch.Tensor) -> None:
        """Copy this rank's part of ``full`` (padded_numel,), which has just arrived, unless the copy exists."""
        if self._node is not None and self._part is None:
            numel = full.numel() // self._node.world
            self._part = full[self._node.rank * numel : (self._node.rank + 1) * numel].clone()

    def all_gather(self, full: torch.Tensor, unit: str) -> Pending:
        """Fill ``full`` from the parts of the node; collective over the node."""
        if self._node is None or self._part is None:
            raise StateError(f"unit {unit}: no secondary copy is here")
        return self._node.all_gather(full, self._part, unit)

    def fill(self, axis: Collectives, shard: torch.Tensor, quantized: bool, unit: str) -> Pending:
        """Fill the copy from the updated shards of all ranks; collective over ``axis``. The copy exists when the returned object has been
        waited for.

        Args:
            axis: All ranks; those of a node are adjacent.
            shard: This rank's shard, (shard_numel,).
            quantized: The copy holds the values of the codes.
            unit: Name for labels.
        """
        if self._node is None:
            raise StateError(f"unit {unit}: nobody keeps a secondary copy")
        nodes, mine = axis.world // self._node.world, message_of(shard) if quantized else shard
        first, keeper = self._node.rank * nodes, axis.rank // nodes  # first owner of the kept elements; keeper of this shard
        rows = mine.new_empty(nodes, mine.numel())
        outgoing, incoming = [[mine.new_empty(0)] * axis.world for _ in range(2)]
        outgoing[keeper :: self._node.world] = [mine] * nodes
        incoming[first : first + nodes] = list(rows)
        if first <= axis.rank < first + nodes:
            rows[axis.rank - first].copy_(mine)

        def keep(_: torch.Tensor | None) -> None:
            values = rows.view(-1)
            self._part = values_of(rows, shard.new_empty(nodes * shard.numel())) if quantized else values

        return axis.exchange_parts(outgoing, incoming, f"{unit}: update").then(keep)

    def forget(self) -> None:
        """Drop the copy, because the unit's values have changed."""
        self._part = None
