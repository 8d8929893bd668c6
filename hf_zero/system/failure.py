"""Describe the rank of a job that failed first: the kinds of failures, and the lines that a launcher prints."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

SETTINGS, INTERRUPTED, FOLLOWS, OTHER = "settings", "interrupted", "follows", "other"
"""Kinds of failures: a wrong setting, a signal, the end of another rank, anything else."""
PIPE = "HF_ZERO_REPORT"
"""Variable that names the pipe for the report, on a node of `hf-zero launch` over ssh."""
_LONGEST_LINE = 500


def describe(failure: Mapping[str, Any], host: str = "") -> str:
    """Return the lines that tell which rank ended first, and why.

    Args:
        failure: Failure as a report has it.
        host: Name of the host of this rank; "" if all ranks are on one host.
    """
    ended = f"[hf_zero] rank {failure['rank']}{f' on {host}' if host else ''} ended first, with exit status {failure['status']}"
    if failure["kind"] == SETTINGS:
        return f"{ended}: see its {failure['error']} above"
    return "\n".join([f"{ended}:", *failure["cause"]])


def is_handed_over(failure: dict[str, Any]) -> bool:
    """Write ``failure`` into the pipe of this node's agent, in one piece that the pipe holds; return whether there is one."""
    place = os.environ.get(PIPE)
    if not place:
        return False
    if "cause" in failure:
        failure["cause"] = [line[:_LONGEST_LINE] for line in failure["cause"]]
    try:
        pipe = os.open(place, os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, json.dumps(failure).encode())
        os.close(pipe)
    except OSError:
        return False
    return True
