"""Check whether the ranks' collectives could hang on NCCL, from their collectives and waits in the order of each rank's program.

gloo matches messages by tags and lets many of them overtake each other; NCCL does not. All ranks must issue operations on several NCCL
communicators in one order; on one communicator operations run in the order of issue, each with the same operation and size on every rank
(NVIDIA/nccl issue 1174). ``check`` compares the records of a job with these rules:

- in each group, every member issued the same operations, with the same labels and bytes;
- any two ranks issued all operations that both take part in, over all groups together, in one order;
- in a replay every wait ends: a collective runs when all its ranks have issued it and the earlier ones of its group are done, and a wait
  stops its rank. On NCCL a wait stops the compute stream, and the host runs ahead until it reads a number. To stop the rank at once is
  stricter, so a replay that ends here also ends there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

_SHOWN = 4  # events before and after the first difference


class OrderError(AssertionError):
    """Error raised if the ranks of a job issued collectives in an order that could hang on NCCL, or mix up messages."""


class Issue(NamedTuple):
    """A collective as one rank issued it."""

    group: str
    operation: str
    unit: str = ""  # its unit; "" where user code called torch.distributed itself
    nbytes: int = 0  # size of the message, where it must agree

    def __str__(self) -> str:
        unit = f" ({self.unit})" if self.unit else ""
        size = f" {self.nbytes} bytes" if self.nbytes else ""
        return f"{self.operation}{unit}{size} on group {self.group}"


@dataclass
class Record:
    """Events of one rank, in the order of its program.

    Attributes:
        groups: Ranks of the groups it used, by the group's name.
        issues: The collectives it issued.
        waits: For each wait, the number of collectives issued before it, and the number of the collective waited for (from 0).
    """

    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)


def check(records: Sequence[Record]) -> None:
    """Compare the records of all ranks, given in rank order.

    Raises:
        OrderError: The records do not match; the text shows the first difference.
    """
    __tracebackhide__ = True  # pytest: the text is enough
    issues = [record.issues for record in records]
    groups = {name: members for record in records for name, members in record.groups.items()}
    everyone = tuple(range(len(records)))
    if all(other == issues[0] for other in issues) and all(members == everyone for members in groups.values()):
        return  # each rank waits only for collectives that all have issued before
    _check_groups(groups, issues)
    _check_pairs(groups, issues)
    stuck = replay(records, groups)
    if stuck:
        raise OrderError("the ranks wait for each other:\n" + "\n".join(stuck))


def _check_groups(groups: dict[str, tuple[int, ...]], issues: Sequence[list[Issue]]) -> None:
    """Raise unless the members of each group issued the same sequence."""
    __tracebackhide__ = True
    by_group = [_by_group(mine) for mine in issues]
    for name, members in groups.items():
        first = members[0]
        for other in members[1:]:
            mine, theirs = by_group[first].get(name, []), by_group[other].get(name, [])
            if mine != theirs:
                raise OrderError(f"group {name} carries different sequences:\n{_difference(first, mine, other, theirs)}")


def _check_pairs(groups: dict[str, tuple[int, ...]], issues: Sequence[list[Issue]]) -> None:
    """Raise unless any two ranks issued their common operations in one order, over all groups."""
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
    """Return text on the first difference of two sequences, with the events around it."""
    pairs = zip(mine, theirs, strict=False)
    place = next((index for index, (one, two) in enumerate(pairs) if one != two), min(len(mine), len(theirs)))
    lines = [f"after {place} that are the same, the last of them", *map(str, mine[max(0, place - _SHOWN) : place])]
    for rank, sequence in ((first, mine), (other, theirs)):
        rest = [str(issue) for issue in sequence[place : place + _SHOWN]] or ["nothing more"]
        lines += [f"rank {rank} goes on, to {len(sequence)} in all, with", *rest]
    return "\n".join(line if line.startswith(("after", "rank")) else f"  {line}" for line in lines)


# -- replay --------------------------------------------------------------------------------------------------------------


class _Replay:
    """Ranks that replay their records; a wait for an unfinished collective stops a rank."""

    def __init__(self, records: Sequence[Record], groups: dict[str, tuple[int, ...]]) -> None:
        self.records, self.groups = records, groups
        self.issued = [0] * len(records)  # number of events issued by each rank
        self.waited = [0] * len(records)
        self.counts: list[Counter[str]] = [Counter() for _ in records]  # issued by each rank, by group
        self.numbers: list[list[int]] = [[] for _ in records]  # number of each issue within its group

    def missing(self, issue: Issue, number: int) -> list[int]:
        """Return the ranks that have not issued ``issue``. If there are none, the earlier ones of its group are done as well."""
        return [rank for rank in self.groups[issue.group] if self.counts[rank][issue.group] <= number]

    def stops(self, rank: int) -> tuple[Issue, list[int]] | None:
        """Return the collective at which a rank has stopped, and the ranks it waits for; None if it continues."""
        record, done = self.records[rank], self.waited[rank]
        if done == len(record.waits) or record.waits[done][0] > self.issued[rank]:
            return None
        issue = record.issues[record.waits[done][1]]
        missing = self.missing(issue, self.numbers[rank][record.waits[done][1]])
        return (issue, missing) if missing else None

    def advance(self, rank: int) -> bool:
        """Advance a rank as far as possible; return whether it has moved."""
        record, start = self.records[rank], (self.issued[rank], self.waited[rank])
        while self.stops(rank) is None:
            if self.waited[rank] < len(record.waits) and record.waits[self.waited[rank]][0] <= self.issued[rank]:
                self.waited[rank] += 1
            elif self.issued[rank] < len(record.issues):
                group = record.issues[self.issued[rank]].group
                self.numbers[rank].append(self.counts[rank][group])
                self.counts[rank][group] += 1
                self.issued[rank] += 1
            else:
                break
        return (self.issued[rank], self.waited[rank]) != start

    def stuck(self) -> Iterator[str]:
        """Yield one line for each rank that waits."""
        for rank, record in enumerate(self.records):
            if found := self.stops(rank):
                last = record.issues[self.issued[rank] - 1]
                yield f"rank {rank} waits for {found[0]}, which rank(s) {found[1]} have not issued; the last it issued is {last}"


def replay(records: Sequence[Record], groups: dict[str, tuple[int, ...]]) -> list[str]:
    """Replay the records against each other; return one line for each rank that would wait for ever, none if all end."""
    state = _Replay(records, groups)
    while sum(state.advance(rank) for rank in range(len(records))):  # advances every rank
        pass
    return list(state.stuck())
