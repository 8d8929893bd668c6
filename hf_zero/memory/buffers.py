"""Allocate host memory: page-locked buffers of exact size, which devices copy from and to, and ordinary memory on huge pages."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from bisect import bisect_left, insort
from collections import deque
from typing import Any

import torch

from hf_zero.observe import logger, warn_once
from hf_zero.system.planning import planning
from hf_zero.system.sizes import gib

ALIGNMENT = 4096
"""Multiple of bytes for addresses, sizes and offsets of unbuffered file access; also the size of a page."""


class HostMemory:
    """Allocator of the host buffers of one device; each buffer is returned to the kernel with its last tensor.

    torch's page-locked allocator rounds each size up to a power of two, which wastes up to half of it, and keeps freed memory. This class
    takes pages from the kernel and registers them with the driver. If registering fails (a limit on locked memory), the memory stays
    ordinary and copies are slower.

    To free a buffer that a device may still be copying, a caller waits for all work of the device: use this class for lasting buffers, and
    ``HostPool`` for temporary ones.

    Attributes:
        device: The argument ``device``.
        pin: The argument ``pin``.
        nbytes: Bytes that are allocated now, in complete pages.
        locked_bytes: Number of these bytes that are page-locked.

    Args:
        device: The training device; only one that copies from host memory needs it locked.
        pin: Whether to lock pages.
    """

    def __init__(self, device: torch.device, pin: bool = True) -> None:
        self.device = device
        self.pin = pin
        self.nbytes = 0
        self.locked_bytes = 0
        runtime = _runtime_of(device) if pin else None
        self._locks = _Locks(device, runtime) if runtime is not None else None
        self._asks_torch = pin and runtime is None and device.type != "cpu"

    def empty(self, numel: int, dtype: torch.dtype, pinned: bool = False) -> torch.Tensor:
        """Return a (numel,) tensor of zeros whose memory begins at a page.

        Args:
            numel: Number of elements.
            dtype: Dtype of the elements.
            pinned: Whether the device copies from or to it.
        """
        nbytes = max(ALIGNMENT, -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT)
        if planning():
            return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")[: numel * dtype.itemsize].view(dtype)
        if pinned and self._asks_torch and (locked := _locked_by_torch(nbytes)) is not None:
            return locked[: numel * dtype.itemsize].view(dtype)
        locks = self._locks if pinned else None
        pages = _Pages(-1, nbytes, **_kind(shared=locks is not None))
        if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 2 << 20:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages alive
        pages.enter(self, tensor.data_ptr(), locks)
        return tensor[: numel * dtype.itemsize].view(dtype)


class HostPool:
    """Pool of reusable host memory blocks, because page-locking costs more than the copies.

    A request takes the smallest free block that is large enough. It does not take one of more than twice the size while there is a
    smaller one that can be freed in exchange for a new one. So there are never more blocks than were in use at once, however sizes change.

    Args:
        memory: Allocator of the blocks.
    """

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._free: list[tuple[int, int, torch.Tensor]] = []  # (bytes, a number that breaks ties, block), ascending
        self._given: deque[torch.Tensor] = deque()  # blocks that were given back but are not in `_free` yet

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a uint8 block of at least ``nbytes``, with any content. A device may still be copying the former content."""
        while self._given:
            block = self._given.popleft()
            insort(self._free, (block.numel(), id(block), block))
        place = bisect_left(self._free, (nbytes,))
        if place < len(self._free) and (place == 0 or self._free[place][0] <= 2 * nbytes):
            return self._free.pop(place)[2]
        if place:
            del self._free[place - 1]
        return self.memory.empty(max(nbytes, 1), torch.uint8, pinned=True)

    def give(self, block: torch.Tensor) -> None:
        """Return ``block`` to the pool; may be called from any thread and from a finalizer."""
        self._given.append(block)


class _Pages(mmap.mmap):
    """Pages of the kernel that are unlocked before they are returned to it."""

    _memory: HostMemory | None = None
    _locks: _Locks | None = None

    def enter(self, memory: HostMemory, address: int, locks: _Locks | None) -> None:
        """Count the pages, and lock them if ``locks`` can."""
        self._memory, self._address, self._process, self._nbytes = memory, address, os.getpid(), len(self)
        memory.nbytes += self._nbytes
        if locks is not None and locks.lock(address, self._nbytes):
            self._locks = locks
            memory.locked_bytes += self._nbytes

    def __del__(self) -> None:
        # A forked child has the object but neither the locks nor a device; a process loses its locks at its end anyway.
        if self._memory is None or self._process != os.getpid() or sys.is_finalizing():
            return
        self._memory.nbytes -= self._nbytes
        if self._locks is not None:
            self._memory.locked_bytes -= self._nbytes
            self._locks.unlock(self._address)


def _kind(shared: bool) -> dict[str, int]:
    """Return the arguments of ``mmap`` for pages that children of this process share, or for private ones.

    [Note: locked pages and fork] A fork copies locked private pages, or moves them while the device still uses the old ones, depending on
    the kernel; shared pages stay where they are. Without a file only private memory gets huge pages, unless the machine is configured
    otherwise.
    """
    return {} if shared or not hasattr(mmap, "MAP_PRIVATE") else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}


def _runtime_of(device: torch.device) -> Any:
    """Return the run-time library of CUDA or ROCm, which can lock pages that it has not allocated; None for other devices."""
    cudart = getattr(torch.get_device_module(device), "cudart", None) if device.type != "cpu" else None
    return cudart() if cudart is not None else None


def _locked_by_torch(nbytes: int) -> torch.Tensor | None:
    """Return zeros from torch's own page-locked memory that begin at a page; None, with a warning, if there is none."""
    try:
        memory = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        warn_once(
            f"page-locked host memory could not be allocated ({error}); using ordinary memory, whose copies do not overlap with compute"
        )
        return None
    return memory[-memory.data_ptr() % ALIGNMENT :][:nbytes]


class _Locks:
    """Page locks of a driver.

    Args:
        device: Device of the driver.
        runtime: The driver's library.
    """

    def __init__(self, device: torch.device, runtime: Any) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._runtime = runtime
        self._failed = False

    def lock(self, address: int, nbytes: int) -> bool:
        """Lock the ``nbytes`` of pages at ``address``; after the driver has refused once, with a warning, always return False."""
        if self._failed:
            return False
        with self._module.device(self._device):  # the driver initialises the current device
            status = int(self._runtime.cudaHostRegister(address, nbytes, 0))
        if status == 0:
            return True
        self._failed = True
        with contextlib.suppress(RuntimeError):  # otherwise the driver reports the error again to the next operation, whichever it is
            torch.zeros(1, device=self._device)
        warn_once(
            f"page-locking {gib(nbytes)} of host memory failed (CUDA error {status}): ordinary memory is used, whose copies do not "
            "overlap. Raise the limit on locked memory (ulimit -l), or set pin_memory to false where there is such a key"
        )
        return False

    def unlock(self, address: int) -> None:
        """Unlock pages; no copy uses them any more when this returns."""
        with self._module.device(self._device):
            self._module.synchronize(self._device)
            status = int(self._runtime.cudaHostUnregister(address))
        if status != 0:
            logger.debug("unlocking host memory failed with CUDA error %d", status)
