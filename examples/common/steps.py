"""Arithmetic of epochs, steps and where a resumed run goes on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.arguments import FlagError

PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class StepPlan:
    """How many micro-steps and optimizer steps a run has."""

    micro_steps_per_epoch: int  # batches that each rank sees
    steps_per_epoch: int  # optimizer steps
    num_epochs: int
    max_train_steps: int


def plan_steps(
    samples: int, *, micro_batch_size: int, ranks: int, accumulation_steps: int, num_epochs: int, max_train_steps: int | None
) -> StepPlan:
    """Work out the steps of a run.

    Args:
        samples: Training samples.
        micro_batch_size: Samples per rank and micro-step.
        ranks: Data-parallel ranks.
        accumulation_steps: Micro-steps per optimizer step; what is left at the end of an epoch makes a step of its own.
        num_epochs: Epochs, used unless ``max_train_steps`` is given.
        max_train_steps: Optimizer steps; the epochs follow from it.
    """
    batches = -(-samples // micro_batch_size)
    micro_steps = -(-batches // ranks)
    steps = -(-micro_steps // accumulation_steps)
    if max_train_steps is None:
        return StepPlan(micro_steps, steps, num_epochs, num_epochs * steps)
    return StepPlan(micro_steps, steps, -(-max_train_steps // steps), max_train_steps)


@dataclass
class Progress:
    """Where a run is; written into each checkpoint as its last file, so that a folder without it is no checkpoint."""

    steps: int = 0  # optimizer steps done
    epoch: int = 0  # epoch in progress
    micro_steps_in_epoch: int = 0  # batches of that epoch already used
    metrics_before: dict[str, float] = field(default_factory=dict)  # of the evaluation before the first step

    def next_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.epoch, self.micro_steps_in_epoch = self.epoch + 1, 0

    def save(self, folder: Path) -> None:
        """Write the position into ``folder``, whole or not at all."""
        partial = folder / f"{PROGRESS_FILE}.partial"
        partial.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        partial.replace(folder / PROGRESS_FILE)

    @classmethod
    def load(cls, folder: Path) -> Progress:
        """Read the position from ``folder``.

        Raises:
            FlagError: ``folder`` is no checkpoint of these examples.
        """
        path = folder / PROGRESS_FILE
        if not path.is_file():
            raise FlagError(
                f"--resume_from_checkpoint {folder}: no {PROGRESS_FILE} in it. "
                "Give a step_N or epoch_N folder of an earlier run, or 'latest'."
            )
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def latest_checkpoint(output_dir: Path) -> Path | None:
    """The whole checkpoint in ``output_dir`` that is furthest on; None when there is none.

    A folder that a run was writing when it died has no position yet and is passed over.
    """
    found = [(Progress.load(path.parent).steps, path.parent.name) for path in output_dir.glob(f"*/{PROGRESS_FILE}")]
    return output_dir / max(found)[1] if found else None
