"""Divides a row of weights into runs, so that the heaviest run is as light as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balanced_runs(weights: Sequence[float], runs: int) -> list[range]:
    """Positions in ``weights`` by run: none empty, the heaviest as light as possible, and of those the most even ones.

    Dynamic programming over the prefixes, first for the heaviest run, then for the sum of squares with no run above it:
    O(runs * len(weights) ** 2).

    Args:
        weights: At least as many as ``runs``, none below 0.
        runs: Their number, at least 1.
    """
    sums = [0, *accumulate(weights)]
    heaviest = _divide(sums, runs, max, float("inf"))
    limit = max(sums[run.stop] - sums[run.start] for run in heaviest)
    return _divide(sums, runs, lambda before, weight: before + weight**2, limit)


def _divide(sums: Sequence[float], runs: int, join: object, limit: float) -> list[range]:
    """The division of least cost, where ``join(cost so far, weight of a run)`` is the cost and no run is heavier than ``limit``."""
    assert callable(join)
    count = len(sums) - 1
    costs = [[float("inf")] * (count + 1) for _ in range(runs + 1)]
    starts = [[0] * (count + 1) for _ in range(runs + 1)]
    costs[0][0] = 0
    for run in range(1, runs + 1):
        for stop in range(run, count + 1):
            for start in range(run - 1, stop):
                weight = sums[stop] - sums[start]
                if weight > limit or costs[run - 1][start] == float("inf"):
                    continue
                cost = join(costs[run - 1][start], weight)
                if cost < costs[run][stop]:
                    costs[run][stop], starts[run][stop] = cost, start
    found, stop = [], count
    for run in range(runs, 0, -1):
        found.append(range(starts[run][stop], stop))
        stop = starts[run][stop]
    return found[::-1]
