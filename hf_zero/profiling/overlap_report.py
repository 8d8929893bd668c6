"""Rows of overlap as a summary, as a trace for Perfetto, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.profiling.overlap import COMPUTE, ROWS, Overlap
from hf_zero.system import own_files
from hf_zero.system.pictures import canvas, save

_PANELS = 4  # ranks in the picture
_ASKED = "the picture (--no-plot goes without)"
_COLOURS = dict(zip(ROWS, ("tab:gray", "tab:blue", "tab:red", "tab:purple", "tab:olive", "tab:cyan", "tab:green"), strict=True))


def summary_of(overlaps: Sequence[Overlap]) -> str:
    """Of each rank and row how long it was under way, and which share of that behind compute."""
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
    """Writes a file that chrome://tracing and ui.perfetto.dev open: a process for each rank, a thread for each row.

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
    """Spans of one row as events. Those that overlap without lying in each other become asynchronous ones, which viewers stack."""
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
    """Writes a picture: rows of the first ranks over time; its ending chooses the format.

    Raises:
        UnsupportedError: Without matplotlib.
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
