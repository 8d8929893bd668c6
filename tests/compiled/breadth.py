"""Trains a tiny model of many text architectures with compiled blocks at stage 3 and in plain PyTorch, and counts what was compiled.

python -m tests.compiled.breadth                    # those that are published already; writes the table of docs/compile.md
python -m tests.compiled.breadth all                # all of the zoo
python -m tests.compiled.breadth LlamaForCausalLM   # adds or renews its row
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.compiled.runs import counts, reset
from tests.support import parity, ranks, zoo
from tests.support.parity import Run
from tests.tensor_parallel.breadth import perturb

RESULTS = Path(__file__).resolve().parents[1] / "data" / "compiled_breadth.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "compile.md"
START, STOP = "<!-- breadth: made by python -m tests.compiled.breadth -->", "<!-- end of breadth -->"
RUN = Run(stage=3, steps=4)
BACKEND = "aot_eager"


@dataclass
class Row:
    """One architecture: breaks inside blocks, graphs after the second step and those that came later, under the engine and in plain
    PyTorch (``own_``); the largest difference of losses and weights relative to plain PyTorch compiled; why its own code breaks."""

    name: str
    model_type: str
    blocks: int = 0
    breaks: int = 0
    own_breaks: int = 0
    graphs: int = 0
    own_graphs: int = 0
    later: int = 0
    own_later: int = 0
    difference: float = 0.0
    reason: str = ""
    error: str = ""

    @property
    def equal(self) -> bool:
        """Every bit of losses and weights is that of plain PyTorch compiled."""
        return not self.error and self.difference == 0.0

    @property
    def good(self) -> bool:
        """The engine adds no break and no graph, and the numbers are those of plain PyTorch compiled within rounding."""
        return (
            not self.error and self.breaks <= self.own_breaks and self.graphs <= self.own_graphs and self.later <= self.own_later
        ) and self.difference < 1e-5


@dataclass
class Trained:
    """What one training leaves."""

    losses: list[float]
    weights: dict[str, Tensor]
    breaks: int
    graphs: int
    later: int
    reason: str


def measure(name: str) -> Row:
    """One architecture on this rank."""
    row = Row(name, zoo.architecture(name).model_type)
    try:
        mine, blocks = _with_engine(name)
        own = _plain(name, blocks)
    except Exception as error:  # noqa: BLE001 - to be told in the table
        row.error = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        return row
    row.blocks = len(blocks)
    row.breaks, row.own_breaks, row.reason = mine.breaks, own.breaks, own.reason or mine.reason
    row.graphs, row.own_graphs, row.later, row.own_later = mine.graphs, own.graphs, mine.later, own.later
    row.difference = _difference(mine, own)
    return row


def _with_engine(name: str) -> tuple[Trained, list[str]]:
    model = _model(name)
    engine = parity.initialize(model, RUN, optimizer=torch.optim.SGD(model.parameters(), lr=RUN.lr, foreach=False))
    engine.compile(backend=BACKEND)
    blocks = [block.name for block in engine.runtime.blocks]

    def step(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    trained = _train(name, engine, step)
    trained.weights = parity.collect(engine, parity.Trace()).weights
    engine.destroy()
    return trained, blocks


def _plain(name: str, blocks: list[str]) -> Trained:
    model = _model(name)
    for block in blocks or [""]:
        model.get_submodule(block).compile(backend=BACKEND)
    optimizer = torch.optim.SGD(model.parameters(), lr=RUN.lr, foreach=False)

    def step(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    trained = _train(name, model, step)
    trained.weights = {key: param.detach().clone() for key, param in model.named_parameters()}
    return trained


def _model(name: str) -> nn.Module:
    model = zoo.build(name)
    perturb(model)
    return model.train()


def _train(name: str, model: Any, step: Callable[[Tensor], None]) -> Trained:
    """Four steps; an evaluation after the second and the last."""
    from torch._dynamo.utils import counters

    reset()
    losses, graphs = [], 0
    for index in range(RUN.steps):
        batch = zoo.batch(name, torch.Generator().manual_seed(index))
        torch.manual_seed(index)
        loss = zoo.loss(model, batch)
        step(loss)
        losses.append(float(loss.detach()))
        if index % 2:
            model.eval()
            with torch.no_grad():
                losses.append(float(zoo.loss(model, batch)))
            model.train()
        if index == 1:
            graphs, _ = counts()
    last, breaks = counts()
    reasons = sorted(counters["graph_break"].items(), key=lambda item: -item[1])
    return Trained(losses, {}, breaks, graphs, last - graphs, str(reasons[0][0]).splitlines()[0][:120] if reasons else "")


def _difference(mine: Trained, own: Trained) -> float:
    worst = max(abs(one - two) / max(abs(two), 1e-12) for one, two in zip(mine.losses, own.losses, strict=True))
    for key, value in own.weights.items():
        scale = value.abs().max().clamp(min=0.01)
        worst = max(worst, float((mine.weights[key] - value).abs().max() / scale))
    return worst


def measure_each(names: list[str]) -> list[Row]:
    """Rows of ``names``, one after the other, on this rank."""
    warnings.simplefilter("ignore")
    return [measure(name) for name in names]


def measure_all(names: list[str], tell: Callable[[list[Row]], None] = lambda rows: None, at_once: int = 4) -> list[Row]:
    """Rows of ``names``; a process that hangs or dies is tried with one model at a time."""
    rows: list[Row] = []
    for start in range(0, len(names), at_once):
        part = names[start : start + at_once]
        try:
            rows += ranks.run_ranks(measure_each, 1, part, timeout=900.0)[0]
        except ranks.RankError as error:
            if len(part) > 1:
                rows += [row for name in part for row in measure_all([name], at_once=1)]
            else:
                rows.append(Row(part[0], zoo.architecture(part[0]).model_type, error=str(error).strip().splitlines()[-1][:120]))
        tell(rows)
        for row in rows[-len(part) :]:
            print(row, flush=True)
    return rows


def saved() -> list[Row]:
    """The published results."""
    return [Row(**row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))]


def table(rows: list[Row]) -> str:
    """The generated part of the page."""
    import transformers

    measured = [row for row in rows if not row.error]
    clean, equal = sum(row.breaks == 0 for row in measured), sum(row.equal for row in measured)
    lines = [
        START,
        f"{len(measured)} architectures of transformers {transformers.__version__}, one rank, fp32, SGD: {equal} have every bit of",
        f"losses and weights of plain PyTorch compiled, {clean} no graph break. Breaks and graphs of the model's own code, which plain",
        "PyTorch has as well, are in brackets.",
        "",
        "| architecture | blocks | breaks in blocks (own) | graphs (own) | graphs after the second step (own) | result |",
        "|---|---|---|---|---|---|",
        *(_line(row) for row in measured),
        *(f"| {row.name} | | | | | not measured: {row.error.replace('|', '/')} |" for row in rows if row.error),
    ]
    return "\n".join([*lines, STOP])


def _line(row: Row) -> str:
    result = "every bit" if row.equal else f"within {row.difference:.0e}"
    cells = [(row.breaks, row.own_breaks), (row.graphs, row.own_graphs), (row.later, row.own_later)]
    return f"| {row.name} | {row.blocks} | " + " | ".join(f"{mine} ({own})" for mine, own in cells) + f" | {result} |"


def publish(rows: list[Row]) -> None:
    """Write the results and their table; rows that were measured before and not now stay."""
    before = {row.name: row for row in saved()} if RESULTS.exists() else {}
    before |= {row.name: row for row in rows}
    ordered = sorted(before.values(), key=lambda row: row.name)
    RESULTS.write_text(json.dumps([asdict(row) for row in ordered], indent=0) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.split(START)[0] + table(ordered) + page.split(STOP)[1], encoding="utf-8")


def main() -> None:
    """Measures, prints and publishes."""
    names = sys.argv[1:] or [row.name for row in saved()]
    if names == ["all"]:
        names = [found.name for found in zoo.architectures()]
    publish(measure_all(names, publish))
    ranks.close_pools()


if __name__ == "__main__":
    main()
