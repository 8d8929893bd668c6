"""What a family of candidates takes at least, by what is known of others.

[Note: what all ways to divide ranks have in common] Ranks compute together what the model takes, however they are divided; recomputing
adds to it, and a pipeline waits. They own the masters and moments once, or several times over: where stages of ZeRO do not share them,
every rank of one part of the model has those of the part. Below stage 3 it has the parameters of the part too. What a layout sends for
being divided it sends at every stage of ZeRO, so one candidate of it tells of all: the one that holds most samples at a time and repeats
least.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hf_zero.plan.candidates import Candidate, Family, Layout, Tier
from hf_zero.plan.costs import Costs, Part
from hf_zero.plan.planner import Planner
from hf_zero.plan.rates import Rates

_NEARLY = 0.98  # of what another stage takes: some collectives less, or smaller ones
NOTHING = Part(0, 0, 0, 0, 0, 0, 0)


@dataclass
class Bounds:
    """What families take at least.

    Attributes:
        planner: Knows what has been planned.
        rates: Of the roofline.
    """

    planner: Planner
    rates: Rates
    _of_layouts: dict[Layout, Costs] = field(default_factory=dict)

    def learn(self, candidate: Candidate, costs: Costs) -> None:
        """``costs`` is what ``candidate`` takes at least, which is stage 1 with as many samples at a time as there may be."""
        self._of_layouts[candidate.family.layout] = costs

    def knows(self, layout: Layout) -> bool:
        """Return whether one candidate of ``layout`` tells of all."""
        return layout in self._of_layouts

    def seconds(self, family: Family) -> float:
        """Return seconds below which no candidate of ``family`` stays; 0 where nothing is known."""
        known = list(self.planner.known())
        flops = [costs.micro.flops + costs.update.flops for one, costs in known if one.family.recomputes <= family.recomputes]
        again = [costs.micro.flops + costs.update.flops for one, costs in known if one.family.recomputes and family.recomputes]
        if not flops:
            return 0.0
        computed, place = min(again or flops), family.tier.optimizer
        owned = min((costs.owned for one, costs in known if one.family.stage), default=0.0)
        on_host, on_disk = (owned * (place == name) for name in ("cpu", "nvme"))
        bare = Costs(0, 0, 0, replace(NOTHING, flops=computed), NOTHING, on_host, on_disk, 0, self._bubble(family.layout))
        return max(self.rates.seconds(bare), _NEARLY * self._as_its_layout(family, computed, bare))

    def _as_its_layout(self, family: Family, flops: float, bare: Costs) -> float:
        """Return seconds by the candidate of the layout that tells of all; what follows the micro-steps differs from stage to stage."""
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
        return (layout.pipeline - 1) / (wanted if isinstance(wanted, int) else 2 * layout.pipeline)  # "auto": at most two parts a stage

    def seconds_beside(self, family: Family, largest: int) -> float:
        """Return seconds below which no candidate of ``family`` with at most ``largest`` samples at a time stays; 0 where nothing is known.

        That is what the layout takes for them without moving, at stage 1 or 2, and the update of what has been moved. Fewer samples at a
        time repeat more.
        """
        if family.tier == Tier():
            return 0.0
        place = family.tier.optimizer
        beside = [(one.micro_batch, costs) for one, costs in self.planner.known() if _is_beside(one.family, family)]
        size = min((size for size, _ in beside if size >= largest), default=0)
        times = []
        for costs in (costs for other, costs in beside if other == size):
            on_host, on_disk = (costs.owned * (place == name) for name in ("cpu", "nvme"))
            times.append(self.rates.seconds(replace(costs, update=NOTHING, on_host=on_host, on_disk=on_disk)))
        return _NEARLY * min(times, default=0.0)


def _is_beside(one: Family, family: Family) -> bool:
    """Return whether ``one`` is ``family`` at stage 1 or 2 without moving."""
    return one.stage in (1, 2) and one == replace(family, stage=one.stage, tier=Tier())
