"""Implement ``zero.Init`` with DeepSpeed's arguments: read the configuration and enter the core's ``ModelInit``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from hf_zero.assembly.kept_types import kept_types
from hf_zero.assembly.mesh import shard_groups
from hf_zero.assembly.policies import kept_patterns, precision_policy
from hf_zero.assembly.same_settings import require_same_settings
from hf_zero.comm.bootstrap import init_distributed
from hf_zero.comm.process_groups import default_device
from hf_zero.config.read import read_config
from hf_zero.config.resolve import resolve
from hf_zero.core.model_init import ModelInit
from hf_zero.core.step.precision import PrecisionPolicy
from hf_zero.core.units.shard import ON_DEVICE
from hf_zero.deepspeed.param_attributes import PARAM_ATTRIBUTES
from hf_zero.errors import UnsupportedError
from hf_zero.offload.policy import init_shard_storage


class Init:
    """Shard a model while it is built inside the ``with`` block (stage 3); DeepSpeed's ``zero.Init``.

    The context creates the process group if there is none. With a single rank parameters are also empty, until they are gathered or
    ``initialize`` is called.

    Args:
        module: An existing module to shard immediately.
        data_parallel_group: Process group to shard over; None is all ranks.
        mem_efficient_linear: Accepted and ignored; linear layers do not change.
        remote_device: "cpu" or "nvme" keeps shards in host memory, like ``offload_param`` of the configuration (``initialize`` moves them
            to files if so configured); "none" or None uses the configuration.
        pin_memory: Whether that memory is page-locked; ``offload_param.pin_memory`` of the configuration also sets it.
        config_dict_or_path: Configuration; values "auto" are allowed.
        config: Older name of ``config_dict_or_path``.
        enabled: Whether the context has an effect.
        dtype: Dtype of the parameters; None uses the configuration's.
        mpu: Object whose ``get_sequence_data_parallel_group()``, or else ``get_data_parallel_group()``, returns the group to shard over.
        zero_param_parallel_group: Not supported.
        zero_quantized_weights: Not supported: gathers before ``initialize`` are not quantized; the configuration's key applies after it.
        zero_quantized_nontrainable_weights: Not supported, for the same reason.
        sequence_data_parallel_group: Other name of ``data_parallel_group``.
        param_swapper: Not supported.

    Raises:
        UnsupportedError: An unsupported argument is given.
        ConfigError: The configuration is wrong.
        StateError: Ranks have different settings; on every rank.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        refused = {
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
            "param_swapper": param_swapper,
        }
        for name, value in refused.items():
            if value:
                hint = f"; the configuration has zero_optimization.{name}" if name.startswith("zero_quantized") else ""
                raise UnsupportedError(f"zero.Init({name}={value!r}) is not provided; leave it out{hint}")
        offloads, pins = remote_device not in (None, "none"), pin_memory
        group = data_parallel_group or sequence_data_parallel_group or _group_of(mpu)
        source, replicate = config_dict_or_path if config_dict_or_path is not None else config, 1
        precision, patterns = PrecisionPolicy(), None
        if enabled:
            init_distributed()
            if source is not None:
                if group is None:
                    require_same_settings(source, call="zero.Init")
                source = read_config(source)
                config = resolve(_without_batch_sizes(source), world_size=1).config
                precision, patterns = precision_policy(config), kept_patterns(config)
                dtype = dtype or precision.param_dtype
                section = config.zero_optimization.offload_param
                replicate = shard_groups(source, group)
                offloads, pins = offloads or section.device != "none", pins or section.pin_memory
        shard_storage = init_shard_storage(default_device(), pins) if enabled and offloads else ON_DEVICE
        keeps = partial(kept_types, precision=replace(precision, param_dtype=dtype), patterns=patterns)
        self._inner = ModelInit(
            group,
            dtype,
            enabled=enabled,
            shard_storage=shard_storage,
            listener=PARAM_ATTRIBUTES,
            replicate=replicate,
            keeps=keeps,
        )
        if module is not None and enabled:
            self._inner.shard_all(module)

    @property
    def inner(self) -> ModelInit:
        """Return the core's ``ModelInit``, which shards the model."""
        return self._inner

    def __enter__(self) -> Init:
        self._inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._inner.__exit__(kind, error, trace)


def _group_of(mpu: Any) -> Any:
    """Return the group that ``initialize`` with ``mpu`` shards over; None for all ranks."""
    if mpu is None:
        return None
    joint = getattr(mpu, "get_sequence_data_parallel_group", None)
    return joint() if joint is not None else mpu.get_data_parallel_group()


def _without_batch_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` with a valid placeholder for the batch size, because only ``initialize`` knows how many ranks share samples."""
    kept = {key: value for key, value in config.items() if key not in ("train_batch_size", "gradient_accumulation_steps", "elasticity")}
    return {**kept, "train_micro_batch_size_per_gpu": 1}
