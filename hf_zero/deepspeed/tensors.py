"""Copies of nested tensors with storages of their own, as saving functions need them."""

from __future__ import annotations

from typing import Any

import torch

_CPU = torch.device("cpu")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = _CPU) -> Any:
    """Clones every tensor in a nest of dicts, lists and tuples.

    A view of a unit's buffer would be written with the whole buffer behind it (or be dropped as shared memory); a clone
    owns exactly its elements.

    Args:
        item: A tensor, or any nesting of dict, list and tuple; other leaves are passed through.
        device: Where the clones live.

    Returns:
        The same nesting (subclasses of dict, list and named tuples kept), each tensor detached and contiguous on ``device``.
    """
    if torch.is_tensor(item):
        return item.detach().to(device, copy=True).contiguous()
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(clone_tensors_for_torch_save(value, device) for value in item))
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item
