"""Checksums of the values of parameters, which ranks compare."""

from __future__ import annotations

import ctypes
import zlib

import torch

from hf_zero.native.ranges import crc32_chunks

_CHUNK_BYTES = 1 << 22  # bytes of one chunk of a checksum
_PIECE = 1 << 22  # elements that a checksum widens to 64 bits at a time
_ODD = 0x1F58476D1CE4E5B9  # any odd number with as many ones as zeros


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum: tensors with other bits, or with the same elements in another order, very probably have another checksum.

    On a device it is ``sum(mixed(bits[i] * (2 * i + 1)))`` modulo 2^64: the factor depends on the position of each element, and mixing the
    high bits into the low ones, as in the finalizer of SplitMix64, makes it unlikely that changes of two elements cancel.
    """
    values = tensor.detach().contiguous().view(-1)
    if not values.numel():
        return 0
    if values.device.type == "cpu":
        # Not through ``numpy()``: after it, torch could never resize the buffer's storage.
        rows = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
        return zlib.crc32(crc32_chunks(memoryview(rows), _CHUNK_BYTES).tobytes())
    return _sum_of_places(values)


def windows(values: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """Return ``count`` evenly spaced windows of ``width`` elements of ``values`` (1D, contiguous): (count, width), a view.

    A look at windows reads little of a large tensor, whose other pages may not be in memory.
    """
    return values.as_strided((count, width), ((len(values) - width) // (count - 1), 1))


def _sum_of_places(values: torch.Tensor) -> int:
    """Return ``checksum`` of ``values``, 1D on a device; elements are widened to 64 bits piece by piece."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[values.element_size()]
    bits = values.view(whole)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE].to(torch.int64)
        places = torch.arange(start, start + len(piece), dtype=torch.int64, device=values.device)
        # Without the odd constant, elements that are 0 would contribute 0 at every position.
        piece = (piece + _ODD) * (2 * places + 1)
        piece = (piece ^ (piece >> 30)) * _ODD
        total += (piece ^ (piece >> 27)).sum(dtype=torch.int64)
    return int(total)
