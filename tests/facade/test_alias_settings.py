"""DeepSpeed's configuration classes, monitors and names of choices, as scripts import them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import Field, ValidationError

import hf_zero
from hf_zero.config.resolve import resolve
from hf_zero.config.schema.zero import OffloadOptimizer, OffloadParam
from hf_zero.deepspeed.served.monitors import CometMonitor, MonitorMaster, TensorBoardMonitor, TrackioMonitor, csvMonitor
from hf_zero.deepspeed.served.settings import (
    TORCH_INFO,
    DeepSpeedConfig,
    DeepSpeedConfigModel,
    DeepSpeedMonitorConfig,
    DeepSpeedZeroConfig,
    OffloadStateTypeEnum,
    add_tuning_arguments,
    get_monitor_config,
)
from hf_zero.errors import ConfigError, StateError
from hf_zero.observe import logger
from hf_zero.optim.factory import build_scheduler

pytestmark = pytest.mark.quick

PUBLISHED: dict[str, dict[str, Any]] = {
    "lots of no size": {"zero_optimization": {"stage": 3, "sub_group_size": 0, "max_live_parameters": 0, "max_reuse_distance": 0}},
    "sizes all auto": {"zero_optimization": {"stage": 3, "sub_group_size": "auto", "stage3_max_live_parameters": "auto"}},
    "compiler of 0.14": {"compile": {"disable": False, "backend": "inductor"}},
    "number switched off": {"activation_checkpointing": {"number_checkpoints": False, "cpu_checkpointing": False}},
    "devices and numbers as texts": {"zero_optimization": {"stage": "2", "offload_optimizer": {"device": "CPU", "pin_memory": "true"}}},
    "keys of another program": {"comms_config": {"verbose": False}, "monitor_config": {"enabled": True}, "_comment": "mine"},
    "everything off": {"amp": {"enabled": False, "opt_level": "O1"}, "elasticity": {"enabled": False}, "zero_optimization": False},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_published_files_hold_is_taken(name: str) -> None:
    resolve({"train_micro_batch_size_per_gpu": 2, **PUBLISHED[name]})


def test_swapped_words_are_recognised() -> None:
    with pytest.raises(ConfigError, match=r"did you mean `zero_optimization.overlap_comm`"):
        resolve({"train_batch_size": 1, "zero_optimization": {"comm_overlap": True}})


def test_a_configuration_object_shows_what_was_read() -> None:
    config = DeepSpeedConfig(
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "wandb": {"project": "mine"},
            "own": {"key": 1},
        }
    )
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (8, 4, 2)
    assert config.zero_enabled and config.zero_optimization_stage == config.zero_config.stage == 2
    assert config.zero_config.offload_optimizer.device == "cpu" and config.zero_config.offload_param is None
    assert (
        config.bfloat16_enabled and not config.fp16_enabled and config.optimizer_name == "adamw" and config.optimizer_params == {"lr": 0.5}
    )
    assert config.scheduler_name == "WarmupLR" and config.scheduler_params["warmup_num_steps"] == 3
    assert config.monitor_config.wandb.project == "mine" and not config.monitor_config.enabled
    assert config._param_dict["own"] == {"key": 1} and config.gradient_clipping == 1.0
    assert not hasattr(config, "no_such_attribute")
    with pytest.raises(ConfigError, match="train_batch_siz"):
        DeepSpeedConfig({"train_batch_siz": 1})


def test_zero_keys_are_there_with_and_without_their_prefix() -> None:
    config = DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=7, stage3_gather_fp16_weights_on_model_save=True)
    assert config.prefetch_bucket_size == config.stage3_prefetch_bucket_size == 7
    assert config.gather_16bit_weights_on_model_save and config.offload_param is None and config.offload_optimizer is None
    assert isinstance(DeepSpeedZeroConfig(cpu_offload=True).offload_optimizer, OffloadOptimizer)
    given = DeepSpeedZeroConfig(offload_param={}, offload_optimizer={"pipeline_read": True})
    assert isinstance(given.offload_param, OffloadParam) and given.offload_optimizer.pipeline
    assert DeepSpeedZeroConfig(offload_param=None).offload_param is None
    assert [DeepSpeedZeroConfig(stage=stage).overlap_comm for stage in (0, 2, 3)] == [False, False, True]
    assert DeepSpeedZeroConfig(overlap_comm=True).overlap_comm and not DeepSpeedZeroConfig(stage=3, overlap_comm=False).overlap_comm
    assert [DeepSpeedZeroConfig(**keys).zero_hpz_partition_size for keys in ({"zero_hpz_partition_size": 4}, {})] == [4, 1]
    with pytest.raises(ConfigError, match="zero_hpz_partition_size"):
        DeepSpeedZeroConfig(zero_hpz_partition_size="four")
    with pytest.raises(AttributeError, match="no key 'frobnicate'"):
        _ = config.frobnicate
    with pytest.raises(ConfigError, match="stage"):
        DeepSpeedZeroConfig(stage=7)


def test_enums_compare_with_their_texts() -> None:
    assert OffloadStateTypeEnum.optim_states == "optim_states" and len(OffloadStateTypeEnum) == 5


def test_monitors_write_a_scripts_own_events(tmp_path: Path) -> None:
    sections = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}, "train_batch_size": 3}
    master = MonitorMaster(get_monitor_config(sections))
    assert master.enabled and master.tb_monitor is None and master.csv_monitor.job_name == "job"
    master.write_events([("loss", 0.5, 1)])
    master.csv_monitor.write_events([("loss", 0.25, 2)])
    assert (tmp_path / "job" / "loss.csv").read_text().split() == ["step,loss", "1,0.5", "2,0.25"]
    alone = csvMonitor(get_monitor_config(sections).csv_monitor)
    assert (alone.enabled, alone.output_path, alone.job_name) == (True, str(tmp_path), "job")
    off = TensorBoardMonitor(DeepSpeedMonitorConfig().tensorboard)
    assert not off.enabled and off.job_name == "DeepSpeedJobName"
    off.write_events([("loss", 0.5, 1)])


def test_trackio_is_a_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fake = SimpleNamespace(
        init=lambda **keys: calls.append(("init", keys)),
        log=lambda record, step: calls.append((record, step)),
        finish=lambda: calls.append("finish"),
    )
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monitor = TrackioMonitor(
        DeepSpeedConfig({"train_batch_size": 1, "trackio": {"enabled": True, "project": "mine"}}).monitor_config.trackio
    )
    monitor.write_events([("Train/Loss", 0.5, 100)])
    for sink in monitor.sinks:
        sink.close()
    assert calls == [("init", {"project": "mine"}), ({"Train/Loss": 0.5}, 100), "finish"]


def test_monitors_give_what_is_written_with(monkeypatch: pytest.MonkeyPatch) -> None:
    run, writer = SimpleNamespace(set_name=lambda name: None), SimpleNamespace()
    monkeypatch.setitem(sys.modules, "comet_ml", SimpleNamespace(start=lambda **keys: run))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=lambda **keys: writer))
    for on in (True, False):
        sections = DeepSpeedMonitorConfig(comet={"enabled": on}, tensorboard={"enabled": on})
        assert CometMonitor(sections.comet).experiment is (run if on else None)
        assert TensorBoardMonitor(sections.tensorboard).summary_writer is (writer if on else None)


def test_script_arguments_of_schedules() -> None:
    args = add_tuning_arguments(argparse.ArgumentParser()).parse_args(["--lr_schedule", "WarmupLR", "--warmup_num_steps", "7"])
    assert (args.lr_schedule, args.warmup_num_steps, args.warmup_type, args.lr_range_test_staircase) == ("WarmupLR", 7, "log", False)


@pytest.mark.parametrize(
    ("words", "params"),
    [
        ("LRRangeTest --lr_range_test_staircase", {"lr_range_test_staircase": True, "lr_range_test_min_lr": 1e-3}),
        ("LRRangeTest --lr_range_test_staircase false", {"lr_range_test_staircase": False}),
        ("OneCycle --cycle_first_step_size 4", {"cycle_first_step_size": 4, "cycle_max_lr": 0.1, "cycle_momentum": False}),
        ("OneCycle --cycle_second_stair_count 2 --cycle_momentum", {"cycle_second_stair_count": 2, "cycle_momentum": True}),
        ("WarmupDecayLR --warmup_max_lr 0.5", {"warmup_max_lr": 0.5, "warmup_num_steps": 1000, "warmup_type": "log"}),
        ("WarmupCosineLR --cos_min_ratio 0.05", {"cos_min_ratio": 0.05, "warmup_min_ratio": 0.01}),
    ],
)
def test_the_arguments_of_a_schedule_build_it(words: str, params: dict[str, Any]) -> None:
    args = add_tuning_arguments(argparse.ArgumentParser()).parse_args(["--lr_schedule", *words.split()])
    assert vars(args).items() >= params.items()
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    rates = {"cycle_min_lr": args.cycle_min_lr, "cycle_max_lr": args.cycle_max_lr} if args.lr_schedule == "OneCycle" else {}
    total = {"total_num_steps": 2000} if args.lr_schedule in ("WarmupDecayLR", "WarmupCosineLR") else {}
    schedule = build_scheduler(args.lr_schedule, {**rates, **params, **total}, optimizer)
    if args.lr_schedule == "OneCycle":
        assert schedule.cycle_momentum is args.cycle_momentum


class Part(DeepSpeedConfigModel):
    size: int = 0


class Whole(DeepSpeedConfigModel):
    count: int = Field(1, alias="number")
    name: str | None = Field(None, json_schema_extra={"deprecated": True, "new_param": "names", "new_param_fn": lambda name: [name]})
    names: list[str] = []
    size: int = Field(0, json_schema_extra={"deprecated": True, "new_param": "part.size"})
    speed: int = Field(0, json_schema_extra={"deprecated": True, "deprecated_msg": "it has no effect"})
    part: Part = Part()


def test_sections_of_a_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(logger, "warning", warnings.append)
    whole = Whole(number=3, name="one", size=4, speed=5)
    assert (whole.count, whole.names, whole.part.size, whole.speed) == (3, ["one"], 4, 5) and Whole(count=2).count == 2
    assert warnings == ["name is deprecated; use names", "size is deprecated; use part.size", "speed is deprecated; it has no effect"]
    assert Whole(count="auto").count == 1
    for wrong in ({"count": "many"}, {"counts": 1}):
        with pytest.raises(ValidationError):
            Whole(**wrong)
    with pytest.raises(ValidationError):
        whole.count = "many"  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="name is the old name of names, and both are given"):
        Whole(name="one", names=["one"])


def test_versions_that_a_script_splits_are_there() -> None:
    for name in ("version", "cuda_version", "nccl_version"):
        assert all(part.isdecimal() for part in str(TORCH_INFO[name]).split(".")[:2])
    assert TORCH_INFO["nccl_version"] != "0.0", "scripts ask torch.cuda.nccl then, which raises where PyTorch has no CUDA"


def test_misuse_is_caught_as_an_assertion_too() -> None:
    for kind in (ConfigError, StateError):
        assert issubclass(kind, AssertionError)
    with pytest.raises(AssertionError, match="needs model="):
        hf_zero.initialize(model=None, config={"train_batch_size": 1})
