"""accelerate's stock plugins around the engine: the launcher's variables, `"auto"`, several plugins in one program, saving and loading."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from tests.support import ranks, trainers

VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "GPT2MLP",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
    "ACCELERATE_GRADIENT_CLIPPING": "0.5",
    "ACCELERATE_MIXED_PRECISION": "bf16",
}


def _loader(count: int, seed: int = 1) -> DataLoader[Any]:
    return DataLoader(trainers.rows(count, seed), batch_size=2)  # type: ignore[arg-type]


def _epoch(accelerator: Any, model: Any, optimizer: Any, loader: Any, *schedulers: Any) -> list[float]:
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


# -- where settings come from ---------------------------------------------------------------------------------------------


def _variables(models: Path) -> None:
    from accelerate import Accelerator
    from deepspeed.utils import get_z3_leaf_modules

    with trainers.clean_state():
        os.environ.update(VARIABLES)
        accelerator = Accelerator()
        plugin = accelerator.state.deepspeed_plugin
        assert plugin.zero_stage == 3 and plugin.zero3_init_flag
        for flag in (False, True):  # a model that nobody prepares is loaded whole, whatever the plugin says otherwise
            plugin.zero3_init_flag = flag
            with plugin.zero3_init_context_manager(enable=False):
                assert all(param.numel() for param in trainers.load(models).parameters())
            assert plugin.zero3_init_flag is flag
            model = trainers.load(models)
            assert all(param.numel() == 0 for param in model.parameters())
        engine, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), _loader(16))
        _epoch(accelerator, engine, optimizer, loader)
        section = engine.settings.zero_optimization
        assert (section.offload_optimizer.device, section.offload_param.device, engine.gradient_clipping()) == ("cpu", "cpu", 0.5)
        assert engine.global_steps == 2 and engine.bfloat16_enabled() and engine.gradient_accumulation_steps() == 2
        assert [type(leaf).__name__ for leaf in get_z3_leaf_modules(engine.module)] == ["GPT2MLP"] * 2
        engine.destroy()


def test_variables_of_the_launcher_reach_the_engine(trainer_models: Path) -> None:
    ranks.run_ranks(_variables, 2, trainer_models)


def _autos(models: Path) -> None:
    """The values that accelerate's documentation promises for each "auto"; what only a model's size can tell needs one."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim, DummyScheduler

    buckets = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    config = trainers.zero_config(3)
    config["zero_optimization"] |= buckets
    whole = config | {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    }
    with trainers.clean_state():
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=copy.deepcopy(whole)), mixed_precision="bf16")
        model = trainers.load(models)
        stand = DummyOptim(model.parameters(), lr=5e-5, weight_decay=1e-4)
        engine, optimizer, loader, scheduler = accelerator.prepare(model, stand, _loader(8), DummyScheduler(stand, warmup_num_steps=10))
        found, width = accelerator.deepspeed_config, model.config.hidden_size
        assert (found["train_micro_batch_size_per_gpu"], found["train_batch_size"], found["gradient_clipping"]) == (2, 4, 1.0)
        assert found["optimizer"]["params"] == {"lr": 5e-5, "weight_decay": 1e-4} and engine.optimizer_name() == "adamw"
        assert found["scheduler"]["params"] == {"warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 10}
        assert [found["zero_optimization"][key] for key in buckets] == [width**2, int(0.9 * width**2), 10 * width]
        _epoch(accelerator, engine, optimizer, loader, scheduler)
        assert 0 < scheduler.get_last_lr()[0] < 5e-5 and optimizer.step_was_skipped is False
        engine.destroy()
    with trainers.clean_state():
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=copy.deepcopy(config)))
        linear = nn.Linear(4, 4)
        text = trainers.error_of(lambda: accelerator.prepare(linear, torch.optim.AdamW(linear.parameters()), _loader(4)))
        assert all(key in text for key in buckets) and "model.config" in text, text


def test_autos_of_the_json(trainer_models: Path) -> None:
    ranks.run_ranks(_autos, 2, trainer_models)


# -- several plugins --------------------------------------------------------------------------------------------------------


def _two_plugins(models: Path) -> None:
    """A student at stage 2, a teacher that only runs forward at stage 3, and a second model that trains at stage 3."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    teacher_config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    with trainers.clean_state():
        plugins = {
            "student": DeepSpeedPlugin(hf_ds_config=trainers.zero_config(2)),
            "teacher": DeepSpeedPlugin(hf_ds_config=teacher_config),
            "other": DeepSpeedPlugin(hf_ds_config=trainers.zero_config(3)),
        }
        accelerator, second = Accelerator(deepspeed_plugins=plugins), Accelerator()
        state = accelerator.state
        assert state.deepspeed_plugin is plugins["student"] and not is_deepspeed_zero3_enabled()
        model = trainers.load(models)
        student, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), _loader(16))
        state.select_deepspeed_plugin("teacher")
        assert is_deepspeed_zero3_enabled()
        teacher = trainers.load(models)
        assert all(param.numel() == 0 for param in teacher.parameters())
        teacher = accelerator.prepare(teacher).eval()
        state.select_deepspeed_plugin("other")
        model = trainers.load(models, "llama")
        other, other_optimizer, other_loader = second.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), _loader(16, 2))
        assert accelerator.deepspeed_engine_wrapped.engine is student and second.deepspeed_engine_wrapped.engine is other
        plain = trainers.load_whole(models, "gpt2").eval()
        for batch, other_batch in zip(loader, other_loader, strict=True):
            with torch.no_grad():
                wanted = teacher(**batch).logits
                torch.testing.assert_close(wanted, plain(**batch).logits)
            accelerator.backward(nn.functional.mse_loss(student(**batch).logits, wanted) + student(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            second.backward(other(**other_batch).loss)
            other_optimizer.step()
            other_optimizer.zero_grad()
        assert (student.global_steps, other.global_steps, student.zero_optimization_stage()) == (4, 4, 2)
        accelerator.free_memory()
        second.free_memory()


@pytest.mark.slow  # fast: the several models of test_accelerate_between.py
def test_several_plugins_in_one_program(trainer_models: Path) -> None:
    ranks.run_ranks(_two_plugins, 2, trainer_models)


# -- saving and loading ---------------------------------------------------------------------------------------------------------


def _masters(model: nn.Module) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(param).clone() for name, param in model.named_parameters()}


def _save(models: Path, folder: Path, stage: int) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin

    with trainers.clean_state():
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=trainers.zero_config(stage)))
        model = trainers.load(models)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        engine, optimizer, loader, schedule = accelerator.prepare(model, optimizer, _loader(16), schedule)
        _epoch(accelerator, engine, optimizer, loader, schedule)
        accelerator.save_model(engine, str(folder / "model"), max_shard_size="20KB")
        accelerator.save_model(engine, str(folder / "pickle"), safe_serialization=False)
        assert engine.save_checkpoint(str(folder / "own"), client_state={"epoch": 1})
        accelerator.save_state(str(folder / "state"))
        kept, rate = _masters(engine.module), schedule.get_last_lr()
        after = _epoch(accelerator, engine, optimizer, loader, schedule)
        accelerator.load_state(str(folder / "state"))
        assert all(torch.equal(value, kept[name]) for name, value in _masters(engine.module).items())
        assert schedule.get_last_lr() == rate
        assert _epoch(accelerator, engine, optimizer, loader, schedule) == after
        path, client = engine.load_checkpoint(str(folder / "own"))
        assert path is not None and client == {"epoch": 1}
        dist.barrier()
        _check_files(folder, kept)
        dist.barrier()
        engine.destroy()


def _check_files(folder: Path, kept: dict[str, torch.Tensor]) -> None:
    from accelerate import load_checkpoint_in_model
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    index = json.loads((folder / "model" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    weights = torch.load(folder / "pickle" / "pytorch_model.bin")
    found = get_fp32_state_dict_from_zero_checkpoint(str(folder / "own"))
    for name, value in kept.items():
        assert torch.equal(weights[name], value) and torch.equal(found[name], value), name
    plain = trainers.load_whole(folder.parent, "gpt2")
    load_checkpoint_in_model(plain, str(folder / "model"))
    assert all(torch.equal(value, kept[name]) for name, value in plain.named_parameters())


def test_what_is_saved_is_what_was_trained(trainer_models: Path, tmp_path: Path) -> None:
    (tmp_path / "gpt2").symlink_to(trainer_models / "gpt2")
    for stage in (2, 3):
        ranks.run_ranks(_save, 2, trainer_models, tmp_path / f"stage{stage}", stage)
