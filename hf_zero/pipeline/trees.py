"""Results of modules as trees of tensors: the same tensors in the same order wherever a plan counts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(tree: Any, work: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``tree`` with ``work(tensor)`` in place of its tensors, in the order of ``call_arguments.tensors_in``; other objects are
    kept.
    """
    if isinstance(tree, torch.Tensor):
        return work(tree)
    if isinstance(tree, Mapping):
        items = {key: map_tensors(item, work) for key, item in tree.items()}
        return type(tree)(**items) if type(tree) is not dict and all(isinstance(key, str) for key in items) else items
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(item, work) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(item, work) for item in tree)
    return tree


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same shape and type on the device "meta"."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
