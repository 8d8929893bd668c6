"""Which library is saving, and whether it deletes older checkpoints before a save in the background could be complete.

Trainer, Accelerate and Lightning keep the newest few checkpoints and delete the others themselves, right after a save or before the
next one. They do not tell the engine, so the frames of the call are asked. The last complete checkpoint must never be deleted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(frozen=True)
class Rotation:
    """How a library limits its checkpoints.

    Attributes:
        function: Name of its function that leads to the engine's save.
        limit: Checkpoints it keeps, of the object whose method that is; None when it keeps all, or is another object.
        least: Limit from which on a complete one stays while another is being written.
        setting: What the limit is called, for messages.
    """

    function: str
    limit: Callable[[Any], int | None]
    least: int
    setting: str


def _of_accelerator(caller: Any) -> int | None:
    project = caller.project_configuration
    limit: int | None = project.total_limit if project.automatic_checkpoint_naming else None
    return limit


def _of_callback(caller: Any) -> int | None:
    limit: int = caller.save_top_k
    return None if limit < 0 else limit


_ROTATIONS = (
    Rotation("_save_checkpoint", lambda caller: caller.args.save_total_limit or None, 2, "save_total_limit of TrainingArguments"),
    # Deletes before it saves: what is in the background then is a save that no call has waited for.
    Rotation("save_state", _of_accelerator, 3, "total_limit of ProjectConfiguration"),
    Rotation("_save_checkpoint", _of_callback, 2, "save_top_k of ModelCheckpoint"),
)


def keeps_too_few() -> str:
    """A sentence on the limit of the library that calls the engine, when it is too low for a save in the background; else ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for rotation in _ROTATIONS:
            if frame.f_code.co_name == rotation.function:
                limit = _limit_of(rotation, frame.f_locals.get("self"))
                if limit is not None and 0 <= limit < rotation.least:
                    return (
                        f"{rotation.setting} is {limit}: older checkpoints would be deleted while the newest is not complete, so it is "
                        f"written before the call returns. Set it to {rotation.least} or more to save in the background"
                    )
        frame = frame.f_back
    return ""


def _limit_of(rotation: Rotation, caller: Any) -> int | None:
    try:
        return rotation.limit(caller)
    except AttributeError:  # another library's function of that name
        return None
