"""One Trainer used more than once: a second training, an evaluation before the first, a search over hyper-parameters."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hf_zero.core.schedule import read_gradients
from tests.support import ranks, trainers
from tests.support.rows import slow_but

OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
}
IN_JSON = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER}


def _trainer(models: Path, folder: Path, stage: int | None, in_json: tuple[str, ...] = (), launched: bool = False, **options: Any) -> Any:
    """Return a Trainer; ``launched``: the configuration is a file that `accelerate launch` names, not an argument."""
    from transformers import Trainer

    trainers.forget()
    config = None if stage is None else trainers.zero_config(stage, **{name: IN_JSON[name] for name in in_json})
    if launched:
        path = folder / f"ds-{ranks.rank()}.json"
        path.write_text(json.dumps(config))
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
        config, options = None, {"use_cpu": False, **options}
    args = trainers.arguments(folder, config, **options)
    return Trainer(model=trainers.load(models), args=args, train_dataset=trainers.rows(32, 1), eval_dataset=trainers.rows(7, 2))


def _train_twice(models: Path, folder: Path, stages: tuple[int, ...]) -> None:
    """The second training begins anew, with other arguments, on the weights of the first: as under DDP with a new optimizer."""
    found: dict[Any, list[trainers.Logs]] = {}
    with trainers.clean_state():
        for stage in (None, *stages):
            trainer = _trainer(models, folder, stage)
            found[stage] = []
            for steps, rate in ((4, 1e-3), (3, 5e-4)):
                trainer.optimizer = None  # under DDP Trainer keeps it, with moments and learning rate
                trainer.args.max_steps, trainer.args.learning_rate = steps, rate
                trainer.train()
                found[stage].append(trainers.logs_of(trainer))
            found[stage].append([trainer.evaluate(), trainer.evaluate()])
    for stage in stages:
        for index in range(2):
            trainers.assert_close(found[None][index], found[stage][index], f"stage {stage}, training {index}")
        for expected, evaluated in zip(found[None][2], found[stage][2], strict=True):
            assert abs(expected["eval_loss"] - evaluated["eval_loss"]) < 1e-4


@pytest.mark.slow  # fast: `test_evaluate_before_train`
def test_train_twice(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_train_twice, 2, trainer_models, tmp_path, (0, 3))


def _evaluate_first(models: Path, folder: Path, in_json: tuple[str, ...], launched: bool = False) -> None:
    """Evaluation before training, at stage 3, changes nothing in the training that follows, nor in its resumption."""
    with trainers.clean_state():
        plain = _trainer(models, folder, 3, in_json, launched)
        with mock.patch.object(read_gradients, "_unserved", side_effect=AssertionError("a warning about gradients that no script reads")):
            plain.train()
        trainer = _trainer(models, folder, 3, in_json, launched, save_strategy="steps", save_steps=2)
        before, again = trainer.evaluate(), trainer.predict(trainers.rows(7, 2))
        assert abs(before["eval_loss"] - again.metrics["test_loss"]) < 1e-6
        trainer.train()
        assert trainers.logs_of(plain) == [entry for entry in trainers.logs_of(trainer) if "eval_loss" not in entry]
        assert trainer.evaluate()["eval_loss"] < before["eval_loss"]
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert trainers.logs_of(plain) == [entry for entry in trainers.logs_of(trainer) if "eval_loss" not in entry]


@pytest.mark.parametrize("in_json", slow_but([("optimizer",), (), ("optimizer", "scheduler")], ("optimizer", "scheduler")), ids="+".join)
def test_evaluate_before_train(in_json: tuple[str, ...], trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_evaluate_first, 2, trainer_models, tmp_path, in_json)


def test_evaluate_before_train_with_the_launchers_file(trainer_models: Path, tmp_path: Path) -> None:
    """The evaluation's 0 steps stayed in the configuration: transformers refused the training because of `total_num_steps`."""
    ranks.run_ranks(_evaluate_first, 2, trainer_models, tmp_path, ("optimizer", "scheduler"), True)


class Trial(dict[str, Any]):
    """What transformers takes for a trial where wandb is installed, with what it asks an optuna trial for."""

    number = 0

    @property
    def params(self) -> dict[str, Any]:
        return dict(self)


def _search(models: Path, folder: Path, stage: int) -> None:
    """Two trials as the back ends of ``hyperparameter_search`` run them: each equals a training of its own with those arguments.

    optuna's frees the accelerator on rank 0 alone, after each trial.
    """
    from transformers import Trainer
    from transformers.trainer_utils import HPSearchBackend

    def expected(rate: float, rows: int) -> Any:
        single = _trainer(models, folder, stage, ("optimizer",), learning_rate=rate, per_device_train_batch_size=rows)
        single.train()
        return trainers.logs_of(single), single.evaluate()["eval_loss"]

    trials = [(1e-2, 2), (1e-3, 1)]
    with trainers.clean_state():
        wanted = [expected(*trial) for trial in trials]
        trainers.forget()
        args = trainers.arguments(folder, trainers.zero_config(stage, optimizer=OPTIMIZER))
        data = {"train_dataset": trainers.rows(32, 1), "eval_dataset": trainers.rows(7, 2)}
        trainer = Trainer(model_init=lambda: trainers.load(models), args=args, **data)
        trainer.hp_search_backend, trainer.hp_space = HPSearchBackend.OPTUNA, lambda trial: trial.params
        for (rate, rows), (logs, loss) in zip(trials, wanted, strict=True):
            trainer.train(trial=Trial({"learning_rate": rate, "per_device_train_batch_size": rows}))
            assert trainers.logs_of(trainer) == logs
            assert trainer.evaluate()["eval_loss"] == loss
            if ranks.rank() == 0:
                trainer.model_wrapped = trainer.model = None
                trainer.accelerator.clear()


@pytest.mark.slow  # `test_train_twice` builds engines one after the other too
@pytest.mark.parametrize("stage", slow_but([2, 3], 3))
def test_hyperparameter_search(stage: int, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_search, 2, trainer_models, tmp_path, stage)
