"""Print a prediction as tables, and draw its memory as a picture."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

from hf_zero.core.holdings import KINDS, TIERS
from hf_zero.plan.prediction import Prediction, host_limit, levels
from hf_zero.system.pictures import canvas, save
from hf_zero.system.sizes import size_text

_POINTS = 4000  # maximum number of points of the picture


def text_of(prediction: Prediction) -> str:
    """Return the report of ``prediction`` as plain text."""
    from rich.console import Console
    from rich.text import Text

    console = Console(width=120, record=True, file=StringIO(), color_system=None)
    for line in verdict_of(prediction):
        console.print(Text(line))
    console.print(_memory_table(prediction))
    for line in lines_of(prediction):
        console.print(Text(line))
    return console.export_text()


def verdict_of(prediction: Prediction) -> list[str]:
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
