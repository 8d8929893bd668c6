"""Choose the dtypes of parameters, masters, gradients and buffers, and cast a model to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.comm.collectives import is_narrow
from hf_zero.core.units.packed import is_packed
from hf_zero.core.units.unit import find_unit

KeptTypes = Mapping[int, torch.dtype]
"""Dtypes of parameters and buffers, by ``id`` of the tensor, that a cast of the complete model does not change."""


@dataclass(frozen=True)
class PrecisionPolicy:
    """Dtypes of one engine.

    Attributes:
        param_dtype: Dtype that floating-point parameters are cast to; None keeps each parameter's dtype.
        master_dtype: Dtype of masters and moments; None is the parameters' own dtype (fp32 training).
        accumulation_dtype: Dtype in which gradients are summed over ranks and micro-steps.
        message_dtype: Dtype of gradients on the network; None is the parameters' dtype.
        buffer_dtype: Dtype that floating-point buffers are cast to; None keeps each buffer's dtype.
        autocast_dtype: Dtype of ``torch.autocast`` around forward; None is off.
        casts_inputs: Whether floating-point inputs of forward are cast to ``param_dtype``.
        skips_overflow: Whether a step with a gradient that is not finite is skipped.
    """

    param_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    accumulation_dtype: torch.dtype = torch.float32
    message_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    casts_inputs: bool = False
    skips_overflow: bool = False

    def unit_dtype(self, param: torch.Tensor, kept: KeptTypes) -> torch.dtype:
        """Return the dtype of ``param`` inside its unit."""
        if self.param_dtype is None or not param.is_floating_point() or is_packed(param):
            return param.dtype
        return kept.get(id(param), self.param_dtype)

    def buffer_type(self, buffer: torch.Tensor, kept: KeptTypes) -> torch.dtype:
        """Return the dtype of ``buffer`` while the engine trains.

        By default a buffer keeps the dtype that it was loaded with, whatever its name: a rotary table of angles times positions, or
        statistics that are summed over thousands of steps, would lose precision in 16 bit.
        """
        if not buffer.is_floating_point() or is_narrow(buffer):
            return buffer.dtype
        return kept.get(id(buffer), self.buffer_dtype or buffer.dtype)

    def master_type(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the masters of a unit of ``dtype``: ``master_dtype``, but never narrower than the unit's dtype."""
        wide = self.master_dtype
        return dtype if wide is None or dtype.itemsize > wide.itemsize else wide


def cast_and_move(module: nn.Module, policy: PrecisionPolicy, device: torch.device, kept: KeptTypes) -> None:
    """Move the tensors that will be in no unit to ``device``: buffers, cast by the policy, and parameters that are not floating point.

    ``kept`` is the argument of ``PrecisionPolicy.buffer_type``.
    """
    for inner in module.modules():
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                inner._buffers[name] = buffer.to(device=device, dtype=policy.buffer_type(buffer, kept))
        for param in inner._parameters.values():
            if param is not None and find_unit(param) is None and not param.is_meta and not param.is_floating_point():
                param.data = param.data.to(device)


def cast_param(param: nn.Parameter, policy: PrecisionPolicy, device: torch.device, kept: KeptTypes) -> None:
    """Cast one parameter that stays outside of units, and move it to ``device``."""
    param.data = param.data.to(device=device, dtype=policy.unit_dtype(param, kept))


def cast_parameters(module: nn.Module, dtype: torch.dtype, kept: KeptTypes) -> nn.Module:
    """Cast the floating-point parameters of ``module`` that are in no unit to ``dtype`` in place, except ``kept``; return the module.

    Buffers keep their dtype, unlike with ``module.to(dtype)``.
    """
    policy = PrecisionPolicy(param_dtype=dtype)
    for param in module.parameters():
        if find_unit(param) is None:
            cast_param(param, policy, param.device, kept)
    return module


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with its floating-point tensors in ``dtype``; named tuples stay as they are, which torch's pytree would open."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return type(value)({key: cast_floating(item, dtype) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(cast_floating(item, dtype) for item in value)
    return value
