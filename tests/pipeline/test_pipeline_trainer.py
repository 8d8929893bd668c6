"""Hugging Face's Trainer over a pipeline: data, losses, evaluation, predictions, generation, saved model, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipeline.pipeline_trainer import resume, train_and_save
from tests.support import ranks
from tests.support.models import CASES
from tests.support.tp_trainer import EVALUATED, arguments, losses, norms, rows


def one_rank(folder: str, batch: int) -> tuple[list[float], list[float], int, float, Any, Any, dict[str, torch.Tensor]]:
    from transformers import Trainer

    args = arguments(folder, None, batch=batch, include_num_input_tokens_seen="all")
    trainer = Trainer(model=CASES["gpt2"].build(), args=args, train_dataset=rows(), eval_dataset=rows(EVALUATED))
    trainer.train()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    predicted = trainer.predict(rows(EVALUATED)).predictions
    tokens = torch.stack([row["input_ids"] for row in rows(2)])
    evaluated = trainer.evaluate()["eval_loss"]
    written = trainer.model.eval().generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return losses(trainer), norms(trainer), trainer.state.num_input_tokens_seen, evaluated, predicted, written.tolist(), weights


@pytest.mark.fast_rows("4-2-2")
@pytest.mark.parametrize(("world", "stages", "tp"), [(2, 2, 1), pytest.param(4, 2, 1, marks=pytest.mark.slow), (4, 2, 2)])
def test_trainer_trains_like_one_rank_and_saves_the_whole_model(world: int, stages: int, tp: int, tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    found = ranks.run_ranks(train_and_save, world, 1, stages, tp, saved, group=False)
    expected = ranks.run_ranks(one_rank, 1, str(tmp_path / "one"), world // (stages * tp) * 2, group=False)[0]
    for got_losses, got_norms, tokens, evaluated, predicted, written in found:
        assert got_losses == pytest.approx(expected[0], rel=1e-4)
        assert got_norms == pytest.approx(expected[1], rel=1e-3)
        assert tokens == expected[2]
        assert evaluated == pytest.approx(expected[3], rel=5e-3)  # Trainer counts the last, shorter batch by the rows of a rank
        assert predicted.shape == expected[4].shape
        assert abs(predicted - expected[4]).max() < 2e-3 * abs(expected[4]).max()
        assert written == expected[5]
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    for name, value in expected[6].items():
        torch.testing.assert_close(loaded[name], value, rtol=2e-3, atol=2e-4)


@pytest.mark.slow  # fast: test_pipeline_checkpoints.py
def test_resuming_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    for whole, again in ranks.run_ranks(resume, 2, 2, str(tmp_path), group=False):
        assert len(again) == 4  # the first two come from the checkpoint's log
        assert again == whole
