"""Compute lower bounds of the step time of a family of candidates, from candidates that were planned.

[Note: bounds of all layouts] Together, the ranks of every layout compute at least the operations of the model;
recomputation adds to them, and stages of a pipeline wait. Together, the ranks hold masters and moments at least once: if ZeRO does not
shard them, every rank that has one part of the model has all masters and moments of this part. Below stage 3 a rank also has all
parameters of its part. The traffic of tensor, sequence, expert and pipeline parallelism is the same at every ZeRO stage. So one candidate
bounds its whole layout: the one with the largest micro batch and the fewest micro-steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hf_zero.plan.candidates import Candidate, Family, Layout, Tier
from hf_zero.plan.costs import Costs, Part
from hf_zero.plan.planner import Planner
from hf_zero.plan.rates import Rates

_MARGIN = 0.98  # of the time of another stage, which may have fewer or smaller collectives
NOTHING = Part(0, 0, 0, 0, 0, 0, 0)


@dataclass
class TimeBounds:
    """Lower bounds of the seconds per step of families.

    Attributes:
        planner: The planner, with the costs of all planned candidates.
        rates: Rates of the hardware.
    """

    planner: Planner
    rates: Rates
    _of_layouts: dict[Layout, Costs] = field(default_factory=dict)

    def learn(self, candidate: Candidate, costs: Costs) -> None:
        """Remember ``costs``, a lower bound of the costs of ``candidate``, for its layout: stage 1 with the largest micro batch."""
        self._of_layouts[candidate.family.layout] = costs

    def knows(self, layout: Layout) -> bool:
        """Return whether ``learn`` has received a candidate of ``layout``."""
        return layout in self._of_layouts

    def seconds(self, family: Family) -> float:
        """Return a lower bound of the seconds per step of every candidate of ``family``; 0 if none is known."""
        known = list(self.planner.known())
        flops = [costs.micro.flops + costs.update.flops for one, costs in known if one.family.share <= family.share]
        again = [costs.micro.flops + costs.update.flops for one, costs in known if one.family.share == family.share == 1]
        if not flops:
            return 0.0
        computed, place = min(again or flops), family.tier.optimizer
        owned = min((costs.owned for one, costs in known if one.family.stage), default=0.0)
        on_host, on_disk = (owned * (place == name) for name in ("cpu", "nvme"))
        bare = Costs(0, 0, 0, replace(NOTHING, flops=computed), NOTHING, on_host, on_disk, 0, self._bubble(family.layout))
        return max(self.rates.seconds(bare), _MARGIN * self._seconds_of_layout(family, computed, bare))

    def _seconds_of_layout(self, family: Family, flops: float, bare: Costs) -> float:
        """Return a lower bound by the candidate that ``learn`` received; without the traffic of the update, which differs by stage."""
        one = self._of_layouts.get(family.layout)
        if one is None:
            return 0.0
        computed = replace(one.micro, flops=max(one.micro.flops, flops))
        update = (
            NOTHING
            if family.tier != Tier()
            else replace(one.update, node=0, network=0, calls=0, node_alone=0, network_alone=0, calls_alone=0)
        )
        return self.rates.seconds(replace(bare, micro=computed, update=update, bubble=one.bubble))

    def _bubble(self, layout: Layout) -> float:
        wanted = self.planner.space.base.get("pipeline", {}).get("micro_batches")
        # "auto" makes at most two micro-batches per stage
        return (layout.pipeline - 1) / (wanted if isinstance(wanted, int) else 2 * layout.pipeline)

    def seconds_offloaded(self, family: Family, largest: int) -> float:
        """Return a lower bound of the seconds per step of an offloading ``family``; 0 if none is known.

        It is the time of the same layout without offload at stage 1 or 2, plus the update of the offloaded states. Smaller micro batches
        repeat more gathers and reductions, so the bound holds for all sizes up to ``largest``.

        Args:
            family: The family.
            largest: Largest micro-batch size that may fit.
        """
        if family.tier == Tier():
            return 0.0
        place = family.tier.optimizer
        unoffloaded = [(one.micro_batch, costs) for one, costs in self.planner.known() if _is_unoffloaded(one.family, family)]
        size = min((size for size, _ in unoffloaded if size >= largest), default=0)
        times = []
        for costs in (costs for other, costs in unoffloaded if other == size):
            on_host, on_disk = (costs.owned * (place == name) for name in ("cpu", "nvme"))
            times.append(self.rates.seconds(replace(costs, update=NOTHING, on_host=on_host, on_disk=on_disk)))
        return _MARGIN * min(times, default=0.0)


def _is_unoffloaded(one: Family, family: Family) -> bool:
    """Return whether ``one`` is ``family`` at stage 1 or 2 without offload of states."""
    return one.stage in (1, 2) and one == replace(family, stage=one.stage, tier=Tier())
