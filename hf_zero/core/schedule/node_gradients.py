"""Gradients that are summed inside each node before they cross to the others."""

from __future__ import annotations

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.comm.nodes import TwoHops
from hf_zero.core.schedule.gradients import GradientExchange, GradientPolicy


class NodeExchange(GradientExchange):
    """Reduces to the owner of each shard in two hops: of each element one sum leaves a node, in the type of the message.

    So in 16 bit the sum of a node is rounded once before it crosses, as that of a shard group is.

    Args:
        collectives: Network of all ranks of the axis.
        policy: Element types and factors.
        hops: The same ranks as nodes.
    """

    def __init__(self, collectives: Collectives, policy: GradientPolicy, hops: TwoHops) -> None:
        super().__init__(collectives, policy)
        self.hops = hops

    def start(self, message: torch.Tensor, unit: str) -> Pending:
        return self.hops.inside.reduce_scatter(self.hops.swizzled(message), self.policy.accumulation_dtype, unit)

    def crosses(self, dtype: torch.dtype) -> bool:
        return True

    def cross(self, partial: torch.Tensor, travelled: torch.dtype, unit: str) -> Pending:
        return self.hops.across.reduce_scatter(partial.to(travelled), self.policy.accumulation_dtype, unit)
