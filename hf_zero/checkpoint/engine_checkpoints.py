"""Between an engine and its checkpoints: which parts are saved, and how."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hf_zero.checkpoint.commit import agreement, folders
from hf_zero.checkpoint.commit.background import Background
from hf_zero.checkpoint.commit.trainer_folders import note_place
from hf_zero.checkpoint.format.tp_shards import SavedTpShard
from hf_zero.checkpoint.load import LoadRequest, load_averages, load_checkpoint
from hf_zero.checkpoint.rewinds import Rewinds, Saved
from hf_zero.checkpoint.save import SaveRequest, save_checkpoint
from hf_zero.checkpoint.snapshots import Snapshots, folder_for, newest_in, own_folder, unpack
from hf_zero.checkpoint.state.beside import Batches, batches_in, divided, joined, states_beside, with_batches
from hf_zero.checkpoint.state.training_state import TensorAxis, TrainingState
from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.own_groups import own_topology
from hf_zero.comm.topology import group_timeout, joint_topology
from hf_zero.core.averages import AveragedWeights, follow_present_names
from hf_zero.core.engine import Engine, reasons_to_wait
from hf_zero.core.engine_parts import Restored
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.step.written import WrittenValues
from hf_zero.core.units.marks import tp_shard_of
from hf_zero.core.units.names import named_params
from hf_zero.errors import CheckpointArgumentError, CheckpointError, ConfigError, StateError, UnsupportedError
from hf_zero.observe import log_rank0, logger, warn_once
from hf_zero.pipeline.buffers import share_buffers
from hf_zero.system import signals
from hf_zero.system.object_store import ObjectPath, is_url, place_of, raw
from hf_zero.system.process import leads_node
from hf_zero.tensor_parallel.apply import mark_buffers
from hf_zero.tensor_parallel.same_data import SameData

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointSettings:
    """Settings of how checkpoints are written and read.

    Attributes:
        direct: Bypass the page cache where the file system lets that be.
        node_local: Every node has a disk of its own.
        in_background: A save returns when the state is copied, and the copy is written while training goes on.
        copy_bytes: The most host memory that such a copy may take; None is no limit.
        tag_validation: Reaction to different tags on different ranks: "fail", "warn" or "ignore".
        pickle_client_state: Pickle values of a client state that nothing else can keep, and read such.
        masters_from_fp32: Without optimizer states, take masters from the saved fp32 values; else from the training type.
        url: Place in an object store that replaces the local folders; empty for none.
        snapshot_steps: Optimizer steps between two snapshots in host memory; 0 for none.
        snapshot_folder: Folder that snapshots go to; empty for the system's shared memory.
        rewinds: Whether the engine restores saved states after spikes.
    """

    direct: bool
    node_local: bool
    in_background: bool
    copy_bytes: int | None
    masters_from_fp32: bool
    tag_validation: str
    pickle_client_state: bool
    url: str = ""
    snapshot_steps: int = 0
    snapshot_folder: str = ""
    rewinds: bool = False


class EngineCheckpoints:
    """Writer and reader of the checkpoints of one engine.

    Args:
        settings: Settings of the checkpoints.
        collectives: The data-parallel axis.

    Attributes:
        background: Writer beside the training loop; None when nothing is written in the background.
        snapshots: Snapshots in host memory; None when there are none.
        rewinds: Restores saved states after spikes; None if the configuration has no rewinds.
        batches: Batches that checkpoints hold the numbers of; None where the script alone knows its batches.
    """

    def __init__(self, settings: CheckpointSettings, collectives: Collectives) -> None:
        self._settings = settings
        self._collectives = collectives
        self.rewinds = Rewinds() if settings.rewinds and not collectives.pretended else None
        self.background: Background | None = None
        self.batches: Batches | None = None
        self._store: ObjectPath | None = None
        if settings.url:
            _check_url(settings)
            agreement.quickly(self.everyone(), "opening hf_zero.checkpoint_url", self._open)
        replicate = collectives.topology.replicate
        if settings.node_local and replicate is not None:
            raise UnsupportedError(
                f"checkpoint.use_node_local_storage with {replicate.world} shard groups (zero_optimization.mics_shard_size, "
                "dp_replicate_size) is not provided: each group writes only a part of the files, so no node's disk would hold "
                "all that its ranks need. Save to a folder that all nodes share, or remove the shard groups"
            )
        if settings.in_background and settings.node_local:
            log_rank0("checkpoints on each node's own disk are written before save_checkpoint returns, not in the background")
        elif settings.in_background:
            topology = collectives.topology
            self.background = Background(joint_topology(topology).rank, group_timeout(topology).total_seconds(), settings.copy_bytes)
        self.snapshots = self._open_snapshots() if settings.snapshot_steps and not collectives.pretended else None

    def _open_snapshots(self) -> Snapshots | None:
        net, base = self.everyone(), self._settings.snapshot_folder
        folder, waits = folder_for(base), self.rewinds is not None
        outlives = not net.any_rank(folder is None, "snapshots")
        if not (outlives or waits):
            warn_once(
                "hf_zero.snapshot_steps is set, but no launcher would start these ranks again, so no snapshot is taken. Start them with "
                "torchrun --max-restarts 3 or accelerate launch --max_restarts 3"
            )
            return None
        place = folder if outlives and folder is not None else own_folder(base, net)
        timeout = group_timeout(self._collectives.topology).total_seconds()
        return Snapshots(self._settings.snapshot_steps, place, net, timeout, waits, outlives)

    def save(
        self, engine: Engine, save_dir: str | os.PathLike[str], tag: Any, client_state: Mapping[str, Any], latest: bool, trained: bool
    ) -> None:
        """Save ``engine``; see ``Engine.save_checkpoint``. ``trained``: leave frozen parameters out."""
        if engine.stepper is not None and any(entry.has_local or entry.shard is not None for entry in engine.stepper.reducer.gradients):
            warn_once("save_checkpoint() between backward and step: the gradients accumulated so far are not part of a checkpoint")
        start = time.monotonic()
        settings = self._settings

        def ask() -> tuple[SaveRequest, TrainingState]:
            self._settle_writes(engine)  # collective, so before what may fail on one rank alone
            if not isinstance(client_state, Mapping):
                raise CheckpointError(f"client_state is a {type(client_state).__name__}; a dict is allowed, such as {{'epoch': 3}}")
            request = SaveRequest(
                self._place(save_dir, "save_dir"),
                str(tag) if tag is not None else f"global_step{engine.progress.global_steps}",
                self._with_states_beside(engine, client_state),
                latest,
                trained,
                settings.direct,
                settings.node_local,
                settings.tag_validation,
                may_pickle=settings.pickle_client_state,
            )
            return request, self.state_of(engine)

        request, state = self._agreed("save_checkpoint()", ask)
        _share_buffers(state)
        _name_newest(request.save_dir)
        folder = save_checkpoint(state, request, self.background)
        if isinstance(folder, ObjectPath) and self._store is not None and not is_url(save_dir):
            what = f"noting in {save_dir} that its checkpoint is in {folder.parent}"
            agreement.quickly(self.everyone(), what, lambda: _note(Path(save_dir), folder))
        if self.rewinds is not None:
            self.rewinds.saved(Saved(engine.progress.global_steps, raw(folder), node_local=settings.node_local))
        if latest and not trained:
            engine.progress.saved_at = engine.progress.global_steps
        how = "saved to"
        if self.background is not None:
            reason = next(filter(None, (ask() for ask in reasons_to_wait)), "")
            if reason:
                warn_once(reason)
                self.wait()
            else:
                how = "copied, and is being written in the background to"
        log_rank0("checkpoint %s %s (%.2f s)", how, folder, time.monotonic() - start)

    def _with_states_beside(self, engine: Engine, client_state: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.rewinds is not None:  # which the configuration excludes beside replica groups
            return joined(client_state, self.rewinds.states_beside(engine, self.everyone().world))
        return client_state if self.batches is None else with_batches(client_state, self.batches)

    def snapshot(self, engine: Engine, client_state: Callable[[], Mapping[str, Any]]) -> bool:
        """Take a snapshot of ``engine`` if one is due; see ``Engine.snapshot``."""
        snapshots = self.snapshots
        if snapshots is None or not snapshots.is_due(engine.progress.global_steps):
            return False
        start, net = time.monotonic(), self.everyone()
        if not snapshots.is_ready(net):
            return False

        def ask() -> tuple[TrainingState, dict[str, Any]]:
            self._settle_writes(engine)
            objects = self.rewinds.objects_of(engine) if self.rewinds is not None else []
            return self.state_of(engine), states_beside(objects, self._collectives.topology.device, net.world)

        state, beside = self._agreed("snapshot()", ask)
        _share_buffers(state)
        snapshots.take(state, client_state(), beside, self._settings.pickle_client_state)
        if self.rewinds is not None:
            self.rewinds.snapshot_taken(engine.progress.global_steps)
        logger.debug("snapshot of step %d copied (%.3f s)", engine.progress.global_steps, time.monotonic() - start)
        return True

    @property
    def snapshot_folder(self) -> str | None:
        """Return the folder of the snapshots in host memory; None if none are taken."""
        return str(self.snapshots.folder) if self.snapshots is not None else None

    def remind_of_snapshots(self, steps: int) -> Mapping[str, float]:
        """Warn after ``steps`` optimizer steps if the script takes no snapshots; a measure of ``Reports`` without numbers."""
        if self.snapshots is not None:
            self.snapshots.warn_if_unused(steps)
        return {}

    def load(
        self, engine: Engine, load_dir: str | os.PathLike[str], tag: Any, custom: Callable[..., Any] | None, **wanted: bool
    ) -> Restored | None:
        """Load a checkpoint into the parts of ``engine``; see ``Engine.load_checkpoint``. ``wanted``: flags of ``LoadRequest``."""
        settings = self._settings

        def ask() -> tuple[LoadRequest, TrainingState]:
            if isinstance(engine.optimizer, ShardedOptimizer):
                engine.optimizer.state_store.abandon_updates()
            # A value that a script has assigned (``param.data = value``) would replace the loaded one.
            self._settle_writes(engine)
            request = LoadRequest(
                self._place(load_dir, "load_dir"),
                None if tag is None else str(tag),
                masters_from_fp32=settings.masters_from_fp32,
                custom=custom,
                node_local=settings.node_local,
                may_unpickle=settings.pickle_client_state,
                else_from=_folder(load_dir, "load_dir") if self._store is not None else "",
                folder="",
                **wanted,
            )
            return request, self.state_of(engine, loads=True)

        request, state = self._agreed("load_checkpoint()", ask)
        whole = request.optimizer_states and request.scheduler_states and not request.module_only and custom is None
        snapshot = self._newer_snapshot(request, load_dir) if whole and self.snapshots is not None else None
        loaded = load_checkpoint(state, snapshot or request)
        if loaded is None:
            return None
        batches = batches_in(loaded.client_state)
        given, beside = divided(loaded.client_state)
        loaded, steps = replace(loaded, client_state=given), (loaded.counters or {}).get("global_steps", 0)
        if self.rewinds is not None:
            same = whole and snapshot is None and beside is not None
            saved = Saved(steps, raw(loaded.path), request.strict, settings.node_local) if same else None
            self.rewinds.loaded(saved, snapshot is not None)
        if self.batches is not None and whole and batches is not None:
            self.batches.continue_with(batches)
        if self.snapshots is not None and whole:
            self.snapshots.loaded((snapshot.tag or "") if snapshot is not None else "", steps)
            if snapshot is not None:
                # Trainer restores them at the position of its data where they belong.
                drawn = Path(load_dir).parent != self.snapshots.folder
                loaded = replace(loaded, client_state=unpack(loaded.client_state, state.everyone, drawn))
        if snapshot is None:
            _name_newest(request.load_dir)
        model_axis = self._collectives.topology.model
        if model_axis is not None:
            # What else is resumed, loaders and random states, may be that of other groups.
            SameData(engine.module, open_collectives(model_axis), tensor_only=self._collectives.topology.pipe is None)
        log_rank0("checkpoint loaded from %s", loaded.path)
        has_states = request.optimizer_states and not request.module_only and custom is None
        engine.averages.loaded_from = raw(loaded.path) if has_states else ""
        engine.averages.loaded_steps = steps
        return Restored(raw(loaded.path), loaded.client_state, loaded.counters)

    def _newer_snapshot(self, request: LoadRequest, given: str | os.PathLike[str]) -> LoadRequest | None:
        """Return the request for the newest snapshot where it is to be loaded in place of ``request``; collective.

        It is loaded if ``given`` is the folder of the snapshots or one in it. In place of checkpoints of another folder it is loaded only
        before the first step of this process: later the script wants what it asks for, such as the best model. A checkpoint that is named,
        or has more steps, stays the choice.
        """
        snapshots, net = self.snapshots, self.everyone()
        if snapshots is None or request.tag is not None:
            return None
        least = -1
        if snapshots.folder not in (Path(given), Path(given).parent):
            if snapshots.has_stepped:
                return None
            where = place_of(request.load_dir)
            least = agreement.on_first(net, f"looking at {request.load_dir}", lambda: folders.steps_of_newest(where))
        snapshots.finish(net)
        tag = newest_in(snapshots.folder, net, least)
        return (
            None if tag is None else replace(request, load_dir=str(snapshots.folder), tag=tag, node_local=snapshots.on_nodes, else_from="")
        )

    def rewind(self, engine: Engine) -> None:
        """Take ``engine`` back to the newest saved state after a spike; see ``rewinds.Rewinds.restore_newest``. Collective."""
        if self.rewinds is None:
            return
        self.wait()

        def ask() -> TrainingState:
            self._settle_writes(engine)
            return self.state_of(engine, loads=True)

        state = self._agreed("going back after a spike", ask)
        self.rewinds.restore_newest(engine, state, self.snapshots, self._settings.pickle_client_state)

    def load_averages(self, engine: Engine, folder: str, averages: AveragedWeights) -> None:
        """Read averages that were made after ``folder`` was loaded; see ``load.load_averages``."""
        load_averages(self.state_of(engine), place_of(folder), averages)

    def wait(self) -> None:
        """Wait until a checkpoint that is written in the background is complete; collective.

        Raises:
            CheckpointError: It could not be written; on every rank, with the same text.
        """
        if self.background is not None:
            self.background.finish(self.everyone())

    def close(self) -> None:
        """Drop the background writer, and remove the snapshots; local."""
        if self.snapshots is not None:
            self.snapshots.close()
        if self.background is not None:
            self.background.close()

    def state_of(self, engine: Engine, loads: bool = False) -> TrainingState:
        """Return the parts of ``engine`` that a checkpoint holds; ``loads``: to load them, which also an engine that is half loaded can do.

        Raises:
            StateError: Some of them wait on the host, or are not those of a training.
        """
        engine.offloaded_states.require_none("saving or loading a checkpoint")
        if engine.averages.applied or not loads:
            engine.averages.require_weights("saving or loading a checkpoint")
        progress = engine.progress
        follow_present_names(engine)
        return TrainingState(
            module=engine.module,
            units=engine.units,
            collectives=engine.collectives,
            everyone=self.everyone(),
            tensor=_tensor_axis(engine),
            stage=engine.stage_policy.stage,
            optimizer=engine.optimizer if isinstance(engine.optimizer, ShardedOptimizer) else None,
            scheduler=engine.lr_scheduler,
            scaler=engine.scaler,
            counters={
                "global_steps": progress.global_steps,
                "skipped_steps": progress.skipped_steps,
                "global_samples": progress.global_samples,
                "micro_steps": engine.accumulation.micro_steps,
            },
            averages=[kept for kept in engine.averages.kept.values() if isinstance(kept, AveragedWeights)],
            joinable=engine.stepper.trained.joinable() if engine.stepper is not None else (),
            join=engine.stepper.trained.join if engine.stepper is not None else lambda _names: None,
            spikes=engine.spikes if engine.spikes.compares else None,
            changing=partial(setattr, engine.averages, "half_loaded"),
        )

    def _agreed(self, what: str, ask: Callable[[], T]) -> T:
        """Return the result of ``ask`` on this rank, where it fails on none: one rank's mistake is everybody's error; collective."""
        try:
            return agreement.quickly(self.everyone(), what, ask)
        except CheckpointError as error:
            if isinstance(error.__cause__, StateError):  # this rank's own
                raise error.__cause__ from None
            raise

    @property
    def url(self) -> str:
        """Return the URL that replaces the local folders; empty if checkpoints go to these."""
        return self._settings.url

    def place_for(self, folder: str | os.PathLike[str]) -> ObjectPath:
        """Return the place in the store that replaces a local folder: below the URL, with the last name of the folder.

        Raises:
            CheckpointError: There is no store.
        """
        if self._store is None:
            raise CheckpointError("hf_zero.checkpoint_url is not set")
        return self._store / Path(os.path.abspath(folder)).name

    def _open(self) -> None:
        place = place_of(self._settings.url)
        self._store = place if isinstance(place, ObjectPath) else None

    def _place(self, given: Any, argument: str) -> str:
        """Return the path or URL of checkpoints in ``given``: below ``checkpoint_url`` if it is set and ``given`` is a path."""
        folder = _folder(given, argument)
        return folder if self._store is None or is_url(folder) else raw(self.place_for(folder))

    def _settle_writes(self, engine: Engine) -> None:
        """Adopt values that the script has written to parameters, and compare them over all ranks; collective."""
        everyone = self.everyone()
        WrittenValues(engine.units, self._collectives.data, everyone, engine.runtime.idle).agree(everyone)

    def everyone(self) -> Collectives:
        """Return the network of all ranks that save one checkpoint, including ranks with other parts of the model."""
        joint = joint_topology(self._collectives.topology)
        return self._collectives if joint is self._collectives.topology else open_collectives(own_topology(joint))


def _folder(given: Any, argument: str) -> str:
    """Return the path or URL that was given as ``argument``.

    Raises:
        CheckpointArgumentError: It is neither.
        CheckpointError: The library for the URL is not installed.
    """
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):  # an empty one would mean the working directory
        raise CheckpointArgumentError(f"{argument} is {given!r}, allowed is a path: a string or a pathlib.Path, or a URL")
    return raw(place_of(os.fspath(given)))


def _check_url(settings: CheckpointSettings) -> None:
    """Raise if ``hf_zero.checkpoint_url`` is no URL, or if every node saves to a disk of its own."""
    if not is_url(settings.url):
        raise ConfigError(f"hf_zero.checkpoint_url is {settings.url!r}, allowed is a URL such as 's3://bucket/run'")
    if settings.node_local:
        raise ConfigError(
            "hf_zero.checkpoint_url is storage that all nodes share, but checkpoint.use_node_local_storage is true; remove one of them"
        )


def _note(save_dir: Path, place: ObjectPath) -> None:
    """Leave a note of the place in the local folder, once per node."""
    if leads_node():
        note_place(save_dir, place.name, place)


def _name_newest(given: str | os.PathLike[str]) -> None:
    """Have the last words of a process name the newest checkpoint; it asks no store, which may take longer than the process has."""
    place = place_of(os.fspath(given))
    say = partial(folders.describe_newest, place) if isinstance(place, Path) else lambda: f"complete checkpoints are in {place}"
    signals.name_newest(say)


def _share_buffers(state: TrainingState) -> None:
    """Bring buffers, and their averages, of all stages of a pipeline to the ranks that write them; collective."""
    share_buffers(state.module)
    for averages in state.averages:
        share_buffers(state.module, averages.buffers)


def _tensor_axis(engine: Engine) -> TensorAxis:
    """Return the parts this rank holds of the parameters and buffers that the model axis divides, and of experts."""
    model = engine.collectives.topology.model
    if model is None and engine.collectives.topology.expert is None:
        return TensorAxis()
    parts = {name: tp_shard_of(param) for name, param in named_params(engine.module)}
    parts |= mark_buffers(engine.module, engine.collectives.topology)
    shards = {}
    for name, part in parts.items():
        if part is not None:
            shards[name] = SavedTpShard(tuple(part.full_shape), part.dim, tuple((piece.start, piece.stop) for piece in part.ranges))
    return TensorAxis(model.rank, model.world, shards) if model is not None else TensorAxis(tp_shards=shards)
