"""Facts that all ranks must have alike, compared by one vote however many ranks there are; what differs is named with everybody's value."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_zero.comm.collectives import Collectives

# What of a digest is compared: so many numbers of so many hexadecimal digits, 24 bits.
_PIECES, _DIGITS = 10, 6
_MOST_KINDS = 4  # kinds of ranks that are told apart in a message


@dataclass(frozen=True)
class Kind:
    """Ranks with the same facts.

    Attributes:
        ranks: Which, on the axis.
        lines: Their facts.
    """

    ranks: list[int]
    lines: list[str]

    @property
    def named(self) -> str:
        """The ranks in words."""
        return name_ranks(self.ranks)


def name_ranks(ranks: Sequence[int]) -> str:
    """Says "rank 1", or "ranks 0, 2": at most the first eight."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def ranks_by_facts(lines: Sequence[str], collectives: Collectives, what: str) -> list[Kind]:
    """The ranks by what they have in ``lines``, rank 0's kind first; one kind where all have the same. Collective.

    One vote where all have the same; more is exchanged where they have not. Of more than a few kinds the first are returned.

    Args:
        lines: This rank's facts, in an order that all ranks use.
        collectives: The ranks that must have them alike.
        what: What they are of, for labels.
    """
    everybody = list(range(collectives.world))
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    pieces = [int(digest[start : start + _DIGITS], 16) for start in range(0, _PIECES * _DIGITS, _DIGITS)]
    most = collectives.largest_of([*pieces, *(-piece for piece in pieces)], f"digest of the {what}")
    if most[:_PIECES] == [-least for least in most[_PIECES:]]:
        return [Kind(everybody, list(lines))]
    ranks: dict[str, list[int]] = {}
    for rank, theirs in enumerate(collectives.gather_objects(digest, f"digests of the {what}")):
        ranks.setdefault(theirs, []).append(rank)
    kinds = list(ranks.values())[:_MOST_KINDS]
    return [Kind(kind, collectives.broadcast_object(list(lines), kind[0], what)) for kind in kinds]


def fact(key: str, value: object) -> str:
    """A line that says what ``key`` is."""
    return f"{key}\t{value}"


def is_fact(line: str | None) -> bool:
    """Whether ``fact`` has made ``line``."""
    return line is not None and "\t" in line


def differing(kinds: Sequence[Kind], default: Callable[[str], str] = lambda _key: "not there", most: int = 8) -> list[str]:
    """For each fact that the kinds of ranks do not have alike a clause with its key, all values and their ranks.

    Args:
        kinds: The ranks by what they have.
        default: The value of a key that a kind does not name.
        most: At most so many.
    """
    tables = [dict(line.split("\t", 1) for line in kind.lines if is_fact(line)) for kind in kinds]
    clauses = []
    for key in dict.fromkeys(key for table in tables for key in table):
        by_value: dict[str, list[int]] = {}
        for kind, table in zip(kinds, tables, strict=True):
            by_value.setdefault(table[key] if key in table else default(key), []).extend(kind.ranks)
        if len(by_value) > 1:
            clauses.append(f"{key} is " + ", ".join(f"{value} on {name_ranks(sorted(ranks))}" for value, ranks in by_value.items()))
    return clauses[:most] + ([f"and {len(clauses) - most} more"] if len(clauses) > most else [])
