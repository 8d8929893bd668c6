"""SGD with momentum as one native pass per parameter."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_zero.native.library import announce
from hf_zero.native.sgd import sgd_update
from hf_zero.ops.foreach import require_hyperparameters
from hf_zero.ops.host_optimizer import HostOptimizer, PassTensors, working_copies


class HostSGD(HostOptimizer):
    """SGD with momentum for parameters in host memory, with torch's arguments, state (``momentum_buffer``) and numbers.

    Args:
        params: Parameters or group dicts.
        lr: Learning rate.
        momentum: Decay of the buffer. Without momentum ``torch.optim.SGD(fused=True)`` moves less memory.
        dampening: The gradient enters the buffer times ``1 - dampening``.
        weight_decay: Decay added to the gradient.
        nesterov: Step by the gradient and the momentum to come.

    Raises:
        ValueError: A hyper-parameter out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        require_hyperparameters(lr, (0.0, 0.0), weight_decay)
        if momentum < 0:
            raise ValueError(f"momentum is {momentum!r}; it must be at least 0")
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError(f"nesterov needs momentum above 0 (it is {momentum!r}) and dampening 0 (it is {dampening!r})")
        announce()
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults)

    def _pass(self, group: dict[str, Any], param: Tensor, tensors: PassTensors) -> None:
        first = "momentum_buffer" not in self.state[param]
        momentum_buffer = self._state_of(param, "momentum_buffer")
        options = {name: group[name] for name in ("momentum", "dampening", "weight_decay", "nesterov")}
        for piece in working_copies(tensors):
            piece.run(sgd_update, piece.part(momentum_buffer), lr=float(group["lr"]), first=first, **options)
