"""What 1-bit Adam changes in the way of gradients: sums of a fixed order in the warm-up, and none after it."""

from __future__ import annotations

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.core.schedule.gradients import GradientExchange, GradientPolicy


class OneBitExchange(GradientExchange):
    """Warm-up: sums rank by rank at stage 0 too. Compressed phase (``keeps_whole``, which the step sets): nothing is reduced.

    Args:
        collectives: Network of the reductions.
        policy: Element types and factors.
        averages: Gradients are averaged over ranks; otherwise summed, so that each rank's own count as often as there are ranks.
    """

    def __init__(self, collectives: Collectives, policy: GradientPolicy, averages: bool) -> None:
        super().__init__(collectives, policy)
        self._own_scale = 1.0 if averages else float(collectives.world)

    @property
    def scale(self) -> float:
        return self._own_scale if self.keeps_whole else super().scale

    def start(self, message: torch.Tensor, unit: str) -> Pending:
        if self.policy.sharded:
            return super().start(message, unit)
        return self.collectives.all_reduce_in_order(message, unit)
