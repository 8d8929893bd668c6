"""Swap files of a plan: sizes without a disk."""

from __future__ import annotations

from pathlib import Path

import torch

from hf_zero.offload.files import GRANULARITY, IoSettings, SwapFile, SwapFolder, Transfer
from hf_zero.system.planning import placed


class PlannedFolder(SwapFolder):
    """No folder."""

    def __init__(self) -> None:
        self.path = Path()

    def remove(self) -> None:
        """There is nothing to remove."""


class PlannedFile(SwapFile):
    """Regions that are tensors without values, in the tier "disk"."""

    def __init__(self) -> None:
        self.path, self.nbytes, self.settings, self.direct = Path(), 0, IoSettings(), True
        self._regions: dict[int, torch.Tensor] = {}

    def make_room(self, nbytes: int) -> None:
        """The plan says in the end whether there is room."""

    def reserve(self, nbytes: int) -> int:
        offset = self.nbytes
        self.nbytes += -(-nbytes // GRANULARITY) * GRANULARITY
        with placed("disk"):
            self._regions[offset] = torch.empty(self.nbytes - offset, dtype=torch.uint8, device="cpu")
        return offset

    def map(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        start = max(begin for begin in self._regions if begin <= offset)
        return self._regions[start][offset - start : offset - start + numel * dtype.itemsize].view(dtype)

    def read(self, offset: int, buffer: torch.Tensor) -> Transfer:
        return Transfer([])

    write = read

    def close(self) -> None:
        self._regions.clear()
