"""Recognize optimizer steps whose gradient norm or loss is far above the steps before them.

The mean of the loss over all ranks is compared ([Note: the loss of a step]); an unknown loss is never a spike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from hf_zero.core.step.step_sum import StepSum
from hf_zero.observe import log_rank0

WINDOW = 100  # largest number of earlier values that a new one is compared with
LEAST = 20  # number of earlier values that are needed to detect a spike
MOST_SKIPPED = 10  # number of consecutive spikes after which large values count as usual
MOST_REWINDS = 3  # number of times in succession that an engine restores the same weights
ENDINGS = {"log": "The update is made", "skip": "The update is skipped", "rewind": "The update is not made"}


@dataclass
class Window:
    """The last usual values of one quantity.

    Attributes:
        name: Name in the log.
        factor: A value above this many times the median is a spike; 0 compares nothing.
        least: Smallest median that values are compared with; a multiple of a smaller one means nothing.
        values: The last values that were not spikes, at most ``WINDOW``.
    """

    name: str
    factor: float
    least: float
    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def usual(self) -> float:
        """Return the median; inf as long as nothing is compared with it."""
        middle = median(self.values) if len(self.values) >= LEAST else math.inf
        return middle if middle >= self.least else math.inf

    def has_spike(self, value: float) -> bool:
        """Return whether ``value`` is a spike; one that is not finite is a spike at any time."""
        return bool(self.factor) and not (math.isfinite(value) and value <= self.factor * self.usual)

    def describe(self, value: float) -> str:
        """Return a clause about a value that is a spike."""
        if not math.isfinite(value):
            return f"{self.name} is {value}"
        times = value / self.usual if self.usual else math.inf
        return f"{self.name} {value:.4g} is {times:.3g} times the median of the last {len(self.values)} steps ({self.usual:.4g})"


class Spikes:
    """Comparison of each step's gradient norm and loss with the medians of the last ones.

    Later values are not compared with those of a step that was a spike. After ``MOST_SKIPPED`` consecutive spikes the values have grown
    permanently, so the comparison starts again without earlier values. Every rank has the same norm and the same loss, so all ranks decide
    alike without communication.

    Args:
        action: "log", "skip" or "rewind".
        norm_factor: A norm above this many times the median is a spike; 0 compares no norms.
        loss_factor: The same for the loss.

    Attributes:
        action: See the argument.
        norms: The last gradient norms.
        losses: The last losses. Multiples of a median of 0 or less mean nothing, so nothing is compared with it.
        loss: The loss of the coming step.
        consecutive: Number of spikes since the last step that was none.
        rewinds: Number of times in succession that the engine restored the same weights.
        updates: Number of updates in these weights; -1 before the first rewind.
        found_at: Step of the last spike; 0 if there was none.
        measured: Numbers of that spike, for monitors.
    """

    def __init__(self, action: str, norm_factor: float, loss_factor: float = 0.0) -> None:
        self.action = action
        self.norms = Window("the gradient norm", norm_factor, 0.0)
        self.losses = Window("the loss", loss_factor, math.ulp(0.0))
        self.consecutive = 0
        self.rewinds, self.updates = 0, -1
        self.found_at = 0
        self.measured: dict[str, float] = {}
        self.loss = StepSum()

    @property
    def compares(self) -> bool:
        """Return whether any quantity is compared."""
        return bool(self.norms.factor or self.losses.factor)

    # -- decisions ------------------------------------------------------------------------------------------------------

    def watch(self, steps: int, begin: int, samples: int) -> StepWatch | None:
        """Return the watch of the coming step; None if nothing is compared.

        Args:
            steps: Number of optimizer steps before it.
            begin: Number of samples of all ranks before it.
            samples: Number of samples of one step.
        """
        self.found_at = 0
        return StepWatch(self, steps + 1, (begin, begin + samples)) if self.compares else None

    def found(self, norm: float, step: int, samples: tuple[int, int], loss: float | None = None) -> bool:
        """Return whether a step is a spike, and log it.

        Args:
            norm: Gradient norm before clipping, without loss scale. One that is not finite is a spike at any time.
            step: Number of the optimizer step, from 1 on.
            samples: Number of the step's first sample among all samples of the run, and 1 + the number of its last.
            loss: Mean loss of the step, see [Note: the loss of a step]; None if it is unknown.
        """
        values = {"grad_norm": (self.norms, norm)} | ({"loss": (self.losses, loss)} if loss is not None else {})
        large = {name: (window, value) for name, (window, value) in values.items() if window.has_spike(value)}
        if not large:
            for window, value in values.values():
                if window.factor:
                    window.values.append(value)
            self.consecutive = 0
            return False
        self.consecutive += 1
        what = ", and ".join(window.describe(value) for window, value in large.values())
        log_rank0("step=%d: %s; samples %d to %d of the run. %s", step, what, samples[0], samples[1] - 1, ENDINGS[self.action])
        numbers = {**{name: value for name, (_, value) in large.items()}, "step": step, "first_sample": samples[0]}
        self.found_at, self.measured = step, {f"Train/Spike/{name}": float(value) for name, value in numbers.items()}
        if self.consecutive == MOST_SKIPPED:
            log_rank0("step=%d: the last %d steps were all spikes; from now on such values count as normal", step, MOST_SKIPPED)
            for window, _ in large.values():
                window.values.clear()
            self.consecutive = 0
        return True

    def measure(self, step: int) -> Mapping[str, float]:
        """Return the numbers of the spike of ``step``; none if that was no spike. A measure of ``Reports``."""
        return self.measured if step == self.found_at else {}

    def requires_rewind(self, step: int) -> bool:
        """Return whether ``step`` was a spike after which the engine must restore a saved state."""
        return self.action == "rewind" and step == self.found_at

    def may_rewind(self, updates: int) -> bool:
        """Return whether the engine may restore weights with ``updates`` updates: at most ``MOST_REWINDS`` times in succession."""
        return updates != self.updates or self.rewinds < MOST_REWINDS

    def rewound(self, rewinds: int, updates: int, step: int, measured: dict[str, float]) -> None:
        """Record that the engine has restored a state after the spike of ``step``; norms and losses are loaded already."""
        self.rewinds, self.updates = rewinds, updates
        self.found_at, self.measured = step, measured

    # -- checkpoints ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON values: ``norms``, ``losses``, ``consecutive``, ``rewinds`` and ``updates``."""
        return {
            "norms": list(self.norms.values),
            "losses": list(self.losses.values),
            "consecutive": self.consecutive,
            "rewinds": self.rewinds,
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; one from before losses were compared has norms alone."""
        self.norms.values = deque(state["norms"], maxlen=WINDOW)
        self.losses.values = deque(state.get("losses", ()), maxlen=WINDOW)
        self.consecutive = state["consecutive"]
        self.rewinds, self.updates = state.get("rewinds", 0), state.get("updates", -1)


@dataclass(frozen=True)
class StepWatch:
    """Comparison of one optimizer step.

    Attributes:
        spikes: The values of the steps before it.
        step: Number of the step, from 1 on.
        samples: Number of its first sample among all samples of the run, and 1 + the number of its last.
    """

    spikes: Spikes
    step: int
    samples: tuple[int, int]

    def loss_message(self, device: torch.device) -> torch.Tensor | None:
        """Return this rank's message about the loss, which ranks sum, see ``StepSum.message``; None if no losses are compared."""
        return self.spikes.loss.message(device) if self.spikes.losses.factor else None

    def skips(self, norm: torch.Tensor, message: torch.Tensor | None, world: int) -> bool:
        """Return whether the engine must skip the update because the step is a spike.

        Args:
            norm: Gradient norm, 0-dim.
            message: The sum of ``loss_message`` over ranks.
            world: Number of ranks in the sum.
        """
        numbers = norm.double().reshape(1) if message is None else torch.cat([norm.double().reshape(1), message])
        measured, *loss = numbers.tolist()
        mean = loss[0] / world if loss and not loss[1] else None
        return self.spikes.found(measured, self.step, self.samples, mean) and self.spikes.action != "log"
