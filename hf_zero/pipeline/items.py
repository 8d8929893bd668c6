"""Which modules of a model one stage of a pipeline runs as a whole: see [Note: items] in ``plan.py``."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from hf_zero.core.units.grouping import find_blocks


def find_repeated(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by dotted name: those of ``find_blocks``, or of its outermost lists, which may be of one that is called often.

    A list cannot be called: its members are the blocks (ALBERT has one that is called many times, Funnel lists of lists).
    """
    found: dict[str, nn.Module] = {}
    for name, module in (find_blocks(model) or _in_lists(model)).items():
        found.update(_callable(name, module))
    return found


def _in_lists(model: nn.Module) -> dict[str, nn.Module]:
    """Members of the outermost lists."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not any(name.startswith(f"{block}.") for block in found):
            found.update({f"{name}.{key}".lstrip("."): child for key, child in module.named_children()})
    return found


def _callable(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """The module, or what is in it when it is a list; nothing where it has no parameters."""
    if next(module.parameters(), None) is None:
        return {}
    if not isinstance(module, nn.ModuleList):
        return {name: module}
    return {path: block for key, child in module.named_children() for path, block in _callable(f"{name}.{key}", child).items()}


def possible_items(model: nn.Module) -> dict[str, nn.Module]:
    """By dotted name, the modules whose calls are calls of items when no other item is running.

    These are the blocks, modules outside of them that have parameters and hold no block, and dropout. Of nested ones the outermost that is
    called counts: where a model calls the layers of a head one by one, they are the items and not the head.
    """
    blocks = find_repeated(model)
    holding = {name[:end] for name in blocks for end in _ends(name)}
    found = {}
    for name, module in model.named_modules():
        if name in holding or any(name[:end] in blocks for end in _ends(name) if end):
            continue
        if isinstance(module, _DropoutNd) or next(module.parameters(), None) is not None:
            found[name] = module
    return found


def _ends(name: str) -> list[int]:
    """Where the names of the modules around ``name`` end in it; the root's is empty."""
    return [0, *(place for place, letter in enumerate(name) if letter == ".")]
