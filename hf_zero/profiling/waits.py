"""Measure the time that a rank waits for gathers, reductions, votes of other ranks, and the host."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from hf_zero import observe
from hf_zero.comm.watch import DeviceWatch, HostWatch, Watch

# Waits that other ranks cause, and waits that only this rank's host, disk and data loader cause.
PEER_WAITS = ("gathers", "reductions", "exchanges", "votes")
OWN_WAITS = ("offload", "data")
WAITS = (*PEER_WAITS, *OWN_WAITS)


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
        """Return the seconds per step by kind since the last call, ``steps`` steps ago; waits of streams are those of one step."""
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
