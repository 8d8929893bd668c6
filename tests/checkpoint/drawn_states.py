"""Loops with Accelerate that save under one configuration and resume under another, compared with
the same under DDP.

By hand: ``python -m tests.checkpoint.drawn_states --count 20 --seed 1``; with ``--run "({...}, {...})"`` one pair that was printed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.accelerate.drawn_loops import Loop, judged
from tests.accelerate.loop_objects import config_of
from tests.accelerate.loop_options import Drawn, changed, full
from tests.support import ranks, trainers
from tests.trainer.drawn_runs import errors_of, outcome_of

SHARED: dict[str, list[Any]] = {
    "model": ["gpt2", "llama", "mlp"],
    "accumulation": [1, 2],
    "clip": [None, "in sync"],
    "optimizer": ["adamw", "sgd", "groups"],
    "scheduler": [None, "prepared"],
    "loader": [None, "split"],
    "dropout": [False, True],
    "epochs": [1, 2],
    "save": [None, "save_model", "unwrapped"],
}
EACH: dict[str, list[Any]] = {"stage": [3, 2, 1, 0], "offload": [None, "optimizer", "both"], "checkpointing": [False, "without"]}
BATCH = 4  # of all ranks


def draw(random_: random.Random) -> tuple[Drawn, Drawn]:
    """Draw the loop before a resume and the one after it."""
    shared: Drawn = {name: random_.choice(values) for name, values in SHARED.items()}
    first, second = ({**shared, **{name: random_.choice(values) for name, values in EACH.items()}, "registered": True} for _ in range(2))
    if random_.random() < 0.5 and not shared["dropout"]:
        return on_ranks(first, random_.choice([1, 2, 4])), on_ranks(second, random_.choice([1, 2, 4]))
    return full(first), full(second)


def on_ranks(run: Drawn, count: int) -> Drawn:
    """Return a loop in which ``count`` ranks share batches of one size: "split" divides those of the loader."""
    run = {**run, "loss": "own", "scheduler": None}  # others weigh tokens by the ranks that have them, or step once for each rank
    return {**full({**run, "batch": BATCH // (2 if run["loader"] == "split" else count)}), "ranks": count}


def until(run: Drawn, models: Path, folder: Path, config: Any) -> tuple[int, int, int, dict[str, Any]]:
    """Train two steps and save, the second time over the first."""
    loop = Loop(run, models, folder, config)
    loop.accelerator.save_state(str(folder / "state"))
    loop.train(last=2)
    loop.accelerator.save_state(str(folder / "state"))
    return loop.epoch, loop.steps, loop.batch, loop.seen


def after(run: Drawn, models: Path, folder: Path, config: Any, done: tuple[int, int, int, dict[str, Any]]) -> dict[str, Any]:
    """Resume and train to the end."""
    loop = Loop(run, models, folder, config)
    loop.epoch, loop.steps, loop.batch, loop.seen = done
    for _ in range(2):
        loop.accelerator.load_state(str(folder / "state"))
    loop.train(skipped=loop.batch)
    return {**ended(loop), "counter": loop.counter.value}


def ended(loop: Loop) -> dict[str, Any]:
    weights = trainers.weights_of(loop.accelerator.unwrap_model(loop.model))
    return {**loop.seen, "steps": loop.steps, "saved": loop.save(), "weights": weights}


def of(what: str, *given: Any) -> Any:
    with trainers.clean_state():
        return outcome_of({"until": until, "after": after}[what], *given)


def compared(first: Drawn, second: Drawn, models: Path, folder: Path) -> list[str]:
    """Run both loops under DDP and under ZeRO, each in new objects; return the differences."""
    results = []
    for name in ("ddp", "zero"):
        (folder / name).mkdir()
        configs = [config_of(run) if name == "zero" else None for run in (first, second)]
        worlds = [run.get("ranks", 2) if name == "zero" else 2 for run in (first, second)]
        runs = [run if name == "zero" or "ranks" not in run else on_ranks(run, 2) for run in (first, second)]
        done = ranks.run_ranks(of, worlds[0], "until", runs[0], models, folder / name, configs[0], timeout=60)
        if isinstance(done[0], str):
            results.append(done)
        else:
            results.append(ranks.run_ranks(of, worlds[1], "after", runs[1], models, folder / name, configs[1], done[0], timeout=60))
    pairs = zip(*results, strict=False)  # of the ranks that both have
    return sorted({line for expected, one in pairs for line in errors_of(expected, one) or judged(second, expected, one)})


def shown(run: Drawn) -> Drawn:
    return {**changed({name: value for name, value in run.items() if name != "ranks"}), "ranks": run.get("ranks", 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run", help="options of the two loops, as they were printed")
    given = parser.parse_args()
    random_ = random.Random(given.seed)
    if given.run:
        parts = eval(given.run)  # noqa: S307
        pairs = [tuple({**full(part), **{key: part[key] for key in ("ranks",) if key in part}} for part in parts)]
    else:
        pairs = [draw(random_) for _ in range(given.count)]
    with tempfile.TemporaryDirectory() as models:
        trainers.save_models(Path(models))
        for index, (first, second) in enumerate(pairs):
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                lines = compared(first, second, Path(models), Path(folder))
            print(f"[{index}] {'DIFFERS' if lines else 'ok'} {time.monotonic() - start:.0f} s {shown(first), shown(second)}", flush=True)
            for line in lines[:6]:
                print(f"      {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
