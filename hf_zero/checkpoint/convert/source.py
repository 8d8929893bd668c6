"""Define the source of a conversion, independent of its format: named parameters whose elements are read a window at a time.

The checks of values from files of other libraries return the value, or raise ``ValueError`` with its name and the value that was found.
The context manager ``hf_zero.system.reading.reading`` adds the path of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_zero.checkpoint.files.rows import Elsewhere
from hf_zero.errors import CheckpointError
from hf_zero.system.reading import shown

FROZEN = -1
# Function that is called with the number of bytes written since the last call.
Progress = Callable[[int], None]


@dataclass(frozen=True)
class SourceTensor:
    """A named tensor of a source; ``row`` reads its elements in row-major order."""

    name: str
    shape: tuple[int, ...]
    row: Elsewhere


@dataclass(frozen=True)
class SourceParam:
    """A parameter of a source, with its optimizer state.

    Attributes:
        value: Master weights, or the weights of a parameter without optimizer state.
        dtype: Dtype of the parameter in training.
        group: Index of the param group; ``FROZEN`` if no optimizer trains the parameter.
        states: Optimizer states with one element per parameter element, by name.
        numbers: Single-number optimizer states, by name.
    """

    value: SourceTensor
    dtype: torch.dtype
    group: int = FROZEN
    states: dict[str, Elsewhere] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the dotted name of the parameter."""
        return self.value.name


@dataclass(frozen=True)
class Source:
    """A complete checkpoint or model that is converted.

    Attributes:
        what: Kind and path of the source, for messages.
        params: Parameters; a tied parameter occurs once.
        buffers: Buffers of the model.
        aliases: Name in ``params`` of a tied parameter, by each of its further names.
        optimizer: Name of the optimizer class, "" if unknown; None without optimizer state.
        groups: Hyper-parameters of each param group.
        values: Plain values by name: ``scheduler``, ``scaler``, ``client_state``, ``extra_state``, ``entries``; some may be missing.
        counters: Counters of the engine (steps, skipped steps, samples, micro-steps).
        stage: ZeRO stage at which the source was written.
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
        """Return this source if it has parameters with complete optimizer states.

        Raises:
            CheckpointError: There are no parameters, or a parameter lacks states that others in its param group have.
        """
        if not self.params:
            raise CheckpointError(f"{self.what} holds no parameters")
        alike: dict[tuple[int, int], tuple[str, list[str]]] = {}
        for param in self.params:
            names = sorted({*param.states, *param.numbers})
            if names:  # a parameter without states was never updated
                other, known = alike.setdefault((param.group, len(param.value.shape)), (param.name, names))
                if names != known:
                    raise CheckpointError(
                        f"{self.what}: {param.name} has the optimizer states {names}, {other} of the same group {known}; some are missing"
                    )
        return self


def row_of(get: Callable[[], torch.Tensor], count: int, dtype: torch.dtype) -> Elsewhere:
    """Return a row that calls ``get`` at each read of a window and copies from the tensor that it returns, (count,)."""

    def read(first: int, target: torch.Tensor) -> None:
        target.copy_(get().reshape(-1)[first : first + target.numel()])

    return Elsewhere(dtype, count, read, read_only)


def joined(pieces: Sequence[torch.Tensor], dtype: torch.dtype) -> Elsewhere:
    """Return a row that concatenates 1-dim tensors."""
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
    """Return a source tensor over ``tensor``, which is in memory or mapped from a file."""
    return SourceTensor(name, tuple(tensor.shape), row_of(lambda: tensor, tensor.numel(), tensor.dtype))


def read_only(first: int, source: torch.Tensor) -> None:
    """Raise CheckpointError, because the source of a conversion is read-only."""
    raise CheckpointError("the source of a conversion is read-only")


def _refused(value: Any, what: str, expected: str) -> ValueError:
    return ValueError(f"{what} is {shown(value)}, expected {expected}")


def mapping(value: Any, what: str) -> Mapping[Any, Any]:
    """Return ``value`` if it is a dict."""
    if not isinstance(value, Mapping):
        raise _refused(value, what, "a dict")
    return value


def sequence(value: Any, what: str) -> Sequence[Any]:
    """Return ``value`` if it is a list or tuple."""
    if not isinstance(value, (list, tuple)):
        raise _refused(value, what, "a list")
    return value


def integer(value: Any, what: str, least: int = 0) -> int:
    """Return ``value`` if it is a whole number of at least ``least``."""
    if type(value) is not int or value < least:
        raise _refused(value, what, f"a whole number from {least} on")
    return value


def integers(value: Any, what: str) -> list[int]:
    """Return ``value`` as a list if it is a non-empty list of whole numbers of at least 1."""
    if not value:
        raise _refused(value, what, "whole numbers")
    return [integer(item, what, 1) for item in sequence(value, what)]


def sizes(value: Any, what: str) -> tuple[int, ...]:
    """Return ``value`` as a tuple if it is a shape: whole numbers of at least 0."""
    return tuple(integer(item, what) for item in sequence(value, what))


def number(value: Any, what: str) -> float:
    """Return ``value`` as an int or float if it is a real number or a tensor of one real number."""
    found = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex() else value
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise _refused(value, what, "a number")
    return found


def tensor(value: Any, what: str) -> torch.Tensor:
    """Return ``value`` if it is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise _refused(value, what, "a tensor")
    return value


def rows(value: Any, what: str) -> list[torch.Tensor]:
    """Return ``value`` if it is a list of 1-dim tensors."""
    found = [tensor(item, what) for item in sequence(value, what)]
    if any(row.ndim != 1 for row in found):
        raise _refused([tuple(row.shape) for row in found], f"the shapes of {what}", "one dimension")
    return found
