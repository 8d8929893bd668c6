"""Read files of torch.distributed.checkpoint without torch's reader, which runs code that the pickles in the folder name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.convert.pickles import Inert
from hf_zero.checkpoint.convert.torch_files import load_pickle, load_torch_bytes
from hf_zero.errors import CheckpointError
from hf_zero.system.reading import reading, shown
from hf_zero.system.text_file import opened_file

METADATA = ".metadata"
_MODULE = "torch.distributed."
_SUFFIX = ".distcp"


def is_dcp(folder: Path) -> bool:
    """Return whether ``folder`` is a checkpoint of torch.distributed.checkpoint."""
    return (folder / METADATA).is_file() and any(folder.glob(f"*{_SUFFIX}"))


@dataclass(frozen=True)
class _Place:
    """The range of bytes, in a file of the folder, of one item that ``torch.save`` wrote."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor's elements: its first index, its sizes, and the place of its data."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: _Place


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the folder: its dtype and shape, and the chunks that it consists of."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


class DcpFolder:
    """A checkpoint folder of torch.distributed.checkpoint, whose metadata have been checked against its files.

    Attributes:
        tensors: All tensors by name.
        objects: Places of the items that are not tensors, by name.

    Raises:
        CheckpointError: ``.metadata`` cannot be read, or lists bytes that the files do not have; the message names file and item.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / METADATA
        metadata = load_pickle(self._path)
        with reading(self._path, CheckpointError):
            places = self._places(_attribute(metadata, "Metadata", "storage_data", dict))
            self.tensors: dict[str, StoredTensor] = {}
            self.objects: dict[str, _Place] = {}
            for name, entry in _attribute(metadata, "Metadata", "state_dict_metadata", dict).items():
                if _is(entry, "BytesStorageMetadata"):
                    self.objects[name] = places[name, None]
                else:
                    self.tensors[name] = _stored(name, entry, places)

    def _places(self, data: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], _Place]:
        """Return the places of all items by (name, first index); each place is inside of its file, and no two overlap."""
        sizes: dict[str, int] = {}
        found: dict[tuple[str, tuple[int, ...] | None], _Place] = {}
        for index, info in data.items():
            name = _attribute(index, "MetadataIndex", "fqn", str)
            offsets = index.get("offset")
            file, offset, nbytes = (_attribute(info, "_StorageInfo", key, kind) for key, kind in _STORAGE_INFO)
            if info.get("transform_descriptors"):
                raise ValueError(f"{name!r} is stored with {shown(info.get('transform_descriptors'))}, which hf_zero cannot read")
            if file not in sizes:
                if Path(file).name != file or not (self.folder / file).is_file():
                    raise ValueError(f"it lists {name!r} in {shown(file)}, which is not in the folder")
                sizes[file] = (self.folder / file).stat().st_size
            if offset < 0 or nbytes < 1 or offset + nbytes > sizes[file]:
                raise ValueError(f"it lists {name!r} in bytes {offset} to {offset + nbytes} of {file}, which has {sizes[file]}")
            found[name, None if offsets is None else _ints(offsets)] = _Place(file, offset, nbytes)
        ordered = sorted(found.values(), key=lambda place: (place.file, place.offset))
        for before, after in pairwise(ordered):
            if before.file == after.file and before.offset + before.nbytes > after.offset:
                raise ValueError(f"it lists two items in the same bytes of {after.file}, from {after.offset} on")
        return found

    def object(self, name: str) -> Any:
        """Return the value of an item that is not a tensor: plain values, tensors, and ``Inert`` for objects of other classes.

        Raises:
            CheckpointError: The item cannot be read.
        """
        return self._item(self.objects[name], name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the host.

        Raises:
            CheckpointError: A chunk cannot be read, has another dtype or shape than the metadata say, or overlaps another chunk.
        """
        stored = self.tensors[name]
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        # The chunks have as many elements as the tensor, so chunks that do not overlap leave no gap.
        held = torch.zeros(stored.shape, dtype=torch.bool) if len(stored.chunks) > 1 else None
        for chunk in stored.chunks:
            value = self._item(chunk.place, name)
            if not isinstance(value, torch.Tensor) or value.dtype != stored.dtype or tuple(value.shape) != chunk.sizes:
                raise CheckpointError(
                    f"{self.folder / chunk.place.file}: {name} at byte {chunk.place.offset} is not the tensor of {stored.dtype} and shape "
                    f"{chunk.sizes} that {METADATA} says. {_ADVICE}"
                )
            if held is not None:
                box = _box(held, chunk)
                if box.any():
                    raise CheckpointError(f"{self._path}: chunks of {name} overlap at {chunk.offsets}. {_ADVICE}")
                box.fill_(True)
            _box(whole, chunk).copy_(value)
        return whole

    def _item(self, place: _Place, name: str) -> Any:
        what = f"{self.folder / place.file} (item {name!r} at byte {place.offset})"
        with reading(what, CheckpointError), opened_file(self.folder / place.file) as file:
            file.seek(place.offset)
            data = bytearray(file.read(place.nbytes))
            if len(data) != place.nbytes:
                raise ValueError(f"it ends {place.nbytes - len(data)} bytes too early")
        return load_torch_bytes(data, what)


_ADVICE = "The folder is damaged: take another copy, or save it again"
_STORAGE_INFO = (("relative_path", str), ("offset", int), ("length", int))


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, Inert) and value.kind.startswith(_MODULE) and value.kind.endswith(f".{kind}")


def _attribute(value: Any, kind: str, name: str, expected: type) -> Any:
    """Return the attribute ``name`` of an inert object of torch's class ``kind``.

    Raises:
        ValueError: ``value`` has another class, or its attribute has another type than ``expected``.
    """
    if not _is(value, kind):
        raise ValueError(f"it has {shown(value)} where a {kind} is expected")
    found = value.get(name)
    if type(found) is not expected:
        raise ValueError(f"{name} of a {kind} is {shown(found)}, expected {expected.__name__}")
    return found


def _ints(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, (tuple, list)) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"it has {shown(numbers)} where sizes are expected")
    return tuple(numbers)


def _stored(name: Any, entry: Any, places: Mapping[tuple[str, tuple[int, ...] | None], _Place]) -> StoredTensor:
    """Return the record of a tensor from its metadata.

    Raises:
        ValueError: The chunks do not have as many elements as the tensor, exceed its shape, or have too few bytes.
    """
    if not isinstance(name, str) or not _is(entry, "TensorStorageMetadata"):
        raise ValueError(f"it lists {shown(name)} as {shown(entry)}, which is neither a tensor nor an object")
    properties = _attribute(entry.get("properties"), "TensorProperties", "state", tuple)
    dtype, shape = properties[0], _ints(entry.get("size"))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the type of {name!r} is {shown(dtype)}")
    chunks = tuple(_chunks(name, shape, dtype, entry, places))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the chunks of {name!r} do not add up to its shape {shape}")
    return StoredTensor(dtype, shape, chunks)


def _chunks(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, entry: Inert, places: Mapping[tuple[str, tuple[int, ...] | None], _Place]
) -> Iterator[_Chunk]:
    for chunk in _attribute(entry, "TensorStorageMetadata", "chunks", list):
        offsets, sizes = (_ints(_attribute(chunk, "ChunkStorageMetadata", key, torch.Size)) for key in ("offsets", "sizes"))
        place = places[name, offsets]
        inside = len(offsets) == len(sizes) == len(shape) and all(
            first + size <= whole for first, size, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not inside or math.prod(sizes) * dtype.itemsize > place.nbytes:
            raise ValueError(f"{name!r} of shape {shape} has a chunk of shape {sizes} at {offsets} in {place.nbytes} bytes")
        yield _Chunk(offsets, sizes, place)


def _box(tensor: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
    for dim, (first, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        tensor = tensor.narrow(dim, first, size)
    return tensor
