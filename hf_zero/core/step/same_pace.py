"""What the ranks agree on at each boundary, by one vote: what must be alike on all of them, and what is so on any."""

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
    """Something that must be alike on all ranks.

    Attributes:
        numbers: What this rank has: a few numbers, floating-point or whole.
        refuse: Called with the network on every rank where they differ; may exchange more, and raises.
    """

    numbers: Sequence[float]
    refuse: Callable[[Collectives], NoReturn]


class Agreed(NamedTuple):
    """What the ranks have told each other at a boundary, the same on all of them.

    Attributes:
        written: A script has written gradients of its own, on any rank.
        signal: Number of a signal that asks a rank to end (the highest, where several were heard); 0 when none has heard one.
        waits: A parameter that the last step has not trained has a gradient, on any rank.
    """

    written: bool
    signal: int
    waits: bool


def agree(collectives: Collectives, alike: Sequence[Alike], anywhere: Sequence[int] = ()) -> list[int]:
    """Compares what the ranks have, in one message; collective, on the host.

    The message has 24 bits for all that must be alike: a digest. It holds the number of micro-steps, so it is another one at each
    boundary, and two that are the same by chance differ at the next.

    Args:
        collectives: The ranks.
        alike: What must be alike on all of them; the first that is not is refused.
        anywhere: Numbers of this rank, of which the largest of all ranks counts.

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
    """Notices ranks that make fewer or more micro-steps than the others, before they train on different batches until one of them ends.

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
