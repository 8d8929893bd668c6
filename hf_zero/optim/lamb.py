"""LAMB: Adam's update direction, scaled per parameter by the ratio of the parameter's norm to the direction's norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hf_zero.errors import UnsupportedError
from hf_zero.ops.foreach import require_hyperparameters


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al., Large Batch Optimization for Deep Learning, arXiv 1904.00962), with the parameters of DeepSpeed's `Lamb`.

    Per step and parameter: ``m = b1 * m + (1 - b1) * g``, ``v = b2 * v + (1 - b2) * g * g``,
    ``u = m / (sqrt(v) + eps) + weight_decay * p``, ``p -= rate * ratio * u``. The ratio is ``|p| / |u|`` between ``min_coeff`` and
    ``max_coeff``, or 1 where a norm is 0. As in DeepSpeed's `FusedLamb`, the correction of the moments' bias is a factor of the rate,
    ``sqrt(1 - b2 ** step) / (1 - b1 ** step)``, and not part of ``u`` (in the paper it is). States are ``step``, and ``exp_avg`` and
    ``exp_avg_sq`` of the parameter's shape and dtype.

    Args:
        params: Parameters or group dicts.
        lr: Learning rate.
        bias_correction: Correct the moments' bias.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        eps_inside_sqrt: Add it under the root.
        weight_decay: Weight of the parameter in ``u``.
        max_grad_norm: Must be 0: gradients are clipped by the engine (`gradient_clipping`).
        max_coeff: Upper bound of the ratio.
        min_coeff: Lower bound of the ratio.
        amsgrad: Must be false.

    Raises:
        ValueError: A hyper-parameter is out of its range.
        UnsupportedError: ``amsgrad`` or ``max_grad_norm``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        require_hyperparameters(lr, betas, weight_decay)
        if eps < 0:
            raise ValueError(f"eps is {eps!r}; it must be at least 0")
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(f"min_coeff is {min_coeff!r} and max_coeff {max_coeff!r}; allowed is 0 <= min_coeff <= max_coeff")
        if amsgrad:
            raise UnsupportedError("Lamb has no amsgrad variant; leave amsgrad at false")
        if max_grad_norm:
            raise UnsupportedError(
                f"Lamb got max_grad_norm {max_grad_norm!r}: the engine clips, write gradient_clipping in the configuration"
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)
        self._coefficients: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._coefficients = []
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if param.grad is None or param.grad.is_sparse:
            raise UnsupportedError(f"Lamb got a sparse gradient for a parameter of shape {tuple(param.shape)}; use sparse=False")
        state, (beta1, beta2), eps = self.state[param], group["betas"], group["eps"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(param.grad, 1 - beta1)
        second.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        root = second.add(eps).sqrt_() if group["eps_inside_sqrt"] else second.sqrt().add_(eps)
        update = first.div(root)
        if group["weight_decay"]:
            update.add_(param, alpha=group["weight_decay"])
        norm, length = param.norm(), update.norm()
        ratio = (norm / length).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((norm == 0) | (length == 0), torch.ones_like(ratio), ratio)
        self._coefficients.append(ratio)
        rate = float(group["lr"])
        if group["bias_correction"]:
            rate *= math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        param.sub_(update.mul_(ratio * rate))

    def get_lamb_coeffs(self) -> list[float]:
        """Return the ratios of the last step, one per updated parameter."""
        return [float(ratio) for ratio in self._coefficients]
