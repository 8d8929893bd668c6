"""Choose the dtypes of parameters, masters, gradients and buffers, cast a model to them, and compute the loss scale of fp16 training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.comm.collectives import is_narrow
from hf_zero.core.units.marks import is_packed
from hf_zero.core.units.unit import find_unit
from hf_zero.errors import CheckpointError, ConfigError, StateError
from hf_zero.observe import warn_once

KeptTypes = Mapping[int, torch.dtype]
"""Dtypes of parameters and buffers, by ``id`` of the tensor, that a cast of the complete model does not change."""
FACTOR = 2.0


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


class LossScaler:
    """The factor by which the loss is multiplied before backward, so that small fp16 gradients stay representable.

    A dynamic scale starts at ``2 ** initial_scale_power``. On a step whose gradients overflow (the engine skips that step) the first
    ``hysteresis - 1`` overflows are only counted; the next ones halve the scale, never below ``min_loss_scale``. A step without overflow
    opens a window; after every further ``loss_scale_window`` steps without overflow the scale doubles. The count of tolerated overflows is
    reset when the scale doubles, or with ``consecutive_hysteresis`` after every step without overflow.

    A step that overflows at the minimum, with no tolerance left, ends the run with an error, because a run that skips every step looks like
    training. If ``raises_at_minimum`` is False, the step is skipped like any other, with one warning. fp32 and bf16 training has the static
    scale 1.

    Args:
        loss_scale: A fixed scale; 0 selects the dynamic one.
        initial_scale_power: Power of two of the first dynamic scale.
        loss_scale_window: Number of steps without overflow before the dynamic scale doubles.
        hysteresis: Number of overflows until the dynamic scale is halved; 1 halves at once.
        consecutive_hysteresis: Whether every step without overflow resets the tolerance.
        min_loss_scale: Lowest dynamic scale.
        raises_at_minimum: Whether an overflow at the minimum is an error.

    Attributes:
        scale: The present factor, a float above 0.
        dynamic: Whether ``update`` can change it.
        cur_iter: Number of boundaries so far, in this process.

    Raises:
        ConfigError: A value is out of its range; the message names its key of the ``fp16`` section.
    """

    def __init__(
        self,
        loss_scale: float = 0.0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1.0,
        raises_at_minimum: bool = True,
    ) -> None:
        _require("fp16.loss_scale", loss_scale, 0, "0 (dynamic) or a fixed factor above 0")
        self.dynamic = loss_scale == 0
        if self.dynamic:
            _require("fp16.initial_scale_power", initial_scale_power, 0, "a power of two from 0 to 1023")
            _require("fp16.loss_scale_window", loss_scale_window, 1, "a number of steps, at least 1")
            _require("fp16.hysteresis", hysteresis, 1, "a number of overflows, at least 1")
            if not 0 < min_loss_scale < math.inf:
                raise ConfigError(f"fp16.min_loss_scale is {min_loss_scale!r}; expected a number above 0.")
            if initial_scale_power > 1023:
                raise ConfigError(f"fp16.initial_scale_power is {initial_scale_power!r}; expected at most 1023.")
        self.scale = FACTOR**initial_scale_power if self.dynamic else float(loss_scale)
        self.window = int(loss_scale_window)
        self.hysteresis = int(hysteresis)
        self.consecutive_hysteresis = consecutive_hysteresis
        self.min_scale = float(min_loss_scale)
        self._raises_at_minimum = raises_at_minimum
        self._good_steps = 0
        self._tolerance = self.hysteresis
        self.cur_iter = 0

    @property
    def overflows_left(self) -> int:
        """Return the number of overflows until the scale is halved, including the one that halves it."""
        return self._tolerance

    def update(self, overflow: bool) -> None:
        """Update the scale after one boundary; call it once per step, with the same ``overflow`` on every rank.

        Raises:
            StateError: The gradients overflow at ``min_loss_scale`` with no tolerance left, and ``raises_at_minimum`` was set.
        """
        self.cur_iter += 1
        if not self.dynamic:
            return
        if overflow:
            self._good_steps = 0
            self._back_off()
            return
        self._good_steps += 1
        # The first step after an overflow (or at the start) does not count, so that the scale follows the usual fp16 schedule step for
        # step.
        counted = self._good_steps - 1
        grow = counted > 0 and counted % self.window == 0
        if grow:
            self.scale *= FACTOR
        if grow or self.consecutive_hysteresis:
            self._tolerance = self.hysteresis

    def _back_off(self) -> None:
        """Reduce the tolerance by one, or halve the scale once the tolerance is used up."""
        if self._tolerance > 1:
            self._tolerance -= 1
            return
        if self.scale <= self.min_scale:
            message = (
                f"gradients overflow at the lowest loss scale {self.scale:g} (fp16.min_loss_scale {self.min_scale:g}): no step can be "
                "taken any more. Lower the learning rate or fp16.min_loss_scale, look for a non-finite value in the data, or train in bf16"
            )
            if self._raises_at_minimum:
                raise StateError(message)
            warn_once(f"{message}. Steps are skipped until gradients are finite")
        self.scale = max(self.scale / FACTOR, self.min_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON values: ``scale``, ``dynamic``, ``good_steps``, ``tolerance``."""
        return {
            "scale": self.scale,
            "dynamic": self.dynamic,
            "good_steps": self._good_steps,
            "tolerance": self._tolerance,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. A static scale keeps the config's value; so does a scale whose kind (static, dynamic) has changed.

        The saved tolerance is limited to the ``hysteresis`` of the present config.

        Raises:
            CheckpointError: A value is missing or out of its range.
        """
        missing = sorted({"scale", "dynamic", "good_steps", "tolerance"} - set(state))
        if missing:
            raise CheckpointError(f"the saved loss scale lacks {', '.join(missing)}; found {sorted(state)}.")
        if not self.dynamic or not state["dynamic"]:
            return
        scale, good_steps, tolerance = state["scale"], state["good_steps"], state["tolerance"]
        if not (0 < scale < math.inf and good_steps >= 0 and tolerance >= 1):
            raise CheckpointError(
                f"the saved loss scale is broken: scale {scale!r} (above 0), good_steps {good_steps!r} (0 or more), "
                f"tolerance {tolerance!r} (1 or more)."
            )
        self.scale = max(float(scale), self.min_scale)
        self._good_steps = int(good_steps)
        self._tolerance = min(int(tolerance), self.hysteresis)


def _require(key: str, value: object, lowest: float, expected: str) -> None:
    """Raise unless ``value`` is a finite number of at least ``lowest``."""
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not numeric or not lowest <= value < math.inf:  # type: ignore[operator]
        raise ConfigError(f"{key} is {value!r}; expected {expected}.")
