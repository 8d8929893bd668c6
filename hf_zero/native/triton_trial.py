"""Decide whether Triton's kernels are used on a device.

[Note: trying a kernel first] Triton needs more than its package: a C compiler for its launcher, and a driver that accepts its code. So the
first use on a device encodes a small vector and compares it with plain torch. If that fails, torch's operations are used, and a log line
gives the reason.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch

from hf_zero.native.library import TRITON_VARIABLE
from hf_zero.observe import log_rank0


def serves(device: torch.device, what: str, agrees: Callable[[torch.device], bool]) -> bool:
    """Return whether the kernels are used for tensors on ``device``: on a GPU where Triton works, unless ``HF_ZERO_TRITON`` is 0.

    Args:
        device: Device of the tensors.
        what: Purpose of the kernels, for messages.
        agrees: Function that returns whether the kernels give torch's bits on the device, or raises Triton's error; called once per device.
    """
    return device.type == "cuda" and os.environ.get(TRITON_VARIABLE) != "0" and _works(device, what, agrees)


@functools.cache
def _works(device: torch.device, what: str, agrees: Callable[[torch.device], bool]) -> bool:
    try:
        same = agrees(device)
    except Exception as error:  # any error: torch's operations can be used instead
        log_rank0("%s: Triton does not work on %s (%s: %s); using torch's operations", what, device, type(error).__name__, error)
        return False
    if not same:
        log_rank0("%s: Triton's kernels and torch's operations give different results on %s; using torch's operations", what, device)
    return same
