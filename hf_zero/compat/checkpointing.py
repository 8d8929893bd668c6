"""`deepspeed.checkpointing`: activation checkpointing, over torch.utils.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from hf_zero.errors import UnsupportedError
from hf_zero.observe import warn_once

_configured = False


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Accepts DeepSpeed's settings; an option that has no effect here says so once.

    Args:
        mpu_: Model-parallel unit; None, as layers are not split.
        deepspeed_config: Accepted; the engine reads the configuration itself.
        partition_activations: Only meaningful with split layers; without effect.
        contiguous_checkpointing: Without effect: PyTorch's allocator places the checkpoints.
        num_checkpoints: Without effect, likewise.
        checkpoint_in_cpu: Not provided.
        synchronize: Without effect.
        profile: Without effect; use torch.profiler.

    Raises:
        UnsupportedError: ``checkpoint_in_cpu`` is true.
    """
    global _configured
    if checkpoint_in_cpu:
        raise UnsupportedError(
            "checkpointing.configure(checkpoint_in_cpu=True) is not provided; "
            "run the forward under torch.autograd.graph.save_on_cpu(pin_memory=True)"
        )
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "synchronize": synchronize,
        "profile": profile,
    }
    for name, value in given.items():
        if value:
            warn_once(f"checkpointing.configure({name}={value!r}) has no effect: torch.utils.checkpoint does the work")
    _configured = True


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return _configured


def reset() -> None:
    """Forgets buffers between iterations; torch.utils.checkpoint keeps none."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Runs ``function(*args)`` and recomputes it in backward instead of keeping its activations."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)
