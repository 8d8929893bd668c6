"""Refuse calls of modules whose parameters have no values yet.

Such a module has sharded parameters that no engine unshards, or holds only the part of this rank and waits for an engine to divide the
model. The part is noted on the module itself: the engine may get it inside of another one (an adapter, a class of the script), or a copy of
it, whose parameters have no marks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_zero.core.units.empty_values import guard_state_dict
from hf_zero.core.units.unit import find_unit, is_sharded
from hf_zero.errors import StateError

# Attribute of an engine's forward hook: the module for which it was made. A deep copy of the module has the same hooks.
HOOKED_MODULE = "_hf_zero_module"


def refuse_sharded(module: nn.Module, *_: Any) -> None:
    """Refuse the forward of a module that belongs to no engine, as its forward pre-hook.

    Raises:
        StateError: A parameter of the module is an empty tensor now.
    """
    for param in module._parameters.values():
        if param is not None and is_sharded(param):
            unit, index = find_unit(param)  # type: ignore[misc]
            raise StateError(
                f"{type(module).__name__} was called, but its parameter {unit.layout.slots[index].name} is divided over the ranks (ZeRO "
                "stage 3) and no engine gathers it. Call the model that accelerator.prepare(model) or initialize(model=model, ...) has "
                "prepared (a deep copy needs an engine of its own); or run it, on all ranks, inside "
                "`with hf_zero.zero.GatheredParameters(list(model.parameters())):`"
            )


def guard_unprepared(module: nn.Module) -> None:
    """Put the guard on a module whose parameters have been sharded."""
    if refuse_sharded not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(refuse_sharded, prepend=True)


def unguard_unprepared(module: nn.Module) -> None:
    """Remove the guards of ``module`` and all modules in it, and the hooks that a deep copy has of its original's engine."""
    for inner in module.modules():
        for hooks in (inner._forward_pre_hooks, inner._forward_hooks):
            for key, hook in list(hooks.items()):
                if hook is refuse_sharded or getattr(hook, HOOKED_MODULE, inner) is not inner:
                    del hooks[key]
                    inner._forward_pre_hooks_with_kwargs.pop(key, None)
                    inner._forward_hooks_with_kwargs.pop(key, None)
                    inner._forward_hooks_always_called.pop(key, None)


Refuse = Callable[..., None]
"""Forward pre-hook that raises ``called_before_engine``; a module-level function, so that copies of a guarded module are guarded."""


def guard(module: nn.Module, refuse: Refuse) -> None:
    """Run ``refuse`` before every forward of ``module``, and let its state dicts name the missing parameters."""
    for inner in module.modules():
        guard_state_dict(inner)
    if refuse not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(refuse, prepend=True)


def release(module: nn.Module, refuse: Refuse) -> None:
    """Remove ``refuse``, because the module belongs to an engine now, which guards its state dict too."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is refuse:
            del module._forward_pre_hooks[key]


def called_before_engine(module: nn.Module, what: str) -> StateError:
    """Return the error for a forward of ``module``, of which this rank has loaded only ``what``."""
    return StateError(
        f"{type(module).__name__} was called directly, but this rank has loaded only {what}. Call the model that "
        "accelerator.prepare(model) or initialize(model=model, ...) has prepared, on all ranks. To keep a model whole (a "
        "teacher, say), load it before the configuration is created"
    )
