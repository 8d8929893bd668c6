"""SGD with momentum in one pass over a flat range; with its torch reference."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hf_zero.native.passes import PassTensors, floats


class _Rule(ctypes.Structure):
    """Fields of ``struct hfz_sgd_rule``."""

    _fields_ = [
        *floats("grad_factor", "minus_lr", "momentum", "grad_weight", "decay"),
        ("first", ctypes.c_int32),
        ("nesterov", ctypes.c_int32),
    ]


def sgd_update(
    master: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    low: Tensor | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
    grad_factor: float = 1.0,
    threads: int = 1,
) -> None:
    """Take one step of SGD with momentum in place, like torch.optim.SGD: the first step sets the buffer to the gradient.

    ``g += weight_decay * p``, ``m = momentum * m + (1 - dampening) * g``, ``p -= lr * (g + momentum * m if nesterov else m)``.
    Tensors and ``threads`` are as in ``adam_update``, ``grad_factor`` as in ``AdamRule``; ``momentum_buffer`` may be bf16.

    Raises:
        HfZeroError: The tensors do not fit together.
    """
    tensors = PassTensors("sgd_update", master, grad, (momentum_buffer,), low)
    rule = _Rule(grad_factor, -lr, momentum, 1 - dampening, weight_decay, int(first), int(nesterov))
    if not tensors.run_native("hfz_sgd", rule, threads):
        sgd_reference(
            master,
            grad,
            momentum_buffer,
            low,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            first=first,
            grad_factor=grad_factor,
        )


def sgd_reference(
    master: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    low: Tensor | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
    grad_factor: float = 1.0,
) -> None:
    """Compute ``sgd_update`` in plain torch; any device, and fp64 as well. Products and sums are rounded separately here."""
    tensors = PassTensors("sgd_reference", master, grad, (momentum_buffer,), low)
    param, buffer = master.detach().view(-1), momentum_buffer.view(-1)
    gradient = tensors.flat_gradient(grad_factor)
    if weight_decay:
        gradient = torch.add(gradient, param, alpha=weight_decay)
    moved = gradient.clone() if first else torch.add(buffer.to(master.dtype) * momentum, gradient, alpha=1 - dampening)
    buffer.copy_(moved)
    param.add_(torch.add(gradient, moved, alpha=momentum) if nesterov else moved, alpha=-lr)
    if low is not None:
        low.copy_(master)
