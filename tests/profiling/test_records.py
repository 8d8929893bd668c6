"""Records of monitors have DeepSpeed's names, for each optimizer step, and the engine names its optimizer as DeepSpeed does."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.deepspeed.pipe.module import PipelineModule
from hf_zero.errors import ConfigError
from tests.support import ranks
from tests.support.models import CASES
from tests.tensor_parallel.mpu import Mpu, made

TIMES = {"elapsed_time_ms_forward", "elapsed_time_ms_backward", "elapsed_time_ms_step"}


def _engine(config: dict[str, Any], optimizer: Any = None) -> Any:
    import deepspeed

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    given = optimizer(model.parameters()) if isinstance(optimizer, type) else optimizer
    return deepspeed.initialize(model=model, optimizer=given, config={"train_batch_size": 4, **config})[0]


def _records(folder: Path, config: dict[str, Any], steps: int) -> None:
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"}}
    engine = _engine({"optimizer": {"type": "SGD", "params": {"lr": 0.125}}, **monitor, **config})
    for _ in range(steps):
        engine.backward(engine(torch.ones(4, 4, dtype=engine.module.weight.dtype)).float().pow(2).mean())
        engine.step()
    engine.destroy()


def _read(folder: Path) -> dict[str, list[list[str]]]:
    found = {file.stem.removeprefix("Train_Samples_"): list(csv.reader(file.open())) for file in (folder / "job").iterdir()}
    assert all(rows[0] == ["step", name] for name, rows in found.items())
    return {name: rows[1:] for name, rows in found.items()}


def test_each_step_has_the_rate_and_with_a_breakdown_its_times(tmp_path: Path) -> None:
    ranks.run_ranks(_records, 1, tmp_path, {"wall_clock_breakdown": True}, 2)
    found = _read(tmp_path)
    assert found["lr"] == [["4", "0.125"], ["8", "0.125"]]
    assert set(found) == {"lr", "train_loss", "grad_norm", *TIMES}
    assert all([step for step, _ in found[name]] == ["4", "8"] and all(float(time) > 0 for _, time in found[name]) for name in TIMES)


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_fp16_records_its_loss_scale_also_where_it_is_1(tmp_path: Path, scale: float) -> None:
    ranks.run_ranks(_records, 1, tmp_path, {"fp16": {"enabled": True, "loss_scale": scale}}, 1)
    assert _read(tmp_path)["loss_scale"] == [["4", str(scale)]]


def test_other_types_record_no_loss_scale(tmp_path: Path) -> None:
    ranks.run_ranks(_records, 1, tmp_path, {"bf16": {"enabled": True}}, 1)
    assert set(_read(tmp_path)) == {"lr", "train_loss", "grad_norm"}


def _accumulated(folder: Path, scaled_by_script: bool) -> list[float]:
    """Train two steps of three micro-batches; return the mean loss of each step."""
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"}}
    batch = {"train_batch_size": 3, "gradient_accumulation_steps": 3}
    engine = _engine({"optimizer": {"type": "SGD", "params": {"lr": 0.125}}, **monitor, **batch})
    means = []
    for _ in range(2):
        losses = []
        for micro in range(3):
            loss = engine(torch.full((1, 4), 1.0 + micro)).pow(2).mean()
            losses.append(float(loss))
            if scaled_by_script:
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
            engine.step()
        means.append(sum(losses) / 3)
    engine.destroy()
    return means


@pytest.mark.parametrize("scaled_by_script", [False, True])
def test_the_loss_is_the_mean_over_the_micro_batches_of_the_step(tmp_path: Path, scaled_by_script: bool) -> None:
    (means,) = ranks.run_ranks(_accumulated, 1, tmp_path, scaled_by_script)
    assert [float(value) for _, value in _read(tmp_path)["train_loss"]] == pytest.approx(means, rel=1e-5)


def _divided(folder: Path, how: str) -> None:
    """Take two steps of a model that both ranks hold together, with a monitor."""
    import deepspeed

    config: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 0.125}}, "train_micro_batch_size_per_gpu": 2}
    config["csv_monitor"] = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    torch.manual_seed(0)
    if how == "PipelineModule":
        stages = PipelineModule([nn.Linear(4, 4) for _ in range(2)], num_stages=2, loss_fn=nn.functional.mse_loss)
        engine = deepspeed.initialize(model=stages, config=config)[0]
        for _ in range(2):
            engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))]))
    elif how == "mpu":
        engine = deepspeed.initialize(model=nn.Linear(4, 4), config=config, mpu=Mpu(made([[0, 1]]), made([[0], [1]])))[0]
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).pow(2).mean())
            engine.step()
    else:
        case = CASES["llama"]
        section = {"tensor_parallel": {"autotp_size": 2}} if how == "tensor parallelism" else {"pipeline": {"stages": 2}}
        engine = deepspeed.initialize(model=case.build(), config={**config, **section})[0]
        for step in range(2):
            engine.backward(case.forward(engine, case.rows(step, 0, 0)))
            engine.step()
    engine.destroy()


@pytest.mark.parametrize("how", ["tensor parallelism", "pipeline", "PipelineModule", "mpu"])
def test_one_of_the_ranks_that_hold_a_model_together_writes_records(tmp_path: Path, how: str) -> None:
    ranks.run_ranks(_divided, 2, tmp_path, how)
    found = _read(tmp_path)
    assert [len(rows) for rows in found.values()] == [2] * len(found)
    assert all(float(value) > 0 for _, value in found["train_loss"])


def _unopened(folder: Path, model_parallel: bool) -> None:
    import deepspeed

    lines = [[0, 1], [2, 3]] if model_parallel else [[0], [1], [2], [3]]
    across = [[0, 2], [1, 3]] if model_parallel else [[0, 1, 2, 3]]
    monitor = {"csv_monitor": {"enabled": ranks.rank() == 0, "output_path": str(folder / "file")}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}, **monitor}
    with pytest.raises(ConfigError, match="`csv_monitor`: the folder .* cannot be used"):
        deepspeed.initialize(model=nn.Linear(4, 4), config=config, mpu=Mpu(made(lines), made(across)))


@pytest.mark.parametrize("model_parallel", [False, True])
def test_a_monitor_that_cannot_be_opened_is_the_same_error_on_all_ranks(tmp_path: Path, model_parallel: bool) -> None:
    (tmp_path / "file").touch()
    ranks.run_ranks(_unopened, 4, tmp_path, model_parallel)


def _names() -> None:
    section = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    assert _engine(section).optimizer_name() == "adamw"
    assert _engine({"optimizer": {"type": "SGD"}}).optimizer_name() == "SGD"
    assert _engine({}, torch.optim.RMSprop).optimizer_name() == "RMSprop"
    assert _engine(section, torch.optim.NAdam).optimizer_name() == "NAdam"
    assert _engine({}, lambda params: torch.optim.AdamW(params)).optimizer_name() == "AdamW"
    assert _engine({}).optimizer_name() is None
    engine = _engine({"optimizer": {"type": "Adagrad"}, "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 3}})
    assert engine.get_mom() == [0.0]
    assert engine.dynamic_loss_scale_args() == {
        "init_scale": 16, "scale_window": 1000, "delayed_shift": 3, "consecutive_hysteresis": False, "min_scale": 1.0,
    }  # fmt: skip


def test_the_engine_names_its_optimizer_and_its_loss_scale() -> None:
    ranks.run_ranks(_names, 1)
