"""Define further attributes and methods of DeepSpeed's optimizers that scripts use, as tables: name -> function of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_zero.deepspeed import safe_values
from hf_zero.observe import warn_once


def _parts_by_rank(engine: Any) -> list[list[torch.Tensor]]:
    """Return, for each unit, views of every rank's part of the unsharded flat buffer, each (shard_numel,); empty at stage 3, where no rank
    keeps that buffer.
    """
    return [] if engine.stage_policy.parameters_sharded else [list(unit.full.chunk(unit.layout.world)) for unit in engine.optimizer.units]


VALUES: dict[str, Callable[[Any], Any]] = {
    "dp_process_group": lambda engine: engine.seq_data_parallel_group,
    "real_dp_process_group": lambda engine: [engine.seq_data_parallel_group for _ in engine.optimizer.param_groups],
    "partition_count": lambda engine: [engine.collectives.topology.world for _ in engine.optimizer.param_groups],
    "parallel_partitioned_bit16_groups": _parts_by_rank,
    "nccl_start_alignment_factor": lambda engine: 2,  # DeepSpeed's value; parts of units start at multiples of 16 elements
    "partition_gradients": lambda engine: engine.stage_policy.stage >= 2,
    "dtype": lambda engine: engine.optimizer.low_precision_dtype,
    "device": lambda engine: engine.device,
    "gradient_accumulation_dtype": lambda engine: engine.precision.accumulation_dtype,
    "gradient_accumulation_steps": lambda engine: engine.accumulation.steps,
    "communication_data_type": lambda engine: engine.communication_data_type,
    "sequence_parallel_size": lambda engine: engine.sequence_parallel_size,
    "has_moe_layers": lambda engine: engine.has_moe_layers,
    "param_names": lambda engine: engine.param_names,
    "module": lambda engine: engine.module,
    "cpu_offload": lambda engine: engine.zero_cpu_offload(),
    **{
        key: lambda engine, key=key: getattr(engine.settings.zero_optimization, key)  # type: ignore[misc]
        for key in ("contiguous_gradients", "overlap_comm", "reduce_bucket_size", "reduce_scatter", "sub_group_size")
    },
}


class Value:
    """A descriptor of an optimizer attribute that is computed from the engine at each read; a value that a script assigns replaces it."""

    def __init__(self, getter: Callable[[Any], Any]) -> None:
        self._getter = getter

    def __get__(self, optimizer: Any, owner: type) -> Any:
        return self if optimizer is None else self._getter(optimizer._engine())


def _reader(whole: Callable[..., Any], state: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that reads the fp32 value of a parameter with ``whole``, or its state ``optim_state_key`` with ``state``.

    Errors and collectives are those of the two functions, which are in ``safe_values``.
    """

    def read(optimizer: Any, param: torch.Tensor, optim_state_key: str | None = None) -> torch.Tensor | None:
        found: torch.Tensor | None = whole(param) if optim_state_key is None else state(param, optim_state_key)
        return found

    return read


def _writer(whole: Callable[..., Any], state: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that sets the fp32 value of a parameter with ``whole``, or its state ``optim_state_key`` with ``state``."""

    def write(optimizer: Any, value: torch.Tensor, param: torch.Tensor, optim_state_key: str | None = None) -> None:
        if optim_state_key is None:
            whole(param, value)
        else:
            state(param, value, optim_state_key)

    return write


def _quantize_nontrainable_params(optimizer: Any) -> None:
    """Do nothing if the configuration quantizes frozen weights already; otherwise log a warning that this call has no effect."""
    if not optimizer._engine().zero_quantized_nontrainable_weights():
        warn_once("quantize_nontrainable_params() does nothing: zero_optimization.zero_quantized_nontrainable_weights is not set")


METHODS: dict[str, Callable[..., Any]] = {
    "quantize_nontrainable_params": _quantize_nontrainable_params,
    "get_full_hp_param": _reader(safe_values.safe_get_full_fp32_param, safe_values.safe_get_full_optimizer_state),
    "set_full_hp_param": _writer(safe_values.safe_set_full_fp32_param, safe_values.safe_set_full_optimizer_state),
    "get_local_fp32_param": _reader(safe_values.safe_get_local_fp32_param, safe_values.safe_get_local_optimizer_state),
    "set_local_hp_param": _writer(safe_values.safe_set_local_fp32_param, safe_values.safe_set_local_optimizer_state),
    "get_fp32_grad_for_param": lambda optimizer, param: safe_values.safe_get_full_grad(param),
    "set_fp32_grad_for_param": lambda optimizer, value, param: safe_values.safe_set_full_grad(param, value),
    "get_local_fp32_grad_for_param": lambda optimizer, param: safe_values.safe_get_local_grad(param),
    "set_local_grad_for_param": lambda optimizer, value, param: safe_values.safe_set_local_grad(param, value),
    **{
        name: lambda optimizer, *args, name=name, **kwargs: getattr(optimizer._engine(), name)(*args, **kwargs)
        for name in ("empty_partition_cache", "offload_states", "reload_states")
    },
    # DeepSpeed's stage 3 puts masters into the inner optimizer's groups during a step; hf_zero never changes these groups.
    **dict.fromkeys(("_set_fp32_optimizer_param_groups", "_clear_fp32_optimizer_param_groups"), lambda optimizer: None),
}


def bind(optimizer_class: type[Any]) -> None:
    """Add all attributes and methods of the tables to ``optimizer_class``."""
    for name, getter in VALUES.items():
        setattr(optimizer_class, name, Value(getter))
    for name, method in METHODS.items():
        setattr(optimizer_class, name, method)
