"""Ordinary ``torch.optim`` optimizers over host memory whose steps are one native pass per parameter."""

from hf_zero.ops.host_optimizers import HostAdagrad, HostAdam, HostLion, HostSGD

__all__ = ["HostAdagrad", "HostAdam", "HostLion", "HostSGD"]
