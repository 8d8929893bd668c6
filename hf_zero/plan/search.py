"""Looks for configurations that fit, and says of each other one why it fell out.

[Note: what need not be planned] Families (candidates that differ in their samples at a time only) are looked at from the least that is
moved and recomputed on, in all ways to divide the ranks: by the time recomputing ones are due, five that fit may be faster. These are
known of one that has not been planned:

- More samples at a time hold more, but for a step of one micro-step, which accumulates nothing. So that is tried, and of the others the
  largest that fits is looked for; smaller ones only repeat gathers and reductions. What a moment of a step holds is a line over the
  samples, and a peak the largest of such lines: a size is clearly above the memory where the line through two smaller ones is.
- What recomputes, or moves states, parameters or activations away, computes or sends more for the same samples. Where a family fits with a
  size, one that only adds such things is of use with larger sizes only.
- Stages 0, 1 and 2 hold less of the optimizer's states from one to the next, and what is moved or recomputed is not held either. So what
  holds no less than a candidate that is clearly above the memory is above it too: stage 2 goes first. (Stage 3 may hold more than 2: its
  gathered units. Clearly, because what recomputing keeps, such as states of generators, is not nothing.)
- Parameters, masters and moments that a rank has at all times ([Note: what all ways to divide ranks have in common]) may be above the
  memory alone.
- What takes longer by what it has in common with others than five that fit is not among the best. Of a pipeline the last stage says so.

It is worth its lines: without activations on the host, which double the families, a search for GPT-2 with 12 blocks on 4 ranks (no axes)
runs 8 plans where its 64 candidates would take 64, and one for a Llama of 8 B on 8 ranks (all axes) 91 where 928 candidates would take some
1,800.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace

from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.plan.above import Above
from hf_zero.plan.bounds import Bounds
from hf_zero.plan.candidates import STAGES, Candidate, Family, Layout, Tier, families_of
from hf_zero.plan.costs import Costs
from hf_zero.plan.planner import Planner
from hf_zero.plan.rates import Rates

SHOWN = 5
_REFUSED = "refused"
_PREPARING = 0.2  # of a search, before the first family
_SORTS = 3  # of families: as they are, recomputing, moving states or activations


@dataclass(frozen=True)
class Out:
    """A family that fell out, or sizes of one.

    Attributes:
        name: What it is.
        reason: Why it is not among the best.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class Fitting:
    """A candidate that fits.

    Attributes:
        candidate: It.
        costs: What it takes.
        seconds: Of an optimizer step.
        whole: The model was planned with all of its blocks.
    """

    candidate: Candidate
    costs: Costs
    seconds: float
    whole: bool


@dataclass(frozen=True)
class Answer:
    """What a search found.

    Attributes:
        best: The fastest that fit, planned whole.
        out: All others.
        planned: How many times an engine ran.
        candidates: How many configurations there were.
    """

    best: tuple[Fitting, ...]
    out: tuple[Out, ...]
    planned: int
    candidates: int


@dataclass
class Search:
    """One search.

    Attributes:
        planner: Plans.
        rates: Of the roofline.
    """

    planner: Planner
    rates: Rates
    bounds: Bounds = field(init=False)
    above: Above = field(init=False)
    _fitting: list[Fitting] = field(default_factory=list)
    _out: list[Out] = field(default_factory=list)
    _largest: dict[Family, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bounds, self.above = Bounds(self.planner, self.rates), Above(self.planner)

    def run(self) -> Answer:
        """Looks at every layout.

        Raises:
            ConfigError: The engine refuses all for one reason.
        """
        space, count, done = self.planner.space, 0, 0
        waiting: dict[Layout, list[Family]] = {}
        for layout in space.layouts:
            sizes, waiting[layout] = space.micro_batches(layout), families_of(space, layout)
            count += len(sizes) * len(waiting[layout])
            if not sizes:
                copies = space.ranks // layout.sharing
                self._drop(layout, f"{copies} data-parallel ranks cannot make {space.global_batch} samples of micro batches allowed")
                del waiting[layout]
        count_of_families = sum(map(len, waiting.values()))
        first = next(iter(waiting), None)
        if first is not None:
            self.planner.told("what holds least", 0.0, _PREPARING)
            self._sound(first, space.micro_batches(first)[0])
            self._order(waiting, first)
        for sort in range(_SORTS):
            for layout in list(waiting):
                sizes = space.micro_batches(layout)
                families = [one for one in waiting[layout] if _sort(one) == sort]
                if families and (layout != first or sort) and self._is_late(layout):
                    done += sum(_sort(one) >= sort for one in waiting.pop(layout))
                    continue
                for family in families:
                    share = _PREPARING + (1 - _PREPARING) * done / count_of_families
                    self.planner.told(str(family), share, share + (1 - _PREPARING) / count_of_families)
                    self._look(family, sizes)
                    done += 1
        refused = {one.reason for one in self._out if one.reason.startswith(_REFUSED)}
        if not self._fitting and len(refused) == len({one.reason for one in self._out}) == 1:
            raise ConfigError(f"--fit: every configuration is {refused.pop()}")
        best = self._best()
        return Answer(tuple(best), tuple(self._out), self.planner.workers.planned, count)

    # -- a layout, a family -----------------------------------------------------------------------------------------------

    def _order(self, waiting: dict[Layout, list[Family]], first: Layout) -> None:
        """Sorts layouts, the fastest first; but ``first``, which tells most of others, stays so, and pipelines are the last."""
        if len(waiting) > 1:
            self.planner.prepare([self._telling(layout) for layout in waiting if layout.pipeline == 1])
            for layout in [one for one in waiting if one.pipeline == 1]:
                if not self._learn(layout):
                    del waiting[layout]
        others = [one for one in waiting if one != first]
        for layout in sorted(others, key=lambda one: (one.pipeline, self.bounds.seconds(Family(one, 1, Tier(), False)))):
            waiting[layout] = waiting.pop(layout)

    def _telling(self, layout: Layout) -> Candidate:
        """Return the candidate of a layout that tells of all: it all sends and computes what stage 1 with the fewest micro-steps does."""
        return self.planner.space.candidate(Family(layout, 1, Tier(), False), self.planner.space.micro_batches(layout)[-1])

    def _learn(self, layout: Layout) -> bool:
        """Plans what tells of all of ``layout``; False where the engine refuses it."""
        try:
            self.bounds.learn(self._telling(layout), self.planner.least(self._telling(layout)))
        except HfZeroError as error:
            self._drop(layout, f"{_REFUSED}: {_line(error)}")
            return False
        return True

    def _is_late(self, layout: Layout) -> bool:
        """Return whether nothing more of ``layout`` is among the best."""
        reached, first = self._reached(), Family(layout, 1, Tier(), False)
        if reached == float("inf"):
            return False
        if not self.bounds.knows(layout) and self.bounds.seconds(first) <= reached and not self._learn(layout):
            return True
        least = self.bounds.seconds(first)
        if least > reached:
            self._drop(layout, f"at least {least:.4g} s per step for what all of it computes and sends, {self._slower(reached)}")
        return least > reached

    def _sound(self, layout: Layout, size: int) -> None:
        """Tries of each stage what holds least without offload: where that is above the memory, so is all else of the stage."""
        space = self.planner.space
        families = [
            Family(layout, stage, Tier(), True, space.moves and layout.pipeline == 1) for stage in STAGES if stage or not layout.shard_group
        ]
        candidates = [space.candidate(one, size) for one in families]
        self.planner.prepare([one for one in candidates if one.family.stage >= 2])
        for candidate in candidates:
            with suppress(HfZeroError):  # told when the family itself is looked at
                self._try(candidate)

    def _reached(self) -> float:
        """Return seconds of the slowest of the best so far; infinite while they are too few."""
        reached = sorted(one.seconds for one in self._fitting)[:SHOWN]
        return reached[-1] if len(reached) == SHOWN else float("inf")

    def _slower(self, reached: float) -> str:
        return f"and {SHOWN} that fit take at most {reached:.4g} s"

    def _is_slow(self, family: Family) -> bool:
        """Return whether ``family`` is slower than the best for what it has in common with others."""
        least, reached = self.bounds.seconds(family), self._reached()
        if least > reached:
            self._drop(
                family,
                f"at least {least:.4g} s per step for what it computes, sends and updates whatever its sizes, {self._slower(reached)}",
            )
        return least > reached

    def _look(self, family: Family, sizes: list[int]) -> None:
        """Finds the largest size of ``family`` that fits, where it can be of use."""
        if self._is_slow(family):
            return
        within = max(((size, str(other)) for other, size in self._largest.items() if _only_adds(family, other)), default=(0, ""))
        left = [size for size in sizes if size > within[0]]
        if not left:
            self._drop(family, f"not needed: {within[1]} fits with every micro batch, and this only recomputes or moves more")
            return
        near = [size for size in left if not self.above.beyond_moving(self.planner.space.candidate(family, size))]
        least, reached = self.bounds.seconds_beside(family, near[-1]) if near else 0.0, self._reached()
        if least > reached:
            sizes_of = f"with micro batches up to {near[-1]}, which may fit, " if near != left else ""
            self._drop(family, f"{sizes_of}at least {least:.4g} s per step, as without moving, {self._slower(reached)}")
            return
        try:
            found = self._halve(family, left)
        except HfZeroError as error:
            self._drop(family, f"{_REFUSED}: {_line(error)}")
            return
        if found is None and within[0]:
            self._drop(
                family, f"not needed up to micro batch {within[0]}, with which {within[1]} fits; above it: {self._why(family, left[0])}"
            )
        elif found is None:
            self._drop(family, f"does not fit with any micro batch; with {left[0]}: {self._why(family, left[0])}")
        else:
            self._keep(found, left)

    def _halve(self, family: Family, sizes: list[int]) -> Fitting | None:
        """Return the largest size that fits: that of a step without accumulation is tried, the smallest, then those between."""
        if sizes and self.planner.space.candidate(family, sizes[-1]).accumulation == 1:
            alone = self._try(self.planner.space.candidate(family, sizes[-1]))
            if alone is not None:
                return alone
            sizes = sizes[:-1]
        low, high, found = 0, len(sizes), None
        while low < high:
            middle = self._place(family, sizes, low, high)
            one = self._try(self.planner.space.candidate(family, sizes[middle]))
            low, high, found = (middle + 1, high, one) if one is not None else (low, middle, found)
        return found

    def _place(self, family: Family, sizes: list[int], low: int, high: int) -> int:
        """The place between ``low`` and ``high`` to try: by the line from what fits to what does not, or by what fits at another stage."""
        known = sorted((one.micro_batch, self.planner.excess(costs)) for one, costs in self.planner.known() if one.family == family)
        fits, above = [one for one in known if one[1] <= 1], [one for one in known if one[1] > 1]
        if fits and above:
            (size, share), (larger, excess) = fits[-1], above[0]
            reached = size + (1 - share) * (larger - size) / (excess - share)
            return max(low, min(high, sum(one <= reached for one in sizes)) - 1)
        others = [size for other, size in self._largest.items() if _is_beside(other, family) and size in sizes]
        if others and not low:
            return min(sizes.index(max(others)), high - 1)
        return low if others or not low else high - 1

    def _try(self, candidate: Candidate, whole: bool = False) -> Fitting | None:
        """``candidate`` where it fits."""
        if not whole:
            if self.above.why(candidate):
                return None
            least = self.planner.least(candidate)
            self.above.learn(candidate, least)
            if self.planner.fault(least)[0]:
                return None
        costs, known = self.planner.costs(candidate, whole)
        tier, words = self.planner.fault(costs)
        return None if tier else Fitting(candidate, costs, self.rates.seconds(costs), known)

    def _why(self, family: Family, size: int) -> str:
        candidate = self.planner.space.candidate(family, size)
        try:
            takes = (tell() for tell in (lambda: self.planner.least(candidate), lambda: self.planner.costs(candidate)[0]))
            return self.above.why(candidate) or next(filter(None, (self.planner.fault(costs)[1] for costs in takes)), "")
        except HfZeroError as error:
            return _line(error)

    def _keep(self, found: Fitting, sizes: list[int]) -> None:
        self._fitting.append(found)
        family, size = found.candidate.family, found.candidate.micro_batch
        self._largest[family] = size
        for other in sizes:
            if other > size:
                self._drop(self.planner.space.candidate(family, other), f"does not fit: {self._why(family, other)}")
                break

    def _drop(self, what: object, reason: str) -> None:
        self._out.append(Out(str(what) or "all ranks alike", reason))

    # -- the best ---------------------------------------------------------------------------------------------------------

    def _best(self) -> list[Fitting]:
        """Return the fastest, each planned whole; where that says it does not fit after all, smaller sizes take its place."""
        self.planner.told("the best, with all of their blocks", 0.98, 1.0)
        waiting = sorted(self._fitting, key=_order)
        while not all(one.whole for one in waiting[:SHOWN]):
            self.planner.prepare([one.candidate for one in waiting[:SHOWN] if not one.whole], whole=True)
            one = next(one for one in waiting[:SHOWN] if not one.whole)
            waiting.remove(one)
            exact = self._try(one.candidate, whole=True)
            if exact is None:
                self._drop(one.candidate, f"does not fit: {self.planner.fault(self.planner.costs(one.candidate, whole=True)[0])[1]}")
                smaller = [
                    size for size in self.planner.space.micro_batches(one.candidate.family.layout) if size < one.candidate.micro_batch
                ]
                exact = self._halve(one.candidate.family, smaller)
            if exact is not None:
                waiting.append(exact)
            waiting.sort(key=_order)
        for one in waiting[SHOWN:]:
            self._drop(
                one.candidate,
                f"fits, but {one.seconds:.4g} s per step is slower than the {SHOWN} best ({waiting[SHOWN - 1].seconds:.4g} s)",
            )
        return waiting[:SHOWN]


def _order(one: Fitting) -> tuple[float, float, float]:
    return one.seconds, one.costs.device, one.costs.host


def _sort(family: Family) -> int:
    """When a family is looked at."""
    return 2 if family.tier != Tier() or family.moves else int(family.recomputes)


def _is_beside(family: Family, other: Family) -> bool:
    """Return whether the two differ in their stages alone."""
    return replace(family, stage=other.stage) == other


def _only_adds(family: Family, other: Family) -> bool:
    """Return whether ``family`` is ``other`` with more that is recomputed or moved."""
    same = family != other and (family.layout, family.stage) == (other.layout, other.stage)
    return same and other.recomputes <= family.recomputes and other.moves <= family.moves and other.tier.within(family.tier)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
