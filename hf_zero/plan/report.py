"""Show a prediction: as tables, as a picture of its memory, and as an HTML page with tooltips (one file without external resources)."""

from __future__ import annotations

import html
from io import StringIO
from pathlib import Path
from typing import Any

from hf_zero.core.holdings import KINDS, TIERS
from hf_zero.errors import ConfigError
from hf_zero.plan.prediction import Prediction, host_limit, levels
from hf_zero.system import own_files
from hf_zero.system.pictures import canvas, save
from hf_zero.system.sizes import size_text

_POINTS = 4000  # maximum number of points of the picture
_STRIPS = 400  # maximum number of moments with a tooltip
_WIDTH, _HEIGHT = 1000.0, 420.0
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b79a20", "#e45756", "#72b7b2", "#ff9da6", "#9d755d", "#8c8c8c")
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;color:#222;background:#fff}svg{max-width:100%;height:auto}"
    ".strip{fill:transparent}.strip:hover{fill:rgba(0,0,0,.15)}"
    ".key{display:inline-block;width:1em;height:1em;margin:0 .4em 0 1em;vertical-align:-.1em}"
    "table{border-collapse:collapse;margin-top:1em}td,th{padding:.2em 1em .2em 0;text-align:right}"
    "td:first-child,th:first-child{text-align:left}"
)


def text_of(prediction: Prediction) -> str:
    """Return the report of ``prediction`` as plain text."""
    from rich.console import Console
    from rich.text import Text

    console = Console(width=120, record=True, file=StringIO(), color_system=None)
    for line in fit_summary(prediction):
        console.print(Text(line))
    console.print(_memory_table(prediction))
    for line in lines_of(prediction):
        console.print(Text(line))
    return console.export_text()


def fit_summary(prediction: Prediction) -> list[str]:
    """Return the first lines of a report: whether it fits, the limits, seconds per step, and the reasons or assumptions."""
    held = [
        f"{size_text(nbytes)} {'of' if limit is None else f'of the {size_text(round(limit))} of'} {tier} memory"
        for tier, nbytes, limit in prediction.limits()
    ]
    known = any(limit is not None for _, _, limit in prediction.limits())
    words = "IT DOES NOT FIT" if not prediction.fits else "it fits" if known else "no limit was given (--memory)"
    lines = [f"{words}: a rank takes {', '.join(held)}"]
    process = prediction.process_bytes()
    if process is not None:
        limit = host_limit(prediction.cluster, prediction.hardware)
        doubt = ", SO IT MAY NOT FIT" if prediction.fits and limit is not None and process[1] > limit else ""
        lines.append(f"its process is likely to take {size_text(process[0])} to {size_text(process[1])}{doubt}")
    seconds, tokens = prediction.seconds_per_step(), prediction.tokens_per_second()
    if seconds is None:
        lines.append("seconds per step: give --tflops, the 10^12 operations per second that a rank reaches")
    else:
        parts = ", ".join(f"{name} {one:.4g} s" for name, one in prediction.seconds.items())
        speed = f", at most {tokens:,.0f} tokens per second of all ranks" if tokens is not None else ""
        lines.append(f"at least {seconds:.4g} s per step{speed} ({parts})")
    return [*lines, *(f"- {reason}" for reason in prediction.reasons), ""]


def _memory_table(prediction: Prediction) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"bytes per rank at the peak ({prediction.main.label})", title_justify="left")
    table.add_column("what")
    tiers = [tier for tier in TIERS if prediction.peaks[tier].nbytes]
    for tier in tiers:
        table.add_column(tier, justify="right")
    for kind in KINDS:
        cells = [prediction.main.alive[tier, kind] for tier in tiers]
        if any(cells):
            table.add_row(kind, *(size_text(nbytes) if nbytes else "" for nbytes in cells))
    table.add_section()
    table.add_row("peak of the tier", *(size_text(prediction.peaks[tier].nbytes) for tier in tiers))
    return table


def lines_of(prediction: Prediction) -> list[str]:
    """Return the lines below the table of memory."""
    observation = prediction.observation
    step, (parameters, trained) = observation.per_step(), observation.parameters
    lines = [f"largest at the peak: {thing}" for thing in prediction.main.largest]
    lines.append(f"parameters: {parameters:,}, of which {trained:,} are trained")
    lines.append(f"sent by a rank per step: {size_text(step.sent.node)} inside its node, {size_text(step.sent.network)} to other nodes")
    lines.append(f"computed by a rank per step: {step.work.flops / 1e12:.4g} TFLOP")
    lines.append(f"a checkpoint: {size_text(prediction.checkpoint_bytes)} on disk")
    if observation.sharded:
        lines.append(f"generate() adds: {size_text(observation.whole_bytes)} if it gathers the whole model, and its key-value cache")
        lines.append(f"saving adds: {size_text(observation.largest_unit_bytes)}, because it gathers one unit at a time")
    return lines


def draw(prediction: Prediction, path: Path, title: str) -> None:
    """Write a picture of memory over one step, stacked by kind, with the limit as a line.

    Args:
        prediction: The prediction to draw.
        path: Path of the picture; the ending selects the format.
        title: Title of the picture.

    Raises:
        UnsupportedError: matplotlib is not installed.
        ConfigError: ``path`` cannot be written.
    """
    on_host = prediction.cluster.on_host
    tier = "host" if on_host else "device"
    rows = [[alive[tier, kind] / 2**30 for kind in KINDS] for _, _, alive in levels(prediction.observation, on_host)]
    rows = _thinned(rows)
    figure, panels = canvas(1, (10, 5), "--plot")
    axes = panels[0, 0]
    shown = [index for index in range(len(KINDS)) if any(row[index] for row in rows)]
    axes.stackplot(
        range(len(rows)), [[row[index] for row in rows] for index in shown], labels=[KINDS[index] for index in shown], step="post"
    )
    limit = host_limit(prediction.cluster, prediction.hardware) if on_host else prediction.hardware.memory
    if limit is not None:
        axes.axhline(limit / 2**30, color="black", linestyle="--", label="limit")
    axes.set(xlabel="one optimizer step, in the order of allocations", ylabel=f"GiB of a rank's {tier} memory", title=title, xticks=[])
    axes.legend(loc="upper left", fontsize="small", ncols=2)
    save(figure, path, "--plot")


def _thinned(rows: list[list[float]]) -> list[list[float]]:
    """Return at most ``_POINTS`` rows: of each group of consecutive rows, the one with the highest sum."""
    width = -(-len(rows) // _POINTS)
    return [max(rows[start : start + width], key=sum) for start in range(0, len(rows), width)]


def write_page(prediction: Prediction, path: Path, title: str) -> None:
    """Write a page with memory over one step, stacked by kind, with the limit as a line and tooltips of the live memory at each moment.

    Args:
        prediction: The prediction to draw.
        path: Path of the page.
        title: Title of the page.

    Raises:
        ConfigError: ``path`` cannot be written.
    """
    try:
        own_files.write_text(path, _page(prediction, title))
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error


def _page(prediction: Prediction, title: str) -> str:

    on_host = prediction.cluster.on_host
    tier = "host" if on_host else "device"
    limit = host_limit(prediction.cluster, prediction.hardware) if on_host else prediction.hardware.memory
    rows = _moments(prediction, tier)
    shown = [index for index in range(len(KINDS)) if any(row[index] for _, row in rows)]
    top = max([*(sum(row) for _, row in rows), limit or 0.0, 1.0]) * 1.03
    verdict = "".join(f"<p>{html.escape(line)}</p>" for line in fit_summary(prediction) if line)
    keys = "".join(f'<span class="key" style="background:{_COLOURS[index]}"></span>{KINDS[index]}' for index in shown)
    peak = max(rows, key=lambda row: sum(row[1]))[1]
    table = "".join(f"<tr><td>{KINDS[index]}</td><td>{size_text(round(peak[index]))}</td></tr>" for index in reversed(shown))
    name = html.escape(title)
    parts = [
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style></head>',
        f"<body><h1>{name}</h1>{verdict}",
        f"<p>A rank's {tier} memory over one optimizer step, in the order of allocations; point at a moment to see its values. {keys}</p>",
        _picture(rows, shown, top, limit),
        f"<table><tr><th>at the peak</th><th>{size_text(round(sum(peak)))}</th></tr>{table}</table></body></html>",
    ]
    return "\n".join([*parts, ""])


def _moments(prediction: Prediction, tier: str) -> list[tuple[str, list[float]]]:
    """Return the engine's last note and the bytes by kind for the highest moment of each section of the step; at most ``_STRIPS``."""
    found, label = [], "before the step"
    for _, change, alive in levels(prediction.observation, prediction.cluster.on_host):
        label = change.label.removeprefix("hf_zero::") or label if change is not None else label
        found.append((label, [float(alive[tier, kind]) for kind in KINDS]))
    width = -(-len(found) // _STRIPS)
    return [max(found[start : start + width], key=lambda row: sum(row[1])) for start in range(0, len(found), width)]


def _picture(rows: list[tuple[str, list[float]]], shown: list[int], top: float, limit: float | None) -> str:
    """Return the picture as SVG text; the vertical axis goes from 0 to ``top`` bytes."""
    step, parts = _WIDTH / len(rows), [f'<svg viewBox="-70 -10 {_WIDTH + 80:g} {_HEIGHT + 20:g}" role="img">']

    def height(nbytes: float) -> float:
        return _HEIGHT * (1 - nbytes / top)

    below = [0.0] * len(rows)
    for index in shown:
        above = [base + row[index] for base, (_, row) in zip(below, rows, strict=True)]
        outline = [(step * (at + side), height(value)) for at, value in enumerate(above) for side in (0, 1)]
        outline += [(step * (at + side), height(below[at])) for at in reversed(range(len(rows))) for side in (1, 0)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
        parts.append(f'<polygon points="{points}" fill="{_COLOURS[index]}"/>')
        below = above
    for part in range(5):
        value = top * part / 4
        parts.append(f'<line x1="0" x2="{_WIDTH:g}" y1="{height(value):.1f}" y2="{height(value):.1f}" stroke="#ccc" stroke-width=".5"/>')
        parts.append(f'<text x="-8" y="{height(value) + 4:.1f}" text-anchor="end" font-size="12">{size_text(round(value))}</text>')
    if limit is not None:
        y = height(limit)
        parts.append(f'<line x1="0" x2="{_WIDTH:g}" y1="{y:.1f}" y2="{y:.1f}" stroke="#000" stroke-dasharray="6 4"/>')
        parts.append(f'<text x="4" y="{y - 4:.1f}" font-size="12">limit {size_text(round(limit))}</text>')
    for at, (label, row) in enumerate(rows):
        held = [f"{KINDS[index]} {size_text(round(row[index]))}" for index in reversed(shown) if row[index]]
        text = html.escape("\n".join([f"{label}: {size_text(round(sum(row)))}", *held]))
        parts.append(f'<rect class="strip" x="{step * at:.2f}" y="0" width="{step:.2f}" height="{_HEIGHT:g}"><title>{text}</title></rect>')
    return "".join([*parts, "</svg>"])
