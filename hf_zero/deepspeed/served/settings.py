"""Provide DeepSpeed's configuration classes, its enumerations of devices, states, stages and optimizers, and flags of schedules."""

from __future__ import annotations

import argparse
from enum import Enum
from functools import reduce
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from hf_zero.comm.bootstrap import default_timeout
from hf_zero.config.mesh import requested_slices
from hf_zero.config.read import read_config
from hf_zero.config.resolve import ResolvedConfig, resolve
from hf_zero.config.view import ConfigView, MonitorView, ZeroView
from hf_zero.deepspeed.served.comm import get_world_size
from hf_zero.deepspeed.served.groups import _get_sequence_data_parallel_world_size, _get_sequence_parallel_world_size
from hf_zero.observe import logger

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, ADAGRAD_OPTIMIZER, LION_OPTIMIZER = "adam", "adamw", "adagrad", "lion"
LAMB_OPTIMIZER, MUON_OPTIMIZER = "lamb", "muon"
ONEBIT_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER = "onebitadam", "onebitlamb", "zerooneadam"
TORCH_ADAM_PARAM, ADAM_W_MODE = "torch_adam", "adam_w_mode"
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = default_timeout()
NO_COMMIT = "hf_zero"
"""Placeholder for the commit from which DeepSpeed was built."""

TORCH_INFO = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": ".".join((torch.version.cuda or "0.0").split(".")[:2]),
    # Three numbers without NCCL: for "0.0" scripts call torch.cuda.nccl.version(), which PyTorch without CUDA does not have.
    "nccl_version": ".".join(map(str, torch.cuda.nccl.version()[:2])) if torch.version.cuda else "0.0.0",
    "hip_version": ".".join((torch.version.hip or "0.0").split(".")[:2]),
}
"""Version of the running PyTorch; DeepSpeed has the version that it was built with."""
_ARGUMENTS: tuple[tuple[str, type, float | str | None, str], ...] = (
    ("lr_range_test_min_lr", float, 1e-3, "first learning rate"),
    ("lr_range_test_step_rate", float, 1.0, "growth per interval"),
    ("lr_range_test_step_size", int, 1000, "steps of an interval"),
    ("cycle_first_step_size", int, 1000, "steps of the first half of the cycle"),
    ("cycle_first_stair_count", int, -1, "stairs of the first half"),
    ("cycle_second_step_size", int, -1, "steps of the second half"),
    ("cycle_second_stair_count", int, -1, "stairs of the second half"),
    ("decay_step_size", int, 1000, "steps of a decay interval"),
    ("cycle_min_lr", float, 0.01, "lowest learning rate of the cycle"),
    ("cycle_max_lr", float, 0.1, "highest learning rate of the cycle"),
    ("decay_lr_rate", float, 0.0, "decay of the learning rate per interval"),
    ("cycle_min_mom", float, 0.8, "lowest momentum of the cycle"),
    ("cycle_max_mom", float, 0.9, "highest momentum of the cycle"),
    ("decay_mom_rate", float, 0.0, "decay of the momentum per interval"),
    ("warmup_min_lr", float, 0.0, "learning rate at the start of the warm-up"),
    ("warmup_max_lr", float, 0.001, "learning rate at the end of the warm-up"),
    ("warmup_num_steps", int, 1000, "steps of the warm-up"),
    ("warmup_type", str, "log", "log or linear"),
    ("warmup_min_ratio", float, 0.01, "fraction of the learning rate at the start of WarmupCosineLR's warm-up"),
    ("cos_min_ratio", float, 0.01, "fraction of the learning rate at the end of WarmupCosineLR"),
)


class OffloadDeviceEnum(str, Enum):
    """Devices of offloaded state."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Kinds of state that ``engine.offload_states(include=...)`` moves to host memory."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(int, Enum):
    """The stages of ZeRO."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796


class DeepSpeedConfig(ConfigView):
    """A configuration that was read and checked for the present number of ranks.

    Args:
        config: Path, dictionary, JSON or base64 text; "auto" is replaced by defaults.
        mpu: Object of the script that returns the data-parallel group.
        mesh_device: Has no effect.

    Raises:
        ConfigError: The configuration is wrong.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        source = read_config(config)
        super().__init__(resolve(source, world_size=_replicas(source, mpu), match_sources=False))


def _replicas(config: dict[str, Any], mpu: Any) -> int:
    """Return the number of data-parallel replicas: ranks, or groups of ranks, with their own samples."""
    if hasattr(mpu, "get_data_parallel_world_size"):
        return int(mpu.get_data_parallel_world_size())
    found = (
        mpu.get_sequence_parallel_world_size() if hasattr(mpu, "get_sequence_parallel_world_size") else _get_sequence_parallel_world_size()
    )
    sharers = max(int(found), requested_slices(config))
    ranks = _get_sequence_data_parallel_world_size()
    return ranks // sharers if ranks % sharers == 0 else ranks


def _with_section(keys: dict[str, Any]) -> ResolvedConfig:
    return resolve({"train_micro_batch_size_per_gpu": 1, "zero_optimization": keys}, world_size=get_world_size(), match_sources=False)


class DeepSpeedZeroConfig(ZeroView):
    """The section ``zero_optimization``, constructed from its keys.

    Raises:
        ConfigError: A key or a value is wrong.
    """

    def __init__(self, **keys: Any) -> None:
        # A section without stage contradicts no key, so check this key for the only stage that has it.
        node = {} if "stage" in keys else {name: keys.pop(name) for name in ("zero_hpz_partition_size",) if name in keys}
        super().__init__(_with_section(keys))
        if node:
            self.__dict__["zero_hpz_partition_size"] = _with_section({"stage": 3, **node}).config.zero_optimization.zero_hpz_partition_size


class DeepSpeedMonitorConfig(MonitorView):
    """The sections of the monitors, constructed from their keys.

    Raises:
        ConfigError: A key or a value is wrong.
    """

    def __init__(self, **sections: Any) -> None:
        super().__init__(resolve({"train_micro_batch_size_per_gpu": 1, **sections}, match_sources=False).config)


def get_monitor_config(param_dict: Any) -> MonitorView:
    """Return the sections of the monitors from a complete configuration; its other sections are not checked."""
    sections = {
        key: value for key, value in read_config(param_dict).items() if key in ("tensorboard", "wandb", "comet", "csv_monitor", "trackio")
    }
    return MonitorView(resolve({"train_micro_batch_size_per_gpu": 1, **sections}, match_sources=False).config)


class DeepSpeedConfigModel(BaseModel):
    """A section whose keys are its pydantic fields; unknown keys are errors, and assigned values are validated too.

    A deprecated key has ``Field(..., json_schema_extra={"deprecated": True, ...})`` with further entries: ``new_param`` is the key that
    replaces it (dotted if that key belongs to a section inside this one), ``new_param_fn`` converts the old value to the new one,
    ``set_new_param=False`` only warns, and ``deprecated_msg`` is added to the warning.

    Args:
        strict: Whether values "auto" are kept; otherwise these keys count as not given.
        **data: Keys and values of the section.

    Raises:
        ValidationError: A key or a value is wrong.
        AssertionError: A deprecated key and its replacement are both given.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        given = data if strict else {key: value for key, value in data.items() if not (isinstance(value, str) and value == "auto")}
        super().__init__(**given)
        for name, field in type(self).model_fields.items():
            extras = field.json_schema_extra
            if isinstance(extras, dict) and extras.get("deprecated") and name in self.model_fields_set:
                self._pass_on(name, extras)

    def _pass_on(self, old: str, extras: dict[str, Any]) -> None:
        new = extras.get("new_param", "")
        logger.warning("; ".join(filter(None, (f"{old} is deprecated", f"use {new}" if new else "", extras.get("deprecated_msg", "")))))
        if not new or not extras.get("set_new_param", True):
            return
        *sections, key = new.split(".")
        section = reduce(getattr, sections, self)
        if key in section.model_fields_set:
            raise AssertionError(f"{old} is the old name of {new}, and both are given; leave {old} out")
        setattr(section, key, extras.get("new_param_fn", lambda value: value)(getattr(self, old)))


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--lr_schedule`` and one argument per parameter of the schedules, with its name in the configuration.

    Args:
        parser: The script's parser; it is changed.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("Learning rate schedule", "schedules of the configuration's scheduler section")
    group.add_argument("--lr_schedule", type=str, default=None, help="name of the schedule")
    # Accept it as a flag and with a value, because versions of DeepSpeed differ.
    text = "grow at the end of intervals only"
    group.add_argument("--lr_range_test_staircase", type=_truth, nargs="?", const=True, default=False, help=text)
    group.add_argument("--cycle_momentum", default=False, action="store_true", help="cycle the momentum too")
    for name, kind, default, text in _ARGUMENTS:
        group.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def _truth(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")
