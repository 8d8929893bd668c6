"""Optimizers whose steps are single native passes over host memory, as ordinary ``torch.optim`` optimizers."""

from hf_zero.ops.host_adam import HostAdam

__all__ = ["HostAdam"]
