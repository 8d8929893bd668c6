"""Modules that were loaded with this rank's part of their values alone, before there is an engine: guarded until one divides the model.

What the part is, is noted on the module itself: the engine may get it inside of another one (an adapter, a class of the script), or a
copy of it, whose parameters have no marks.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hf_zero.core.units.empty_values import guard_state_dict
from hf_zero.errors import StateError

Refuse = Callable[..., None]
"""A forward pre-hook that raises ``called_before_engine``; a function of a module, so that copies of what it guards are guarded."""


def guard(module: nn.Module, refuse: Refuse) -> None:
    """Has ``refuse`` come before every forward of ``module``, and state dicts of it say what is not here."""
    for inner in module.modules():
        guard_state_dict(inner)
    if refuse not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(refuse, prepend=True)


def release(module: nn.Module, refuse: Refuse) -> None:
    """Takes ``refuse`` off: the module is an engine's now, which guards its state dict too."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is refuse:
            del module._forward_pre_hooks[key]


def called_before_engine(module: nn.Module, what: str) -> StateError:
    """The error for a forward of ``module``, of which this rank has loaded ``what`` alone."""
    return StateError(
        f"{type(module).__name__} was called, and this rank has loaded {what} alone. Call the model that accelerator.prepare(model) or "
        "initialize(model=model, ...) has prepared, on all ranks; a model that is to stay whole (a teacher, say) is loaded before the "
        "configuration"
    )
