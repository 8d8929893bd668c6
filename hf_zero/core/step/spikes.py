"""Recognize optimizer steps whose gradient norm is far above the norms before it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hf_zero.observe import log_rank0

WINDOW = 100  # largest number of earlier norms that a new one is compared with
LEAST = 20  # number of earlier norms that are needed to detect a spike
MOST_SKIPPED = 10  # number of consecutive spikes after which large norms count as usual


@dataclass
class NormSpikes:
    """Comparison of each gradient norm with the median of the last ones.

    Later norms are not compared with spikes. After ``MOST_SKIPPED`` consecutive spikes the norm has grown permanently, so the comparison
    starts again without earlier norms. Every rank has the same norm, so all ranks decide alike without communication.

    Attributes:
        factor: A norm above this many times the median is a spike.
        skips: Whether the update of such a step is skipped.
        norms: The last norms that were not spikes, at most ``WINDOW``.
        consecutive: Number of spikes since the last norm that was not a spike.
    """

    factor: float
    skips: bool
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    consecutive: int = 0

    def found(self, norm: float, step: int, samples: tuple[int, int]) -> bool:
        """Return whether ``norm`` is a spike, and log it.

        Args:
            norm: Gradient norm before clipping, without loss scale. One that is not finite is a spike at any time.
            step: Number of the optimizer step, from 1 on.
            samples: Number of the step's first sample among all samples of the run, and 1 + the number of its last.
        """
        usual = median(self.norms) if len(self.norms) >= LEAST else math.inf
        if math.isfinite(norm) and norm <= self.factor * usual:
            self.norms.append(norm)
            self.consecutive = 0
            return False
        self.consecutive += 1
        log_rank0(
            "step=%d: the gradient norm %.4g is %.3g times the median of the last %d steps (%.4g); samples %d to %d of the run. %s",
            step,
            norm,
            norm / usual if usual else math.inf,
            len(self.norms),
            usual,
            samples[0],
            samples[1] - 1,
            "The update is skipped" if self.skips else "The update is made",
        )
        if self.consecutive == MOST_SKIPPED:
            log_rank0("step=%d: the last %d norms were all that large; from now on they count as usual", step, MOST_SKIPPED)
            self.norms.clear()
            self.consecutive = 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON values: ``norms`` and ``consecutive``."""
        return {"norms": list(self.norms), "consecutive": self.consecutive}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.norms = deque(state["norms"], maxlen=WINDOW)
        self.consecutive = state["consecutive"]
