"""What shapes one rank's part of a split model gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from hf_zero.tensor_parallel.graph import FunctionCall, Value
from hf_zero.tensor_parallel.solve import SPLIT, Solution
from hf_zero.tensor_parallel.symbolic_dims import SymbolicDim, leaves, local_size


@dataclass(frozen=True)
class LocalShapes:
    """Shapes of values on one rank.

    Attributes:
        solution: What is split.
        shares: Into how many parts each dimension is.
    """

    solution: Solution
    shares: dict[SymbolicDim, int]

    def of(self, value: Value) -> tuple[int, ...]:
        """The shape of ``value`` here."""
        return self._divided(value) if self.solution.states.get(value) == SPLIT else value.shape

    def all_of(self, call: FunctionCall) -> list[tuple[int, ...]]:
        """The shapes of the results of ``call``."""
        return [self.of(value) for value in values_of(call)]

    def match(self, result: Any, call: FunctionCall) -> bool:
        """Whether ``result`` is one that ``call`` may have here."""
        tensors, values = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)], values_of(call)
        if len(tensors) != len(values):
            return False
        return all(tuple(tensor.shape) in self._allowed(value) for tensor, value in zip(tensors, values, strict=True))

    def empty(self, value: Value) -> torch.Tensor:
        """A tensor without values in the place of ``value``."""
        return torch.empty(self.of(value), dtype=torch.float32 if value.floating else torch.long, device="meta")

    def split_dims(self, call: FunctionCall) -> set[SymbolicDim]:
        """The split dimensions that the results of ``call`` have."""
        return {leaf for value in values_of(call) for dim in value.dims for leaf in leaves(dim) if leaf in self.solution.parts}

    def _divided(self, value: Value) -> tuple[int, ...]:
        return tuple(local_size(dim, self.shares) for dim in value.dims)

    def _allowed(self, value: Value) -> tuple[tuple[int, ...], ...]:
        return (value.shape, self._divided(value)) if value in self.solution.uniform else (self.of(value),)


def values_of(call: FunctionCall) -> list[Value]:
    """The tensors that ``call`` results in."""
    return [leaf for leaf in tree_flatten(call.result)[0] if isinstance(leaf, Value)]
