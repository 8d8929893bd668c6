"""Adam without bias correction, for ``bias_correction: false``, which torch's Adam cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_zero.ops.foreach import buckets, require_hyperparameters, signed


class UncorrectedAdam(torch.optim.Optimizer):
    """Adam or AdamW without the division of the moments by ``1 - beta ** step``.

    Per step: ``m = b1 * m + (1 - b1) * g``, ``v = b2 * v + (1 - b2) * g * g``, ``p -= lr * m / (sqrt(v) + eps)``. The
    states are ``exp_avg`` and ``exp_avg_sq``, of the parameter's shape and dtype. Every operation is element-wise.

    Args:
        params: Parameters or group dicts.
        lr: Learning rate.
        betas: Decay factors of the two moments.
        eps: Number added to the root of the second moment.
        weight_decay: Decoupled (``p *= 1 - lr * weight_decay``) or added to the gradient.
        decoupled_weight_decay: True for AdamW's weight decay, False for Adam's.
        foreach: False updates parameter by parameter; None and True update lists in one call.
        maximize: Maximize the loss instead of minimizing it.

    Raises:
        ValueError: A hyper-parameter is out of its range.
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
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        require_hyperparameters(lr, betas, weight_decay)
        if eps < 0:
            raise ValueError(f"eps is {eps!r}; it must be at least 0")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "foreach": foreach,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            for params, raw_grads, (firsts, seconds) in buckets(self, group, ("exp_avg", "exp_avg_sq")):
                grads = signed(raw_grads, group)
                if group["weight_decay"] and group["decoupled_weight_decay"]:
                    torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
                elif group["weight_decay"]:
                    grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
                torch._foreach_lerp_(firsts, grads, 1 - beta1)
                torch._foreach_mul_(seconds, beta2)
                torch._foreach_addcmul_(seconds, grads, grads, value=1 - beta2)
                roots = torch._foreach_sqrt(seconds)
                torch._foreach_add_(roots, group["eps"])
                torch._foreach_addcdiv_(params, firsts, roots, value=-lr)
        return loss
