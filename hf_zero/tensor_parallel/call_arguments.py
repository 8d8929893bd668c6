"""Find the tensors among the arguments of a module call by name, and replace them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_zero.system.trees import convert_inside, tensors_in


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
