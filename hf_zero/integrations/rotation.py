"""Whether the library that is saving deletes older checkpoints before a save in the background could be complete.

Trainer, Accelerate and Lightning keep the newest few checkpoints and delete the others themselves, right after a save or before the
next one, and do not tell the engine. The last complete checkpoint must never be deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_zero.integrations import callers


@dataclass(frozen=True)
class Rotation:
    """How a library limits its checkpoints.

    Attributes:
        limit: Checkpoints that the object which is saving keeps; None when it keeps all.
        least: Limit from which on a complete one stays while another is being written.
        setting: What the limit is called, for messages.
    """

    limit: Callable[[Any], int | None]
    least: int
    setting: str


def _of_accelerator(accelerator: Any) -> int | None:
    project = accelerator.project_configuration
    limit: int | None = project.total_limit if project.automatic_checkpoint_naming else None
    return limit


def _of_callback(callback: Any) -> int | None:
    limit: int = callback.save_top_k
    return None if limit < 0 else limit


_LIGHTNING = Rotation(_of_callback, 2, "save_top_k of ModelCheckpoint")
_ROTATIONS = {
    callers.TRAIN: Rotation(lambda trainer: trainer.args.save_total_limit or None, 2, "save_total_limit of TrainingArguments"),
    # Deletes before it saves: what is in the background then is a save that no call has waited for.
    callers.SAVE_STATE: Rotation(_of_accelerator, 3, "total_limit of ProjectConfiguration"),
    callers.LIGHTNING_SAVE: _LIGHTNING,
    callers.OLD_LIGHTNING_SAVE: _LIGHTNING,
}


def keeps_too_few() -> str:
    """A sentence on the limit of the library that calls the engine, when it is too low for a save in the background; else ""."""
    for call in callers.running(*_ROTATIONS):
        rotation = _ROTATIONS[call.method]
        limit = rotation.limit(call.caller)
        if limit is not None and 0 <= limit < rotation.least:
            return (
                f"{rotation.setting} is {limit}: older checkpoints would be deleted while the newest is not complete, so it is "
                f"written before the call returns. Set it to {rotation.least} or more to save in the background"
            )
    return next(filter(None, map(callers.lost, _ROTATIONS)), "")
