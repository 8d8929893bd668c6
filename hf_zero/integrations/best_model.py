"""Let trainers of sentence-transformers and adapters load the best checkpoint (``load_best_model_at_end``) into a sharded model.

sentence-transformers builds a second model from the checkpoint and passes its state dict to ``load_state_dict``. At stage 3 the second
model is sharded too, so its state dict has no values, and the trainer only logs the error: the run would end with its last weights.
adapters loads the files of its adapters into sharded parameters, which is an error. Trainer's own method loads the engine's checkpoint, on
all ranks; a checkpoint that cannot be loaded is then an error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hf_zero.core.units.unit import is_sharded


def load_best_model(method: Callable[[Any], None], trainer: Any) -> None:
    """Replace ``_load_best_model`` of a trainer: load the engine's checkpoint if parameters are sharded; collective then."""
    if not any(map(is_sharded, trainer.model.parameters())):
        return method(trainer)
    from transformers import Trainer

    # A model card is documentation: that there is none, or the folder has another name, does not stop a run.
    with suppress(AttributeError, ValueError):
        trainer.model.model_card_data.set_best_model_step(int(trainer.state.best_model_checkpoint.rpartition("-")[2]))
    return Trainer._load_best_model(trainer)
