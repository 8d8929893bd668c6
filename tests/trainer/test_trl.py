"""TRL's trainers at stages 2 and 3: the numbers of plain DDP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import ranks, trainers, trl_runs
from tests.support.versions import has

LOGGED = ("loss", "grad_norm", "rewards/margins", "logps/chosen", "accuracy", "reward")


# The reference model of DPO is a second engine.
@pytest.mark.fast_rows("sft-3", "dpo-3", "kto_precomputed-3")
@pytest.mark.parametrize(("kind", "stage"), [("sft", 3), ("dpo", 3), ("kto_precomputed", 3), ("reward", 2)])
def test_same_numbers(kind: str, stage: int, trainer_models: Path, tmp_path: Path) -> None:
    _skip_if_too_old(kind)
    ranks.run_ranks(_same_numbers, 2, trainer_models, tmp_path, kind, (stage,), timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*trl_runs.KINDS])
def test_same_numbers_at_both_stages(kind: str, trainer_models: Path, tmp_path: Path) -> None:
    _skip_if_too_old(kind)
    ranks.run_ranks(_same_numbers, 2, trainer_models, tmp_path, kind, (2, 3), timeout=250)


def _skip_if_too_old(kind: str) -> None:
    if kind == "kto_precomputed" and not has("trl", "1.8"):
        pytest.skip("KTOTrainer of trl before 1.8 runs its model before an engine holds it: a StateError at stage 3")


def _same_numbers(models: Path, folder: Path, kind: str, stages: tuple[int, ...]) -> None:
    with trainers.clean_state():
        expected = None
        for stage in (None, *stages):
            trainers.forget()
            trainer = trl_runs.KINDS[kind](models, folder / f"{kind}{stage}", None if stage is None else trainers.zero_config(stage))
            trainer.train()
            found = [{key: entry[key] for key in LOGGED if key in entry} for entry in trainer.state.log_history if "loss" in entry]
            assert len(found) == trl_runs.STEPS and all("grad_norm" in entry for entry in found)
            if expected is None:
                expected = found
            else:
                trainers.assert_close(expected, found, f"{kind}, stage {stage}", rel=1e-3)
            trainer.save_model(str(folder / f"final{stage}"))
            trainer.accelerator.wait_for_everyone()
