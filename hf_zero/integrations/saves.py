"""Make ``save_pretrained`` write unsharded weights, and find out whether a library would delete older checkpoints too early.

Ranks that do not write return at once, and no file contains the slices of one rank. Trainer, accelerate and Lightning keep the newest few
checkpoints and delete the others themselves, right after a save or before the next one, without notifying the engine. The last complete
checkpoint must never be deleted, so some saves must not run in the background.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from hf_zero.core.engine import Engine
from hf_zero.core.units.marks import tp_shard_of
from hf_zero.core.units.unit import find_unit, is_sharded
from hf_zero.deepspeed.held_weights import given_to_another_rank
from hf_zero.errors import StateError
from hf_zero.integrations import callers, lightning_table, methods
from hf_zero.integrations.expert_saves import gathered_for


class IdleSaves:
    """Replacements of the ``save_pretrained`` methods inside a module that is sharded at stage 3 or divided over ranks.

    [Note: ranks that do not write] Every rank calls ``model.save_pretrained(folder, is_main_process=..., state_dict=...)`` with the result
    of ``accelerator.get_state_dict(engine)``, which is a dict on rank 0 only. transformers 4 would then write on the other ranks too, from
    the model itself and into the same files. So a call with ``is_main_process=False`` and no values does nothing. A call also does nothing
    if the weights were gathered for another rank (ms-swift's trainer calls on all ranks). A call on rank 0 without values is an error for a
    divided model, because it would write slices under the names of complete parameters.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [inner for inner in module.modules() if _takes_state_dict(inner)]
        for inner in self._modules:
            inner.__dict__["save_pretrained"] = MethodType(_save_pretrained, inner)  # bound, so that a deep copy has its own

    def remove(self) -> None:
        """Remove the replacements; the runtime calls this when it removes its hooks."""
        for inner in self._modules:
            inner.__dict__.pop("save_pretrained", None)


def wrap_saves(engine: Engine) -> None:
    """Install ``IdleSaves`` in the module of a new engine that shards or divides it, until the engine's hooks are removed."""
    topology = engine.collectives.topology
    if engine.runtime.schedule is not None or topology.model is not None or topology.expert is not None:
        engine.runtime.keep(IdleSaves(engine.module))


def _takes_state_dict(module: nn.Module) -> bool:
    """Return whether ``save_pretrained`` takes ``is_main_process`` and ``state_dict`` (transformers, diffusers, PEFT)."""
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
            "save_pretrained: this rank has only slices of the model (tensor_parallel or expert_parallel). Save with "
            "trainer.save_model(folder); or call engine.save_16bit_model(folder) or model.save_pretrained(folder, "
            "state_dict=accelerator.get_state_dict(engine), is_main_process=accelerator.is_main_process) on all ranks"
        )
    if whole is not None:
        kwargs["state_dict"] = whole
    return method(module, *args, **kwargs)


class _OwnTensors:
    """Stand-in for a module in safetensors' ``save_model`` and ``load_model``: none of its tensors is a part of a unit's buffer.

    Both functions refuse a tensor that does not cover its whole storage.

    Args:
        module: The module, inside of an engine's model.
    """

    def __init__(self, module: nn.Module) -> None:
        self.load_state_dict = module.load_state_dict
        self._module = module

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of the module's tensors; tied tensors are one copy. Sharded ones come from the weights that were gathered."""
        values = self._module.state_dict()
        if any(is_sharded(param) for param in self._module.parameters()):
            return gathered_for(self._module) or values
        copies: dict[tuple[Any, ...], torch.Tensor] = {}
        for name, value in values.items():
            place = value.data_ptr(), value.shape, value.stride()
            if place not in copies:
                copies[place] = value.clone()
            values[name] = copies[place]
        return values


def with_own_tensors(function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``safetensors.torch.save_model`` and ``load_model``: give them a part of an engine's model as ``_OwnTensors``. Local.

    sentence-transformers saves layers of its own this way, on all ranks. A rank that did not get the gathered weights writes nothing.
    """
    if not isinstance(model, nn.Module) or all(find_unit(param) is None for param in model.parameters()):
        return function(model, *args, **kwargs)
    if function.__name__ == "save_model" and any(map(is_sharded, model.parameters())) and given_to_another_rank(model):
        return None
    return function(_OwnTensors(model), *args, **kwargs)


def writes_on_its_node() -> bool:
    """Return whether a library that saves now lets this rank write model files for its node (``save_on_each_node``). Local."""
    for call in callers.running(methods.SAVE_MODEL):
        return bool(call.caller.args.save_on_each_node and call.caller.args.should_save)
    for call in callers.running(methods.STATE_DICT):
        return bool(call.caller.project_configuration.save_on_each_node and call.caller.is_local_main_process)
    return False


@dataclass(frozen=True)
class Rotation:
    """A library's rule for deleting older checkpoints.

    Attributes:
        limit: Function that returns how many checkpoints the saving object keeps; None if it keeps all.
        least: Smallest limit with which a complete checkpoint remains while another one is being written.
        setting: Name of the limit in messages.
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
    methods.TRAIN: Rotation(lambda trainer: trainer.args.save_total_limit or None, 2, "save_total_limit of TrainingArguments"),
    # Deletes before it saves, while the previous save may still run in the background; so one more must be kept.
    methods.SAVE_STATE: Rotation(_of_accelerator, 3, "total_limit of ProjectConfiguration"),
    lightning_table.LIGHTNING_SAVE: _LIGHTNING,
    lightning_table.OLD_LIGHTNING_SAVE: _LIGHTNING,
}


def keeps_too_few() -> str:
    """Return a sentence if the calling library keeps too few checkpoints for a save in the background, or the limit is unknown; else ""."""
    for call in callers.running(*_ROTATIONS):
        rotation = _ROTATIONS[call.method]
        limit = rotation.limit(call.caller)
        if limit is not None and 0 <= limit < rotation.least:
            return (
                f"{rotation.setting} is {limit}: older checkpoints would be deleted before the newest is complete, so this checkpoint is "
                f"written before the call returns. Set {rotation.least} or more to save in the background"
            )
    return next(filter(None, map(callers.lost, _ROTATIONS)), "")
