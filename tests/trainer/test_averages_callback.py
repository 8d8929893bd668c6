"""Averages of weights in Trainer: evaluated, saved, resumed and kept, beside an average of the whole weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_zero.errors import UnsupportedError
from tests.support import ranks, trainers
from tests.support.rows import slow_but

DECAY = 0.6


def _watcher() -> Any:
    """A callback that averages the whole weights by itself: a list of them, after each step."""
    from transformers import TrainerCallback

    class Watcher(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.averages: list[dict[str, torch.Tensor]] = []

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            now = trainers.weights_of(model)
            if self.averages:
                now = {name: self.averages[-1][name].lerp(value, 1 - DECAY) for name, value in now.items()}
            self.averages.append(now)

    return Watcher()


def _same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    for name, value in wanted.items():
        assert torch.equal(found[name].float(), value), f"{what}: {name}"


def _evaluated(models: Path, folder: Path, stage: int) -> None:
    from hf_zero import AveragedWeightsCallback

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    with trainers.clean_state():
        watcher, callback = _watcher(), AveragedWeightsCallback(DECAY, keep=True)
        trainer = trainers.train_with(models, folder, trainers.zero_config(stage), callbacks=[watcher, callback], **options)
        _same(trainers.weights_of(trainer.model), watcher.averages[-1], "kept at the end")
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        trainer.remove_callback(callback)  # it would evaluate with the averages again
        for number, loss in zip((1, 3), losses, strict=True):
            _write(trainer.model, watcher.averages[number])
            assert trainer.evaluate()["eval_loss"] == loss, f"step {number}"
            saved = load_file(folder / f"checkpoint-{number + 1}" / "averaged" / "model.safetensors")
            _same({**saved, "lm_head.weight": saved["transformer.wte.weight"]}, watcher.averages[number], f"saved at {number + 1}")
        _resumed(models, folder, stage, options, watcher.averages[-1])


def _write(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    from hf_zero.zero import GatheredParameters

    with GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(values[name])


def _resumed(models: Path, folder: Path, stage: int, options: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
    """From the middle, and with ``keep`` off: the average is the same, the weights are those that are trained."""
    from transformers import Trainer

    from hf_zero import AveragedWeightsCallback

    trainers.forget()
    callback = AveragedWeightsCallback(DECAY, evaluate=False, save=False)
    args = trainers.arguments(folder / "again", trainers.zero_config(stage), **options)
    trainer = Trainer(
        model=trainers.load(models, "gpt2"), args=args, train_dataset=trainers.rows(trainers.TRAIN, 1),
        eval_dataset=trainers.rows(trainers.EVAL, 2), callbacks=[callback],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    averages = callback.averages
    assert averages is not None and averages.updates == 4
    for name, value in wanted.items():
        if name != "lm_head.weight":
            assert torch.equal(averages.whole(name), value), f"resumed: {name}"
    assert not (folder / "again" / "checkpoint-4" / "averaged").exists()
    with averages.applied():
        _same(trainers.weights_of(trainer.model), wanted, "applied")


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 2, 3))
def test_trainer_evaluates_saves_and_resumes_averages(stage: int, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_evaluated, 2, trainer_models, tmp_path, stage)


def _without_engine(models: Path, folder: Path) -> None:
    from hf_zero import AveragedWeightsCallback

    with trainers.clean_state(), pytest.raises(UnsupportedError, match="this Trainer trains without one"):
        trainers.train_with(models, folder, None, callbacks=[AveragedWeightsCallback()])


def test_without_an_engine_it_says_so(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_without_engine, 2, trainer_models, tmp_path)
