"""Define the parts of an engine, and the interface that writes and reads its checkpoints."""

from __future__ import annotations

import hashlib
import inspect
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from hf_zero.comm.collectives import Collectives
from hf_zero.comm.hang_watch import LongWaits
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.runtime import Runtime
from hf_zero.core.stages import StagePolicy
from hf_zero.core.step.accumulation import Accumulation
from hf_zero.core.step.precision import LossScaler, PrecisionPolicy
from hf_zero.core.step.progress import Clock, Progress, Reports
from hf_zero.core.step.spikes import Spikes
from hf_zero.core.step.step import Stepper
from hf_zero.core.units.unit import Unit
from hf_zero.errors import StateError
from hf_zero.observe import announce, warn_once
from hf_zero.system import signals

_STEPS_BEFORE_WARNING = 10  # of a schedule that is never stepped


@dataclass(frozen=True)
class Restored:
    """Result of loading a checkpoint, for the engine.

    Attributes:
        path: Folder of the checkpoint.
        client_state: The client state that was passed to the save.
        counters: Counters of the engine; None when only the module was loaded.
    """

    path: str
    client_state: Any
    counters: Mapping[str, int] | None


class Checkpoints(Protocol):
    """Interface that writes and reads the checkpoints of an engine."""

    @property
    def rewinds(self) -> Any:
        """Return the object that restores saved states after spikes; None without rewinds."""

    @property
    def snapshot_folder(self) -> str | None:
        """Return the folder of the snapshots in host memory; None if none are taken."""

    def save(
        self, engine: Any, save_dir: str | os.PathLike[str], tag: Any, client_state: Mapping[str, Any], latest: bool, trained: bool
    ) -> None:
        """Write a checkpoint, of trained parameters only if ``trained``; collective."""

    def snapshot(self, engine: Any, client_state: Callable[[], Mapping[str, Any]]) -> bool:
        """Take a snapshot into host memory if one is due, and return whether it was taken; collective then."""

    def load(
        self, engine: Any, load_dir: str | os.PathLike[str], tag: Any, custom: Callable[..., Any] | None, **wanted: bool
    ) -> Restored | None:
        """Read a checkpoint into the engine's parts; return None when no tag is given and there is no ``latest``. Collective."""

    def rewind(self, engine: Any) -> None:
        """Take the engine back to the newest state that was saved, if there is one; collective."""

    def load_averages(self, engine: Any, folder: str, averages: Any) -> None:
        """Read a checkpoint's averages of weights into ``averages``, created after the load, if the checkpoint has them; collective."""

    def wait(self) -> None:
        """Wait until all background writes are complete; collective."""

    def close(self) -> None:
        """Stop the background writer and free it; local."""


@dataclass(frozen=True)
class EngineParts:
    """All parts of an engine.

    Attributes:
        runtime: Hooks on the module.
        units: All units, trainable and frozen.
        collectives: Network of the data-parallel axis.
        policy: Policy of the ZeRO stage.
        precision: Dtypes.
        scaler: Loss scale.
        accumulation: Decides which backward is the last of a step.
        samples_per_step: Number of samples of all ranks in an optimizer step.
        progress: Counters.
        clock: Times the phases.
        reports: Log lines and monitors.
        checkpoints: Writes and reads checkpoints.
        optimizer: Optimizer over the masters; None for an engine that only runs forward.
        stepper: Takes the optimizer steps; None for an engine that only runs forward.
        scheduler: Learning rate schedule that the engine steps; None when the caller steps a scheduler itself.
        give_back: Releases the process groups that only training needs; every rank calls it.
        spikes: Recognizes steps whose gradient norm or loss is far above earlier ones.
        preemption: Signals that ask the ranks to end.
        long_waits: Reports long waits of this rank.
        explain: Called with the engine, an error and the phase that failed (forward, backward or step), while the tensors of that phase
            still exist; may add to the error's message.
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
    spikes: Spikes = field(default_factory=lambda: Spikes("log", 0.0))
    preemption: Preemption = field(default_factory=lambda: Preemption(PreemptionSettings(number=0)))
    explain: Callable[[Any, BaseException, str], None] = lambda _engine, _error, _phase: None


class RunAgain:
    """Arguments of the last forward, if it raised.

    [Note: a forward and its second try] If a forward ran out of memory, and the script caught the error and runs it again, both are one
    micro-step and count once. A forward with another batch is the next micro-step: the rank has skipped one (``core/step/agreement.py``).
    The values of the arguments are compared, because a script may copy its batch to the device again; they are compared only after an
    error, so other forwards have no cost.
    """

    def __init__(self) -> None:
        self._raised: str | None = None

    def raised(self, given: Any) -> None:
        """Record that a forward with the arguments ``given`` has raised."""
        self._raised = _digest(given)

    def is_of(self, given: Any) -> bool:
        """Return whether ``given`` are the arguments of the forward that raised, and forget these arguments."""
        if self._raised is None:
            return False
        raised, self._raised = self._raised, None
        return raised == _digest(given)


def _digest(given: Any) -> str:
    """Return a digest of nested containers, equal for equal tensors and plain values; of other objects it contains only the class."""
    found = hashlib.sha256()
    for leaf in tree_leaves(given):
        if isinstance(leaf, torch.Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout is torch.strided and not leaf.is_meta:
                found.update(leaf.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        else:
            found.update(repr(leaf).encode() if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__.encode())
    return found.hexdigest()


def step_schedule(scheduler: Any, arguments: Mapping[str, Any] | None, samples: int, by_optimizer: int = 0) -> None:
    """Step ``scheduler``; pass ``samples`` if its ``step`` requires a number, because it counts samples.

    torch's own schedulers never get the number: ``ReduceLROnPlateau.step`` requires a metric, which only a script has.

    [Note: who steps the schedule] A script that calls ``optimizer.step()`` in place of ``engine.step()`` has the loop of plain PyTorch,
    with a ``scheduler.step()`` of its own. A step by the engine would be a second one: the schedule would run at twice its speed.

    Args:
        scheduler: Object with a ``step`` method.
        arguments: Keyword arguments for ``step``; None or empty if the caller gave none.
        samples: Number of samples of one optimizer step, on all ranks.
        by_optimizer: Number of this optimizer step if the script has called ``optimizer.step()`` for it; then nothing is stepped.
    """
    if by_optimizer:
        if by_optimizer == _STEPS_BEFORE_WARNING and getattr(scheduler, "last_epoch", None) == 0:
            warn_once(
                f"the script has called optimizer.step() {by_optimizer} times, and has not stepped the scheduler of initialize(): the "
                "learning rate is still the first one. optimizer.step() does not step the scheduler. If it counts updates, call "
                "scheduler.step() after optimizer.step(), or engine.step() in place of both"
            )
    elif not arguments and not isinstance(scheduler, LRScheduler) and _asks(scheduler.step):
        scheduler.step(samples)
    else:
        scheduler.step(**(arguments or {}))


def _asks(step: Any) -> bool:
    """Return whether ``step`` has a positional parameter without a default."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # a function that is not written in Python may have no signature
        return False
    return any(one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)


class Averages(Protocol):
    """Interface of one kind of average that an engine's checkpoints contain."""

    @property
    def name(self) -> str:
        """Return the name, unique among the averages of the engine."""

    def follow(self) -> None:
        """Rebuild after parameters have moved to other units."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return all tensors that this rank keeps for the average."""


class AppliedAverages:
    """Averages of an engine's weights, and the name of the one that replaces the weights now.

    Attributes:
        kept: All averages, by name.
        applied: Name of the average that replaces the weights; "" if there is none.
        loaded_from: Folder of the checkpoint that was loaded last with its optimizer state, for averages that are created after the load.
        loaded_steps: Number of optimizer steps in the counters of that checkpoint.
        half_loaded: Folder of a checkpoint whose load has begun to change the engine and has not ended; "" if there is none.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Averages] = {}
        self.applied = ""
        self.loaded_from = ""
        self.loaded_steps = 0
        self.half_loaded = ""

    def follow(self) -> None:
        """Rebuild all averages after units were laid out anew, before the next update changes the weights; collective."""
        for averages in self.kept.values():
            averages.follow()

    def require_loaded(self, what: str) -> None:
        """Raise if the engine holds a part of a checkpoint; ``what`` names the caller.

        Raises:
            StateError: The last load of a checkpoint failed after it had changed some values.
        """
        if self.half_loaded:
            raise StateError(
                f"{what} after a load of {self.half_loaded} that failed while it read values: the engine holds only a part of that "
                "checkpoint. Load another checkpoint with engine.load_checkpoint, or start the run again"
            )

    def require_weights(self, what: str) -> None:
        """Raise if averages or a part of a checkpoint replace the weights; ``what`` names the caller, which needs the trained weights.

        Raises:
            StateError: Averages replace the weights now, or the last load of a checkpoint failed after it had changed some of them.
        """
        self.require_loaded(what)
        if self.applied:
            raise StateError(
                f"{what} while the averages {self.applied!r} replace the weights (AveragedWeights.apply). First leave the `with "
                "averages.applied():` block, or call averages.restore() on all ranks; an error inside the block leaves the "
                "averages in place"
            )


@dataclass(frozen=True)
class PreemptionSettings:
    """Settings of preemption from a configuration.

    Attributes:
        number: Number of the signal; 0 listens for none.
        chosen: Whether the configuration names the signal itself; then the engine always listens for it.
        folder: Folder for the checkpoint of the step after which the ranks end; "" if the script or a library saves.
    """

    number: int
    chosen: bool = False
    folder: str = ""


class Preemption:
    """State of one engine's preemption.

    Args:
        settings: Settings from the configuration.

    Attributes:
        settings: The argument ``settings``.
        signal: Name of the signal that a rank has received, the same on all ranks from the same step on; "" while there is none.
        asked: Whether the script reads ``signal`` after its steps, so that it saves and ends by itself.
        listens: Whether the ranks listen; the same on all ranks. A rank whose engine is not in the main thread learns of the signal from
            other ranks.
    """

    def __init__(self, settings: PreemptionSettings) -> None:
        self.settings = settings
        self.signal = ""
        self.asked = False
        self.listens = False
        self._stop: Callable[[bool], None] | None = None

    def listen(self) -> None:
        """Begin to record the signal, until ``stop``; local."""
        self.listens = bool(self.settings.number)
        if self.listens and self._stop is None:
            self._stop = signals.listen(self.settings.number)

    def stop(self, deliver: bool = True) -> None:
        """Restore the former handler; ``deliver`` passes it a signal that was received and has not been handled at a boundary."""
        stop, self._stop, self.listens = self._stop, None, False
        if stop is not None:
            stop(deliver)

    def agree(self, number: int) -> None:
        """Record that the ranks have agreed that one of them received signal ``number``."""
        signals.answer()
        if not self.signal:
            self.signal = signal.Signals(number).name
            announce(f"a rank received {self.signal}: all ranks save a checkpoint and end after this step")


def not_a_loss(value: object) -> str:
    """Return the error message of a ``backward`` whose argument is no tensor; it says which likely mistake was made."""
    if value is None:
        remedy = 'give the model labels (labels=batch["shift_labels"] if a loader cuts sequences into slices)'
    elif getattr(value, "loss", None) is not None or (isinstance(value, dict) and "loss" in value):
        remedy = "pass its `loss`"
    elif isinstance(value, (int, float)):
        remedy = "do not call .item() on it before"
    else:
        remedy = "pass the tensor that the model or the criterion returned"
    shown = f" {value!r}" if isinstance(value, (int, float)) else ""
    return f"backward() needs the loss as a tensor, not {type(value).__name__}{shown}; {remedy}"
