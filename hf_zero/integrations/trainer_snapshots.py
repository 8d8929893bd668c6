"""Take snapshots under Trainer, let a Trainer whose ranks were restarted continue from the newest one, and send its files to a store.

[Note: a Trainer's snapshots] With ``hf_zero.snapshot_steps`` each rank's snapshot also holds Trainer's state, as client state. When the
launcher has started the ranks again, ``Trainer.train`` finds a folder ``checkpoint-N`` beside the snapshots with the files that it reads
from any checkpoint, made from the snapshot: its state, the random states, maybe a scheduler. The engine loads the snapshot itself. A
checkpoint of the output folder that is newer than the snapshot stays the choice.

After a spike an engine may restore a snapshot (``checkpoint/rewinds.py``). Trainer's own state needs no change then, because the step
counts like any step whose update was skipped; a scheduler that Trainer or accelerate steps is restored too.

Trainer's small files of a checkpoint go to the store that ``hf_zero.checkpoint_url`` names, and old checkpoints there are deleted:
[Note: a Trainer's files in a store]. ``Trainer._save_checkpoint`` runs on every rank; the ranks agree on the outcome.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_zero.assembly.same_settings import everyone_of
from hf_zero.checkpoint.commit import agreement, trainer_folders
from hf_zero.checkpoint.commit.trainer_folders import STATE_FILE
from hf_zero.checkpoint.engine_checkpoints import EngineCheckpoints
from hf_zero.checkpoint.load import read_client_state
from hf_zero.checkpoint.snapshots import folder_for, newest_in
from hf_zero.checkpoint.state.beside import generator_states, restore_generators
from hf_zero.comm.collectives import Collectives
from hf_zero.core.engine import Engine
from hf_zero.integrations import callers, methods
from hf_zero.observe import log_rank0
from hf_zero.system import own_files
from hf_zero.system.process import leads_node
from hf_zero.system.reading import whole_json

_STATE_BYTES = 64 << 20  # of trainer_state.json, whose history grows with each record
_looked_at: weakref.WeakKeyDictionary[Engine, int] = weakref.WeakKeyDictionary()  # step after which ``take`` was last called

# -- taking -----------------------------------------------------------------------------------------------------------


def take(trainer: Any, engine: Engine) -> None:
    """Take a snapshot if one is due; called when Trainer has logged, evaluated and saved a step. Collective at the steps that are due.

    The last step of an epoch waits for ``on_epoch_end``, after which Trainer asks again: what it does there belongs before the snapshot.
    """
    checkpoints = engine.checkpoints
    if not isinstance(checkpoints, EngineCheckpoints) or checkpoints.snapshots is None:
        return
    again = _looked_at.get(engine) == engine.progress.global_steps
    _looked_at[engine] = engine.progress.global_steps
    if trainer.control.should_training_stop or (float(trainer.state.epoch).is_integer() and not again):
        return
    with engine.clock.aside():
        checkpoints.snapshot(engine, lambda: _state_of(trainer))


def _state_of(trainer: Any) -> dict[str, Any]:
    """Return the content of Trainer's own files of a checkpoint, without random states; content that is equal on all ranks is on rank 0.
    Collective.
    """
    from accelerate.utils import DeepSpeedSchedulerWrapper
    from transformers.trainer_callback import ExportableState

    trainer.store_flos()
    if trainer.args.process_index:
        return {}
    state = copy.copy(trainer.state)
    state.stateful_callbacks = copy.deepcopy(state.stateful_callbacks)
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            known = state.stateful_callbacks.get(type(callback).__name__)
            if isinstance(known, list):
                known.append(callback.state())
            else:
                state.stateful_callbacks[type(callback).__name__] = callback.state()
    own = not isinstance(trainer.lr_scheduler, DeepSpeedSchedulerWrapper)  # a wrapped one is the engine's
    return {
        "state": json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n",
        "scheduler": trainer.lr_scheduler.state_dict() if own else None,
    }


# -- going back -------------------------------------------------------------------------------------------------------

_accelerators: weakref.WeakKeyDictionary[Engine, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def note_accelerator(engine: Engine) -> None:
    """Record the Accelerator whose ``prepare`` makes an engine; called when the engine is complete."""
    for call in callers.running(methods.PREPARE):
        _accelerators[engine] = weakref.ref(call.caller)


def schedulers_of(engine: Engine) -> list[Any]:
    """Return the schedulers of an engine's learning rate that Trainer or accelerate steps, without accelerate's wrappers."""
    made = _accelerators.get(engine)
    accelerator = made() if made is not None else None
    found = list(getattr(accelerator, "_schedulers", ()))
    found += [call.caller.lr_scheduler for call in callers.running(methods.TRAIN) if call.caller.model_wrapped is engine]
    if not found:
        return []
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DeepSpeedSchedulerWrapper

    others = [one for one in found if one is not None and not isinstance(one, DeepSpeedSchedulerWrapper)]  # a wrapped one is the engine's
    return [one.scheduler if isinstance(one, AcceleratedScheduler) else one for one in others]


# -- going on ---------------------------------------------------------------------------------------------------------


def resume(trainer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``Trainer.train`` with the newest snapshot of this run, unless it is older than the checkpoint that they
    name; collective if the configuration requests snapshots.

    Raises:
        CheckpointError: On every rank, if the files of a snapshot cannot be written.
    """
    given = kwargs.get("resume_from_checkpoint", args[0] if args else None)
    trial = kwargs.get("trial", args[1] if len(args) > 1 else None)
    settings = _settings(trainer)
    if not settings.get("snapshot_steps") or trial is not None:
        return args, dict(kwargs)
    net, folder = everyone_of(None), folder_for(settings.get("snapshot_folder") or "")
    if net.any_rank(folder is None, "snapshots") or folder is None:
        return args, dict(kwargs)
    least = agreement.on_first(net, "looking for Trainer's checkpoint", lambda: _steps_of(trainer, given))
    tag = newest_in(folder, net, least)
    if tag is None:
        return args, dict(kwargs)
    found = _write_files(trainer, net, folder, tag, bool(settings.get("pickle_client_state")))
    other = f"the checkpoint is of step {least}" if least >= 0 else "there is no checkpoint"
    log_rank0("Trainer continues from the snapshot of step %s; %s", found.name.rpartition("-")[2], other)
    if args:
        return (str(found), *args[1:]), dict(kwargs)
    return args, {**kwargs, "resume_from_checkpoint": str(found)}


def _settings(trainer: Any) -> Mapping[str, Any]:
    """Return the section ``hf_zero`` of the configuration of a Trainer."""
    if not getattr(trainer, "is_deepspeed_enabled", False):
        return {}
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
    section = config.get("hf_zero")
    return section if isinstance(section, Mapping) else {}


def _steps_of(trainer: Any, given: Any) -> int:
    """Return the optimizer steps of the checkpoint that the script names; -1 if there is none."""
    from transformers.trainer_utils import get_last_checkpoint

    if isinstance(given, bool) or given is None:
        folder = get_last_checkpoint(trainer.args.output_dir) if given and os.path.isdir(trainer.args.output_dir) else None
    else:
        folder = os.fspath(given)
    state = whole_json(Path(folder, STATE_FILE), _STATE_BYTES) if folder is not None else None
    steps = state.get("global_step") if isinstance(state, dict) else None
    return steps if isinstance(steps, int) else -1


def _write_files(trainer: Any, net: Collectives, snapshots: Path, tag: str, may_unpickle: bool) -> Path:
    """Write Trainer's files of a snapshot into a folder of its own, once per node, and return that; collective."""
    what = f"writing Trainer's files of {snapshots / tag}"
    folder = snapshots / f"checkpoint-{tag.removeprefix('global_step')}"

    def write() -> None:
        if not leads_node():
            return
        for left in snapshots.glob("checkpoint-*"):
            own_files.remove_private(left)
        own_files.make_folders(folder / tag)  # Trainer looks for a name like this
        held = read_client_state(snapshots / tag, 0, may_unpickle)["client_state"]
        own_files.write_text(folder / STATE_FILE, held["state"])
        if held["scheduler"] is not None:
            with own_files.replacing(folder / "scheduler.pt") as file:
                torch.save(held["scheduler"], file)

    def write_random_states() -> None:
        held = read_client_state(snapshots / tag, net.rank, may_unpickle)
        if held["ranks"] != net.world:
            return
        with _drawn(held["random"], net.topology.device), own_files.for_library(folder) as place:
            trainer._save_rng_state(str(place))

    agreement.quickly(net, what, write)
    agreement.quickly(net, what, write_random_states)
    return folder


@contextmanager
def _drawn(states: Mapping[str, Any], device: torch.device) -> Iterator[None]:
    """Return a context in which the random generators have the states of a snapshot."""
    before = generator_states(device)
    restore_generators(states, device)
    try:
        yield
    finally:
        restore_generators(before, device)


def save_checkpoint(function: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Trainer._save_checkpoint``: also send its files to the store, if the configuration names one; collective.

    Raises:
        CheckpointError: A file could not be sent or deleted; on every rank.
    """
    result = function(trainer, *args, **kwargs)
    engine = getattr(trainer, "model_wrapped", None)
    checkpoints = engine.checkpoints if isinstance(engine, Engine) else None
    if not isinstance(checkpoints, EngineCheckpoints) or not checkpoints.url or trainer.args.save_only_model:
        return result
    trial = kwargs.get("trial", args[1] if len(args) > 1 else None)
    folder = Path(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}")
    net, place = checkpoints.everyone(), checkpoints.place_for(folder)
    what = f"sending the files of {folder} to {place}"
    rank = trainer.args.process_index
    agreement.on_all(net, what, lambda: trainer_folders.send(folder, place, trainer_folders.own_names(folder, rank)))
    agreement.on_first(net, what, lambda: trainer_folders.send(folder, place, [trainer_folders.STATE_FILE]))
    limit = trainer.args.save_total_limit
    if limit is not None and limit > 0:
        best = os.path.basename(trainer.state.best_model_checkpoint or "")
        agreement.on_first(net, f"rotating the checkpoints in {place.parent}", lambda: trainer_folders.rotate(place.parent, limit, best))
    log_rank0("Trainer's files of %s are in %s", folder, place)
    return result
