"""Work divided among ranks, the largest piece first."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def largest_first(sizes: Sequence[int], world: int, near: Callable[[int, list[int]], int | None] | None = None) -> list[int]:
    """Gives each piece to a rank: from the largest to the smallest to the one that has least so far. The same on all ranks.

    Args:
        sizes: Of the pieces.
        world: Number of ranks.
        near: The rank that should have a piece, given its number and what every rank has so far; None where any may.

    Returns:
        The rank of each piece.
    """
    loads = [0] * world
    chosen = [0] * len(sizes)
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):  # stable
        wanted = near(piece, loads) if near is not None else None
        rank = loads.index(min(loads)) if wanted is None else wanted
        loads[rank] += sizes[piece]
        chosen[piece] = rank
    return chosen
