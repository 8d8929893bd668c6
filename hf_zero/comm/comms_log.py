"""Record the bytes and seconds of this process' collectives, for ``comms_logger`` and ``deepspeed.comm.log_summary()``.

Begin and end of a collective are measured on the host's clock or a device's.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hf_zero.errors import ConfigError
from hf_zero.observe import current_phase, log_rank0
from hf_zero.system.sizes import size_text

if TYPE_CHECKING:
    from hf_zero.config.schema.monitoring import CommsLogger

# Every recorded operation, with its other names, and the share of its bytes that crosses a rank's link in the best algorithm, as a factor
# of (n - 1) / n. Bandwidth is counted as in nccl-tests (doc/PERFORMANCE.md), to which DeepSpeed's own page refers.
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "all_gather": ("all_gather_into_tensor", "all_gather_base", "all_gather_coalesced", "allgather_fn"),
    "reduce_scatter": ("reduce_scatter_tensor", "reduce_scatter_base", "reduce_scatter_fn"),
    "all_reduce": ("inference_all_reduce", "all_reduce_coalesced"),
    "all_to_all": ("all_to_all_single",),
    "broadcast": (),
    "broadcast_object": ("broadcast_object_list",),
    "gather_objects": ("all_gather_object",),
}
_ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
# Operations that a configuration may name although the engine never issues them.
_NEVER_ISSUED = ("send", "recv", "isend", "irecv", "gather", "scatter", "reduce", "barrier", "monitored_barrier")


class Watch(ABC):
    """Clock of the device, or host, on which a collective runs."""

    @abstractmethod
    def now(self) -> Any:
        """Return a moment: the host's time, or an event recorded in the device's queue now."""

    @abstractmethod
    def end_of(self, works: list[Any]) -> Any:
        """Return the moment at which ``works`` end; None if it is known only after a wait for them."""

    @abstractmethod
    def reached(self, moment: Any) -> bool:
        """Return whether ``moment`` has passed, without waiting for it."""

    @abstractmethod
    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two moments that have been reached."""


class HostWatch(Watch):
    """The process's own clock; works of a host back end do not report their end, so the end of the wait counts as theirs."""

    def now(self) -> float:
        return time.perf_counter()

    def end_of(self, works: list[Any]) -> None:
        return None

    def reached(self, moment: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class DeviceWatch(Watch):
    """Events of the device: nothing waits for them until the table is printed.

    Args:
        device: Accelerator whose streams the collectives run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._side = self._module.Stream(device)

    def now(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))  # the current device may be another
        return event

    def end_of(self, works: list[Any]) -> Any:
        # A separate stream waits only for the collective; the compute stream continues.
        with self._module.stream(self._side):
            for work in works:
                if work is not None:
                    work.wait()
            return self.now()

    def reached(self, moment: Any) -> bool:
        return bool(moment.query())

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


def operations_named(names: Iterable[str]) -> frozenset[str]:
    """Return the operations that the names in ``comms_logger.prof_ops`` mean.

    Raises:
        ConfigError: A name is no collective.
    """
    known = {spelling: name for name, others in _SPELLINGS.items() for spelling in (name, *others)}
    names = list(names)
    for name in names:
        if name not in known and name not in _NEVER_ISSUED:
            raise ConfigError(f"comms_logger.prof_ops names {name!r}, which is no collective; allowed are {', '.join(sorted(known))}")
    return frozenset(known[name] for name in names if name in known)


@dataclass(frozen=True)
class CommsLogSettings:
    """Settings of the comms log: the operations that it records, and the content of its lines.

    Attributes:
        operations: Names of the collectives to record; None is all.
        verbose: Log every call on rank 0.
        debug: Distinguish calls by the unit they were made for and the phase (forward, backward, step) they were made in.
    """

    operations: frozenset[str] | None = None
    verbose: bool = False
    debug: bool = False

    @staticmethod
    def of(section: CommsLogger) -> CommsLogSettings:
        """Return the settings of the configuration's section.

        Raises:
            ConfigError: The section names an operation that is no collective.
        """
        operations = None if section.prof_all else operations_named(section.prof_ops)
        return CommsLogSettings(operations, section.verbose, section.debug)


@dataclass(frozen=True)
class Kind:
    """Calls that are counted together: operation (with debug its unit and phase too), ranks and bytes of one message."""

    operation: str
    ranks: int
    nbytes: int
    caller: str = ""


@dataclass
class Tally:
    """Counts of calls of one kind: number, seconds from issue to end, and the part of these seconds that this rank spent waiting."""

    count: int = 0
    seconds: float = 0.0
    waited: float = 0.0


@dataclass
class Call:
    """One collective in flight: its kind, its clock, and the times of issue, end, and begin and end of the wait for it."""

    kind: Kind
    unit: str
    watch: Watch
    issued: Any
    ended: Any = None
    waits: Any = None
    resumed: Any = None


@dataclass(frozen=True)
class CommsRow:
    """One row of the table of the comms log.

    Attributes:
        kind: The kind of calls.
        tally: Counts of these calls on this rank.
        fastest: Rank with the fewest seconds: the last to arrive, for which the others waited. None if ranks were not compared.
        least: Seconds of that rank.
    """

    kind: Kind
    tally: Tally
    fastest: int | None = None
    least: float = 0.0

    @property
    def average(self) -> float:
        """Return the seconds per call."""
        return self.tally.seconds / self.tally.count

    @property
    def algorithm_bandwidth(self) -> float:
        """Return the bytes of the message per second."""
        return self.kind.nbytes / self.average if self.average > 0 else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """Return the bytes per second over the busiest link, a figure that does not depend on the number of ranks and can be compared
        with the hardware's rating.
        """
        rounds = _ROUNDS.get(self.kind.operation)
        share = 1.0 if rounds is None else rounds * (self.kind.ranks - 1) / self.kind.ranks
        return self.algorithm_bandwidth * share


@dataclass
class CommsLog:
    """Counter of the collectives of this process.

    [Note: latency under overlap] The end of a collective that runs beside other work is not visible. On a host back end it counts as
    ended when this rank has waited for it, so its latency is an upper bound and its bandwidth a lower bound; ``waited`` is the time it
    really cost. On a device the end is an event of its own.

    Attributes:
        settings: The operations to record.
        tallies: Counts by kind.
    """

    settings: CommsLogSettings
    tallies: dict[Kind, Tally] = field(default_factory=dict)
    _open: deque[Call] = field(default_factory=deque)

    def begin(self, operation: str, unit: str, nbytes: int, ranks: int, watch: Watch) -> Call | None:
        """Start the record of a collective that is about to be issued, and return it; None if it is not to be recorded."""
        if self.settings.operations is not None and operation not in self.settings.operations:
            return None
        caller = ""
        if self.settings.debug:
            caller = ", ".join(part for part in (unit, current_phase()) if part)
        return Call(Kind(operation, ranks, nbytes, caller), unit, watch, watch.now())

    def end(self, call: Call) -> None:
        """Record that this rank has waited for ``call``."""
        call.resumed = call.watch.now()
        call.ended = call.ended if call.ended is not None else call.resumed
        self._open.append(call)
        while self._open and self._open[0].watch.reached(self._open[0].resumed):
            self._count(self._open.popleft())

    def _count(self, call: Call) -> None:
        tally = self.tallies.setdefault(call.kind, Tally())
        seconds = call.watch.seconds(call.issued, call.ended)
        waited = call.watch.seconds(call.waits if call.waits is not None else call.issued, call.resumed)
        tally.count += 1
        tally.seconds += seconds
        tally.waited += waited
        if self.settings.verbose:
            row = CommsRow(call.kind, Tally(1, seconds, waited))
            log_rank0(
                "comm op: %s | %s | %d ranks | msg size: %s | time: %.3f ms, waited %.3f ms | algbw: %.2f Gbit/s | busbw: %.2f Gbit/s",
                call.kind.operation,
                call.kind.caller or call.unit,
                call.kind.ranks,
                _size_text(call.kind.nbytes),
                1e3 * seconds,
                1e3 * waited,
                row.algorithm_bandwidth * 8e-9,
                row.bus_bandwidth * 8e-9,
            )

    def counted(self) -> dict[Kind, Tally]:
        """Return all tallies; wait for collectives that are still running on the device."""
        while self._open:
            self._count(self._open.popleft())
        return self.tallies

    def seconds_by_kind(self) -> dict[tuple[str, int, int, str], float]:
        """Return the seconds of every kind, with keys that ranks can exchange."""
        return {astuple(kind): tally.seconds for kind, tally in self.counted().items()}

    def rows(self, by_rank: Sequence[Mapping[tuple[str, int, int, str], float]] | None = None) -> list[CommsRow]:
        """Return one row per kind, sorted by operation and decreasing size.

        Args:
            by_rank: ``seconds_by_kind`` of every rank, to name the last to arrive.
        """
        rows = []
        for kind, tally in sorted(self.counted().items(), key=lambda item: (item[0].operation, item[0].caller, -item[0].nbytes)):
            fastest, least = None, 0.0
            if by_rank is not None:
                key = astuple(kind)
                seconds = {rank: kinds[key] for rank, kinds in enumerate(by_rank) if key in kinds}
                fastest = min(seconds, key=seconds.__getitem__)
                least = seconds[fastest]
            rows.append(CommsRow(kind, tally, fastest, least))
        return rows

    def clear(self) -> None:
        """Clear all counts."""
        self._open.clear()
        self.tallies.clear()


def _size_text(nbytes: int) -> str:
    """Return the size of a message as text, such as ``12.5 MiB``; an empty text for objects, whose size is unknown."""
    return size_text(nbytes, ".4g") if nbytes else "-"


_current: CommsLog | None = None  # the log of this process; deepspeed.comm has one, too


def start_log(settings: CommsLogSettings) -> CommsLog:
    """Record the collectives of engines created from now on; earlier counts are kept. Return the log."""
    global _current
    if _current is None:
        _current = CommsLog(settings)
    _current.settings = settings
    return _current


def stop_log() -> None:
    """Drop the log; engines created from now on are not recorded."""
    global _current
    _current = None


def current_log() -> CommsLog | None:
    """Return the log of this process; None if nothing is recorded."""
    return _current


_HEADS = ("operation", "ranks", "message", "count", "total ms", "average ms", "waited ms", "algbw Gbit/s", "busbw Gbit/s")
_STRAGGLER_HEADS = ("straggler ms", "last to arrive")


def table_text(rows: list[CommsRow]) -> str:
    """Return the rows as aligned columns, with columns for stragglers if ranks were compared."""
    compared = any(row.fastest is not None for row in rows)
    cells = [(*_HEADS, *(_STRAGGLER_HEADS if compared else ()))]
    for row in rows:
        kind, tally = row.kind, row.tally
        name = f"{kind.operation} ({kind.caller})" if kind.caller else kind.operation
        line = [name, str(kind.ranks), _size_text(kind.nbytes), str(tally.count)]
        line += [f"{1e3 * value:.3f}" for value in (tally.seconds, row.average, tally.waited)]
        rates = (row.algorithm_bandwidth, row.bus_bandwidth)
        line += [f"{rate * 8e-9:.2f}" if kind.nbytes else "-" for rate in rates]
        if compared:
            line += [f"{1e3 * (tally.seconds - row.least):.3f}", f"rank {row.fastest}"]
        cells.append(tuple(line))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )
