"""Save a model in parts through ``save_pretrained``, and tell whether a library deletes older checkpoints too early.

Ranks that do not write are asked for nothing, and no file holds one rank's slices. Trainer, Accelerate and Lightning keep the newest few
checkpoints and delete the others themselves, right after a save or before the next one, and do not notify the engine. The last complete
checkpoint must never be deleted, so some saves may not run in the background.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from hf_zero.core.engine import Engine
from hf_zero.core.units.tp_shard import tp_shard_of
from hf_zero.core.units.unit import is_sharded
from hf_zero.deepspeed.held_weights import given_to_another_rank
from hf_zero.errors import StateError
from hf_zero.integrations import callers
from hf_zero.integrations.expert_saves import gathered_for


class IdleSaves:
    """Stands in front of the ``save_pretrained`` methods inside a module whose parameters stage 3 releases, or that several ranks hold.

    [Note: ranks that do not write] Every rank calls ``model.save_pretrained(folder, is_main_process=..., state_dict=...)`` with what
    ``accelerator.get_state_dict(engine)`` returns, and only rank 0 is given a dict. transformers 4 then writes on the others too, from
    the model itself and into the same files. With ``is_main_process=False`` and no values there is nothing to write, so nothing is called;
    nor where the weights were gathered for another rank, whoever else calls (ms-swift's trainer does on all ranks).
    Without values on rank 0 it would write slices, under the names of whole parameters; that is an error.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [inner for inner in module.modules() if _takes_state_dict(inner)]
        for inner in self._modules:
            inner.__dict__["save_pretrained"] = MethodType(_save_pretrained, inner)  # a method: a deep copy has its own

    def remove(self) -> None:
        """Takes the stand-ins away; the runtime calls it with its hooks."""
        for inner in self._modules:
            inner.__dict__.pop("save_pretrained", None)


def stand_before_saves(engine: Engine) -> None:
    """Puts them into a new engine's module, until the engine's hooks are removed."""
    topology = engine.collectives.topology
    if engine.runtime.schedule is not None or topology.model is not None or topology.expert is not None:
        engine.runtime.keep(IdleSaves(engine.module))


def _takes_state_dict(module: nn.Module) -> bool:
    """Return whether the module's ``save_pretrained`` is transformers' or diffusers', or PEFT's, which takes the dict among others."""
    method = getattr(type(module), "save_pretrained", None)
    if not callable(method):
        return False
    params = inspect.signature(method).parameters
    others = any(param.kind is param.VAR_KEYWORD for param in params.values())
    return "is_main_process" in params and ("state_dict" in params or others)


def _save_pretrained(module: Any, *args: Any, **kwargs: Any) -> Any:
    method = type(module).save_pretrained
    given = inspect.signature(method).bind_partial(module, *args, **kwargs).arguments
    whole = given.get("state_dict", kwargs.get("state_dict"))
    parts = any(tp_shard_of(param) is not None for param in module.parameters())
    if whole is not None or not (parts or any(is_sharded(param) for param in module.parameters())):
        return method(module, *args, **kwargs)
    if not given.get("is_main_process", True) or given_to_another_rank(module):
        return None
    whole = gathered_for(module)
    if parts and whole is None:
        raise StateError(
            "save_pretrained: this rank has slices of the model only (tensor_parallel or expert_parallel). Save with "
            "trainer.save_model(folder); or, called by all ranks, engine.save_16bit_model(folder) or model.save_pretrained(folder, "
            "state_dict=accelerator.get_state_dict(engine), is_main_process=accelerator.is_main_process)"
        )
    if whole is not None:
        kwargs["state_dict"] = whole
    return method(module, *args, **kwargs)


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
