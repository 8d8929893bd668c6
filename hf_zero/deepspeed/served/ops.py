"""Provide DeepSpeed's optimizer classes with its keyword arguments: 1-bit Adam, and subclasses of the host optimizers in ``hf_zero.ops``.

If `offload_optimizer` is set, accelerate replaces the user's optimizer by ``DeepSpeedCPUAdam(user_optimizer.param_groups, lr=,
weight_decay=, adamw_mode=)``, for every optimizer class except Adagrad and Lion. Param groups that are given as dicts are kept as the same
objects, so that schedulers that refer to them still work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from hf_zero.errors import UnsupportedError
from hf_zero.observe import warn_once
from hf_zero.ops.host_optimizers import HostAdagrad, HostAdam, HostLion
from hf_zero.optim.known_classes import ALL_TENSORS, WHOLE_TENSOR, named
from hf_zero.optim.lamb import Lamb
from hf_zero.optim.muon import MuonWithAuxAdam as MuonWithAuxAdam
from hf_zero.optim.onebit_adam import OneBitAdam

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]

# Keys of param groups of Adafactor (transformers and torch), Muon, LAMB, LARS, Shampoo, SOAP, GaLore and APOLLO.
_WHOLE_TENSOR_KEYS = (
    "clip_threshold",
    "beta2_decay",
    "ns_steps",
    "use_muon",
    "max_coeff",
    "trust_coefficient",
    "precondition_frequency",
    "update_proj_gap",
)
_ADAM = re.compile("(paged|fused|cpu)?adamw?(32bit|8bit|4bit|fp8)?", re.IGNORECASE)  # Adam's names in torch, apex and bitsandbytes
# Keys of param groups of other optimizers than Adam: SGD, RMSprop, Adadelta.
_FOREIGN_KEYS = ("momentum", "nesterov", "alpha", "rho", "lr_decay")


class DeepSpeedCPUAdam(HostAdam):
    """An Adam or AdamW optimizer with DeepSpeed's keywords; the parameters may be on any device.

    Args:
        model_params: Parameters, or groups as dicts.
        lr: Learning rate.
        bias_correction: Divide the moments by ``1 - beta ** step``.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: Decay, decoupled from the gradient with ``adamw_mode``.
        amsgrad: Only False is supported, as in DeepSpeed.
        adamw_mode: True for AdamW, False for Adam with decay added to the gradient; takes precedence over flags of the groups.
        fp32_optimizer_states: False keeps the moments of bf16 parameters in bf16; fp16 would lose small second moments.

    Attributes:
        adam_w_mode: The argument ``adamw_mode``.

    Raises:
        UnsupportedError: An argument has an unsupported value.
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
        _require(name, "amsgrad", amsgrad, False, "use torch.optim.AdamW(..., amsgrad=True)")
        params = list(model_params)
        _warn_about_foreign_groups(name, params)
        for group in params:
            if isinstance(group, dict):  # remove the value of the user's Adam or AdamW, which would take precedence over the default
                group["decoupled_weight_decay"] = adamw_mode
        super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=adamw_mode, bias_correction=bias_correction)
        self.fp32_optimizer_states = fp32_optimizer_states
        self.adam_w_mode = adamw_mode

    def _moment_dtype_of(self, param: torch.Tensor) -> torch.dtype:
        if not self.fp32_optimizer_states and param.dtype == torch.bfloat16:
            return torch.bfloat16
        return super()._moment_dtype_of(param)


class FusedLamb(Lamb):
    """The optimizer ``Lamb`` under DeepSpeed's name, with the same keywords."""


class FusedAdam(DeepSpeedCPUAdam):
    """An optimizer like ``DeepSpeedCPUAdam``, with the keywords of DeepSpeed's GPU class (``adam_w_mode``, ``set_grad_none``)."""

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
        _require_grad_none("FusedAdam", set_grad_none)
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)


class DeepSpeedCPUAdagrad(HostAdagrad):
    """An Adagrad optimizer with DeepSpeed's keywords; ``adamw_mode``, which accelerate passes to every class, is ignored.

    Args:
        model_params: Parameters, or groups as dicts.
        lr: Learning rate.
        eps: Added to the denominator.
        weight_decay: Decay added to the gradient.
        amsgrad: Only False is supported.
        fp32_optimizer_states: Only True is supported.
        adamw_mode: Has no effect.

    Raises:
        UnsupportedError: An argument has an unsupported value.
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
        _require_fp32_states("DeepSpeedCPUAdagrad", fp32_optimizer_states)
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class DeepSpeedCPULion(HostLion):
    """A Lion optimizer with DeepSpeed's keywords; ``adamw_mode``, which accelerate passes to every class, is ignored.

    Args:
        model_params: Parameters, or groups as dicts.
        lr: Learning rate.
        betas: Interpolation factor of the update, and decay rate of the momentum.
        weight_decay: Decoupled weight decay.
        fp32_optimizer_states: Only True is supported.
        adamw_mode: Has no effect.

    Raises:
        UnsupportedError: An argument has an unsupported value.
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
        _require_fp32_states("DeepSpeedCPULion", fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLion(HostLion):
    """A Lion optimizer with the keywords of DeepSpeed's GPU class (``set_grad_none``)."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        _require_grad_none("FusedLion", set_grad_none)
        super().__init__(params, lr, betas, weight_decay)


def _require(owner: str, name: str, value: bool, allowed: bool, remedy: str) -> None:
    if bool(value) is not allowed:
        raise UnsupportedError(f"{owner}({name}={value!r}) is not provided by hf_zero, only {allowed}: {remedy}")


def _require_fp32_states(owner: str, value: bool) -> None:
    _require(owner, "fp32_optimizer_states", value, True, "leave it out; the state is kept in fp32")


def _require_grad_none(owner: str, value: bool) -> None:
    _require(owner, "set_grad_none", value, True, "leave it out; gradients are freed after the step")


def _warn_about_foreign_groups(owner: str, params: list[Any]) -> None:
    """Warn that accelerate replaces the user's optimizer (for example SGD) by Adam if the optimizer is offloaded.

    Raises:
        UnsupportedError: The groups belong to an optimizer like Adafactor, whose settings have another meaning in Adam.
    """
    groups = [group for group in params if isinstance(group, dict)]
    odd = sorted({key for group in groups for key in _WHOLE_TENSOR_KEYS if key in group})
    if odd:
        raise UnsupportedError(
            f"{owner} got param groups of another optimizer (they have {', '.join(odd)}): accelerate replaces an optimizer by Adam "
            'when zero_optimization.offload_optimizer is set. To keep yours, set "zero_force_ds_cpu_optimizer": false in the configuration'
        )
    foreign = sorted({key for group in params if isinstance(group, dict) and "betas" not in group for key in _FOREIGN_KEYS if key in group})
    if foreign:
        warn_once(
            f"{owner} replaces another optimizer (its param groups have {', '.join(foreign)}): accelerate does this when "
            'zero_optimization.offload_optimizer is set. To keep yours, set "zero_force_ds_cpu_optimizer": false in the configuration'
        )


def require_adam(optimizer: torch.optim.Optimizer) -> None:
    """Warn if ``optimizer``, in whose place accelerate puts Adam, is another one; local.

    Raises:
        UnsupportedError: It needs whole tensors; its settings have another meaning in Adam.
    """
    name, reason = type(optimizer).__name__, named(type(optimizer), WHOLE_TENSOR | ALL_TENSORS)
    if isinstance(optimizer, HostAdam) or _ADAM.fullmatch(name):
        return
    found = (
        f"accelerate puts Adam in the place of {name}, because zero_optimization.offload_optimizer is set. To keep {name}, set "
        '"zero_force_ds_cpu_optimizer": false in the configuration'
    )
    if reason is not None:
        raise UnsupportedError(f"{found} ({name} is another optimizer than Adam: {reason})")
    warn_once(f"{found}. Training goes on with Adam")


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
