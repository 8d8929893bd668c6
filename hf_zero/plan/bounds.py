"""Decide without a plan that a candidate cannot fit in memory or be among the fastest, from candidates that were planned.

[Note: bounds of all layouts] Together, the ranks of every layout compute at least the operations of the model;
recomputation adds to them, and stages of a pipeline wait. Together, the ranks hold masters and moments at least once: if ZeRO does not
shard them, every rank that has one part of the model has all masters and moments of this part. Below stage 3 a rank also has all
parameters of its part. The traffic of tensor, sequence, expert and pipeline parallelism is the same at every ZeRO stage. So one candidate
bounds its whole layout: the one with the largest micro batch and the fewest micro-steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hf_zero.plan.candidates import Candidate, Family, Layout, Tier
from hf_zero.plan.costs import Costs, Part, Rates
from hf_zero.plan.planner import Planner

_MARGIN = 1.02  # times the memory: below it, a candidate is planned to be sure
_OTHER_STAGE = 0.95  # of the time of another stage, which may have fewer or smaller collectives; the least ratio seen is 0.955
NOTHING = Part(0, 0, 0, 0, 0, 0, 0)


@dataclass
class MemoryBounds:
    """Reasons why candidates exceed the memory of the tier where ranks compute.

    Attributes:
        planner: The planner, with the costs of all planned candidates.
    """

    planner: Planner
    _exceeding: list[tuple[Candidate, str]] = field(default_factory=list)

    def learn(self, candidate: Candidate, costs: Costs) -> None:
        """Remember ``candidate`` if ``costs``, a lower bound of its costs, clearly exceed the memory."""
        tier, words = self.planner.shortage(costs)
        if tier == self.planner.main_tier and self.planner.excess(costs) > _MARGIN:
            self._exceeding.append((candidate, words))

    def reason(self, candidate: Candidate) -> str:
        """Return in words why ``candidate`` cannot fit; "" if this is not known without a plan."""
        own = next((words for other, words in self._exceeding if other == candidate), "")
        held = (f"{other} needs no more memory, and takes {words}" for other, words in self._exceeding if _needs_at_least(candidate, other))
        inferred = own or next(held, "") or self._reason_by_states(candidate.family)
        return inferred or self._reason_by_extrapolation(candidate) or self.reason_offloaded(candidate)

    def _reason_by_states(self, family: Family) -> str:
        """Return a reason if parameters, masters and moments alone exceed the memory for ``family``; else ""."""
        nbytes = self._state_bytes(family)
        alone = Costs(nbytes, nbytes, 0, NOTHING, NOTHING, 0, 0, 0)
        above = self.planner.excess(alone) > _MARGIN
        return f"its parameters, masters and moments alone take at least {self.planner.shortage(alone)[1]}" if above else ""

    def _reason_by_extrapolation(self, candidate: Candidate) -> str:
        """Return a reason if linear extrapolation from two smaller micro-batch sizes of the family exceeds the memory; else ""."""
        known = self.planner.known()
        shares = {one.micro_batch: self.planner.excess(costs) for one, costs in known if _has_smaller_micro_batch(one, candidate)}
        if len(shares) < 2:
            return ""
        (small, low), (large, high) = sorted(shares.items())[-2:]
        share = high + (high - low) / (large - small) * (candidate.micro_batch - large)
        if share <= _MARGIN:
            return ""
        return f"extrapolated from micro batches {small} and {large}, it takes at least {share:.3g} times the memory"

    def reason_offloaded(self, candidate: Candidate) -> str:
        """Return a reason if ``candidate`` exceeds the memory even without every state that offload could move away; else ""."""
        rest = self._without_states(candidate)
        if rest is None or self.planner.excess(rest) <= _MARGIN:
            return ""
        return f"all that cannot be offloaded takes {self.planner.shortage(rest)[1]}"

    def _state_bytes(self, family: Family) -> float:
        """Return bytes of parameters, masters and moments that a rank of ``family`` always keeps on the device.

        The result is 0 if no plan of the whole model is known, or if parameters are offloaded.
        """
        layout, ranks = family.layout, self.planner.cluster.ranks
        parts = layout.tensor * layout.experts * layout.pipeline
        whole = [_whole_model_bytes(one, costs, ranks) for one, costs in self.planner.known() if _has_whole_model(one.family)]
        if not whole or family.tier.parameters != "device":
            return 0.0
        owned, parameters = (min(values) for values in zip(*whole, strict=True))
        shards = (parts * layout.shard_group or ranks) if family.stage else parts
        own = owned / shards if family.tier.optimizer == "device" else 0.0
        return own + parameters / (parts if family.stage < 3 else shards)

    def _without_states(self, candidate: Candidate) -> Costs | None:
        """Return a lower bound of the memory of an offloading ``candidate``: its peak without offload, less all states; None if unknown.

        Offload moves masters, moments, parameters and gradients (at most 32 bits per element) off the device. The peak of a micro-batch
        size that was not planned is extrapolated linearly from two smaller sizes, which gives a lower bound.
        """
        here, size = replace(candidate.family, tier=Tier()), candidate.micro_batch
        if here == candidate.family:
            return None
        known = {one.micro_batch: costs for one, costs in self.planner.known() if one.family == here}
        smaller = sorted(other for other in known if other < size)[-2:]
        if size not in known and (len(smaller) < 2 or candidate.accumulation == 1):
            return None
        peak = self._peak_of(known[size]) if size in known else _extrapolate(smaller, [self._peak_of(known[one]) for one in smaller], size)
        one = known[size if size in known else smaller[-1]]
        rest = max(0.0, peak - one.owned - 3 * one.parameters)
        return replace(one, device=rest, host=rest)

    def _peak_of(self, costs: Costs) -> float:
        return costs.host if self.planner.cluster.on_host else costs.device


def _needs_at_least(candidate: Candidate, other: Candidate) -> bool:
    """Return whether ``candidate`` needs at least as much device memory as ``other``."""
    mine, theirs = candidate.family, other.family
    stages = mine.stage == theirs.stage or mine.stage < theirs.stage < 3
    accumulates = candidate.accumulation > 1 or other.accumulation == 1
    kept = mine.share <= theirs.share and mine.moves <= theirs.moves and candidate.micro_batch >= other.micro_batch and accumulates
    return mine.layout == theirs.layout and stages and kept and mine.tier.within(theirs.tier)


def _has_smaller_micro_batch(one: Candidate, candidate: Candidate) -> bool:
    """Return whether ``one`` is ``candidate`` with a smaller micro batch; both accumulate gradients."""
    return one.family == candidate.family and one.micro_batch < candidate.micro_batch and candidate.accumulation > 1


def _extrapolate(sizes: list[int], values: list[float], size: int) -> float:
    (small, large), (low, high) = sizes, values
    return high + (high - low) / (large - small) * (size - large)


def _has_whole_model(family: Family) -> bool:
    """Return whether ranks of ``family`` hold all parameters: one data-parallel layout, stage 0 to 2, parameters not offloaded."""
    return family.layout == Layout() and family.tier.parameters == "device" and family.stage < 3


def _whole_model_bytes(candidate: Candidate, costs: Costs, ranks: int) -> tuple[float, float]:
    """Return bytes of masters and moments, and bytes of parameters, of the whole model; without the padding of shards."""
    owned = costs.owned * (ranks if candidate.family.stage else 1)
    return costs.trained * (owned // max(1.0, costs.trained)), costs.elements * (costs.parameters // max(1.0, costs.elements))


@dataclass
class TimeBounds:
    """Lower bounds of the seconds per step, for families of candidates.

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
        return max(self.rates.seconds(bare), _OTHER_STAGE * self._seconds_of_layout(family, computed, bare))

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
        return _OTHER_STAGE * min(times, default=0.0)


def _is_unoffloaded(one: Family, family: Family) -> bool:
    """Return whether ``one`` is ``family`` at stage 1 or 2 without offload of states."""
    return one.stage in (1, 2) and one == replace(family, stage=one.stage, tier=Tier())
