"""What a run says about itself: the panel at its start, the table at its end, the JSON file, and a table over several files.

python examples/common/results.py runs/ddp/results.json runs/zero3/results.json
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

MIB = 2**20
RESULTS_FILE = "results.json"


@dataclass(frozen=True)
class RunFacts:
    """How a run is set up; known before its first step."""

    task: str  # what is trained, as in the panel's title
    stage: int | None  # ZeRO stage; None without ZeRO
    ranks: int
    backend: str  # of torch.distributed: gloo, nccl, ...; "none" for a single process
    device: str
    precision: str
    parameters: int
    train_samples: int
    eval_samples: int
    sample: str  # what a sample is, for the panel
    micro_batch_size: int  # samples per rank and micro-step
    eval_batch_size: int  # the same when evaluating
    accumulation_steps: int
    max_train_steps: int
    expected_state_bytes: int  # per rank, by arithmetic
    stage0_state_bytes: int  # the same if nothing were sharded
    tensor_parallel_size: int = 1  # ranks that share one copy of the model

    @property
    def method(self) -> str:
        """Name of the run in tables."""
        split = f"TP {self.tensor_parallel_size}" if self.tensor_parallel_size > 1 else ""
        if self.stage is not None:
            zero = f"ZeRO stage {self.stage}"
            return f"{zero} + {split}" if split and self.stage else split or zero
        return "DDP" if self.ranks > 1 else "one process"

    @property
    def batch_size(self) -> int:
        """Samples per optimizer step, all ranks together."""
        return self.micro_batch_size * self.accumulation_steps * self.ranks // self.tensor_parallel_size


@dataclass(frozen=True)
class RunResults:
    """What a run measured; the times are those of a whole epoch, at the speed measured over all steps done."""

    train_seconds_per_epoch: float
    eval_seconds_per_epoch: float
    samples_per_second: float  # all ranks together, while training
    peak_memory_bytes: int  # of the rank with the highest
    state_bytes: int  # parameters, masters and optimizer state of the rank with the most, measured
    train_loss: float  # mean of the last epoch
    metrics_before: dict[str, float]  # before training; empty when that was not evaluated
    metrics: dict[str, float]  # what the task is judged by, after training
    steps: int


def to_perplexity(loss: float) -> float:
    """Perplexity of a mean loss in nats; infinite where the exponential overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def mebibytes(size: float) -> str:
    """``size`` bytes as text in MiB."""
    return f"{size / MIB:,.1f} MiB"


def metric_text(value: float) -> str:
    """A metric as text: three decimals for shares, one for what grows beyond 10."""
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3f}"


def metric_heading(name: str) -> str:
    """Heading of a metric's column."""
    return name.upper() if name in ("f1", "bleu") else name.replace("_", " ").capitalize()


def metrics_text(metrics: dict[str, float]) -> str:
    """``perplexity 261.3`` or ``f1 0.912, accuracy 0.880``."""
    return ", ".join(f"{name.replace('_', ' ')} {metric_text(value)}" for name, value in metrics.items())


def start_panel(facts: RunFacts, held_bytes: int) -> Panel:
    """Panel with the set-up of a run and its model state per rank against stage 0.

    Args:
        facts: The set-up.
        held_bytes: Bytes of model state that this rank holds before the first step (AdamW's moments come with it).
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    share = facts.expected_state_bytes / facts.stage0_state_bytes
    grid.add_row("method", f"{facts.method}, {facts.precision}")
    grid.add_row("ranks", f"{facts.ranks} (backend {facts.backend}, device {facts.device})")
    grid.add_row("parameters", f"{facts.parameters:,}")
    grid.add_row(
        "state per rank", f"{mebibytes(facts.expected_state_bytes)}: {share:.0%} of stage 0 ({mebibytes(facts.stage0_state_bytes)})"
    )
    grid.add_row("held now", f"{mebibytes(held_bytes)} measured, before the first step creates AdamW's moments")
    grid.add_row("data", f"{facts.train_samples:,} to train, {facts.eval_samples:,} to evaluate: {facts.sample}")
    split = facts.tensor_parallel_size
    copies = f"{facts.ranks // split} {'ranks' if split == 1 else 'copies'}"
    batch = f"{facts.micro_batch_size} x {facts.accumulation_steps} accumulation x {copies}"
    grid.add_row("training", f"{facts.max_train_steps:,} steps of {facts.batch_size} samples ({batch})")
    return Panel(grid, title=facts.task, expand=False)


def results_table(runs: Sequence[tuple[RunFacts, RunResults]]) -> Table:
    """Table with one row per run; a column for each metric that any of them has."""
    table = Table(title="Results")
    names = list(dict.fromkeys(name for _, results in runs for name in results.metrics))
    headings = ("Method", "Batch size", "Train s/epoch", "Eval s/epoch", "Samples/s", "Peak memory", "State per rank")
    for heading in (*headings, *map(metric_heading, names)):
        table.add_column(heading, justify="left" if heading == "Method" else "right")
    for facts, results in runs:
        ranks = "1 rank" if facts.ranks == 1 else f"{facts.ranks} ranks"
        table.add_row(
            f"{facts.method}, {facts.precision}, {ranks}",
            str(facts.batch_size),
            f"{results.train_seconds_per_epoch:,.1f}",
            f"{results.eval_seconds_per_epoch:,.1f}",
            f"{results.samples_per_second:,.1f}",
            mebibytes(results.peak_memory_bytes),
            mebibytes(results.state_bytes),
            *(_metric_cell(results, name) for name in names),
        )
    return table


def _metric_cell(results: RunResults, name: str) -> str:
    if name not in results.metrics:
        return ""
    before = f"{metric_text(results.metrics_before[name])} -> " if name in results.metrics_before else ""
    return before + metric_text(results.metrics[name])


def write_results(path: Path, facts: RunFacts, results: RunResults) -> None:
    """Write both records as JSON; `read_results` reads them back."""
    path.write_text(json.dumps({"facts": asdict(facts), "results": asdict(results)}, indent=2) + "\n", encoding="utf-8")


def read_results(path: Path) -> tuple[RunFacts, RunResults]:
    """Read what `write_results` wrote.

    Raises:
        ValueError: The file holds something else; the message names it.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return RunFacts(**record["facts"]), RunResults(**record["results"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no {RESULTS_FILE} of these examples ({error!r}). Give files that their scripts wrote.") from error


def wide_console() -> Console:
    """Console that does not squeeze the table where the output is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def main() -> None:
    """Print one table over the files named on the command line."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        runs = [read_results(Path(name)) for name in sys.argv[1:]]
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    wide_console().print(results_table(runs))


if __name__ == "__main__":
    main()
