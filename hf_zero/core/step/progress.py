"""Count an engine's steps and samples, and report them in log lines and monitors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_zero.core.optimizer.param_groups import learning_rates
from hf_zero.core.step.clock import Clock
from hf_zero.metrics import Sink
from hf_zero.observe import log_rank0


@dataclass
class Progress:
    """Counters of one engine.

    Attributes:
        global_steps: Optimizer steps taken, skipped ones included.
        skipped_steps: Steps skipped for a gradient that is not finite.
        global_samples: Samples of all ranks seen at the boundaries.
        last_step_applied: Whether the last call of ``step`` updated the weights: not off the boundary, not on overflow.
        last_norm: Gradient norm of the last boundary, before clipping, inf if it was skipped; 0-dim tensor, or None before the first.
        last_loss: Loss given to the last backward, detached; on the device.
        loads: How often the weights were replaced by loaded ones.
        saved_at: ``global_steps`` at the last complete checkpoint that this engine has saved; -1 before the first.
    """

    global_steps: int = 0
    skipped_steps: int = 0
    global_samples: int = 0
    last_step_applied: bool = False
    last_norm: torch.Tensor | None = None
    last_loss: torch.Tensor | None = None
    loads: int = 0
    saved_at: int = -1

    def count_step(self, samples: int, norm: torch.Tensor, skipped: bool) -> None:
        """Count one optimizer step over ``samples`` samples of all ranks."""
        self.global_steps += 1
        self.global_samples += samples
        self.skipped_steps += skipped
        self.last_step_applied = not skipped
        self.last_norm = norm

    def restore(self, counters: Mapping[str, int]) -> None:
        """Set the counters to those of a checkpoint."""
        self.global_steps = counters.get("global_steps", 0)
        self.skipped_steps = counters.get("skipped_steps", 0)
        self.global_samples = counters.get("global_samples", 0)


@dataclass
class Reports:
    """Reports optimizer steps: a line in the log every few steps, and a record to each monitor after every step.

    Attributes:
        clock: Times the phases of a step.
        every: Optimizer steps between two lines; 0 or None prints none.
        sinks: Monitors, on rank 0.
        measures: Functions called on every rank with the number of the step; their results are recorded too. They may be collective.
        measured: Their last results that no caller has taken yet, for other loggers.
    """

    clock: Clock
    every: int | None = None
    sinks: list[Sink] = field(default_factory=list)
    measures: Sequence[Callable[[int], Mapping[str, float]]] = ()
    measured: dict[str, float] = field(default_factory=dict)

    def tell(self, progress: Progress, groups: Sequence[dict[str, Any]], loss_scale: float) -> None:
        """Print and record the progress of the run after a step.

        Args:
            progress: The counters; the step is counted already.
            groups: The optimizer's param groups.
            loss_scale: The factor of the coming backward.
        """
        measured = {name: value for measure in self.measures for name, value in measure(progress.global_steps).items()}
        self.measured |= measured
        print_line = bool(self.every) and progress.global_steps % self.every == 0  # type: ignore[operator]
        if not (print_line or self.sinks):
            return
        rates = learning_rates(groups)
        # Only here does the host wait for the device.
        loss = float(progress.last_loss) if progress.last_loss is not None else float("nan")
        norm = float(progress.last_norm) if progress.last_norm is not None else float("nan")
        if print_line:
            log_rank0(
                "step=%d, skipped=%d, lr=%s, loss=%.6g, grad_norm=%.6g, samples/s=%.2f",
                progress.global_steps,
                progress.skipped_steps,
                rates,
                loss,
                norm,
                self.clock.samples_per_second(),
            )
        record = {"Train/Samples/train_loss": loss, "Train/Samples/lr": rates[0] if rates else 0.0, "Train/Samples/grad_norm": norm}
        if loss_scale != 1.0:
            record["Train/Samples/loss_scale"] = loss_scale
        record |= measured
        for sink in self.sinks:
            sink.write(record, progress.global_samples)

    def close(self) -> None:
        """Close the monitors."""
        for sink in self.sinks:
            sink.close()
        self.sinks = []
