"""Let sentence-transformers load the best checkpoint of a run (``load_best_model_at_end``) into a sharded model.

Its trainers build a second model from the checkpoint and pass its state dict to ``load_state_dict``. At stage 3 the second model is sharded
too, so its state dict has no values, and the trainers only log the error: the run would end with its last weights. Trainer's own method
loads the engine's checkpoint, on all ranks. A checkpoint that cannot be loaded is then an error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hf_zero.core.units.unit import is_sharded


def load_best_model(method: Callable[[Any], None], trainer: Any) -> None:
    """Replace ``BaseTrainer._load_best_model``: load the engine's checkpoint if parameters are sharded; collective then."""
    if not any(map(is_sharded, trainer.model.parameters())):
        return method(trainer)
    from transformers import Trainer

    with suppress(AttributeError, ValueError):  # the model card is documentation: another name of the folder does not stop a run
        trainer.model.model_card_data.set_best_model_step(int(trainer.state.best_model_checkpoint.rpartition("-")[2]))
    return Trainer._load_best_model(trainer)
