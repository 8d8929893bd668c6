"""TRL's trainers over a pipeline, and a sequence-to-sequence Trainer that generates: the numbers of DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks, trainers, trl_runs
from tests.support.models import CASES
from tests.support.pipeline_trainer import config
from tests.support.tp_trainer import rows

LOGGED = ("loss", "grad_norm", "mean_token_accuracy", "rewards/margins", "logps/chosen")


def trained(models: Path, folder: Path, kind: str, stages: int) -> list[dict[str, float]]:
    """What each step logs, over ``stages`` or under DDP."""
    with trainers.clean_state():
        settings = {**trainers.zero_config(1), "pipeline": {"stages": stages}} if stages > 1 else None
        trainer = trl_runs.KINDS[kind](models, folder / f"{kind}{stages}", settings)
        trainer.train()
        trainer.save_model(str(folder / f"final{stages}"))
        trainer.accelerator.wait_for_everyone()
        return [{key: entry[key] for key in LOGGED if key in entry} for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", ["sft", pytest.param("sft_lora", marks=pytest.mark.slow), pytest.param("dpo", marks=pytest.mark.slow)])
def test_two_stages_of_two_ranks(kind: str, trainer_models: Path, tmp_path: Path) -> None:
    expected = ranks.run_ranks(trained, 2, trainer_models, tmp_path, kind, 1, timeout=200)[0]
    found = ranks.run_ranks(trained, 4, trainer_models, tmp_path, kind, 2, timeout=200)
    assert len(expected) == trl_runs.STEPS
    for logged in found[:1]:
        trainers.assert_close(expected, logged, f"{kind} over two stages", rel=1e-3)


def generated(folder: str) -> tuple[int, Any]:
    """How many rows a sequence-to-sequence Trainer counts, and what it generates."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    args = Seq2SeqTrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        max_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        predict_with_generate=True,
        generation_max_length=4,
        deepspeed=config(1, 2),
    )
    trainer = Seq2SeqTrainer(
        model=CASES["t5"].build(), args=args, train_dataset=rows(), compute_metrics=lambda found: {"rows": len(found[0])}
    )
    trainer.train()
    found = trainer.predict(rows(6))
    return found.metrics["test_rows"], found.predictions


def test_generated_predictions_come_once(tmp_path: Path) -> None:
    found = ranks.run_ranks(generated, 4, str(tmp_path), group=False)
    assert [count for count, _ in found] == [6] * 4
    assert all((predictions == found[0][1]).all() for _, predictions in found)
