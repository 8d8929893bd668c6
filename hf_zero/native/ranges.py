"""Work on flat ranges of host memory: cut them for threads, convert between fp32 and 16 bits, sum squares, compute checksums.

The results do not depend on the cuts. A sum of squares is in double precision, and also shows whether every element is finite. Checksums
are the CRC-32 of each chunk, as zlib computes it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from hf_zero.errors import HfZeroError
from hf_zero.native.library import ELEMENT_TYPES, announce, library, library_for, total_of
from hf_zero.native.passes import address

# Ranges begin at multiples of this many elements, so that no range of an aligned tensor begins in the middle of a cache line.
_STEP = 4096
# With fewer elements than this per thread, waking a thread takes longer than it saves.
_LEAST = 1 << 15

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_PAIRS = {
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
}
# Equal to HFZ_BLOCK: every block has a sum of its own, so that threads do not change the result.
BLOCK_NUMEL = 65536


def for_thread_ranges(count: int, threads: int, work: Callable[[int, int], None], *, step: int = _STEP) -> None:
    """Call ``work(start, stop)`` for ranges that cover ``range(count)``, on the calling thread and up to ``threads - 1`` others.

    Args:
        count: Number of elements.
        threads: Maximum number of threads; few elements use fewer.
        work: Function that must release the GIL to run in parallel, as ctypes calls do. Its error is raised here, after all calls have
            ended.
        step: Ranges begin at multiples of this many elements.
    """
    threads = max(1, min(threads, count // _LEAST))
    if threads == 1:
        work(0, count)
        return
    size = -(-count // threads)
    size += -size % step
    starts = range(0, count, size)
    futures = [_executor().submit(work, start, min(start + size, count)) for start in starts[1:]]
    try:
        work(0, size)
    finally:
        errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="hf_zero kernel")
        return _pool


def _forget() -> None:
    """Reset the pool in a forked child, which has none of its threads."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def convert(source: Tensor, target: Tensor, *, threads: int = 1) -> None:
    """Write ``source`` into ``target`` like ``target.copy_(source)``: rounded to nearest even, with denormals kept.

    All bits equal torch's except for NaN: here NaN keeps its sign and the upper bits of its payload; torch's own paths differ from
    each other.

    Args:
        source: fp32, or bf16 or fp16 with an fp32 target; contiguous, any shape.
        target: Contiguous tensor with the same number of elements.
        threads: Maximum number of threads.

    Raises:
        HfZeroError: The tensors do not fit together.
    """
    problem = (source.dtype, target.dtype) not in _PAIRS or source.numel() != target.numel()
    if problem or not (source.is_contiguous() and target.is_contiguous()) or {source.device.type, target.device.type} != {"cpu"}:
        raise HfZeroError(
            f"convert: {source.numel()} elements of {source.dtype} to {target.numel()} of {target.dtype}; fp32 to or from bf16 or fp16, "
            "of one size, contiguous and in host memory is expected"
        )
    native = library_for(source)
    if native is None:
        target.view(-1).copy_(source.detach().view(-1))
        return

    def work(start: int, stop: int) -> None:
        types = ELEMENT_TYPES[source.dtype], ELEMENT_TYPES[target.dtype]
        native.call("hfz_convert", ctypes.c_int64(stop - start), address(source, start), types[0], address(target, start), types[1])

    for_thread_ranges(source.numel(), threads, work)


def copy(target: Tensor, source: Tensor, *, threads: int = 1) -> None:
    """Write ``source`` to ``target``, bit for bit; the version counter of ``target`` does not change.

    Args:
        target: Contiguous tensor in host memory, of the size and dtype of ``source``.
        source: Contiguous tensor in host memory. Other Python threads run meanwhile.
        threads: Maximum number of threads.

    Raises:
        HfZeroError: The tensors do not fit together.
    """
    fits = source.dtype == target.dtype and source.numel() == target.numel() and source.is_contiguous() and target.is_contiguous()
    if not fits or {source.device.type, target.device.type} != {"cpu"}:
        raise HfZeroError(
            f"copy: target is {target.dtype}, {target.numel()} elements on {target.device}, source {source.dtype}, {source.numel()} on "
            f"{source.device}; both must be alike, contiguous and in host memory"
        )
    native = library()
    if native is None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        native.handle.hfz_threaded_copy(ctypes.c_int32(threads), ctypes.c_int64(source.nbytes), address(target), address(source))


def squared_norm(values: Tensor, *, threads: int = 1) -> float:
    """Return the sum of squares of fp32, bf16 or fp16 values in host memory.

    Squares of these types are exact in double and their sums cannot overflow, so the result is finite if and only if every
    element is. It does not depend on ``threads`` nor on the instruction set.

    Args:
        values: Contiguous, any shape.
        threads: Maximum number of threads.

    Raises:
        HfZeroError: The kernel does not support the dtype or layout.
    """
    if values.dtype not in ELEMENT_TYPES or not values.is_contiguous() or values.device.type != "cpu":
        raise HfZeroError(
            f"squared_norm: values are {values.dtype} on {values.device} (contiguous: {values.is_contiguous()}); "
            "fp32, bf16 or fp16, contiguous and in host memory is expected"
        )
    native = library()
    if native is None:
        announce()
        return squared_norm_reference(values)
    count = values.numel()
    arguments = (ctypes.c_int64(count), address(values), ELEMENT_TYPES[values.dtype])
    return native.sum_threaded("hfz_threaded_norm", "hfz_squared_norm", threads, -(-count // BLOCK_NUMEL), *arguments)


def squared_norm_reference(values: Tensor) -> float:
    """Compute ``squared_norm`` in plain torch."""
    pieces = values.detach().view(-1).split(BLOCK_NUMEL)
    return total_of(torch.stack([piece.double().square().sum() for piece in pieces]))


def crc32_chunks(data: memoryview, chunk_bytes: int) -> np.ndarray:
    """Return the checksum of each ``chunk_bytes`` of ``data``, the last chunk maybe shorter.

    Args:
        data: Contiguous bytes. Other threads run meanwhile.
        chunk_bytes: At least 1.

    Returns:
        (chunks,) uint32.
    """
    native = library()
    # A library of this ABI that was built before the function was added can still be used for all other kernels.
    if native is None or not native.has("hfz_crc32"):
        return crc32_chunks_reference(data, chunk_bytes)
    rows = np.frombuffer(data, dtype=np.uint8)
    sums = np.empty(-(-len(rows) // chunk_bytes), dtype=np.uint32)
    pointers = ctypes.c_void_p(rows.ctypes.data), ctypes.c_int64(chunk_bytes), ctypes.c_void_p(sums.ctypes.data)
    native.call("hfz_crc32", ctypes.c_int64(len(rows)), *pointers)
    return sums


def crc32_chunks_reference(data: memoryview, chunk_bytes: int) -> np.ndarray:
    """Compute ``crc32_chunks`` with zlib."""
    rows = memoryview(data).cast("B")
    sums = [zlib.crc32(rows[start : start + chunk_bytes]) for start in range(0, len(rows), chunk_bytes)]
    return np.array(sums, dtype=np.uint32)
