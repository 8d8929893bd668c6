"""What is known to be above the memory without being planned."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hf_zero.plan.bounds import NOTHING
from hf_zero.plan.candidates import Candidate, Family, Layout, Tier
from hf_zero.plan.costs import Costs
from hf_zero.plan.planner import Planner

_CLEARLY = 1.02  # times what there is


@dataclass
class Above:
    """What is known to be above the memory where ranks compute.

    Attributes:
        planner: Knows what has been planned.
    """

    planner: Planner
    _planned: list[tuple[Candidate, str]] = field(default_factory=list)

    def learn(self, candidate: Candidate, costs: Costs) -> None:
        """``candidate`` takes at least ``costs``."""
        tier, words = self.planner.fault(costs)
        if tier == self.planner.main_tier and self.planner.excess(costs) > _CLEARLY:
            self._planned.append((candidate, words))

    def why(self, candidate: Candidate) -> str:
        """Why ``candidate`` is known not to fit without being planned; empty where it is not known."""
        own = next((words for other, words in self._planned if other == candidate), "")
        held = (f"{other} holds no more, and takes {words}" for other, words in self._planned if _holds(candidate, other))
        return own or next(held, "") or self._always(candidate.family) or self._beyond(candidate) or self.beyond_moving(candidate)

    def _always(self, family: Family) -> str:
        """Whether ``family`` is above the memory by what its ranks have at all times."""
        nbytes = self._held(family)
        alone = Costs(nbytes, nbytes, 0, NOTHING, NOTHING, 0, 0, 0)
        above = self.planner.excess(alone) > _CLEARLY
        return f"for its parameters, masters and moments alone at least {self.planner.fault(alone)[1]}" if above else ""

    def _beyond(self, candidate: Candidate) -> str:
        """Whether ``candidate`` is above the memory by the line through two smaller sizes of its family."""
        shares = {one.micro_batch: self.planner.excess(costs) for one, costs in self.planner.known() if _is_smaller(one, candidate)}
        if len(shares) < 2:
            return ""
        (small, low), (large, high) = sorted(shares.items())[-2:]
        told = high + (high - low) / (large - small) * (candidate.micro_batch - large)
        return f"by micro batches {small} and {large} it takes at least {told:.3g} times the memory" if told > _CLEARLY else ""

    def beyond_moving(self, candidate: Candidate) -> str:
        """Whether ``candidate`` is above the memory by what it would hold without moving, less all that moving could take away."""
        rest = self._rest(candidate)
        if rest is None or self.planner.excess(rest) <= _CLEARLY:
            return ""
        return f"beside all that is moved {self.planner.fault(rest)[1]}"

    def _held(self, family: Family) -> float:
        """Bytes that a rank of ``family`` holds at all times on the device; 0 where nothing is known, or something rests elsewhere."""
        layout, ranks = family.layout, self.planner.cluster.ranks
        parts = layout.tensor * layout.experts * layout.pipeline
        whole = [_whole(one, costs, ranks) for one, costs in self.planner.known() if _is_plain(one.family)]
        if not whole or family.tier.parameters != "device":
            return 0.0
        owned, parameters = (min(values) for values in zip(*whole, strict=True))
        shards = (parts * layout.shard_group or ranks) if family.stage else parts
        own = owned / shards if family.tier.optimizer == "device" else 0.0
        return own + parameters / (parts if family.stage < 3 else shards)

    def _rest(self, candidate: Candidate) -> Costs | None:
        """What ``candidate``, which moves states away, holds at least: what it holds without moving, less all states; None if not known.

        Moving takes away masters, moments and parameters, and gradients, which are of at most 32 bit. Of a size that has not been planned
        it is the line through two smaller ones, which a peak is on or above.
        """
        here, size = replace(candidate.family, tier=Tier()), candidate.micro_batch
        if here == candidate.family:
            return None
        known = {one.micro_batch: costs for one, costs in self.planner.known() if one.family == here}
        smaller = sorted(other for other in known if other < size)[-2:]
        if size not in known and (len(smaller) < 2 or candidate.accumulation == 1):
            return None
        held = [self._held_of(known[size])] if size in known else _on_a_line(smaller, [self._held_of(known[one]) for one in smaller], size)
        one = known[size if size in known else smaller[-1]]
        rest = max(0.0, held[0] - one.owned - 3 * one.parameters)
        return replace(one, device=rest, host=rest)

    def _held_of(self, costs: Costs) -> float:
        return costs.host if self.planner.cluster.on_host else costs.device


def _holds(candidate: Candidate, other: Candidate) -> bool:
    """Return whether ``candidate`` holds no less on the device than ``other``."""
    mine, theirs = candidate.family, other.family
    stages = mine.stage == theirs.stage or mine.stage < theirs.stage < 3
    accumulates = candidate.accumulation > 1 or other.accumulation == 1
    kept = (
        mine.recomputes <= theirs.recomputes and mine.moves <= theirs.moves and candidate.micro_batch >= other.micro_batch and accumulates
    )
    return mine.layout == theirs.layout and stages and kept and mine.tier.within(theirs.tier)


def _is_smaller(one: Candidate, candidate: Candidate) -> bool:
    """Return whether ``one`` is ``candidate`` with fewer samples at a time; both accumulate."""
    return one.family == candidate.family and one.micro_batch < candidate.micro_batch and candidate.accumulation > 1


def _on_a_line(sizes: list[int], values: list[float], size: int) -> list[float]:
    (small, large), (low, high) = sizes, values
    return [high + (high - low) / (large - small) * (size - large)]


def _is_plain(family: Family) -> bool:
    """Return whether ``family`` tells of the whole model: nothing is divided but by stages of ZeRO, and the parameters stay."""
    return family.layout == Layout() and family.tier.parameters == "device" and family.stage < 3


def _whole(candidate: Candidate, costs: Costs, ranks: int) -> tuple[float, float]:
    """Return bytes of masters and moments, and of parameters, of the whole model: whole ones of each element, for shards are rounded up."""
    owned = costs.owned * (ranks if candidate.family.stage else 1)
    return costs.trained * (owned // max(1.0, costs.trained)), costs.elements * (costs.parameters // max(1.0, costs.elements))
