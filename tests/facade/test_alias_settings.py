"""DeepSpeed's configuration classes, monitors and names of choices, as scripts import them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hf_zero
from hf_zero.config.resolve import resolve
from hf_zero.config.schema.zero import OffloadOptimizer, OffloadParam
from hf_zero.deepspeed.served.monitors import MonitorMaster, TensorBoardMonitor, TrackioMonitor, csvMonitor
from hf_zero.deepspeed.served.schedule_names import add_tuning_arguments
from hf_zero.deepspeed.served.settings import (
    DeepSpeedConfig,
    DeepSpeedMonitorConfig,
    DeepSpeedZeroConfig,
    OffloadStateTypeEnum,
    get_bfloat16_config,
    get_float16_config,
    get_monitor_config,
)
from hf_zero.errors import ConfigError, StateError

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


def test_script_arguments_of_schedules() -> None:
    args = add_tuning_arguments(argparse.ArgumentParser()).parse_args(["--lr_schedule", "WarmupLR", "--warmup_num_steps", "7"])
    assert (args.lr_schedule, args.warmup_num_steps, args.warmup_type, args.lr_range_test_staircase) == ("WarmupLR", 7, "log", False)


def test_sections_of_number_formats_alone() -> None:
    assert get_bfloat16_config({"bfloat16": {"enabled": True}, "unread": 1}).enabled and not get_bfloat16_config({}).enabled
    assert get_float16_config({"fp16": {"enabled": True, "loss_scale": 8}}).loss_scale == 8


def test_misuse_is_caught_as_an_assertion_too() -> None:
    for kind in (ConfigError, StateError):
        assert issubclass(kind, AssertionError)
    with pytest.raises(AssertionError, match="needs model="):
        hf_zero.initialize(model=None, config={"train_batch_size": 1})
