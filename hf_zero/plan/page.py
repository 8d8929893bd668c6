"""Write the memory of one step as an HTML page with tooltips: one file without external resources."""

from __future__ import annotations

import html
from pathlib import Path

from hf_zero.core.holdings import KINDS
from hf_zero.errors import ConfigError
from hf_zero.plan.prediction import Prediction, host_limit, levels
from hf_zero.system import own_files
from hf_zero.system.sizes import size_text

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
    from hf_zero.plan.report import verdict_of

    on_host = prediction.cluster.on_host
    tier = "host" if on_host else "device"
    limit = host_limit(prediction.cluster, prediction.hardware) if on_host else prediction.hardware.memory
    rows = _moments(prediction, tier)
    shown = [index for index in range(len(KINDS)) if any(row[index] for _, row in rows)]
    top = max([*(sum(row) for _, row in rows), limit or 0.0, 1.0]) * 1.03
    verdict = "".join(f"<p>{html.escape(line)}</p>" for line in verdict_of(prediction) if line)
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
