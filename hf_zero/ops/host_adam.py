"""Adam and AdamW as one native pass per parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_zero.errors import UnsupportedError
from hf_zero.native.adam import AdamRule, adam_update
from hf_zero.native.library import announce
from hf_zero.ops.foreach import require_hyperparameters
from hf_zero.ops.host_optimizer import HostOptimizer, PassTensors, working_copies


class HostAdam(HostOptimizer):
    """Adam or AdamW for parameters in host memory; bit for bit ``torch.optim.AdamW(fused=True)`` on whole vectors of fp32.

    States are ``step``, ``exp_avg`` and ``exp_avg_sq``, like torch's, so a ``state_dict`` of one loads into the other.

    Args:
        params: Parameters or group dicts.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the weights.
        decoupled_weight_decay: True is AdamW; False is Adam, which adds the decay to the gradient.
        bias_correction: Divide the moments by ``1 - beta ** step``.
        moment_dtype: ``torch.float32``, or ``torch.bfloat16``, which halves the state. Increments of a bf16 moment below 1/512 of it are
            lost, so with ``betas[1]`` of 0.99 and more the second moment stops following slow changes.

    Raises:
        ValueError: A hyper-parameter out of its range.
        UnsupportedError: A group asks for amsgrad.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        moment_dtype: torch.dtype = torch.float32,
    ) -> None:
        require_hyperparameters(lr, betas, weight_decay)
        if eps < 0:
            raise ValueError(f"eps is {eps!r}; it must be at least 0")
        if moment_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"moment_dtype is {moment_dtype}; it must be torch.float32 or torch.bfloat16")
        announce()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)
        self.moment_dtype = moment_dtype
        for group in self.param_groups:  # groups of a former torch optimizer keep its flags
            if group.get("amsgrad"):
                raise UnsupportedError(f"{type(self).__name__} has no amsgrad; use torch.optim.AdamW(..., amsgrad=True)")

    def _pass(self, group: dict[str, Any], param: Tensor, tensors: PassTensors) -> None:
        dtype = self._moment_dtype_of(param)
        exp_avg, exp_avg_sq = self._state_of(param, "exp_avg", dtype), self._state_of(param, "exp_avg_sq", dtype)
        rule = AdamRule(
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            bias_correction=group["bias_correction"],
            step=self._count_step(param),
            grad_factor=tensors.grad_factor,
        )
        for piece in working_copies(tensors):
            adam_update(piece.master, piece.grad, piece.part(exp_avg), piece.part(exp_avg_sq), piece.low, rule, piece.threads)

    def _moment_dtype_of(self, param: Tensor) -> torch.dtype:
        return param.dtype if param.dtype == torch.float64 else self.moment_dtype
