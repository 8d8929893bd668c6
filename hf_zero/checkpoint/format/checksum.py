"""Checksums of the index: CRC-32 of each chunk of a tensor's bytes, as hexadecimal digits that are joined."""

from __future__ import annotations

import zlib

import numpy as np

from hf_zero.checkpoint.format.names import CHUNK_BYTES
from hf_zero.native.crc32 import crc32_chunks

_DIGITS = 8  # of a checksum


def digits_of(data: memoryview) -> str:
    """Return the checksum of all of ``data``."""
    return _hex(zlib.crc32(data))


def first_damaged(data: memoryview, digits: str) -> int | None:
    """Return the first byte of the first chunk of ``data`` that its checksum in ``digits`` does not fit; None when all fit."""
    found = _joined(crc32_chunks(data, CHUNK_BYTES))
    if found == digits:
        return None
    chunks = range(0, len(found), _DIGITS)
    wrong = next((start for start in chunks if found[start : start + _DIGITS] != digits[start : start + _DIGITS]), 0)
    return wrong // _DIGITS * CHUNK_BYTES


def digits_of_range(digits: str, start: int, nbytes: int) -> str:
    """Return the checksums of ``nbytes`` from byte ``start`` on, the first byte of a chunk, out of all checksums of a tensor."""
    return digits[start // CHUNK_BYTES * _DIGITS : -(-(start + nbytes) // CHUNK_BYTES) * _DIGITS]


class Checksum:
    """The checksums of a stream that arrives in pieces of any length."""

    def __init__(self) -> None:
        self._digits: list[str] = []
        self._value = 0
        self._filled = 0  # bytes of the chunk that has begun

    def update(self, data: memoryview) -> None:
        """Takes the next bytes."""
        if self._filled:
            data = self._fill(data)
        whole = len(data) // CHUNK_BYTES * CHUNK_BYTES
        if whole:
            self._digits.append(_joined(crc32_chunks(data[:whole], CHUNK_BYTES)))
        if whole < len(data):
            self._fill(data[whole:])

    def _fill(self, data: memoryview) -> memoryview:
        """Add bytes to the chunk that has begun; return the bytes that do not fit into it."""
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
        """Return the checksums of all chunks, the last one maybe short."""
        if self._filled:
            self._close()
        return "".join(self._digits)


def _joined(sums: np.ndarray) -> str:
    return sums.astype(">u4").tobytes().hex()


def _hex(value: int) -> str:
    return f"{value:08x}"
