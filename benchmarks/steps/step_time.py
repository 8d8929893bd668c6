"""Step time of hf_zero, DDP, FSDP2 and DeepSpeed on the same model, data and optimizer, interleaved in one run.

    python -m benchmarks.steps.step_time                                         # GPT-2, 24 M parameters, 2 gloo ranks, 1 thread each
    python -m benchmarks.steps.step_time --shape llama --peer-python /path/to/venv-with-deepspeed/bin/python
    python -m benchmarks.steps.step_time --one-rank                              # engine overhead against the bare PyTorch loop
    python -m benchmarks.steps.step_time --before /path/to/another/checkout      # effect of a change
    python -m benchmarks.steps.step_time --rounds 2 --steps 1 --layers 2         # quick check

Every contender is built once and keeps its processes; a round times each of them in turn, so that a slow minute of the machine affects
all of them. Ratios are medians of the rounds' ratios to the baseline. All use ``torch.optim.AdamW(fused=True)``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.processes import RankProcesses

WORKER = Path(__file__).with_name("step_time_worker.py")
OURS = ("hf_zero-0", "hf_zero-1", "hf_zero-2", "hf_zero-3")
TARGETS = {2: {"hf_zero-1": 1.00, "hf_zero-2": 1.00, "hf_zero-3": 1.08}, 1: {"hf_zero-0": 1.02, "hf_zero-1": 1.02, "hf_zero-2": 1.02}}


@dataclass
class Contender:
    """The processes of one contender and their measurements: seconds per step, one entry per round."""

    name: str
    ranks: RankProcesses
    seconds: list[float] = field(default_factory=list)
    loss: float = float("nan")
    peak_bytes: int = 0

    def run(self, steps: int) -> float:
        """Run ``steps`` steps on every rank; return the slowest rank's seconds per step."""
        answers = self.ranks.ask(steps=steps)
        self.loss = statistics.fmean(answer["loss"] for answer in answers)
        self.peak_bytes = max(answer["peak_bytes"] for answer in answers)
        return max(answer["seconds"] for answer in answers)


def start(name: str, python: str, shape: str, size: dict[str, int], world: int, before: Path | None) -> Contender:
    """Start the ranks of a contender and wait until its model is built."""
    if before is None or not name.startswith("before-"):
        return Contender(name, RankProcesses(name, WORKER, [name, shape, size], world, python, DS_BUILD_OPS=0))
    words = [name.replace("before", "hf_zero"), shape, size]
    return Contender(name, RankProcesses(name, WORKER, words, world, python, PYTHONPATH=before))


def measure(contenders: list[Contender], rounds: int, steps: int, warmup: int, console: Console) -> None:
    """Time every contender once per round; the order rotates, so that no contender always follows the same one."""
    for contender in contenders:
        contender.run(warmup)
    for index in range(rounds):
        shift = index % len(contenders)
        for contender in contenders[shift:] + contenders[:shift]:
            contender.seconds.append(contender.run(steps))
        shown = "  ".join(f"{c.name} {c.seconds[-1]:.3f}" for c in contenders)
        console.print(f"[dim]round {index + 1}/{rounds}: {shown}[/dim]", highlight=False)


def summarize(contenders: list[Contender], world: int) -> list[dict[str, Any]]:
    """Return a row per contender: median seconds, spread, ratio to the baseline (the first contender), target."""
    baseline = contenders[0].seconds
    rows = []
    for contender in contenders:
        ratios = [mine / theirs for mine, theirs in zip(contender.seconds, baseline, strict=True)]
        rows.append(
            {
                "contender": contender.name,
                "median_seconds": statistics.median(contender.seconds),
                "fastest_seconds": min(contender.seconds),
                "ratio": statistics.median(ratios),
                "ratio_low": min(ratios),
                "ratio_high": max(ratios),
                "target": TARGETS.get(world, {}).get(contender.name),
                "loss": contender.loss,
                "peak_mib": contender.peak_bytes / 2**20,
                "seconds": contender.seconds,
            }
        )
    return rows


def show(rows: list[dict[str, Any]], title: str, console: Console) -> None:
    table = Table(title=title)
    for heading in ("contender", "median s/step", "fastest", f"ratio to {rows[0]['contender']}", "range", "target", "loss", "peak MiB"):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    for row in rows:
        target = row["target"]
        colour = "" if target is None else ("green" if row["ratio"] <= target else "red")
        ratio = f"[{colour}]{row['ratio']:.3f}[/{colour}]" if colour else f"{row['ratio']:.3f}"
        spread = f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}"
        numbers = [f"{row['median_seconds']:.4f}", f"{row['fastest_seconds']:.4f}", ratio, spread]
        table.add_row(
            row["contender"], *numbers, "" if target is None else f"<= {target:.2f}", f"{row['loss']:.6f}", f"{row['peak_mib']:.0f}"
        )
    console.print(table)


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the ratios with their range as a bar chart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(rows) + 1.5))
    names = [row["contender"] for row in rows][::-1]
    ratios = [row["ratio"] for row in rows][::-1]
    axes.barh(names, ratios, color=["tab:blue" if name.startswith("hf_zero") else "tab:gray" for name in names])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"median step time relative to {rows[0]['contender']} (lower is better)")
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--length", type=int, default=128, help="tokens per row")
    parser.add_argument("--batch", type=int, default=4, help="rows per rank and step")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="steps per contender and round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first round")
    parser.add_argument("--one-rank", action="store_true", help="one rank: stages 0-2 against the bare PyTorch loop")
    parser.add_argument("--only", nargs="+", help="these contenders only; the first is the baseline")
    parser.add_argument("--peer-python", help="Python of a venv with deepspeed: adds DeepSpeed stages 1-3")
    parser.add_argument("--before", type=Path, help="another checkout, with its native library: its hf_zero joins the rounds as before-N")
    parser.add_argument("--json", type=Path, help="write rows, settings and machine to this file")
    parser.add_argument("--plot", type=Path, help="write a bar chart (needs matplotlib)")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    console = Console(stderr=True)
    world = 1 if arguments.one_rank else 2
    names = ["bare", *OURS[:3]] if arguments.one_rank else ["ddp", *OURS, "fsdp2", "fsdp2-reshard"]
    if arguments.peer_python and not arguments.one_rank:
        names += ["deepspeed-1", "deepspeed-2", "deepspeed-3"]
    if arguments.before:
        names += [name.replace("hf_zero", "before") for name in names if name.startswith("hf_zero")]
    names = arguments.only or names
    size = {key: getattr(arguments, key) for key in ("layers", "width", "heads", "vocab", "length", "batch")}
    contenders: list[Contender] = []
    try:
        for name in names:
            console.print(f"[dim]building {name}[/dim]")
            python = arguments.peer_python if name.startswith("deepspeed") else sys.executable
            contenders.append(start(name, python, arguments.shape, size, world, arguments.before))
        measure(contenders, arguments.rounds, arguments.steps, arguments.warmup, console)
    finally:
        for contender in contenders:
            contender.ranks.stop()
    rows = summarize(contenders, world)
    model = f"{arguments.shape} {size['layers']} x {size['width']}"
    title = f"{model}, batch {size['batch']} x {size['length']}, fp32, {world} gloo rank(s), 1 thread each"
    show(rows, title, Console(width=120))
    if arguments.json:
        import torch

        settings = {**size, "shape": arguments.shape, "world": world, "rounds": arguments.rounds, "steps": arguments.steps}
        machine = {"cpus": os.cpu_count(), "torch": torch.__version__, "python": sys.version.split()[0], "when": time.strftime("%Y-%m-%d")}
        arguments.json.write_text(json.dumps({"settings": settings, "machine": machine, "rows": rows}, indent=1) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
