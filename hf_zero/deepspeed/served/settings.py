"""Provide DeepSpeed's configuration classes, and its enumerations of devices, states, stages and optimizers."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from hf_zero.comm.bootstrap import default_timeout
from hf_zero.config.mesh import requested_slices
from hf_zero.config.read import read_config
from hf_zero.config.resolve import ResolvedConfig, resolve
from hf_zero.config.view import ConfigView, MonitorView, ZeroView
from hf_zero.deepspeed.served.comm import get_world_size
from hf_zero.deepspeed.served.groups import _get_sequence_data_parallel_world_size, _get_sequence_parallel_world_size

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
            self.zero_hpz_partition_size = _with_section({"stage": 3, **node}).config.zero_optimization.zero_hpz_partition_size


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
