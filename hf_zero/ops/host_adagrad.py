"""Adagrad as one native pass per parameter."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_zero.native.adagrad import adagrad_update
from hf_zero.native.library import announce
from hf_zero.ops.foreach import require_hyperparameters
from hf_zero.ops.host_optimizer import HostOptimizer, PassTensors, working_copies


class HostAdagrad(HostOptimizer):
    """Adagrad for parameters in host memory, with torch's arguments, states (``step``, ``sum``) and numbers, also for sparse gradients.

    Args:
        params: Parameters or group dicts.
        lr: Learning rate.
        lr_decay: The rate of step ``t`` is ``lr / (1 + (t - 1) * lr_decay)``.
        weight_decay: Decay added to the gradient.
        initial_accumulator_value: Initial value of ``sum``.
        eps: Added to the root of ``sum``.

    Raises:
        ValueError: A hyper-parameter out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        require_hyperparameters(lr, (0.0, 0.0), weight_decay)
        for name, value in (("lr_decay", lr_decay), ("initial_accumulator_value", initial_accumulator_value), ("eps", eps)):
            if value < 0:
                raise ValueError(f"{name} is {value!r}; it must be at least 0")
        announce()
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        super().__init__(params, defaults)

    def _dense(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        if group["weight_decay"] or not group["eps"]:
            return super()._dense(group, param, grad)
        return grad.to_dense()  # a gradient of zero changes neither the sum nor the value

    def _pass(self, group: dict[str, Any], param: Tensor, tensors: PassTensors) -> None:
        total = self._state_of(param, "sum", start=group["initial_accumulator_value"])
        lr = float(group["lr"]) / (1 + (self._count_step(param) - 1) * group["lr_decay"])
        for piece in working_copies(tensors):
            piece.run(adagrad_update, piece.part(total), lr=lr, eps=group["eps"], weight_decay=group["weight_decay"])
