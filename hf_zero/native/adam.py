"""One fused pass of unscale, clip, Adam or AdamW and 16-bit copy over a flat range, and its torch reference.

Kingma and Ba, "Adam", arXiv:1412.6980; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101.

The native kernel keeps the order of operations of ``torch.optim.AdamW(fused=True)`` on a CPU and gives its bits for fp32 tensors,
on every instruction set and wherever a range is cut. (torch's own loop rounds the last ``numel % 16`` elements differently.)
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.errors import HfZeroError
from hf_zero.native.library import ELEMENT_TYPES, announce, library
from hf_zero.native.slices import for_slices

_MOMENT_TYPES = (torch.float32, torch.bfloat16)
_LOW_TYPES = (torch.bfloat16, torch.float16)
# torch's fused kernel treats whole vectors of this many elements alike; see adam_reference.
_VECTOR = 16


class _Rule(ctypes.Structure):
    """``struct hfz_adam_rule``."""

    _fields_ = [
        ("grad_factor", ctypes.c_float),
        ("mean_weight", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("square_weight", ctypes.c_float),
        ("root_divisor", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("minus_step", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("decay_mode", ctypes.c_int32),
    ]


def adam_update(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    low: Tensor | None = None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool = True,
    step: int,
    grad_factor: float = 1.0,
    threads: int = 1,
) -> None:
    """One Adam step in place, in one pass over memory.

    Args:
        master: fp32, contiguous, any shape; updated.
        grad: fp32, bf16 or fp16, as many elements; only read.
        exp_avg: First moment, fp32 or bf16; updated. Computed in fp32 and rounded to nearest even when it is bf16.
        exp_avg_sq: Second moment, of the type of ``exp_avg``.
        low: bf16 or fp16 copy of the result, written in the same pass; None writes none.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the weights.
        decoupled: True decays as AdamW does, False adds the decay to the gradient.
        bias_correction: Divide the moments by ``1 - beta ** step``.
        step: Number of this step, from 1.
        grad_factor: Multiplies the gradient first: unscaling and clipping together.
        threads: The most threads to use. The result does not depend on it.

    Raises:
        HfZeroError: Tensors that do not fit together.
    """
    tensors = _fitting(master, grad, exp_avg, exp_avg_sq, low)
    native = library() if all(tensor.device.type == "cpu" for tensor in tensors) and master.dtype == torch.float32 else None
    if native is None:
        announce()
        options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        adam_reference(
            master, grad, exp_avg, exp_avg_sq, low, **options, bias_correction=bias_correction, step=step, grad_factor=grad_factor
        )
        return
    first, second = (1 - betas[0] ** step, 1 - betas[1] ** step) if bias_correction else (1.0, 1.0)
    rule = ctypes.byref(
        _Rule(
            grad_factor=grad_factor,
            mean_weight=1 - betas[0],
            beta2=betas[1],
            square_weight=1 - betas[1],
            root_divisor=math.sqrt(second),
            eps=eps,
            minus_step=-(lr / first),
            decay=1 - lr * weight_decay if decoupled else weight_decay,
            decay_mode=0 if weight_decay == 0 else 2 if decoupled else 1,
        )
    )
    moment_type = ELEMENT_TYPES[exp_avg.dtype]

    def work(start: int, stop: int) -> None:
        native.call(
            "hfz_adam",
            ctypes.c_int64(stop - start),
            _address(master, start),
            _address(grad, start),
            ELEMENT_TYPES[grad.dtype],
            _address(exp_avg, start),
            _address(exp_avg_sq, start),
            moment_type,
            _address(low, start),
            0 if low is None else ELEMENT_TYPES[low.dtype],
            rule,
        )

    for_slices(master.numel(), threads, work)


def adam_reference(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    low: Tensor | None = None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool = True,
    step: int,
    grad_factor: float = 1.0,
) -> None:
    """As ``adam_update``, by torch's fused kernel and casts around it; any device, and fp64 throughout as well.

    torch rounds elements outside whole vectors differently, so the last ones go through it in a vector of their own: then this
    too does not depend on where a range is cut, and equals the native kernel.
    """
    _fitting(master, grad, exp_avg, exp_avg_sq, low)
    function: Callable[..., None] = torch._fused_adamw_ if decoupled else torch._fused_adam_
    # An infinite count of steps makes both corrections exactly 1.
    count = torch.tensor(float(step) if bias_correction else math.inf, dtype=torch.float32, device=master.device)
    flat = [tensor.detach().view(-1) for tensor in (master, grad, exp_avg, exp_avg_sq)]
    rest = master.numel() % _VECTOR if master.device.type == "cpu" else 0
    parts = [slice(0, master.numel() - rest), *([slice(master.numel() - rest, None)] if rest else [])]
    for part in parts:
        pad = (-flat[0][part].numel()) % _VECTOR if rest else 0
        wide = [tensor[part].to(master.dtype) for tensor in flat]
        wide = [torch.nn.functional.pad(tensor, (0, pad)) for tensor in wide] if pad else wide
        if grad_factor != 1.0:
            wide[1] = wide[1] * grad_factor
        function(
            *([tensor] for tensor in wide),
            [],
            [count],
            amsgrad=False,
            lr=float(lr),
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
        for index in (0, 2, 3):
            if wide[index].data_ptr() != flat[index][part].data_ptr():
                flat[index][part].copy_(wide[index][: flat[index][part].numel()])
    if low is not None:
        low.copy_(master)


def _fitting(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, low: Tensor | None) -> list[Tensor]:
    """Returns the tensors when they fit together.

    Raises:
        HfZeroError: Naming the tensor that does not.
    """
    float64 = master.dtype == torch.float64
    allowed: dict[str, tuple[Tensor, Sequence[torch.dtype]]] = {
        "master": (master, (torch.float32, torch.float64)),
        "grad": (grad, (torch.float64,) if float64 else tuple(ELEMENT_TYPES)),
        "exp_avg": (exp_avg, (torch.float64,) if float64 else _MOMENT_TYPES),
        "exp_avg_sq": (exp_avg_sq, (exp_avg.dtype,)),
    }
    if low is not None:
        allowed["low"] = (low, _LOW_TYPES)
    for name, (tensor, dtypes) in allowed.items():
        if tensor.dtype not in dtypes:
            raise HfZeroError(f"adam_update: {name} is {tensor.dtype}; allowed: {', '.join(map(str, dtypes))}")
        if tensor.numel() != master.numel() or not tensor.is_contiguous() or tensor.device != master.device:
            raise HfZeroError(
                f"adam_update: {name} has {tensor.numel()} elements on {tensor.device} (contiguous: {tensor.is_contiguous()}); "
                f"master has {master.numel()} on {master.device}, and all must be contiguous"
            )
    return [tensor for tensor, _ in allowed.values()]


def _address(tensor: Tensor | None, start: int) -> ctypes.c_void_p:
    """The address of element ``start``; 0 without tensor."""
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr() + start * tensor.element_size())
