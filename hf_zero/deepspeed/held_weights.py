"""Remember the unsharded weights that a script gathered last and still holds, so that a save on one rank can use them.

[Note: weights that a script holds] Some scripts (OpenRLHF) gather the complete model on all ranks and then save twice on rank 0: adapters
with PEFT, without passing the gathered dict, and their own files from the dict. PEFT would read the sharded model, and rank 0 cannot gather
alone. So PEFT's save takes the weights from the dict, as long as the dict is alive and no step, no load and no write of the script has
changed the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn

from hf_zero.deepspeed.configured import ConfiguredEngine
from hf_zero.observe import warn_once

_KEY = "zero_optimization.stage3_gather_16bit_weights_on_model_save"

wanted_here: list[Callable[[], bool]] = []  # integrations: whether this rank writes model files although it is not rank 0; local

_Held = WeakValueDictionary[str, torch.Tensor]

_held: WeakKeyDictionary[ConfiguredEngine, tuple[tuple[int, int, int], _Held | None]] = WeakKeyDictionary()


def note(engine: ConfiguredEngine, state: dict[str, torch.Tensor] | None) -> None:
    """Remember ``state``, the current unsharded weights of ``engine``, with weak references to its tensors.

    Args:
        engine: Engine whose weights were gathered.
        state: The gathered weights by name; None on a rank that got none.
    """
    _held[engine] = _age(engine), _Held(state) if state is not None else None


def gathers(engine: ConfiguredEngine) -> bool:
    """Return True, because unsharded weights can always be gathered, one unit at a time. Warn once if the configuration has false."""
    says_so = engine.resolved.origin.get(_KEY, "default") != "default"
    if (
        engine.stage_policy.parameters_sharded
        and says_so
        and not engine.settings.zero_optimization.stage3_gather_16bit_weights_on_model_save
    ):
        warn_once(
            f"{_KEY} is false (the default answer of `accelerate config`), but the script requested unsharded weights: they are "
            "gathered on the host of rank 0, one unit at a time. To silence this warning set the key to true; to save "
            "without gathering, use save_checkpoint"
        )
    return True


def _age(engine: ConfiguredEngine) -> tuple[int, int, int]:
    """Return counters that change whenever the weights change: by steps, by loads, and by writes of the script."""
    return engine.progress.global_steps, engine.progress.loads, sum(unit.derived.changes for unit in engine.units)


def held_for(module: nn.Module) -> dict[str, torch.Tensor] | None:
    """Return the unsharded weights of ``module``, a part of an engine's model; None if some are not held or the weights have changed."""
    for prefix, values in _of(module):
        found = {name.removeprefix(prefix): value for name, value in list((values or {}).items()) if name.startswith(prefix)}
        if found.keys() >= {name for name, _ in module.named_parameters()}:
            return found
    return None


def given_to_another_rank(module: nn.Module) -> bool:
    """Return whether the weights of ``module`` were gathered to another rank since the last step or load."""
    return any(values is None for _, values in _of(module))


def _of(module: nn.Module) -> Iterator[tuple[str, _Held | None]]:
    """Yield the remembered weights of the engines whose module contains ``module``, with the prefix of its names there."""
    for engine, (age, values) in list(_held.items()):
        prefix = next((f"{name}." if name else "" for name, inner in engine.module.named_modules() if inner is module), None)
        if prefix is not None and _age(engine) == age:
            yield prefix, values
