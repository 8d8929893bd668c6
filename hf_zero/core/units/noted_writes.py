"""Record the parameters that this rank has seen written since the last step, for a comparison with the other ranks."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Generic, TypeVar

Key = TypeVar("Key")


class NotedWrites(Generic[Key]):
    """Checksums of written parameters, by a key that is the same on all ranks.

    A record depends on the written values and on the number of looks before the write: two ranks that have written the same values, one
    before a forward and the other after it, have different records.
    """

    def __init__(self) -> None:
        self._sums: dict[Key, int] = {}
        self._looks: Counter[Key] = Counter()

    def __bool__(self) -> bool:
        return bool(self._sums)

    def look(self, key: Key, checksum: int | None) -> None:
        """Count a look at a parameter, which all ranks take; if it has new values, add their ``checksum`` (else None) to its record."""
        self._looks[key] += 1
        if checksum is not None:
            self._sums[key] = zlib.crc32(repr((self._sums.get(key), self._looks[key], checksum)).encode())

    def add(self, key: Key) -> None:
        """Record that a parameter was written in a forward, where the values may depend on the rank's data."""
        self._sums.setdefault(key, 0)

    def record(self, key: Key) -> int | None:
        """Return the record of a parameter; None if there is none."""
        return self._sums.get(key)

    def go_back(self, key: Key, record: int | None) -> None:
        """Restore an earlier ``record`` of a parameter, because all ranks have made the writes since then."""
        self._sums.pop(key, None)
        if record is not None:
            self._sums[key] = record

    def take(self) -> dict[Key, int]:
        """Return all records, and clear them."""
        found, self._sums = self._sums, {}
        self._looks.clear()
        return found
