"""One order of all unshards and reductions of a backward, the same on every rank whatever its data; arithmetic only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class BackwardOrder:
    """Which reductions go before which unshard.

    [Note: one order] Ranks that skip blocks would issue unshards and reductions in orders of their own if each went when it could: the rank
    that computes a block reduces it between two unshards, the rank that skipped it at the end. On nccl the two wait for each other, because
    waiting puts all that is issued later behind what is waited for; several communicators want one order of all their operations. So
    both kinds have their positions in one order. An unshard may be issued from the moment the block is in use from which prefetching reaches it;
    the reductions of all blocks that backward has passed by then go before it, complete or not, and no other does. In the
    ordinary case this holds nothing up: when a block begins, those before it are complete. Every rank then issues the same sequence, and
    each collective depends only on those before it (what a rank waits for it has issued earlier), so none can wait in a circle.
    What arrives behind its position is late: the ranks agree on it at the end of backward, and reduce it once more.

    Attributes:
        issued: How many positions of the order have been issued; written by the reducer.

    Args:
        sizes: Elements that the unshard at each position of the order allocates; 0 where nothing is unsharded.
        positions: For each reduction, in the order in which they are sent, the position whose backward completes it, rising;
            ``len(sizes)`` for what is sent at the end.
        reach: Elements that may be unsharded ahead of use; at least one block unless 0.
    """

    def __init__(self, sizes: Sequence[int], positions: Sequence[int], reach: int) -> None:
        self.issued = 0
        self._before = [0] * len(sizes)
        self._opens = [0] * len(positions)  # number of issued positions from which on each reduction may be sent
        unshards = [position for position, size in enumerate(sizes) if size]
        first, ahead = 0, 0  # of what prefetching reaches from one block: the first unshard, and the elements up to the present one
        for index, position in enumerate(unshards):
            ahead += sizes[position]
            while first < index and ahead > reach:
                ahead -= sizes[unshards[first]]
                first += 1
            user = position if reach <= 0 else unshards[first - 1] if first else 0
            self._before[position] = bisect_left(positions, user)
        passed = 0
        for reduction in range(len(positions)):
            while passed < len(unshards) and self._before[unshards[passed]] <= reduction:
                passed += 1
            self._opens[reduction] = unshards[passed - 1] + 1 if passed else 0

    def before(self, position: int) -> int:
        """How many reductions go before the unshard at ``position``."""
        return self._before[position]

    def allows(self, reduction: int) -> bool:
        """Whether all unshards that go before ``reduction`` are issued."""
        return self.issued >= self._opens[reduction]
