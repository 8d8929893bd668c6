"""A configuration under the names of DeepSpeed's `DeepSpeedConfig`, which scripts read from it and from `engine._config`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from hf_zero.config.resolve import ResolvedConfig, resolve
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.observe import log_rank0
from hf_zero.system.secrets import hidden

_MONITORS = ("tensorboard", "wandb", "comet", "csv_monitor", "trackio")


class ZeroView:
    """The ``zero_optimization`` section; keys of stage 3 exist with and without their prefix.

    Args:
        resolved: The configuration.

    Attributes:
        offload_param: Its section; None if the configuration has none.
        offload_optimizer: Its section; None if the configuration has none.
    """

    def __init__(self, resolved: ResolvedConfig) -> None:
        self._section = resolved.config.zero_optimization
        written = resolved.raw.get("zero_optimization")
        given = {*resolved.resolved.get("zero_optimization", {}), *(written if isinstance(written, Mapping) else {})}
        names = {name for name in given if not isinstance(written, Mapping) or written.get(name, "") is not None}
        self._overlap_written = isinstance(written, Mapping) and written.get("overlap_comm") not in (None, "auto")
        self.__dict__["offload_param"] = self._section.offload_param if "offload_param" in names else None
        self.__dict__["offload_optimizer"] = self._section.offload_optimizer if "offload_optimizer" in names else None

    @property
    def overlap_comm(self) -> bool:
        """Return the value in the file, else whether the stage is 3, like DeepSpeed; the value changes no number here."""
        return bool(self._section.overlap_comm) if self._overlap_written else self._section.stage == 3

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        fields = type(self._section).model_fields
        found = name if name in fields else f"stage3_{name}"
        if found not in fields:
            raise AttributeError(f"zero_optimization has no key {name!r}; docs/config.md lists them")
        return getattr(self._section, found)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            fields = type(self._section).model_fields
            _refuse_assigned(f"zero_config.{name}", value, name in fields or f"stage3_{name}" in fields)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return repr(self._section)


class MonitorView:
    """The sections of the monitors, as an argument of ``MonitorMaster``."""

    def __init__(self, config: ZeroConfig) -> None:
        self.tensorboard = config.tensorboard
        self.wandb = config.wandb
        self.comet = config.comet
        self.csv_monitor = config.csv_monitor
        self.trackio = config.trackio

    @property
    def enabled(self) -> bool:
        """Return whether any monitor is enabled."""
        return any(getattr(self, name).enabled for name in _MONITORS)


def _refuse_assigned(name: str, value: Any, known: bool) -> None:
    if known:
        raise ConfigError(
            f"{name} of a configuration was assigned {value!r}, but engines use the values that they were made with, so nothing would "
            "change: write the value in the configuration that initialize() is given. An engine's batch sizes are changed by "
            "engine.set_train_batch_size() and engine.set_train_micro_batch_size(), its clipping by engine.optimizer.clip_grad"
        )


class ConfigView:
    """Attributes of ``DeepSpeedConfig``: DeepSpeed's attribute names, else the keys of the file.

    Args:
        resolved: The configuration.
    """

    def __init__(self, resolved: ResolvedConfig) -> None:
        self._resolved = resolved

    def __getattr__(self, name: str) -> Any:
        if name == "_resolved":
            raise AttributeError(name)
        reader = _READERS.get(name)
        if reader is not None:
            return reader(self._resolved)
        if name in ZeroConfig.model_fields:
            return getattr(self._resolved.config, name)
        raise AttributeError(f"a configuration has no attribute {name!r}; read its keys (docs/config.md) or `zero_config`")

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse_assigned(name, value, name in _READERS or name in ZeroConfig.model_fields)
        super().__setattr__(name, value)

    def print_user_config(self) -> None:
        """Log the configuration as it was given, with secrets masked."""
        log_rank0("json = %s", json.dumps(hidden(self._resolved.raw), indent=4, default=str))

    def print(self, name: str) -> None:
        """Log every value that is not a default, with its origin."""
        log_rank0("%s:\n%s", name, "\n".join(f"  {row.key} = {row.value} ({row.source})" for row in self._resolved.table()))

    def __repr__(self) -> str:
        return f"DeepSpeedConfig({hidden(self._resolved.resolved)!r})"


def _params(section: str) -> Callable[[ResolvedConfig], Any]:
    return lambda resolved: (resolved.resolved.get(section) or {}).get("params")


def _lower(text: str | None) -> str | None:
    return None if text is None else text.lower()


_READERS: dict[str, Callable[[ResolvedConfig], Any]] = {
    "_param_dict": lambda resolved: resolved.raw,
    "train_batch_size": lambda resolved: resolved.batch.total,
    "train_micro_batch_size_per_gpu": lambda resolved: resolved.batch.micro,
    "gradient_accumulation_steps": lambda resolved: resolved.batch.accumulation,
    "world_size": lambda resolved: resolved.batch.world_size,
    "zero_config": ZeroView,
    "zero_enabled": lambda resolved: resolved.config.zero_optimization.stage > 0,
    "zero_optimization_stage": lambda resolved: resolved.config.zero_optimization.stage,
    "monitor_config": lambda resolved: MonitorView(resolved.config),
    "float16_config": lambda resolved: resolved.config.fp16,
    "fp16_config": lambda resolved: resolved.config.fp16,
    "bfloat16_config": lambda resolved: resolved.config.bf16,
    "fp16_enabled": lambda resolved: resolved.config.fp16.enabled,
    "bfloat16_enabled": lambda resolved: resolved.config.bf16.enabled,
    "loss_scale": lambda resolved: resolved.config.fp16.loss_scale if resolved.config.fp16.enabled else 1.0,
    "initial_dynamic_scale": lambda resolved: 2**resolved.config.fp16.initial_scale_power,
    "optimizer_name": lambda resolved: _lower(resolved.config.optimizer.type) if resolved.config.optimizer else None,
    "optimizer_params": _params("optimizer"),
    "scheduler_name": lambda resolved: resolved.config.scheduler.type if resolved.config.scheduler else None,
    "scheduler_params": _params("scheduler"),
    "flops_profiler_config": lambda resolved: resolved.config.flops_profiler,
    "activation_checkpointing_config": lambda resolved: resolved.config.activation_checkpointing,
    "comms_config": lambda resolved: SimpleNamespace(comms_logger=resolved.config.comms_logger),
    "checkpoint_config": lambda resolved: resolved.config.checkpoint,
    "aio_config": lambda resolved: resolved.config.aio,
    "param_dtype": lambda resolved: resolved.config.data_types.param_dtype,
    "buffer_dtype": lambda resolved: resolved.config.data_types.buffer_dtype,
    "keep_in_fp32_modules": lambda resolved: resolved.config.data_types.keep_in_fp32_modules,
    "grad_accum_dtype": lambda resolved: resolved.config.data_types.grad_accum_dtype,
    "elasticity_enabled": lambda resolved: bool(resolved.config.elasticity and resolved.config.elasticity.enabled),
    "eigenvalue_enabled": lambda resolved: False,
    "pld_enabled": lambda resolved: False,
    "curriculum_enabled_legacy": lambda resolved: False,
}


def view_of(source: Any, world_size: int = 1) -> ConfigView:
    """Return the view of a file, dictionary or text, read for ``world_size`` data-parallel ranks; "auto" takes defaults."""
    return ConfigView(resolve(source, world_size=world_size, match_sources=False))
