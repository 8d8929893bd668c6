"""Source of a conversion, in any format: named parameters whose elements are fetched a window at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_zero.checkpoint.files.rows import Elsewhere
from hf_zero.errors import CheckpointError

FROZEN = -1
# Called with the number of bytes that have been written.
Progress = Callable[[int], None]


@dataclass(frozen=True)
class SourceTensor:
    """A named tensor of a source; ``row`` has its elements in row-major order."""

    name: str
    shape: tuple[int, ...]
    row: Elsewhere


@dataclass(frozen=True)
class SourceParam:
    """A parameter with its optimizer state.

    Attributes:
        value: Its master weights, or its weights when it has no optimizer state.
        dtype: Its type in training.
        group: Param group; ``FROZEN`` when no optimizer trains it.
        states: Flat optimizer states by name.
        numbers: Optimizer states of one number.
    """

    value: SourceTensor
    dtype: torch.dtype
    group: int = FROZEN
    states: dict[str, Elsewhere] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the dotted name."""
        return self.value.name


@dataclass(frozen=True)
class Source:
    """A whole checkpoint or model.

    Attributes:
        what: For messages: kind and path.
        params: Parameters; tied ones once.
        buffers: Buffers.
        aliases: Further names of tied parameters -> the name in ``params``.
        optimizer: Name of the optimizer class; None when there is no optimizer state.
        groups: Hyper-parameters by param group.
        values: Plain values: ``scheduler``, ``scaler``, ``client_state``, ``extra_state``; some may be missing.
        counters: Counters of the engine.
        stage: ZeRO stage it was written at.
    """

    what: str
    params: tuple[SourceParam, ...]
    buffers: tuple[SourceTensor, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    optimizer: str | None = None
    groups: tuple[dict[str, Any], ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    stage: int = 0

    def require_any(self) -> Source:
        """Return this source if it has parameters; else raise an error.

        Raises:
            CheckpointError: It has no parameter, or one lacks states that its like in the same group have.
        """
        if not self.params:
            raise CheckpointError(f"{self.what} holds no parameters")
        alike: dict[tuple[int, int], tuple[str, list[str]]] = {}
        for param in self.params:
            names = sorted({*param.states, *param.numbers})
            if names:  # else no step was taken with it
                other, known = alike.setdefault((param.group, len(param.value.shape)), (param.name, names))
                if names != known:
                    raise CheckpointError(
                        f"{self.what}: {param.name} has the optimizer states {names}, {other} of the same group {known}; some are missing"
                    )
        return self


def row_of(get: Callable[[], torch.Tensor], count: int, dtype: torch.dtype) -> Elsewhere:
    """Return a row over a tensor that ``get`` returns, whole or mapped, each time a window is wanted."""

    def read(first: int, target: torch.Tensor) -> None:
        target.copy_(get().reshape(-1)[first : first + target.numel()])

    return Elsewhere(dtype, count, read, read_only)


def joined(pieces: Sequence[torch.Tensor], dtype: torch.dtype) -> Elsewhere:
    """Return a row that consists of 1D tensors one after the other."""
    ends, count = [], 0
    for piece in pieces:
        count += piece.numel()
        ends.append(count)

    def read(first: int, target: torch.Tensor) -> None:
        last = first + target.numel()
        for piece, end in zip(pieces, ends, strict=True):
            begin = end - piece.numel()
            low, high = max(first, begin), min(last, end)
            if low < high:
                target[low - first : high - first].copy_(piece[low - begin : high - begin])

    return Elsewhere(dtype, count, read, read_only)


def tensor_source(name: str, tensor: torch.Tensor) -> SourceTensor:
    """Return a tensor that is in memory, or mapped."""
    return SourceTensor(name, tuple(tensor.shape), row_of(lambda: tensor, tensor.numel(), tensor.dtype))


def read_only(first: int, source: torch.Tensor) -> None:
    """Refuses to write into what is converted."""
    raise CheckpointError("a source of a conversion is not written to")
