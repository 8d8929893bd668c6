"""Compute the CRC-32 of each chunk of a range of bytes, with zlib's result; the native kernel runs at the speed of memory."""

from __future__ import annotations

import ctypes
import zlib

import numpy as np

from hf_zero.native.library import library


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
