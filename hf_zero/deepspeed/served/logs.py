"""DeepSpeed's logging helpers for scripts: on chosen ranks, and of memory."""

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

from hf_zero.comm.device import default_device
from hf_zero.errors import ConfigError
from hf_zero.observe import global_rank, logger, warn_once
from hf_zero.system import own_files


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs ``message`` on the given ranks.

    Args:
        message: The text.
        ranks: Global ranks that log it; None, or -1 among them, means all.
        level: Level of the record.
    """
    rank = global_rank()
    if ranks is None or rank in ranks or -1 in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Prints ``message`` on the given ranks, whatever the level of the log; None, or -1 among them, means all."""
    rank = global_rank()
    if ranks is None or rank in ranks or -1 in ranks:
        print(f"[Rank {rank}] {message}", flush=True)


def print_json_dist(message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | os.PathLike[str] | None = None) -> None:
    """Writes ``message``, with this rank in it, to a file on the given ranks; None, or -1 among them, means all.

    Raises:
        ConfigError: There is no path.
    """
    if path is None:
        raise ConfigError("print_json_dist(path=None): name the file to write")
    rank = global_rank()
    if ranks is None or rank in ranks or -1 in ranks:
        own_files.write_text(Path(path), json.dumps({**message, "rank": rank}))


def warning_once(message: str, *args: Any) -> None:
    """Warns once per process for the same text."""
    warn_once(message % args if args else message)


log_levels = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}
"""Names of the levels, as the configuration's ``log_level`` has them."""


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the number of a level.

    Raises:
        ConfigError: There is no such level.
    """
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise ConfigError(f"{log_level_str!r} is no level of the log; there are {', '.join(log_levels)}")
    return int(level)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Sets the level of the package's log, or of another, and of its handlers."""
    chosen = custom_logger or logger
    chosen.setLevel(get_log_level_from_string(log_level_str))
    for handler in chosen.handlers:
        handler.setLevel(chosen.level)


def get_current_level() -> int:
    """Return the level of the package's log."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Return whether the package's log is at this level or a more talkative one."""
    return logger.getEffectiveLevel() <= get_log_level_from_string(max_log_level_str)


class LoggerFactory:
    """Makes loggers that write to standard output."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.INFO) -> logging.Logger:
        """Return a logger of that name and level with a handler of its own.

        Raises:
            ConfigError: There is no name.
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
    """Logs the memory of the accelerator, where there is one, and the most this process has had on the host, in GB.

    Args:
        message: Description of the program's present step.
        force: Log at all; scripts leave their calls in and switch them with this.
        ranks: Ranks that log it; None is rank 0.
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
