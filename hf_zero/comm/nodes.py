"""The nodes of the ranks, as their launchers report them: the two groups (hops) of a reduction, and the memory that is left on a device."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import ConfigError
from hf_zero.memory.budget import free_memory


@dataclass(frozen=True)
class Nodes:
    """Number of ranks of each node; the same on all ranks. Ranks of a node are adjacent, as launchers number them.

    Attributes:
        sizes: The distinct numbers of ranks per node, sorted; empty if some rank's launcher has not reported its number.
    """

    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.sizes:
            return "nodes of unknown size (LOCAL_WORLD_SIZE is not set on every rank)"
        return f"nodes of {' and of '.join(map(str, self.sizes))} ranks (LOCAL_WORLD_SIZE)"

    @property
    def uneven(self) -> bool:
        """Return whether nodes have different numbers of ranks."""
        return len(self.sizes) > 1

    def ranks_in_each(self, lines: Iterable[Sequence[int]]) -> int:
        """Return the number of a line's ranks in each node.

        Args:
            lines: All lines of one axis: ranks of the default group, in the order of the axis.

        Returns:
            The number, if it is the same for all lines and nodes and these ranks are adjacent in their line; otherwise 0.
        """
        if len(self.sizes) != 1:
            return 0
        found: set[int] = set()
        for line in lines:
            parts = [(node, len(list(part))) for node, part in groupby(line, key=lambda rank: rank // self.sizes[0])]
            found.update(count for _, count in parts)
            if len({node for node, _ in parts}) != len(parts):
                return 0
        return found.pop() if len(found) == 1 else 0

    def fitting(self, ranks: int, together: int = 1) -> list[int]:
        """Return the sorted group sizes that divide ``ranks`` so that each group is inside a node or consists of complete nodes.

        Args:
            ranks: Number of ranks to divide.
            together: Number of adjacent ranks that count as one, such as those of a tensor-parallel model; a factor of ``ranks``.
        """
        places = ranks // together
        return [size for size in range(1, places + 1) if places % size == 0 and (size == places or self.fits(size * together))]

    def require_fit(self, size: int, ranks: int, what: str, together: int = 1) -> None:
        """Raise if groups of adjacent ranks would extend over parts of several nodes.

        Args:
            size: Number of ranks of a group, in units of ``together`` ranks.
            ranks: Number of ranks to divide.
            what: Name of the groups, for the message.
            together: See ``fitting``.

        Raises:
            ConfigError: The groups do not fit; the message gives the numbers, and sizes that would fit.
        """
        adjacent = size * together
        if adjacent < ranks and not self.fits(adjacent):
            fits = " or ".join(map(str, self.fitting(ranks, together)))
            fits += f" x {together}" if together > 1 else ""
            raise ConfigError(f"{what}: {adjacent} adjacent ranks do not fit {self}; {fits} ranks would")

    def fits(self, size: int) -> bool:
        """Return whether each group of ``size`` adjacent ranks is inside a node, or consists of complete nodes."""
        common = math.gcd(*self.sizes)  # 0 if the nodes are unknown; then every size fits
        return common % size == 0 or (not self.uneven and size % common == 0)


def nodes_of(networks: Sequence[Collectives]) -> Nodes:
    """Return the nodes of all ranks of ``networks``, axes that cross each other, as their launchers report them; collective.

    If all nodes have the same number of ranks, this takes one small vote per network. No table of ranks is kept.
    """
    own = ranks_of_node()
    votes = [float(own), float(-own)]
    for network in networks:
        votes = network.largest_of(votes, "ranks of a node")
    largest, smallest = int(votes[0]), int(-votes[1])
    if smallest == 0:
        return Nodes()
    found = {own}
    if largest != smallest:
        for network in networks:
            found = {size for line in network.gather_objects(sorted(found), "ranks of nodes") for size in line}
    return Nodes(tuple(sorted(found)))


def ranks_of_node() -> int:
    """Return the number of ranks on this machine as its launcher reports it; 0 if it reports none."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdigit() else 0


@dataclass(frozen=True)
class TwoHops:
    """The collectives of a reduction in two hops: over the ranks of each node, then over the nodes.

    [Note: swizzled parts] Rank ``l`` of node ``m`` owns part ``m * ranks + l`` of a vector. The first hop, inside the node, gives the rank
    its node's sums of all parts owned by ranks at position ``l``, one part per node, in the order of nodes. The second hop, among the
    ranks at position ``l``, gives it the sum of its own part. So one sum of each part leaves a node (Wang et al., arXiv 2306.10209,
    section 3.3).

    Attributes:
        inside: The ranks of this node.
        across: One rank of each node: the rank at this rank's position in its node.
    """

    inside: Collectives
    across: Collectives

    def swizzled(self, full: torch.Tensor) -> torch.Tensor:
        """Return ``full``, (nodes * ranks * n,), reordered by the position of the owner in its node: the parts for one rank of this node
        are contiguous.
        """
        return full.view(self.across.world, self.inside.world, -1).transpose(0, 1).reshape(-1)


def free_bytes(device: torch.device, ranks_on_host: int = 1) -> int | None:
    """Return the number of bytes that this rank may still allocate on ``device``; None if it is unknown.

    Args:
        device: Of a GPU, the driver's free memory and the unused memory of torch's allocator are counted. Of the CPU, the remaining memory
            of the machine and of its control groups is counted.
        ranks_on_host: Number of ranks that share the host's memory evenly.
    """
    if device.type == "cpu":
        host = free_memory()
        return host.nbytes // ranks_on_host if host is not None else None
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "mem_get_info"):
        return None
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + unused)


def ranks_on_this_host(world: int) -> int:
    """Return the number of ranks on this host according to the launcher; ``world`` if the launcher does not report it."""
    return ranks_of_node() or world
