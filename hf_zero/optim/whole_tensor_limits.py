"""Where optimizers that need whole tensors cannot run."""

from __future__ import annotations

import torch

from hf_zero.errors import UnsupportedError
from hf_zero.optim.elementwise import whole_tensor_reason


def check_whole_tensors(inner: torch.optim.Optimizer, split: bool, offload_device: str) -> None:
    """Refuses combinations under which no rank has a whole parameter, or its state would not be where the configuration says.

    Args:
        inner: The optimizer.
        split: Several ranks hold one model together (tensor parallelism).
        offload_device: `zero_optimization.offload_optimizer.device`.

    Raises:
        UnsupportedError: Tensor parallelism, or ``offload_optimizer`` to files.
    """
    kind = type(inner).__name__
    reason = whole_tensor_reason(type(inner)) or "it looks at whole parameters"
    if split:
        raise UnsupportedError(
            f"optimizer {kind} with tensor parallelism is not provided: {reason}, and each rank of a group has a slice. Use an "
            "element-wise optimizer (AdamW, Lion, SGD ...), or data parallelism alone"
        )
    if offload_device == "nvme":
        raise UnsupportedError(
            f"optimizer {kind} with zero_optimization.offload_optimizer.device nvme is not provided: {reason}, and files hold states of "
            "flat shards. Set the device to cpu or none, or use an element-wise optimizer (AdamW, Lion, SGD ...)"
        )
