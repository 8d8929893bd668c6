"""DeepSpeed's optimizer classes, constructed with its keywords; the host optimizers of ``hf_zero.ops`` do the work.

accelerate builds ``DeepSpeedCPUAdam(user_optimizer.param_groups, lr=, weight_decay=, adamw_mode=)`` in place of the user's
optimizer when `offload_optimizer` is set, for every optimizer class that is not Adagrad or Lion. Groups given as dicts are kept, so
schedulers that hold them go on working.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hf_zero.errors import UnsupportedError
from hf_zero.observe import warn_once
from hf_zero.ops.host_adagrad import HostAdagrad
from hf_zero.ops.host_adam import HostAdam
from hf_zero.ops.host_lion import HostLion
from hf_zero.optim.lamb import Lamb
from hf_zero.optim.muon import MuonWithAuxAdam as MuonWithAuxAdam

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]

# Those of Adafactor (transformers', torch's), Muon, LAMB, LARS, Shampoo and SOAP, GaLore and APOLLO.
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
# Keys that stay in the groups of an optimizer that was no Adam: SGD's, RMSprop's, Adadelta's.
_FOREIGN_KEYS = ("momentum", "nesterov", "alpha", "rho", "lr_decay")


class DeepSpeedCPUAdam(HostAdam):
    """Adam or AdamW with DeepSpeed's keywords; the parameters may live on any device.

    Args:
        model_params: Parameters, or groups as dicts.
        lr: Learning rate.
        bias_correction: Divide the moments by ``1 - beta ** step``.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: Decay, decoupled from the gradient with ``adamw_mode``.
        amsgrad: Only false is provided, as in DeepSpeed.
        adamw_mode: True is AdamW, false is Adam with decay added to the gradient; wins over the groups' own flags.
        fp32_optimizer_states: False keeps the moments of bf16 parameters in bf16; fp16 would lose small second moments.

    Attributes:
        adam_w_mode: As ``adamw_mode``.

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
        _require(name, "amsgrad", amsgrad, False, "use torch.optim.AdamW(..., amsgrad=True)")
        params = list(model_params)
        _warn_about_foreign_groups(name, params)
        for group in params:
            if isinstance(group, dict):  # a group's own value, left by the user's Adam or AdamW, would beat the default
                group["decoupled_weight_decay"] = adamw_mode
        super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=adamw_mode, bias_correction=bias_correction)
        self.fp32_optimizer_states = fp32_optimizer_states
        self.adam_w_mode = adamw_mode

    def _moment_dtype_of(self, param: torch.Tensor) -> torch.dtype:
        if not self.fp32_optimizer_states and param.dtype == torch.bfloat16:
            return torch.bfloat16
        return super()._moment_dtype_of(param)


class FusedLamb(Lamb):
    """``Lamb`` under DeepSpeed's name; the same keywords."""


class FusedAdam(DeepSpeedCPUAdam):
    """Optimizer like ``DeepSpeedCPUAdam`` with the keywords of DeepSpeed's GPU class (``adam_w_mode``, ``set_grad_none``)."""

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
    """Adagrad with DeepSpeed's keywords; ``adamw_mode`` is ignored, accelerate passes it to whatever class it picked.

    Args:
        model_params: Parameters, or groups as dicts.
        lr: Learning rate.
        eps: Added to the denominator.
        weight_decay: Decay added to the gradient.
        amsgrad: Only false exists.
        fp32_optimizer_states: Only true is provided.
        adamw_mode: Ignored.

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
        _require_fp32_states("DeepSpeedCPUAdagrad", fp32_optimizer_states)
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class DeepSpeedCPULion(HostLion):
    """Lion with DeepSpeed's keywords; ``adamw_mode`` is ignored, accelerate passes it to whatever class it picked.

    Args:
        model_params: Parameters, or groups as dicts.
        lr: Learning rate.
        betas: Interpolation of the update, decay of the momentum.
        weight_decay: Decoupled weight decay.
        fp32_optimizer_states: Only true is provided.
        adamw_mode: Ignored.

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
        _require_fp32_states("DeepSpeedCPULion", fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLion(HostLion):
    """Lion with the keywords of DeepSpeed's GPU class (``set_grad_none``)."""

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
    _require(owner, "set_grad_none", value, True, "leave it out; gradients are released after the step")


def _warn_about_foreign_groups(owner: str, params: list[Any]) -> None:
    """Warn that accelerate replaces any optimizer by Adam when the optimizer is offloaded, for example a user's SGD.

    Raises:
        UnsupportedError: The groups are those of an optimizer like Adafactor, of which Adam would make something else altogether.
    """
    groups = [group for group in params if isinstance(group, dict)]
    odd = sorted({key for group in groups for key in _WHOLE_TENSOR_KEYS if key in group})
    if odd:
        raise UnsupportedError(
            f"{owner} got parameter groups of another optimizer (they hold {', '.join(odd)}): accelerate replaces an optimizer by Adam "
            'when zero_optimization.offload_optimizer is set. Put "zero_force_ds_cpu_optimizer": false into the configuration to keep yours'
        )
    foreign = sorted({key for group in params if isinstance(group, dict) and "betas" not in group for key in _FOREIGN_KEYS if key in group})
    if foreign:
        warn_once(
            f"{owner} takes over parameter groups of another optimizer (they hold {', '.join(foreign)}): accelerate does this when "
            "zero_optimization.offload_optimizer is set; put zero_force_ds_cpu_optimizer: false into the configuration to keep yours"
        )
