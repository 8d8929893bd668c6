"""``Rule``: the effect of an operation on the dimensions of tensors; and functions that several rules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_zero.tensor_parallel.graph import NONE, Value
from hf_zero.tensor_parallel.symbolic_dims import SymbolicDim, block, unify

Shape = Sequence[int]
FAKE_COUNT = 2  # number of places that ``nonzero`` and masks select on tensors without values


@dataclass
class Rule:
    """Dimensions of an operation's results, and its effect on partial sums; see ``Op``."""

    dims: list[tuple[SymbolicDim, ...]]
    partial: str = NONE
    contracted: tuple[SymbolicDim, ...] = ()
    bias: int | None = None


Handler = Callable[[str, list[Any], dict[str, Any], list[Shape]], Rule]


def fresh(shape: Shape) -> tuple[SymbolicDim, ...]:
    """Return new symbolic dims of these sizes."""
    return tuple(SymbolicDim(size) for size in shape)


def values_of(args: Any) -> list[Value]:
    """Return all values in nested arguments, in order."""
    if isinstance(args, Value):
        return [args]
    if isinstance(args, (list, tuple)):
        return [value for item in args for value in values_of(item)]
    if isinstance(args, dict):
        return [value for item in args.values() for value in values_of(item)]
    return []


def block_all(values: Sequence[Value], reason: str) -> None:
    """Record for every dimension of ``values`` that it cannot be split, with the reason."""
    for value in values:
        for dim in value.dims:
            block(dim, reason)


def axis_of(index: int, ndim: int) -> int:
    """Return the number of dimension ``index``, which may be negative, counted from the front."""
    return index % ndim if ndim else 0


def argument(args: list[Any], kwargs: dict[str, Any], position: int, name: str, default: Any = None) -> Any:
    """Return an argument that may be passed at ``position`` or by ``name``."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def broadcast(values: Sequence[Value], shape: Shape) -> tuple[SymbolicDim, ...]:
    """Unify the dimensions that an element-wise operation aligns; return the dimensions of its result."""
    dims: list[SymbolicDim] = []
    for position in range(1, len(shape) + 1):
        found: SymbolicDim | None = None
        for value in values:
            if len(value.dims) >= position and value.dims[-position].size == shape[-position] != 1:
                if found is None:
                    found = value.dims[-position]
                else:
                    unify(found, value.dims[-position])
        dims.append(found if found is not None else SymbolicDim(shape[-position]))
    return tuple(dims[::-1])


def opaque(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of an unknown operation: all its inputs must be whole."""
    block_all(values_of([args, kwargs]), f"{name} needs all of it")
    return Rule([fresh(shape) for shape in shapes])
