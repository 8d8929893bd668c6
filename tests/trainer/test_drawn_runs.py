"""Trainer runs with drawn options: logs, evaluations, predictions, weights and files are those of the same run under DDP."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ranks, trainers
from tests.support.rows import slow_but
from tests.support.versions import PARALLELISM_CONFIG, has
from tests.trainer import drawn_runs
from tests.trainer.drawn_options import changed, draw, full

FEW, MANY = 2, 10  # runs of a seed


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_drawn_runs(seed: int, trainer_models: Path, tmp_path: Path) -> None:
    source = random.Random(seed)
    for index in range(MANY if seed else FEW):
        run = draw(source)
        found = {line for lines in ranks.run_ranks(drawn_runs.compared, 2, run, trainer_models, tmp_path / str(index)) for line in lines}
        assert not found, f"{changed(run)}: {sorted(found)[:5]}"


SHARED = [
    ("sequence", {"gradient_accumulation_steps": 3, "length": "epochs", "logging_steps": 2}),
    ("tensor", {"average_tokens_across_devices": False, "loss": "function", "eval_strategy": "steps"}),
    ("ring", {"average_tokens_across_devices": False, "eval_strategy": "steps"}),
    ("context", {"average_tokens_across_devices": False, "label_smoothing_factor": 0.1}),
    ("pipeline", {"average_tokens_across_devices": False, "gradient_accumulation_steps": 3, "length": "epochs"}),
]


@PARALLELISM_CONFIG
@pytest.mark.parametrize("case", slow_but(SHARED, *SHARED[:2]), ids=lambda case: case[0])
def test_ranks_that_share_each_batch_train_as_one(case: tuple[str, dict[str, Any]], trainer_models: Path, tmp_path: Path) -> None:
    """The rows of a micro-step have other numbers of labels than those of the next."""
    axis, options = case
    run = full({"stage": 1, "model": "llama", "axis": axis, **options})
    found = drawn_runs.compared_over(run, trainer_models, tmp_path)
    if axis == "sequence" and not has("transformers", "5.10"):  # on one rank it counts the first label of a row, which nothing predicts
        found = [line for line in found if "predicted.test_loss" not in line]
    assert not found


@PARALLELISM_CONFIG
@pytest.mark.parametrize(
    ("option", "value", "word"), [("label_smoothing_factor", 0.1, "label_smoothing_factor"), ("loss", "function", "compute_loss_func")]
)
def test_losses_that_transformers_leaves_out_over_slices_are_an_error(
    option: str, value: Any, word: str, trainer_models: Path, tmp_path: Path
) -> None:
    run = {**full({"stage": 2, "model": "llama", "axis": "sequence"}), option: value}
    config = drawn_runs.config_of(run)
    for found in ranks.run_ranks(drawn_runs.alone, 2, run, trainer_models, tmp_path, config, group=False):
        assert isinstance(found, str) and f"{word} has no effect under sequence parallelism (sp_size 2)" in found, found


def _evaluated(run: dict[str, Any], models: Path, folder: Path, config: Any) -> float:
    from transformers import Trainer

    with trainers.clean_state():
        args = drawn_runs.arguments_of(run, folder, config)
        held, _ = drawn_runs.data_of(run, drawn_runs.held_rows(run), 2, train=False)
        return float(Trainer(model=drawn_runs.model_of(run, models), args=args, eval_dataset=held).evaluate()["eval_loss"])


@PARALLELISM_CONFIG
def test_evaluation_over_slices_keeps_its_label_smoothing(trainer_models: Path, tmp_path: Path) -> None:
    run = {**full({"stage": 3, "model": "llama", "axis": "sequence"}), "label_smoothing_factor": 0.3}
    (plain,) = ranks.run_ranks(_evaluated, 1, run, trainer_models, tmp_path, None, group=False)
    (sharp,) = ranks.run_ranks(_evaluated, 1, run | {"label_smoothing_factor": 0.0}, trainer_models, tmp_path, None, group=False)
    assert abs(plain - sharp) > 1e-4
    for found in ranks.run_ranks(_evaluated, 2, run, trainer_models, tmp_path, drawn_runs.config_of(run), group=False):
        assert found == pytest.approx(plain, rel=1e-5)


def test_differences_are_found() -> None:
    left = {"history": [{"loss": 1.0}], "weights": {"a": torch.zeros(2)}, "best": None}
    right = {"history": [{"loss": 1.001}, {}], "weights": {"a": torch.tensor([0.0, 1e-3]), "b": torch.zeros(1)}, "best": "checkpoint-2"}
    assert list(drawn_runs.differences(left, right)) == [
        ".best: None and 'checkpoint-2'",
        ".history: 1 and 2 entries",
        ".history[0].loss: 1.0 and 1.001",
        ".weights.a: off by 0.001",
        ".weights.b: only ZeRO",
    ]
    assert not list(drawn_runs.differences(left, left))
