"""Agree at each boundary, by one vote: on facts that must be the same on all ranks, and on facts that are true on any rank."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import StateError


@dataclass(frozen=True)
class Alike:
    """Fact that must be the same on all ranks.

    Attributes:
        numbers: This rank's values: a few floats or integers.
        refuse: Called with the network on every rank if the numbers differ; may exchange more, and raises.
    """

    numbers: Sequence[float]
    refuse: Callable[[Collectives], NoReturn]


class Agreed(NamedTuple):
    """Result of a boundary's vote, the same on all ranks.

    Attributes:
        written: A script has written gradients of its own, on any rank.
        signal: Number of a signal that asks a rank to end (the highest of several); 0 if no rank has received one.
        waits: A parameter that the last step has not trained has a gradient, on any rank.
    """

    written: bool
    signal: int
    waits: bool


def agree(collectives: Collectives, alike: Sequence[Alike], anywhere: Sequence[int] = ()) -> list[int]:
    """Compare the facts of all ranks in one message; collective, on the host.

    The message has 24 bits for all facts that must be the same: a digest. The number of micro-steps is in it, so the digest changes
    at each boundary, and two digests that are equal by chance differ at the next.

    Args:
        collectives: The ranks.
        alike: Facts that must be the same on all ranks; the first that differs is refused.
        anywhere: Numbers of this rank; the result is the maximum over ranks.

    Returns:
        The largest of each of ``anywhere``.
    """
    brought = [array("d", one.numbers).tobytes() for one in alike]
    digest = int.from_bytes(hashlib.blake2b(b"".join(brought), digest_size=3).digest(), "big")
    most, least, *answers = collectives.largest_of([digest, -digest, *anywhere], "micro-steps")
    if most != -least:
        by_rank = collectives.gather_objects(brought, "what differs at the boundary")
        next(one for index, one in enumerate(alike) if len({line[index] for line in by_rank}) > 1).refuse(collectives)
    return [int(answer) for answer in answers]


def same_pace(micro_steps: int) -> Alike:
    """Return the number of micro-steps for a vote, which detects ranks that make fewer or more of them than others.

    Args:
        micro_steps: Backwards that this rank has begun so far, and forwards for training that raised.

    The error is a StateError that names the ranks and their numbers.
    """

    def refuse(collectives: Collectives) -> NoReturn:
        by_count: dict[int, list[int]] = {}
        for rank, count in enumerate(collectives.gather_objects(micro_steps, "micro-steps")):
            by_count.setdefault(count, []).append(rank)
        told = "; ".join(f"{count} on rank(s) {', '.join(map(str, ranks))}" for count, ranks in sorted(by_count.items()))
        raise StateError(
            f"the ranks have begun different numbers of micro-steps: {told}, so they would train on different batches. Either "
            "a rank skipped a batch because its loader is shorter (even_batches=False, a sampler that does not divide "
            "evenly), or the script caught an exception in a forward or backward and went on. Give all ranks the same number "
            "of batches, and let an exception end the run"
        )

    return Alike([micro_steps], refuse)
