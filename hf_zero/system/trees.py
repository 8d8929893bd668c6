"""Tensors in nested containers and in arguments of calls: one order of tensors for all code that names, counts or replaces them.

torch's pytree alone is not enough: it does not open mappings and lists of other classes (``BatchEncoding`` is one), opens every class
that a script has registered, caches included, and names the items of a named tuple by their names instead of their positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn


def tensors_in(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers with their keys ("0", "1.mask"); other objects (caches) are not opened."""
    if isinstance(tree, torch.Tensor):
        yield prefix, tree
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from tensors_in(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, (list, tuple)):
        for key, item in enumerate(tree):
            yield from tensors_in(item, f"{prefix}.{key}" if prefix else str(key))


def map_tensors(tree: Any, work: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``tree`` with ``work(tensor)`` in place of its tensors, in the order of ``tensors_in``; other objects stay."""
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


def convert_inside(tree: Any, key: str, item: Any, convert: Callable[[torch.Tensor, Any], Any]) -> Any:
    """Return ``tree`` with ``convert(tensor, item)`` in place of the tensor at ``key``, if there is one; a dict is changed in place."""
    if not key:
        return convert(tree, item) if isinstance(tree, torch.Tensor) else tree
    head, _, rest = key.partition(".")
    if isinstance(tree, (list, tuple)) and head.isdigit() and int(head) < len(tree):
        items = list(tree)
        items[int(head)] = convert_inside(items[int(head)], rest, item, convert)
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict) and head in tree:
        tree[head] = convert_inside(tree[head], rest, item, convert)
    return tree


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of the shape and dtype of ``tensor`` on the device "meta"."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def argument_names(module: nn.Module) -> list[str]:
    """Return the names of the positional arguments of ``module.forward``."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return []
    return [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]


def named_arguments(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors among the arguments of a module call, each with its argument's name, however it was passed."""
    names = argument_names(module) if args else []
    for position, item in enumerate(args):
        yield from tensors_in(item, names[position] if position < len(names) else str(position))
    yield from tensors_in(kwargs)


def convert_arguments(args: Any, kwargs: Any, names: list[str], work: dict[str, Any], convert: Callable[[torch.Tensor, Any], Any]) -> Any:
    """Return the arguments of a call, with ``convert(tensor, work[key])`` in place of each tensor that ``work`` names; skip absent
    tensors.
    """
    args, kwargs = list(args), dict(kwargs)
    for key, item in work.items():
        head, _, rest = key.partition(".")
        if head in kwargs:
            kwargs[head] = convert_inside(kwargs[head], rest, item, convert)
            continue
        position = names.index(head) if head in names else int(head) if head.isdigit() else 0 if not head else -1
        if 0 <= position < len(args):
            args[position] = convert_inside(args[position], rest, item, convert)
    return tuple(args), kwargs
