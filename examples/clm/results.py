"""What a run says about itself: the panel at its start, the table at its end, the JSON file, and a table over several files.

python examples/clm/results.py runs/ddp/results.json runs/zero3/results.json
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

MIB = 2**20


@dataclass(frozen=True)
class RunFacts:
    """How a run is set up; known before its first step."""

    stage: int | None  # ZeRO stage; None without ZeRO
    ranks: int
    backend: str  # of torch.distributed: gloo, nccl, ...; "none" for a single process
    device: str
    precision: str
    parameters: int
    train_sequences: int
    eval_sequences: int
    block_size: int
    micro_batch_size: int  # sequences per rank and micro-step
    accumulation_steps: int
    max_train_steps: int
    expected_state_bytes: int  # per rank, by arithmetic
    stage0_state_bytes: int  # the same if nothing were sharded

    @property
    def method(self) -> str:
        """Name of the run in tables."""
        if self.stage is not None:
            return f"ZeRO stage {self.stage}"
        return "DDP" if self.ranks > 1 else "one process"

    @property
    def batch_size(self) -> int:
        """Sequences per optimizer step, all ranks together."""
        return self.micro_batch_size * self.accumulation_steps * self.ranks


@dataclass(frozen=True)
class RunResults:
    """What a run measured; times are means over its epochs."""

    train_seconds_per_epoch: float
    eval_seconds_per_epoch: float
    tokens_per_second: float  # all ranks together, while training
    peak_memory_bytes: int  # of the rank with the highest
    state_bytes: int  # parameters, masters and optimizer state of the rank with the most, measured
    train_loss: float  # mean of the last epoch
    perplexity_before: float | None
    perplexity: float
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
    grid.add_row(
        "data", f"{facts.train_sequences:,} sequences to train, {facts.eval_sequences:,} to evaluate, {facts.block_size} tokens each"
    )
    batch = f"{facts.micro_batch_size} x {facts.accumulation_steps} accumulation x {facts.ranks} ranks"
    grid.add_row("training", f"{facts.max_train_steps:,} steps of {facts.batch_size} sequences ({batch})")
    return Panel(grid, title="causal language model", expand=False)


def results_table(runs: list[tuple[RunFacts, RunResults]]) -> Table:
    """Table with one row per run."""
    table = Table(title="Results")
    for heading in ("Method", "Batch size", "Train s/epoch", "Eval s/epoch", "Tokens/s", "Peak memory", "State per rank", "Perplexity"):
        table.add_column(heading, justify="left" if heading == "Method" else "right")
    for facts, results in runs:
        ranks = "1 rank" if facts.ranks == 1 else f"{facts.ranks} ranks"
        before = "" if results.perplexity_before is None else f"{results.perplexity_before:,.1f} -> "
        table.add_row(
            f"{facts.method}, {facts.precision}, {ranks}",
            str(facts.batch_size),
            f"{results.train_seconds_per_epoch:,.1f}",
            f"{results.eval_seconds_per_epoch:,.1f}",
            f"{results.tokens_per_second:,.0f}",
            mebibytes(results.peak_memory_bytes),
            mebibytes(results.state_bytes),
            f"{before}{results.perplexity:,.1f}",
        )
    return table


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
        raise ValueError(f"{path} is no results.json of this example ({error!r}). Give files that run_clm_no_trainer.py wrote.") from error


def wide_console() -> Console:
    """Console that does not squeeze the table where the output is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def main() -> None:
    """Print one table over the files named on the command line."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    wide_console().print(results_table([read_results(Path(name)) for name in sys.argv[1:]]))


if __name__ == "__main__":
    main()
