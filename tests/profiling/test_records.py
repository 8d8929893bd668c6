"""Records of monitors have DeepSpeed's names, for each optimizer step, and the engine names its optimizer as DeepSpeed does."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import ranks

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
