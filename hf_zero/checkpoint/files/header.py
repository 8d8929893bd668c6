"""The header of a safetensors file, and the order in which tensors lie behind it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Protocol, TypeVar

import torch

from hf_zero.checkpoint.format.element_types import dtype_name
from hf_zero.errors import CheckpointError


class Described(Protocol):
    """What a header says of a tensor; ``nbytes`` follows from the other two."""

    @property
    def name(self) -> str:
        """Its name in the file."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of its elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""


D = TypeVar("D", bound=Described)


def in_file_order(tensors: Iterable[D]) -> list[D]:
    """Wide elements first, as the safetensors library does: every tensor is aligned to its element."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def header_of(tensors: Iterable[Described], file: str) -> bytes:
    """Length prefix and JSON header of a file with ``tensors`` one behind the other, padded with spaces to a multiple of 8 bytes.

    Raises:
        CheckpointError: Two have one name, or an element type that safetensors lacks; names ``file`` or the tensor.
    """
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        if tensor.name in fields:
            raise CheckpointError(f"{file}: two tensors are named {tensor.name!r}; a checkpoint needs one name each")
        stop = start + tensor.nbytes
        fields[tensor.name] = {"dtype": dtype_name(tensor.dtype, tensor.name), "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
