"""The two networks of a reduction that takes one hop inside nodes and another over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_zero.comm.collectives import Collectives


@dataclass(frozen=True)
class TwoHops:
    """The networks of a reduction that goes over the nodes after it has gone over the ranks of each.

    [Note: swizzled parts] Rank ``l`` of node ``m`` owns part ``m * ranks + l`` of a vector. The first hop, inside the node, brings it the
    node's sums of all parts that the ranks with its place ``l`` own, one for each node, in the order of nodes; the second, among these
    ranks, the sum of its own one. So of each part one sum leaves a node (Wang et al., arXiv 2306.10209, section 3.3).

    Attributes:
        inside: The ranks of this node.
        across: One rank of each node, those with this rank's place in it.
    """

    inside: Collectives
    across: Collectives

    def swizzled(self, full: torch.Tensor) -> torch.Tensor:
        """``full``, (nodes * ranks * n,), by the place of the owner of each part first: what goes to one rank of the node lies together."""
        return full.view(self.across.world, self.inside.world, -1).transpose(0, 1).reshape(-1)
