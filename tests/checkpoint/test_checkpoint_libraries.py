"""Checkpoints through libraries: Accelerate's states move between ranks, stages and sizes; rotation leaves a complete checkpoint."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hf_zero.errors import CheckpointError
from hf_zero.integrations import callers, lightning_table, methods, saves
from hf_zero.utils import newest_trainer_checkpoint
from tests.support import ranks, trainers
from tests.support.checkpoints import IN_BACKGROUND
from tests.support.models import CASES
from tests.support.processes import until

# -- Accelerate -------------------------------------------------------------------------------------------------------------


def _prepared(stage: int, tp: int, seed: int, project: Path | None = None, limit: int | None = None, **extra: Any) -> tuple[Any, Any, Any]:
    """Accelerator, engine and optimizer over the GPT-2 of the tests."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import ProjectConfiguration

    trainers.forget()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}),
        **extra,
    }
    settings = ProjectConfiguration(str(project), automatic_checkpoint_naming=True, total_limit=limit) if project is not None else None
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), project_config=settings)
    model = CASES["gpt2"].build(seed=seed)
    decayed = [param for param in model.parameters() if param.ndim > 1]
    plain = [param for param in model.parameters() if param.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def _step(accelerator: Any, model: Any, optimizer: Any) -> None:
    loss = model(**{name: value[:2] for name, value in CASES["gpt2"].rows(0, 0, 0).items()}).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def _masters_and_moments(engine: Any) -> dict[str, torch.Tensor]:
    import hf_zero

    found = {}
    for name, param in engine.module.named_parameters():
        found[name] = hf_zero.utils.safe_get_full_fp32_param(param)
        for state in ("exp_avg", "exp_avg_sq"):
            found[f"{state} {name}"] = hf_zero.utils.safe_get_full_optimizer_state(param, state)
    return found


def _save_state(folder: str, stage: int) -> dict[str, torch.Tensor]:
    with trainers.clean_state():
        accelerator, model, optimizer = _prepared(stage, 1, seed=0)
        for _ in range(2):
            _step(accelerator, model, optimizer)
        accelerator.save_state(folder)
        state = _masters_and_moments(model)
        model.destroy()
        return state


def _load_state(folder: str, stage: int, tp: int, expected: dict[str, torch.Tensor]) -> None:
    with trainers.clean_state():
        accelerator, model, optimizer = _prepared(stage, tp, seed=5)
        accelerator.load_state(folder)
        assert model.global_steps == 2
        if tp == 1:
            state = _masters_and_moments(model)
            assert state.keys() == expected.keys()
            assert [name for name, value in expected.items() if not torch.equal(state[name], value)] == []
        else:
            whole = model._consolidated_16bit_state_dict()
            if ranks.rank() == 0:
                wrong = [name for name in whole if name in expected and not torch.equal(whole[name], expected[name].bfloat16())]
                assert wrong == [] and set(whole) & set(expected)
        _step(accelerator, model, optimizer)
        model.destroy()


@pytest.mark.fast_rows("to tensor parallel")
@pytest.mark.parametrize(
    ("saved", "loaded"), [((2, 2), (1, 3, 1)), ((2, 3), (3, 1, 1)), ((2, 3), (2, 1, 2))], ids=["2to1", "2to3", "to tensor parallel"]
)
def test_a_state_of_accelerate_loads_on_other_ranks_stages_and_sizes(
    tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int, int]
) -> None:
    (world, stage), (other_world, other_stage, tp) = saved, loaded
    expected = ranks.run_ranks(_save_state, world, str(tmp_path / "state"), stage)[0]
    ranks.run_ranks(_load_state, other_world, str(tmp_path / "state"), other_stage, tp, expected)


class Registered:
    """An object of the script's own."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def _save_objects(folder: str) -> None:
    with trainers.clean_state():
        accelerator, model, optimizer = _prepared(2, 1, seed=0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer.inner, lambda step: 1 / (1 + step))
        registered = Registered({"best": torch.arange(3.0), "seen": {1, 2}})
        accelerator.register_for_checkpointing(registered, schedule)
        for _ in range(2):
            _step(accelerator, model, optimizer)
            schedule.step()
        random.seed(3)
        accelerator.save_state(f"{folder}/state", client_state={"epoch": 1, "pair": (1, {"x"})})
        drawn = (random.random(), torch.rand(2), np.random.rand(2))
        with pytest.raises(CheckpointError, match=r"client_state\['hook'\] is a builtins.function"):
            accelerator.save_state(f"{folder}/refused", client_state={"hook": _step})
        assert not list(Path(folder, "refused").rglob("*.safetensors"))

        registered.value, state = None, schedule.state_dict()
        schedule.step()
        accelerator.load_state(f"{folder}/state")
        assert torch.equal(registered.value["best"], torch.arange(3.0)) and registered.value["seen"] == {1, 2}
        assert schedule.state_dict() == state
        again = (random.random(), torch.rand(2), np.random.rand(2))
        assert again[0] == drawn[0] and torch.equal(again[1], drawn[1]) and (again[2] == drawn[2]).all()
        _, client_state = model.load_checkpoint(f"{folder}/state", "pytorch_model")
        assert client_state == {"epoch": 1, "pair": (1, {"x"})}
        model.destroy()


def test_registered_objects_and_client_state_of_accelerate(tmp_path: Path) -> None:
    ranks.run_ranks(_save_objects, 2, str(tmp_path))


# -- rotation ---------------------------------------------------------------------------------------------------------------


class Watched:
    """Makes writing slow, and every deletion of a checkpoint prove that another one is complete."""

    def __init__(self, complete: Any) -> None:
        self.complete = complete
        self.deleted: list[str] = []

    def __enter__(self) -> Watched:
        from hf_zero.checkpoint import save

        self.write, self.rmtree = save.write_tensor_file, shutil.rmtree

        def slowly(path: Path, entries: Any, **options: Any) -> Any:
            time.sleep(0.1)
            return self.write(path, entries, **options)

        def rmtree(path: Any, *arguments: Any, **keywords: Any) -> None:
            if Path(path).name.startswith("checkpoint"):
                left = self.complete(Path(path))
                assert left, f"{path} is deleted, and no other checkpoint is complete"
                self.deleted.append(Path(path).name)
            self.rmtree(path, *arguments, **keywords)

        save.write_tensor_file, shutil.rmtree = slowly, rmtree  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        from hf_zero.checkpoint import save

        save.write_tensor_file, shutil.rmtree = self.write, self.rmtree  # type: ignore[assignment]


def _trainer_rotates(models: Path, folder: Path, limit: int) -> list[str]:
    from transformers import Trainer

    def others(deleted: Path) -> bool:
        def another() -> bool:
            newest = newest_trainer_checkpoint(deleted.parent)
            return newest is not None and Path(newest) != deleted

        until(another, "another complete checkpoint")  # Trainer's rank 0 deletes without waiting for the random states of the others
        return True

    with trainers.clean_state():
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "save_total_limit": limit}
        args = trainers.arguments(folder, trainers.zero_config(2, **IN_BACKGROUND), **options)
        trainer = Trainer(model=trainers.load(models), args=args, train_dataset=trainers.rows(24, 1))
        with Watched(others) as watched:
            trainer.train()
            trainer.model_wrapped.wait_for_checkpoint()
        assert newest_trainer_checkpoint(folder) == str(folder / "checkpoint-4")
        return watched.deleted


@pytest.mark.fast_rows("2")
@pytest.mark.parametrize("limit", [1, 2])
def test_rotation_of_trainer_never_deletes_the_last_complete_checkpoint(limit: int, trainer_models: Path, tmp_path: Path) -> None:
    deleted, none = ranks.run_ranks(_trainer_rotates, 2, trainer_models, tmp_path, limit)
    assert deleted == [f"checkpoint-{number}" for number in range(1, 5 - limit)] and none == []


def _accelerate_rotates(folder: str) -> list[str]:
    def others(deleted: Path) -> bool:
        return any((other / "pytorch_model" / "complete").exists() for other in deleted.parent.iterdir() if other != deleted)

    with trainers.clean_state():
        accelerator, model, optimizer = _prepared(2, 1, 0, Path(folder), 2, **IN_BACKGROUND)
        with Watched(others) as watched:
            for _ in range(4):
                _step(accelerator, model, optimizer)
                accelerator.save_state()
        model.wait_for_checkpoint()
        model.destroy()
        return watched.deleted


def test_rotation_of_accelerate_never_deletes_the_last_complete_checkpoint(tmp_path: Path) -> None:
    deleted = ranks.run_ranks(_accelerate_rotates, 1, str(tmp_path))[0]
    assert deleted == ["checkpoint_0", "checkpoint_1"]


def _of(**attributes: Any) -> Any:
    """The object whose save leads to the engine's."""
    return SimpleNamespace(**attributes)


@pytest.mark.parametrize(
    ("method", "caller", "setting"),
    [
        (methods.TRAIN, _of(args=_of(save_total_limit=1)), "save_total_limit"),
        (methods.TRAIN, _of(args=_of(save_total_limit=2)), ""),
        (methods.TRAIN, _of(args=_of(save_total_limit=None)), ""),
        (lightning_table.LIGHTNING_SAVE, _of(save_top_k=1), "save_top_k"),
        (lightning_table.OLD_LIGHTNING_SAVE, _of(save_top_k=-1), ""),
        (methods.SAVE_STATE, _of(project_configuration=_of(total_limit=2, automatic_checkpoint_naming=True)), "total_limit"),
        (methods.SAVE_STATE, _of(project_configuration=_of(total_limit=2, automatic_checkpoint_naming=False)), ""),
        (methods.SAVE_STATE, _of(project_configuration=_of(total_limit=3, automatic_checkpoint_naming=True)), ""),
        (methods.EVALUATE, _of(args=_of(save_total_limit=1)), ""),
    ],
)
def test_who_rotates_is_found_out(method: methods.Method, caller: Any, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "running", lambda *methods: [callers.Call(method, caller)] if method in methods else [])
    reason = saves.keeps_too_few()
    assert reason.startswith(setting) if setting else reason == ""
