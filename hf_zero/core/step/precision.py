"""Which element type parameters, masters, gradients and buffers have, and the casts that bring a model there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.comm.collectives import is_narrow
from hf_zero.core.units.packed import is_packed
from hf_zero.core.units.unit import find_unit

_NORMS_WITH_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)

# Rotary tables are angles times positions: in 16 bit, position 1000 is off by whole turns.
_FP32_BUFFERS = ("inv_freq", "original_inv_freq")


@dataclass(frozen=True)
class PrecisionPolicy:
    """Element types of one engine.

    Attributes:
        param_dtype: Type all floating-point parameters are cast to; None leaves each as it is.
        master_dtype: Type of masters and moments; None is the parameters' own type (fp32 training).
        accumulation_dtype: Type in which gradients are summed over ranks and micro-steps.
        message_dtype: Type of gradients on the network; None is the parameters' type.
        buffer_dtype: Type floating-point buffers are cast to; None follows ``param_dtype``, rotary tables excepted.
        autocast_dtype: Type of ``torch.autocast`` around forward; None is off.
        casts_inputs: Floating-point inputs of forward are cast to ``param_dtype``.
        skips_overflow: A step with a gradient that is not finite is skipped.
    """

    param_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    accumulation_dtype: torch.dtype = torch.float32
    message_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    casts_inputs: bool = False
    skips_overflow: bool = False

    def unit_dtype(self, param: torch.Tensor) -> torch.dtype:
        """The type ``param`` has inside its unit."""
        casts = self.param_dtype is not None and param.is_floating_point() and not is_packed(param)
        return self.param_dtype if casts and self.param_dtype is not None else param.dtype


def cast_and_move(module: nn.Module, policy: PrecisionPolicy, device: torch.device) -> None:
    """Moves what no unit will hold to ``device``: buffers, cast as the policy says, and parameters that are not floating point."""
    for inner in module.modules():
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                inner._buffers[name] = buffer.to(device=device, dtype=_buffer_dtype(inner, name, buffer, policy))
        for param in inner._parameters.values():
            if param is not None and find_unit(param) is None and not param.is_meta and not param.is_floating_point():
                param.data = param.data.to(device)


def cast_param(param: nn.Parameter, policy: PrecisionPolicy, device: torch.device) -> None:
    """Casts and moves one parameter that stays outside units."""
    param.data = param.data.to(device=device, dtype=policy.unit_dtype(param))


def _buffer_dtype(module: nn.Module, name: str, buffer: torch.Tensor, policy: PrecisionPolicy) -> torch.dtype:
    if not buffer.is_floating_point() or is_narrow(buffer):
        return buffer.dtype
    if policy.buffer_dtype is not None and not isinstance(module, _NORMS_WITH_STATISTICS):
        return policy.buffer_dtype
    if policy.param_dtype is None or name in _FP32_BUFFERS:
        return buffer.dtype
    return policy.param_dtype
