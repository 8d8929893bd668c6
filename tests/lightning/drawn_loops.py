"""Programs with Lightning's Fabric and Trainer, drawn at random, under DDP and under ZeRO, which must see and save the same values.

By hand: ``python -m tests.lightning.drawn_loops --count 30 --seed 1``, ``python -m tests.lightning.drawn_loops --run "{...}"`` for one
that was printed.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch

from tests.lightning import drawn_fabric
from tests.lightning.drawn_options import Drawn, changed, draw, each, full
from tests.support import ranks
from tests.trainer.drawn_runs import REFUSED, differences, errors_of, outcome_of, report

KINDS = ("fabric", "trainer")
REFUSALS = (  # Lightning's own, which name the cause
    "requires the model and optimizer(s) to be set up jointly",
    "Currently only one optimizer is supported with DeepSpeed",
    "DeepSpeed currently only supports single optimizer",
    "SWA does not currently support sharded models",
    "does not support `accumulate_grad_batches` changing between epochs",
    "The Finetuning callback does not support running with the DeepSpeed strategy",
)
EXPLAINED = ("both raise", *REFUSED)


def judged(run: Drawn, plain: Any, zero: Any) -> list[str]:
    """Return the differences of two outcomes, or one line with an error. In 16 bits DDP keeps other weights, so only losses count."""
    if lines := errors_of(plain, zero):
        return [
            line.replace("ZeRO: ", "ZeRO: UnsupportedError: Lightning: ") if any(word in line for word in REFUSALS) else line
            for line in lines
        ]
    if run["precision"] == "32-true":
        return list(differences(plain, zero))
    found = []
    for name, share in (("loss", 0.05), ("lr", 1e-6)):
        left, right = (torch.tensor(result[name], dtype=torch.float64) for result in (plain, zero))
        if left.shape != right.shape or not torch.allclose(left, right, rtol=share, atol=0.0):
            found.append(f".{name}: {plain[name]} and {zero[name]}")
    return found + [f".{name}: {plain[name]} and {zero[name]}" for name in ("steps",) if plain[name] != zero[name]]


def compared(run: Drawn, folder: Path) -> list[str]:
    """Run under DDP and under ZeRO inside ranks; return the differences."""
    results = []
    for name in ("ddp", "zero"):
        torch.manual_seed(3)
        results.append(outcome_of(_result_of(run), run, folder / name, name == "zero"))
    return judged(run, *results)


def _result_of(run: Drawn) -> Any:
    if run["kind"] == "fabric":
        return drawn_fabric.result_of
    from tests.lightning import drawn_fits

    return drawn_fits.result_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="programs to draw")
    parser.add_argument("--each", action="store_true", help="each value of each option once, in place of drawn programs")
    parser.add_argument("--run", help="options of one program, as they were printed")
    given = parser.parse_args()
    random_ = random.Random(given.seed)
    if given.run:
        runs = [full(eval(given.run))]  # noqa: S307
    elif given.each:
        runs = [run for kind in given.kinds for run in each(kind)]
    else:
        runs = [draw(random_, given.kinds[index % len(given.kinds)]) for index in range(given.count)]

    def lines_of(run: Drawn, _models: Path, folder: Path) -> list[str]:
        found = ranks.run_ranks(compared, 2, run, folder, group=False, timeout=90)
        return sorted({line for one in found for line in one})

    report(runs, lines_of, changed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
