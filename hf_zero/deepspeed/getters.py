"""Define DeepSpeed's read-only engine methods and attributes as tables: name -> function of the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import index
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch

from hf_zero.core.optimizer.segments import learning_rates
from hf_zero.core.schedule.torch_internals import compiled_call
from hf_zero.deepspeed import held_weights, replaced
from hf_zero.deepspeed.configured import ConfiguredEngine
from hf_zero.deepspeed.moe.layer import MoE, has_moe_layers
from hf_zero.deepspeed.timers import SynchronizedWallClockTimer, ThroughputTimer
from hf_zero.metrics import EventWriter


class EngineThroughput(ThroughputTimer):
    """A throughput timer that starts at each training forward of an engine and stops at the end of the micro-step, without device waits.

    Args:
        engine: The engine to measure.
    """

    def __init__(self, engine: ConfiguredEngine) -> None:
        super().__init__(SimpleNamespace(enabled=True, synchronized=False), engine.samples_per_step)
        self._engine = ref(engine)
        engine.clock.watchers.append(self._watch)

    @contextmanager
    def _watch(self, phase: str) -> Iterator[None]:
        engine: Any = self._engine()
        if engine is not None and phase == "forward" and engine.training and not self.started:
            self.batch_size = engine.samples_per_step
            self.start()
        yield
        if engine is not None and (phase == "step" or (phase == "backward" and not engine.accumulation.boundary)):
            self.stop(global_step=phase == "step", report_speed=False)


Getter = Callable[[ConfiguredEngine], Any]


def _groups(engine: ConfiguredEngine) -> list[dict[str, Any]]:
    # Without optimizer, ``engine.optimizer`` is None, or at stage 3 a handle without param groups.
    return getattr(engine.optimizer, "param_groups", [])


def _rates(engine: ConfiguredEngine) -> list[float]:
    return learning_rates(_groups(engine))


def _zero(key: str) -> Getter:
    return lambda engine: getattr(engine.settings.zero_optimization, key)


def _profiler(key: str) -> Getter:
    def get(engine: ConfiguredEngine) -> Any:
        from hf_zero.config.schema.monitoring import FlopsProfiler  # imports pydantic, which an isinstance check does not need

        return getattr(engine.settings.flops_profiler or FlopsProfiler(), key)

    return get


def _dtype(engine: ConfiguredEngine) -> torch.dtype:
    return engine.precision.param_dtype or next((param.dtype for param in engine.module.parameters()), torch.float32)


def _groups_of_ranks(engine: ConfiguredEngine) -> int:
    return int(engine.collectives.topology.replicas)


# Types of optimizers that DeepSpeed's engine names in small letters, however the file writes them.
_SMALL = ("adagrad", "adam", "adamw", "lamb", "lion", "muon")


def _optimizer_name(engine: ConfiguredEngine) -> str | None:
    """Return the class of the script's optimizer, else the type in the configuration; None without an optimizer."""
    section, inner = engine.settings.optimizer, getattr(engine.optimizer, "inner", None)
    if inner is not None and (engine.optimizer_given or section is None or section.type is None):
        return type(inner).__name__
    name = section.type if section else None
    return name.lower() if name is not None and name.lower() in _SMALL else name


def _dynamic_loss_scale_args(engine: ConfiguredEngine) -> dict[str, Any]:
    section = engine.settings.fp16
    return {
        "init_scale": 2**section.initial_scale_power,
        "scale_window": section.loss_scale_window,
        "delayed_shift": section.hysteresis,
        "consecutive_hysteresis": section.consecutive_hysteresis,
        "min_scale": section.min_loss_scale,
    }


def _layer_ranks(engine: ConfiguredEngine) -> int:
    tensor = engine.collectives.topology.layers.model
    return tensor.world if tensor is not None else 1


def _place_in_layer(engine: ConfiguredEngine) -> int:
    tensor = engine.collectives.topology.layers.model
    return tensor.rank if tensor is not None else 0


def _batch_info(engine: ConfiguredEngine) -> tuple[int, int, int]:
    batch = engine.resolved.batch
    return batch.total, batch.micro, batch.accumulation


def _config_view(engine: ConfiguredEngine) -> Any:
    from hf_zero.config.view import ConfigView  # pydantic

    return ConfigView(engine.resolved)


def _timers(engine: ConfiguredEngine) -> SynchronizedWallClockTimer:
    # Created at the first read and kept, because a script starts and reads a stopwatch in different places.
    timers: SynchronizedWallClockTimer = engine.__dict__.setdefault("timers", SynchronizedWallClockTimer())
    return timers


def _throughput(engine: ConfiguredEngine) -> EngineThroughput:
    # Created at the first read; it counts from then on.
    found: EngineThroughput | None = engine.__dict__.get("_throughput")
    if found is None:
        found = engine.__dict__["_throughput"] = EngineThroughput(engine)
    return found


def _parallel_sizes(engine: ConfiguredEngine) -> dict[str, int]:
    pipe = engine.collectives.topology.pipe
    return {"dp": _groups_of_ranks(engine), "tp": _layer_ranks(engine), **({"pp": pipe.world} if pipe is not None else {})}


# Getters of features that hf_zero does not have.
_NEVER = (
    "amp_enabled",
    "autotuning_enabled",
    "curriculum_enabled_legacy",
    "curriculum_learning_enabled",
    "data_efficiency_enabled",
    "data_sampling_enabled",
    "graph_harvesting",
    "is_deepcompile_active",
    "is_deepcompile_enabled",
    "zero_legacy_stage1",
    "eigenvalue_enabled",
    "load_universal_checkpoint",
    "pld_enabled",
    "random_ltd_enabled",
    "sparse_gradients_enabled",
)

# Keys of `zero_optimization`, by the names of DeepSpeed's getters.
_ZERO_KEYS = (
    "allgather_partitions",
    "elastic_checkpoint",
    "load_from_fp32_weights",
    "log_trace_cache_warnings",
    "round_robin_gradients",
)

METHODS: dict[str, Getter] = {
    **{name: lambda engine: False for name in _NEVER},
    **{f"zero_{key}": _zero(key) for key in _ZERO_KEYS},
    **{key: _zero(key) for key in ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")},
    "zero_quantized_nontrainable_weights": _zero("zero_quantized_nontrainable_weights"),
    "zero_module_granularity_threshold": _zero("stage3_module_granularity_threshold"),
    "zero_multi_rank_bucket_allreduce": _zero("use_multi_rank_bucket_allreduce"),
    "zero_allgather_sequential": _zero("stage3_allgather_sequential"),
    "zero_use_cpu_optimizer": lambda engine: engine.settings.zero_optimization.offload_optimizer.device != "none",
    "zero_nvme_offload_optimizer": lambda engine: engine.settings.zero_optimization.offload_optimizer.device == "nvme",
    "zero_partial_offload": lambda engine: engine.settings.zero_optimization.offload_optimizer.ratio,
    "super_offload": lambda engine: False,  # accepted and without effect
    "zero_force_ds_cpu_optimizer": lambda engine: engine.settings.zero_force_ds_cpu_optimizer,
    "fp16_master_weights_and_gradients": lambda engine: engine.settings.fp16.fp16_master_weights_and_grads,
    "bf16_master_weights_and_gradients": lambda engine: engine.settings.bf16.bf16_master_weights_and_grads,
    "bf16_optimizer_states": lambda engine: engine.settings.bf16.bf16_optimizer_states,
    "use_node_local_storage": lambda engine: engine.settings.checkpoint.use_node_local_storage,
    "aio_config": lambda engine: engine.settings.aio,
    "checkpoint_tag_validation_enabled": lambda engine: engine.settings.checkpoint.tag_validation != "ignore",
    "checkpoint_tag_validation_fail": lambda engine: engine.settings.checkpoint.tag_validation == "fail",
    "mics_shard_size": _zero("mics_shard_size"),
    "zeropp_loco_param": _zero("zeropp_loco_param"),
    "torch_autocast_lower_precision_safe_modules": lambda engine: engine.settings.torch_autocast.lower_precision_safe_modules,
    "tensor_parallel_config": lambda engine: engine.settings.tensor_parallel,
    "amp_params": lambda engine: None,
    "pld_params": lambda engine: None,
    "autotp_size": _layer_ranks,
    "get_data_parallel_rank": lambda engine: engine.collectives.topology.replica,
    "get_data_parallel_world_size": _groups_of_ranks,
    "get_parallel_world_sizes": _parallel_sizes,
    **{f"get_{axis}_parallel_rank": _place_in_layer for axis in ("model", "tensor")},
    **{f"get_{axis}_parallel_world_size": _layer_ranks for axis in ("model", "tensor")},
    "get_pipeline_parallel_rank": lambda engine: getattr(engine.collectives.topology.pipe, "rank", 0),
    "get_pipeline_parallel_world_size": lambda engine: getattr(engine.collectives.topology.pipe, "world", 1),
    "get_sequence_parallel_rank": lambda engine: engine.sequence_parallel.axis.rank if engine.sequence_parallel is not None else 0,
    "get_sequence_parallel_world_size": lambda engine: engine.sequence_parallel.axis.world if engine.sequence_parallel is not None else 1,
    "get_wall_clock_timers": lambda engine: {name: timer.elapsed(reset=False) for name, timer in _timers(engine).get_timers().items()},
    "train_batch_size": lambda engine: engine.resolved.batch.total,
    "train_micro_batch_size_per_gpu": lambda engine: engine.resolved.batch.micro,
    "gradient_accumulation_steps": lambda engine: engine.accumulation.steps,
    "get_batch_info": _batch_info,
    "gradient_clipping": lambda engine: engine.settings.gradient_clipping,
    "steps_per_print": lambda engine: engine.settings.steps_per_print,
    "wall_clock_breakdown": lambda engine: engine.clock.breakdown,
    "elasticity_enabled": lambda engine: engine.settings.elasticity is not None and engine.settings.elasticity.enabled,
    "flops_profiler_enabled": _profiler("enabled"),
    "flops_profiler_recompute_fwd_factor": _profiler("recompute_fwd_factor"),
    "flops_profiler_profile_step": _profiler("profile_step"),
    "flops_profiler_module_depth": _profiler("module_depth"),
    "flops_profiler_top_modules": _profiler("top_modules"),
    "flops_profiler_detailed": _profiler("detailed"),
    "flops_profiler_output_file": _profiler("output_file"),
    "zero_optimization": lambda engine: engine.stage_policy.stage > 0,
    "zero_optimization_stage": lambda engine: engine.stage_policy.stage,
    "zero_optimization_partition_gradients": lambda engine: engine.stage_policy.stage >= 2,
    "zero_optimization_partition_weights": lambda engine: engine.stage_policy.stage >= 3,
    "zero_gather_16bit_weights_on_model_save": lambda engine: held_weights.gathers(engine),
    "zero_offload_optimizer": lambda engine: engine.settings.zero_optimization.offload_optimizer,
    "zero_offload_param": lambda engine: engine.settings.zero_optimization.offload_param,
    "zero_cpu_offload": lambda engine: engine.settings.zero_optimization.offload_optimizer.device == "cpu",
    "zero_overlap_comm": _zero("overlap_comm"),
    "zero_reduce_scatter": _zero("reduce_scatter"),
    "zero_reduce_bucket_size": _zero("reduce_bucket_size"),
    "zero_allgather_bucket_size": _zero("allgather_bucket_size"),
    "zero_contiguous_gradients": _zero("contiguous_gradients"),
    "zero_ignore_unused_parameters": _zero("ignore_unused_parameters"),
    "zero_sub_group_size": _zero("sub_group_size"),
    "zero_max_live_parameters": _zero("stage3_max_live_parameters"),
    "zero_max_reuse_distance": _zero("stage3_max_reuse_distance"),
    "zero_prefetch_bucket_size": _zero("stage3_prefetch_bucket_size"),
    "zero_param_persistence_threshold": _zero("stage3_param_persistence_threshold"),
    "zero_model_persistence_threshold": _zero("stage3_model_persistence_threshold"),
    "zero_allow_untested_optimizer": lambda engine: engine.settings.zero_allow_untested_optimizer,
    "managed_gradient_accumulation": lambda engine: engine.accumulation.managed,
    "memory_breakdown": lambda engine: engine.settings.memory_breakdown,
    "fp16_enabled": lambda engine: engine.settings.fp16.enabled,
    "bfloat16_enabled": lambda engine: engine.settings.bf16.enabled,
    "fp16_auto_cast": lambda engine: engine.settings.fp16.auto_cast,
    "torch_autocast_enabled": lambda engine: engine.settings.torch_autocast.enabled,
    "torch_autocast_dtype": lambda engine: engine.precision.autocast_dtype,
    "dynamic_loss_scale": lambda engine: engine.scaler.dynamic,
    "loss_scale": lambda engine: engine.scaler.scale,
    "dynamic_loss_scale_args": _dynamic_loss_scale_args,
    "initial_dynamic_scale": lambda engine: 2**engine.settings.fp16.initial_scale_power,
    "postscale_gradients": lambda engine: not engine.settings.prescale_gradients,
    "gradient_predivide_factor": lambda engine: engine.settings.gradient_predivide_factor,
    "dataloader_drop_last": lambda engine: engine.settings.dataloader_drop_last,
    "optimizer_name": _optimizer_name,
    "optimizer_params": lambda engine: (engine.resolved.resolved.get("optimizer") or {}).get("params"),
    "scheduler_name": lambda engine: engine.settings.scheduler.type if engine.settings.scheduler else None,
    "scheduler_params": lambda engine: (engine.resolved.resolved.get("scheduler") or {}).get("params"),
    "get_sequence_parallel_group": lambda engine: engine.sequence_parallel.axis.group if engine.sequence_parallel is not None else None,
    "get_lr": _rates,
    "get_mom": lambda engine: [group.get("betas", group.get("momentum", 0.0)) for group in _groups(engine)],
    "get_data_types": lambda engine: (_dtype(engine), engine.precision.accumulation_dtype),
    "is_gradient_accumulation_boundary": lambda engine: engine.accumulation.current_is_boundary(),
    "was_step_applied": lambda engine: engine.progress.last_step_applied,
    "dump_state": lambda engine: engine.settings.dump_state,
}

VALUES: dict[str, Getter] = {
    "communication_data_type": lambda engine: engine.precision.message_dtype or _dtype(engine),
    "is_compiled": lambda engine: any(compiled_call(module) is not None for module in engine.module.modules()),
    "client_lr_scheduler": lambda engine: engine.lr_scheduler,
    "global_steps": lambda engine: engine.progress.global_steps,
    "global_samples": lambda engine: engine.progress.global_samples,
    "skipped_steps": lambda engine: engine.progress.skipped_steps,
    "micro_steps": lambda engine: engine.accumulation.micro_steps,
    "device": lambda engine: engine.collectives.topology.device,
    "dp_world_size": _groups_of_ranks,
    "seq_dp_world_size": lambda engine: engine.collectives.data.world,
    "sequence_parallel_size": lambda engine: engine.sequence_parallel.axis.world if engine.sequence_parallel is not None else 1,
    "seq_parallel_group": lambda engine: engine.sequence_parallel.axis.group if engine.sequence_parallel is not None else None,
    "world_size": lambda engine: torch.distributed.get_world_size(),
    "mp_world_size": _layer_ranks,
    "global_rank": lambda engine: torch.distributed.get_rank(),
    "local_rank": lambda engine: int(os.environ.get("LOCAL_RANK", engine.collectives.topology.device.index or 0)),
    "enable_backward_allreduce": lambda engine: True,
    "inside_no_sync_ctxt": lambda engine: engine.accumulation.in_no_sync,
    "param_names": lambda engine: {param: name for name, param in engine.module.named_parameters()},
    "has_moe_layers": lambda engine: has_moe_layers(engine.module)[0],
    "num_experts": lambda engine: [module.num_experts for module in engine.module.modules() if isinstance(module, MoE)],
    "pipeline_parallelism": lambda engine: engine.collectives.topology.pipe is not None,
    "data_parallel_group": lambda engine: engine.collectives.topology.sample_group,
    "seq_data_parallel_group": lambda engine: engine.collectives.data.topology.public_group,
    "sparse_tensor_module_names": lambda engine: set(),  # embeddings whose gradients are reduced as sparse tensors
    "basic_optimizer": lambda engine: getattr(engine.optimizer, "inner", None),
    "client_optimizer": lambda engine: getattr(engine.optimizer, "inner", None),
    "tput_timer": _throughput,
    "timers": _timers,
    "monitor": lambda engine: EventWriter(engine.reports.sinks),
    "config": lambda engine: engine.resolved.raw,  # as the user gave it; h2o-llmstudio puts the model's in its place
    "_config": _config_view,
    "flops_profiler": lambda engine: getattr(engine.clock, "profiler", None),
    "_global_grad_norm": lambda engine: None if engine.progress.last_norm is None else float(engine.progress.last_norm),
    "gradient_average": lambda engine: engine.settings.gradient_allreduce_op != "sum",
    "dist_backend": lambda engine: torch.distributed.get_backend(engine.collectives.topology.public_group),
}


def _micro_steps(engine: ConfiguredEngine, value: int) -> None:
    engine.accumulation.count_from(value, engine.discard_gradients)


def _progress(name: str) -> Callable[[ConfiguredEngine, int], None]:
    return lambda engine, value: setattr(engine.progress, name, value)


COUNTERS: dict[str, Callable[[ConfiguredEngine, int], None]] = {
    **{name: _progress(name) for name in ("global_steps", "global_samples", "skipped_steps")},
    "micro_steps": _micro_steps,
}


def assign(engine: ConfiguredEngine, name: str, value: Any) -> bool:
    """Store a value that a script assigns to a name of the tables; return False if the assignment is an ordinary one.

    [Note: assigned values] DeepSpeed's engine reads its counters and calls its own getters as it trains, so an assignment to one of them
    changes training. Here a counter accepts a number, and the names in ``replaced`` are errors or a warning. All other values of the tables
    are only told to scripts: one that a script assigns replaces the answer.

    Raises:
        StateError: The value would change training with DeepSpeed and nothing here; or see ``Accumulation.count_from``.
        TypeError: A counter is set to something else than an integer.
    """
    if name in COUNTERS:
        COUNTERS[name](engine, index(value))
        return True
    plain = name in VALUES and isinstance(value, (bool, int, float, torch.dtype))
    if plain and name in replaced.REMEDIES and value == VALUES[name](engine):
        return True  # nothing changes
    replaced.report(name, value, "engine")
    return False


class Value:
    """A descriptor of an engine attribute that is computed at each read; a value that a script assigns replaces it, if ``assign`` allows.

    Args:
        getter: Function of the engine that computes the value.
    """

    def __init__(self, getter: Getter) -> None:
        self._getter = getter

    def __get__(self, engine: ConfiguredEngine | None, owner: type) -> Any:
        return self if engine is None else self._getter(engine)


def bind(engine_class: type[ConfiguredEngine]) -> None:
    """Add all methods and attributes of the tables to ``engine_class``."""
    for name, getter in METHODS.items():
        setattr(engine_class, name, _method(name, getter))
    for name, getter in VALUES.items():
        setattr(engine_class, name, Value(getter))


def _method(name: str, getter: Getter) -> Callable[[ConfiguredEngine], Any]:
    def method(self: ConfiguredEngine) -> Any:
        return getter(self)

    method.__name__ = name
    return method
