"""Training loops with Accelerate and drawn options: all that a script sees and saves is as in the same loop under DDP."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.accelerate import drawn_loops
from tests.accelerate.loop_options import changed, draw, full
from tests.support import ranks
from tests.support.rows import slow_but

FEW, MANY = 4, 40  # loops of a seed
SHARED = ("tensor", "context", "ring", "pipeline")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_drawn_loops(seed: int, trainer_models: Path, tmp_path: Path) -> None:
    source = random.Random(seed)
    for index in range(MANY if seed else FEW):
        run = draw(source) | {"pattern": "accumulate"}
        found = {line for lines in ranks.run_ranks(drawn_loops.compared, 2, run, trainer_models, tmp_path / str(index)) for line in lines}
        assert not found, f"{changed(run)}: {sorted(found)[:5]}"


@pytest.mark.parametrize("axis", slow_but(SHARED, "tensor"))
def test_ranks_that_share_each_batch_train_as_one(axis: str, trainer_models: Path, tmp_path: Path) -> None:
    source = random.Random(axis)
    for index in range(FEW // 2):
        run = draw(source, axis)
        assert not drawn_loops.compared_over(run, trainer_models, tmp_path / str(index)), changed(run)


CASES: list[dict[str, Any]] = [
    {"stage": 1, "scheduler": "prepared", "resume": "starts again", "accumulation": 2},
    {"stage": 3, "scheduler": "not with the optimizer", "prepare": "apart", "resume": "continues", "registered": True},
    {"stage": 2, "scheduler": "prepared", "loader": "split", "plugin": "not with the loader", "accumulation": 2},
]


@pytest.mark.parametrize("options", slow_but(CASES, CASES[0]), ids=lambda options: str(options["stage"]))
def test_a_scheduler_prepared_by_itself_is_stepped_and_saved_as_any(options: dict[str, Any], trainer_models: Path, tmp_path: Path) -> None:
    """With a DeepSpeed plugin accelerate leaves it as it is: it stepped once, not once per process, and no save had it."""
    run = full(options)
    for found in ranks.run_ranks(drawn_loops.compared, 2, run, trainer_models, tmp_path):
        assert not found


def test_accumulation_by_hand_is_an_error_on_all_ranks(trainer_models: Path, tmp_path: Path) -> None:
    run = full({"stage": 2, "pattern": "modulo"})
    first, second = ranks.run_ranks(drawn_loops.compared, 2, run, trainer_models, tmp_path)
    assert first == second and "put each micro-step inside `with accelerator.accumulate(model):`" in first[0]
