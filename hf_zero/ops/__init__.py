"""Optimizers whose steps are single native passes over host memory, as ordinary ``torch.optim`` optimizers."""

from hf_zero.ops.host_adagrad import HostAdagrad
from hf_zero.ops.host_adam import HostAdam
from hf_zero.ops.host_lion import HostLion
from hf_zero.ops.host_sgd import HostSGD

__all__ = ["HostAdagrad", "HostAdam", "HostLion", "HostSGD"]
