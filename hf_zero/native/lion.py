"""Lion in one pass over a flat range; with its torch reference.

Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675, algorithm 2.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hf_zero.native.passes import PassTensors, floats


class _Rule(ctypes.Structure):
    """Fields of ``struct hfz_lion_rule``."""

    _fields_ = floats("grad_factor", "update_weight", "momentum_weight", "minus_lr", "decay")


def lion_update(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    low: Tensor | None = None,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    grad_factor: float = 1.0,
    threads: int = 1,
) -> None:
    """Take one Lion step in place: ``p = p * (1 - lr * weight_decay) - lr * sign(lerp(m, g, 1 - b1))``, ``m = lerp(m, g, 1 - b2)``.

    Tensors and ``threads`` are as in ``adam_update``, ``grad_factor`` as in ``AdamRule``; ``exp_avg`` may be bf16.

    Raises:
        HfZeroError: The tensors do not fit together.
    """
    tensors = PassTensors("lion_update", master, grad, (exp_avg,), low)
    rule = _Rule(grad_factor, 1 - betas[0], 1 - betas[1], -lr, 1 - lr * weight_decay)
    if not tensors.run_native("hfz_lion", rule, threads):
        lion_reference(master, grad, exp_avg, low, lr=lr, betas=betas, weight_decay=weight_decay, grad_factor=grad_factor)


def lion_reference(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    low: Tensor | None = None,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    grad_factor: float = 1.0,
) -> None:
    """Compute ``lion_update`` in plain torch; any device, and fp64 as well."""
    tensors = PassTensors("lion_reference", master, grad, (exp_avg,), low)
    param, momentum = master.detach().view(-1), exp_avg.view(-1)
    gradient, before = tensors.flat_gradient(grad_factor), momentum.to(master.dtype)
    param.mul_(1 - lr * weight_decay).add_(torch.lerp(before, gradient, 1 - betas[0]).sign_(), alpha=-lr)
    momentum.copy_(torch.lerp(before, gradient, 1 - betas[1]))
    if low is not None:
        low.copy_(master)
