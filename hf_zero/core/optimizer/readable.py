"""What training scripts read off the engine's optimizer, under DeepSpeed's names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch


def learning_rates(groups: Iterable[dict[str, Any]]) -> list[float]:
    """The rate of each param group; nan where the optimizer sets it itself (Adafactor with ``relative_step``)."""
    return [math.nan if group["lr"] is None else float(group["lr"]) for group in groups]


class ReadableOptimizer(torch.optim.Optimizer):
    """The part of the engine's optimizer that scripts log.

    Attributes:
        inner: The torch optimizer that does the arithmetic.
        scaler: The loss scale, with ``scale`` and ``dynamic``; None without an engine.
        norm: Norm of all gradients in the last step, before clipping, 0-dim tensor, inf if that step was skipped; None before the first.
    """

    inner: torch.optim.Optimizer
    scaler: Any
    norm: torch.Tensor | None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer."""
        return self.inner

    @property
    def loss_scale(self) -> float:
        """The factor the loss is multiplied with; 1 without fp16."""
        return float(self.scaler.scale) if self.scaler is not None else 1.0

    @property
    def cur_scale(self) -> float:
        """As ``loss_scale``."""
        return self.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes."""
        return bool(self.scaler.dynamic) if self.scaler is not None else False

    def needs_scaler(self) -> bool:
        """Whether a script's own backward needs ``engine.scale(loss)``: the loss scale changes, or is fixed at another factor than 1."""
        return self.dynamic_loss_scale or self.loss_scale != 1.0

    @property
    def loss_scaler(self) -> Any:
        """The loss scale with DeepSpeed's names: ``cur_scale``, ``cur_iter``, ``scale_window``, ...; None without an engine."""
        return self.scaler

    loss_scale_config = loss_scaler

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of every group."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """The learning rate of the first group; nan where the optimizer sets it itself."""
        return learning_rates(self.param_groups[:1])[0]

    @property
    def _global_grad_norm(self) -> float | None:
        """``norm`` as a number."""
        return None if self.norm is None else float(self.norm)
