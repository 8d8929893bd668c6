"""Provide DeepSpeed's loss scalers: for scripts that scale by hand, for pickled files, and as interface of an engine's loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from hf_zero.core.step import precision as own
from hf_zero.deepspeed.served.norms import CheckOverflow
from hf_zero.errors import ConfigError

INITIAL_LOSS_SCALE, SCALE_WINDOW, DELAYED_SHIFT = "init_scale", "scale_window", "delayed_shift"
CONSECUTIVE_HYSTERESIS, MIN_LOSS_SCALE = "consecutive_hysteresis", "min_scale"


class EngineLossScaler(own.LossScaler):
    """The loss scale of an engine, with the attribute names of DeepSpeed's scalers and of their configuration."""

    @property
    def cur_scale(self) -> float:
        """Return the current scale. A script may also set it between steps, to the same value on every rank.

        Raises:
            ConfigError: The value to set is not a finite number above 0.
        """
        return self.scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        if not 0 < value < math.inf:
            raise ConfigError(f"the loss scale was set to {value!r}; a finite number above 0 is allowed")
        self.scale = float(value)

    @property
    def loss_scale(self) -> float:
        """Return the current scale (``scale``)."""
        return self.scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Return whether the scale changes (``dynamic``)."""
        return self.dynamic

    @property
    def scale_window(self) -> int:
        """Return the number of steps without overflow before the scale doubles (``window``)."""
        return self.window

    @property
    def scale_factor(self) -> float:
        """Return the factor by which the scale is multiplied or divided at a change."""
        return own.FACTOR

    @property
    def min_loss_scale(self) -> float:
        """Return the lowest scale (``min_scale``)."""
        return self.min_scale

    @property
    def cur_hysteresis(self) -> int:
        """Return the number of overflows until the scale halves (``overflows_left``)."""
        return self.overflows_left


class LossScalerBase:
    """Base class of the loss scalers for scripts: a factor for the loss.

    Args:
        cur_scale: The factor.

    Attributes:
        cur_scale: The current factor.
        dynamic: Whether the factor changes.
    """

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = float(cur_scale)

    @property
    def loss_scale(self) -> float:
        """Return the current factor."""
        return self.cur_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the factor."""
        return loss * self.cur_scale

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run the backward of the loss times the factor."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether a gradient on this rank is not finite; always False for a constant factor, without looking."""
        return self.dynamic and CheckOverflow().has_overflow_serial(params)

    def update_scale(self, overflow: bool) -> None:
        """Record whether a step overflowed, which may change the factor."""


class LossScaler(LossScalerBase):
    """A loss scaler with a constant factor.

    Args:
        scale: The factor.
    """

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)


class DynamicLossScaler(LossScalerBase):
    """A loss scaler whose factor doubles after steps without overflow and halves after overflows, like an engine's.

    Args:
        init_scale: First factor, a power of two.
        scale_factor: Factor of each change; only 2 is allowed.
        scale_window: Steps without overflow before the factor doubles.
        min_scale: Lowest factor.
        delayed_shift: Number of overflows after which the factor halves (hysteresis).
        consecutive_hysteresis: Whether each step without overflow resets the count of overflows.
        raise_error_at_min_scale: Whether an overflow at the lowest factor raises an error.
        dtype: Has no effect.

    Raises:
        ConfigError: A value is out of range.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float = 2**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        power = round(math.log2(init_scale)) if init_scale > 0 else 0
        if init_scale != 2.0**power or scale_factor != 2:
            raise ConfigError(
                f"DynamicLossScaler(init_scale={init_scale!r}, scale_factor={scale_factor!r}): init_scale must be a power of two, "
                "and scale_factor 2"
            )
        self._scaler = own.LossScaler(0, power, scale_window, delayed_shift, consecutive_hysteresis, min_scale, raise_error_at_min_scale)
        super().__init__(self._scaler.scale)

    def update_scale(self, overflow: bool) -> None:
        """Record whether a step overflowed, and change the factor accordingly.

        Raises:
            StateError: A step overflowed at the lowest factor, and ``raise_error_at_min_scale`` is true.
        """
        self._scaler.update(overflow)
        self.cur_scale = self._scaler.scale


def CreateLossScaler(  # noqa: N802  (DeepSpeed's name)
    dtype: torch.dtype, static_loss_scale: float, dynamic_scaling: bool, dynamic_loss_args: dict[str, Any] | None
) -> LossScalerBase:
    """Return a dynamic scaler for fp16 if it is requested, else a static one for fp16; for other types a scaler with factor 1."""
    if dtype == torch.half and dynamic_scaling:
        return DynamicLossScaler(**(dynamic_loss_args or {}))
    return LossScaler(static_loss_scale if dtype == torch.half else 1.0)
