"""Whether what the ranks issued could hang on NCCL: a check of their collectives and waits, in the order of each rank's program.

gloo matches messages by tags and lets many of them pass each other; NCCL does not. Of several communicators it asks that all ranks
issue their operations in one order, and within one they run in the order of issue, each with the same operation and size on every rank
(NVIDIA/nccl issue 1174). ``check`` holds the records of a job against that:

- of each group, every member issued the same operations, with the same labels and bytes;
- two ranks issued all that both take part in, over all groups together, in one order;
- replayed, every wait comes to an end: a collective runs when all its ranks have issued it and the earlier ones of its group are
  over, and a wait stops its rank. On NCCL a wait stops the compute stream and the host runs ahead until it reads a number; stopping
  the rank at once is the stricter of the two, so what ends here ends there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

_SHOWN = 4  # events before and after the first difference


class OrderError(AssertionError):
    """The ranks of a job issued collectives in a way that could hang on NCCL, or mix up messages."""


class Issue(NamedTuple):
    """A collective as one rank issued it."""

    group: str
    operation: str
    unit: str = ""  # what it was for; "" where user code called torch.distributed itself
    nbytes: int = 0  # of the message, where it must agree

    def __str__(self) -> str:
        unit = f" ({self.unit})" if self.unit else ""
        size = f" {self.nbytes} bytes" if self.nbytes else ""
        return f"{self.operation}{unit}{size} on group {self.group}"


@dataclass
class Record:
    """What one rank did, in the order of its program.

    Attributes:
        groups: Ranks of the groups it used, by the group's name.
        events: A collective it issued, or the number of the one it waited for (among its own, from 0).
    """

    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    events: list[Issue | int] = field(default_factory=list)

    @property
    def issues(self) -> list[Issue]:
        """Without the waits."""
        return [event for event in self.events if not isinstance(event, int)]


def check(records: Sequence[Record]) -> None:
    """Compares the records of all ranks, by rank.

    Raises:
        OrderError: They do not fit together; the text shows where.
    """
    __tracebackhide__ = True  # pytest: the text says it all
    issues = [record.issues for record in records]
    groups = {name: members for record in records for name, members in record.groups.items()}
    everyone = tuple(range(len(records)))
    if all(other == issues[0] for other in issues) and all(members == everyone for members in groups.values()):
        return  # each waits only for what all have issued before
    _check_groups(groups, issues)
    _check_pairs(groups, issues)
    stuck = replay(records, groups)
    if stuck:
        raise OrderError("the ranks wait for each other:\n" + "\n".join(stuck))


def _check_groups(groups: dict[str, tuple[int, ...]], issues: Sequence[list[Issue]]) -> None:
    """The same sequence within each group."""
    __tracebackhide__ = True
    by_group = [_by_group(mine) for mine in issues]
    for name, members in groups.items():
        first = members[0]
        for other in members[1:]:
            mine, theirs = by_group[first].get(name, []), by_group[other].get(name, [])
            if mine != theirs:
                raise OrderError(f"group {name} carries different sequences:\n{_difference(first, mine, other, theirs)}")


def _check_pairs(groups: dict[str, tuple[int, ...]], issues: Sequence[list[Issue]]) -> None:
    """One order of all that two ranks do together, whatever the group."""
    __tracebackhide__ = True
    for first, other in combinations(range(len(issues)), 2):
        common = {name for name, members in groups.items() if first in members and other in members}
        mine, theirs = ([issue for issue in issues[rank] if issue.group in common] for rank in (first, other))
        if mine != theirs:
            raise OrderError(f"collectives of several groups are issued in different orders:\n{_difference(first, mine, other, theirs)}")


def _by_group(issues: list[Issue]) -> dict[str, list[Issue]]:
    found: dict[str, list[Issue]] = {}
    for issue in issues:
        found.setdefault(issue.group, []).append(issue)
    return found


def _difference(first: int, mine: list[Issue], other: int, theirs: list[Issue]) -> str:
    """The first place where two sequences differ, with what surrounds it."""
    pairs = zip(mine, theirs, strict=False)
    place = next((index for index, (one, two) in enumerate(pairs) if one != two), min(len(mine), len(theirs)))
    lines = [f"after {place} that are the same, the last of them", *map(str, mine[max(0, place - _SHOWN) : place])]
    for rank, sequence in ((first, mine), (other, theirs)):
        rest = [str(issue) for issue in sequence[place : place + _SHOWN]] or ["nothing more"]
        lines += [f"rank {rank} goes on, to {len(sequence)} in all, with", *rest]
    return "\n".join(line if line.startswith(("after", "rank")) else f"  {line}" for line in lines)


# -- replay --------------------------------------------------------------------------------------------------------------


class _Replay:
    """Ranks that go through their records; a wait for a collective that is not over stops them."""

    def __init__(self, records: Sequence[Record], groups: dict[str, tuple[int, ...]]) -> None:
        self.records, self.groups = records, groups
        self.places = [0] * len(records)  # next event of each rank
        self.issued: list[list[tuple[Issue, int]]] = [[] for _ in records]  # with its number within the group
        self.counts: list[Counter[str]] = [Counter() for _ in records]  # issued by each rank, by group

    def over(self, issue: Issue, number: int) -> bool:
        """Whether all its ranks have issued it; the earlier ones of its group they then have too."""
        return all(self.counts[rank][issue.group] > number for rank in self.groups[issue.group])

    def advance(self, rank: int) -> bool:
        """Goes on as far as a rank can; whether it went anywhere."""
        events, start = self.records[rank].events, self.places[rank]
        while self.places[rank] < len(events):
            event = events[self.places[rank]]
            if isinstance(event, int):
                if not self.over(*self.issued[rank][event]):
                    break
            else:
                self.issued[rank].append((event, self.counts[rank][event.group]))
                self.counts[rank][event.group] += 1
            self.places[rank] += 1
        return self.places[rank] > start

    def stuck(self) -> Iterator[str]:
        """One line for each rank that waits."""
        for rank, record in enumerate(self.records):
            if self.places[rank] == len(record.events):
                continue
            issue, number = self.issued[rank][record.events[self.places[rank]]]  # type: ignore[index]
            missing = [other for other in self.groups[issue.group] if self.counts[other][issue.group] <= number]
            last = self.issued[rank][-1][0]
            yield f"rank {rank} waits for {issue}, which rank(s) {missing} have not issued; the last it issued is {last}"


def replay(records: Sequence[Record], groups: dict[str, tuple[int, ...]]) -> list[str]:
    """Runs the records against each other; one line for each rank that would wait for ever, none where all end."""
    state = _Replay(records, groups)
    while sum(state.advance(rank) for rank in range(len(records))):  # each of them
        pass
    return list(state.stuck())
