"""Write the safetensors files of an unsharded model: plan the layout, fill in tensors in any order, then rename the files."""

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
    """A tensor that will be written: its name in the file, dtype and full shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class ModelFiles:
    """The model file ``name`` in ``folder``, or, for a model larger than ``max_shard_size``, numbered files with Hugging Face's index.

    The files have hidden names until ``commit``, which then removes files of an earlier model with this name: the single file, or the
    index and the files that it lists. Only the rank that writes constructs this object.

    Args:
        folder: Folder of the files; created if it does not exist.
        name: File name of a model in one file, ``<stem>.safetensors``; numbered files use its stem.
        tensors: Tensors to write, with distinct names; a file holds consecutive tensors of this sequence.
        max_shard_size: Bytes of tensors per file, unless a single tensor is larger.

    Raises:
        CheckpointError: A tensor has a dtype that safetensors does not support.
        OSError: A file cannot be created or written.
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
        """Write the data of one tensor, from any device, a window of bytes at a time.

        Raises:
            CheckpointError: Shape or dtype differ from the plan, for example because the parameter is a placeholder.
            OSError: A file cannot be created or written.
        """
        planned = self._planned[name]
        if tuple(value.shape) != planned.shape or value.dtype != planned.dtype:
            raise CheckpointError(f"{name} is {tuple(value.shape)} of {value.dtype}, but {planned.shape} of {planned.dtype} was planned")
        hidden, offset = self._where[name]
        flat = value.detach().reshape(-1)
        step = _WINDOW_BYTES // planned.dtype.itemsize
        # Copy to a separate buffer: numpy() on a unit's buffer would keep its memory from being freed.
        staged = torch.empty(min(step, flat.numel()), dtype=planned.dtype)
        with os.fdopen(self._opened.reopen(hidden), "r+b", buffering=0) as file:
            for start in range(0, flat.numel(), step):
                window = staged[: min(step, flat.numel() - start)].copy_(flat[start : start + step])
                data = memoryview(window.view(torch.uint8).numpy())  # type: ignore[arg-type]
                while data:
                    count = os.pwrite(file.fileno(), data, offset)
                    data, offset = data[count:], offset + count

    def commit(self) -> None:
        """Flush the files to disk and rename them to their final names; then remove files of an earlier model with this name."""
        for hidden in self._final:
            with os.fdopen(self._opened.reopen(hidden), "rb") as file:
                os.fsync(file.fileno())
        previous = former_files(self._opened, self._name)
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
        """Remove the unfinished files."""
        for hidden in self._final:
            own_files.remove_file(self._folder / hidden, self._opened)
        self._opened.close()

    @property
    def _index(self) -> str:
        return f"{self._name}.index.json"


def former_files(opened: Folder, name: str) -> set[str]:
    """Return the names of the files of a model whose file is ``name``: this file, its index, and the numbered files that the index lists.

    Numbered files that the index does not list may be another model's.
    """
    shard = re.compile(rf"{re.escape(name.removesuffix('.safetensors'))}-\d{{5}}-of-\d{{5}}\.safetensors")
    index = f"{name}.index.json"
    try:
        listed = json.loads(read_text(index, LIMIT_BYTES, within=opened.descriptor))["weight_map"].values()
        shards = {file for file in listed if isinstance(file, str) and shard.fullmatch(file)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        shards = set()
    return {name, index, *shards}


def split_by_size(tensors: Sequence[D], limit: int) -> list[list[D]]:
    """Divide tensors into files of consecutive tensors, each at most ``limit`` bytes unless one tensor is larger; return at least one."""
    files: list[list[D]] = [[]]
    filled = 0
    for tensor in tensors:
        if files[-1] and filled + tensor.nbytes > limit:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.nbytes
    return files
