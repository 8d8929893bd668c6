"""What an engine is made of, and what writes and reads its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hf_zero.comm.collectives import Collectives
from hf_zero.comm.hang_watch import LongWaits
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.preemption import Preemption, PreemptionSettings
from hf_zero.core.schedule.runtime import Runtime
from hf_zero.core.stages import StagePolicy
from hf_zero.core.step.accumulation import Accumulation
from hf_zero.core.step.clock import Clock
from hf_zero.core.step.loss_scale import LossScaler
from hf_zero.core.step.precision import PrecisionPolicy
from hf_zero.core.step.progress import Progress, Reports
from hf_zero.core.step.step import Stepper
from hf_zero.core.units.unit import Unit


@dataclass(frozen=True)
class Restored:
    """What a load leaves to the engine.

    Attributes:
        path: Folder of the checkpoint.
        client_state: What was given to the save.
        counters: Those of the engine; None when only the module was wanted.
    """

    path: str
    client_state: Any
    counters: Mapping[str, int] | None


class Checkpoints(Protocol):
    """What writes and reads the checkpoints of an engine."""

    def save(
        self, engine: Any, save_dir: str | os.PathLike[str], tag: Any, client_state: Mapping[str, Any], latest: bool, trained: bool
    ) -> None:
        """Writes one, of trained parameters only if ``trained``; collective."""

    def load(
        self, engine: Any, load_dir: str | os.PathLike[str], tag: Any, custom: Callable[..., Any] | None, **wanted: bool
    ) -> Restored | None:
        """Reads one into the engine's parts; None when no tag is given and there is none. Collective."""

    def load_averages(self, engine: Any, folder: str, averages: Any) -> None:
        """Reads averages of weights that were made after the load of a checkpoint, where it has them; collective."""

    def wait(self) -> None:
        """Returns when what is written in the background is complete; collective."""

    def close(self) -> None:
        """Lets go of what writes in the background; local."""


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of.

    Attributes:
        runtime: Hooks on the module.
        units: All units, trainable and frozen.
        collectives: The data-parallel axis.
        policy: The ZeRO stage.
        precision: Element types.
        scaler: Loss scale.
        accumulation: Which backward is the last of a step.
        samples_per_step: Samples of all ranks in an optimizer step.
        progress: Counters.
        clock: Times the phases.
        reports: Log lines and monitors.
        checkpoints: Writes and reads checkpoints.
        optimizer: None for an engine that only runs forward.
        stepper: None likewise.
        scheduler: Stepped by the engine; None when the caller steps his own.
        give_back: Lets go of the process groups that only training needs; every rank calls it.
        preemption: Signals that ask the ranks to end.
        long_waits: Reports waits of this rank that take long.
        explain: Called with the engine, an error and the phase that it broke off (forward, backward or step), while what was alive still
            is; may add to the error's message.
    """

    runtime: Runtime
    units: list[Unit]
    collectives: Collectives
    policy: StagePolicy
    precision: PrecisionPolicy
    scaler: LossScaler
    accumulation: Accumulation
    samples_per_step: int
    progress: Progress
    clock: Clock
    reports: Reports
    checkpoints: Checkpoints
    optimizer: ShardedOptimizer | None = None
    stepper: Stepper | None = None
    scheduler: Any = None
    give_back: Callable[[], None] | None = None
    long_waits: LongWaits = field(default_factory=lambda: LongWaits(0))
    preemption: Preemption = field(default_factory=lambda: Preemption(PreemptionSettings(number=0)))
    explain: Callable[[Any, BaseException, str], None] = lambda _engine, _error, _phase: None
