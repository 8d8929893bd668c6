"""Adagrad in one pass over a flat range; with its torch reference.

Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", JMLR 12 (2011).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hf_zero.native.passes import PassTensors, floats


class _Rule(ctypes.Structure):
    """Fields of ``struct hfz_adagrad_rule``."""

    _fields_ = floats("grad_factor", "lr", "eps", "decay")


def adagrad_update(
    master: Tensor,
    grad: Tensor,
    total: Tensor,
    low: Tensor | None = None,
    *,
    lr: float,
    eps: float,
    weight_decay: float,
    grad_factor: float = 1.0,
    threads: int = 1,
) -> None:
    """Take one Adagrad step in place: ``g += weight_decay * p``, ``total += g * g``, ``p -= lr * g / (sqrt(total) + eps)``.

    Tensors and ``threads`` are as in ``adam_update``, ``grad_factor`` as in ``AdamRule``; ``total`` may be bf16.
    The caller computes the decay of the rate and passes it as ``lr``.

    Raises:
        HfZeroError: The tensors do not fit together.
    """
    tensors = PassTensors("adagrad_update", master, grad, (total,), low)
    rule = _Rule(grad_factor, lr, eps, weight_decay)
    if not tensors.run_native("hfz_adagrad", rule, threads):
        adagrad_reference(master, grad, total, low, lr=lr, eps=eps, weight_decay=weight_decay, grad_factor=grad_factor)


def adagrad_reference(
    master: Tensor,
    grad: Tensor,
    total: Tensor,
    low: Tensor | None = None,
    *,
    lr: float,
    eps: float,
    weight_decay: float,
    grad_factor: float = 1.0,
) -> None:
    """Compute ``adagrad_update`` in plain torch; any device, and fp64 as well. Products and sums are rounded separately here."""
    tensors = PassTensors("adagrad_reference", master, grad, (total,), low)
    param, sums = master.detach().view(-1), total.view(-1)
    gradient = tensors.flat_gradient(grad_factor)
    if weight_decay:
        gradient = torch.add(gradient, param, alpha=weight_decay)
    wide = torch.addcmul(sums.to(master.dtype), gradient, gradient)
    sums.copy_(wide)
    param.addcdiv_(gradient, wide.sqrt().add_(eps), value=-lr)
    if low is not None:
        low.copy_(master)
