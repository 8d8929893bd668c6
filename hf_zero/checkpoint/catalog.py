"""Where each parameter lies in a checkpoint: names and element ranges to ranges of files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_zero.checkpoint.format import MODULE_FILE, Index, UnitRecord, shard_file
from hf_zero.checkpoint.tensor_file import Copy
from hf_zero.errors import CheckpointError
from hf_zero.sharding.layout import Range


@dataclass(frozen=True)
class Located:
    """A saved parameter.

    Attributes:
        name: The name it is stored under.
        shape: Its full shape.
        unit: The unit that holds it; None when it lies whole in ``module.safetensors``.
        offset: Its first element inside the unit.
        group: Its param group; -1 when frozen.
    """

    name: str
    shape: tuple[int, ...]
    unit: UnitRecord | None
    offset: int = 0
    group: int = -1

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


class Catalog:
    """Finds parameters of a checkpoint by name.

    Attributes:
        index: The checkpoint's index.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self._params: dict[str, Located] = {}
        whole = index.files[MODULE_FILE].tensors if MODULE_FILE in index.files else {}
        for name in index.module_params:
            if name not in whole:
                raise CheckpointError(f"the index lists parameter {name} in {MODULE_FILE}, which has no such tensor")
            self._params[name] = Located(name, whole[name].shape, None)
        for unit in index.units:
            for param in unit.params:
                self._params[param.name] = Located(param.name, param.shape, unit, param.offset, param.group)

    @property
    def names(self) -> set[str]:
        """All parameters it holds, under the names they are stored under."""
        return set(self._params)

    def canonical(self, name: str) -> str:
        """The name a parameter is stored under, for any of its names."""
        return name if name in self._params else self.index.aliases.get(name, name)

    def find(self, name: str) -> Located | None:
        """The saved parameter that goes by ``name``, tied names included; None when there is none."""
        return self._params.get(self.canonical(name))

    def dtype(self, param: Located, kind: str | None = None) -> str | None:
        """Type of the stored elements of ``param`` in files of ``kind`` (None: its values); None when there are none."""
        if param.unit is None:
            return self.index.files[MODULE_FILE].tensors[param.name].dtype
        for rank in range(param.unit.world):
            file = self.index.files.get(shard_file(kind or param.unit.kind, rank, param.unit.world))
            if file is not None and param.unit.name in file.tensors:
                return file.tensors[param.unit.name].dtype
        return None

    def copies(self, param: Located, kind: str | None, start: int, target: torch.Tensor) -> Iterator[Copy]:
        """Reads that fill ``target`` with the elements of ``param`` from ``start`` on.

        Args:
            param: From ``find``.
            kind: ``optimizer.exp_avg`` and the like; None for the values, whichever kind of file has them.
            start: First element inside the parameter.
            target: (n,), of any dtype and device.

        Raises:
            CheckpointError: The file of a shard is not in the index, or has no such unit.
        """
        if not target.numel():
            return
        if param.unit is None:
            yield Copy(MODULE_FILE, param.name, start, target)
            return
        unit, kind = param.unit, kind or param.unit.kind
        shard_numel = unit.padded_numel // unit.world
        wanted = Range(param.offset + start, param.offset + start + target.numel())
        for rank in range(wanted.start // shard_numel, (wanted.stop - 1) // shard_numel + 1):
            part = wanted.intersect(Range(rank * shard_numel, (rank + 1) * shard_numel))
            file = shard_file(kind, rank, unit.world)
            if file not in self.index.files or unit.name not in self.index.files[file].tensors:
                raise CheckpointError(f"parameter {param.name}: the checkpoint lacks {file} with its part of unit {unit.name}")
            yield Copy(file, unit.name, part.start - rank * shard_numel, target[part.start - wanted.start : part.stop - wanted.start])
