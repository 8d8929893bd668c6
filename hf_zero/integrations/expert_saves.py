"""Whole weights for those who save a divided model: of experts or layers, and of a model that a trainer saves in its own way.

[Note: a trainer's own way of saving] Trainer gathers the weights on all ranks and gives them to ``_save`` on rank 0. sentence-transformers
has a ``_save`` of its own, which lets each part of the model save itself and forgets them; no rank could gather there. So what was
gathered is kept while ``save_model`` runs, and given to a part that asks to be saved without (``saves.py``).

Imports little: every program that saves with accelerate comes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_zero.deepspeed.held_weights import held_for
from hf_zero.integrations import callers

_GATHERED = "state dict of all ranks"


def get_state_dict(method: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """``Accelerator.get_state_dict``; of an engine with divided experts or layers the whole weights, on rank 0; collective then."""
    axes = getattr(getattr(model, "collectives", None), "topology", None)
    divided = getattr(axes, "expert", None) is not None or getattr(axes, "pipe", None) is not None
    if divided and not model.stage_policy.parameters_sharded:
        return model._consolidated_16bit_state_dict()
    found = method(accelerator, model, *args, **kwargs)
    for call in callers.running(callers.SAVE_MODEL)[:1]:
        call.given[_GATHERED] = found
    return found


def gathered_for(module: nn.Module) -> dict[str, Any] | None:
    """The whole weights of a part of a model that a Trainer is saving or its script holds, on this rank; None where there are none."""
    for call in callers.running(callers.SAVE_MODEL)[:1]:
        names = (name for name, inner in call.caller.model.named_modules() if inner is module)
        whole, name = call.given.get(_GATHERED), next(names, None)
        if whole is not None and name is not None:
            prefix = f"{name}." if name else ""
            return {key.removeprefix(prefix): value for key, value in whole.items() if key.startswith(prefix)}
    return held_for(module)
