"""Define how gradients are summed over ranks: by a list of hops for each unit, which the engine's exchange returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_zero.comm.collectives import Collectives, Pending

# Starts one hop of a reduction; collective. Arguments: the result of the hop before it (for the first hop the message), the dtype of the
# message, and the name of the unit for labels. The result of the returned object is the sum over the ranks of the hop.
#
# [Note: hops of a reduction] A sum over a node is then summed over the nodes, and a sum over a shard group over its replicas. Each hop
# starts when the reducer takes the unit from the queue of the hop before: a position in the order of reductions ([Note: one order]) that
# depends on nothing else. So every hop has one order, on a group of its own, and overlaps with backward.
Hop = Callable[[torch.Tensor, torch.dtype, str], Pending]


@dataclass(frozen=True)
class GradientPolicy:
    """Dtypes, factors and sharding of gradients on the network and in sums.

    Attributes:
        message_dtype: Dtype on the network. None means the dtype of the flat buffer: the parameters' dtype for the gradients of one
            micro-step, the accumulation dtype for sums of several and at stage 0.
        accumulation_dtype: Dtype of the sums over ranks and micro-steps.
        pre_scale: Factor applied as gradients are copied into the flat buffer, before the reduction.
        post_scale: Factor applied to the reduced sum.
        sharded: Whether gradients are reduce-scattered to the owner (stages 1 to 3); else they are all-reduced (stage 0).
    """

    message_dtype: torch.dtype | None
    accumulation_dtype: torch.dtype
    pre_scale: float
    post_scale: float
    sharded: bool


class GradientExchange:
    """Hops by which a unit's gradients are summed over all ranks. An optimizer that communicates itself derives its own class.

    Attributes:
        collectives: Network of the reductions.
        policy: Dtypes and factors.
        reduces: Whether gradients are reduced. If not, each rank keeps its own unsharded gradients for the optimizer. Changes only between
            optimizer steps.
        scale: Factor by which gradients are multiplied as they are copied into the flat buffer.
    """

    def __init__(self, collectives: Collectives, policy: GradientPolicy) -> None:
        self.collectives = collectives
        self.policy = policy
        self.reduces = True
        self.scale = policy.pre_scale

    def hops(self, dtype: torch.dtype) -> tuple[Hop, ...]:
        """Return the hops of a message of ``dtype``, (padded_numel,). The result of the last hop is the sum, (shard_numel,) if gradients
        are sharded.
        """
        return (self.sum_over_ranks,)

    def sum_over_ranks(self, message: torch.Tensor, sent: torch.dtype, unit: str) -> Pending:
        """Sum ``message`` over all ranks in one collective; see ``Hop``."""
        if self.policy.sharded and self.collectives.world > 1:
            return self.collectives.reduce_scatter(message, self.policy.accumulation_dtype, unit)
        return self.collectives.all_reduce(message, unit).then(lambda _: message)

    def stepped(self, skipped: bool, growth: float) -> None:
        """Note that an optimizer step is over; called on all ranks with the same arguments. For exchanges that keep state between steps.

        Args:
            skipped: The step was skipped and its gradients were dropped.
            growth: The new loss scale divided by the old one.
        """
