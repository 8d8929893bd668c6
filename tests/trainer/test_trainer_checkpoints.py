"""Saving and resuming with Trainer: resumed runs repeat bit for bit, saved models load in plain transformers."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.integrations import best_model
from tests.support import ranks, trainers
from tests.support.rows import slow_but

OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}


def _trainer(models: Path, folder: Path, config: dict[str, Any], **options: Any) -> Any:
    from transformers import Trainer

    trainers.forget()
    name, freeze, dropout = options.pop("name", "gpt2"), options.pop("freeze", False), options.pop("dropout", 0.0)
    args = trainers.arguments(folder, config, **options)
    model = trainers.load(models, name, **({"resid_pdrop": dropout} if dropout else {}))
    if freeze:
        for param in model.transformer.wte.parameters():
            param.requires_grad_(False)
    return Trainer(model=model, args=args, train_dataset=trainers.rows(24, 1), eval_dataset=trainers.rows(7, 2))


# -- resume ------------------------------------------------------------------------------------------------------------------


def _resume(models: Path, folder: Path, stage: int, in_json: tuple[str, ...], options: dict[str, Any]) -> None:
    """Dropout needs the generators, two epochs the sampler's position, a frozen embedding its values."""
    sections = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER}
    config = trainers.zero_config(stage, **{name: sections[name] for name in in_json})
    if options.get("fp16"):
        config["fp16"] |= {"initial_scale_power": 30, "loss_scale_window": 3, "hysteresis": 1}
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "freeze": True, "dropout": 0.1} | options
    with trainers.clean_state():
        whole = _trainer(models, folder, config, **options)
        whole.train()
        weights = trainers.weights_of(whole.model)
        resumed = _trainer(models, folder / "again", config, **options)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        left, right = trainers.logs_of(whole), trainers.logs_of(resumed)
        assert repr(left) == repr(right), f"{left}\n{right}"  # as text: a skipped step has a norm of nan
        found = trainers.weights_of(resumed.model)
        assert all(torch.equal(value, found[name]) for name, value in weights.items())
        assert resumed.state.global_step == 6
        plain = trainers.load_whole(models, "gpt2")
        frozen = plain.transformer.wte.weight.to(resumed.model.dtype).float()
        assert torch.equal(found["transformer.wte.weight"], frozen), "the frozen embedding has moved"


@pytest.mark.fast_rows("3-")
@pytest.mark.parametrize(
    ("stage", "in_json"),
    [
        pytest.param(0, (), marks=pytest.mark.slow),
        pytest.param(1, (), marks=pytest.mark.slow),
        (2, ("optimizer", "scheduler")),
        (3, ()),
        pytest.param(3, ("optimizer",), marks=pytest.mark.slow),
        pytest.param(3, ("optimizer", "scheduler"), marks=pytest.mark.slow),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_resume_repeats_bit_for_bit(stage: int, in_json: tuple[str, ...], trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_resume, 2, trainer_models, tmp_path, stage, in_json, {})


@pytest.mark.slow  # fast: `test_resume_repeats_bit_for_bit`; test_checkpoint_resume.py in fp16
@pytest.mark.parametrize("stage", slow_but([2, 3], 3))
def test_resume_in_fp16(stage: int, trainer_models: Path, tmp_path: Path) -> None:
    """The loss scale starts too high, so that steps are skipped before and the scale grows after the checkpoint."""
    options = {"fp16": True, "use_cpu": True}
    ranks.run_ranks(_resume, 2, trainer_models, tmp_path, stage, ("optimizer", "scheduler"), options)


def _best_model(models: Path, folder: Path, stage: int, loads_itself: bool = False) -> None:
    """A learning rate that destroys the model: the best one is not the last. ``loads_itself``: as the trainers of other libraries do."""
    options = {"learning_rate": 0.3, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    with trainers.clean_state():
        trainer = _trainer(models, folder, trainers.zero_config(stage), save_strategy="steps", save_total_limit=2, **options)
        if loads_itself:
            trainer._load_best_model = lambda: best_model.load_best_model(_into_shards, trainer)
        trainer.train()
        assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, abs=1e-5)
        assert not trainer.state.best_model_checkpoint.endswith("checkpoint-4")


@pytest.mark.slow  # fast: test_trainer_preemption.py loads the best model
@pytest.mark.parametrize("stage", slow_but([2, 3], 3))
def test_load_best_model_at_end(stage: int, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_best_model, 2, trainer_models, tmp_path, stage)


def _into_shards(trainer: Any) -> None:
    """Load as adapters' trainer does, whose files have whole weights."""
    state = {name: torch.zeros(1) for name, _ in trainer.model.named_parameters()}
    trainer.model.load_state_dict(state)


def test_load_best_model_of_a_trainer_that_loads_itself(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_best_model, 2, trainer_models, tmp_path, 3, True)


def _other_world(models: Path, folder: Path, stage: int, resume: bool) -> trainers.Logs:
    # Fewer ranks take more micro-steps: transformers 4 goes on with the checkpoint's batch size per device, whatever the arguments say.
    accumulation = 4 // torch.distributed.get_world_size()
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": accumulation}
    with trainers.clean_state():
        trainer = _trainer(models, folder, trainers.zero_config(stage), **options)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
        return trainers.logs_of(trainer)


def test_resume_on_another_number_of_ranks(trainer_models: Path, tmp_path: Path) -> None:
    """No conversion: the same rows in the same order on one rank continue what two ranks began; at another stage too."""
    expected = ranks.run_ranks(_other_world, 2, trainer_models, tmp_path, 3, False)[0]
    for stage in (3, 1):
        found = ranks.run_ranks(_other_world, 1, trainer_models, tmp_path, stage, True)[0]
        trainers.assert_close(expected, found, f"from stage 3 on 2 ranks to stage {stage} on 1")


# -- save_model ------------------------------------------------------------------------------------------------------------------


def _save(models: Path, folder: Path, name: str, stage: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    with trainers.clean_state():
        trainer = _trainer(models, folder, trainers.zero_config(stage), name=name, max_steps=1, **options)
        if hasattr(trainer.model, "generation_config"):
            trainer.model.generation_config.max_new_tokens = 5
        trainer.train()
        trainer.save_model(str(folder / "final"))
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        trainer.accelerator.unwrap_model(trainer.model_wrapped).save_pretrained(
            folder / "small_files", state_dict=state, max_shard_size="8KB", is_main_process=trainer.accelerator.is_main_process
        )
        torch.distributed.barrier()
        return trainers.weights_of(trainer.model)


def _check_saved(folder: Path, weights: dict[str, torch.Tensor], name: str, dtype: torch.dtype) -> None:
    from safetensors import safe_open

    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dict
                assert tensors.get_tensor(key).numel(), f"{key} in {file} is empty"
                assert tensors.get_tensor(key).dtype == dtype
    model = trainers.load(folder.parent, folder.name if name != "t5" else "t5", dtype="auto")
    assert model.dtype == dtype
    found = {key: value.float() for key, value in model.named_parameters()}
    assert found.keys() == weights.keys()
    for key, value in weights.items():
        assert torch.equal(found[key], value), key


SAVED = [*itertools.product(["gpt2", "llama"], [2, 3], ["fp32", "bf16"])]
SAVED_FAST = {("gpt2", 3, "bf16"), ("llama", 3, "fp32"), ("gpt2", 2, "fp32")}


@pytest.mark.fast_rows("gpt2-3-bf16")
@pytest.mark.parametrize(
    ("name", "stage", "precision"), [pytest.param(*row, marks=() if row in SAVED_FAST else pytest.mark.slow) for row in SAVED]
)
def test_saved_models_load(name: str, stage: int, precision: str, trainer_models: Path, tmp_path: Path) -> None:
    """gpt2 has tied embeddings, llama has not; one file and many, the dtype of training, the generation configuration."""
    options = {"bf16": True, "use_cpu": True} if precision == "bf16" else {}
    weights = ranks.run_ranks(_save, 2, trainer_models, tmp_path, name, stage, options)[0]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for folder in (tmp_path / "final", tmp_path / "small_files"):
        _check_saved(folder, weights, name, dtype)
        assert json.loads((folder / "generation_config.json").read_text())["max_new_tokens"] == 5
    assert len(list((tmp_path / "small_files").glob("model-*.safetensors"))) > 1
    assert (tmp_path / "final" / "model.safetensors").exists()


def _save_without_gather(models: Path, folder: Path, says: bool | None) -> dict[str, torch.Tensor]:
    """Saves by Trainer, by the engine and by accelerate where the key is false or absent."""
    from hf_zero import observe

    observe._warned.clear()
    config = trainers.zero_config(3)
    key = "stage3_gather_16bit_weights_on_model_save"
    del config["zero_optimization"][key]
    config["zero_optimization"] |= {key: says} if says is not None else {}
    with trainers.clean_state():
        trainer = _trainer(models, folder, config, max_steps=1)
        trainer.train()
        assert trainer.model_wrapped.save_16bit_model(str(folder / "by_engine")) is True
        trainer.save_model(str(folder / "final"))
        trainer.accelerator.save_model(trainer.model_wrapped, str(folder / "by_accelerate"))
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        assert (state is not None) == (ranks.rank() == 0)
        torch.distributed.barrier()
        told = [line for line in observe._warned if key in line and "the script requested unsharded weights" in line]
        assert len(told) == (says is False), told
        return trainers.weights_of(trainer.model)


@pytest.mark.fast_rows("False")
@pytest.mark.parametrize("says", [False, None])
def test_weights_are_gathered_whatever_the_key_says(says: bool | None, trainer_models: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights = ranks.run_ranks(_save_without_gather, 2, trainer_models, tmp_path, says)[0]
    _check_saved(tmp_path / "final", weights, "gpt2", torch.float32)
    for folder in ("by_engine", "by_accelerate"):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert all(torch.equal(value, weights[name]) for name, value in found.items()) and len(found) >= len(weights) - 1


def _save_only_model(models: Path, folder: Path, stage: int) -> None:
    with trainers.clean_state():
        options = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
        trainer = _trainer(models, folder, trainers.zero_config(stage), max_steps=2, **options)
        trainer.train()
        torch.distributed.barrier()
        found = sorted(path.name for path in (folder / "checkpoint-2").iterdir())
        assert "model.safetensors" in found and not any(name.startswith(("global_step", "optimizer", "latest")) for name in found), found


@pytest.mark.parametrize("stage", slow_but([2, 3], 3))
def test_save_only_model(stage: int, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_save_only_model, 2, trainer_models, tmp_path, stage)
    shutil.rmtree(tmp_path)
