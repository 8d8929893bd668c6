"""Trainer in one process whose launcher's variables were set by hand, as in a notebook or a test: configurations come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks, trainers
from tests.support.rows import slow_but

FILE = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
}


def _trainer(models: Path, folder: Path, config: dict[str, Any], **options: Any) -> Any:
    from transformers import Trainer

    args = trainers.arguments(folder, config, **({"use_cpu": True, "max_steps": 3, "log_level": "info"} | options))
    return Trainer(model=trainers.load(models), args=args, train_dataset=trainers.rows(16, 1), eval_dataset=trainers.rows(7, 2))


def _one_after_the_other(models: Path, folder: Path) -> None:
    """A configuration lives as long as its Trainer: nothing of ours keeps either, so that the next model is built as the next one says."""
    from deepspeed.utils import logger
    from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled
    from transformers.testing_utils import CaptureLogger

    with trainers.clean_state():
        trainer = _trainer(models, folder, trainers.zero_config(3, **FILE))
        trainer = _trainer(models, folder, trainers.zero_config(3, **FILE), save_strategy="steps", save_steps=2)
        with CaptureLogger(logger) as log:
            trainer.train()
        assert "DeepSpeed info" in log.out and is_deepspeed_zero3_enabled()
        for times in (1, 2):
            trainer = _trainer(models, folder, trainers.zero_config(2, **FILE))
            assert not is_deepspeed_zero3_enabled() and deepspeed_config()
            for _ in range(times):
                trainer.train()
            trainer.evaluate()
        trainer.accelerator.state._reset_state()
        del trainer
        assert not deepspeed_config() and not is_deepspeed_zero3_enabled(), "somebody holds the Trainer or its configuration"


@pytest.mark.slow  # fast: `test_evaluate_before_train` of test_trainer_again.py
def test_stages_follow_each_other_in_one_process(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_one_after_the_other, 1, trainer_models, tmp_path, group=False)


def _scale_too_high(models: Path, folder: Path, stage: int) -> None:
    """All steps are skipped: the rate can be logged, weights and schedule stay."""
    import torch

    with trainers.clean_state():
        config = trainers.zero_config(stage, **FILE)
        config["fp16"] |= {"initial_scale_power": 32, "hysteresis": 2}
        trainer = _trainer(models, folder, config, fp16=True)
        before = trainers.weights_of(trainer.model)
        trainer.train()
        found = trainers.weights_of(trainer.model)
        assert all(torch.equal(value.half().float(), found[name]) for name, value in before.items())
        assert trainer.model_wrapped.skipped_steps == 3
        assert [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry] == [0.0] * 3


@pytest.mark.parametrize("stage", slow_but([2, 3], 3))
def test_the_rate_can_be_logged_before_the_first_step(stage: int, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_scale_too_high, 1, trainer_models, tmp_path, stage, group=False)


def _nothing_to_resume(models: Path, folder: Path) -> None:
    with trainers.clean_state():
        trainer = _trainer(models, folder, trainers.zero_config(2, **FILE))
        with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
            trainer.train(resume_from_checkpoint=True)
        trainer = _trainer(models, folder, trainers.zero_config(2, **FILE))
        with pytest.raises(Exception, match="checkpoint-5-bogus"):
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-5-bogus"))
        trainers.forget()
        plain = _trainer(models, folder / "plain", None, save_strategy="steps", save_steps=2)  # type: ignore[arg-type]
        plain.train()
        trainers.forget()
        trainer = _trainer(models, folder, trainers.zero_config(2, **FILE))
        with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
            trainer.train(resume_from_checkpoint=str(folder / "plain" / "checkpoint-2"))


def test_resuming_from_what_is_no_checkpoint_is_an_error(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_nothing_to_resume, 1, trainer_models, tmp_path, group=False)


def _saved_before_training(models: Path, folder: Path, gathers: bool) -> None:
    """Trainer has an engine to save from once it has evaluated (stage 3)."""
    import torch

    config = trainers.zero_config(3)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = gathers
    with trainers.clean_state():
        trainer = _trainer(models, folder, config)
        trainer.evaluate()
        trainer.save_model(str(folder / "final"))
        torch.distributed.barrier()
        assert (folder / "final" / "model.safetensors").exists() and not (folder / "final" / "zero_to_fp32.py").exists()
        weights = trainers.weights_of(trainer.model)
        plain = trainers.load_whole(models, "gpt2")
        assert all(torch.equal(value, weights[name]) for name, value in plain.named_parameters())


@pytest.mark.fast_rows("True")
@pytest.mark.parametrize("gathers", [True, False])
def test_saving_after_an_evaluation(gathers: bool, trainer_models: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    ranks.run_ranks(_saved_before_training, 2, trainer_models, tmp_path, gathers)
    final = tmp_path / "final"
    found, wanted = load_file(final / "model.safetensors"), dict(trainers.load(trainer_models).named_parameters())
    assert wanted.keys() <= found.keys() | {"lm_head.weight"} and all(torch.equal(value, wanted[name]) for name, value in found.items())


def _arguments_count(models: Path, folder: Path) -> None:
    """A configuration that says nothing of clipping and accumulation gets the training arguments'; the defaults would be 1.0 and 1."""
    from transformers import TrainerCallback

    class Reads(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            engine = trainer.model_wrapped  # a norm counts from clip_grad_norm_ to the step
            norms.append((engine.gradient_clipping(), engine.stepper.settings.max_norm))

    for max_grad_norm, steps in ((0.3, 2), (0.0, 1)):
        config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
        with trainers.clean_state():
            trainer = _trainer(models, folder, config, max_steps=2, max_grad_norm=max_grad_norm, gradient_accumulation_steps=steps)
            norms: list[tuple[float, float]] = []
            trainer.add_callback(Reads())
            trainer.train()
            engine = trainer.model_wrapped
            assert norms == [(max_grad_norm, max_grad_norm)] * 2
            assert engine.gradient_accumulation_steps() == steps and engine.global_steps == 2


def test_what_the_configuration_leaves_open_are_the_arguments(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_arguments_count, 1, trainer_models, tmp_path, group=False)
