"""Lion as one native pass per parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_zero.native.library import announce
from hf_zero.native.lion import lion_update
from hf_zero.ops.foreach import require_hyperparameters
from hf_zero.ops.host_optimizer import HostOptimizer, PassTensors, working_copies


class HostLion(HostOptimizer):
    """Lion with decoupled weight decay for parameters in host memory; the numbers of ``hf_zero.optim.lion.Lion``, whose arguments it has.

    One state, ``exp_avg``.

    Args:
        params: Parameters or group dicts.
        lr: Learning rate.
        betas: Interpolation of the update, decay of the momentum.
        weight_decay: Decoupled weight decay.

    Raises:
        ValueError: A hyper-parameter out of its range.
    """

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0) -> None:
        require_hyperparameters(lr, betas, weight_decay)
        announce()
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _pass(self, group: dict[str, Any], param: Tensor, tensors: PassTensors) -> None:
        dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
        exp_avg = self._state_of(param, "exp_avg", dtype)
        for piece in working_copies(tensors):
            lion_update(
                piece.master,
                piece.grad,
                piece.part(exp_avg),
                piece.low,
                lr=float(group["lr"]),
                betas=group["betas"],
                weight_decay=group["weight_decay"],
                grad_factor=piece.grad_factor,
                threads=piece.threads,
            )
