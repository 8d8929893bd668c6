"""DeepSpeed's optimizer classes, constructed with its keywords; PyTorch's implementations do the work.

accelerate builds ``DeepSpeedCPUAdam(user_optimizer.param_groups, lr=, weight_decay=, adamw_mode=)`` in place of the user's
optimizer when `offload_optimizer` is set, for every optimizer class that is not Adagrad or Lion.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hf_zero.errors import UnsupportedError
from hf_zero.observe import warn_once
from hf_zero.optim.lion import Lion

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]

# Keys that stay in the groups of an optimizer that was no Adam: SGD's, RMSprop's, Adadelta's.
_FOREIGN_KEYS = ("momentum", "nesterov", "alpha", "rho", "lr_decay")


class DeepSpeedCPUAdam(torch.optim.Adam):
    """Adam or AdamW with DeepSpeed's keywords; the parameters may live on any device.

    Args:
        model_params: Parameters, or groups as dicts; given dicts are kept, so schedulers that hold them go on working.
        lr: Learning rate.
        bias_correction: Only true is provided.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: Decay, decoupled from the gradient with ``adamw_mode``.
        amsgrad: Only false is provided by DeepSpeed; passed on.
        adamw_mode: True is AdamW, false is Adam with decay added to the gradient.
        fp32_optimizer_states: Only true is provided: moments are fp32.

    Raises:
        UnsupportedError: A value that is not provided.
    """

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        name = type(self).__name__
        _require(
            name,
            "bias_correction",
            bias_correction,
            True,
            "use hf_zero.optim.uncorrected_adam.UncorrectedAdam",
        )
        _require(name, "fp32_optimizer_states", fp32_optimizer_states, True, "leave it out; moments are kept in fp32")
        params: list[Any] = list(model_params)
        _warn_about_foreign_groups(name, params)
        for group in params:
            if isinstance(group, dict):
                # The user's Adam or AdamW left its own flag here, and a group's value beats the default.
                group["decoupled_weight_decay"] = adamw_mode
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, decoupled_weight_decay=adamw_mode)


class FusedAdam(DeepSpeedCPUAdam):
    """Adam or AdamW with the keywords of DeepSpeed's GPU class (``adam_w_mode``, ``set_grad_none``)."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _require("FusedAdam", "set_grad_none", set_grad_none, True, "leave it out; gradients are released after the step")
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode=adam_w_mode)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad with DeepSpeed's keywords.

    Args:
        model_params: Parameters, or groups as dicts.
        lr: Learning rate.
        eps: Added to the denominator.
        weight_decay: Decay added to the gradient.
        amsgrad: Only false exists.
        fp32_optimizer_states: Only true is provided.
        adamw_mode: Ignored: accelerate passes it to whatever class it picked.

    Raises:
        UnsupportedError: A value that is not provided.
    """

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        adamw_mode: bool = False,
    ) -> None:
        _require("DeepSpeedCPUAdagrad", "amsgrad", amsgrad, False, "leave it out")
        _require("DeepSpeedCPUAdagrad", "fp32_optimizer_states", fp32_optimizer_states, True, "leave it out; the sums are kept in fp32")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class DeepSpeedCPULion(Lion):
    """Lion with DeepSpeed's keywords.

    Args:
        model_params: Parameters, or groups as dicts.
        lr: Learning rate.
        betas: Interpolation of the update, decay of the momentum.
        weight_decay: Decoupled weight decay.
        fp32_optimizer_states: Only true is provided.
        adamw_mode: Ignored: accelerate passes it to whatever class it picked.

    Raises:
        UnsupportedError: A value that is not provided.
    """

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
        adamw_mode: bool = False,
    ) -> None:
        _require("DeepSpeedCPULion", "fp32_optimizer_states", fp32_optimizer_states, True, "leave it out; the momentum is kept in fp32")
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)


class FusedLion(Lion):
    """Lion with the keywords of DeepSpeed's GPU class (``set_grad_none``)."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        _require("FusedLion", "set_grad_none", set_grad_none, True, "leave it out; gradients are released after the step")
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


def _require(owner: str, name: str, value: bool, allowed: bool, remedy: str) -> None:
    if bool(value) is not allowed:
        raise UnsupportedError(f"{owner}({name}={value!r}) is not provided by hf_zero, only {allowed}: {remedy}")


def _warn_about_foreign_groups(owner: str, params: list[Any]) -> None:
    """accelerate replaces any optimizer by Adam when the optimizer is offloaded; a user of SGD should hear of it."""
    foreign = sorted({key for group in params if isinstance(group, dict) and "betas" not in group for key in _FOREIGN_KEYS if key in group})
    if foreign:
        warn_once(
            f"{owner} takes over parameter groups of another optimizer (they hold {', '.join(foreign)}): accelerate does this when "
            "zero_optimization.offload_optimizer is set; put zero_force_ds_cpu_optimizer: false into the configuration to keep yours"
        )
