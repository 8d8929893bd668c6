"""Measure the time that a rank waits for gathers, reductions, votes of other ranks and the host, and find the ranks that others wait for.

All ranks of a synchronous step end together, so a rank that computes longer than its peers is the rank that waits less than they do.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any

import torch

from hf_zero import observe
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.comms_log import DeviceWatch, HostWatch, Watch
from hf_zero.observe import log_rank0

# Waits that other ranks cause, and waits that only this rank's host, disk and data loader cause.
PEER_WAITS = ("gathers", "reductions", "exchanges", "votes")
OWN_WAITS = ("offload", "data")
WAITS = (*PEER_WAITS, *OWN_WAITS)
# A rank is slow if it waits less for others than the median of its peers does, by at least this share of a step.
MARGIN = 0.1
PREFIX = "Train/Waited/for_ranks/"


class WaitTimes:
    """Meter that sums up waits by kind; a wait inside another one counts as part of the outer one.

    Waits that block the host are measured with the host's clock. If a collective blocks the device's stream instead, two device events
    enclose the wait. No code waits for these events; ``take`` reads them. Each event costs the host some microseconds, so they are recorded
    only in one step per record.

    Args:
        device: The training device.
        blocks_host: Whether a wait for a collective blocks the host.
    """

    def __init__(self, device: torch.device, blocks_host: bool) -> None:
        self._host: Watch = HostWatch()
        self._stream: Watch = self._host if blocks_host or device.type == "cpu" else DeviceWatch(device)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._passed: list[tuple[str, Any, Any]] = []  # kind, begin and end on the stream
        self._wait = _Wait(self)
        self._nothing = _Nothing()
        self._waiting = False
        self._streams = False
        self._thread = threading.get_ident()

    @contextmanager
    def counted(self, streams: bool) -> Iterator[None]:
        """Count waits of this thread inside the context; waits of the device's stream only with ``streams``."""
        self._thread, self._streams = threading.get_ident(), streams
        observe.set_meter(self)
        try:
            yield
        finally:
            observe.set_meter(None)

    def wait(self, kind: str, on_stream: bool) -> _Wait | _Nothing:
        """Return a context manager that measures one wait; it does nothing inside another wait and on other threads."""
        if self._waiting or threading.get_ident() != self._thread:  # waits of the update thread do not delay the step
            return self._nothing
        watch = self._stream if on_stream else self._host
        if watch is not self._host and not self._streams:
            return self._nothing
        self._wait.kind, self._wait.watch = kind, watch
        return self._wait

    def add(self, kind: str, seconds: float) -> None:
        """Add a wait of the host that the caller has timed."""
        self._seconds[kind] += seconds

    def entered(self) -> None:
        """Begin a wait; waits inside it are not measured."""
        self._waiting = True

    def left(self, kind: str, watch: Watch, begin: Any, end: Any) -> None:
        """End the wait, and add its time to ``kind``."""
        self._waiting = False
        if watch is self._host:
            self._seconds[kind] += end - begin
        else:
            self._passed.append((kind, begin, end))

    def take(self, steps: int) -> dict[str, float]:
        """Return the seconds per step by kind since the last call, ``steps`` steps ago; waits of streams are measured in one step."""
        taken = {kind: self._seconds[kind] / steps for kind in WAITS}
        for kind, begin, end in self._passed:
            taken[kind] += self._stream.seconds(begin, end)
        self._passed, self._seconds = [], defaultdict(float)
        return taken


class _Nothing:
    """Context manager of a wait that is not measured."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class _Wait:
    """Context manager of the measured wait; one object serves all, because only one wait is measured at a time."""

    kind = ""
    watch: Watch
    _begin: Any = None

    def __init__(self, times: WaitTimes) -> None:
        self._times = times

    def __enter__(self) -> None:
        self._times.entered()
        self._begin = self.watch.now()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._times.left(self.kind, self.watch, self._begin, self.watch.now())


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
