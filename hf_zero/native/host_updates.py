"""Update a flat range with Adam, AdamW, SGD, Adagrad or Lion in one fused pass, with unscaling, clipping and the 16-bit copy.

Each has a torch reference beside it, which is used without the native library. Sources: Kingma and Ba, "Adam", arXiv:1412.6980; Loshchilov
and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101; Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online
Learning and Stochastic Optimization", JMLR 12 (2011); Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675,
algorithm 2 (Lion).

The kernel of Adam keeps the order of operations of ``torch.optim.AdamW(fused=True)`` on an x86 CPU. It gives the same bits for fp32
tensors, on every processor and wherever a range is cut. (torch's own loop rounds the last ``numel % 16`` elements differently, and, on
aarch64, the last bit of some second moments.)
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_zero.native.library import TRITON_VARIABLE
from hf_zero.native.passes import PassTensors, floats

# Kinds of weight decay, numbered as in ``hf_zero_kernels.h``.
NO_DECAY, L2, DECOUPLED = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class AdamRule:
    """Rule of one step of Adam or AdamW.

    Attributes:
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Term added to the root of the second moment.
        weight_decay: Decay of the weights.
        decoupled: True decays like AdamW, False adds the decay to the gradient.
        bias_correction: Divide the moments by ``1 - beta ** step``.
        step: Number of this step, from 1.
        grad_factor: Factor of the gradient, applied first: unscaling and clipping together.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: bool = True
    step: int
    grad_factor: float = 1.0

    @property
    def minus_step(self) -> float:
        """Return the factor of the quotient of first moment and root: the negative step size."""
        return -(self.lr / (1 - self.betas[0] ** self.step if self.bias_correction else 1.0))

    @property
    def root_divisor(self) -> float:
        """Return the divisor of the second moment's square root: the bias correction of step ``step``."""
        return math.sqrt(1 - self.betas[1] ** self.step if self.bias_correction else 1.0)

    @property
    def decay(self) -> float:
        """Return the factor of the weights: the fraction that is kept, or, for L2, the fraction that is added to the gradient."""
        return 1 - self.lr * self.weight_decay if self.decoupled else float(self.weight_decay)

    @property
    def decay_mode(self) -> int:
        """Return ``NO_DECAY``, ``L2`` or ``DECOUPLED``."""
        return NO_DECAY if self.weight_decay == 0 else DECOUPLED if self.decoupled else L2


_BLOCK = 1024


def is_available() -> bool:
    """Return whether Triton can be imported."""
    return _kernel() is not None


@functools.cache
def _kernel() -> Any:
    """Return the kernel, compiled at its first launch; None without Triton."""
    try:
        from hf_zero.native.triton_kernels import adam
    except ImportError:
        return None
    return adam


def adam_triton(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, low: Tensor | None, rule: AdamRule) -> None:
    """Compute ``adam_update`` for fp32 masters on a GPU; with ``TRITON_INTERPRET=1`` in host memory, for tests.

    Raises:
        HfZeroError: The tensors do not fit together.
        ImportError: Triton is not installed.
    """
    PassTensors("adam_triton", master, grad, (exp_avg, exp_avg_sq), low)
    kernel = _kernel()
    if kernel is None:
        raise ImportError("adam_triton needs the package triton, which comes with torch for CUDA")
    count = master.numel()
    if count == 0:
        return
    kernel[(-(-count // _BLOCK),)](
        master, grad, exp_avg, exp_avg_sq, master if low is None else low, count,
        float(rule.grad_factor), 1 - rule.betas[0], rule.betas[1], 1 - rule.betas[1], rule.root_divisor, float(rule.eps),
        rule.minus_step, rule.decay, DECAY_MODE=rule.decay_mode, HAS_LOW=low is not None, BLOCK=_BLOCK,
    )  # fmt: skip


# torch's fused kernel rounds whole vectors of this many elements in one way; see adam_reference.
_VECTOR = 16


class _Rule(ctypes.Structure):
    """Fields of ``struct hfz_adam_rule``."""

    _fields_ = [
        *floats("grad_factor", "mean_weight", "beta2", "square_weight", "root_divisor", "eps", "minus_step", "decay"),
        ("decay_mode", ctypes.c_int32),
    ]


def adam_update(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    low: Tensor | None,
    rule: AdamRule,
    threads: int = 1,
) -> None:
    """Take one Adam step in place, in one pass over memory.

    Args:
        master: fp32, contiguous, any shape; updated.
        grad: fp32, bf16 or fp16, with the same number of elements; only read.
        exp_avg: First moment, fp32 or bf16; updated. Computed in fp32 and rounded to nearest even when it is bf16.
        exp_avg_sq: Second moment, of the dtype of ``exp_avg``; updated.
        low: bf16 or fp16 copy of the result, written in the same pass; None writes none.
        rule: Hyper-parameters.
        threads: Maximum number of threads. The result does not depend on it.

    Raises:
        HfZeroError: The tensors do not fit together.
    """
    tensors = PassTensors("adam_update", master, grad, (exp_avg, exp_avg_sq), low)
    structure = _Rule(
        grad_factor=rule.grad_factor,
        mean_weight=1 - rule.betas[0],
        beta2=rule.betas[1],
        square_weight=1 - rule.betas[1],
        root_divisor=rule.root_divisor,
        eps=rule.eps,
        minus_step=rule.minus_step,
        decay=rule.decay,
        decay_mode=rule.decay_mode,
    )
    if not tensors.run_native("hfz_adam", structure, threads):
        on_gpu = master.device.type == "cuda" and os.environ.get(TRITON_VARIABLE) == "1" and master.dtype == torch.float32
        serve = adam_triton if on_gpu and is_available() else adam_reference
        serve(master, grad, exp_avg, exp_avg_sq, low, rule)


def adam_reference(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, low: Tensor | None, rule: AdamRule) -> None:
    """Compute ``adam_update`` by torch's fused kernel with casts around it; any device, and also completely in fp64.

    torch rounds elements outside whole vectors differently, so the last elements are computed in a vector of their own. Then this
    result, too, does not depend on where a range is cut, and equals the native kernel's.
    """
    tensors = PassTensors("adam_reference", master, grad, (exp_avg, exp_avg_sq), low)
    function: Callable[..., None] = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
    # An infinite step count makes both corrections exactly 1.
    count = torch.tensor(float(rule.step) if rule.bias_correction else math.inf, dtype=torch.float32, device=master.device)
    options: dict[str, Any] = {"lr": float(rule.lr), "beta1": rule.betas[0], "beta2": rule.betas[1]}
    options |= {"weight_decay": rule.weight_decay, "eps": rule.eps}
    flat = [master.detach().view(-1), tensors.flat_gradient(rule.grad_factor), exp_avg.view(-1), exp_avg_sq.view(-1)]
    rest = master.numel() % _VECTOR if master.device.type == "cpu" else 0
    whole = master.numel() - rest
    for part in [slice(0, whole), slice(whole, None)] if rest else [slice(None)]:
        pad = -flat[0][part].numel() % _VECTOR if rest else 0
        wide = [tensor[part].to(master.dtype) for tensor in flat]
        wide = [torch.nn.functional.pad(tensor, (0, pad)) for tensor in wide] if pad else wide
        function(*([tensor] for tensor in wide), [], [count], amsgrad=False, maximize=False, **options)
        for given, result in zip(flat, wide, strict=True):
            if given is not flat[1] and given[part].data_ptr() != result.data_ptr():
                given[part].copy_(result[: given[part].numel()])
    if low is not None:
        low.copy_(master)


class _SgdRule(ctypes.Structure):
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
    rule = _SgdRule(grad_factor, -lr, momentum, 1 - dampening, weight_decay, int(first), int(nesterov))
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


class _AdagradRule(ctypes.Structure):
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
    rule = _AdagradRule(grad_factor, lr, eps, weight_decay)
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


class _LionRule(ctypes.Structure):
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
    rule = _LionRule(grad_factor, 1 - betas[0], 1 - betas[1], -lr, 1 - lr * weight_decay)
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
