"""The ranks of a plan, and what they train on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """The ranks.

    Attributes:
        ranks: Of all nodes.
        ranks_per_node: Of one node.
        on_host: Ranks compute on CPUs.
    """

    ranks: int
    ranks_per_node: int
    on_host: bool = False

    @property
    def near(self) -> int:
        """Ranks of one node that are there."""
        return min(self.ranks, self.ranks_per_node)


@dataclass(frozen=True)
class Load:
    """What a rank trains on.

    Attributes:
        micro_batch: Samples of a micro-step.
        sequence: Tokens of a sample.
    """

    micro_batch: int
    sequence: int
