"""Host copies of a whole model on the one rank that keeps it: in memory, or in a file when memory is short."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch

from hf_zero.observe import logger

SPILL_VARIABLE = "HF_ZERO_SPILL_DIR"
_GROUP_FILES = (("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),)


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


def available_host_bytes() -> int | None:
    """Memory that this process may still take: what the system has free, within the limit of its control group; None if unknown."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    for limit, used in _GROUP_FILES:
        try:
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return min(found) if found else None


def _spill_folder(nbytes: int) -> str | None:
    """The folder for ``nbytes`` of copies, or None for memory."""
    asked = os.environ.get(SPILL_VARIABLE)
    if asked:
        os.makedirs(asked, exist_ok=True)
        return asked
    free = available_host_bytes()
    if free is None or nbytes <= free // 2:
        return None
    folder = tempfile.gettempdir()
    room = shutil.disk_usage(folder).free
    gib = 2**30
    if room < nbytes:
        logger.warning(
            "the whole model takes %.1f GiB of %.1f GiB free memory on this rank, and %s has only %.1f GiB; set %s to a folder with room",
            nbytes / gib,
            free / gib,
            folder,
            room / gib,
            SPILL_VARIABLE,
        )
        return None
    logger.info("the whole model takes %.1f GiB of %.1f GiB free memory on this rank: it is kept in files", nbytes / gib, free / gib)
    return folder
