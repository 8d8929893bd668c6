"""Ordinary ``torch.optim`` optimizers over host memory whose steps are one native pass per parameter."""

from hf_zero.ops.host_adagrad import HostAdagrad
from hf_zero.ops.host_adam import HostAdam
from hf_zero.ops.host_lion import HostLion
from hf_zero.ops.host_sgd import HostSGD

__all__ = ["HostAdagrad", "HostAdam", "HostLion", "HostSGD"]
