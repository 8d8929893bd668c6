"""DeepSpeed's loss scalers: for scripts that scale by hand, for its pickled files, and its names on an engine's own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from hf_zero.core.step import loss_scale as own
from hf_zero.deepspeed.served.norms import CheckOverflow
from hf_zero.errors import ConfigError

INITIAL_LOSS_SCALE, SCALE_WINDOW, DELAYED_SHIFT = "init_scale", "scale_window", "delayed_shift"
CONSECUTIVE_HYSTERESIS, MIN_LOSS_SCALE = "consecutive_hysteresis", "min_scale"


class EngineLossScaler(own.LossScaler):
    """An engine's loss scale with the names of DeepSpeed's scalers, and of its configurations of them."""

    @property
    def cur_scale(self) -> float:
        """Return the same as ``scale``; a script may set it between steps, to the same value on every rank.

        Raises:
            ConfigError: Of setting: no finite number above 0.
        """
        return self.scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        if not 0 < value < math.inf:
            raise ConfigError(f"the loss scale was set to {value!r}; a finite number above 0 is allowed")
        self.scale = float(value)

    @property
    def loss_scale(self) -> float:
        """Return the same as ``scale``."""
        return self.scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Return the same as ``dynamic``."""
        return self.dynamic

    @property
    def scale_window(self) -> int:
        """Return the same as ``window``."""
        return self.window

    @property
    def scale_factor(self) -> float:
        """Return the number that the scale is multiplied with, or divided by."""
        return own.FACTOR

    @property
    def min_loss_scale(self) -> float:
        """Return the same as ``min_scale``."""
        return self.min_scale

    @property
    def cur_hysteresis(self) -> int:
        """Return the same as ``overflows_left``."""
        return self.overflows_left


class LossScalerBase:
    """A factor for the loss.

    Args:
        cur_scale: The factor.

    Attributes:
        cur_scale: The factor now.
        dynamic: Whether it changes.
    """

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = float(cur_scale)

    @property
    def loss_scale(self) -> float:
        """Return the factor now."""
        return self.cur_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the factor."""
        return loss * self.cur_scale

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run the backward of the loss times the factor."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether a gradient on this rank is not finite; a scale that never changes does not ask."""
        return self.dynamic and CheckOverflow().has_overflow_serial(params)

    def update_scale(self, overflow: bool) -> None:
        """Takes note of one step."""


class LossScaler(LossScalerBase):
    """A factor that stays.

    Args:
        scale: The factor.
    """

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)


class DynamicLossScaler(LossScalerBase):
    """A factor that doubles after steps without overflow and halves after overflows, as the engine's does.

    Args:
        init_scale: First factor, a power of two.
        scale_factor: Only 2.
        scale_window: Steps without overflow before it doubles.
        min_scale: Lowest factor.
        delayed_shift: Overflows until it halves.
        consecutive_hysteresis: Refill that tolerance after every step without overflow.
        raise_error_at_min_scale: An overflow at the lowest factor is an error.
        dtype: Changes nothing.

    Raises:
        ConfigError: A value out of its range.
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
        """Takes note of one step.

        Raises:
            StateError: It overflowed at the lowest factor, and that is an error.
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
