"""Compute the overlap of computation and communication in a rank's recording, and write it as table, trace and picture.

[Note: time under way] On a device, a transfer takes the time of its kernel, and computation is all other kernels. On a host, the transfer
itself is not recorded: it counts from the call that issues it to the end of the wait for it, which is an upper bound; computation is
torch's operations without waits. The times that the host waits are exact in both cases.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.observe import ISSUED, PHASE, WAIT
from hf_zero.profiling.recordings import OURS, Event, Recording
from hf_zero.system import own_files
from hf_zero.system.pictures import canvas, save

Interval = tuple[float, float]
"""Begin and end in microseconds."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of ``intervals`` as sorted, disjoint intervals."""
    found: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of both, as sorted, disjoint intervals; each argument is a result of ``union``."""
    found, here, there = [], 0, 0
    while here < len(left) and there < len(right):
        begin, end = max(left[here][0], right[there][0]), min(left[here][1], right[there][1])
        if begin < end:
            found.append((begin, end))
        if left[here][1] < right[there][1]:
            here += 1
        else:
            there += 1
    return found


def difference(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return the parts of ``left`` outside of ``right``, as sorted, disjoint intervals; each argument is a result of ``union``."""
    found, there = [], 0
    for begin, end in left:
        while there < len(right) and right[there][1] <= begin:
            there += 1
        at = there
        while at < len(right) and right[at][0] < end:
            if right[at][0] > begin:
                found.append((begin, right[at][0]))
            begin = max(begin, right[at][1])
            at += 1
        if begin < end:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of a result of ``union`` in microseconds."""
    return sum(end - begin for begin, end in intervals)


COMPUTE = "compute"
ROWS = (COMPUTE, "gathers", "reductions", "exchanges", "votes", "copies", "host updates")
_OF_OPERATION = {
    "all_gather": "gathers",
    "reduce_scatter": "reductions",
    "all_reduce": "reductions",
    "exchange": "reductions",
    "exchange_parts": "exchanges",
    "broadcast": "exchanges",
    "vote": "votes",
}
_OF_KERNEL = (("allgather", "gathers"), ("reducescatter", "reductions"), ("allreduce", "reductions"))
_NOT_COMPUTE = ("c10d::", "gloo:", "nccl:", "record_param_comms", "DistributedDataParallel")
_UPDATES = ("update", "speculate")
_CALLS = ("cuda_runtime", "cuda_driver", "runtime")  # kinds of events that launch kernels


@dataclass(frozen=True)
class Span:
    """One interval of a row.

    Attributes:
        label: A collective with its unit, or the block that computes.
        begin: Begin in microseconds.
        end: End in microseconds.
    """

    label: str
    begin: float
    end: float


@dataclass(frozen=True)
class RowTotal:
    """Durations of one row, in microseconds.

    Attributes:
        total: Time during which some span of the row ran.
        hidden: Part of ``total`` that overlaps with computation.
        waited: Time that the host waited for the row.
    """

    total: float
    hidden: float
    waited: float

    @property
    def exposed(self) -> float:
        """Return the part of ``total`` without computation."""
        return self.total - self.hidden


@dataclass(frozen=True)
class Overlap:
    """One rank's recording as rows of spans.

    Attributes:
        rank: Number of the rank.
        begin: First moment in microseconds.
        end: Last moment in microseconds.
        rows: Spans by row, in the order of ``ROWS``; without empty rows.
        waits: Intervals in which the host waited, by row.
    """

    rank: int
    begin: float
    end: float
    rows: dict[str, list[Span]]
    waits: dict[str, list[Interval]]

    def total(self, row: str) -> RowTotal:
        """Return the durations of the row named ``row``."""
        mine, compute = self._union(row), self._union(COMPUTE)
        return RowTotal(length(mine), length(intersection(mine, compute)), length(union(self.waits.get(row, ()))))

    def _union(self, row: str) -> list[Interval]:
        return union((span.begin, span.end) for span in self.rows.get(row, ()))


def overlap_of(recording: Recording) -> Overlap:
    """Return a recording as rows, from the first event of hf_zero to the last event."""
    events = recording.events
    ours = _outside_waits([event for event in events if event.name.startswith(OURS) and event.kind != "gpu_user_annotation"])
    on_device = any(event.kind == "kernel" for event in events)
    block = _blocks(ours)
    waits = _waits(ours)
    rows: dict[str, list[Span]] = defaultdict(list)
    if on_device:
        _add_kernels(rows, events, ours, block)
    else:
        _add_transfers(rows, ours)
    rows["votes"] = [Span("vote", begin, end) for begin, end in waits.get("votes", ())]
    rows["host updates"] = _updates(ours, on_device)
    if not on_device:
        busy = [interval for kind in waits.values() for interval in kind] + [(span.begin, span.end) for span in rows["host updates"]]
        rows[COMPUTE] = _host_compute(events, union(busy), block)
    begin, end = min(event.begin for event in ours), max(event.end for event in events)
    return Overlap(recording.rank, begin, end, {name: rows[name] for name in ROWS if rows.get(name)}, waits)


def _outside_waits(ours: Iterable[Event]) -> list[Event]:
    """Return the events outside of other waits: without the messages inside a vote, and without an update's wait for a copy."""
    found: list[Event] = []
    until: dict[tuple[object, object], float] = {}
    for event in ours:
        waits = event.name.startswith((WAIT, ISSUED))
        if waits and event.begin < until.get(event.thread, -1.0):
            continue
        found.append(event)
        if event.name.startswith(WAIT):
            until[event.thread] = event.end
    return found


def _waits(ours: Iterable[Event]) -> dict[str, list[Interval]]:
    found: dict[str, list[Interval]] = defaultdict(list)
    for event in ours:
        if event.name.startswith(WAIT):
            found[_row_of(event.name.removeprefix(WAIT))].append((event.begin, event.end))
    return found


def _row_of(label: str) -> str:
    """Return the row of a collective by its label, ``all_gather (layers.3)``; other labels are updates on the host."""
    return _OF_OPERATION.get(label.partition(" ")[0], "host updates")


def _add_transfers(rows: dict[str, list[Span]], ours: Iterable[Event]) -> None:
    """Add collectives from their issue to the end of the wait for them; collectives of one label are waited for in the order of issue."""
    issued: dict[str, deque[float]] = defaultdict(deque)
    for event in sorted(ours, key=lambda event: (event.end, event.begin)):
        if event.name.startswith(ISSUED):
            issued[event.name.removeprefix(ISSUED)].append(event.begin)
        elif event.name.startswith(WAIT):
            label = event.name.removeprefix(WAIT)
            if issued[label]:
                rows[_row_of(label)].append(Span(label, issued[label].popleft(), event.end))


def _add_kernels(rows: dict[str, list[Span]], events: Iterable[Event], ours: Iterable[Event], block: Callable[[float], str]) -> None:
    """Add kernels and copies of a device, with the labels of the calls that launched them."""
    calls = [event for event in events if event.kind in _CALLS and event.correlation >= 0]
    launched = {event.correlation: event for event in calls}
    marks = [event for event in ours if event.name.startswith(ISSUED)]
    for event in events:
        call = launched.get(event.correlation)
        at = call.begin if call is not None else event.begin
        name = event.name.lower()
        if event.kind == "kernel" and "nccl" in name:
            row = next((row for word, row in _OF_KERNEL if word in name.replace("_", "")), "exchanges")
            mark = next((mark for mark in marks if call is not None and mark.thread == call.thread and mark.begin >= at), None)
            rows[row].append(Span(mark.name.removeprefix(ISSUED) if mark is not None else event.name, event.begin, event.end))
        elif event.kind == "kernel":
            rows[COMPUTE].append(Span(block(at) or event.name, event.begin, event.end))
        elif event.kind == "gpu_memcpy" and ("htod" in name or "dtoh" in name):
            rows["copies"].append(Span(event.name, event.begin, event.end))


def _updates(ours: Iterable[Event], on_device: bool) -> list[Span]:
    """Return the updates of single units on the host; without any, on a host, the complete update."""
    found: list[Span] = []
    whole: list[Span] = []
    for event in ours:
        phase, _, unit = event.name.removeprefix(OURS).partition(" (")
        if phase in _UPDATES:
            (found if unit else whole).append(Span(event.name.removeprefix(OURS), event.begin, event.end))
    return found or ([] if on_device else whole)


def _host_compute(events: Iterable[Event], busy: list[Interval], block: Callable[[float], str]) -> list[Span]:
    """Return torch's operations outside of the intervals ``busy``, labelled with their block; adjacent operations are joined."""
    ran = union((event.begin, event.end) for event in events if event.kind == "cpu_op" and not event.name.startswith(_NOT_COMPUTE))
    return [Span(block(begin) or COMPUTE, begin, end) for begin, end in difference(ran, busy)]


def _blocks(ours: Iterable[Event]) -> Callable[[float], str]:
    """Return a function from a time to the name of the block that the host was running; "" outside of blocks."""
    moments: list[tuple[float, str]] = []
    stack: list[str] = []
    for event in ours:
        phase, _, name = event.name.removeprefix(OURS).partition(" (")
        name = name.removesuffix(")")
        if event.name.startswith(PHASE):
            stack = [event.name.removeprefix(PHASE)]
        elif phase in ("pre_forward", "recompute") and name:
            stack.append(name)
        elif phase == "post_forward" and name in stack:
            stack = stack[: stack.index(name)]
        elif phase == "pre_backward" and name:
            stack = [f"backward of {name}"]
        elif phase in ("end_backward", "finish_reduce"):
            stack = [phase]
        else:
            continue
        moments.append((event.end if phase.startswith("pre_") else event.begin, stack[-1] if stack else ""))
    moments.sort(key=lambda moment: moment[0])
    return _Timeline(moments).at


class _Timeline:
    """Sequence of names, each valid from its time until the next one.

    Args:
        moments: Pairs (time, name), sorted by time.
    """

    def __init__(self, moments: list[tuple[float, str]]) -> None:
        self._times = [time for time, _ in moments]
        self._names = [name for _, name in moments]

    def at(self, time: float) -> str:
        """Return the name that is valid at ``time``; "" before the first."""
        index = bisect_right(self._times, time)
        return self._names[index - 1] if index else ""


_PANELS = 4  # maximum number of ranks in the picture
_ASKED = "the picture (--no-plot skips it)"
_COLOURS = dict(zip(ROWS, ("tab:gray", "tab:blue", "tab:red", "tab:purple", "tab:olive", "tab:cyan", "tab:green"), strict=True))


def summary_of(overlaps: Sequence[Overlap]) -> str:
    """Return a table with the duration of each row of each rank, and the share of it that overlaps with computation."""
    return "\n".join(line for overlap in overlaps for line in _lines(overlap))


def _lines(overlap: Overlap) -> list[str]:
    whole = max(overlap.end - overlap.begin, 1e-9)
    compute = overlap.total(COMPUTE).total
    lines = [f"rank {overlap.rank}: {whole / 1000:.2f} ms, compute in {100 * compute / whole:.1f} % of them"]
    rows = [row for row in ROWS if row != COMPUTE and (row in overlap.rows or row in overlap.waits)]
    if rows:
        lines.append(f"  {'':14}{'under way':>12}{'hidden':>10}{'exposed':>12}{'of all':>9}{'host waited':>14}")
    for row in rows:
        found = overlap.total(row)
        hidden = f"{100 * found.hidden / found.total:.1f} %" if found.total else "-"
        lines.append(
            f"  {row:14}{found.total / 1000:>9.2f} ms{hidden:>10}{found.exposed / 1000:>9.2f} ms{100 * found.exposed / whole:>7.1f} %"
            f"{found.waited / 1000:>11.2f} ms"
        )
    return lines


def write_trace(overlaps: Sequence[Overlap], path: Path) -> None:
    """Write a file for chrome://tracing and ui.perfetto.dev: one process per rank, one thread per row.

    Raises:
        ConfigError: ``path`` cannot be written.
    """
    first = min(overlap.begin for overlap in overlaps)
    events: list[dict[str, Any]] = []
    for overlap in overlaps:
        events.append({"ph": "M", "name": "process_name", "pid": overlap.rank, "args": {"name": f"rank {overlap.rank}"}})
        for row, spans in overlap.rows.items():
            line = {"pid": overlap.rank, "tid": ROWS.index(row)}
            events.append({"ph": "M", "name": "thread_name", **line, "args": {"name": row}})
            events.append({"ph": "M", "name": "thread_sort_index", **line, "args": {"sort_index": ROWS.index(row)}})
            events += _drawn(line, row, [(span.label, span.begin - first, span.end - span.begin) for span in spans])
    try:
        own_files.write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def _drawn(line: dict[str, int], row: str, spans: Sequence[tuple[str, float, float]]) -> list[dict[str, Any]]:
    """Return the spans of one row as events. Spans that overlap without one containing the other become asynchronous events, which
    viewers stack.
    """
    ends, crossing = 0.0, False
    for _, begin, took in sorted(spans, key=lambda span: span[1]):
        crossing |= begin < ends
        ends = max(ends, begin + took)
    if not crossing:
        return [{"ph": "X", "name": label, "cat": row, **line, "ts": begin, "dur": took} for label, begin, took in spans]
    events: list[dict[str, Any]] = []
    for index, (label, begin, took) in enumerate(spans):
        common = {"name": label, "cat": row, **line, "id": f"{line['pid']}.{line['tid']}.{index}"}
        events += [{"ph": "b", **common, "ts": begin}, {"ph": "e", **common, "ts": begin + took}]
    return events


def draw(overlaps: Sequence[Overlap], path: Path) -> None:
    """Write a picture of the rows of the first ranks over time; the ending of ``path`` selects the format.

    Raises:
        UnsupportedError: matplotlib is not installed.
        ConfigError: ``path`` cannot be written.
    """
    shown = overlaps[:_PANELS]
    figure, panels = canvas(len(shown), (12, 0.6 + 2.2 * len(shown)), _ASKED, sharex=True)
    first = min(overlap.begin for overlap in shown)
    for overlap, axes in zip(shown, panels[:, 0], strict=True):
        names = list(overlap.rows)[::-1]
        for height, row in enumerate(names):
            bars = [((span.begin - first) / 1000, (span.end - span.begin) / 1000) for span in overlap.rows[row]]
            axes.broken_barh(bars, (height - 0.4, 0.8), facecolors=_COLOURS[row])
        axes.set(title=f"rank {overlap.rank}", yticks=range(len(names)), yticklabels=names)
    panels[-1, 0].set_xlabel("ms")
    save(figure, path, _ASKED)
