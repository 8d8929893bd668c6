"""Find the ranks that others wait for, from the time that each rank waits.

All ranks of a synchronous step end together, so a rank that computes longer than its peers is the rank that waits less than they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hf_zero.comm.collectives import Collectives
from hf_zero.observe import log_rank0
from hf_zero.profiling.waits import OWN_WAITS, PEER_WAITS

# A rank is slow if it waits less for others than the median of its peers does, by at least this share of a step.
MARGIN = 0.1
PREFIX = "Train/Waited/for_ranks/"


@dataclass(frozen=True)
class SlowRank:
    """A rank that others wait for.

    Attributes:
        rank: Its number among the ranks of the engine.
        own: Share of a step that it waits, by kind of wait.
        peers: Median of the other ranks' shares, by kind of wait.
    """

    rank: int
    own: Mapping[str, float]
    peers: Mapping[str, float]

    def __str__(self) -> str:
        waits = _shares(self.own, self.peers, PEER_WAITS)
        text = (
            f"rank {self.rank} is slow: it waits for other ranks {_percent(_for_peers(self.own))} of a step, "
            f"the median of the other ranks is {_percent(_for_peers(self.peers))} ({waits})"
        )
        reasons = _shares(self.own, self.peers, OWN_WAITS)
        return f"{text}. Waits that other ranks do not cause: {reasons}" if reasons else text


class SlowRanks:
    """Comparison of the waits of all ranks, once per record.

    Args:
        everyone: All ranks of the engine.
    """

    def __init__(self, everyone: Collectives) -> None:
        self._everyone = everyone

    def measure(self, step: int, steps: int, seconds: float, waits: Mapping[str, float]) -> dict[str, float]:
        """Compare the ranks, log a line per slow rank on rank 0, and return metrics, the same on all ranks; collective.

        Args:
            step: The optimizer step.
            steps: Optimizer steps of the record.
            seconds: Seconds of one step.
            waits: Seconds of one step that this rank waited, by kind (``waits.WAITS``).

        Returns:
            The least and the median share of a step that a rank waited for other ranks, and the rank with the least; empty on one rank.
        """
        ranks = self._gather({kind: waits[kind] / seconds for kind in (*PEER_WAITS, *OWN_WAITS)})
        if len(ranks) < 2:
            return {}
        for slow in slow_ranks(ranks):
            log_rank0("step=%d, over %d steps %s", step, steps, slow)
        shares = [_for_peers(shares) for shares in ranks]
        least = min(shares)
        return {f"{PREFIX}least": least, f"{PREFIX}median": median(shares), f"{PREFIX}least_rank": float(shares.index(least))}

    def _gather(self, own: Mapping[str, float]) -> list[dict[str, float]]:
        """Return the shares of all ranks, in the order of ranks; only this rank's where the others' are not known (in a plan)."""
        world, rank, width = self._everyone.world, self._everyone.rank, len(own)
        unknown = -1.0
        values = [unknown] * (world * width)
        values[rank * width : (rank + 1) * width] = list(own.values())
        values = self._everyone.largest_of(values, "waits of all ranks")
        rows = [values[start : start + width] for start in range(0, world * width, width)]
        return [dict(zip(own, row, strict=True)) for row in rows if unknown not in row]


def slow_ranks(ranks: Sequence[Mapping[str, float]]) -> Iterator[SlowRank]:
    """Yield the ranks that others wait for, in the order of ranks.

    Args:
        ranks: Share of a step that each rank waited, by kind; at least two ranks.
    """
    for rank, own in enumerate(ranks):
        others = [shares for other, shares in enumerate(ranks) if other != rank]
        if median(map(_for_peers, others)) - _for_peers(own) >= MARGIN:
            yield SlowRank(rank, own, {kind: median(shares[kind] for shares in others) for kind in own})


def _for_peers(shares: Mapping[str, float]) -> float:
    return sum(shares[kind] for kind in PEER_WAITS)


def _shares(own: Mapping[str, float], peers: Mapping[str, float], kinds: Sequence[str]) -> str:
    """Return "gathers 1.0 % and 12.0 %, votes ..." of the kinds that reach 1 % on either side."""
    named = [kind for kind in kinds if max(own[kind], peers[kind]) >= 0.01]
    return ", ".join(f"{kind} {_percent(own[kind])} and {_percent(peers[kind])}" for kind in named)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
