"""DeepSpeed's logging helper for scripts that print on chosen ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

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
