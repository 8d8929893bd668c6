"""Send Trainer's small files of a checkpoint to the store that ``hf_zero.checkpoint_url`` names, and delete old checkpoints there.

See [Note: a Trainer's files in a store]. ``Trainer._save_checkpoint`` runs on every rank; the ranks agree on the outcome.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.commit import agreement, trainer_folders
from hf_zero.checkpoint.engine_checkpoints import EngineCheckpoints
from hf_zero.core.engine import Engine
from hf_zero.observe import log_rank0


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
