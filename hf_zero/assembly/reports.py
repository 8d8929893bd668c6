"""Write the log lines about a configuration and an engine, and make the engine's reports: its clock, and the numbers that monitors get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hf_zero import __version__
from hf_zero.assembly.networks import Networks
from hf_zero.comm.comms_log import CommsLogSettings, start_log
from hf_zero.comm.topology import Topology
from hf_zero.config.batch import MICRO, TOTAL
from hf_zero.config.resolve import ResolvedConfig
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.core.holdings import bytes_on_disk
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.runtime import Runtime
from hf_zero.core.stages import StagePolicy
from hf_zero.core.step.progress import Clock, Progress, Reports
from hf_zero.core.units.unit import Unit
from hf_zero.errors import ConfigError
from hf_zero.expert_parallel.apply import shares_of
from hf_zero.expert_parallel.dispatch import ExpertLoad
from hf_zero.metrics import Sink, build_sinks
from hf_zero.observe import global_rank, log_rank0, logger, warn_once
from hf_zero.offload.policy import describe_offload
from hf_zero.profiling.recordings import RecordedStep
from hf_zero.profiling.step_metrics import StepMetrics
from hf_zero.profiling.step_profile import ProfilingClock
from hf_zero.profiling.waits import SlowRanks
from hf_zero.system.sizes import size_text

Measure = Callable[[int], Mapping[str, float]]


def announce(resolved: ResolvedConfig) -> None:
    """Log warnings and notes about a configuration, set the log's level and start the log of collectives."""
    for warning in resolved.warnings:
        warn_once(warning)
    if resolved.origin.get(MICRO, "").startswith("default"):
        warn_once(f"`{MICRO}` is not set and cannot be derived from other keys; using 1. Set it, or `{TOTAL}`")
    unfilled = [f"{row.key} = {row.value}" for row in resolved.table() if row.source.startswith("default (auto") and row.key != MICRO]
    if unfilled:
        warn_once(
            f'these keys are "auto" without a source of a value, so their defaults are used: {", ".join(unfilled)}. Only Trainer and '
            "accelerate fill them, from their own arguments; write the values that you want"
        )
    if resolved.config.log_level is not None:
        logger.setLevel(resolved.config.log_level.upper())
    if idle := resolved.without_effect():
        log_rank0("keys of the configuration that have no effect here: %s; `hf-zero explain` says why", ", ".join(idle))
    if resolved.config.dump_state:
        for row in resolved.table():
            log_rank0("%s = %s (%s)", row.key, row.value, row.source)
    section = resolved.config.comms_logger
    if section is not None and section.enabled:
        start_log(CommsLogSettings.of(section))


def describe(
    resolved: ResolvedConfig,
    units: Sequence[Unit],
    stage: StagePolicy,
    topology: Topology,
    optimizer: torch.optim.Optimizer | None,
    served: str,
) -> str:
    """Return one line that says that the engine is on, and with which settings. Users search logs for its first two words.

    Args:
        resolved: The configuration.
        units: Units of the engine.
        stage: The stage.
        topology: Axes of the ranks.
        optimizer: The inner optimizer; None for an engine that only runs forward.
        served: Clause that says whether ``import deepspeed`` finds hf_zero.
    """
    states = sum(unit.shard.nbytes for unit in units)
    masters = sum(unit.master.nbytes for unit in units if unit.master is not None and unit.master is not unit.shard)
    dtypes = sorted({str(unit.layout.dtype).removeprefix("torch.") for unit in units}) or ["no parameters"]
    groups = f" in {topology.replicate.world} shard groups of {topology.world}" if topology.replicate is not None else ""
    together = topology.model.world if topology.model is not None else 1
    divided = f" (groups of {together} divide one model)" if together > 1 else ""
    training = [] if optimizer is None else [_batch(resolved), _clipping(resolved), _name(optimizer)]
    return ", ".join(
        [
            f"DeepSpeed info: ZeRO stage {stage.stage} of hf_zero {__version__} ({served}) "
            f"on {topology.data.world * together} rank(s){divided}{groups}",
            *(training or ["no optimizer"]),
            *dtypes,
            describe_offload(resolved.config.zero_optimization, stage).removeprefix(", ") or "no offload",
            f"{sum(unit.layout.numel for unit in units):,} parameters in {len(units)} units",
            f"{size_text(states + masters, '.1f', 'MiB')} of shards and masters on this rank",
        ]
    )


def _batch(resolved: ResolvedConfig) -> str:
    batch = resolved.batch
    return (
        f"global batch {batch.total} = {batch.micro} per rank x {batch.accumulation} micro-steps x {batch.world_size} data-parallel ranks"
    )


def _name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the optimizer's algorithm: that of its class, without the prefix of optimizers for host memory."""
    name = type(optimizer).__name__.removeprefix("Host")
    return "AdamW" if name == "Adam" and optimizer.defaults.get("decoupled_weight_decay") else name


def _clipping(resolved: ResolvedConfig) -> str:
    """Return the clipping norm as text, with a remark if it is a default."""
    norm, origin = resolved.config.gradient_clipping, resolved.origin.get("gradient_clipping", "default")
    return (f"clipping at {norm:g}" if norm else "no clipping") + (" (DeepSpeed's default)" if origin == "default" else "")


def reports_of(
    config: ZeroConfig,
    module: nn.Module,
    networks: Networks,
    runtime: Runtime,
    units: Sequence[Unit],
    optimizer: ShardedOptimizer | None,
    progress: Progress,
) -> Reports:
    """Return the reports of a new engine, with its clock.

    Args:
        config: The configuration.
        module: The user's module.
        networks: Networks of all axes.
        runtime: Runtime that removes the hooks of measures with its own.
        units: Units of the engine.
        optimizer: The engine's optimizer; None for an engine that only runs forward, where nothing is measured.
        progress: Counter of the engine's optimizer steps.
    """
    clock = _clock(config, networks, module, progress)
    if optimizer is None:
        return Reports(clock, config.steps_per_print, [], [])
    measures = _measures(config, module, networks, runtime, partial(bytes_on_disk, units, optimizer), clock)
    return Reports(clock, config.steps_per_print, _open_monitors(config, networks), measures, config.fp16.enabled)


def _open_monitors(config: ZeroConfig, networks: Networks) -> list[Sink]:
    """Open the monitors on the first rank of the engine and return them; an empty list on all other ranks. Collective.

    Ranks may have different sections of monitors, so every rank takes part whatever its own sections are.

    Raises:
        ConfigError: A monitor cannot be opened on the first rank. All ranks raise the same error.
    """
    together = [networks.collectives.data, *([networks.model] if networks.model is not None else [])]
    sinks: list[Sink] = []
    text = ""
    cause: Exception | None = None
    if all(network.rank == 0 for network in together):
        try:
            sinks = build_sinks(config)
        except ConfigError as error:
            text, cause = str(error), error
        except Exception as error:
            text, cause = f"a monitor cannot be opened on rank {global_rank()}: {error!r}. Set `enabled` of its section to false", error
    for network in together:  # first to the first rank of each model-parallel group, then inside each group
        text = network.broadcast_object(text, 0, "monitors")
    if text:
        raise ConfigError(text) from cause
    return sinks


def _clock(config: ZeroConfig, networks: Networks, module: nn.Module, progress: Progress) -> Clock:
    """Return the clock that ``wall_clock_breakdown``, ``memory_breakdown`` and ``flops_profiler`` request."""
    section, topology = config.flops_profiler, networks.topology
    if section is None or not section.enabled:
        return Clock(topology.device, config.wall_clock_breakdown, config.memory_breakdown)
    return ProfilingClock(topology.device, config.memory_breakdown, section, module, progress, topology.data.world)


def _measures(
    config: ZeroConfig, module: nn.Module, networks: Networks, runtime: Runtime, on_disk: Callable[[], int], clock: Clock
) -> list[Measure]:
    """Return the measures that the section ``hf_zero`` requests, in the order in which they are asked."""
    own, layers, device, model = config.hf_zero, shares_of(module), networks.topology.device, networks.model
    found: list[Measure] = []
    if own.expert_load and layers:
        together = [networks.collectives.data, *([model] if model is not None else [])]
        found.append(ExpertLoad(layers, together, own.expert_load, own.expert_load_each).measure)
    if own.step_metrics:
        sharers = model.world if model is not None else 1
        slow_ranks = SlowRanks(networks.everyone)
        metrics = StepMetrics(module, device, own, sharers, networks.collectives.blocks_host, slow_ranks, on_disk)
        clock.watchers.append(metrics.phase)
        runtime.keep(metrics)
        found.append(metrics.measure)
    if own.trace_folder is not None:
        clock.watchers.append(RecordedStep(Path(own.trace_folder), own.trace_step, global_rank(), device).phase)
    return found
