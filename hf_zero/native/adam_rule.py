"""The hyper-parameters of one Adam step, and the numbers that every implementation of it derives from them alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

# How weights decay, as ``hf_zero_kernels.h`` counts.
NO_DECAY, L2, DECOUPLED = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class AdamRule:
    """One step of Adam or AdamW.

    Attributes:
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the weights.
        decoupled: True decays as AdamW does, False adds the decay to the gradient.
        bias_correction: Divide the moments by ``1 - beta ** step``.
        step: Number of this step, from 1.
        grad_factor: Multiplies the gradient first: unscaling and clipping together.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: bool = True
    step: int
    grad_factor: float = 1.0

    @property
    def minus_step(self) -> float:
        """What the first moment over the root is multiplied with."""
        return -(self.lr / (1 - self.betas[0] ** self.step if self.bias_correction else 1.0))

    @property
    def root_divisor(self) -> float:
        """What the root of the second moment is divided by."""
        return math.sqrt(1 - self.betas[1] ** self.step if self.bias_correction else 1.0)

    @property
    def decay(self) -> float:
        """Multiplied with the weights: their new share, or, for L2, what goes to the gradient."""
        return 1 - self.lr * self.weight_decay if self.decoupled else float(self.weight_decay)

    @property
    def decay_mode(self) -> int:
        """``NO_DECAY``, ``L2`` or ``DECOUPLED``."""
        return NO_DECAY if self.weight_decay == 0 else DECOUPLED if self.decoupled else L2
