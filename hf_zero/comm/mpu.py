"""The ``mpu`` object of a script, which hands over the groups of ranks that it has made; its methods are named as in Megatron."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

MODEL_GROUPS = ("get_tensor_model_parallel_group", "get_model_parallel_group")


def model_parallel_group(mpu: Any) -> dist.ProcessGroup | None:
    """The ranks that hold one model together with this one; None where the object, or None, tells of none, or counts one rank."""
    for name in MODEL_GROUPS:
        if hasattr(mpu, name):
            count = getattr(mpu, name.replace("group", "world_size"), None)
            return None if count is not None and count() == 1 else getattr(mpu, name)()
    return None
