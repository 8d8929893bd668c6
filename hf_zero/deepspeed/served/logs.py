"""Provide DeepSpeed's logging functions for scripts: on selected ranks, and of memory."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_zero.comm.process_groups import default_device
from hf_zero.errors import ConfigError
from hf_zero.observe import global_rank, logger, warn_once
from hf_zero.system import own_files


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on the given ranks.

    Args:
        message: The text.
        ranks: Global ranks that log it; None, or a list with -1, means all ranks.
        level: Level of the record.
    """
    rank = global_rank()
    if ranks is None or rank in ranks or -1 in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print ``message`` on the given ranks, whatever the log level; None, or a list with -1, means all ranks."""
    rank = global_rank()
    if ranks is None or rank in ranks or -1 in ranks:
        print(f"[Rank {rank}] {message}", flush=True)


def print_json_dist(message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | os.PathLike[str] | None = None) -> None:
    """Write ``message``, with this rank added, to a file as JSON on the given ranks; None, or a list with -1, means all ranks.

    Raises:
        ConfigError: No path is given.
    """
    if path is None:
        raise ConfigError("print_json_dist(path=None): name the file to write")
    rank = global_rank()
    if ranks is None or rank in ranks or -1 in ranks:
        own_files.write_text(Path(path), json.dumps({**message, "rank": rank}))


def warning_once(message: str, *args: Any) -> None:
    """Log a warning, once per process for the same text."""
    warn_once(message % args if args else message)


log_levels = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}
"""Names of the levels, as the configuration's ``log_level`` has them."""


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the number of a log level.

    Raises:
        ConfigError: The level is unknown.
    """
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise ConfigError(f"{log_level_str!r} is not a log level; allowed are {', '.join(log_levels)}")
    return int(level)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger (default: the package's) and of its handlers."""
    chosen = custom_logger or logger
    chosen.setLevel(get_log_level_from_string(log_level_str))
    for handler in chosen.handlers:
        handler.setLevel(chosen.level)


def get_current_level() -> int:
    """Return the level of the package's logger."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Return whether the package's logger has this level or a more verbose one."""
    return logger.getEffectiveLevel() <= get_log_level_from_string(max_log_level_str)


class LoggerFactory:
    """A factory of loggers that write to standard output."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.INFO) -> logging.Logger:
        """Return a logger of this name and level with its own handler.

        Raises:
            ConfigError: ``name`` is None.
        """
        if not name:
            raise ConfigError("LoggerFactory.create_logger(name=None): give the logger a name")
        made = logging.getLogger(name)
        made.setLevel(level)
        made.propagate = False
        if not made.handlers:
            handler = logging.StreamHandler(stream=sys.stdout)
            handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"))
            made.addHandler(handler)
        return made


def see_memory_usage(message: str, force: bool = False, ranks: Sequence[int] | None = None) -> None:
    """Log the memory of the accelerator, if there is one, and the peak memory of this process on the host, in GB.

    Args:
        message: Text before the numbers, usually the current step of the program.
        force: Whether to log; False does nothing, so that scripts can switch their calls off.
        ranks: Ranks that log; None is rank 0.
    """
    if not force:
        return
    # ru_maxrss is in kilobytes on Linux, in bytes on macOS.
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    text = f"{message}: host max {host / 2**30:.2f} GB"
    device = default_device()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        used, peak = module.memory_allocated(device), module.max_memory_allocated(device)
        text += f", allocated {used / 2**30:.2f} GB, max {peak / 2**30:.2f} GB"
    log_dist(text, ranks if ranks is not None else [0])
