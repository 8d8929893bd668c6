"""DeepSpeed's logging helpers for scripts: on chosen ranks, and of memory."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Sequence

import torch

from hf_zero.observe import global_rank, logger


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


def see_memory_usage(message: str, force: bool = False, ranks: Sequence[int] | None = None) -> None:
    """Logs the memory of the accelerator, where there is one, and the most this process has had on the host, in GB.

    Args:
        message: What the program does now.
        force: Log at all; scripts leave their calls in and switch them with this.
        ranks: Ranks that log it; None is rank 0.
    """
    if not force:
        return
    # ru_maxrss is in kilobytes on Linux, in bytes on macOS.
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    text = f"{message}: host max {host / 2**30:.2f} GB"
    if torch.cuda.is_available():
        text += f", allocated {torch.cuda.memory_allocated() / 2**30:.2f} GB, max {torch.cuda.max_memory_allocated() / 2**30:.2f} GB"
    log_dist(text, ranks if ranks is not None else [0])
