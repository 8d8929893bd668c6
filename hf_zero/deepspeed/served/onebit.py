"""Provide DeepSpeed's class of 1-bit Adam, with its arguments."""

from __future__ import annotations

from typing import Any

from hf_zero.optim.onebit_adam import OneBitAdam


class OnebitAdam(OneBitAdam):
    """The optimizer ``OneBitAdam`` with DeepSpeed's order of arguments.

    Args:
        params: Parameters, or groups as dicts.
        deepspeed: Accepted and ignored; ``deepspeed.initialize`` connects the engine.
        lr: Learning rate.
        freeze_step: Steps of warm-up, or "auto".
        bias_correction: Whether to divide the moments by ``1 - beta ** step``. DeepSpeed's class ignores this argument.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        eps_inside_sqrt: Whether ``eps`` is added inside the square root.
        weight_decay: Decoupled weight decay.
        max_grad_norm: Clipping norm of the gradients; 0 turns clipping off.
        amsgrad: Must be False.
        cuda_aware: Accepted and ignored; the backend of the process group decides.
        comm_backend_name: Accepted and ignored.
    """

    def __init__(
        self,
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int | str = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            freeze_step=freeze_step,
            bias_correction=bias_correction,
            eps_inside_sqrt=eps_inside_sqrt,
            max_grad_norm=max_grad_norm,
            amsgrad=amsgrad,
            cuda_aware=cuda_aware,
            comm_backend_name=comm_backend_name,
        )
