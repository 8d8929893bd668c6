"""Compute the checksums in the index: CRC-32 of each chunk of a tensor's bytes, 8 hexadecimal digits each, concatenated."""

from __future__ import annotations

import zlib

import numpy as np

from hf_zero.checkpoint.format.names import CHUNK_BYTES
from hf_zero.native.ranges import crc32_chunks

_DIGITS = 8  # hexadecimal digits per checksum


def digits_of(data: memoryview) -> str:
    """Return the CRC-32 of ``data`` as 8 hexadecimal digits."""
    return _hex(zlib.crc32(data))


def first_damaged(data: memoryview, digits: str) -> int | None:
    """Return the offset in ``data`` of the first chunk that contradicts its checksum in ``digits``; None if all chunks match."""
    found = _joined(crc32_chunks(data, CHUNK_BYTES))
    if found == digits:
        return None
    chunks = range(0, len(found), _DIGITS)
    wrong = next((start for start in chunks if found[start : start + _DIGITS] != digits[start : start + _DIGITS]), 0)
    return wrong // _DIGITS * CHUNK_BYTES


def digits_of_range(digits: str, start: int, nbytes: int) -> str:
    """Return the checksums of bytes ``start`` to ``start + nbytes`` from a tensor's ``digits``; ``start`` is the first byte of a chunk."""
    return digits[start // CHUNK_BYTES * _DIGITS : -(-(start + nbytes) // CHUNK_BYTES) * _DIGITS]


class Checksum:
    """Running checksums of a byte stream that arrives in pieces of any length."""

    def __init__(self) -> None:
        self._digits: list[str] = []
        self._value = 0
        self._filled = 0  # bytes in the unfinished chunk

    def update(self, data: memoryview) -> None:
        """Add ``data`` to the running checksums."""
        if self._filled:
            data = self._fill(data)
        whole = len(data) // CHUNK_BYTES * CHUNK_BYTES
        if whole:
            self._digits.append(_joined(crc32_chunks(data[:whole], CHUNK_BYTES)))
        if whole < len(data):
            self._fill(data[whole:])

    def _fill(self, data: memoryview) -> memoryview:
        """Add the first bytes of ``data`` to the unfinished chunk; return the bytes that do not fit into it."""
        part, rest = data[: CHUNK_BYTES - self._filled], data[CHUNK_BYTES - self._filled :]
        self._value = zlib.crc32(part, self._value)
        self._filled += len(part)
        if self._filled == CHUNK_BYTES:
            self._close()
        return rest

    def _close(self) -> None:
        self._digits.append(_hex(self._value))
        self._value = self._filled = 0

    def digits(self) -> str:
        """Return the checksums of all chunks, 8 hexadecimal digits each; the last chunk may be shorter."""
        if self._filled:
            self._close()
        return "".join(self._digits)


def _joined(sums: np.ndarray) -> str:
    return sums.astype(">u4").tobytes().hex()


def _hex(value: int) -> str:
    return f"{value:08x}"
