"""Make the reports of one engine: its clock, and the numbers that it gives to monitors, from every feature that measures something."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import nn

from hf_zero.assembly.networks import Networks
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.core.holdings import bytes_on_disk
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.runtime import Runtime
from hf_zero.core.step.progress import Clock, Progress, Reports
from hf_zero.core.units.unit import Unit
from hf_zero.expert_parallel.apply import shares_of
from hf_zero.expert_parallel.load import ExpertLoad
from hf_zero.metrics import build_sinks
from hf_zero.observe import global_rank
from hf_zero.profiling.recordings import RecordedStep
from hf_zero.profiling.slow_ranks import SlowRanks
from hf_zero.profiling.step_metrics import StepMetrics
from hf_zero.profiling.step_profile import ProfilingClock

Measure = Callable[[int], Mapping[str, float]]


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
    sinks = build_sinks(config) if networks.topology.data.rank == 0 else []
    return Reports(clock, config.steps_per_print, sinks, measures)


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
        clock.watchers.append(RecordedStep(Path(own.trace_folder), own.trace_step, global_rank(), module, device).phase)
    return found
