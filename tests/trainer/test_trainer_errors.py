"""Mistakes around Trainer: one clear error, the same on every rank, before a step is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import ranks, trainers


def _train(models: Path, folder: Path, config: dict[str, Any], **options: Any) -> None:
    from transformers import Trainer

    trainers.forget()
    args = trainers.arguments(folder, config, **options)
    Trainer(model=trainers.load(models), args=args, train_dataset=trainers.rows(16, 1)).train()


def _mismatches(models: Path, folder: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 5e-5, "weight_decay": "auto"}}
    config = trainers.zero_config(2, optimizer=optimizer, gradient_clipping=0.5, train_micro_batch_size_per_gpu=4)
    with trainers.clean_state():
        text = trainers.error_of(lambda: _train(models, folder, config))
    for part in ("optimizer.params.lr=5e-05", "gradient_clipping=0.5", "train_micro_batch_size_per_gpu=4", '"auto"'):
        assert part in text, text


def test_values_that_contradict_the_arguments(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_mismatches, 2, trainer_models, tmp_path)


def _typo(models: Path, folder: Path) -> None:
    for stage in (2, 3):
        config = trainers.zero_config(stage)
        config["zero_optimization"]["overlap_com"] = True
        with trainers.clean_state():
            text = trainers.error_of(lambda config=config: _train(models, folder, config))
        assert "overlap_com" in text and "overlap_comm" in text, text


def test_typo_in_the_json(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_typo, 2, trainer_models, tmp_path)


def _engine_freed_by_hand(models: Path, folder: Path) -> None:
    """Trainer cannot know that its engine is gone: said by name, and what to write works."""
    from transformers import Trainer

    with trainers.clean_state():
        trainers.forget()
        args = trainers.arguments(folder, trainers.zero_config(3), max_steps=2)
        trainer = Trainer(model=trainers.load(models), args=args, train_dataset=trainers.rows(16, 1))
        trainer.train()
        trainer.accelerator.free_memory()
        text = trainers.error_of(trainer.train)
        assert "trainer.model_wrapped = trainer.model" in text, text
        trainer.model_wrapped = trainer.model
        trainer.train()


def test_train_on_an_engine_that_was_freed_by_hand(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_engine_freed_by_hand, 2, trainer_models, tmp_path)
