"""Write the log lines about a configuration and an engine, and start the records that the configuration requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zero import __version__
from hf_zero.comm.comms_log import CommsLogSettings, start_log
from hf_zero.comm.topology import Topology
from hf_zero.config.batch import MICRO, TOTAL
from hf_zero.config.resolve import ResolvedConfig
from hf_zero.core.stages import StagePolicy
from hf_zero.core.units.unit import Unit
from hf_zero.observe import log_rank0, logger, warn_once
from hf_zero.offload.policy import describe_offload
from hf_zero.system.sizes import size_text


def announce(resolved: ResolvedConfig) -> None:
    """Log warnings and notes about a configuration, set the log's level and start the log of collectives."""
    for warning in resolved.warnings:
        warn_once(warning)
    if resolved.origin.get(MICRO) == "default":
        warn_once(f"`{MICRO}` is not set and cannot be derived from other keys; using 1. Set it, or `{TOTAL}`")
    if resolved.config.log_level is not None:
        logger.setLevel(resolved.config.log_level.upper())
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
    answers: str,
) -> str:
    """Return one line that says that the engine is on, and with which settings. Users search logs for its first two words.

    Args:
        resolved: The configuration.
        units: Units of the engine.
        stage: The stage.
        topology: Axes of the ranks.
        optimizer: The inner optimizer; None for an engine that only runs forward.
        answers: The package that ``import deepspeed`` finds.
    """
    states = sum(unit.shard.nbytes for unit in units)
    masters = sum(unit.master.nbytes for unit in units if unit.master is not None and unit.master is not unit.shard)
    dtypes = sorted({str(unit.layout.dtype).removeprefix("torch.") for unit in units}) or ["no units"]
    groups = f" in {topology.replicate.world} shard groups of {topology.world}" if topology.replicate is not None else ""
    training = [] if optimizer is None else [_batch(resolved), _clipping(resolved), type(optimizer).__name__]
    return ", ".join(
        [
            f"DeepSpeed info: ZeRO stage {stage.stage} of hf_zero {__version__} ({answers}) on {topology.data.world} rank(s){groups}",
            *(training or ["no optimizer"]),
            *dtypes,
            describe_offload(resolved.config.zero_optimization, stage).removeprefix(", ") or "no offload",
            f"{len(units)} units",
            f"{sum(unit.layout.numel for unit in units):,} parameters",
            f"{size_text(states + masters, '.1f', 'MiB')} of shards and masters on this rank",
        ]
    )


def _batch(resolved: ResolvedConfig) -> str:
    batch = resolved.batch
    return f"global batch {batch.total} = {batch.micro} per rank x {batch.accumulation} micro-steps x {batch.world_size} ranks with data"


def _clipping(resolved: ResolvedConfig) -> str:
    """Return the clipping norm as text, with a remark if it is a default."""
    norm, origin = resolved.config.gradient_clipping, resolved.origin.get("gradient_clipping", "default")
    return (f"clipping at {norm:g}" if norm else "no clipping") + (" (DeepSpeed's default)" if origin == "default" else "")
