"""Restore an engine's newest saved state after a spike, and continue with the batches after the spike.

[Note: a rewind] Steps s+1 to k follow the state that was saved at step s, and step k is a spike (``core/step/spikes.py``). The rewind
restores weights, masters, moments, averages, loss scale, schedulers, former norms and losses, and random generators of step s. The batches
of steps s+1 to k are not trained again, and the counters of batches (``global_steps``, ``global_samples``, ``micro_steps``) continue from
k. So a rewind is the same as if the updates of steps s+1 to k had been skipped, and these steps are added to ``skipped_steps``. The
position of the data, logs and monitors do not change, and a run that resumes from a later checkpoint reads the next batch as usual.

The state of step s is the newest that a rewind in another process would find too: the last snapshot, or a checkpoint that was saved or
loaded after it. So a run that resumes from a checkpoint restores the same states as the run that wrote it, and no checkpoint contains
steps that a rewind drops. A due snapshot waits until the previous one is written, while without rewinds it would be skipped; so the saved
states do not depend on time. Each rewind requests a snapshot: if the launcher restarts the ranks, they continue after the skipped batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.commit import agreement, folders
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import INDEX_FILE
from hf_zero.checkpoint.load import LoadRequest, load_checkpoint
from hf_zero.checkpoint.snapshots import Snapshots
from hf_zero.checkpoint.state.beside import divided, restore_beside, states_beside
from hf_zero.checkpoint.state.training_state import TrainingState
from hf_zero.comm.collectives import Collectives
from hf_zero.core.engine import Engine, rewound_with_engine
from hf_zero.core.step.spikes import MOST_REWINDS
from hf_zero.errors import CheckpointError, StateError
from hf_zero.observe import log_rank0
from hf_zero.system.object_store import place_of


@dataclass(frozen=True)
class Saved:
    """One saved state.

    Attributes:
        steps: Optimizer steps of the engine when it was saved.
        folder: Path or URL of the complete checkpoint.
        strict: The checkpoint must hold exactly this model's parameters and buffers.
        node_local: Every node has a part of it, and ``folder`` is this rank's.
        is_snapshot: Whether it is in host memory.
    """

    steps: int
    folder: str
    strict: bool = True
    node_local: bool = False
    is_snapshot: bool = False

    @property
    def name(self) -> str:
        """Return the state in words."""
        return f"the snapshot of step {self.steps}" if self.is_snapshot else f"the checkpoint {self.folder} of step {self.steps}"


class Rewinds:
    """Rewinds of one engine, see [Note: a rewind].

    Attributes:
        objects: Objects of the script that a rewind also restores.
    """

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._checkpoint: Saved | None = None  # the last one that was saved or loaded as a whole
        self._since: int | None = None  # steps of the first snapshot since the last load; None before it

    def objects_of(self, engine: Engine) -> list[Any]:
        """Return all objects that a rewind of ``engine`` restores: the script's, and schedulers that its library steps; each once.

        Raises:
            StateError: A scheduler steps the learning rate, and the engine does not know it.
        """
        found = [*self.objects, *(one for source in rewound_with_engine for one in source(engine))]
        groups = engine.optimizer.param_groups
        if not found and engine.lr_scheduler is None and any("initial_lr" in group for group in groups):
            raise StateError(
                "hf_zero.spike_action is rewind, and a scheduler that the engine does not know changes the learning rate; rewinds do not "
                "restore it. Pass the scheduler to initialize() (lr_scheduler=) or accelerator.prepare(), or call "
                "engine.rewind_also(scheduler)"
            )
        return list({id(one): one for one in found}.values())

    def states_beside(self, engine: Engine, world: int) -> dict[str, Any]:
        """Return the states that a checkpoint or snapshot of ``engine`` holds beside it, see ``state/beside.py``; local."""
        return states_beside(self.objects_of(engine), engine.collectives.topology.device, world)

    def saved(self, checkpoint: Saved) -> None:
        """Record the checkpoint that was just saved."""
        self._checkpoint = checkpoint

    def snapshot_taken(self, steps: int) -> None:
        """Record that a snapshot was begun after ``steps`` optimizer steps."""
        self._since = steps if self._since is None else self._since

    def loaded(self, checkpoint: Saved | None, from_snapshot: bool = False) -> None:
        """Record a load: states that were saved before it belong to other steps, or lack the loaded values.

        Args:
            checkpoint: The checkpoint; None if it does not hold the whole state that the engine has now.
            from_snapshot: A snapshot was loaded.
        """
        self._checkpoint, self._since = checkpoint, 0 if from_snapshot else None

    # -- going back -----------------------------------------------------------------------------------------------------

    def restore_newest(self, engine: Engine, state: TrainingState, snapshots: Snapshots | None, may_unpickle: bool) -> None:
        """Restore the newest saved state of ``engine``; if there is none to restore, log this and change nothing. Collective.

        Args:
            engine: The engine, after the step that is a spike, whose update was not made.
            state: Its parts.
            snapshots: Its snapshots.
            may_unpickle: Read pickled values of the client state.

        Raises:
            CheckpointError: On every rank, if the saved state is damaged.
        """
        net, spikes, progress = state.everyone, engine.spikes, engine.progress
        step = progress.global_steps
        found = self._newest(net, snapshots)
        if found is None:
            log_rank0("step=%d: there is no snapshot or checkpoint to restore, so only this update is skipped", step)
            return
        what = f"going back to {found.name}"
        counters = agreement.on_first(net, what, lambda: _counters_of(found))
        updates = counters["global_steps"] - counters["skipped_steps"]
        if not spikes.may_rewind(updates):
            log_rank0(
                "step=%d: after each of the last %d spikes the weights of step %d were restored, so now only this update is skipped. If "
                "spikes continue, start from an older checkpoint, with a lower learning rate",
                *(step, MOST_REWINDS, counters["global_steps"]),
            )
            return
        rewinds = spikes.rewinds + 1 if updates == spikes.updates else 1
        measured = {**spikes.measured, "Train/Spike/back_to_step": float(found.steps)}
        engine.runtime.reshard_for_update()
        request = LoadRequest(
            found.folder, strict=found.strict, node_local=found.node_local, may_unpickle=may_unpickle, folder=found.folder
        )
        loaded = load_checkpoint(state, request)
        if loaded is None:
            raise CheckpointError(f"{what}: it is no longer there")
        beside = loaded.client_state if found.is_snapshot else divided(loaded.client_state)[1] or {}
        objects, device = self.objects_of(engine), engine.collectives.topology.device
        agreement.quickly(net, what, lambda: restore_beside(beside, objects, device, net.world))
        progress.loads += 1
        progress.skipped_steps = counters["skipped_steps"] + step - counters["global_steps"]
        spikes.rewound(rewinds, updates, step, measured)
        if snapshots is not None:
            snapshots.request_snapshot()  # so restarted ranks do not train the batches before it again
        log_rank0(
            "step=%d: restored %s; the batches of steps %d to %d are skipped, and training continues",
            step,
            found.name,
            found.steps + 1,
            step,
        )

    def _newest(self, net: Collectives, snapshots: Snapshots | None) -> Saved | None:
        """Return the newest state that can be gone back to; None if there is none. Collective."""
        present: list[Saved] = []
        if snapshots is not None:
            snapshots.finish(net)
            steps = int(snapshots.kept.removeprefix("global_step") or -1)
            if self._since is not None and steps >= self._since:
                folder = str(snapshots.folder / snapshots.kept)
                present.append(Saved(steps, folder, node_local=snapshots.on_nodes, is_snapshot=True))
        if self._checkpoint is not None:
            present.append(self._checkpoint)
        for saved in sorted(present, key=lambda one: one.steps, reverse=True):  # of the same step the snapshot: it is nearer
            if not net.any_rank(not folders.is_complete(place_of(saved.folder)), "saved state"):
                return saved
            log_rank0("%s is no longer there", saved.name)
        return None


def _counters_of(saved: Saved) -> dict[str, int]:
    folder = folders.files_of(place_of(saved.folder)) or Path(saved.folder)
    counters = Index.from_json(folders.read_index(folder), str(folder / INDEX_FILE)).counters
    return {name: counters.get(name, 0) for name in ("global_steps", "skipped_steps")}
