"""Connect the optimizer that accelerate puts in place of the script's, under offload, with the schedulers of the script's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.core.optimizer.sharded import REPLACES


def map_optimizer(method: Callable[..., Any], optimizer: Any) -> Any:
    """Replace ``accelerate.accelerator.map_pytorch_optim_to_deepspeed``: remember whose place the new optimizer takes; local.

    A scheduler of the script keeps the old optimizer. torch's schedulers warn that they were stepped before it unless it is marked as
    stepped too.
    """
    found = method(optimizer)
    if found is not optimizer:
        setattr(found, REPLACES, optimizer)
    return found
