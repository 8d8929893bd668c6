"""Record the parameters that this rank has seen written since the last step, for a comparison with the other ranks."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Generic, TypeVar

Key = TypeVar("Key")


class NotedWrites(Generic[Key]):
    """Checksums of written parameters, by a key that all ranks give a parameter.

    A record depends on the values that were written and on the number of looks before: two ranks that have written the same values, the one
    before a forward and the other after it, have not done the same.
    """

    def __init__(self) -> None:
        self._sums: dict[Key, int] = {}
        self._looks: Counter[Key] = Counter()

    def __bool__(self) -> bool:
        return bool(self._sums)

    def look(self, key: Key, checksum: int | None) -> None:
        """Count a look at a parameter that all ranks take, and record its new values, if it has any, by their ``checksum``."""
        self._looks[key] += 1
        if checksum is not None:
            self._sums[key] = zlib.crc32(repr((self._sums.get(key), self._looks[key], checksum)).encode())

    def add(self, key: Key) -> None:
        """Record that a parameter was written where its values may follow a rank's data: in a forward."""
        self._sums.setdefault(key, 0)

    def record(self, key: Key) -> int | None:
        """Return the record of a parameter; None if there is none."""
        return self._sums.get(key)

    def go_back(self, key: Key, record: int | None) -> None:
        """Restore an earlier ``record`` of a parameter, because the writes since then are those of all ranks."""
        self._sums.pop(key, None)
        if record is not None:
            self._sums[key] = record

    def take(self) -> dict[Key, int]:
        """Return the records, and begin anew."""
        found, self._sums = self._sums, {}
        self._looks.clear()
        return found
