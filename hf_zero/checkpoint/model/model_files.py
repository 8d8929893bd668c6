"""The safetensors files of a whole model: laid out from names and shapes, filled tensor by tensor in any order, then put in place."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_zero.checkpoint.files.tensor_writer import D, header_of, in_file_order
from hf_zero.errors import CheckpointError
from hf_zero.system import own_files
from hf_zero.system.folder import Folder
from hf_zero.system.text_file import LIMIT_BYTES, read_text

MAX_SHARD_SIZE = "50GB"  # transformers' own default
_WINDOW_BYTES = 4 * 2**20


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written: its name in the file, element type and whole shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class ModelFiles:
    """One ``name`` in ``folder``, or, for a model larger than a shard, numbered files and the index that Hugging Face reads.

    Nothing has its final name before ``commit``. Then what made up the previous model of this name goes away: the file, or the index and
    what that lists. Only the rank that writes makes one.

    Args:
        folder: Made when it does not exist.
        name: Name of the file if there is one, ``<stem>.safetensors``.
        tensors: Tensors to write, with different names; a file holds neighbours.
        max_shard_size: Bytes of tensors per file, unless a single tensor is larger.

    Raises:
        CheckpointError: An element type that safetensors lacks.
        OSError: The file system refuses.
    """

    def __init__(self, folder: Path, name: str, tensors: Sequence[PlannedTensor], max_shard_size: int) -> None:
        self._folder = folder
        self._name = name
        self._total = sum(tensor.nbytes for tensor in tensors)
        self._planned = {tensor.name: tensor for tensor in tensors}
        self._where: dict[str, tuple[str, int]] = {}  # tensor -> hidden file, byte offset
        self._final: dict[str, str] = {}  # hidden file -> name
        own_files.make_folders(folder)
        own_files.sweep(folder)
        self._opened = Folder(folder)
        files = split_by_size(tensors, max_shard_size)
        stem = name.removesuffix(".safetensors")
        for number, members in enumerate(files, 1):
            final = name if len(files) == 1 else f"{stem}-{number:05d}-of-{len(files):05d}.safetensors"
            hidden = own_files.hidden_name(final)
            self._final[hidden] = final
            try:
                self._start_file(hidden, members)
            except BaseException:
                self.abort()
                raise

    def _start_file(self, hidden: str, members: list[PlannedTensor]) -> None:
        ordered = in_file_order(members)
        header = header_of(ordered, self._final[hidden])
        end = len(header)
        for tensor in ordered:
            self._where[tensor.name] = (hidden, end)
            end += tensor.nbytes
        with os.fdopen(self._opened.create(hidden), "wb") as file:
            file.write(header)
            file.truncate(end)

    def write(self, name: str, value: torch.Tensor) -> None:
        """Writes the values of one tensor, from any device, a window at a time.

        Raises:
            CheckpointError: It has another shape than planned: a released parameter would be written as an empty tensor.
            OSError: The file system refuses.
        """
        planned = self._planned[name]
        if tuple(value.shape) != planned.shape or value.dtype != planned.dtype:
            raise CheckpointError(f"{name} is {tuple(value.shape)} of {value.dtype}, planned were {planned.shape} of {planned.dtype}")
        hidden, offset = self._where[name]
        flat = value.detach().reshape(-1)
        step = _WINDOW_BYTES // planned.dtype.itemsize
        # Through a buffer of our own: numpy() on a unit's buffer would keep it from ever being released.
        staged = torch.empty(min(step, flat.numel()), dtype=planned.dtype)
        with os.fdopen(self._opened.reopen(hidden), "r+b", buffering=0) as file:
            for start in range(0, flat.numel(), step):
                window = staged[: min(step, flat.numel() - start)].copy_(flat[start : start + step])
                data = memoryview(window.view(torch.uint8).numpy())  # type: ignore[arg-type]
                while data:
                    count = os.pwrite(file.fileno(), data, offset)
                    data, offset = data[count:], offset + count

    def commit(self) -> None:
        """Forces everything to the disk and gives the files their names; then files of an earlier save under this name go away."""
        for hidden in self._final:
            with os.fdopen(self._opened.reopen(hidden), "rb") as file:
                os.fsync(file.fileno())
        previous = self._previous_files()
        for hidden, final in self._final.items():
            self._opened.move(hidden, final)
        if len(self._final) > 1:
            weight_map = {name: self._final[hidden] for name, (hidden, _) in self._where.items()}
            text = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            own_files.write_text(self._folder / self._index, json.dumps(text, indent=2, sort_keys=True) + "\n", self._opened)
        self._opened.sync()
        kept = {*self._final.values(), self._index if len(self._final) > 1 else ""}
        for name in previous - kept:
            own_files.remove_file(self._folder / name, self._opened)
        self._opened.close()

    def abort(self) -> None:
        """Removes what was begun."""
        for hidden in self._final:
            own_files.remove_file(self._folder / hidden, self._opened)
        self._opened.close()

    @property
    def _index(self) -> str:
        return f"{self._name}.index.json"

    def _previous_files(self) -> set[str]:
        """Return the files of the model that has this name now. Others that look like parts of one may be another model's."""
        shard = re.compile(rf"{re.escape(self._name.removesuffix('.safetensors'))}-\d{{5}}-of-\d{{5}}\.safetensors")
        try:
            listed = json.loads(read_text(self._index, LIMIT_BYTES, within=self._opened.descriptor))["weight_map"].values()
            shards = {name for name in listed if isinstance(name, str) and shard.fullmatch(name)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            shards = set()
        return {self._name, self._index, *shards}


def split_by_size(tensors: Sequence[D], limit: int) -> list[list[D]]:
    """Return the tensors grouped into files: neighbours together, at most ``limit`` bytes per file unless a single tensor is larger; at
    least one file.
    """
    files: list[list[D]] = [[]]
    filled = 0
    for tensor in tensors:
        if files[-1] and filled + tensor.nbytes > limit:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.nbytes
    return files
