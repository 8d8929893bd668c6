"""Which modules of a model one stage of a pipeline runs as a whole: see [Note: items] in ``plan.py``."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from hf_zero.core.units.grouping import find_blocks


def find_repeated(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by dotted name: those of ``find_blocks``, else members of its outermost lists, which may be one that is
    called many times (ALBERT)."""
    found = find_blocks(model)
    if found:
        return found
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not any(name.startswith(f"{block}.") for block in found):
            prefix = f"{name}." if name else ""
            found.update({f"{prefix}{key}": child for key, child in module.named_children() if next(child.parameters(), None) is not None})
    return found


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
