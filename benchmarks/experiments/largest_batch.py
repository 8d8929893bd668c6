"""Find the largest batch of the published experiments that fits 24 GiB for each of two ranks, and time epochs with it: DDP and stages.

    python -m benchmarks.experiments.largest_batch --json benchmarks/results/largest_batch.json
    python -m benchmarks.experiments.largest_batch --only deberta --limit 60
    python -m benchmarks.experiments.largest_batch --toy --device pretend --cap-gib 0.1

The models have the published sizes and random weights, tokens are random, and every sample has the full length. Each method runs in
processes of its own, each of which may allocate ``--cap-gib`` of its GPU. The first steps are small ones; the largest batch is where the
line through their peaks meets the limit, and the steps that are timed have that batch. Ranks without a GPU of their own share one over
gloo: sums then pass through host memory, so seconds tell less than batches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.device_processes import run
from benchmarks.common.tables import ResultTable


@dataclass(frozen=True)
class Experiment:
    """One of the published experiments.

    Attributes:
        title: Its first column.
        shape: A shape of ``training.build_model``.
        size: Sizes of the model; batch is where the search begins.
        samples: Number of samples of the training data.
        methods: Names of ``METHODS``.
    """

    title: str
    shape: str
    size: dict[str, int]
    samples: int
    methods: tuple[str, ...]


METHODS: dict[str, dict[str, Any]] = {
    "DDP": {"contender": "ddp", "offload": False},
    "ZeRO-2": {"contender": "hf_zero", "stage": 2, "offload": False},
    "ZeRO-3": {"contender": "hf_zero", "stage": 3, "offload": False},
    "ZeRO-3, CPU offload": {"contender": "hf_zero", "stage": 3, "offload": True},
}
SHARDED = ("DDP", "ZeRO-2", "ZeRO-3")
EXPERIMENTS = {
    "deberta": Experiment(
        "DeBERTa-v2-xlarge, MRPC, 128 tokens",
        "deberta-v2",
        {"layers": 24, "width": 1536, "heads": 24, "vocab": 128100, "length": 128, "batch": 2, "classes": 2},
        3668,
        SHARDED,
    ),
    "blenderbot": Experiment(
        "BlenderBot-400M, 128 and 64 tokens",
        "blenderbot",
        {"layers": 12, "encoder_layers": 2, "width": 1280, "heads": 32, "vocab": 8008, "length": 128, "targets": 64, "batch": 16},
        10000,
        SHARDED,
    ),
    "gpt2-xl": Experiment(
        "GPT-2 XL, wikitext-2, 128 tokens",
        "gpt2",
        {"layers": 48, "width": 1600, "heads": 25, "vocab": 50257, "length": 128, "batch": 4},
        18686,
        (*SHARDED, "ZeRO-3, CPU offload"),
    ),
}
TOY = {"layers": 2, "encoder_layers": 2, "width": 64, "heads": 4, "vocab": 512}
COLUMNS = ["experiment", "method", "batch per rank", "to DDP's", "s/epoch", "to DDP's time", "s/step", "peak GPU GiB"]
NO_ROOM = "out of GPU memory"
FEWER = 0.93  # of a batch that did not fit


def measured(job: dict[str, Any]) -> dict[str, Any] | str:
    """Return the answer of a method, or the reason why there is none; a batch that does not fit after all is made smaller twice."""
    reason = ""
    for _ in range(3):
        outcome = run(job, sys.executable)
        if outcome.answer:
            return outcome.answer
        reason = outcome.reason
        tried = [int(line.split()[-1]) for line in outcome.errors.splitlines() if line.startswith("tries a batch of ")]
        if NO_ROOM not in reason or not tried:
            break
        job = {**job, "most": int(FEWER * tried[-1])}
    return reason


def rows_of(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Measure all methods of the chosen experiments; yield a row for each."""
    base = {name: getattr(arguments, name) for name in ("device", "cap_gib", "limit", "world", "steps")} | {"warmup": 1}  # after the search
    for name in arguments.only:
        experiment, whole = EXPERIMENTS[name], None
        size = {**experiment.size, **({key: TOY[key] for key in TOY if key in experiment.size} if arguments.toy else {})}
        for method in [one for one in experiment.methods if one in arguments.methods]:
            print(f"{experiment.title}: {method}", file=sys.stderr, flush=True)
            answer = measured({**base, **METHODS[method], "dtype": "fp16", "shape": experiment.shape, "size": size, "search": True})
            if isinstance(answer, str):
                yield [experiment.title, method, answer, *[""] * (len(COLUMNS) - 3)]
                continue
            batch, seconds = answer["batch"], answer["seconds"]
            epoch = experiment.samples / (arguments.world * batch) * seconds
            whole = (batch, epoch) if method == "DDP" else whole
            ratios = (f"{batch / whole[0]:.2f}", f"{epoch / whole[1]:.2f}") if whole else ("", "")
            peak = f"{answer['gpu'] / 2**30:.1f}"
            yield [experiment.title, method, str(batch), ratios[0], f"{epoch:.1f}", ratios[1], f"{seconds:.3f}", peak]


def table_of(arguments: argparse.Namespace, rows: list[list[str]]) -> ResultTable:
    """Return the table of the results so far."""
    return ResultTable(
        title="Largest batches of the published experiments",
        command="python -m benchmarks.experiments.largest_batch",
        text=f"{arguments.world} ranks, each of which may allocate {arguments.cap_gib:g} GiB; random weights of the published sizes, fp16, "
        f"AdamW, gradients clipped to a norm of 1; median of {arguments.steps} steps. **Batch per rank**: the largest of which the line "
        "through the peaks of smaller ones says that it fits 97 % of the limit; it was trained. **s/epoch**: samples of the training "
        "data, divided by the batch of all ranks, times s/step. Ranks without a GPU of their own share one over gloo, and sums pass "
        "through host memory: seconds are those of that machine.",
        columns=COLUMNS,
        rows=rows,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "pretend"], default="cuda")
    parser.add_argument("--toy", action="store_true", help="models of 0.1 M parameters")
    parser.add_argument("--only", nargs="+", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--world", type=int, default=2, help="number of ranks")
    parser.add_argument("--cap-gib", type=float, default=24.0, help="GPU memory that each process may allocate")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds that each process may take; 0 for no limit")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    rows: list[list[str]] = []
    for row in rows_of(arguments):
        rows.append(row)
        if arguments.json:  # results are kept even if a later measurement fails
            table_of(arguments, rows).save(arguments.json)
    table_of(arguments, rows).print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
