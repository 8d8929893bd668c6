"""Between an engine and its checkpoints: which parts are saved, and what a load changes in the engine besides them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_zero.checkpoint.export import write_model_file
from hf_zero.checkpoint.load import LoadRequest, load_checkpoint
from hf_zero.checkpoint.save import SaveRequest, save_checkpoint
from hf_zero.checkpoint.state import TrainingState
from hf_zero.observe import log_rank0, warn_once
from hf_zero.optim.sharded import ShardedOptimizer

if TYPE_CHECKING:
    from hf_zero.engine.engine import Engine


def _training_state(engine: Engine) -> TrainingState:
    progress = engine.progress
    return TrainingState(
        module=engine.module,
        units=engine.units,
        collectives=engine.collectives,
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


def save(engine: Engine, save_dir: str | os.PathLike[str], tag: Any, client_state: Mapping[str, Any], latest: bool, trained: bool) -> bool:
    """Saves ``engine``; see ``Engine.save_checkpoint``. ``trained``: leave frozen parameters out."""
    name = str(tag) if tag is not None else f"global_step{engine.progress.global_steps}"
    if engine.stepper is not None and any(entry.has_local or entry.shard is not None for entry in engine.stepper.reducer.gradients):
        warn_once("save_checkpoint() between backward and step: the gradients accumulated so far are not part of a checkpoint")
    folder = save_checkpoint(_training_state(engine), SaveRequest(os.fspath(save_dir), name, client_state, latest, trained))
    log_rank0("checkpoint saved to %s", folder)
    return True


def load(
    engine: Engine, load_dir: str | os.PathLike[str], tag: Any, custom: Callable[..., Any] | None, **wanted: bool
) -> tuple[str | None, dict[str, Any] | None]:
    """Loads into ``engine``; see ``Engine.load_checkpoint``. ``wanted``: flags of ``LoadRequest``."""
    engine.runtime.release_for_update()
    from_fp32 = engine.settings.zero_optimization.load_from_fp32_weights
    request = LoadRequest(os.fspath(load_dir), None if tag is None else str(tag), masters_from_fp32=from_fp32, custom=custom, **wanted)
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
    log_rank0("checkpoint loaded from %s", loaded.path)
    return str(loaded.path), loaded.client_state


def save_16bit_model(engine: Engine, save_dir: str | os.PathLike[str], filename: str, trained: bool) -> bool:
    """Writes the whole weights as one safetensors file; see ``Engine.save_16bit_model``."""
    if engine.policy.shards_parameters and not engine.settings.zero_optimization.stage3_gather_16bit_weights_on_model_save:
        log_rank0("no model saved: zero_optimization.stage3_gather_16bit_weights_on_model_save is false")
        return False
    write_model_file(engine.module, engine.collectives, Path(save_dir), filename, trained)
    return True
