"""Let the names in units follow the model: a script may replace, remove, move or wrap modules while an engine trains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from hf_zero.core.units.layout import UnitLayout
from hf_zero.core.units.marks import with_outer
from hf_zero.core.units.unit import Unit

_LEFT = "."  # ends no name of a parameter
_OF_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")  # of torch.compile(module) and checkpoint_wrapper(module)


def has_left(name: str) -> bool:
    """Return whether ``name`` is that of a place whose parameter has left: for another unit, or the model."""
    return name.endswith(_LEFT)


def follow_names(module: nn.Module, units: Iterable[Unit]) -> list[tuple[UnitLayout, Unit]]:
    """Give each place in ``units`` the present name of its parameter in ``module``; local.

    The place of a parameter that has left keeps its elements. Its former name, which another parameter may have now, gets a dot at its end.
    Blocks that are compiled or recomputed by a wrapper of torch keep their names: a run may be resumed before it wraps them.

    Returns:
        Units with changed names, each with its former layout.
    """
    changed = []
    names = {id(param): name for name, param in module.named_parameters()}
    for unit in units:
        pairs = list(zip(unit.layout.slots, unit.params, strict=True))
        present = [_name(names, slot.name.rstrip(_LEFT), param) for slot, param in pairs]
        if present != [slot.name for slot, _ in pairs]:
            slots = tuple(replace(slot, name=name) for (slot, _), name in zip(pairs, present, strict=True))
            changed.append((unit.layout, unit))
            unit.layout = replace(unit.layout, slots=slots)
    return changed


def _name(names: dict[int, str], former: str, param: torch.Tensor | None) -> str:
    shown = [] if param is None else list(with_outer(param))
    found = next((names[id(one)] for one in shown if id(one) in names), None)
    inside = param is not None and not any(isinstance(one, nn.Parameter) for one in shown)  # scales of a packed weight, for example
    if found is not None and _OF_WRAPPERS.sub("", found) == former:
        return former
    return found or (former if inside else f"{former}{_LEFT}")
