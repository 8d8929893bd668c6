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
    """Lion with decoupled weight decay for parameters in host memory; arguments and numbers of ``hf_zero.optim.lion.Lion``.

    It has one state, ``exp_avg``.

    Args:
        params: Parameters or group dicts.
        lr: Learning rate.
        betas: Interpolation of the update, decay of the momentum.
        weight_decay: Decoupled weight decay.
        moment_dtype: ``torch.float32``, or ``torch.bfloat16``, which halves the state; it is widened for a step and rounded once, to
            nearest even.

    Raises:
        ValueError: A hyper-parameter out of its range, or another moment type.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        moment_dtype: torch.dtype = torch.float32,
    ) -> None:
        require_hyperparameters(lr, betas, weight_decay)
        if moment_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"moment_dtype is {moment_dtype}; it must be torch.float32 or torch.bfloat16")
        self.moment_dtype = moment_dtype
        announce()
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _pass(self, group: dict[str, Any], param: Tensor, tensors: PassTensors) -> None:
        exp_avg = self._state_of(param, "exp_avg", self.moment_dtype)
        for piece in working_copies(tensors):
            moment = piece.part(exp_avg)
            wide = moment if moment.dtype == piece.master.dtype else moment.to(piece.master.dtype)
            piece.run(lion_update, wide, lr=float(group["lr"]), betas=group["betas"], weight_decay=group["weight_decay"])
            if wide is not moment:
                moment.copy_(wide)
