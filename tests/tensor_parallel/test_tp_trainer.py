"""Hugging Face's Trainer with ``"tensor_parallel": {"autotp_size": N}``: data, losses, evaluation, saved model, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ranks
from tests.support.models import CASES
from tests.support.tp_trainer import (
    EVALUATED,
    arguments,
    counts_of,
    generated,
    losses,
    norms,
    resume,
    rows,
    train_and_save,
    zero_config,
)


def one_rank(folder: str, batch: int) -> tuple[list[float], list[float], float, dict[str, torch.Tensor], Any, tuple[float, ...]]:
    from transformers import Trainer

    trainer = Trainer(
        model=CASES["gpt2"].build(), args=arguments(folder, None, batch=batch), train_dataset=rows(), eval_dataset=rows(EVALUATED)
    )
    trainer.train()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    predicted = trainer.predict(rows(EVALUATED)).predictions
    return losses(trainer), norms(trainer), trainer.evaluate()["eval_loss"], weights, predicted, counts_of(trainer)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("stage", "world"), [pytest.param(1, 2, marks=SLOW), (3, 2), pytest.param(2, 4, marks=SLOW), pytest.param(3, 4, marks=SLOW)]
)
def test_trainer_trains_like_one_rank_and_saves_the_whole_model(stage: int, world: int, tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    found = ranks.run_ranks(train_and_save, world, stage, 2, saved, group=False)
    expected = ranks.run_ranks(one_rank, 1, str(tmp_path / "one"), world // 2 * 2, group=False)[0]
    for got_losses, got_norms, evaluated, predicted, counts in found:
        assert counts == expected[5]
        assert got_losses == pytest.approx(expected[0], rel=1e-4)
        assert got_norms == pytest.approx(expected[1], rel=1e-3)
        assert evaluated == pytest.approx(expected[2], rel=5e-3)  # Trainer counts the last, shorter batch by the rows of a rank
        assert predicted.shape == expected[4].shape
        assert abs(predicted - expected[4]).max() < 2e-3 * abs(expected[4]).max()
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    for name, value in expected[3].items():
        torch.testing.assert_close(loaded[name], value, rtol=2e-3, atol=2e-4)


@pytest.mark.slow  # fast: test_checkpoint_tensor_parallel.py
@pytest.mark.parametrize(("tp", "saved_with"), [(2, 1), pytest.param(2, 2, marks=SLOW), pytest.param(1, 2, marks=SLOW)])
def test_resuming_at_another_size_goes_on_as_if_nothing_had_happened(tp: int, saved_with: int, tmp_path: Path) -> None:
    for whole, again in ranks.run_ranks(resume, 2, 1, tp, saved_with, str(tmp_path), group=False):
        assert len(again) == 4  # the first two come from the checkpoint's log
        assert again == pytest.approx(whole, rel=1e-4)


@pytest.mark.slow  # fast: test_trainer_generation.py, `test_generate` of test_tp_load.py
def test_generated_predictions_come_once(tmp_path: Path) -> None:
    found = ranks.run_ranks(generated, 4, str(tmp_path), zero_config(1, 2), group=False)
    assert [count for count, _ in found] == [6] * 4
    assert all((predictions == found[0][1]).all() for _, predictions in found)
