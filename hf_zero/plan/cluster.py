"""Inputs of a plan besides model and configuration: ranks, batch shape and hardware."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """Number and place of the ranks.

    Attributes:
        ranks: Number of ranks over all nodes.
        ranks_per_node: Ranks of one node.
        on_host: Whether ranks compute on CPUs.
    """

    ranks: int
    ranks_per_node: int
    on_host: bool = False

    @property
    def near(self) -> int:
        """Return the number of ranks on one node; all ranks if they do not fill a node."""
        return min(self.ranks, self.ranks_per_node)


@dataclass(frozen=True)
class Load:
    """Shape of the batch of one rank.

    Attributes:
        micro_batch: Samples per micro-step.
        sequence: Tokens per sample.
    """

    micro_batch: int
    sequence: int


@dataclass(frozen=True)
class Hardware:
    """Limits and rates of the hardware that the user gave; None if not given.

    Attributes:
        memory: Bytes of memory of one device.
        host_memory: Bytes of host memory of one node, shared by its ranks.
        flops: Floating-point operations per second of one rank.
        link: Bytes per second that a rank sends to other nodes.
        node_link: Bytes per second that a rank sends inside its node.
    """

    memory: int | None = None
    host_memory: int | None = None
    flops: float | None = None
    link: float | None = None
    node_link: float | None = None
