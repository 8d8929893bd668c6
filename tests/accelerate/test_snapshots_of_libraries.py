"""Test snapshots under accelerate, with states on NVMe and a scheduler of the script; a Trainer and a loop go back after a spike."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from hf_zero.checkpoint import snapshots
from hf_zero.core.step import spikes
from tests.support import ranks, trainers
from tests.support.snapshot_runs import digest

RESTARTED = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "3"}
EVERY, SPIKE, STEPS = 2, 5, 8  # snapshots after steps 1 and 3 (from 0 on), so steps 4 and 5 are left out
LEFT_OUT = (4, 5)
ROWS = 4  # of both ranks in a step


def _own(folder: Path, **changes: Any) -> dict[str, Any]:
    section = {"snapshot_steps": EVERY, "snapshot_folder": str(folder / "memory"), "spike_action": "rewind", "spike_factor": 8}
    return {"hf_zero": section | changes}


def _rows(skipped: tuple[int, ...] = ()) -> list[dict[str, torch.Tensor]]:
    return [row for number, row in enumerate(trainers.rows(ROWS * STEPS, 1)) if number // ROWS not in skipped]


# -- Trainer ----------------------------------------------------------------------------------------------------------


def _train(models: Path, folder: Path, config: dict[str, Any], skipped: tuple[int, ...] = (), resume: str | None = None) -> dict[str, Any]:
    """Train with Trainer on rows in their order; the loss of step ``SPIKE`` of rank 1 is multiplied, unless rows are ``skipped``."""
    from transformers import Trainer, TrainerCallback

    class Ordered(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * 300 if not skipped and self.state.global_step == SPIKE and ranks.rank() == 1 else loss

    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= state.global_step == STEPS - len(skipped)

    options = {"max_steps": STEPS, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 7}
    with trainers.clean_state():
        args = trainers.arguments(folder / "trainer", config, **options)
        model = trainers.load(models, "gpt2", resid_pdrop=0.1)
        trainer = Ordered(model=model, args=args, train_dataset=_rows(skipped), callbacks=[Ends()])
        trainer.train(resume_from_checkpoint=resume)
        engine = trainer.model_wrapped
        history = trainer.state.log_history
        return {
            "weights": trainers.weights_of(engine.module),
            "steps": (trainer.state.global_step, engine.global_steps, engine.skipped_steps),
            "logged": [entry["step"] for entry in history if "loss" in entry],
            "rates": [entry["learning_rate"] for entry in history if "loss" in entry],
            "spikes": [entry for entry in history if "spike/step" in entry],
            "scheduler": trainer.lr_scheduler.state_dict()["last_epoch"],
        }


def _trainer_goes_back(models: Path, folder: Path) -> None:
    found = _train(models, folder, trainers.zero_config(2, **_own(folder)))
    plain = _train(models, folder / "plain", trainers.zero_config(2), skipped=LEFT_OUT)
    assert found["steps"] == (STEPS, STEPS, 2) and found["logged"] == [*range(1, STEPS + 1)]
    assert found["scheduler"] == plain["scheduler"] == STEPS - 2
    assert [*found["rates"][:4], *found["rates"][6:]] == plain["rates"]
    (told,) = found["spikes"]
    assert (told["step"], told["spike/step"], told["spike/back_to_step"], told["spike/first_sample"]) == (6, 6, 4, SPIKE * ROWS)
    assert all(torch.equal(value, plain["weights"][name]) for name, value in found["weights"].items())
    again = _train(models, folder, trainers.zero_config(2, **_own(folder)), resume=str(folder / "trainer" / "checkpoint-7"))
    assert again["steps"] == found["steps"] and again["rates"] == found["rates"]
    assert all(torch.equal(value, found["weights"][name]) for name, value in again["weights"].items())


# -- accelerate -------------------------------------------------------------------------------------------------------


def _prepared(models: Path, config: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Return what ``prepare`` gives a new process of this run: its first training."""
    from accelerate import Accelerator, DeepSpeedPlugin

    snapshots._made, snapshots._open[:] = 0, []
    trainers.forget()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=copy.deepcopy(config)))
    model = trainers.load(models, "gpt2", resid_pdrop=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader: Any = DataLoader(trainers.rows(ROWS, 1), batch_size=2)  # type: ignore[arg-type]
    engine, optimizer, _, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    return accelerator, engine, optimizer, scheduler


def _steps(made: tuple[Any, Any, Any, Any], steps: list[int], large: int = -1) -> None:
    accelerator, engine, optimizer, scheduler = made
    for step in steps:
        mine = trainers.rows(ROWS * STEPS, 1)[step * ROWS + 2 * ranks.rank() :][:2]
        loss = engine(**{key: torch.stack([row[key] for row in mine]) for key in mine[0]}).loss
        accelerator.backward(loss * 300 if step == large and ranks.rank() == 1 else loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        engine.snapshot({"next": step + 1, "scheduler": scheduler.state_dict()})


def _end(made: tuple[Any, Any, Any, Any]) -> tuple[str, dict[str, Any]]:
    scheduler = made[3]
    return digest(made[1]), {key: value for key, value in scheduler.state_dict().items() if key != "lr_lambdas"}


def _loop_goes_on_and_back(models: Path, folder: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(folder / f"nvme{ranks.rank()}")}
    config = trainers.zero_config(3, **_own(folder, spike_action="log"), train_micro_batch_size_per_gpu=2)
    config["zero_optimization"] |= {"offload_optimizer": nvme}
    torch.manual_seed(3 + ranks.rank())
    first = _prepared(models, config)
    snapshots_of = first[1].checkpoints.snapshots
    for steps in ([0, 1], [2, 3], [4]):
        _steps(first, steps)
        snapshots_of._background.finish(first[1].checkpoints.everyone())  # so that the next one is not left out
    torch.manual_seed(99)  # the snapshot has its own
    second = _prepared(models, config)
    path, state = second[1].load_snapshot()
    assert path == str(snapshots_of.folder / "global_step4") and state["next"] == 4
    second[3].load_state_dict(state["scheduler"])
    _steps(second, [*range(4, STEPS)])
    found = _end(second)
    second[1].destroy()
    torch.manual_seed(3 + ranks.rank())
    del config["hf_zero"]
    whole = _prepared(models, config)
    whole[1].snapshot = lambda client_state: False
    _steps(whole, [*range(STEPS)])
    assert _end(whole) == found
    whole[1].destroy()

    torch.manual_seed(3 + ranks.rank())
    back = _prepared(models, config | _own(folder))
    _steps(back, [*range(STEPS)], large=SPIKE)
    assert (back[1].global_steps, back[1].skipped_steps) == (STEPS, 2)
    torch.manual_seed(3 + ranks.rank())
    plain = _prepared(models, config)
    plain[1].snapshot = lambda client_state: False
    _steps(plain, [step for step in range(STEPS) if step not in LEFT_OUT])
    assert _weights_and_schedule(back) == _weights_and_schedule(plain)
    for made in (back, plain):
        made[1].destroy()


def _weights_and_schedule(made: tuple[Any, Any, Any, Any]) -> tuple[dict[str, list[float]], int]:
    weights = trainers.weights_of(made[1].module)
    return {name: value.flatten().tolist() for name, value in weights.items()}, made[3].state_dict()["last_epoch"]


def _library(name: str, models: Path, folder: Path) -> None:
    with mock.patch.object(spikes, "LEAST", 3), trainers.clean_state():
        {"trainer": _trainer_goes_back, "loop": _loop_goes_on_and_back}[name](models, folder)


# Of Trainer ``tests/checkpoint/test_snapshots.py`` has a run that goes on.
@pytest.mark.parametrize("name", ["loop", pytest.param("trainer", marks=pytest.mark.slow)])
def test_libraries_go_on_and_back(name: str, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_library, 2, name, trainer_models, tmp_path, env=RESTARTED)
