"""Drawings of experiments: bars of a comparison, curves of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#8c8c8c", "#9ecae1", "#4292c6", "#08519c", "#fdae6b", "#d94801")  # the first colour is the reference's
GRID = "#dddddd"


@dataclass(frozen=True)
class Panel:
    """One group of bars: the measured quantity, and its value by method; None where there is no value (out of memory)."""

    title: str
    values: Mapping[str, float | None]
    digits: int = 1  # decimals of the number above a bar


@dataclass(frozen=True)
class Curve:
    """One curve of a drawing."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    dashed: bool = False


def draw_bars(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Write a PNG with one group of bars per panel, the methods in the same order and colour in each.

    Args:
        path: File to write.
        title: Line above all panels.
        panels: The panels, all with the same methods.
    """
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = _figure(3.4 * columns, 2.9 * rows + 0.4)
    all_axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(all_axes, panels, strict=False):
        names = list(panel.values)
        heights = [panel.values[name] or 0.0 for name in names]
        bars = axes.bar(range(len(names)), heights, color=[COLORS[index % len(COLORS)] for index in range(len(names))], width=0.7)
        labels = ["out of\nmemory" if panel.values[name] is None else f"{panel.values[name]:,.{panel.digits}f}" for name in names]
        axes.bar_label(bars, labels=labels, padding=2, fontsize=8)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xticks(range(len(names)), [name.replace(" stage ", "\nstage ") for name in names], fontsize=8)
        axes.set_ylim(0, 1.15 * max([*heights, 1e-9]))
        _plain(axes)
    _write(figure, path, title)


def draw_curves(path: Path, title: str, groups: Mapping[str, Sequence[Curve]], y_label: str) -> None:
    """Write a PNG with one drawing per group of curves, side by side on one scale.

    Args:
        path: File to write.
        title: Line above all drawings.
        groups: Heading of each drawing -> its curves.
        y_label: Label of the values.
    """
    figure = _figure(5.2 * len(groups), 4.0)
    all_axes = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for axes, (heading, curves) in zip(all_axes, groups.items(), strict=True):
        for index, curve in enumerate(curves):
            # Later curves are thinner, so that curves which coincide stay visible.
            width = 1.2 + 4.0 * (1 - index / max(1, len(curves) - 1)) if len(curves) > 1 else 1.6
            style = "--" if curve.dashed else "-"
            axes.plot(curve.steps, curve.values, style, color=COLORS[index % len(COLORS)], linewidth=width, label=curve.name)
        axes.set_title(heading, fontsize=10)
        axes.set_xlabel("optimizer step", fontsize=9)
        axes.legend(fontsize=8, frameon=False)
        _plain(axes)
    all_axes[0].set_ylabel(y_label, fontsize=9)
    _write(figure, path, title)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # without pyplot, which keeps state and looks for a screen

    return Figure(figsize=(width, height), layout="constrained")


def _plain(axes: Any) -> None:
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _write(figure: Figure, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
