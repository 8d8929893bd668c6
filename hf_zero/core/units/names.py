"""Name parameters and buffers, and update the names in units after a script replaces, removes, moves or wraps modules.

[Note: names without wrappers] The wrapper of ``checkpoint_wrapper(module)`` leaves its own name out of state dicts. Names in units and
checkpoints are those of state dicts, so a run may wrap blocks and resume from a checkpoint without wrappers. The wrapper of
``torch.compile(module)`` keeps its name in state dicts; a load finds parameters with and without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from hf_zero.core.units.layout import UnitLayout
from hf_zero.core.units.marks import with_outer
from hf_zero.core.units.unit import Unit

_LEFT = "."  # ends no name of a parameter
_OF_RECOMPUTED = re.compile(r"(^|\.)_checkpoint_wrapped_module(?=\.|$)")  # of checkpoint_wrapper(module)
_OF_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")  # also of torch.compile(module)


def saved_name(name: str) -> str:
    """Return the name in a state dict of a parameter, buffer or module; see [Note: names without wrappers]."""
    return _OF_RECOMPUTED.sub("", name).lstrip(".") if "_checkpoint_wrapped_module" in name else name


def bare_name(name: str) -> str:
    """Return ``name`` without the names of all wrappers of torch, by which a saved and a present name are compared."""
    return _OF_WRAPPERS.sub("", name).lstrip(".") if "_orig_mod" in name or "_checkpoint_wrapped_module" in name else name


def named_params(module: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of ``module`` by their names in a state dict."""
    for name, param in module.named_parameters(remove_duplicate=remove_duplicate):
        yield saved_name(name), param


def named_buffers(module: nn.Module, remove_duplicate: bool = True, persistent: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of ``module`` by their names in a state dict; with ``persistent`` only those that state dicts contain."""
    seen: set[int] = set()
    for path, part in module.named_modules(remove_duplicate=remove_duplicate):
        for leaf, buffer in part._buffers.items():
            if buffer is None or (persistent and leaf in part._non_persistent_buffers_set) or (remove_duplicate and id(buffer) in seen):
                continue
            seen.add(id(buffer))
            yield saved_name(f"{path}.{leaf}" if path else leaf), buffer


def has_left(name: str) -> bool:
    """Return whether ``name`` is that of a place whose parameter has left: for another unit, or the model."""
    return name.endswith(_LEFT)


def follow_names(module: nn.Module, units: Iterable[Unit]) -> list[tuple[UnitLayout, Unit]]:
    """Give each place in ``units`` the present name of its parameter in ``module``; local.

    The place of a parameter that has left keeps its elements. Its former name, which another parameter may have now, gets a dot at its end.
    Blocks that are compiled keep their names: a run may be resumed before it compiles them.

    Returns:
        Units with changed names, each with its former layout.
    """
    changed = []
    names = {id(param): name for name, param in named_params(module)}
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
    if found is not None and bare_name(found) == bare_name(former):
        return former
    return found or (former if inside else f"{former}{_LEFT}")
