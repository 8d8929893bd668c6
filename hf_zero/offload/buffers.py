"""Host memory for offloaded state: page-aligned, page-locked where a device copies from it, in huge pages where the kernel has them."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from typing import Any

import torch

from hf_zero.observe import logger, warn_once
from hf_zero.offload.budget import gib

ALIGNMENT = 4096
"""Bytes that addresses, sizes and offsets of unbuffered file access are multiples of, and the size of a page."""


class HostMemory:
    """Allocates the host buffers of one engine.

    torch's own page-locked allocator rounds each size up to a power of two, half of it wasted at worst; here pages are taken from
    the kernel and registered with the driver as they are. When registering fails (a limit on locked memory) the memory stays ordinary
    and copies are slower.

    Attributes:
        nbytes: Bytes allocated so far.
        locked_bytes: How many of them are page-locked.

    Args:
        device: The training device; only one that copies from host memory needs it locked.
        pin: Lock pages.
    """

    def __init__(self, device: torch.device, pin: bool = True) -> None:
        self.nbytes = 0
        self.locked_bytes = 0
        runtime = _runtime_of(device) if pin else None
        self._locks = _Locks(device, runtime) if runtime is not None else None
        self._asks_torch = pin and runtime is None and device.type != "cpu"
        # Memory must be unlocked before the kernel takes it back.
        self._finalizer = weakref.finalize(self, self._locks.release) if self._locks is not None else None

    def empty(self, numel: int, dtype: torch.dtype, pinned: bool = False) -> torch.Tensor:
        """A (numel,) tensor whose memory begins at a page; zeros.

        Args:
            numel: Elements.
            dtype: Their type.
            pinned: The device copies from or to it.
        """
        nbytes = max(ALIGNMENT, -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT)
        if pinned and self._asks_torch and (locked := _locked_by_torch(nbytes)) is not None:
            self.nbytes += nbytes
            self.locked_bytes += nbytes
            return locked[: numel * dtype.itemsize].view(dtype)
        pages = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 2 << 20:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(pages, dtype=torch.uint8)
        self.nbytes += nbytes
        if pinned and self._locks is not None and self._locks.lock(tensor):
            self.locked_bytes += nbytes
        return tensor[: numel * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Unlocks what is locked; the tensors stay usable."""
        if self._finalizer is not None:
            self._finalizer()


def _runtime_of(device: torch.device) -> Any:
    """The run-time library of CUDA or ROCm, which can lock pages that it has not allocated; None for other devices."""
    cudart = getattr(torch.get_device_module(device), "cudart", None) if device.type != "cpu" else None
    return cudart() if cudart is not None else None


def _locked_by_torch(nbytes: int) -> torch.Tensor | None:
    """Zeros from torch's own page-locked memory, beginning at a page; None, with a warning, where there is none to be had."""
    try:
        memory = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        warn_once(f"no page-locked host memory ({error}): offloading goes on with ordinary memory, whose copies do not overlap")
        return None
    return memory[-memory.data_ptr() % ALIGNMENT :][:nbytes]


class _Locks:
    """Page locks of a driver.

    Args:
        device: Whose.
        runtime: The driver's library.
    """

    def __init__(self, device: torch.device, runtime: Any) -> None:
        self._device = device
        self._runtime = runtime
        self._held: list[torch.Tensor] = []  # kept alive until unlocked
        self._failed = False

    def lock(self, tensor: torch.Tensor) -> bool:
        if self._failed:
            return False
        status = int(self._runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        if status != 0:
            self._failed = True
            with contextlib.suppress(RuntimeError):  # the driver reports the error once more, to the next operation, whatever that is
                torch.zeros(1, device=self._device)
            warn_once(
                f"page-locking {gib(tensor.nbytes)} of host memory failed (CUDA error {status}): offloading goes on with ordinary memory, "
                "whose copies do not overlap. Raise the limit on locked memory (ulimit -l), or set pin_memory to false"
            )
            return False
        self._held.append(tensor)
        return True

    def release(self) -> None:
        if not self._held:
            return
        torch.get_device_module(self._device).synchronize(self._device)
        for tensor in self._held:
            status = int(self._runtime.cudaHostUnregister(tensor.data_ptr()))
            if status != 0:
                logger.debug("unlocking host memory failed with CUDA error %d", status)
        self._held.clear()
