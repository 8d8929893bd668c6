"""DeepSpeed's 1-bit Adam class, constructed with its arguments."""

from __future__ import annotations

from typing import Any

from hf_zero.optim.onebit_adam import OneBitAdam


class OnebitAdam(OneBitAdam):
    """``OneBitAdam`` with DeepSpeed's order of arguments.

    Args:
        params: Parameters, or groups as dicts.
        deepspeed: Accepted; the engine comes with ``deepspeed.initialize``.
        lr: Learning rate.
        freeze_step: Steps of warm-up, or "auto".
        bias_correction: Divide the moments by ``1 - beta ** step``. DeepSpeed's class ignores its own argument; this one does not.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        eps_inside_sqrt: Add ``eps`` under the root.
        weight_decay: Decoupled weight decay.
        max_grad_norm: Clip gradients to this norm; 0 is off.
        amsgrad: Must be False.
        cuda_aware: Accepted; the process group's back end decides.
        comm_backend_name: Accepted, likewise.
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
