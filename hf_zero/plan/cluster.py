"""The ranks of a plan, what they train on, and what hardware there is."""

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


@dataclass(frozen=True)
class Hardware:
    """What there is; None is not said.

    Attributes:
        memory: Bytes of one device.
        host_memory: Bytes of one node, for all its ranks.
        flops: Operations per second of one rank.
        link: Bytes per second that a rank sends to other nodes.
        node_link: Bytes per second that it sends inside its node.
    """

    memory: int | None = None
    host_memory: int | None = None
    flops: float | None = None
    link: float | None = None
    node_link: float | None = None
