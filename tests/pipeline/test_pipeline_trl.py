"""TRL's trainers over a pipeline, and a sequence-to-sequence Trainer that generates: the numbers of DDP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.pipeline_trainer import config
from tests.support import ranks, trainers, trl_runs
from tests.support.tp_trainer import generated

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


@pytest.mark.slow  # `test_pipeline_trainer.py` has Trainer, `test_trl.py` TRL
@pytest.mark.parametrize("kind", ["sft", pytest.param("sft_lora", marks=pytest.mark.slow), pytest.param("dpo", marks=pytest.mark.slow)])
def test_two_stages_of_two_ranks(kind: str, trainer_models: Path, tmp_path: Path) -> None:
    expected = ranks.run_ranks(trained, 2, trainer_models, tmp_path, kind, 1, timeout=200)[0]
    found = ranks.run_ranks(trained, 4, trainer_models, tmp_path, kind, 2, timeout=200)
    assert len(expected) == trl_runs.STEPS
    for logged in found[:1]:
        trainers.assert_close(expected, logged, f"{kind} over two stages", rel=1e-3)


@pytest.mark.slow  # fast: test_trainer_generation.py
def test_generated_predictions_come_once(tmp_path: Path) -> None:
    found = ranks.run_ranks(generated, 4, str(tmp_path), config(1, 2), group=False)
    assert [count for count, _ in found] == [6] * 4
    assert all((predictions == found[0][1]).all() for _, predictions in found)
