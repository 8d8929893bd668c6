"""Search for the fastest candidates that fit in memory, and give a reason for each excluded one.

[Note: exclusion without a plan] A family consists of the candidates that differ only in their micro-batch size. The search visits families
of all layouts in three rounds: without recomputation and offload, with recomputation, with offload. After the first round, five fitting
candidates may already be faster than everything in later rounds. These rules exclude candidates without a plan:

- Memory grows with the micro-batch size, except that a step of one micro-step accumulates no gradients. So the search tries this size, and
  among the others finds the largest that fits; smaller ones only repeat gathers and reductions. The memory at each moment of a step is
  linear in the micro-batch size, and a peak is the maximum of such lines. So a size cannot fit if the linear extrapolation from two
  smaller sizes exceeds the memory.
- Recomputation adds computation, and offload of states, parameters or activations adds copies. If a family fits with a size, a family that
  only adds recomputation or offload can win only with larger sizes.
- From stage 0 to 1 to 2, a rank holds fewer states; recomputation and offload save memory, too. So if a candidate exceeds the memory by a
  margin, so does each candidate that holds at least as much; therefore stage 2 is tried first. (Stage 3 may hold more than stage 2 because
  of gathered units. The margin covers small extra memory of recomputation, such as states of random generators.)
- Permanent parameters, masters and moments of a rank ([Note: bounds of all layouts]) may exceed the memory alone.
- A candidate is not among the best if a lower bound of its time exceeds the time of five fitting ones. For a pipeline, the last stage
  gives a lower bound.

The rules save many plans. With activations kept or recomputed in all blocks only, which is a quarter of the families, GPT-2 with 12 blocks
on 4 ranks (no axes) takes 8 plans instead of 64 for its 64 candidates; Llama with 8 B parameters on 8 ranks (all axes) takes 91 instead of
about 1,800 for its 928 candidates.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.plan.bounds import MemoryBounds, TimeBounds
from hf_zero.plan.candidates import STAGES, Candidate, Family, Layout, Tier, families_of
from hf_zero.plan.costs import Costs, Rates
from hf_zero.plan.planner import Planner, TimeIsUp

SHOWN = 5  # number of best candidates in the result
_LARGE, _REFUSED, _BATCH, _SLOW, _NEEDLESS = "does not fit", "refused", "batch", "slower", "not needed"
KINDS = {
    _LARGE: "does not fit",
    _REFUSED: "refused by the engine",
    _BATCH: "the samples cannot be divided",
    _SLOW: "slower",
    _NEEDLESS: "not needed, only adds recomputation or offload to one that fits",
}
"""Kind of a reason -> heading of the candidates that it excludes, in the order in which they are printed."""
_PREPARATION = 0.2  # share of the progress before the first family
_ROUNDS = 3  # rounds of the search: plain families, recomputing ones, ones that offload states or activations


@dataclass(frozen=True)
class Excluded:
    """An excluded candidate, family or layout.

    Attributes:
        name: Description of the candidate, family or layout.
        reason: Reason why it is not among the best.
        kind: Kind of the reason, a key of ``KINDS``.
    """

    name: str
    reason: str
    kind: str


@dataclass(frozen=True)
class Fitting:
    """A candidate that fits in memory.

    Attributes:
        candidate: The candidate.
        costs: Its memory and work.
        seconds: Estimated seconds per optimizer step.
        whole: Whether the costs come from a plan with all blocks of the model.
    """

    candidate: Candidate
    costs: Costs
    seconds: float
    whole: bool


@dataclass(frozen=True)
class Answer:
    """Result of a search.

    Attributes:
        best: The fastest fitting candidates, fastest first, planned with all blocks.
        out: All other candidates, grouped, with reasons.
        planned: Number of plans: runs of the engine.
        candidates: Number of candidates in the search space.
        stopped: Whether Ctrl-C or the limit of its time ended the search: the best are those so far, perhaps planned with a few blocks.
    """

    best: tuple[Fitting, ...]
    out: tuple[Excluded, ...]
    planned: int
    candidates: int
    stopped: Literal["", "Ctrl-C", "time"] = ""


@dataclass
class Search:
    """One search for the fastest fitting candidates.

    Attributes:
        planner: Source of the costs of candidates.
        rates: Rates of the hardware.
        time_bounds: Lower bounds of the time of families.
        memory_bounds: Candidates that are known not to fit.
    """

    planner: Planner
    rates: Rates
    time_bounds: TimeBounds = field(init=False)
    memory_bounds: MemoryBounds = field(init=False)
    _fitting: list[Fitting] = field(default_factory=list)
    _out: list[Excluded] = field(default_factory=list)
    _smallest: list[Fitting] = field(default_factory=list)
    _largest: dict[Family, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.time_bounds, self.memory_bounds = TimeBounds(self.planner, self.rates), MemoryBounds(self.planner)

    def run(self) -> Answer:
        """Search all layouts, and return the result; after Ctrl-C, or when its time is up, the result so far.

        Raises:
            ConfigError: The engine refuses all candidates for the same reason.
        """
        space, count = self.planner.space, 0
        waiting: dict[Layout, list[Family]] = {}
        for layout in space.layouts:
            sizes, waiting[layout] = space.micro_batches(layout), families_of(space, layout)
            count += len(sizes) * len(waiting[layout])
            if not sizes:
                copies = space.ranks // layout.sharing
                reason = f"{space.global_batch} samples cannot be divided over {copies} data-parallel ranks in allowed micro batches"
                self._exclude(layout, reason, _BATCH)
                del waiting[layout]
        stopped: Literal["", "Ctrl-C", "time"] = ""
        try:
            self._visit(waiting)
            best = self._best()
        except (KeyboardInterrupt, TimeIsUp) as reason:
            stopped = "time" if isinstance(reason, TimeIsUp) else "Ctrl-C"
            others = [one for one in self._smallest if one.candidate.family not in self._largest]
            best = sorted([*self._fitting, *others], key=_rank_key)[:SHOWN]
        return Answer(tuple(best), tuple(self._out), self.planner.workers.planned, count, stopped)

    def _visit(self, waiting: dict[Layout, list[Family]]) -> None:
        """Search the families of all layouts, and keep in ``_fitting`` the fitting candidates.

        Raises:
            ConfigError: The engine refuses all candidates for the same reason.
        """
        space, done, count_of_families = self.planner.space, 0, sum(map(len, waiting.values()))
        first = next(iter(waiting), None)
        if first is not None:
            self.planner.on_progress("smallest candidates", 0.0, _PREPARATION)
            self._try_smallest(first, space.micro_batches(first)[0])
            self._sort_layouts(waiting, first)
        for round_number in range(_ROUNDS):
            for layout in list(waiting):
                sizes = space.micro_batches(layout)
                families = [one for one in waiting[layout] if _round_of(one) == round_number]
                if families and (layout != first or round_number) and self._is_slow_layout(layout):
                    done += sum(_round_of(one) >= round_number for one in waiting.pop(layout))
                    continue
                for family in families:
                    share = _PREPARATION + (1 - _PREPARATION) * done / count_of_families
                    self.planner.on_progress(f"{family}{self._best_so_far()}", share, share + (1 - _PREPARATION) / count_of_families)
                    self._search_family(family, sizes)
                    done += 1
        refused = {one.reason for one in self._out if one.kind == _REFUSED}
        if not self._fitting and len(refused) == len({one.reason for one in self._out}) == 1:
            raise ConfigError(f"--fit: every configuration is {refused.pop()}")

    # -- layouts and families ---------------------------------------------------------------------------------------------

    def _sort_layouts(self, waiting: dict[Layout, list[Family]], first: Layout) -> None:
        """Sort ``waiting`` in place: ``first``, then by estimated time, pipelines last; remove layouts that the engine refuses."""
        if len(waiting) > 1:
            self.planner.prepare([self._representative(layout) for layout in waiting if layout.pipeline == 1])
            for layout in [one for one in waiting if one.pipeline == 1]:
                if not self._learn(layout):
                    del waiting[layout]
        others = [one for one in waiting if one != first]
        for layout in sorted(others, key=lambda one: (one.pipeline, self.time_bounds.seconds(Family(one, 1, Tier(), 0)))):
            waiting[layout] = waiting.pop(layout)

    def _representative(self, layout: Layout) -> Candidate:
        """Return the candidate whose costs bound all of ``layout``: stage 1 with the fewest micro-steps."""
        return self.planner.space.candidate(Family(layout, 1, Tier(), 0), self.planner.space.micro_batches(layout)[-1])

    def _learn(self, layout: Layout) -> bool:
        """Plan the representative of ``layout``; return False if the engine refuses it, and exclude the layout."""
        try:
            self.time_bounds.learn(self._representative(layout), self.planner.least(self._representative(layout)))
        except HfZeroError as error:
            self._exclude(layout, f"{_REFUSED}: {_one_line(error)}", _REFUSED)
            return False
        return True

    def _is_slow_layout(self, layout: Layout) -> bool:
        """Return whether ``layout`` is excluded now: its lower bound exceeds the best candidates, or the engine refuses it."""
        reached, first = self._time_to_beat(), Family(layout, 1, Tier(), 0)
        if reached == float("inf"):
            return False
        if not self.time_bounds.knows(layout) and self.time_bounds.seconds(first) <= reached and not self._learn(layout):
            return True
        least = self.time_bounds.seconds(first)
        if least > reached:
            self._exclude(layout, f"at least {least:.4g} s per step in every configuration, {self._versus_best(reached)}", _SLOW)
        return least > reached

    def _try_smallest(self, layout: Layout, size: int) -> None:
        """Try, at each stage, the candidate with the least memory without offload of states; if it does not fit, others are excluded.

        Those that fit are the first answer of a search that is stopped.
        """
        space = self.planner.space
        families = [
            Family(layout, stage, Tier(), 1, space.moves and layout.pipeline == 1) for stage in STAGES if stage or not layout.shard_group
        ]
        candidates = [space.candidate(one, size) for one in families]
        self.planner.prepare([one for one in candidates if one.family.stage >= 2])
        for candidate in candidates:
            with suppress(HfZeroError):  # reported when the search visits the family
                self._smallest += filter(None, [self._try(candidate)])

    def _best_so_far(self) -> str:
        """Return the fastest fitting candidate so far as a clause for the progress; "" without one."""
        best = min(self._fitting, key=_rank_key, default=None)
        return f" (best so far: {best.candidate}, {best.seconds:.4g} s per step)" if best is not None else ""

    def _time_to_beat(self) -> float:
        """Return the seconds of the slowest of the best candidates so far; infinity while there are fewer than ``SHOWN``."""
        reached = sorted(one.seconds for one in self._fitting)[:SHOWN]
        return reached[-1] if len(reached) == SHOWN else float("inf")

    def _versus_best(self, reached: float) -> str:
        return f"but {SHOWN} fitting candidates take at most {reached:.4g} s"

    def _is_slow_family(self, family: Family) -> bool:
        """Return whether a lower bound of the time of ``family`` exceeds the best candidates; if so, exclude the family."""
        least, reached = self.time_bounds.seconds(family), self._time_to_beat()
        if least > reached:
            self._exclude(
                family,
                f"at least {least:.4g} s per step with every micro batch, {self._versus_best(reached)}",
                _SLOW,
            )
        return least > reached

    def _search_family(self, family: Family, sizes: list[int]) -> None:
        """Find the largest micro-batch size of ``family`` that fits, unless bounds exclude the family."""
        if self._is_slow_family(family):
            return
        within = max(((size, str(other)) for other, size in self._largest.items() if _only_adds(family, other)), default=(0, ""))
        left = [size for size in sizes if size > within[0]]
        if not left:
            reason = f"{_NEEDLESS}: {within[1]} fits with every micro batch, and this only adds recomputation or offload"
            self._exclude(family, reason, _NEEDLESS)
            return
        near = [size for size in left if not self.memory_bounds.reason_offloaded(self.planner.space.candidate(family, size))]
        least, reached = self.time_bounds.seconds_offloaded(family, near[-1]) if near else 0.0, self._time_to_beat()
        if least > reached:
            sizes_of = f"with micro batches up to {near[-1]}, which may fit, " if near != left else ""
            reason = f"{sizes_of}at least {least:.4g} s per step, the time without offload, {self._versus_best(reached)}"
            self._exclude(family, reason, _SLOW)
            return
        try:
            found = self._largest_fitting(family, left)
        except HfZeroError as error:
            self._exclude(family, f"{_REFUSED}: {_one_line(error)}", _REFUSED)
            return
        if found is None and within[0]:
            reason = f"{_NEEDLESS} up to micro batch {within[0]}, with which {within[1]} fits; larger ones: {self._why(family, left[0])}"
            self._exclude(family, reason, _NEEDLESS)
        elif found is None:
            self._exclude(family, f"{_LARGE} with any micro batch; with {left[0]}: {self._why(family, left[0])}", _LARGE)
        else:
            self._keep(found, left)

    def _largest_fitting(self, family: Family, sizes: list[int]) -> Fitting | None:
        """Return the fitting candidate with the largest size, or None; tries the size without accumulation first, then the others."""
        if sizes and self.planner.space.candidate(family, sizes[-1]).accumulation == 1:
            alone = self._try(self.planner.space.candidate(family, sizes[-1]))
            if alone is not None:
                return alone
            sizes = sizes[:-1]
        low, high, found = 0, len(sizes), None
        while low < high:
            middle = self._next_index(family, sizes, low, high)
            one = self._try(self.planner.space.candidate(family, sizes[middle]))
            low, high, found = (middle + 1, high, one) if one is not None else (low, middle, found)
        return found

    def _next_index(self, family: Family, sizes: list[int], low: int, high: int) -> int:
        """Return the index of the next size to try, from ``low`` to ``high`` - 1.

        Interpolates linearly between a size that fits and one that does not. Without such a pair, it tries the largest size that fits at
        another stage; without one, the smallest size, then the largest.
        """
        known = sorted((one.micro_batch, self.planner.excess(costs)) for one, costs in self.planner.known() if one.family == family)
        fits, above = [one for one in known if one[1] <= 1], [one for one in known if one[1] > 1]
        if fits and above:
            (size, share), (larger, excess) = fits[-1], above[0]
            reached = size + (1 - share) * (larger - size) / (excess - share)
            return max(low, min(high, sum(one <= reached for one in sizes)) - 1)
        others = [size for other, size in self._largest.items() if _differs_in_stage(other, family) and size in sizes]
        if others and not low:
            return min(sizes.index(max(others)), high - 1)
        return low if others or not low else high - 1

    def _try(self, candidate: Candidate, whole: bool = False) -> Fitting | None:
        """Return ``candidate`` with its costs if it fits, else None; plans it unless bounds exclude it."""
        if not whole:
            if self.memory_bounds.reason(candidate):
                return None
            least = self.planner.least(candidate)
            self.memory_bounds.learn(candidate, least)
            if self.planner.shortage(least)[0]:
                return None
        costs, known = self.planner.costs(candidate, whole)
        tier, words = self.planner.shortage(costs)
        return None if tier else Fitting(candidate, costs, self.rates.seconds(costs), known)

    def _why(self, family: Family, size: int) -> str:
        candidate = self.planner.space.candidate(family, size)
        try:
            takes = (tell() for tell in (lambda: self.planner.least(candidate), lambda: self.planner.costs(candidate)[0]))
            return self.memory_bounds.reason(candidate) or next(filter(None, (self.planner.shortage(costs)[1] for costs in takes)), "")
        except HfZeroError as error:
            return _one_line(error)

    def _keep(self, found: Fitting, sizes: list[int]) -> None:
        self._fitting.append(found)
        family, size = found.candidate.family, found.candidate.micro_batch
        self._largest[family] = size
        for other in sizes:
            if other > size:
                self._exclude(self.planner.space.candidate(family, other), f"{_LARGE}: {self._why(family, other)}", _LARGE)
                break

    def _exclude(self, what: object, reason: str, kind: str) -> None:
        self._out.append(Excluded(str(what) or "pure data parallelism", reason, kind))

    # -- the best ---------------------------------------------------------------------------------------------------------

    def _best(self) -> list[Fitting]:
        """Return the fastest fitting candidates, planned with all blocks; if one then does not fit, try its smaller sizes."""
        self.planner.on_progress("best candidates, with all blocks", 0.98, 1.0)
        waiting = self._fitting  # which has the best so far if the search is stopped
        waiting.sort(key=_rank_key)
        while not all(one.whole for one in waiting[:SHOWN]):
            self.planner.prepare([one.candidate for one in waiting[:SHOWN] if not one.whole], whole=True)
            one = next(one for one in waiting[:SHOWN] if not one.whole)
            waiting.remove(one)
            exact = self._try(one.candidate, whole=True)
            if exact is None:
                reason = f"{_LARGE}: {self.planner.shortage(self.planner.costs(one.candidate, whole=True)[0])[1]}"
                self._exclude(one.candidate, reason, _LARGE)
                smaller = [
                    size for size in self.planner.space.micro_batches(one.candidate.family.layout) if size < one.candidate.micro_batch
                ]
                exact = self._largest_fitting(one.candidate.family, smaller)
            if exact is not None:
                waiting.append(exact)
            waiting.sort(key=_rank_key)
        for one in waiting[SHOWN:]:
            self._exclude(
                one.candidate,
                f"fits, but takes {one.seconds:.4g} s per step; the {SHOWN} best take at most {waiting[SHOWN - 1].seconds:.4g} s",
                _SLOW,
            )
        return waiting[:SHOWN]


def _rank_key(one: Fitting) -> tuple[float, float, float]:
    return one.seconds, one.costs.device, one.costs.host


def _round_of(family: Family) -> int:
    """Return the round in which the search visits ``family``: 0 plain, 1 recomputing, 2 offloading states or activations."""
    return 2 if family.tier != Tier() or family.moves else int(family.recomputes > 0)


def _differs_in_stage(family: Family, other: Family) -> bool:
    """Return whether the families differ at most in their ZeRO stage."""
    return replace(family, stage=other.stage) == other


def _only_adds(family: Family, other: Family) -> bool:
    """Return whether ``family`` is ``other`` with additional recomputation or offload."""
    same = family != other and (family.layout, family.stage) == (other.layout, other.stage)
    return same and other.share <= family.share and other.moves <= family.moves and other.tier.within(family.tier)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
