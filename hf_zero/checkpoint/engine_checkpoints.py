"""Between an engine and its checkpoints: which parts are saved, and what a load changes in the engine besides them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_zero.checkpoint.background import Background
from hf_zero.checkpoint.export import write_model_files
from hf_zero.checkpoint.load import LoadRequest, load_checkpoint
from hf_zero.checkpoint.save import SaveRequest, save_checkpoint
from hf_zero.checkpoint.slices import Slice
from hf_zero.checkpoint.state import TensorAxis, TrainingState
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.recorded import open_collectives
from hf_zero.comm.topology import group_timeout, joint_topology
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.core import hooks
from hf_zero.core.offloaded_states import require_states
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.units.tp_shard import tp_shard_of
from hf_zero.observe import log_rank0, warn_once
from hf_zero.tensor_parallel.same_data import SameData

if TYPE_CHECKING:
    from hf_zero.core.engine import Engine


def _training_state(engine: Engine) -> TrainingState:
    require_states(engine, "saving or loading a checkpoint")
    progress = engine.progress
    return TrainingState(
        module=engine.module,
        units=engine.units,
        collectives=engine.collectives,
        everyone=_everyone(engine),
        tensor=_tensor_axis(engine),
        stage=engine.policy.stage,
        optimizer=engine.optimizer if isinstance(engine.optimizer, ShardedOptimizer) else None,
        scheduler=engine.lr_scheduler,
        scaler=engine.scaler,
        counters={
            "global_steps": progress.global_steps,
            "skipped_steps": progress.skipped_steps,
            "global_samples": progress.global_samples,
            "micro_steps": engine.accumulation.micro_steps,
        },
    )


def _everyone(engine: Engine) -> Collectives:
    joint = joint_topology(engine.collectives.topology)
    return engine.collectives if joint is engine.collectives.topology else open_collectives(joint)


def _tensor_axis(engine: Engine) -> TensorAxis:
    """What this rank holds of the parameters that the model axis divides."""
    model = engine.collectives.topology.model
    if model is None:
        return TensorAxis()
    slices = {}
    for name, param in engine.module.named_parameters():
        part = tp_shard_of(param)
        if part is not None:
            slices[name] = Slice(tuple(part.full_shape), part.dim, tuple((piece.start, piece.stop) for piece in part.ranges))
    return TensorAxis(model.rank, model.world, slices)


def save(engine: Engine, save_dir: str | os.PathLike[str], tag: Any, client_state: Mapping[str, Any], latest: bool, trained: bool) -> bool:
    """Saves ``engine``; see ``Engine.save_checkpoint``. ``trained``: leave frozen parameters out."""
    name = str(tag) if tag is not None else f"global_step{engine.progress.global_steps}"
    if engine.stepper is not None and any(entry.has_local or entry.shard is not None for entry in engine.stepper.reducer.gradients):
        warn_once("save_checkpoint() between backward and step: the gradients accumulated so far are not part of a checkpoint")
    start = time.monotonic()
    writer = engine.settings.checkpoint.writer
    direct = writer is None or writer.type != "python"
    node_local = engine.settings.checkpoint.use_node_local_storage
    request = SaveRequest(os.fspath(save_dir), name, client_state, latest, trained, direct, node_local)
    folder = save_checkpoint(_training_state(engine), request, engine.background)
    how = "saved to"
    if engine.background is not None:
        reason = next(filter(None, (ask() for ask in hooks.reasons_to_wait)), "")
        if reason:
            warn_once(reason)
            wait(engine)
        else:
            how = "copied, and is being written in the background to"
    log_rank0("checkpoint %s %s (%.2f s)", how, folder, time.monotonic() - start)
    return True


def background_of(settings: ZeroConfig, collectives: Collectives) -> Background | None:
    """What writes checkpoints behind the training loop, when the configuration asks for it."""
    writer, cache = settings.checkpoint.writer, settings.datastates_ckpt
    if not ((writer is not None and writer.decoupled) or cache is not None):
        return None
    if settings.checkpoint.use_node_local_storage:
        log_rank0("checkpoints on each node's own disk are written before save_checkpoint returns, not in the background")
        return None
    gigabytes = cache.host_cache_size if cache is not None else None
    limit = None if gigabytes is None else int(gigabytes * 2**30)
    return Background(joint_topology(collectives.topology).rank, group_timeout(collectives.topology).total_seconds(), limit)


def wait(engine: Engine) -> None:
    """Waits until a checkpoint that is written in the background is complete; collective.

    Raises:
        CheckpointError: It could not be written; on every rank, with the same text.
    """
    if engine.background is not None:
        engine.background.finish(_everyone(engine))


def load(
    engine: Engine, load_dir: str | os.PathLike[str], tag: Any, custom: Callable[..., Any] | None, **wanted: bool
) -> tuple[str | None, dict[str, Any] | None]:
    """Loads into ``engine``; see ``Engine.load_checkpoint``. ``wanted``: flags of ``LoadRequest``."""
    wait(engine)
    engine.runtime.reshard_for_update()
    from_fp32 = engine.settings.zero_optimization.load_from_fp32_weights
    name, nodes = None if tag is None else str(tag), engine.settings.checkpoint.use_node_local_storage
    request = LoadRequest(os.fspath(load_dir), name, masters_from_fp32=from_fp32, custom=custom, node_local=nodes, **wanted)
    loaded = load_checkpoint(_training_state(engine), request)
    if loaded is None:
        return None, None
    engine.discard_gradients()
    if loaded.counters is not None:
        progress, counters = engine.progress, loaded.counters
        progress.global_steps = counters.get("global_steps", 0)
        progress.skipped_steps = counters.get("skipped_steps", 0)
        progress.global_samples = counters.get("global_samples", 0)
        engine.accumulation.micro_steps = counters.get("micro_steps", 0)
    model_axis = engine.collectives.topology.model
    if model_axis is not None:
        # What else is resumed, loaders and random states, may be that of other groups.
        SameData(engine.module, open_collectives(model_axis))
    log_rank0("checkpoint loaded from %s", loaded.path)
    return str(loaded.path), loaded.client_state


def save_16bit_model(engine: Engine, save_dir: str | os.PathLike[str], filename: str, trained: bool, max_shard_size: int | str) -> bool:
    """Writes the whole weights as safetensors files; see ``Engine.save_16bit_model``."""
    require_states(engine, "save_16bit_model()")
    if engine.policy.shards_parameters and not engine.settings.zero_optimization.stage3_gather_16bit_weights_on_model_save:
        log_rank0(
            "no model saved to %s: zero_optimization.stage3_gather_16bit_weights_on_model_save is false. Set it to true, or save a "
            "checkpoint (save_checkpoint) and run the zero_to_fp32.py in its folder",
            save_dir,
        )
        return False
    write_model_files(engine.module, engine.collectives, Path(save_dir), filename, trained, max_shard_size)
    return True
