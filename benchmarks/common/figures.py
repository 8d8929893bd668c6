"""Draw the pictures of the pages from the result files in benchmarks/results/; axes of bars begin at 0, and every colour has a legend.

python -m tools.render        # draws all pictures, and writes the page
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

OURS, VARIANT, PEER, FLOOR = "tab:blue", "tab:orange", "silver", "dimgray"
Result = dict[str, Any]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _legend(figure: Any, colours: dict[str, str], **place: Any) -> None:
    """Put the meanings of colours above the panels."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=meaning) for meaning, colour in colours.items()]
    figure.legend(handles=handles, loc="upper center", ncol=len(handles), fontsize=9, frameon=False, **place)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110, metadata={"Software": None})
    _pyplot().close(figure)


def _bars(axis: Any, names: Sequence[str], values: Sequence[float], colours: Sequence[str], label: str, form: str = "{:.2f}") -> None:
    """Draw horizontal bars from 0, the first on top, each with its number."""
    axis.bar_label(
        axis.barh(names[::-1], values[::-1], color=colours[::-1]), [form.format(value) for value in values[::-1]], padding=2, fontsize=8
    )
    axis.margins(x=0.15, y=0.02)
    axis.set_xlim(left=0)
    axis.set_xlabel(label)
    axis.spines[["top", "right"]].set_visible(False)


def _records(result: Result) -> list[dict[str, str]]:
    return [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]


def onebit_link(result: Result, path: Path) -> None:
    """Draw seconds of a step by contender, one panel per number of ranks and speed of the link."""
    rows = _records(result)
    worlds = sorted({row["ranks"] for row in rows}, key=int)
    rates = list(dict.fromkeys(row["link"] for row in rows))
    meanings = {"computing without a network": FLOOR, "DDP": PEER, "hf_zero, plain Adam": OURS, "hf_zero, 1-bit Adam": VARIANT}

    def colour(name: str) -> str:
        kinds = {"compute": FLOOR, "DDP": PEER, "hf_zero": OURS, "1-bit": VARIANT}
        return next(shade for start, shade in kinds.items() if name.startswith(start))

    pyplot = _pyplot()
    figure, axes = pyplot.subplots(len(worlds), len(rates), figsize=(4.4 * len(rates), 2.7 * len(worlds) + 0.4), squeeze=False)
    for line, world in zip(axes, worlds, strict=True):
        for axis, rate in zip(line, rates, strict=True):
            shown = [row for row in rows if (row["ranks"], row["link"]) == (world, rate)]
            names = [row["contender"] for row in shown]
            _bars(axis, names, [float(row["s/step"]) for row in shown], [colour(name) for name in names], "seconds a step")
            axis.set_title(f"{world} ranks, link of {_speed(rate)}", fontsize=10)
            if axis is not line[0]:
                axis.set_yticklabels([])
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    _legend(figure, meanings)
    _save(figure, path)


def _speed(rate: str) -> str:
    number, unit = re.fullmatch(r"(\d+)([mg])bit", rate).groups()  # type: ignore[union-attr]
    return f"{number} {unit.upper()}bit/s"


def two_nodes(result: Result, path: Path) -> None:
    """Draw the seconds of a step at every speed of the link, and the bytes that a node sends, by layout."""
    rows = _records(result)
    names = [row["contender"] for row in rows]
    peers = ("FSDP2", "DeepSpeed", "DDP")
    colours = [PEER if name.startswith(peers) else VARIANT if "qwZ" in name or "qgZ" in name else OURS for name in names]
    rates = [column.partition(", ")[2] for column in result["columns"] if column.startswith("s/step")]
    panels = [(f"s/step, {rate}", f"seconds a step, link of {_speed(rate)}") for rate in rates]
    panels.append(("MB a node sends a step", "MB that a node sends a step"))
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 0.3 * len(rows) + 1.2), sharey=True)
    for axis, (column, label) in zip(axes, panels, strict=True):
        _bars(axis, names, [float(row[column]) for row in rows], colours, label)
    meanings = {
        "hf_zero": OURS,
        "hf_zero with codes of 8 bit for parameters (qwZ) or 4 bit for gradients (qgZ)": VARIANT,
        "other libraries": PEER,
    }
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    _legend(figure, meanings)
    _save(figure, path)


def scale(result: Result, path: Path) -> None:
    """Draw set-up, host time of a step and bookkeeping against the number of ranks, for the fewest blocks; layouts side by side."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    from benchmarks.collectives.scale import CONTENDERS, key, own_time

    cases = result["cases"]
    found = [name.rsplit(" ", 3) for name in cases]
    blocks = min(int(words[2]) for words in found)
    worlds = sorted({world for world in (8, 64, 512, 4096) if any(key(name, world, blocks, "times") in cases for name in CONTENDERS)})
    measures = (
        ("times", "set-up, seconds", lambda case: case["setup"], True),
        ("times", "host time of a step, ms", lambda case: 1000 * own_time(case), False),
        ("counts", "held by Python, MiB", lambda case: case["held"]["all"] / 2**20, True),
    )
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4.4))
    for panel, (what, label, value, logarithmic) in zip(panels, measures, strict=True):
        for place, name in enumerate(CONTENDERS):
            points = [(world, value(cases[key(name, world, blocks, what)])) for world in worlds if key(name, world, blocks, what) in cases]
            shift = 2.0 ** (0.24 * (place - (len(CONTENDERS) - 1) / 2))  # side by side, so that no point hides another
            peer = name.startswith("fsdp2")
            marker, face = ("s" if peer else "o"), f"C{place}"
            panel.plot([world * shift for world, _ in points], [size for _, size in points], marker, color=face, markersize=5, label=name)
        panel.set_xscale("log", base=2)
        panel.set_xticks(worlds, [str(world) for world in worlds])
        panel.minorticks_off()
        if logarithmic:
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_minor_locator(NullLocator())
            panel.grid(axis="y", linewidth=0.3)
        else:
            panel.set_ylim(bottom=0)
            panel.grid(axis="y", linewidth=0.3)
        panel.set_xlabel("ranks")
        panel.set_title(label + (", logarithmic" if logarithmic else "; differences below a quarter are noise"), fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 0.88))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="upper center", ncol=len(handles), fontsize=9, frameon=False, title=f"{blocks} blocks; squares: FSDP2"
    )
    _save(figure, path)


def mingpt_lightning(result: Result, path: Path) -> None:
    """Draw the largest model that trains, the time of an epoch and the peak memory of each way."""
    rows = _records(result)
    names = [row["way"].replace(" + ", "\n+ ") for row in rows]
    text = " ".join(result["text"].split())
    (limit,), (layers,) = re.findall(r"more than ([\d.]+) GiB", text), re.findall(r"at (\d+) layers", text)
    where = "device" if all(row["peak device MiB"] != "-" for row in rows) else "host"
    panels = (
        ("largest model that trains", f"largest model that trains in {limit} GiB a rank,\nM parameters; layers are doubled from {layers}"),
        ("epoch s", f"seconds of an epoch, {layers} layers"),
        (f"peak {where} MiB", f"peak memory of a rank, MiB of the {where}, {layers} layers\n(interpreter and libraries included)"),
    )
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 3.2), sharey=True)
    for axis, (column, label) in zip(axes, panels, strict=True):
        values = [float(re.findall(r"[\d.]+", row[column])[0]) for row in rows]
        _bars(axis, names, values, [PEER if row["way"] == "DDP" else OURS for row in rows], label, "{:.3g}")
    figure.tight_layout(rect=(0, 0, 1, 0.91))
    _legend(figure, {"DDP": PEER, "hf_zero": OURS})
    _save(figure, path)


def zeropp_convergence(result: Result, path: Path) -> None:
    """Draw the losses of exact and of quantized collectives, the mean over seeds and 20 steps."""
    from benchmarks.collectives.zeropp_convergence import RUNS

    cases = result["cases"]
    parsed = {name: name.split(" ") for name in cases}  # model, size, ranks x steps, run, seed
    shown = {row[0] for row in result["rows"]}
    models = [model for model in ("gpt2", "llama") if any(text.startswith(f"{model},") for text in shown)]
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(models), figsize=(6.5 * len(models), 4.4), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        zoom = axis.inset_axes((0.45, 0.27, 0.52, 0.4))
        for kind, (title, _) in RUNS.items():
            of_seeds = [cases[name] for name, words in parsed.items() if (words[0], words[3]) == (model, kind)]
            if not of_seeds or f"{model}, {title}" not in shown:
                continue
            mean = [sum(losses) / len(losses) for losses in zip(*(found["losses"] for found in of_seeds), strict=True)]
            smooth = [sum(mean[max(0, step - 19) : step + 1]) / min(20, step + 1) for step in range(len(mean))]
            steps = range(1, len(mean) + 1)
            seeds = f" ({len(of_seeds)} seed{'s' if len(of_seeds) > 1 else ''})"
            axis.plot(steps, smooth, label=title + seeds, linewidth=1.1)
            half = len(mean) * 2 // 3
            zoom.plot(steps[half:], smooth[half:], linewidth=1.1)
        zoom.set_title("the last third, enlarged", fontsize=8)
        numel = next(cases[name]["numel"] for name, words in parsed.items() if words[0] == model)
        axis.set(xlabel="step", ylabel="training loss (mean of 20 steps)", title=f"{model}, {numel / 1e6:.1f} M parameters, bf16")
        axis.legend(fontsize=7, loc="upper right")
    figure.tight_layout()
    _save(figure, path)


# Result file -> the function that draws its picture; the picture's name is in the file.
DRAWN: dict[str, Callable[[Result, Path], None]] = {
    "onebit_link": onebit_link,
    "two_nodes": two_nodes,
    "scale": scale,
    "zeropp_convergence": zeropp_convergence,
    "zeropp_convergence_large": zeropp_convergence,
    "mingpt_lightning": mingpt_lightning,
}
