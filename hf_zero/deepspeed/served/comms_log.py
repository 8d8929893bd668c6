"""Implement `deepspeed.comm.configure` and `log_summary` with ``hf_zero.comm.comms_log``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hf_zero.comm.back_end import build_collectives
from hf_zero.comm.comms_log import CommsLogSettings, CommsRow, current_log, start_log, stop_log, table_text
from hf_zero.comm.topology import build_topology
from hf_zero.config.read import read_config
from hf_zero.config.resolve import resolve
from hf_zero.observe import global_rank, warn_once


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Turn the log of collectives on or off for engines that are made later; arguments take precedence over the section ``comms_logger``.

    Args:
        deepspeed_config: Path, dict, JSON or base64 text; only its ``comms_logger`` section is read.
        enabled: Whether to record collectives.
        prof_all: Whether to record every operation.
        prof_ops: Names of the operations to record if ``prof_all`` is False.
        verbose: Whether to log every call on rank 0.
        debug: Whether to record calls separately by unit and phase.

    Raises:
        ConfigError: An operation is unknown.
    """
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    values = {name: value for name, value in given.items() if value is not None}
    written = (read_config(deepspeed_config).get("comms_logger") or {}) if deepspeed_config is not None else {}
    section = resolve({"train_micro_batch_size_per_gpu": 1, "comms_logger": {**written, **values}}, world_size=1).config.comms_logger
    if section is None or not section.enabled:
        stop_log()
        return
    start_log(CommsLogSettings.of(section))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the table of all recorded collectives, on rank 0; collective with ``show_straggler``.

    Args:
        show_straggler: Whether to compare ranks: for each operation the rank that arrived last, and how much longer this rank took.
        return_dict: Whether to return the numbers too, on every rank.

    Returns:
        With ``return_dict`` a dict: operation -> bytes of a message -> count, milliseconds and Gbit/s; otherwise None.
    """
    log = current_log()
    if log is None:
        warn_once("log_summary(): nothing is recorded; set comms_logger.enabled in the configuration before initialize()")
        return {} if return_dict else None
    by_rank = None
    if show_straggler and dist.is_initialized():
        by_rank = build_collectives(build_topology()).gather_objects(log.seconds_by_kind(), "traffic log")
    rows = log.rows(by_rank)
    if global_rank() == 0:
        print(table_text(rows) if rows else "comms_logger: no collective was recorded (one rank has none)", flush=True)
    return _numbers(rows) if return_dict else None


def _numbers(rows: list[CommsRow]) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for row in rows:
        name = f"{row.kind.operation} ({row.kind.caller})" if row.kind.caller else row.kind.operation
        entry = {
            "count": row.tally.count,
            "total_latency_ms": 1e3 * row.tally.seconds,
            "avg_latency_ms": 1e3 * row.average,
            "waited_ms": 1e3 * row.tally.waited,
            "tput_avg_gbps": row.algorithm_bandwidth * 8e-9,
            "busbw_avg_gbps": row.bus_bandwidth * 8e-9,
        }
        if row.fastest is not None:
            entry.update(straggler_ms=1e3 * (row.tally.seconds - row.least), last_to_arrive=row.fastest)
        numbers.setdefault(name, {})[row.kind.nbytes] = entry
    return numbers
