"""Memory of the whole weights that a script has gathered last and still holds; a save without a ``state_dict`` uses them without other
ranks.

[Note: weights that a script holds] Scripts gather the whole model on all ranks, and then let rank 0 save in two ways: the adapters by
PEFT, which is given no dict and would read the model itself, and files of their own from the dict (OpenRLHF). No rank can gather in the
first. As long as the dict lives and no step and no load has changed the weights, they are in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn

from hf_zero.deepspeed.configured import ConfiguredEngine
from hf_zero.observe import warn_once

_KEY = "zero_optimization.stage3_gather_16bit_weights_on_model_save"

_Held = WeakValueDictionary[str, torch.Tensor]

_held: WeakKeyDictionary[ConfiguredEngine, tuple[tuple[int, int], _Held | None]] = WeakKeyDictionary()


def note(engine: ConfiguredEngine, state: dict[str, torch.Tensor] | None) -> None:
    """Remember ``state``, the whole weights of ``engine`` as they are now, for as long as a caller keeps its tensors.

    Args:
        engine: Engine whose weights were gathered.
        state: None on a rank that was given none.
    """
    _held[engine] = _age(engine), _Held(state) if state is not None else None


def gathers(engine: ConfiguredEngine) -> bool:
    """Return True: whole weights are gathered whenever they are asked for, one unit at a time. Warns once where a key says false."""
    says_so = engine.resolved.origin.get(_KEY, "default") != "default"
    if (
        engine.stage_policy.parameters_sharded
        and says_so
        and not engine.settings.zero_optimization.stage3_gather_16bit_weights_on_model_save
    ):
        warn_once(
            f"{_KEY} is false (the default answer of `accelerate config`), but the script asked for whole weights: they are "
            "gathered on the host of rank 0, one unit at a time. To silence this warning set the key to true; to save "
            "without gathering, use save_checkpoint"
        )
    return True


def _age(engine: ConfiguredEngine) -> tuple[int, int]:
    """Return a pair that changes whenever the weights change."""
    return engine.progress.global_steps, engine.progress.loads


def held_for(module: nn.Module) -> dict[str, torch.Tensor] | None:
    """Return the whole weights of ``module``, a part of an engine's model; None where they are not all held, or have changed since."""
    for prefix, values in _of(module):
        found = {name.removeprefix(prefix): value for name, value in list((values or {}).items()) if name.startswith(prefix)}
        if found.keys() >= {name for name, _ in module.named_parameters()}:
            return found
    return None


def given_to_another_rank(module: nn.Module) -> bool:
    """Return whether the weights of ``module`` were gathered since the last step or load, for another rank than this one."""
    return any(values is None for _, values in _of(module))


def _of(module: nn.Module) -> Iterator[tuple[str, _Held | None]]:
    """Yield the remembered weights of the engines whose module contains ``module``, with the prefix of its names there."""
    for engine, (age, values) in list(_held.items()):
        prefix = next((f"{name}." if name else "" for name, inner in engine.module.named_modules() if inner is module), None)
        if prefix is not None and _age(engine) == age:
            yield prefix, values
