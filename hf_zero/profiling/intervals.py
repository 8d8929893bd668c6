"""Sets of stretches of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""Begin and end, in microseconds."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, in order."""
    found: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Time that is in both; each a result of ``union``."""
    found, here, there = [], 0, 0
    while here < len(left) and there < len(right):
        begin, end = max(left[here][0], right[there][0]), min(left[here][1], right[there][1])
        if begin < end:
            found.append((begin, end))
        if left[here][1] < right[there][1]:
            here += 1
        else:
            there += 1
    return found


def difference(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Time of ``left`` that is not in ``right``; each a result of ``union``."""
    found, there = [], 0
    for begin, end in left:
        while there < len(right) and right[there][1] <= begin:
            there += 1
        at = there
        while at < len(right) and right[at][0] < end:
            if right[at][0] > begin:
                found.append((begin, right[at][0]))
            begin = max(begin, right[at][1])
            at += 1
        if begin < end:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """How long they are together, in microseconds; a result of ``union``."""
    return sum(end - begin for begin, end in intervals)
