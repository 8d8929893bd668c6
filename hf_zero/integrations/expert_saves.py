"""Provide unsharded weights when a model is saved: divided over ranks, of another stage than the last one, or by a trainer's own ``_save``.

[Note: a trainer's own way of saving] Trainer gathers the weights on all ranks and passes them to ``_save`` on rank 0. The ``_save`` of
sentence-transformers ignores them and lets each part of the model save itself, but no rank can gather at that point; those of
FlagEmbedding and adapters ask the model for its ``state_dict()``. So the gathered weights are kept while ``save_model`` runs, used for a
part that is saved without a state dict (``saves.py``), and part of each state dict that is made meanwhile.

This module imports little, because every program that saves with accelerate imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from hf_zero.deepspeed.held_weights import held_for
from hf_zero.integrations import callers, methods
from hf_zero.observe import warn_once

_GATHERED = "state dict of all ranks"
_NAMES = "names of parameters"


def get_state_dict(method: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Accelerator.get_state_dict``: also gather divided experts and layers, on rank 0; collective for these engines.

    An engine's own stage decides whether it gathers: the method asks the configuration of the engine that was prepared last.
    """
    _finish_first_update([model])
    axes: Any = getattr(getattr(model, "collectives", None), "topology", None)
    whole = axes is not None and not model.stage_policy.parameters_sharded
    if whole and (axes.expert is not None or axes.pipe is not None):
        return model._consolidated_16bit_state_dict()
    if whole and axes.model is None and accelerator.deepspeed_config["zero_optimization"]["stage"] == 3:
        from hf_zero.deepspeed.served.helpers import clone_tensors_for_torch_save  # imports torch, which accelerate has imported already

        found = clone_tensors_for_torch_save(accelerator.unwrap_model(model).state_dict())
    else:
        found = method(accelerator, model, *args, **kwargs)
    for call in callers.running(methods.SAVE_MODEL)[:1]:
        call.given[_GATHERED] = found
    return found


def save_state(method: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Accelerator.save_state``: a loop that never calls ``optimizer.step()`` saves the weights after its first update."""
    _finish_first_update(getattr(accelerator, "_models", ()))
    return method(accelerator, *args, **kwargs)


def _finish_first_update(models: Iterable[Any]) -> None:
    """Make the update that waits for the next forward, if there is one ([Note: loops that never step]); collective then."""
    accumulate = sys.modules.get("hf_zero.integrations.accumulate")
    if accumulate is not None:  # otherwise no engine has begun a loop
        made = [accumulate.make_first(model) for model in models]
        if any(made):
            warn_once(
                "weights were saved after accelerator.backward() and before the first optimizer.step() of this run: the update was made "
                "first, as with DeepSpeed, whose loops may leave optimizer.step() out. To save the weights before an update, save before "
                "its backward"
            )


def gathered_for(module: nn.Module) -> dict[str, Any] | None:
    """Return the unsharded weights of ``module``, if Trainer is saving its model or the script holds gathered weights; else None. Local."""
    for call in callers.running(methods.SAVE_MODEL)[:1]:
        names = (name for name, inner in call.caller.model.named_modules() if inner is module)
        whole, name = call.given.get(_GATHERED), next(names, None)
        if whole is not None and name is not None:
            prefix = f"{name}." if name else ""
            return {key.removeprefix(prefix): value for key, value in whole.items() if key.startswith(prefix)}
    return held_for(module)


def gathered_value(param: nn.Parameter) -> Any:
    """Return the unsharded value of ``param``, if Trainer is saving its model and has gathered it for this rank; else None. Local."""
    for call in callers.running(methods.SAVE_MODEL)[:1]:
        whole = call.given.get(_GATHERED)
        if whole is not None and _NAMES not in call.given:
            call.given[_NAMES] = {id(value): name for name, value in call.caller.model.named_parameters()}
        return None if whole is None else whole.get(call.given[_NAMES].get(id(param)))
    return None
