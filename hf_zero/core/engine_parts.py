"""What an engine is made of, and what writes and reads its checkpoints."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

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
from hf_zero.errors import StateError


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


class RunAgain:
    """What the last forward was given, if it raised.

    [Note: a forward and its second try] A forward that ran out of memory, was caught and is run again is one micro-step, and so counts
    once. One that is given another batch is the next micro-step: the rank has skipped one (``core/step/same_pace.py``). The values
    are compared, because a script may bring its batch to the device anew; only after an error, so nothing else costs anything.
    """

    def __init__(self) -> None:
        self._raised: str | None = None

    def raised(self, given: Any) -> None:
        """A forward that was ``given`` this has raised."""
        self._raised = _digest(given)

    def is_of(self, given: Any) -> bool:
        """Return whether a forward that is ``given`` this is the one that raised, which is forgotten."""
        if self._raised is None:
            return False
        raised, self._raised = self._raised, None
        return raised == _digest(given)


def _digest(given: Any) -> str:
    """Equal for equal tensors and plain values in nested containers; of other objects the class alone counts."""
    found = hashlib.sha256()
    for leaf in tree_leaves(given):
        if isinstance(leaf, torch.Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout is torch.strided and not leaf.is_meta:
                found.update(leaf.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        else:
            found.update(repr(leaf).encode() if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__.encode())
    return found.hexdigest()


def step_schedule(scheduler: Any, arguments: Mapping[str, Any] | None, samples: int) -> None:
    """Steps ``scheduler``. One that counts samples itself has a ``step`` that asks for a number, and is given ``samples``.

    torch's own are never given any: what ``ReduceLROnPlateau.step`` asks for is a metric, which only a script has.

    Args:
        scheduler: Has ``step``.
        arguments: Keyword arguments for it; None or none where nobody gave any.
        samples: Of one optimizer step, on all ranks.
    """
    if not arguments and not isinstance(scheduler, LRScheduler) and _asks(scheduler.step):
        scheduler.step(samples)
    else:
        scheduler.step(**(arguments or {}))


def _asks(step: Any) -> bool:
    """Return whether ``step`` has a positional parameter without a default."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # of a function that is not Python's
        return False
    return any(one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)


class Averages(Protocol):
    """One kind of average that an engine's checkpoints hold."""

    @property
    def name(self) -> str:
        """Tells it from others of the engine."""

    def follow(self) -> None:
        """Parameters have come to other units."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return all that it keeps on this rank."""


class AppliedAverages:
    """What an engine knows of averages of its weights.

    Attributes:
        kept: All of them, by name.
        applied: Name of those that are in the place of the weights; "" where none are.
        loaded_from: Folder of the checkpoint that was loaded last with its optimizer state, for averages that are made after the load.
        loaded_steps: Optimizer steps that the checkpoint had counted.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Averages] = {}
        self.applied = ""
        self.loaded_from = ""
        self.loaded_steps = 0

    def follow(self) -> None:
        """Units were laid out anew: averages go with their parameters, before the next update changes these; collective."""
        for averages in self.kept.values():
            averages.follow()

    def require_weights(self, what: str) -> None:
        """Raises where the weights are averages now, and ``what`` needs those that are trained.

        Raises:
            StateError: They are.
        """
        if self.applied:
            raise StateError(
                f"{what} while the averages {self.applied!r} replace the weights (AveragedWeights.apply). First leave the `with "
                "averages.applied():` block, or call averages.restore() on all ranks; an error inside the block leaves the "
                "averages in place"
            )
