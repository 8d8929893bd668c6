"""Host copies of a whole model on the one rank that keeps it: in memory, or in a file when memory is short."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

import torch

from hf_zero.errors import CheckpointError
from hf_zero.memory.budget import free_memory, gib
from hf_zero.observe import logger
from hf_zero.system import own_files
from hf_zero.system.folder import Folder

SPILL_VARIABLE = "HF_ZERO_SPILL_DIR"


class HostCopies:
    """Makes host copies of tensors, each with a storage of its own.

    [Note: copies in a file] ``Trainer.save_model`` and ``accelerator.get_state_dict`` want the whole model as one dict on the rank that
    writes. When it is larger than half of the memory that is free there, or when the variable HF_ZERO_SPILL_DIR names a folder,
    its tensors are mapped from files that have no name any more: the system writes their pages out when it needs the memory, and
    they are gone with the last tensor.

    Args:
        nbytes: Bytes of all copies together.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._folder = _spill_folder(nbytes)

    def take(self, value: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of ``value`` on the host.

        Raises:
            CheckpointError: The disk has no room for it. Found out before it is mapped: a page that finds none ends the process.
        """
        if self._folder is None or value.numel() == 0:
            return value.detach().to("cpu", copy=True).contiguous()
        nbytes = value.numel() * value.element_size()
        try:
            flat = _mapped(self._folder, nbytes, value.numel(), value.dtype)
        except OSError as error:
            raise CheckpointError(
                f"a tensor of {gib(nbytes)} cannot be kept in a file in {self._folder}: {error}. The whole model takes "
                f"{gib(self._nbytes)}; make room, or set {SPILL_VARIABLE} to a folder with room"
            ) from error
        return flat.view(value.shape).copy_(value.detach())


def _mapped(folder: str, nbytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A (numel,) tensor in a new file without name, for all of which the disk has room."""
    own_files.make_folders(Path(folder))
    with Folder(Path(folder)) as opened:
        name = own_files.hidden_name("spilled")
        descriptor = opened.create(name, 0o600, reads=True)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, nbytes)
            else:
                os.ftruncate(descriptor, nbytes)
            pages = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(descriptor)
            own_files.remove_file(opened.path / name, opened)
    return torch.frombuffer(pages, dtype=dtype, count=numel)


def _spill_folder(nbytes: int) -> str | None:
    """The folder for ``nbytes`` of copies, or None for memory."""
    asked = os.environ.get(SPILL_VARIABLE)
    if asked:
        return asked
    memory = free_memory()
    if memory is None or nbytes <= memory.nbytes // 2:
        return None
    folder = tempfile.gettempdir()
    room = shutil.disk_usage(folder).free
    taken = f"the whole model takes {gib(nbytes)} of {gib(memory.nbytes)} free memory on this rank"
    if room < nbytes:
        logger.warning("%s, and %s has only %s; set %s to a folder with room", taken, folder, gib(room), SPILL_VARIABLE)
        return None
    logger.info("%s: it is kept in files", taken)
    return folder
