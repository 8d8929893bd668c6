"""Host copies of a whole model on the one rank that keeps it: in memory, or in a file when memory is short."""

from __future__ import annotations

import os
import shutil
import tempfile

import torch

from hf_zero.observe import logger
from hf_zero.offload.budget import free_memory, gib

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
        self._folder = _spill_folder(nbytes)

    def take(self, value: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of ``value`` on the host."""
        if self._folder is None or value.numel() == 0:
            return value.detach().to("cpu", copy=True).contiguous()
        descriptor, path = tempfile.mkstemp(prefix="hf_zero_", dir=self._folder)
        try:
            os.ftruncate(descriptor, value.numel() * value.element_size())
            flat = torch.from_file(path, shared=True, size=value.numel(), dtype=value.dtype)
        finally:
            os.close(descriptor)
            os.unlink(path)
        return flat.view(value.shape).copy_(value.detach())


def _spill_folder(nbytes: int) -> str | None:
    """The folder for ``nbytes`` of copies, or None for memory."""
    asked = os.environ.get(SPILL_VARIABLE)
    if asked:
        os.makedirs(asked, exist_ok=True)
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
