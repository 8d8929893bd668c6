"""Lion: the sign of an interpolated momentum as the update.

Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, arXiv:2302.06675, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_zero.ops.foreach import buckets, require_hyperparameters, signed


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay; its one state, ``exp_avg``, has the parameter's shape and dtype.

    Per step: ``p -= lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p)``, then ``m = b2 * m + (1 - b2) * g``. Every
    operation is element-wise, so shards update exactly as whole tensors.

    Args:
        params: Parameters or group dicts.
        lr: Learning rate; the paper advises 3 to 10 times less than for AdamW.
        betas: Interpolation of the update, decay of the momentum. The default is DeepSpeed's; the paper's is (0.9, 0.99).
        weight_decay: Decoupled weight decay.
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
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        require_hyperparameters(lr, betas, weight_decay)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "foreach": foreach, "maximize": maximize}
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
            for params, raw_grads, (momenta,) in buckets(self, group, ("exp_avg",)):
                grads = signed(raw_grads, group)
                updates = torch._foreach_lerp(momenta, grads, 1 - beta1)
                torch._foreach_sign_(updates)
                if group["weight_decay"]:
                    torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
                torch._foreach_add_(params, updates, alpha=-lr)
                torch._foreach_lerp_(momenta, grads, 1 - beta2)
        return loss
