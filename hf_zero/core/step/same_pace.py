"""Notices ranks that make fewer or more micro-steps than the others, before they train on different batches until one of them ends."""

from __future__ import annotations

from collections.abc import Callable

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import StateError


def require_same_pace(
    collectives: Collectives,
    micro_steps: int,
    has_written: bool = False,
    digest: int = 0,
    differing: Callable[[], StateError] | None = None,
) -> bool:
    """Raises on all ranks when one has begun another number of micro-steps; collective, on the host.

    Args:
        collectives: The data-parallel axis.
        micro_steps: Backwards that this rank has begun so far, and forwards for training that raised.
        has_written: The script has written gradients of its own on this rank.
        digest: Of all else that must be alike on all ranks, up to 24 bits.
        differing: Makes the error for digests that differ; collective.

    Returns:
        Whether any rank ``has_written``.

    Raises:
        StateError: It names the ranks and their numbers.
    """
    most, fewest, largest, smallest, written = collectives.largest_of(
        [micro_steps, -micro_steps, digest, -digest, has_written], "micro-steps"
    )
    if differing is not None and largest != -smallest:
        raise differing()
    if most == -fewest:
        return bool(written)
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
