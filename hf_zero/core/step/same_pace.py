"""Notices ranks that make fewer or more micro-steps than the others, before they train on different batches until one of them ends."""

from __future__ import annotations

from typing import NamedTuple

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import StateError


class Agreed(NamedTuple):
    """What the ranks have told each other at a boundary, the same on all of them.

    Attributes:
        written: A script has written gradients of its own, on any rank.
        signal: Number of a signal that asks a rank to end (the highest, where several were heard); 0 when none has heard one.
    """

    written: bool
    signal: int


def require_same_pace(collectives: Collectives, micro_steps: int, has_written: bool = False, heard: int = 0) -> Agreed:
    """Raises on all ranks when one has begun another number of micro-steps; collective, on the host.

    Args:
        collectives: The data-parallel axis.
        micro_steps: Backwards that this rank has begun so far, and forwards for training that raised.
        has_written: The script has written gradients of its own on this rank.
        heard: Number of the signal that this rank has heard; 0 for none.

    Raises:
        StateError: It names the ranks and their numbers.
    """
    most, fewest, written, signal = collectives.largest_of([micro_steps, -micro_steps, has_written, heard], "micro-steps")
    if most == -fewest:
        return Agreed(bool(written), int(signal))
    counts = collectives.gather_objects(micro_steps, "micro-steps")
    by_count: dict[int, list[int]] = {}
    for rank, count in enumerate(counts):
        by_count.setdefault(count, []).append(rank)
    told = "; ".join(f"{count} on rank(s) {', '.join(map(str, ranks))}" for count, ranks in sorted(by_count.items()))
    raise StateError(
        f"the ranks have begun different numbers of micro-steps: {told}. A rank has skipped a batch: its loader is shorter "
        "(even_batches=False, a sampler that does not divide), or an exception in a forward or backward was caught and the loop went on. "
        "Ranks would train on different batches until one ends: give all the same number of batches, and let an exception end the run"
    )
