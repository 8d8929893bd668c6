"""Generation inside Trainer: ranks that stop at different lengths, beams, encoder-decoder and decoder-only models, at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ranks, trainers
from tests.support.rows import slow_but


def _pairs(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    return [
        {"input_ids": row["input_ids"], "attention_mask": torch.ones(trainers.LENGTH, dtype=torch.long), "labels": row["input_ids"].flip(0)}
        for row in trainers.rows(count, seed, masked=False)
    ]


def _predict_with_generate(models: Path, folder: Path, stages: tuple[int, ...]) -> None:
    """The same tokens as DDP generates after the same training, with beams and without."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    data = _pairs(16, 5)
    found: dict[Any, tuple[trainers.Logs, Any, float]] = {}
    with trainers.clean_state():
        for stage in (None, *stages):
            trainers.forget()
            args = trainers.arguments(
                folder,
                None if stage is None else trainers.zero_config(stage),
                Seq2SeqTrainingArguments,
                predict_with_generate=True,
                generation_max_length=7,
                generation_num_beams=1,
                learning_rate=1e-2,
                max_steps=3,
            )
            trainer = Seq2SeqTrainer(
                model=trainers.load(models, "t5"),
                args=args,
                train_dataset=data,
                eval_dataset=data[:7],
                compute_metrics=lambda prediction: {"tokens": float((prediction.predictions > 0).sum())},
            )
            trainer.train()
            predicted = trainer.predict(data[:7], num_beams=3)
            metrics = trainer.evaluate()
            found[stage] = (trainers.logs_of(trainer), predicted.predictions.tolist(), metrics["eval_tokens"])
    for stage in stages:
        trainers.assert_close(found[None][0], found[stage][0], f"stage {stage}")
        assert found[None][1:] == found[stage][1:], f"stage {stage}"


@pytest.mark.parametrize("stage", slow_but([2, 3], 3))
def test_predict_with_generate(stage: int, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_predict_with_generate, 2, trainer_models, tmp_path, (stage,))


def _ranks_stop_at_different_lengths(models: Path, folder: Path) -> None:
    """Decoder-only: every rank has its own prompt and length, through the model, the engine and Trainer; then training goes on."""
    from transformers import Trainer

    rank = ranks.rank()
    prompt = torch.tensor([[7, 8, 9 + rank, 11][: 3 + rank]])
    with trainers.clean_state():
        trainers.forget()
        args = trainers.arguments(folder, trainers.zero_config(3), max_steps=2)
        trainer = Trainer(model=trainers.load(models, "llama"), args=args, train_dataset=trainers.rows(16, 1))
        trainer.train()
        whole = trainers.load_whole(models, "llama")
        whole.load_state_dict(trainers.weights_of(trainer.model), strict=False)
        whole.tie_weights()
        whole.eval()
        trainer.model.eval()
        options: dict[str, Any] = {"max_new_tokens": 2 + 4 * rank, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        for beams in (1, 2):
            expected = whole.generate(prompt, num_beams=beams, **options).tolist()
            for generator in (trainer.model, trainer.model_wrapped):
                assert generator.generate(prompt, num_beams=beams, synced_gpus=True, **options).tolist() == expected
        assert trainer.evaluate(trainers.rows(4, 2))["eval_loss"] > 0


@pytest.mark.slow  # fast: test_generation.py
def test_ranks_stop_at_different_lengths(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_ranks_stop_at_different_lengths, 2, trainer_models, tmp_path)
